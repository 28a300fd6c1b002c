"""Runs of one algorithm in other settings: told apart when collected, and compared in one table."""

import json
import shlex

import numpy as np
import pandas as pd
import pytest

from stppo.config.composition import expand_sweep, variant
from stppo.record import schema
from stppo.record.compare import before_and_after, compare_runs, find_runs, text
from stppo.record.runs import collect, load_metrics, told_apart
from tests.synthetic_runs import make_run

FAST, SLOW = "training.learning_rate=2e-4", "training.learning_rate=1e-4"
SHARED = "training.epochs=4"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two learning rates of st_ppo with two seeds each, and one run of token_ppo: folders by name."""
    root = tmp_path_factory.mktemp("sweep")
    for algorithm, seed, overrides in (
        ("st_ppo", 0, f"{SHARED} {FAST}"),
        ("st_ppo", 1, f"{SHARED} {FAST}"),
        ("st_ppo", 0, f"{SHARED} {SLOW}"),
        ("st_ppo", 1, f"{SHARED} {SLOW}"),
        ("token_ppo", 0, f"{SHARED} {SLOW}"),
    ):
        folder = root / algorithm / f"seed{seed}-{overrides.split('=')[-1]}"
        make_run(folder, algorithm, seed)
        record = json.loads((folder / schema.RUN_FILE).read_text())
        (folder / schema.RUN_FILE).write_text(json.dumps(record | {"variant": overrides}))
    return root


def edit(folder, change):
    evaluations = pd.read_parquet(folder / schema.EVALUATIONS_FILE)
    change(evaluations).to_parquet(folder / schema.EVALUATIONS_FILE, index=False)


def test_variant_is_what_was_typed_but_for_algorithm_seed_and_loggers():
    typed = [
        *("preset=smoke", "algorithm=st_ppo", "+seed=3", "world.hop_shares=[1, 0, 0]"),
        "loggers=[{_target_: stppo.training.loggers.TensorBoard}]",
    ]
    assert shlex.split(variant(typed)) == ["preset=smoke", "world.hop_shares=[1, 0, 0]"]
    members = expand_sweep(["algorithm=a,b", "training.epochs=2,4"])
    assert [variant(member) for member in members] == ["training.epochs=2", "training.epochs=4"] * 2


def test_runs_are_told_apart_by_what_not_all_of_their_regime_share():
    records = [
        {"regime": "A", "algorithm": "st_ppo", "variant": f"{SHARED} {FAST}"},
        {"regime": "A", "algorithm": "st_ppo", "variant": SHARED},
        {"regime": "B", "algorithm": "st_ppo", "variant": SLOW},
        {"regime": "A", "algorithm": f"grpo ({SLOW})", "variant": f"{SLOW} {SHARED}"},
    ]
    assert told_apart(records) == [("st_ppo", FAST), ("st_ppo", ""), ("st_ppo", ""), ("grpo", SLOW)]
    assert told_apart([{"regime": "A", "algorithm": "st_ppo"}]) == [("st_ppo", "")]


def test_collect_takes_a_sweep_and_names_its_members(sweep, tmp_path):
    runs = find_runs([sweep])
    collected = collect(runs, tmp_path / "all")
    named = [f"st_ppo ({SLOW})", f"st_ppo ({FAST})", f"token_ppo ({SLOW})"]
    assert collected.algorithms() == named
    assert list(collected.table["variant"]) == list(collected.table["algorithm"].str.extract(r"\((.+)\)")[0])
    assert list(collected.table["runs"]) == [2, 2, 1] and "variant" in collected.summary
    collect(runs[:2], tmp_path / "part")
    collect([*runs[2:], tmp_path / "part"], tmp_path / "again")
    again = load_metrics(tmp_path / "again")
    assert again.runs == collected.runs, "in parts as at once"
    assert collect([tmp_path / "all"], tmp_path / "copy").runs == collected.runs


def test_compared_numbers_are_those_of_the_evaluations(tmp_path):
    for seed, level in ((0, 0.2), (1, 0.6)):
        make_run(tmp_path / f"run{seed}", "st_ppo", seed)

        def ramp(evaluations, level=level):
            share = evaluations["iteration"] / evaluations["iteration"].max()
            return evaluations.assign(
                success=np.where(evaluations["temperature"] == 0, level / 2, level * share)
            )

        edit(tmp_path / f"run{seed}", ramp)
    (row,) = compare_runs([tmp_path]).to_dict("records")
    assert (row["algorithm"], row["variant"], row["seeds"]) == ("st_ppo", "", 2)
    assert row["auc_sampled_mean"] == pytest.approx(0.2) and row["auc_sampled_max"] == pytest.approx(0.3)
    assert row["highest_sampled_min"] == pytest.approx(0.2) and row["highest_sampled_max"] == pytest.approx(
        0.6
    )
    assert 0.35 < row["final_sampled_mean"] < 0.4, "mean of the last tenth"
    assert row["final_greedy_mean"] == pytest.approx(0.2) and row["final_greedy_max"] == pytest.approx(0.3)
    record = json.loads((tmp_path / "run0" / schema.RUN_FILE).read_text())
    assert row["start_greedy_mean"] == pytest.approx(record["warm_start"]["success_greedy"])


def test_table_has_a_row_a_variant_and_the_best_first(sweep, tmp_path):
    table = compare_runs([sweep])
    assert sorted(zip(table["algorithm"], table["variant"], table["seeds"], strict=True)) == [
        ("st_ppo", SLOW, 2),
        ("st_ppo", FAST, 2),
        ("token_ppo", SLOW, 1),
    ]
    assert list(table["final_sampled_mean"]) == sorted(table["final_sampled_mean"], reverse=True)
    collect(find_runs([sweep]), tmp_path / "metrics")
    columns = ["algorithm", "variant", "seeds", "final_sampled_mean", "highest_greedy_max"]
    pd.testing.assert_frame_equal(compare_runs([tmp_path / "metrics"])[columns], table[columns], rtol=1e-5)
    assert FAST in text(table) and SHARED not in text(table)


def test_table_fits_a_terminal_and_says_on_what_its_numbers_rest(sweep, tmp_path):
    table = compare_runs([sweep])
    lines = text(table).splitlines()
    assert all(len(line.replace(FAST, "").replace(SLOW, "")) <= 100 for line in lines)
    assert "start: the warm start, on 2048 samples; the others: evaluations, on 256 questions" in lines[-1]
    assert not table.attrs["lengths"] and set(table["iterations"]) == {"40"}
    make_run(tmp_path / "long", "st_ppo", 0, iterations=40)
    make_run(tmp_path / "short", "st_ppo", 1, iterations=10)
    mixed = compare_runs([tmp_path])
    assert mixed.attrs["lengths"] == "runs of 10-40 iterations"
    assert "10-40" in text(mixed)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"versions": {"torch": "2.13.0+cpu"}}, ""),
        ({"versions": None}, ""),
        ({"versions": {"torch": "2.9.1"}}, "runs made with torch 2.13.0, 2.9.1"),
        ({"resumed_on": [{"versions": {"torch": "2.9.1"}}]}, "runs made with torch 2.13.0, 2.9.1"),
    ],
)
def test_runs_of_another_torch_are_not_alike(tmp_path, second, said):
    for seed, recorded in enumerate([{}, second]):
        made = make_run(tmp_path / f"run{seed}", "st_ppo", seed, iterations=10)
        record = json.loads((made / schema.RUN_FILE).read_text()) | {"versions": {"torch": "2.13.0"}}
        (made / schema.RUN_FILE).write_text(json.dumps(record | recorded))
    assert compare_runs([tmp_path]).attrs["torch"] == said


def test_a_run_that_ended_non_finite_counts_as_zero_from_there(tmp_path):
    make_run(tmp_path / "long", "st_ppo", 0, iterations=40)
    make_run(tmp_path / "ended", "st_ppo", 1, iterations=10, non_finite=True)
    table = compare_runs([tmp_path])
    assert table.attrs["non_finite"] == ["A/st_ppo/1"]
    (row,) = table.to_dict("records")
    summary = collect(find_runs([tmp_path]), tmp_path / "metrics").summary.set_index("seed")
    assert row["final_sampled_min"] == row["final_greedy_min"] == 0 == summary.loc[1, "final"]
    for kind, column in (("sampled", "area"), ("greedy", "greedy_area")):
        low, high = sorted(summary[column])
        assert (row[f"auc_{kind}_min"], row[f"auc_{kind}_max"]) == pytest.approx((low, high)), kind
        alone = compare_runs([tmp_path / "ended"]).loc[0, f"auc_{kind}_mean"]
        assert low < alone / 2, "30 of its 40 iterations count as 0"


def test_unfinished_run_is_left_out_and_named(sweep, tmp_path):
    make_run(tmp_path / "done", "grpo", 0)
    make_run(tmp_path / "open", "grpo", 1)
    record = json.loads((tmp_path / "open" / schema.RUN_FILE).read_text())
    (tmp_path / "open" / schema.RUN_FILE).write_text(json.dumps(record | {"status": schema.RUNNING}))
    table = compare_runs([tmp_path])
    assert list(table["seeds"]) == [1] and table.attrs["unfinished"] == [str(tmp_path / "open")]
    with pytest.raises(ValueError, match="no finished run"):
        compare_runs([tmp_path / "open"])


def test_success_before_and_after_is_that_of_the_ends_with_intervals():
    rows = [(0, 0.0, 0.25), (0, 1.0, 0.0), (10, 1.0, 0.9), (20, 0.0, 0.5), (20, 1.0, 1.0)]
    played = pd.DataFrame(rows, columns=["iteration", "temperature", "success"]).assign(n_questions=20)
    assert before_and_after(played) == (
        "success on 20 unseen questions, before and after [95 % Wilson interval]: "
        "sampled 0.00 [0.00, 0.16] to 1.00 [0.84, 1.00], greedy 0.25 [0.11, 0.47] to 0.50 [0.30, 0.70]"
    )
    started = before_and_after(played[:2])  # stopped before another evaluation
    assert started.endswith("sampled 0.00 [0.00, 0.16], greedy 0.25 [0.11, 0.47]")
    assert before_and_after(played[:0]) is None and "greedy" not in before_and_after(played[1:3])


def test_success_that_a_table_has_rounded_is_a_share_all_the_same():
    """A run that ended earlier is told from its tables, which hold float32."""
    played = pd.DataFrame(
        {"iteration": [0], "temperature": [0.0], "success": [99 / 300], "n_questions": [300]}
    )
    assert before_and_after(played.astype({"success": "float32"})) == before_and_after(played)
