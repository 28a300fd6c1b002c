"""The Snakefile, by dry runs: what it plans, and what it says to bad input."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def snakemake(directory: Path, *arguments: str) -> subprocess.CompletedProcess:
    """A dry run of `all` whose results live in `directory`."""
    for name in ("configs", "notebooks", "src", "profiles", "pyproject.toml"):
        if not (directory / name).exists():
            (directory / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "snakemake", "-n", "all", "--snakefile", str(ROOT / "Snakefile")]
    return subprocess.run(
        [*command, "--directory", str(directory), "--cores", "1", *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )


def planned(result: subprocess.CompletedProcess, rule: str) -> int:
    """How many jobs of a rule the dry run's statistics announce."""
    text = result.stdout + result.stderr
    assert result.returncode == 0, text[-3000:]
    rows = [line.split() for line in text.splitlines()]
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == rule and row[1].isdigit()), 0)


@pytest.mark.parametrize(("preset", "runs", "warm_starts"), [("smoke", 11, 1), ("laptop", 31, 3)])
def test_from_nothing_every_run_is_trained(tmp_path, preset, runs, warm_starts):
    result = snakemake(tmp_path, "--config", f"preset={preset}")
    assert planned(result, "train") == runs
    assert planned(result, "warm_start") == warm_starts
    assert planned(result, "derivation") == 5
    assert planned(result, "report") == 1


def test_missing_notebook_is_an_error(tmp_path):
    (tmp_path / "notebooks").mkdir()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        if notebook.stem != "03-clipping-bias":
            (tmp_path / "notebooks" / notebook.name).symlink_to(notebook)
    result = snakemake(tmp_path, "--config", "preset=smoke")
    assert result.returncode != 0
    assert "notebooks/03-clipping-bias.ipynb is missing" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("preset=gigantic", "preset=gigantic: unknown preset; allowed: laptop, smoke"),
        ("kernel=fortran", "no Jupyter kernel named fortran"),
        ("overrides=training.epoch=3", "epoch"),
    ],
)
def test_bad_input_stops_before_anything_runs(tmp_path, option, said):
    result = snakemake(tmp_path, "--config", option)
    assert result.returncode != 0
    assert said in result.stdout + result.stderr
    assert not (tmp_path / "results").exists()
