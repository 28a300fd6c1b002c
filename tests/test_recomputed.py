"""Every run's outcome, recomputed from the committed Parquet files by a script that shares no code with the package."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest

REFERENCE = Path(__file__).parents[1] / "results/reference"
RECORDS = sorted(
    file.parent for file in REFERENCE.glob("*/metrics/summary.csv") if "first_study" not in str(file)
)


def last_tenth(curve: list[float]) -> float:
    n = max(1, math.ceil(len(curve) / 10))
    return sum(curve[-n:]) / n


def outcome(curve: list[float], start: float, stopped: bool) -> dict[str, float | str]:
    """Success at temperature 1, evaluation by evaluation, against the rules at the head of `results/outcomes.py`."""
    peak, crashed, learned = start, False, False
    for i in range(2, len(curve)):
        mean = (curve[i - 2] + curve[i - 1] + curve[i]) / 3
        peak = max(peak, mean)
        learned = learned or peak >= start + 0.1
        crashed = crashed or (learned and mean < start + (peak - start) / 2)
    final = 0.0 if stopped else last_tenth(curve)
    half = start + (peak - start) / 2
    if stopped or (crashed and final <= half):
        label = "collapsed"
    elif learned:
        label = "crashed and recovered" if crashed else "learned"
    else:
        label = "lost its start" if final <= start / 2 else "did not learn"
    return {"start": start, "peak": peak, "final": final, "outcome": label}


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.parent.name)
def test_outcomes_of_all_runs(folder):
    summary = pd.read_csv(folder / "summary.csv").set_index(["regime", "algorithm", "seed"])
    rows = pd.read_parquet(folder / "evaluations.parquet").sort_values("iteration")
    runs = json.loads((folder / "runs.json").read_text())
    records = {
        (r["regime"], r["algorithm"], r["seed"]): r
        for r in (runs if isinstance(runs, list) else runs["runs"])
    }
    assert set(records) == set(summary.index)
    curves = {key: of for key, of in rows.groupby(["regime", "algorithm", "seed", "temperature"])["success"]}
    for key, record in records.items():
        sampled = list(curves[(*key, 1.0)])
        said = summary.loc[key]
        found = outcome(sampled, record["warm_start"]["success_sampled"], record["non_finite"] is not None)
        assert found.pop("outcome") == said["outcome"], key
        if record["non_finite"] is None:
            assert found == pytest.approx(said[list(found)].to_dict(), abs=1e-4), key
            assert last_tenth(list(curves[(*key, 0.0)])) == pytest.approx(said["greedy_final"], abs=1e-4), key
