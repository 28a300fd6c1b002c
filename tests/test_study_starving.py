"""What the page on slow questions counts: the mix, long questions, all questions."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from stppo.study.starving import by_hops, measured


def test_success_is_that_after_training_by_number_of_hops(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"regime": "KEPT", "algorithm": "grpo", "seed": 3}))
    rows = [{"iteration": i, "by_benchmark": {"2_hops": i / 100, "5_hops": i / 200}} for i in (0, 10)]
    (tmp_path / "evaluations_by_benchmark.json").write_text(json.dumps(rows))
    table = by_hops([tmp_path])
    assert table[["hops", "success"]].to_dict("list") == {"hops": [2, 5], "success": [0.1, 0.05]}


def test_a_run_that_does_not_tell_hops_apart_is_refused(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"regime": "KEPT", "algorithm": "grpo", "seed": 3}))
    with pytest.raises(ValueError, match="hops_apart"):
        by_hops([tmp_path])


def test_a_row_holds_what_the_protocol_asks_for():
    key = {"regime": "ABOVE_2", "algorithm": "grpo", "seed": 601}
    run = key | {
        "training": {"trajectories_per_iteration": 128},
        "objective": {"credit": {"group_size": 8}},
    }
    iterations = pd.DataFrame(
        [
            key
            | {
                "iteration": i,
                "hops": 9.0 if i < 11 else 2.5,
                "staleness_iterations": 1.5,
                "discarded_groups": 4,
                "success_train": i / 100,
            }
            for i in range(1, 61)
        ]
    )
    ends = pd.DataFrame(
        [key | {"hops": h, "success": s} for h, s in ((2, 0.9), (3, 0.7), (4, 0.5), (5, 0.2))]
    )
    row = measured(SimpleNamespace(runs=[run], iterations=iterations), ends).iloc[0]
    assert row["hops"] == 2.5, "the first ten iterations are left out"
    assert row["age"] == 1.5
    assert row["thrown"] == pytest.approx(4 / 16)
    assert row["shown"] == pytest.approx(0.555)
    assert row["long"] == pytest.approx(0.35)
    assert row["all"] == pytest.approx(0.4 * 0.9 + 0.2 * (0.7 + 0.5 + 0.2))
    assert row["hop5"] == 0.2 and row["world_seed"] == 601
