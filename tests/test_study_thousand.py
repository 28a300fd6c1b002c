"""What the page on a thousand iterations counts: who stood after a hundred, who fell, who slowed down, what it took on disk."""

import json
import zipfile
from types import SimpleNamespace

import pandas as pd
import pytest

from stppo.record.outcomes import judge
from stppo.record.runs import load_metrics
from stppo.record.schema import CHECKPOINT_DIR, RUN_FILE
from stppo.study.thousand import SECONDS, SIZES, counted, measured, record, sizes, whole
from tests.synthetic_runs import gather, make_run, simulate

EVERY, END, START = 10, 1000, 0.2


def metrics(*success, seconds=lambda iteration: 1.0, algorithms=("grpo",)):
    """Runs whose success and seconds are functions of the iteration: one a function, in worlds from 701 on, the
    algorithms in turn."""
    n, evaluated = len(algorithms), pd.Series(range(0, END + 1, EVERY))
    worlds = [701 + i // n for i in range(len(success))]
    runs = [
        {"regime": "HALF", "algorithm": algorithms[i % n], "seed": w, "world_seed": w, "peak_memory_mb": 500}
        for i, w in enumerate(worlds)
    ]
    curves = [pd.DataFrame({"iteration": evaluated, "success": evaluated.map(of)}) for of in success]
    curve_of = lambda run: curves[runs.index(run)]  # noqa: E731
    iterations = pd.DataFrame({"iteration": range(1, END + 1)})
    for column in SECONDS:
        iterations[column] = iterations["iteration"].map(seconds)
    return SimpleNamespace(
        runs=runs,
        iterations=iterations,
        success=curve_of,
        outcome=lambda run: judge(curve_of(run)["iteration"], curve_of(run)["success"], START),
        select=lambda frame, _: frame,
    )


def stays(i):
    return min(0.8, START + i / 100)


def lower(i):
    return min(0.6, START + i / 100)


def falls(i):
    return 0.8 if i <= 400 else 0.1


def returns(i):
    return 0.1 if 400 < i < 500 else 0.8


def test_a_run_that_learns_and_stays_has_no_crash():
    row = measured(metrics(stays)).iloc[0]
    assert row["standing"] and pd.isna(row["crash"]) and not row["recovered"]
    assert row["early"] == pytest.approx(0.8) and row["final"] == pytest.approx(0.8)
    assert row["world_seed"] == 701


def test_a_fall_after_a_hundred_iterations_counts_once_and_may_be_made_good():
    fallen = measured(metrics(falls)).iloc[0]
    assert fallen["standing"] and fallen["crash"] == 420 and not fallen["recovered"]
    assert fallen["early"] == pytest.approx(0.8) and fallen["final"] == pytest.approx(0.1)
    back = measured(metrics(returns)).iloc[0]
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


def test_a_world_counts_when_every_arm_of_it_is_recorded():
    given = [("HALF", "st_ppo", 701), ("HALF", "turn_ppo", 701), ("HALF", "st_ppo", 702)]
    given.append(("HALF_SHORT", "st_ppo", 702))
    found = whole(gather(simulate(algorithm, seed, regime=regime) for regime, algorithm, seed in given))
    assert [(run["regime"], run["algorithm"], run["seed"]) for run in found.runs] == given[:2] + given[3:]
    assert set(found.all.of(["HALF"]).runs["seed"]) == {701}


def test_a_start_is_packed_beside_what_its_runs_recorded(tmp_path):
    start = tmp_path / "warm_start" / "seed702-0123"
    start.mkdir(parents=True)
    (start / "weights").write_bytes(b"weights")
    make_run(tmp_path / "runs" / "HALF" / "st_ppo" / "seed702", "st_ppo", 702)
    record(tmp_path / "runs", tmp_path / "out")
    kept = tmp_path / "out" / "warm_start" / "seed702-0123.zip"
    with zipfile.ZipFile(kept) as archive:
        assert archive.namelist() == ["weights"] and archive.read("weights") == b"weights"


def test_a_world_recorded_later_is_added_to_the_earlier_one(tmp_path):
    both, first, second = tmp_path / "both", tmp_path / "first", tmp_path / "second"
    for seed, folder in ((701, first), (702, second)):
        for root in (folder, both):
            make_run(root / "HALF" / "st_ppo" / f"seed{seed}", "st_ppo", seed)
    record(first, tmp_path / "in_turn")
    record(second, tmp_path / "in_turn")
    at_once = record(both, tmp_path / "at_once")
    assert load_metrics(tmp_path / "in_turn" / "metrics").runs == at_once.runs and len(at_once.runs) == 2
    files = [pd.read_csv(tmp_path / name / SIZES) for name in ("in_turn", "at_once")]
    pd.testing.assert_frame_equal(*files)
    with pytest.raises(ValueError, match="the same run"):
        record(second, tmp_path / "in_turn")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "in_turn" / SIZES), files[0])


def test_a_run_that_only_tells_of_memory_is_no_row():
    short = metrics(lambda i: 0.5)
    short.runs[0]["regime"] = "HALF_SHORT"
    assert measured(short).empty


FILES = pd.DataFrame(
    [
        {"regime": "HALF", "algorithm": "grpo", "seed": 701, "tables": 1.5, "checkpoint": 2.0},
        {"regime": "HALF", "algorithm": "topr", "seed": 701, "tables": 1.0, "checkpoint": 4.0},
        {"regime": "HALF_SHORT", "algorithm": "grpo", "seed": 701, "tables": 9.0, "checkpoint": 9.0},
    ]
)


def test_of_those_that_stood_the_fallen_and_the_recovered_are_counted():
    of = metrics(stays, lower, falls, lower, returns, lower, algorithms=("grpo", "topr"))
    for run, peak in zip(of.runs, (500, 510, 520, 530, 540, 545), strict=True):
        run["peak_memory_mb"] = peak
    of.runs.append({"regime": "HALF_SHORT", "algorithm": "grpo", "peak_memory_mb": 400})
    found = counted(of, FILES)
    assert found["runs"] == 6
    half = found["half"]
    assert (half["memory"], half["memory_short"]) == (545, 400)
    assert (half["tables"], half["checkpoint"]) == (1.5, 4.0)
    fell, stood = half["grpo"], half["topr"]
    assert [fell[name] for name in ("worlds", "standing", "fell", "recovered")] == [3, 3, 2, 1]
    assert fell["crashes"] == [420, 420]
    assert fell["final"] == pytest.approx((0.8 + 0.1 + 0.8) / 3)
    assert fell["apart"]["value"] == pytest.approx(-0.7 / 3)
    assert fell["apart"]["low"] < -0.7 / 3 < fell["apart"]["high"]
    assert [stood[name] for name in ("standing", "fell", "recovered")] == [3, 0, 0]
    assert stood["apart"]["value"] == pytest.approx(0)


@pytest.mark.parametrize(("ahead", "rank"), [(stays, 1.0), (falls, -1.0)])
def test_the_order_of_the_methods_after_a_hundred_iterations_is_set_beside_the_last(ahead, rank):
    found = counted(metrics(ahead, lambda i: 0.5, algorithms=("grpo", "topr")), FILES)
    assert found["half"]["rank"] == pytest.approx(rank)


def test_one_world_gives_no_interval():
    apart = counted(metrics(falls), FILES)["half"]["grpo"]["apart"]
    assert apart["value"] == pytest.approx(-0.7)
    assert pd.isna(apart["low"]) and pd.isna(apart["high"])
