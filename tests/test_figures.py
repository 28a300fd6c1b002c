"""The figures of made-up runs: every algorithm is in them, what is drawn was recorded, and little is drawn of
little."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from scipy.stats import norm

from stppo.config.files import VARIABLE
from stppo.figures.benchmarks import match_plot, match_table, with_intervals
from stppo.figures.curves import Panel, band
from stppo.figures.figures import FIGURES
from stppo.figures.style import words_of
from stppo.figures.words import compare, headline
from tests.reference import assert_shows_all
from tests.synthetic_runs import DYNAMICS, Dynamics, gather, simulate

SHOWN = ("token_ppo", "turn_ppo", "s_ppo", "st_ppo", "grpo", "mine")
MINE = Dynamics(0.5, granularity="sequence", family="mine")  # no YAML file says what it is
KEEPS, FALLS = Dynamics(0.8), Dynamics(0.8, onset=24)


def study_of(names=SHOWN, worlds=3, **options):
    known = {**DYNAMICS, "mine": MINE}
    return [
        simulate(name, world, dynamics=known[name], **options) for name in names for world in range(worlds)
    ]


def all_figures(metrics):
    return {name: plot for name, kind in FIGURES.items() if (plot := kind.draw(metrics)) is not None}


@pytest.fixture(scope="module")
def metrics():
    return gather(study_of())


@pytest.fixture(scope="module")
def plots(metrics):
    return all_figures(metrics)


# ---- what is drawn --------------------------------------------------------------------------------
def test_every_figure_is_drawn_and_every_algorithm_is_in_it(plots):
    assert list(plots) == list(FIGURES)
    for name, plot in plots.items():
        shown = set(SHOWN) if name != "learning" else {"token_ppo", "turn_ppo", "s_ppo", "st_ppo"}
        assert set(plot.data["algorithm"]) == shown and plot.title and plot.caption, name


def test_methods_that_weigh_have_no_clip_fraction_and_a_kl():
    runs = study_of(("token_ppo", "mine"))
    for record, *_ in runs[3:]:
        record["objective"] = {"clip": {"_target_": "stppo.objectives.rivals.TaperedClip", "most": 1.0}}
    metrics = gather(runs)
    drawn = FIGURES["clip_ratio"].draw(metrics).data.groupby("metric")["algorithm"].unique().map(set)
    assert drawn["clip_fraction"] == {"token_ppo"} and drawn["kl_behaviour_k3"] == {"token_ppo", "mine"}
    assert metrics.main.looks["family"].to_dict() == {"token_ppo": "token ratio", "mine": "no clip"}


def test_lines_are_means_of_the_recorded_runs(plots, metrics):
    data = plots["clip_ratio"].data.query("metric == 'clip_fraction' and algorithm == 'st_ppo'")
    expected = metrics.main.curves("st_ppo", "clip_fraction")
    np.testing.assert_allclose(data["value"].to_numpy(float), expected.mean(axis=1))
    np.testing.assert_allclose(data["low"].to_numpy(float), expected.min(axis=1))
    record = next(r for r in metrics.runs if r["algorithm"] == "st_ppo" and r["seed"] == 1)
    rows = metrics.select(metrics.iterations, record)
    np.testing.assert_allclose(expected[(1, 1)], rows["clip_fraction"])


def test_dots_of_stability_are_the_finals_with_their_outcome(plots, metrics):
    dots = plots["stability"].data.query("metric == 'final' and kind != 'mean'")
    summary = metrics.summary.set_index(["algorithm", "seed"])
    assert len(dots) == len(summary)
    for row in dots.itertuples():
        run = summary.loc[(row.algorithm, row.seed)]
        assert (row.value, row.kind) == (run["final"], run["outcome"])


def test_nothing_drawn_is_cut_off_and_texts_stand_apart(plots):
    for name in ("learning", "every_algorithm", "stability"):
        assert_shows_all(plots[name])
    for name, plot in plots.items():
        fig = plot.figure
        fig.draw_without_rendering()
        assert fig.texts[0].get_text().replace("\n", " ") == plot.title
        axes = [ax for ax in fig.axes if ax.get_visible()]
        texts = [*fig.texts, *(t for ax in axes for t in (ax.title, ax.xaxis.label, ax.yaxis.label))]
        parts = [*(text for text in texts if text.get_text().strip()), *fig.legends]
        boxes = [part.get_window_extent() for part in parts]
        for i, box in enumerate(boxes):
            assert box.x0 >= 0 and box.x1 <= fig.bbox.x1 + 1 and box.y1 <= fig.bbox.y1 + 1, (name, parts[i])
            for k, other in enumerate(boxes[:i]):
                assert not box.overlaps(other), (name, parts[i], parts[k])


def test_saved_files_are_complete_and_reproducible(plots, tmp_path):
    plot = plots["norms"]
    for folder in ("one", "two"):
        plot.save(tmp_path / folder)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == [f"norms.{suffix}" for suffix in ("csv", "png", "svg", "txt")]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert words_of(tmp_path / "one/norms.png") == (plot.title, plot.caption)


# ---- little was run --------------------------------------------------------------------------------
def test_smoke_size_runs_conclude_nothing():
    smoke = gather(study_of(worlds=1, iterations=6, every=1))
    for plot in all_figures(smoke).values():
        assert plot.title.startswith("Too short to conclude anything: 6 iterations"), plot.name
    bare = smoke.iterations.assign(clipping_bias_norm=np.nan).drop(columns="entropy")
    bare = replace(smoke, iterations=bare)
    assert "clipping_bias_norm" not in set(FIGURES["norms"].draw(bare).data["metric"])
    assert "entropy" not in set(FIGURES["signals"].draw(bare).data["metric"])


def test_one_run_of_one_algorithm_is_enough():
    assert set(all_figures(gather([simulate("gspo")]))) == set(FIGURES)


# Before the norm leaves float32: no iteration at all, or a few.
@pytest.mark.parametrize("known", [[], [1, 2, 3, 4]])
def test_a_norm_beyond_float32_spoils_no_figure(known):
    runs = study_of(("token_ppo", "st_ppo"), worlds=2)
    for _, updates, _ in runs:
        updates.loc[~updates["iteration"].isin(known), "clipping_bias_norm"] = np.inf
    drawn = {name: plot.data for name, plot in all_figures(gather(runs)).items()}
    bias = drawn["norms"].query("metric == 'clipping_bias_norm'")
    assert sorted(set(bias["iteration"])) == known and np.isfinite(drawn["norms"]["value"]).all()


# ---- curves and bands ------------------------------------------------------------------------------
def test_success_counts_as_zero_after_a_non_finite_stop():
    stopped = simulate("st_ppo", 0, iterations=10, non_finite=True)
    found = gather([stopped, simulate("st_ppo", 1)]).all.curves("st_ppo", "success")
    assert (found[(0, 0)][found.index > 10] == 0).all() and found.index.max() == 40
    assert found[(0, 0)][10] > 0.3
    often = simulate("token_ppo", 1)
    between = often[2].assign(iteration=often[2]["iteration"] + 1)
    often = (often[0], often[1], pd.concat([often[2], between]))
    found = gather([stopped, often]).all.curves("st_ppo", "success")
    early = found.loc[:10, (0, 0)].dropna()
    assert (early > 0).all(), "no 0 where another arm is evaluated and this has not stopped"


def columns(*keys):
    return pd.MultiIndex.from_tuples(keys, names=["world", "seed"])


def test_bands_are_the_range_of_few_worlds_and_intervals_of_many():
    rng = np.random.default_rng(0)

    def drawn(n):
        each = columns(*((w, w) for w in range(n)))
        values = pd.DataFrame(rng.normal(0.5, 0.1, (4, n)), index=[0, 2, 4, 6], columns=each)
        return values, band(values, Panel("success", share=True))

    values, few = drawn(4)
    np.testing.assert_allclose(few[["low", "high"]], np.c_[values.min(axis=1), values.max(axis=1)])
    values, many = drawn(12)
    assert (many["low"] > values.min(axis=1).to_numpy()).all() and (many["low"] < many["value"]).all()
    assert drawn(1)[1][["low", "high"]].isna().all(axis=None)


# ---- titles: true of the runs, whatever they show ---------------------------------------------------
def title_of(name, token, turn, worlds=12):
    pairs = (("token_ppo", token), ("st_ppo", turn))
    runs = [simulate(algo, world, dynamics=what) for algo, what in pairs for world in range(worlds)]
    return FIGURES[name].draw(gather(runs)).title


def test_the_title_compares_the_ends_the_higher_first():
    assert re.fullmatch(r"ST-PPO ends at 0\.[78]\d, token PPO at 0\.0\d", title_of("learning", FALLS, KEEPS))
    assert re.fullmatch(r"Token PPO ends at 0\.[78]\d, ST-PPO at 0\.0\d", title_of("learning", KEEPS, FALLS))
    assert title_of("learning", KEEPS, KEEPS).endswith("(no clear difference)")


@pytest.mark.parametrize("worlds", [1, 3, 5])
def test_few_worlds_are_too_few_to_tell(worlds):
    for name in ("learning", "stability", "clip_ratio", "signals"):
        assert f"{worlds} world" in title_of(name, FALLS, KEEPS, worlds)[:8], name


def test_differences_are_clear_only_with_enough_worlds_and_looks():
    one, other = {w: 0.5 + 0.01 * w for w in range(6)}, {w: 0.4 for w in range(6)}
    assert compare(one, other).clear and not compare(one, other, looks=10).clear, "ten looks need more worlds"
    assert compare(one, {9: 0.1}).n_worlds == 0 and not compare(one, {9: 0.1}).clear
    assert not compare(one, {w: 0.5 + 0.01 * (5 - w) for w in range(6)}).clear


def test_titles_of_all_algorithms_count():
    better, equal, worse = Dynamics(0.8), Dynamics(0.5), Dynamics(0.1)
    arms = {"token_ppo": equal, "turn_ppo": better, "st_ppo": better, "gspo": worse}
    metrics = gather([simulate(name, world, dynamics=d) for name, d in arms.items() for world in range(12)])
    assert FIGURES["stability"].draw(metrics).title == (
        "2 of 3 algorithms end clearly above token PPO, 1 clearly below"
    )
    assert FIGURES["every_algorithm"].draw(gather(study_of(worlds=4))).title == (
        "5 of 6 algorithms learn in most runs; 2 of them then crash in most"
    )


def test_the_main_regime_has_most_algorithms_and_the_headline_four_at_most(metrics):
    runs = [simulate(name, 0, "SMALL") for name in ("token_ppo", "st_ppo")] + [
        simulate("token_ppo", 0, "A", 90)
    ]
    assert set(gather(runs).main.runs["regime"]) == {"SMALL"}
    assert headline(metrics.main) == ["token_ppo", "turn_ppo", "s_ppo", "st_ppo"]
    assert headline(gather(study_of(("grpo", "mine"))).main) == ["grpo", "mine"]


def test_the_headline_shows_algorithms_with_a_file_of_ones_own(tmp_path, monkeypatch):
    own = [f"own_{letter}" for letter in "abcdefg"]
    for name in own:
        file = tmp_path / "algorithm" / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"defaults: [turn_ppo]\nname: {name}\n")
    monkeypatch.setenv(VARIABLE, str(tmp_path))

    def drawn(*names):
        runs = gather([simulate(name, world, dynamics=KEEPS) for name in names for world in range(2)])
        return set(FIGURES["learning"].draw(runs).data["algorithm"])

    four = ("token_ppo", "turn_ppo", "s_ppo", "st_ppo")
    assert drawn(*four, "grpo", "own_a") == {*four, "own_a"}
    assert drawn(*four, *own) == {"token_ppo", "st_ppo", *own}, "two of the four leave room"


# ---- results on benchmarks -------------------------------------------------------------------------


def results(*rows):
    names = ["agent", "benchmark", "n_questions", "em", "f1"]
    return pd.DataFrame([(*row, 0.123) for row in rows], columns=names)


TWO = results(
    ("ours", "nq", 40, 0.25),
    ("ours", "medqa", 20, 0.0),
    ("script", "nq", 40, 1.0),
    ("script", "medqa", 20, 0.5),
)


def test_intervals_are_the_solutions_of_the_score_test():
    found, z = with_intervals(TWO), norm.ppf(0.975)
    for _, row in found.iterrows():
        n, share = row["n_questions"], row["em"]
        centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5
        assert row["low"] == pytest.approx(centre - half, abs=1e-9)
        assert row["high"] == pytest.approx(centre + half, abs=1e-9)
    assert (found["high"] > found["low"]).all(), "also at 0 and 1"


def test_table_has_an_agent_a_column_and_a_mean_where_all_was_played():
    table = match_table(pd.concat([TWO, results(("new", "nq", 40, 0.5))]))
    assert list(table) == ["benchmark", "questions", "ours", "script", "new"]
    assert table["benchmark"].tolist() == ["nq", "medqa", "mean"]
    assert table["ours"].tolist()[1:] == ["0.000 [0.000, 0.161]", "0.125"]
    assert table["new"].tolist()[1:] == ["", ""], "half of the benchmarks have no mean beside the whole"


def test_figure_shows_every_share_with_its_interval():
    plot = match_plot(TWO, "name", "title")
    (axes,) = plot.figure.axes
    points = {
        line.get_label(): sorted(line.get_xdata())
        for line in axes.lines
        if line.get_label() in ("ours", "script")
    }
    assert points == {"ours": [0.0, 0.25], "script": [0.5, 1.0]}
    assert len({to_hex(line.get_color()) for line in axes.lines if line.get_label() in points}) == 2
    pd.testing.assert_frame_equal(plot.data, with_intervals(TWO)[list(plot.data)])
    assert "20 to 40 questions" in plot.caption
