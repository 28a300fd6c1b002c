import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from rliable.metrics import aggregate_iqm

from stppo import cli
from stppo.config.files import VARIABLE, ConfigError
from stppo.record.runs import Metrics
from stppo.study import benchmark
from stppo.study.benchmark import BASELINE, REGIME, best_of
from stppo.study.benchmark_figures import PUSH, pictures, signals_of_methods
from tests.synthetic_runs import Dynamics, gather, simulate


def runs(levels, numbers=range(40), **changes):
    """Made-up runs of methods at the points: {method: the success it reaches, or one a point}."""
    table, made = benchmark.points().set_index("point"), []
    for method, level in levels.items():
        for i, number in enumerate(numbers):
            point = table.loc[number]
            reached = level if isinstance(level, float) else level[i]
            record, updates, evaluations = simulate(
                method,
                number,
                REGIME,
                dynamics=Dynamics(reached),
                learning_rate=float(point["learning_rate"]),
                epochs=int(point["epochs"]),
                staleness_iterations=int(point["staleness"]),
                minibatches=int(point["minibatches"]),
            )
            made.append((record | {"world_seed": int(point["world"])} | changes, updates, evaluations))
    return gather(made)


def both(one, other):
    """The runs of two sets of metrics as one."""
    frames = {
        name: pd.concat([getattr(one, name), getattr(other, name)]) for name in ("iterations", "evaluations")
    }
    return Metrics([*one.runs, *other.runs], **frames)


# ---- points ---------------------------------------------------------------------------------------
def test_the_committed_points_are_those_that_the_sequence_draws():
    pd.testing.assert_frame_equal(benchmark.points(), benchmark.draw_points(), check_dtype=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("defaults: [token_ppo, _self_]\nname: mine\n", "declares no prior"),
        ("defaults: [turn_ppo]\nname: another\nprior: none\n", "name is another; it must be the file's, mine"),
        ("defaults: [topr]\nname: mine\nprior: {key: objective.clip.moost, low: 1, high: 2, scale: log}\n",
         "prior.key is objective.clip.moost, and the file has no"),
    ],
)  # fmt: skip
def test_a_method_whose_knob_is_not_known_is_refused(tmp_path, monkeypatch, text, said):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/mine.yaml").write_text(text)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=rf"mine.yaml:? {said}"):
        benchmark.planned("mine")


def test_every_method_gets_the_same_points_and_its_own_knob():
    mine, other = benchmark.planned("gspo"), benchmark.planned("token_ppo")
    for one, two in zip(mine, other, strict=True):
        shared = [o for o in one.overrides if not o.startswith("algorithm")]
        assert shared == [o for o in two.overrides if not o.startswith("algorithm")]
    knobs = [o for run in mine for o in run.overrides if o.startswith("algorithm.objective")]
    assert len({knob.partition("=")[0] for knob in knobs}) >= 1 and len(set(knobs)) >= 40
    training = mine[3].config["training"]
    point = benchmark.points().loc[3]
    assert training["learning_rate"] == point["learning_rate"] and training["epochs"] == point["epochs"]
    assert mine[3].config["world"]["seed"] == mine[3].config["warm_start_seed"] == point["world"]


@pytest.mark.parametrize(
    ("prior", "ratio", "named"),
    [
        ("none", "ration", "algorithm.objective.ration: unknown key"),
        ("objective.loss_aggregation", "ratio", "prior.key = objective.loss_aggregation: no number"),
    ],
)
def test_what_cannot_be_built_is_said_before_any_warm_start(tmp_path, monkeypatch, prior, ratio, named):
    (tmp_path / "algorithm").mkdir()
    knob = prior if prior == "none" else f"{{key: {prior}, low: 0.1, high: 1, scale: log}}"
    text = f"defaults: [turn_ppo]\nname: mine\nprior: {knob}\nobjective:\n  {ratio}: {{granularity: token}}\n"
    (tmp_path / "algorithm/mine.yaml").write_text(text)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(named)):
        benchmark.check_unchanged(benchmark.metrics_folder(), "mine")


# ---- measures -------------------------------------------------------------------------------------
def test_best_of_k_is_the_mean_of_the_best_of_random_draws():
    values = np.array([0.1, 0.5, 0.4, 0.9, 0.2])
    drawn = np.random.default_rng(0).choice(values, (200_000, 3)).max(axis=1).mean()
    assert best_of(values, 3) == pytest.approx(drawn, abs=2e-3)
    assert best_of(values, 1) == pytest.approx(values.mean())
    assert best_of(values, 1, [0.5, 0, 0, 0.5, 0]) == pytest.approx(0.5)


def test_the_interquartile_mean_is_rliables():
    values = np.random.default_rng(3).normal(size=40)
    assert benchmark.interquartile_mean(values) == pytest.approx(aggregate_iqm(values[:, None]))
    assert benchmark.interquartile_mean([1.0, 5.0, 9.0], [0.2, 0.7, 0.1]) == pytest.approx(5)


def test_the_leaderboard_pairs_methods_by_point():
    rng = np.random.default_rng(1)
    base = rng.uniform(0.2, 0.5, 40)
    higher = np.where(np.arange(40) < 30, base + 0.3, base - 0.15)
    board = benchmark.leaderboard(runs({BASELINE: base, "turn_ppo": higher})).set_index("method")
    assert board.index[0] == "turn_ppo"
    assert board.loc["turn_ppo", "above_token_ppo"] == pytest.approx(0.75, abs=0.05)
    assert board.loc["turn_ppo", "above_token_ppo_low"] < 0.75 < board.loc["turn_ppo", "above_token_ppo_high"]
    assert np.isnan(board.loc[BASELINE, "above_token_ppo"])


def test_a_run_elsewhere_than_at_its_point_is_refused():
    with pytest.raises(ValueError, match="its world is 7, that of the point"):
        benchmark.leaderboard(runs({BASELINE: 0.5}, numbers=[0], world_seed=7))


def test_confirmation_takes_the_best_point_to_fresh_worlds():
    levels = [0.3] * 40
    levels[17] = 0.9
    found = benchmark.confirmation(BASELINE, runs({BASELINE: levels}))
    assert [run.seed for run in found] == list(benchmark.FRESH_WORLDS)
    assert not set(benchmark.FRESH_WORLDS) & set(benchmark.points()["world"])
    rate = benchmark.points().loc[17, "learning_rate"]
    assert all(f"training.learning_rate={rate:g}" in run.overrides for run in found)
    with pytest.raises(ValueError, match="no run at 39 points, the first 1"):
        benchmark.confirmation(BASELINE, runs({BASELINE: 0.5}, numbers=[0]))


def test_nulls_are_those_whose_yaml_says_so():
    board = benchmark.leaderboard(runs({BASELINE: 0.4, "kl_stop": 0.6, "turn_ppo": 0.7})).set_index("method")
    assert board["null"].to_dict() == {BASELINE: False, "kl_stop": True, "turn_ppo": False}
    assert board.loc["turn_ppo", "above_null"] > 0.9
    one = runs({"grad_clip": 0.95}, numbers=[0])
    board = benchmark.leaderboard(both(runs({"kl_stop": 0.6, "turn_ppo": 0.7}), one)).set_index("method")
    assert board.loc["turn_ppo", "above_null"] > 0.9, "a null at one point is not the one to beat"


def test_the_difference_of_two_methods_is_paired_by_point():
    rng = np.random.default_rng(2)
    base = rng.uniform(0.2, 0.6, 40)
    found = benchmark.difference(runs({BASELINE: base, "turn_ppo": base + 0.2}), "turn_ppo", BASELINE)
    assert found["mean"] == pytest.approx(0.2, abs=0.01) and found["points"] == 40
    assert found["mean_high"] - found["mean_low"] < 0.03, "far less than the points differ"
    with pytest.raises(ValueError, match="no point in common"):
        benchmark.difference(runs({BASELINE: 0.5}, numbers=[0]), BASELINE, "turn_ppo")


def test_a_changed_method_does_not_take_the_committed_runs(tmp_path):
    """As if turn_ppo.yaml had changed since its runs: they discounted."""
    committed = benchmark.metrics_folder()
    benchmark.check_unchanged(committed, "turn_ppo")
    benchmark.check_unchanged(tmp_path / "nothing", "turn_ppo")
    older = shutil.copytree(committed, tmp_path / "older")
    records = json.loads((older / "runs.json").read_text())
    for record in records:
        if record["algorithm"] == "turn_ppo":
            record["objective"]["credit"]["gamma"] = 0.9
    (older / "runs.json").write_text(json.dumps(records))
    benchmark.check_unchanged(older, "st_ppo")
    with pytest.raises(ValueError, match="turn_ppo: its objective is not the one of its runs"):
        benchmark.check_unchanged(older, "turn_ppo")


# ---- runs made again ------------------------------------------------------------------------------
def test_the_cheapest_runs_are_made_again_at_their_points():
    metrics = runs({BASELINE: 0.4, "turn_ppo": 0.6})
    for record in metrics.runs:
        record["updates"] = 100 - record["seed"]  # points 30 to 39 are the quarter
    drawn = benchmark.cheapest(metrics, 2, seed=0)
    assert len({run.name for run in drawn}) == 2
    assert all(run.overrides == benchmark.planned(run.algorithm, [run.seed])[0].overrides for run in drawn)
    assert min(run.seed for run in benchmark.cheapest(metrics, 20, seed=0)) == 30
    assert len({frozenset(run.name for run in benchmark.cheapest(metrics, 2, seed)) for seed in range(5)}) > 1


def test_a_run_that_differs_is_named_on_the_same_processor_alone():
    recorded, other = runs({BASELINE: 0.4}, numbers=[3]), runs({BASELINE: 0.6}, numbers=[3])
    assert benchmark.differs(recorded, runs({BASELINE: 0.4}, numbers=[3])) == ([], [])
    assert "token_ppo at point 3: its evaluations" in benchmark.differs(recorded, other)[0][0]
    elsewhere = runs({BASELINE: 0.6}, numbers=[3], hardware={"cpu": "another"})
    assert benchmark.differs(recorded, elsewhere)[0] == []
    other_torch = runs({BASELINE: 0.6}, numbers=[3], versions={"torch": "1.0"})
    assert "made with torch 1.0 and " in benchmark.differs(recorded, other_torch)[1][0]
    same_name = runs({BASELINE: 0.6}, numbers=[3], warm_start={"success_sampled": 0.171})
    lines, why = benchmark.differs(recorded, same_name)
    assert lines == [] and "its warm start came out as {'success_sampled': 0.171}" in why[0]


# ---- pictures -------------------------------------------------------------------------------------
def drawn(metrics):
    return {plot.name: plot for plot in pictures(metrics, benchmark.leaderboard(metrics))}


def test_every_method_is_in_every_picture_also_one_without_all_points():
    part = both(runs({BASELINE: 0.4, "turn_ppo": 0.7}), runs({"mine": 0.9}, numbers=range(2)))
    plots = drawn(part)
    for name, column in (
        ("leaderboard", "method"),
        ("benchmark_failures", "algorithm"),
    ):
        assert set(plots[name].data[column]) == {BASELINE, "turn_ppo", "mine"}, name
    labels = [tick.get_text() for tick in plots["leaderboard"].figure.axes[0].get_yticklabels()]
    assert labels == ["Turn-PPO", "token PPO", "mine (2 of 40)"]


def test_an_ingredient_is_shown_where_both_methods_are_whole():
    part = both(runs({BASELINE: 0.4, "turn_ppo": 0.7}), runs({"s_ppo": 0.6}, numbers=range(39)))
    plot = drawn(part)["benchmark_ingredients"]
    assert list(plot.data["with"]) == ["turn_ppo"] and plot.title.startswith("1 of 1 ingredients")
    assert "benchmark_ingredients" not in drawn(runs({BASELINE: 0.4}, numbers=range(12)))


PUSHES = {"turn_ppo": 0.1, BASELINE: 0.5, "grpo": 0.3, "reinforce": 0.6}


def pushing(numbers=range(40)):
    """Four methods, the highest of which pushes least at failures; their entropy moves by a tenth of that
    share."""
    made = runs({BASELINE: 0.5, "turn_ppo": 0.8, "grpo": 0.3, "reinforce": 0.2}, numbers)
    rows = made.iterations.assign(**{PUSH: made.iterations["algorithm"].map(PUSHES)})
    rows["entropy"] = 0.3 + rows[PUSH] * (rows["iteration"] - 1) / 90
    return Metrics(made.runs, rows, made.evaluations)


def test_signals_of_a_method_are_those_of_its_first_iterations():
    made = pushing()
    table = signals_of_methods(made.all, benchmark.leaderboard(made)).set_index("method")
    assert list(table.index) == ["turn_ppo", BASELINE, "grpo", "reinforce"], "the highest first"
    assert table["push"].to_dict() == pytest.approx(PUSHES)
    assert table["entropy_change"].to_dict() == pytest.approx({m: push / 10 for m, push in PUSHES.items()})
    assert "1 is among the 1 that end highest" in drawn(made)["benchmark_signals"].title
    assert "benchmark_signals" not in drawn(pushing(range(39))), "of methods with all points alone"
    short = Metrics(made.runs, made.iterations[made.iterations["iteration"] < 10], made.evaluations)
    assert "benchmark_signals" not in drawn(short), "no tenth iteration"


# ---- the command ------------------------------------------------------------------------------------
def test_runs_that_have_not_ended_are_told_apart(tmp_path):
    for name, status in (("done", "completed"), ("nan", "non_finite"), ("begun", "running")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"status": status}))
    folders = [tmp_path / name for name in ("done", "nan", "begun", "absent")]
    assert benchmark.ended(folders) == (folders[:2], folders[2:3])


def test_runs_of_another_code_are_told_apart(tmp_path):
    folders = []
    for i, (method, code) in enumerate([("a", "old"), ("a", "new"), ("b", "old"), ("a", "new")]):
        folders.append(tmp_path / str(i))
        folders[-1].mkdir()
        record = {"algorithm": method, "code_hash": code, "started": f"2026-11-2{i}T00:00:00+00:00"}
        (folders[-1] / "run.json").write_text(json.dumps(record))
    assert benchmark.of_one_code(folders) == (folders[1:], folders[:1])


@pytest.mark.parametrize("text", ["3-1", "1-", "x"])
def test_points_that_name_none_are_refused(text):
    with pytest.raises(ValueError, match=f"--points {text}: write numbers and ranges"):
        cli._numbers(text)


# ---- the site's page ------------------------------------------------------------------------------
