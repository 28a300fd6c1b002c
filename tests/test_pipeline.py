"""The Snakefile, by dry runs: what it plans, what it says to bad input; how pages are made, by a real run."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from stppo.config.planned import planned_runs
from stppo.derivations.interact import WIDGET_VIEW
from stppo.record.ownership import FolderLock
from stppo.record.runs import collect
from tests.synthetic_runs import make_run

ROOT = Path(__file__).parents[1]
RECORDED = "overrides=+pipeline.recorded=recorded"


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


def with_notebook(folder: Path, name: str, *code: str) -> Path:
    """A notebook of a reader's, of code cells and no metadata, in `folder`/notebooks beside ours."""
    if not (folder / "notebooks").exists():
        (folder / "notebooks").mkdir()
        for notebook in (ROOT / "notebooks").glob("*.ipynb"):
            (folder / "notebooks" / notebook.name).symlink_to(notebook)
    own = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in code])
    nbformat.write(own, folder / "notebooks" / name)
    return folder / "notebooks" / name


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A dry run of the smoke preset from nothing, with a reader's notebook beside ours."""
    folder = tmp_path_factory.mktemp("plan")
    with_notebook(folder, "31-mine.ipynb", "metrics_dir = output_dir = ''")
    return snakemake(folder, "--config", "preset=smoke")


def test_from_nothing_every_run_is_trained(plan):
    assert planned(plan, "train") == 9 and planned(plan, "warm_start") == 1
    assert planned(plan, "collect") == planned(plan, "figures") == planned(plan, "report") == 1


def test_notebooks_are_found_by_their_number(plan):
    names = [path.stem for path in (ROOT / "notebooks").glob("*.ipynb")]
    derivations = [name for name in names if name.startswith("0")]
    assert planned(plan, "derivation") == len(derivations)
    pages = plan.stdout.split("rule all:")[1]
    asked = [*derivations, "20-what-happened", "21-why", "31-mine"]
    assert all(f"results/smoke/{name}.html" in pages for name in asked)


def test_plug_ins_benchmarks_and_claims_are_not_part_of_a_plain_preset(plan):
    assert planned(plan, "apart") == planned(plan, "benchmarks") == planned(plan, "claims") == 0


def test_a_model_with_a_short_name_is_fetched_before_its_warm_start(tmp_path):
    """From nothing `make all PRESET=smollm` needs no other command."""
    result = snakemake(tmp_path, "--config", "preset=smollm", targets=("-n", "-p", "all"))
    assert planned(result, "warm_start") == 1
    command = next(line for line in result.stdout.splitlines() if "stppo warm-start" in line)
    fetched, _, started = command.split("Shell command: ")[-1].strip().partition(" && ")
    assert fetched.startswith("stppo fetch smollm2 >") and "stppo warm-start" in started


@pytest.mark.slow
def test_pages_that_are_targets_of_their_own_take_their_own_options(tmp_path):
    options = ("--config", "preset=smoke", "checkpoint=a b", "n_questions=7")
    pages = ("results/smoke/24-benchmarks.html", "results/smoke/25-plug-ins.html")
    result = snakemake(tmp_path, *options, targets=("-n", "-p", *pages))
    assert planned(result, "benchmarks") == planned(result, "apart") == 1 and planned(result, "html") == 2
    assert planned(result, "train") == 0
    assert "-p n_questions 7" in result.stdout and "-r checkpoint 'a b'" in result.stdout


@pytest.fixture
def recorded(tmp_path):
    """Metrics of a run of each planned kind, below the directory that the pipeline works in."""
    plans = planned_runs("smoke")
    runs = [
        make_run(tmp_path / "made" / p.algorithm, p.algorithm, p.seed, p.regime, iterations=6) for p in plans
    ]
    collect(runs, tmp_path / "recorded" / "metrics")
    return tmp_path / "recorded" / "metrics"


@pytest.mark.slow
def test_recorded_metrics_are_rendered_without_training_and_a_missing_run_is_named(tmp_path, recorded):
    evaluations = pd.read_parquet(recorded / "evaluations.parquet")
    evaluations[evaluations["algorithm"] != "st_ppo"].to_parquet(
        recorded / "evaluations.parquet", index=False
    )
    result = snakemake(tmp_path, "--config", "preset=smoke", RECORDED)
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert "lacks 1 of 9 planned runs (OFF_POLICY/st_ppo/0)" in said and "retrain=true" in said

    allowed = snakemake(tmp_path, "--config", "preset=smoke", RECORDED, "missing=allow")
    assert planned(allowed, "train") == planned(allowed, "warm_start") == planned(allowed, "derivation") == 0
    assert planned(allowed, "collect") == planned(allowed, "figures") == planned(allowed, "report") == 1
    trained = snakemake(tmp_path, "--config", "preset=smoke", RECORDED, "retrain=true")
    assert planned(trained, "train") == 9


@pytest.mark.slow
def test_two_of_one_preset_are_refused_and_a_killed_one_is_followed(tmp_path, recorded):
    target, options = "results/smoke/metrics/runs.json", ("--config", "preset=smoke", RECORDED)
    killed = tmp_path / ".snakemake/locks/0.output.lock"  # as Snakemake leaves it
    killed.parent.mkdir(parents=True)
    killed.write_text(target + "\n")
    with FolderLock(tmp_path / "results/smoke/logs"):
        second = snakemake(tmp_path, *options, targets=[target])
    assert second.returncode != 0 and not (tmp_path / target).exists()
    said = [line for line in (second.stdout + second.stderr).splitlines() if f"process {os.getpid()}" in line]
    assert len(said) == 1 and "preset=smoke" in said[0] and "wait for it or end it" in said[0]
    third = snakemake(tmp_path, *options, targets=[target])
    assert third.returncode == 0 and (tmp_path / target).exists(), third.stderr
    assert not (tmp_path / "results/smoke/logs/.lock").exists()


@pytest.mark.slow
def test_notebooks_of_ones_own_come_and_go_and_a_broken_one_loses_nothing(tmp_path):
    draws = "from PIL import Image; Image.new('RGB', (9, 9)).save(f'{output_dir}/own_picture.png'); 1 / 0"
    broken = with_notebook(tmp_path, "31-broken.ipynb", draws)
    (tmp_path / "recorded").symlink_to(ROOT / "results" / "reference" / "laptop")
    results, options = tmp_path / "results" / "laptop", ("--config", "preset=laptop", RECORDED)
    result = snakemake(tmp_path, *options, targets=["all"])
    assert result.returncode != 0
    said = "31-broken.ipynb stopped with ZeroDivisionError: division by zero; results/laptop/31-broken.html"
    assert said in result.stdout + result.stderr
    page = (results / "report.html").read_text(encoding="utf-8")
    assert 'href="31-broken.html"' in page and 'href="20-what-happened.html"' in page
    assert 'id="own_picture"' in page and (results / "figures" / "learning.png").is_file()
    assert "ZeroDivisionError" in (results / "31-broken.html").read_text(encoding="utf-8")

    broken.unlink()
    for name in ("20-what-happened.ipynb", "00-st-ppo-on-one-page.ipynb"):  # as JupyterLab saves it
        notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "another name"}
        notebook.cells[-1].metadata["editable"] = True
        (tmp_path / "notebooks" / name).unlink()
        nbformat.write(notebook, tmp_path / "notebooks" / name)
    gone = snakemake(tmp_path, *options)
    assert planned(gone, "report") == 1
    assert planned(gone, "figures") == planned(gone, "html") == planned(gone, "own_notebook") == 0
    rendered = snakemake(tmp_path, *options, targets=["all"])
    assert rendered.returncode == 0 and "31-broken" not in (results / "report.html").read_text()

    with_notebook(tmp_path, "32-good.ipynb", "%matplotlib inline", "print(metrics_dir)")
    added = snakemake(tmp_path, *options)
    assert planned(added, "own_notebook") == planned(added, "html") == planned(added, "report") == 1
    assert planned(added, "figures") == planned(added, "collect") == 0

    with_notebook(tmp_path, "33-ends.ipynb", "import sys; sys.exit(0)", "1")
    ended = snakemake(tmp_path, *options, targets=["results/laptop/status/33-ends.ok"])
    assert ended.returncode != 0 and (results / "33-ends.html").is_file()
    assert "33-ends.ipynb stopped with SystemExit" in ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_notebook_of_ours_that_fails_costs_no_report_and_is_executed_again(tmp_path, recorded):
    with_notebook(tmp_path, "31-mine.ipynb", "1")
    ours = tmp_path / "notebooks" / "21-why.ipynb"
    notebook = nbformat.read(ours, as_version=4)
    ours.unlink()
    notebook.cells.append(
        nbformat.v4.new_code_cell("1 / len(__import__('pathlib').Path('broken').read_text())")
    )
    nbformat.write(notebook, ours)
    results, options = tmp_path / "results" / "smoke", ("--config", "preset=smoke", RECORDED)
    failed = snakemake(tmp_path, *options, targets=["all"])
    said = "21-why.ipynb stopped with FileNotFoundError: "
    assert failed.returncode != 0 and said in failed.stdout + failed.stderr
    page = (results / "report.html").read_text(encoding="utf-8")
    assert 'href="21-why.html"' in page and page.count("(stopped with an error)") == 1
    assert (results / "figures" / "learning.png").is_file()
    again = snakemake(tmp_path, *options)
    assert planned(again, "figures") == 1 and planned(again, "notebook_ended") == 2  # 20 is of the same job
    (tmp_path / "broken").write_text("mended")
    assert snakemake(tmp_path, *options, targets=["all"]).returncode == 0


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("prset=smoke", "--config prset: unknown"),
        ("preset=gigantic", "preset=gigantic: unknown preset; allowed: benchmark, "),
        ("kernel=fortran", "no Jupyter kernel named fortran"),
        ("overrides=+pipeline.resources.gpu=2", "takes 2 GPU; say how many there are: --resources gpu=1"),
        ("overrides=training.device=cuda", "takes 1 GPU; say how many there are: --resources gpu=1"),
        ("overrides=training.epoch=3", "epoch"),
        ("overrides=seed=1 policy.lora={rank: 16}", "write {rank:16}"),
    ],
)
def test_bad_input_stops_before_anything_runs(tmp_path, option, said):
    result = snakemake(tmp_path, "--config", option)
    assert result.returncode != 0
    assert said in result.stdout + result.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_pages_link_pages_and_need_no_widgets(tmp_path):
    bundle = {
        WIDGET_VIEW: {"model_id": "m", "version_major": 2, "version_minor": 0},
        "text/html": "<p>still</p>",
    }
    output = nbformat.v4.new_output("display_data", bundle)
    links = (
        "[next](21-why.ipynb) [part](03-clipping-bias.ipynb#part) [run](10-train.ipynb) "
        "[plug](25-plug-ins.ipynb#a) [other](https://a.org/02-b.ipynb)"
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
    assert 'href="../21-why.html"' in page and 'href="../03-clipping-bias.html#part"' in page
    notebooks = "../../../notebooks"
    assert f'href="{notebooks}/10-train.ipynb"' in page and f'href="{notebooks}/25-plug-ins.ipynb#a"' in page
    assert 'href="https://a.org/02-b.ipynb"' in page
