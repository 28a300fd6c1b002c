"""The benchmark against TRL runs from end to end, and its trainers do equal work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
from tests.conftest import TINY

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.engines, pytest.mark.slow]


def test_ways_take_turns_and_play_alike(barely_trained, tmp_path):
    command = [
        sys.executable,
        ROOT / "benchmarks/trl_side_by_side.py",
        "--quick",
        "--json",
        tmp_path / "out.json",
    ]
    found = subprocess.run(
        [*command, "--warm-start", str(barely_trained), *TINY],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    (rows,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["tables"].values()
    assert [row["an iteration"].split()[0] for row in rows] == ["here,"] * 2 + ["TRL,"] * 2 + ["TRL"]
    tokens = [float(row["agent tokens a trajectory"].split()[0]) for row in rows]
    assert max(tokens) < 1.5 * min(tokens)
