"""`--profile profiles/slurm`: what it plans, and what a run asks of Slurm, by stand-ins for its commands."""

import shlex

import pytest

from stppo.config.identity import warm_start_dir
from stppo.config.planned import planned_runs
from tests.test_pipeline import planned, snakemake

pytestmark = pytest.mark.slow  # processes and dry runs of whole graphs

pytest.importorskip("snakemake_executor_plugin_slurm", reason="needs the plug-in: pip install -e '.[slurm]'")

PROFILE = ("--profile", "profiles/slurm", "--config", "preset=smoke")
GPU = "overrides=+pipeline.resources.gpu=2 +pipeline.resources.mem_mb=32000 +pipeline.resources.runtime=90"

# A cluster of one node: sbatch runs the job at once, in Slurm's environment, and notes how it was called.
COMMANDS = {
    "sbatch": """printf '%s\\n' "$@" > "$STAND_INS/sbatch.txt"
for argument; do case "$argument" in --wrap=*) job="${argument#--wrap=}";; esac; done
SLURM_JOB_ID=7 sh -c "$job" > "$STAND_INS/job.log" 2>&1 && state=COMPLETED || state=FAILED
echo "7|$state" > "$STAND_INS/state"; echo 7""",
    "srun": """printf '%s\\n' "$@" > "$STAND_INS/srun.txt"
while case "$1" in -*) true;; *) false;; esac; do shift; done; exec "$@" """,
    "sacct": """case "$*" in *JobIdRaw*) cat "$STAND_INS/state";; *) echo lab;; esac""",
    "sacctmgr": "echo lab",
    "sinfo": "echo 'gpu*'",
    "scancel": "true",
    # In place of a training run: what it leaves behind, empty.
    "papermill": """cd "$(dirname "$2")"
touch 10-train.ipynb run.json updates.parquet evaluations.parquet""",
}


def train_resources(result) -> set[str]:
    """The `resources:` lines of the rule `train` in a dry run."""
    assert result.returncode == 0, result.stdout + result.stderr
    blocks = (result.stdout + result.stderr).split("rule train:")[1:]
    return {next(line for line in block.splitlines() if "resources:" in line) for block in blocks}


def test_dry_run_plans_the_graph_with_the_resources_of_the_preset(tmp_path):
    result = snakemake(tmp_path, *PROFILE)
    assert planned(result, "train") == 9
    assert planned(result, "report") == 1
    (plain,) = train_resources(result)
    assert "gpu=0" in plain and "mem_mb=2000" in plain and "runtime=240" in plain
    (with_gpu,) = train_resources(snakemake(tmp_path, *PROFILE, GPU))
    assert "gpu=2" in with_gpu and "mem_mb=32000" in with_gpu and "runtime=90" in with_gpu


@pytest.mark.parametrize(("name", "value"), [("gpu", "many"), ("mem_mb", "1.5")])
def test_bad_resource_is_one_line(tmp_path, name, value):
    result = snakemake(tmp_path, *PROFILE, f"overrides=+pipeline.resources.{name}={value}")
    assert result.returncode != 0
    assert f"pipeline.resources.{name} = " in result.stdout + result.stderr
    assert "must be a whole number, 0 or more" in result.stdout + result.stderr


def test_submitted_training_run_asks_for_what_the_preset_says(tmp_path, monkeypatch):
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, script in COMMANDS.items():
        (stubs / name).write_text(f"#!/bin/sh\n{script}\n")
        (stubs / name).chmod(0o755)
    monkeypatch.setenv("STAND_INS", str(stubs))
    plan = next(run for run in planned_runs("smoke") if run.algorithm == "st_ppo")
    start = tmp_path / "results/smoke/warm_start" / warm_start_dir(plan.config).name
    start.mkdir(parents=True)
    (start / "warm_start.json").touch()

    record = f"results/smoke/runs/{plan.name}/run.json"
    options = ["--slurm-init-seconds-before-status-checks", "1", "--latency-wait", "5"]
    result = snakemake(tmp_path, *PROFILE, GPU, *options, targets=[record], path_first=stubs)
    log = stubs / "job.log"
    assert result.returncode == 0, result.stdout + result.stderr + (log.read_text() if log.exists() else "")
    assert (tmp_path / record).exists()
    called = (stubs / "sbatch.txt").read_text().splitlines()
    assert {"--gpus=2", "--cpus-per-task=1"} <= set(called)
    assert called[called.index("--mem") + 1] == "32000"
    assert called[called.index("-t") + 1] == "90"
    assert "--gpus=2" in (stubs / "srun.txt").read_text().splitlines()  # the step inside keeps them
    (job,) = (part for part in called if part.startswith("--wrap="))
    assert any(part.startswith(f"train:run={plan.name}") for part in shlex.split(job.removeprefix("--wrap=")))
