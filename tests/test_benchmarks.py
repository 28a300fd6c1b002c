"""The scripts of benchmarks/ run from end to end at their smallest; what they measure is nobody's business here."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stppo.policy.compiled import SOURCE
from stppo.policy.compiler import CannotCompile, compiled_library
from tests.conftest import TINY

ROOT = Path(__file__).parents[1]


def measured(script: str, tmp_path: Path, *arguments: str) -> dict:
    """Tables that a script writes with `--quick --json`, by title."""
    found = subprocess.run(
        [
            sys.executable,
            ROOT / "benchmarks" / script,
            "--quick",
            "--json",
            tmp_path / "out.json",
            *arguments,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["tables"]


def test_transformers_imports_none_of_the_scripts():
    """It asks for packages by name, `kernels` among them, and runs what it finds of that name."""
    code = (
        "import sys; from pathlib import Path; from transformers import AutoModelForCausalLM, LlamaModel; "
        "print([path.name for path in Path().glob('*.py') if path.stem in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True
    )
    assert found.stdout == "[]\n", found.stderr[-2000:]


@pytest.mark.slow
def test_speed_and_memory(barely_trained, tmp_path):
    tables = measured("run.py", tmp_path, "--warm-start", str(barely_trained), *TINY)
    assert len(tables["Seconds per iteration"]) == 4
    assert {row["of"] for row in tables["Cost against size, CPU seconds"]} == {
        "trajectories_per_iteration",
        "epochs",
    }
    assert float(tables["Memory"][0]["resident MiB"]) > 0


@pytest.mark.slow
def test_what_a_gpu_would_say_in_miniature(barely_trained, tmp_path):
    """Here the GPU's column is a second CPU's, so all differences are rounding."""
    command = [sys.executable, ROOT / "benchmarks/gpu.py", "--quick", "--out", tmp_path, "--minutes", "3"]
    found = subprocess.run(
        [*command, "--warm-start", str(barely_trained), *TINY], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-2000:]
    tables = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["tables"]
    assert [row["algorithm"] for row in tables["One iteration by phase"]] == ["token_ppo", "st_ppo"]
    for title in (
        "Arithmetic, the policy that was trained",
        "Arithmetic, random weights of SmolLM2-135M's shape",
    ):
        by_way = {row["computed"]: float(row["largest"]) for row in tables[title]}
        assert by_way["CPU, float32, each row alone"] < 1e-3 < by_way["CPU, bfloat16"] < 1
    assert (tmp_path / "metrics/runs.json").is_file()


@pytest.mark.slow
def test_compiled_against_eager(barely_trained, tmp_path):
    try:
        compiled_library(SOURCE)
    except CannotCompile as reason:
        pytest.skip(str(reason))
    tables = measured("compiled.py", tmp_path, "--warm-start", str(barely_trained), *TINY)
    norms = tables["‖C‖ of st_ppo"]
    assert [row["‖C‖"] for row in norms] == ["eager", "auto"]
    assert all("last block against off" in row and "exact against off" in row for row in norms)


def test_every_aim_of_the_speed_page_is_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    generated = importlib.import_module("generated")
    page = generated._speed()
    for what, *_ in generated.AIMS:
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {what} |"))
        assert line.endswith(("| yes |", "| no |"))
