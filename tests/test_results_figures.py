import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stppo.figures import curves, findings, granularity
from stppo.figures.curves import Panel, band, curves_of, source_of
from stppo.figures.figures import FIGURES
from tests.reference import assert_shows_all
from tests.synthetic_runs import DYNAMICS, START, Dynamics, gather, simulate

ITERATIONS = 40
SHOWN = ("token_ppo", "turn_ppo", "s_ppo", "st_ppo", "grpo", "mine")
MINE = Dynamics(0.5, granularity="sequence", family="mine")
PER_ALGORITHM = ("every_algorithm", "stability", "clip_ratio", "norms", "signals", "trends")


def study_of(names=SHOWN, worlds=3, **options):
    known = {**DYNAMICS, "mine": MINE}
    return [
        simulate(name, world, dynamics=known[name], **options) for name in names for world in range(worlds)
    ]


def all_figures(metrics):
    return [plot for kind in FIGURES.values() if (plot := kind.draw(metrics)) is not None]


@pytest.fixture(scope="module")
def metrics():
    runs = study_of()
    for rate, level in ((1e-4, 0.6), (1e-3, 0.1)):
        runs += [
            simulate(name, world, f"LR{rate}", dynamics=Dynamics(level), learning_rate=rate)
            for name in ("token_ppo", "st_ppo")
            for world in range(3)
        ]
    return gather(runs)


@pytest.fixture(scope="module")
def plots(metrics):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "DRAWS", 100)
        return {plot.name: plot for plot in all_figures(metrics)}


# ---- the figures ----------------------------------------------------------------------------------
def test_every_figure_is_drawn_and_has_a_group(plots):
    elsewhere = (  # drawn in tests of their own
        "each_seed",
        "settings_map",
        "one_change",
        "beginnings",
        "early_warning",
    )
    assert list(plots) == [name for name in FIGURES if name not in elsewhere]
    assert {kind.group for kind in FIGURES.values()} == {"what happens", "how much it tolerates", "why"}


def test_every_algorithm_is_in_every_figure_of_its_kind(plots):
    for name in PER_ALGORITHM:
        assert set(plots[name].data["algorithm"]) == set(SHOWN), name


def test_of_many_algorithms_those_with_a_file_are_shown():
    names = ["token_ppo", "st_ppo", *(f"arm{i}" for i in range(11))]
    many = gather([simulate(name, world, dynamics=MINE) for name in names for world in range(2)])
    assert many.methods("A") == ["st_ppo", "token_ppo"] and len(many.algorithms("A")) == 13
    few = gather([simulate(name, dynamics=MINE) for name in names[:12]])
    assert few.methods("A") == few.algorithms("A")


def test_methods_that_weigh_have_no_clip_fraction_and_a_kl():
    runs = study_of(("token_ppo", "mine"))
    for record, *_ in runs[3:]:
        record["objective"] = {"clip": {"_target_": "stppo.objectives.rivals.TaperedClip", "most": 1.0}}
    plot = FIGURES["clip_ratio"].draw(gather(runs))
    drawn = plot.data.groupby("metric")["algorithm"].unique().map(set)
    assert drawn["clip_fraction"] == {"token_ppo"} and drawn["kl_behaviour_k3"] == {"token_ppo", "mine"}


def test_the_headline_has_four_lines_at_most(plots):
    assert set(plots["learning"].data["algorithm"]) == {"token_ppo", "turn_ppo", "s_ppo", "st_ppo"}


def test_no_panel_has_more_than_four_lines_in_colour(plots, metrics):
    colors = {metrics.look(name).color for name in SHOWN}
    for name in ("learning", "clip_ratio", "norms", "signals", "every_algorithm"):
        for ax in plots[name].figure.axes:
            drawn = {line.get_color() for line in ax.lines if len(line.get_xdata()) > 2}
            assert len(drawn & colors) <= 4, name


def test_plotted_lines_are_the_recorded_ones(plots, metrics):
    data = plots["clip_ratio"].data.query("metric == 'clip_fraction' and algorithm == 'st_ppo'")
    expected = curves_of(metrics, "A", "st_ppo", "clip_fraction")
    first, middle, last = np.sort(
        expected.to_numpy(), axis=1
    ).T  # of three worlds: the middle half of their weight
    np.testing.assert_allclose(data["value"].to_numpy(float), (first + 4 * middle + last) / 6)
    np.testing.assert_allclose(data["low"].to_numpy(float), expected.min(axis=1))
    record = next(r for r in metrics.runs if r["algorithm"] == "st_ppo" and r["seed"] == 1)
    rows = metrics.select(metrics.iterations, record)
    np.testing.assert_allclose(expected[(1, 1)], rows["clip_fraction"])


def test_dots_of_stability_are_the_finals_with_their_outcome(plots, metrics):
    dots = plots["stability"].data.query("metric == 'final' and kind != 'mean'")
    summary = metrics.summary[metrics.summary["regime"] == "A"].set_index(["algorithm", "seed"])
    assert len(dots) == len(summary)
    for row in dots.itertuples():
        run = summary.loc[(row.algorithm, row.seed)]
        assert (row.value, row.kind) == (run["final"], run["outcome"])


def test_tolerance_varies_the_learning_rate_alone(plots):
    data = plots["tolerance"].data
    assert set(data["varied"]) == {"learning_rate"} and set(data["algorithm"]) == {"token_ppo", "st_ppo"}
    assert sorted(set(data["setting"])) == [1e-4, 3.5e-4, 1e-3]
    assert (data["worlds"] == 3).all()


def test_norms_that_are_another_and_divisors_of_one_are_not_drawn(plots):
    drawn = plots["norms"].data
    assert "ppo_gradient_norm" not in set(drawn["metric"]), "it equals the gradient norm in every run"
    assert set(drawn.query("metric == 'stabilizer_divisor'")["algorithm"]) == {"s_ppo", "st_ppo"}


def test_logarithmic_axes_keep_to_the_data(plots):
    axes = [ax for ax in plots["clip_ratio"].figure.axes if ax.get_yscale() == "log"]
    assert axes, "the KL is drawn on logarithms"
    data = plots["clip_ratio"].data.query("metric == 'kl_behaviour_k3'")["value"]
    assert data.min() < 1e-12
    for ax in axes:
        low, high = ax.get_ylim()
        assert low > 1e-3 and data.max() < high < 10 * data.max()


def test_granularity_joins_what_differs_in_it_alone(metrics, plots):
    families = granularity.families(metrics, "A")
    assert [list(family.values()) for family in families] == [["token_ppo", "turn_ppo"], ["s_ppo", "st_ppo"]]
    assert set(plots["granularity"].data["algorithm"]) == {"token_ppo", "turn_ppo", "s_ppo", "st_ppo"}


def test_runs_without_configs_have_no_granularity(metrics):
    bare = [{k: v for k, v in r.items() if k not in ("objective", "training")} for r in metrics.runs]
    assert granularity.granularity(replace(metrics, runs=bare)) is None


def test_trends_find_the_growth_of_the_bias(plots):
    found = plots["trends"].data.query("metric == 'clipping_bias_norm'").set_index("algorithm")
    assert found["factor_per_10"].between(1.2, 1.5).all(), "made to grow by exp(0.3) in ten iterations"
    assert (found["r_squared"] > 0.5).all()


def test_nothing_drawn_is_cut_off(plots):
    for name in ("learning", "every_algorithm", "stability", "tolerance", "granularity"):
        assert_shows_all(plots[name])


def test_heads_of_figures_do_not_overlap_and_stay_within(plots):
    for name, plot in plots.items():
        fig = plot.figure
        fig.draw_without_rendering()
        parts = [*fig.texts, *fig.legends]
        assert [text.get_text().replace("\n", " ") for text in fig.texts][0] == plot.title
        parts += [
            t for ax in fig.axes if ax.get_visible() for t in (ax.title, ax.xaxis.label, ax.yaxis.label)
        ]
        boxes = [
            (part, part.get_window_extent())
            for part in parts
            if getattr(part, "get_text", lambda: "x")().strip()
        ]
        for i, (one, box) in enumerate(boxes):
            assert box.x0 >= 0 and box.x1 <= fig.bbox.x1 + 1 and box.y0 >= 0 and box.y1 <= fig.bbox.y1 + 1, (
                name,
                one,
            )
            for other, other_box in boxes[i + 1 :]:
                assert not box.overlaps(other_box), (name, one, other)


def test_sources_name_model_world_and_runs(plots):
    for name, plot in plots.items():
        source = plot.figure.texts[2].get_text()
        for words in ("tiny policy (0.12 M)", "synthetic world", "3 worlds", "40 iterations"):
            assert words in source.replace("\n", " "), name


def test_sizes_of_policies_are_numbers_in_order():
    runs = [simulate("st_ppo", seed) for seed in range(3)]
    for (record, *_), size in zip(runs, (1_543_000_000, 9_100_000, 134_500_000), strict=True):
        record["policy_parameters"] = size
    assert source_of(gather(runs), ["A"], ["st_ppo"]).startswith("tiny policy (9.1–1500 M)")


def test_saved_files_are_complete_and_reproducible(plots, tmp_path):
    plot = plots["granularity"]
    for folder in ("one", "two"):
        plot.save(tmp_path / folder)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == [f"granularity.{suffix}" for suffix in ("csv", "png", "svg", "txt")]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert (tmp_path / "one/granularity.txt").read_text().splitlines() == [plot.title, plot.caption]


def test_recorded_labels_are_the_ones_shown(metrics):
    runs = [{**r, "label": "my very own"} if r["algorithm"] == "mine" else r for r in metrics.runs]
    labelled = replace(metrics, runs=runs)
    ticks = FIGURES["stability"].draw(labelled).figure.axes[0].get_yticklabels()
    assert "my very own" in [tick.get_text() for tick in ticks]


# ---- little was run --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def smoke():
    return gather(study_of(worlds=1, iterations=6, every=1))


def test_smoke_size_runs_conclude_nothing(smoke):
    for plot in all_figures(smoke):
        assert plot.title.startswith("Too short to conclude anything: 6 iterations"), plot.name
    assert FIGURES["tolerance"].draw(smoke) is None


def test_one_run_of_one_algorithm_is_enough():
    drawn = {plot.name for plot in all_figures(gather([simulate("st_ppo")]))}
    assert drawn == set(FIGURES) - {
        "each_seed",
        "tolerance",
        "settings_map",
        "one_change",
        "beginnings",
        "early_warning",
        "granularity",
    }


@pytest.mark.parametrize("name", ["learning", "every_algorithm"])
def test_a_caption_speaks_of_thin_lines_where_there_are_some(name):
    said = [
        "Thin:" in FIGURES[name].draw(gather(study_of(("token_ppo", "st_ppo"), worlds))).caption
        for worlds in (2, 3)
    ]
    assert said == [False, True]


def test_few_seeds_of_one_world_are_drawn_run_by_run_and_not_averaged():
    draw = FIGURES["each_seed"].draw
    names = ("token_ppo", "turn_ppo", "grpo")
    assert draw(gather(study_of(names))) is None, "each seed is a world of its own"
    runs = study_of(names)[:-1]  # GRPO lacks the last seed
    for record, *_ in runs:
        record["world_seed"] = 0
    metrics = gather(runs)
    plot, ends = (
        draw(metrics),
        metrics.summary.pivot(index="seed", columns="algorithm", values="greedy_final"),
    )
    assert len(plot.figure.axes) == 3 * 3 and set(plot.data["metric"]) >= {"success", "success_greedy"}
    assert plot.data.groupby("algorithm")["seed"].nunique().to_dict() == dict(
        zip(names, (3, 3, 2), strict=True)
    )
    for name, label in (("token_ppo", "token PPO"), ("turn_ppo", "Turn-PPO")):
        a, b, c = (f"{end:.2f}" for end in ends[name])
        assert f"with {label} at {a}, {b} and {c}" in plot.title
    late = study_of((*names[:2], "st_ppo"))[:-1]  # the pair of other titles, but a seed is not run yet
    for record, *_ in late:
        record["world_seed"] = 0
    assert "with Turn-PPO at" in draw(gather(late)).title
    short = gather([({**record, "iterations": 6}, *rows) for record, *rows in runs])
    assert draw(short).title.startswith("Too short to conclude anything")
    last = plot.data.query("algorithm == 'turn_ppo' and seed == 1 and metric == 'success_greedy'")
    run = metrics.evaluations.query("algorithm == 'turn_ppo' and seed == 1 and temperature == 0")
    assert last["value"].tolist() == run.sort_values("iteration")["success"].tolist()
    valid = plot.data.query("algorithm == 'turn_ppo' and seed == 1 and metric == 'valid_format_rate'")
    trained = metrics.iterations.query("algorithm == 'turn_ppo' and seed == 1").sort_values("iteration")
    assert valid["value"].iloc[-1] == pytest.approx(trained["valid_format_rate"].tail(5).mean())


def test_columns_that_were_never_recorded_leave_no_panel(smoke):
    bare = replace(
        smoke, iterations=smoke.iterations.assign(clipping_bias_norm=np.nan).drop(columns="entropy")
    )
    assert "clipping_bias_norm" not in set(FIGURES["norms"].draw(bare).data["metric"])
    assert "entropy" not in set(FIGURES["signals"].draw(bare).data["metric"])


# Before the norm leaves float32: no iteration at all, too few for a trend.
@pytest.mark.parametrize("known", [[], [1, 2, 3, 4]])
def test_a_norm_beyond_float32_spoils_no_figure(known):
    runs = study_of(("token_ppo", "st_ppo"), worlds=2)
    for _, updates, _ in runs:
        updates.loc[~updates["iteration"].isin(known), "clipping_bias_norm"] = np.inf
    drawn = {plot.name: plot.data for plot in all_figures(gather(runs))}
    bias = drawn["norms"].query("metric == 'clipping_bias_norm'")
    assert sorted(set(bias["iteration"])) == known and np.isfinite(drawn["norms"]["value"]).all()
    assert set(drawn["trends"]["metric"]) == {"gradient_norm"}


# ---- curves and bands ------------------------------------------------------------------------------
def test_success_counts_as_zero_after_a_non_finite_stop():
    stopped = simulate("st_ppo", 0, iterations=10, non_finite=True)
    metrics = gather([stopped, simulate("st_ppo", 1)])
    found = curves_of(metrics, "A", "st_ppo", "success")
    assert (found[(0, 0)][found.index > 10] == 0).all() and found.index.max() == 40
    assert found[(0, 0)][10] > 0.3
    often = simulate("token_ppo", 1)
    between = often[2].assign(iteration=often[2]["iteration"] + 1)
    often = (often[0], often[1], pd.concat([often[2], between]))
    found = curves_of(gather([stopped, often]), "A", "st_ppo", "success")
    assert (found.loc[:10, (0, 0)].dropna() > 0).all(), (
        "no 0 where another arm is evaluated and this has not stopped"
    )


def test_bands_are_the_range_of_few_worlds_and_intervals_of_many():
    rng = np.random.default_rng(0)
    panel = Panel("success", "", share=True)

    def drawn(n):
        columns = pd.MultiIndex.from_tuples([(w, w) for w in range(n)], names=["world", "seed"])
        values = pd.DataFrame(rng.normal(0.5, 0.1, (4, n)), index=[0, 2, 4, 6], columns=columns)
        return values, band(values.rename_axis("iteration"), panel)

    values, few = drawn(4)
    np.testing.assert_allclose(few[["low", "high"]], np.c_[values.min(axis=1), values.max(axis=1)])
    values, many = drawn(12)
    assert (many["low"] > values.min(axis=1).to_numpy()).all() and (many["low"] < many["value"]).all()
    _, one = drawn(1)
    assert one[["low", "high"]].isna().all(axis=None)


def test_runs_of_one_world_are_one_world():
    columns = pd.MultiIndex.from_tuples([(0, 0), (0, 1), (1, 2)], names=["world", "seed"])
    values = pd.DataFrame([[0.0, 0.2, 0.5]], index=[0], columns=columns)
    found = band(values.rename_axis("iteration"), Panel("success", "")).iloc[0]
    assert found["value"] == pytest.approx(0.3) and (found["runs"], found["worlds"]) == (3, 2)


# ---- titles: true of the runs, whatever they show ---------------------------------------------------
KEEPS, FALLS = Dynamics(0.8), Dynamics(0.8, onset=24)
STALLS = Dynamics(0.2)


def two(token, turn, worlds=12, **options):
    pairs = (("token_ppo", token), ("st_ppo", turn))
    return gather(
        simulate(name, world, dynamics=dynamics, **options)
        for name, dynamics in pairs
        for world in range(worlds)
    )


def learning_title(metrics):
    return findings.learning(metrics, "A", metrics.algorithms())


def test_title_of_a_gain_lost_and_of_the_opposite():
    lost, kept = learning_title(two(FALLS, KEEPS)), learning_title(two(KEEPS, FALLS))
    assert re.search(r"Token PPO (loses|keeps -?\d %).*ST-PPO keeps 9\d %", lost)
    assert re.search(r"Token PPO keeps 9\d %.*ST-PPO loses", kept)


def test_title_gives_the_recorded_share_of_the_gain():
    metrics = two(Dynamics(0.8, onset=24, recovers=True), Dynamics(0.8))
    part = metrics.summary.assign(
        final=metrics.summary["final"] - 0.2 * (metrics.summary["algorithm"] == "token_ppo")
    )
    part["gain_kept"] = (part["final"] - part["start"]) / (part["peak"] - part["start"])
    metrics.__dict__["summary"] = part
    kept = part.groupby("algorithm")["gain_kept"].mean()
    title = learning_title(metrics)
    assert (
        f"keeps {100 * kept['token_ppo']:.0f} %" in title and f"ST-PPO {100 * kept['st_ppo']:.0f} %" in title
    )


def test_title_of_no_difference_says_so():
    assert learning_title(two(KEEPS, KEEPS)).startswith("No clear difference")


def test_title_of_one_that_learns_counts_runs():
    assert learning_title(two(STALLS, KEEPS)) == "ST-PPO learns in 12 of 12 runs, token PPO in 0 of 12 runs"
    assert learning_title(two(KEEPS, STALLS)) == "Token PPO learns in 12 of 12 runs, ST-PPO in 0 of 12 runs"


def test_title_of_none_that_learns():
    title = learning_title(two(STALLS, Dynamics(0.05)))
    assert title.startswith(f"Neither learns (from {START:.2f}") and "no clear" not in title


def test_title_of_one_world_in_which_none_learns():
    assert learning_title(two(STALLS, STALLS, 1)).endswith("; one world, too few to tell")


def test_no_line_parts_a_number_from_its_percent_sign():
    for length in range(60, 80):  # so that the first line ends before, in and behind it
        fig = curves.page("x" * length + " 15 % and 20 % more", "", "", 2.0)
        assert not re.search(r"\n%", fig.texts[0].get_text())


def test_title_of_both_that_keep_what_they_gain_compares_the_ends():
    title = learning_title(two(Dynamics(0.5), KEEPS))
    assert re.fullmatch(r"ST-PPO ends at 0\.[78]\d, token PPO at 0\.[45]\d", title)


@pytest.mark.parametrize("worlds", [1, 3, 6])
def test_few_worlds_are_too_few_to_tell(worlds):
    assert "too few to tell" in learning_title(two(FALLS, KEEPS, worlds))


def test_title_of_a_single_algorithm():
    metrics = gather(simulate("gspo", world, dynamics=FALLS) for world in range(8))
    assert learning_title(metrics) == "GSPO learns in 8 of 8 runs and collapses in 8"


def test_every_algorithm_title_counts_and_names():
    metrics = gather(study_of(worlds=4))
    assert findings.every_algorithm(metrics, "A") == (
        "5 of 6 algorithms learn in most runs; token PPO and S-PPO then crash in most"
    )
    metrics = two(STALLS, STALLS)
    assert findings.every_algorithm(metrics, "A").startswith("None of 2 algorithms learns")


def test_stability_title_counts_clear_differences():
    better, equal, worse = Dynamics(0.8), Dynamics(0.5), Dynamics(0.1)
    arms = {"token_ppo": equal, "turn_ppo": better, "st_ppo": better, "gspo": worse}
    runs = [simulate(name, world, dynamics=d) for name, d in arms.items() for world in range(12)]
    assert (
        findings.stability(gather(runs), "A")
        == "2 of 3 algorithms end clearly above token PPO, 1 clearly below"
    )
    same = [simulate(name, world, dynamics=equal) for name in arms for world in range(12)]
    assert findings.stability(gather(same), "A").startswith("No clear difference")


def test_clip_title_tells_a_rise_from_none():
    title = findings.trend_of(
        two(Dynamics(0.6, clip=0.1, clip_growth=0.03), Dynamics(0.6, clip=0.3)),
        "A",
        "clip_fraction",
        "clip fraction",
        "{:.0f}",
        " %",
        100,
    )
    assert re.match(
        r"Token PPO's clip fraction rises from 1\d to [23]\d %, ST-PPO's (stays|shows no clear trend)", title
    )


def test_granularity_title_sees_both_directions():
    def title(fine, coarse):
        runs = []
        for family in ("PPO", "GRPO"):
            for rung, level in (("token", fine), ("turn", coarse)):
                dynamics = Dynamics(level, granularity=rung, family=family)
                runs += [
                    simulate(f"{rung}_{family.lower()}", world, dynamics=dynamics) for world in range(12)
                ]
        metrics = gather(runs)
        return findings.coarser(metrics, "A", granularity.families(metrics, "A"))

    assert title(0.4, 0.8) == "A coarser ratio ends higher in 2 of 2 comparisons, clearly higher in 2"
    assert title(0.8, 0.4) == "A coarser ratio ends higher in none of 2 comparisons, clearly lower in 2"
    assert title(0.6, 0.6).startswith("No clear difference")


def test_a_run_that_stops_at_once_is_a_collapse_and_not_too_short():
    runs = [simulate("token_ppo", w, iterations=5, every=1, non_finite=True) for w in range(8)]
    assert "collapses in 8" in learning_title(gather(runs))


def test_main_regime_has_most_algorithms():
    runs = [simulate(name, 0, "SMALL") for name in ("token_ppo", "st_ppo")] + [
        simulate("token_ppo", 0, "A", 90)
    ]
    assert findings.main_regime(gather(runs)) == "SMALL"


@pytest.mark.parametrize(("notebook", "why"), [("20-what-happened", False), ("21-why", True)])
def test_the_notebooks_draw_no_figure_twice(notebook, why):
    cells = json.loads(Path(f"notebooks/{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    named = set(re.findall(r"figures\.(\w+)\(metrics\)", text))
    assert named and named <= {name for name, kind in FIGURES.items() if (kind.group == "why") == why}
    assert named == set(re.search(r'above = "(.*)"\.split', text)[1].split())
