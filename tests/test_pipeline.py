"""The Snakefile, by dry runs: what it plans, what it says to bad input; and how pages are made, by a real run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from stppo.interact import WIDGET_VIEW

ROOT = Path(__file__).parents[1]


def snakemake(
    directory: Path, *arguments: str, targets=("-n", "all"), path_first: Path | None = None
) -> subprocess.CompletedProcess:
    """A run, dry unless there are other targets, whose results live in `directory`.

    Commands are found beside this Python, before that in `path_first`.
    """
    folders = [str(path) for path in (path_first, Path(sys.executable).parent) if path]
    for name in ("configs", "notebooks", "src", "profiles", "pyproject.toml"):
        if not (directory / name).exists():
            (directory / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "snakemake", *targets, "--snakefile", str(ROOT / "Snakefile")]
    return subprocess.run(
        [*command, "--directory", str(directory), "--cores", "1", *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        env=os.environ | {"PATH": ":".join([*folders, os.environ["PATH"]])},
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


RECORDED = "overrides=+pipeline.recorded=recorded"


@pytest.fixture
def recorded(tmp_path):
    """A copy of the committed laptop metrics, below the directory that the pipeline works in."""
    return Path(shutil.copytree(ROOT / "results/reference/laptop/metrics", tmp_path / "recorded" / "metrics"))


def test_recorded_metrics_are_rendered_without_training(tmp_path, recorded):
    result = snakemake(tmp_path, "--config", "preset=laptop", RECORDED)
    assert planned(result, "train") == planned(result, "warm_start") == planned(result, "derivation") == 0
    assert planned(result, "collect") == planned(result, "figures") == planned(result, "report") == 1
    trained = snakemake(tmp_path, "--config", "preset=laptop", RECORDED, "retrain=true")
    assert planned(trained, "train") == 31


def test_deleted_run_of_recorded_metrics_is_named(tmp_path, recorded):
    evaluations = pd.read_parquet(recorded / "evaluations.parquet")
    gone = (
        (evaluations["algorithm"] == "st_ppo") & (evaluations["seed"] == 1) & (evaluations["regime"] == "A")
    )
    evaluations[~gone].to_parquet(recorded / "evaluations.parquet", index=False)
    result = snakemake(tmp_path, "--config", "preset=laptop", RECORDED)
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert "lacks 1 of 31 planned runs (A/st_ppo/1)" in said and "retrain=true" in said
    allowed = snakemake(tmp_path, "--config", "preset=laptop", RECORDED, "missing=allow")
    assert planned(allowed, "report") == 1


def test_claims_know_what_was_planned(tmp_path, recorded):
    target = "results/laptop/claims/claims.csv"
    result = snakemake(tmp_path, "--config", "preset=laptop", RECORDED, targets=[target])
    assert result.returncode == 0, result.stdout + result.stderr
    plan = json.loads((tmp_path / "results/laptop/planned.json").read_text(encoding="utf-8"))
    assert sum(plan.values()) == 31 and plan["A/token_ppo"] == 3
    assert pd.read_csv(tmp_path / target).empty, "the laptop preset has no claims"


def test_plug_ins_are_a_target_of_their_own(tmp_path):
    assert planned(snakemake(tmp_path, "--config", "preset=smoke"), "plug_ins") == 0
    page = snakemake(tmp_path, "--config", "preset=smoke", targets=("-n", "results/smoke/25-plug-ins.html"))
    assert planned(page, "plug_ins") == planned(page, "html") == 1 and planned(page, "train") == 0


def test_benchmarks_are_a_target_of_their_own_with_their_own_options(tmp_path):
    assert planned(snakemake(tmp_path, "--config", "preset=smoke"), "benchmarks") == 0
    options = ("--config", "preset=smoke", "checkpoint=a b", "n_questions=7")
    page = snakemake(tmp_path, *options, targets=("-n", "-p", "results/smoke/24-benchmarks.html"))
    assert planned(page, "benchmarks") == planned(page, "html") == 1 and planned(page, "train") == 0
    assert "-p n_questions 7" in page.stdout and "-r checkpoint 'a b'" in page.stdout


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
        ("preset=gigantic", "preset=gigantic: unknown preset; allowed: laptop, "),
        ("kernel=fortran", "no Jupyter kernel named fortran"),
        ("overrides=+pipeline.resources.gpu=2", "takes 2 GPU; say how many there are: --resources gpu=1"),
        ("overrides=training.epoch=3", "epoch"),
        ("overrides=seed=1 'world.benchmark=[nq,hotpotqa]'", "quote no first and no last override"),
        ("overrides=seed=1 policy.lora={rank: 16}", "write {rank:16}"),
    ],
)
def test_bad_input_stops_before_anything_runs(tmp_path, option, said):
    result = snakemake(tmp_path, "--config", option)
    assert result.returncode != 0
    assert said in result.stdout + result.stderr
    assert not (tmp_path / "results").exists()


def test_pages_link_pages_and_need_no_widgets(tmp_path):
    bundle = {
        WIDGET_VIEW: {"model_id": "m", "version_major": 2, "version_minor": 0},
        "text/html": "<p>still</p>",
    }
    output = nbformat.v4.new_output("display_data", bundle)
    links = (
        "[next](21-clip-ratio.ipynb) [part](03-clipping-bias.ipynb#part) [run](10-train.ipynb) [plug](25-plug-ins.ipynb#a)"
        " [other](https://a.org/02-b.ipynb)"
    )
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell(links),
            nbformat.v4.new_code_cell("1", outputs=[output], execution_count=1),
        ],
        metadata={"widgets": {"application/vnd.jupyter.widget-state+json": {"state": {"m": {}}}}},
    )
    folder = tmp_path / "results" / "smoke" / "runs"
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / "page.ipynb")
    result = snakemake(tmp_path, "--config", "preset=smoke", targets=["results/smoke/runs/page.html"])
    assert result.returncode == 0, result.stdout + result.stderr
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "<p>still</p>" in page and "html-manager" not in page
    assert 'href="../21-clip-ratio.html"' in page and 'href="../03-clipping-bias.html#part"' in page
    notebooks = "../../../notebooks"
    assert f'href="{notebooks}/10-train.ipynb"' in page and f'href="{notebooks}/25-plug-ins.ipynb#a"' in page
    assert 'href="https://a.org/02-b.ipynb"' in page
