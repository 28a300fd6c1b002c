"""What the page on a thousand iterations counts: who stood after a hundred, who fell, who slowed down, what it took on disk."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from stppo.record.outcomes import judge
from stppo.record.schema import CHECKPOINT_DIR, RUN_FILE
from stppo.study.thousand import SECONDS, measured, sizes

EVERY, END, START = 10, 1000, 0.2


def metrics(success, seconds=lambda iteration: 1.0):
    """One run whose success and seconds are functions of the iteration."""
    record = {"regime": "HALF", "algorithm": "grpo", "seed": 701, "world_seed": 701}
    curve = pd.DataFrame({"iteration": range(0, END + 1, EVERY)})
    curve["success"] = curve["iteration"].map(success)
    iterations = pd.DataFrame({"iteration": range(1, END + 1)})
    for column in SECONDS:
        iterations[column] = iterations["iteration"].map(seconds)
    return SimpleNamespace(
        runs=[record],
        iterations=iterations,
        success=lambda _: curve,
        outcome=lambda _: judge(curve["iteration"], curve["success"], START),
        select=lambda frame, _: frame,
    )


def test_a_run_that_learns_and_stays_has_no_crash():
    row = measured(metrics(lambda i: min(0.8, START + i / 100))).iloc[0]
    assert row["standing"] and pd.isna(row["crash"]) and not row["recovered"]
    assert row["early"] == pytest.approx(0.8) and row["final"] == pytest.approx(0.8)
    assert row["world_seed"] == 701


def test_a_fall_after_a_hundred_iterations_counts_once_and_may_be_made_good():
    fallen = measured(metrics(lambda i: 0.8 if i <= 400 else 0.1)).iloc[0]
    assert fallen["standing"] and fallen["crash"] == 420 and not fallen["recovered"]
    assert fallen["early"] == pytest.approx(0.8) and fallen["final"] == pytest.approx(0.1)
    back = measured(metrics(lambda i: 0.1 if 400 < i < 500 else 0.8)).iloc[0]
    assert back["crash"] == 420 and back["recovered"] and back["final"] == pytest.approx(0.8)


@pytest.mark.parametrize("success", [lambda i: START, lambda i: 0.8 if i < 50 else 0.1])
def test_who_never_learned_or_fell_before_did_not_stand(success):
    assert not measured(metrics(success)).iloc[0]["standing"]


def test_late_seconds_are_set_beside_early_ones():
    slower = measured(metrics(lambda i: 0.5, seconds=lambda i: 3.0 if i > 900 else 2.0)).iloc[0]["slower"]
    assert slower == pytest.approx(1.5)


def test_files_are_counted_in_megabytes(tmp_path):
    (tmp_path / CHECKPOINT_DIR / "1000").mkdir(parents=True)
    run = {"regime": "HALF", "algorithm": "grpo", "seed": 701, "variant": ""}
    (tmp_path / RUN_FILE).write_text(json.dumps(run))
    (tmp_path / CHECKPOINT_DIR / "1000" / "state").write_bytes(bytes(3_000_000))
    for name in ("updates", "evaluations"):
        (tmp_path / f"{name}.parquet").write_bytes(bytes(500_000))
    row = sizes([tmp_path]).iloc[0]
    assert (row["tables"], row["checkpoint"]) == (1.0, 3.0)
    assert row["seed"] == 701


def test_a_run_that_only_tells_of_memory_is_no_row():
    short = metrics(lambda i: 0.5)
    short.runs[0]["regime"] = "HALF_SHORT"
    assert measured(short).empty
