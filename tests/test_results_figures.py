from dataclasses import replace
from io import BytesIO

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from stppo.results import figures
from stppo.results.captions import describe_regime, describe_setting
from stppo.results.drawing import curves_of
from stppo.results.runs import collect, load_metrics
from stppo.results.style import LOOKS, in_order, look, publish
from tests.reference import assert_as_committed, assert_shows_all, references
from tests.synthetic_runs import make_run, make_study

FAST = 50


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    root = tmp_path_factory.mktemp("study")
    return collect(make_study(root / "runs", seeds=3), root / "metrics")


@pytest.fixture(scope="module")
def plots(metrics):
    return {plot.name: plot for plot in figures.all_figures(metrics, FAST)}


def test_every_figure_of_the_study_is_drawn(plots):
    names = "overview collapse diagnostics_A diagnostics_LONG stability clip_ratio so_grpo granularity"
    assert list(plots) == names.split()


def test_captions_say_what_was_measured(plots):
    for name, plot in plots.items():
        for words in (
            "not the paper's curves",
            "tiny policy",
            "0.12 M",
            "synthetic world",
            "staleness 2",
            "2 seeds" if "LONG" in name else "3 seeds",
        ):
            assert words in plot.caption, (name, words)
    assert "too narrow" in plots["stability"].caption
    assert "bootstrap" not in plots["collapse"].caption, "it draws seeds, not means"


def test_plotted_seeds_are_the_recorded_ones(metrics, plots):
    data = plots["clip_ratio"].data
    rows = data.query("metric == 'clip_fraction' and algorithm == 'st_ppo' and regime == 'A' and seed == 1")
    expected = curves_of(metrics, "A", "st_ppo", "clip_fraction")[1]
    np.testing.assert_allclose(rows["value"].to_numpy(float), expected.to_numpy())
    mean = data.query(
        "metric == 'clip_fraction' and algorithm == 'st_ppo' and regime == 'A' and kind == 'iqm'"
    )
    curves = curves_of(metrics, "A", "st_ppo", "clip_fraction")
    np.testing.assert_allclose(mean["value"].to_numpy(float), curves.mean(axis=1))
    assert (mean["n_seeds"] == 3).all()


def test_collapse_marks_lie_at_the_verdicts(metrics, plots):
    axes = plots["collapse"].figure.axes[0]
    marks = sorted(line.get_xdata()[0] for line in axes.lines if line.get_marker() == "X")
    verdicts = [v for (r, a, _), v in metrics.collapses.items() if (r, a) == ("A", "token_ppo")]
    assert marks == sorted(v.iteration for v in verdicts)


def test_advantage_variance_is_the_square_of_the_raw_deviation(metrics):
    variance = curves_of(metrics, "A", "token_ppo", "advantage_variance")
    deviation = curves_of(metrics, "A", "token_ppo", "advantage_raw_std")
    np.testing.assert_allclose(variance, deviation**2)


def test_trends_are_those_of_the_data(plots):
    trends = plots["diagnostics_A"].tables["trends"].set_index(["metric", "algorithm"])
    assert len(trends) == 12
    bias = trends.loc[("clipping_bias_norm", "st_ppo")]
    assert bias["log_slope"] == pytest.approx(0.03, abs=0.01), "the made-up runs grow by 3 % an iteration"
    assert trends.loc[("gradient_norm", "token_ppo"), "log_slope"] > 0.03


def test_colours_are_fixed_distinct_and_used():
    colors = [its.color for its in LOOKS.values()]
    assert len(set(colors)) == len(colors)
    assert look("brand_new") == look("brand_new")
    assert in_order(["zeta", "st_ppo", "token_ppo"]) == ["token_ppo", "st_ppo", "zeta"]


def test_lines_wear_their_algorithms_colour(plots):
    for plot in plots.values():
        for legend in plot.figure.legends:
            for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True):
                owner = [its for its in LOOKS.values() if its.label == text.get_text()]
                assert not owner or line.get_color() == owner[0].color


def test_texts_of_a_figure_do_not_overlap(plots):
    for name, plot in plots.items():
        fig = plot.figure
        fig.draw_without_rendering()
        texts = [fig._suptitle] if fig._suptitle else []
        texts += [
            t
            for ax in fig.axes
            if ax.get_visible()
            for t in (ax.title, ax._right_title, ax.xaxis.label, ax.yaxis.label)
        ]
        texts += [t for legend in fig.legends for t in (legend.get_title(), *legend.get_texts())]
        boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]
        for i, (one, box) in enumerate(boxes):
            for other, other_box in boxes[i + 1 :]:
                assert not box.overlaps(other_box), (name, one, other)
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= fig.bbox.x1 + 1 and box.y1 <= fig.bbox.y1 + 1, (
                name,
                one,
            )


def test_nothing_drawn_is_cut_off(plots):
    for plot in plots.values():
        assert_shows_all(plot)


def test_saved_files_are_complete_and_reproducible(metrics, tmp_path):
    for folder in ("one", "two"):
        figures.diagnostics_figure(metrics, "LONG", FAST).save(tmp_path / folder)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    suffixes = [".csv", ".pdf", ".png", ".svg", ".txt", "_trends.csv"]
    assert names == [f"diagnostics_LONG{suffix}" for suffix in suffixes]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_one_seed_one_regime_one_algorithm_is_enough(tmp_path):
    folder = make_run(tmp_path / "run", "st_ppo", iterations=6, every=1)
    metrics = collect([folder], tmp_path / "metrics")
    plots = {plot.name: plot for plot in figures.all_figures(metrics, FAST)}
    assert set(plots) == {"overview", "diagnostics_A", "stability", "clip_ratio"}
    assert "no band" in plots["stability"].caption
    for plot in plots.values():
        plot.save(tmp_path / "figures")


def test_unsupported_figure_is_none_and_says_so(tmp_path, capsys):
    metrics = collect([make_run(tmp_path / "run", "gspo", iterations=6)], tmp_path / "metrics")
    assert figures.collapse_figure(metrics) is None
    assert publish(None, tmp_path) is None and "do not support" in capsys.readouterr().out


def test_columns_that_were_never_computed_leave_an_empty_panel(tmp_path, metrics):
    bare = metrics.iterations.assign(clipping_bias_norm=np.nan)
    plot = figures.diagnostics_figure(type(metrics)(metrics.runs, bare, metrics.evaluations), "A", FAST)
    assert "clipping_bias_norm" not in set(plot.data["metric"])
    plot.save(tmp_path)


def test_unlisted_algorithm_is_drawn_in_the_overview(tmp_path, metrics):
    record = {**metrics.runs[0], "algorithm": "brand_new"}
    renamed = [
        frame[frame["algorithm"] == record["algorithm"]]
        for frame in (
            metrics.iterations.replace("grpo", "brand_new"),
            metrics.evaluations.replace("grpo", "brand_new"),
        )
    ]
    plot = figures.overview_figure(type(metrics)([record], *renamed), FAST)
    assert set(plot.data["algorithm"]) == {"brand_new"}


def with_others(metrics, names):
    """The study with copies of runs under further names: {new name: name of the copied algorithm}."""
    study = [metrics.runs, metrics.iterations, metrics.evaluations]
    for new, old in names.items():
        study[0] = study[0] + [{**r, "algorithm": new} for r in metrics.runs if r["algorithm"] == old]
        for i, frame in ((1, metrics.iterations), (2, metrics.evaluations)):
            copy = frame[frame["algorithm"] == old].assign(algorithm=new)
            study[i] = pd.concat([study[i], copy], ignore_index=True)
    return type(metrics)(*study)


def test_other_algorithms_join_the_figures_of_their_kind_in_colours_of_their_own(metrics):
    mine = {"my_ppo": "st_ppo", "my_other_ppo": "s_ppo", "my_group": "gspo", "another_group": "grpo"}
    study = with_others(metrics, mine)
    with_critic = {*figures.PPO_VARIANTS, "so_ppo_ctn", "my_ppo", "my_other_ppo"}
    without = {*figures.GRPO_VARIANTS, "my_group", "another_group"}
    for draw, expected in (
        (figures.stability_figure, with_critic),
        (figures.clip_ratio_figure, with_critic),
        (figures.so_grpo_figure, without),
    ):
        plot = draw(study, FAST)
        assert set(plot.data["algorithm"]) == expected
        labels = [text.get_text() for text in plot.figure.legends[0].get_texts()]
        assert {look(name).label for name in expected} <= set(labels)
        assert "Dash-dotted: " in plot.caption
    colors = [look(name).color for name in (*LOOKS, *mine)]
    assert len(set(colors)) == len(colors)


def test_setting_and_regime_in_words(metrics):
    assert describe_setting(metrics) == "tiny policy (0.12 M parameters), synthetic world"
    other = {**metrics.runs[0], "regime": "LLAMA", "policy": "tiny_llama", "policy_parameters": 130_000}
    both = replace(metrics, runs=[*metrics.runs, other])
    assert describe_setting(both) == "tiny, tiny_llama policy (0.12–0.13 M parameters), synthetic world"
    assert describe_setting(both, ["LONG"]) == describe_setting(metrics)
    assert (
        describe_regime(metrics, "LONG", ["st_ppo"])
        == "lr 3e-4, staleness 2, 4 updates per iteration, 2 seeds"
    )


def test_learning_rates_are_written_as_people_do(metrics):
    for rate, words in ((3.5e-4, "lr 3.5e-4,"), (8.75e-5, "lr 8.75e-5,"), (1e-3, "lr 1e-3,")):
        rated = metrics.iterations.assign(learning_rate=np.float32(rate))
        study = type(metrics)(metrics.runs, rated, metrics.evaluations)
        assert describe_regime(study, "A", ["st_ppo"]).startswith(words)
    own = np.where(metrics.iterations["algorithm"] == "st_ppo", 1.225e-4, 8.75e-5)
    study = type(metrics)(metrics.runs, metrics.iterations.assign(learning_rate=own), metrics.evaluations)
    assert describe_regime(study, "A", ["st_ppo", "token_ppo"]).startswith("lr 8.75e-5–1.225e-4,")


def test_success_starts_at_zero_in_the_overview(plots):
    bottoms = {ax.get_ylim()[0] for ax in plots["overview"].figure.axes if ax.get_visible()}
    assert bottoms == {0.0}


def test_figure_of_one_run_from_its_tables(tmp_path):
    folder = make_run(tmp_path / "run", "st_ppo", iterations=6)
    plot = figures.run_figure(
        pd.read_parquet(folder / "updates.parquet"), pd.read_parquet(folder / "evaluations.parquet"), "ST-PPO"
    )
    picture, size = plot._repr_png_()
    assert picture.startswith(b"\x89PNG") and size["width"] < Image.open(BytesIO(picture)).width


def test_reference_figures_follow_from_the_reference_metrics():
    if not references():
        pytest.skip("no reference results are committed yet")
    for folder in references():
        committed = {path.stem for path in (folder / "figures").glob("*.png")}
        for plot in figures.all_figures(load_metrics(folder / "metrics")):
            assert plot.name in committed, f"{plot.name} is missing in {folder}"
            assert_as_committed(plot, folder / "figures")
