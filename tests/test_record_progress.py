"""How far runs are: read from what they have recorded, said once for each milestone."""

import json
import os
import time
from contextlib import ExitStack

import pandas as pd
import pytest
import yaml

from stppo.record.ownership import FolderLock
from stppo.record.progress import all_progress, table


@pytest.fixture
def record(tmp_path):
    """Write what a run has on disk after some iterations of 40, at two seconds each; this process works on
    it, unless it was stopped."""
    locks = ExitStack()
    locked = set()

    def write(name, iteration, status="running", success=0.5, age=0.0, stopped=False):
        run = tmp_path / name
        run.mkdir(parents=True, exist_ok=True)
        if not stopped and run not in locked:
            locks.enter_context(FolderLock(run))
            locked.add(run)
        (run / "config.yaml").write_text(
            yaml.safe_dump({"training": {"iterations": 40}, "evaluation": {"every": 2}})
        )
        rows = [{"iteration": iteration, "temperature": t, "success": success + 1 - t} for t in (0.0, 1.0)]
        pd.DataFrame(rows).to_parquet(run / "evaluations.parquet")
        content = {
            "status": status,
            "algorithm": "st_ppo",
            "seed": 1,
            "iterations": iteration,
            "wall_seconds": 2.0 * iteration,
        }
        (run / "run.json").write_text(json.dumps(content))
        written = time.time() - age
        os.utime(run / "run.json", (written, written))
        return tmp_path

    with locks:
        yield write


def test_a_run_is_read_from_its_files(record):
    (run,) = all_progress(record("A/st_ppo/seed1", 10, age=5))
    assert (run.name, run.iteration, run.iterations, run.status) == ("A/st_ppo/seed1", 10, 40, "running")
    assert run.success == 0.5, "sampled, not greedy"
    assert "10 of 40    success 0.50  2.0 s an iteration, about 55 s left" in table([run])


def test_a_run_that_stopped_is_told_as_such(record):
    runs = all_progress(record("A/st_ppo/seed1", 12, age=3600, stopped=True))
    assert "stopped 60 min ago" in table(runs) and "0 running" in table(runs)
    assert "1 running" in table(all_progress(record("A/st_ppo/seed1", 12, age=3600)))


def test_non_finite_end_is_said(record):
    assert "non-finite" in table(all_progress(record("A/st_ppo/seed1", 12, status="non_finite")))


def test_half_written_and_earlier_runs_are_no_runs(record, tmp_path):
    record("A/st_ppo/seed1", 12)
    record("A/st_ppo/seed1/earlier-1", 40, status="completed")
    (tmp_path / "B").mkdir()
    (tmp_path / "B" / "run.json").write_text("{")
    assert [run.name for run in all_progress(tmp_path)] == ["A/st_ppo/seed1"]


@pytest.mark.parametrize(
    "content", ["null", "[]", '"a"', '{"iterations": "x"}', '{"status": [], "iterations": 1}']
)
def test_a_record_that_is_none_is_passed_over(record, content):
    folder = record("a", 4)
    (folder / "a" / "run.json").write_text(content)
    assert all_progress(folder) == []


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder .*laptop"):
        all_progress(tmp_path / "laptop")
