"""`--profile profiles/slurm` on a real Slurm of two nodes, up to the metrics: a killed job, a requeued one, a lost node."""

import json
import os
import socket
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from stppo.preloaded import SERVER
from tests.engines.slurm_cluster import NODES, Cluster, until, why_not
from tests.test_pipeline import snakemake
from tests.training_runs import assert_same_metrics

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
pytest.importorskip("snakemake_executor_plugin_slurm", reason="needs the plug-in: pip install -e '.[slurm]'")

KILLED, REQUEUED, LOST = ALGORITHMS = ("token_ppo", "st_ppo", "s_ppo")
OVERRIDES = f"training.iterations=12 pipeline.regimes.OFF_POLICY.algorithms=[{','.join(ALGORITHMS)}]"
CONFIG = ("--config", "preset=smoke", f"overrides={OVERRIDES}")
# The login process asks for a job's state soon; no slurmdbd here, and so no sacct.
SLURM = ("--slurm-init-seconds-before-status-checks", "1", "--slurm-status-command", "squeue")
SECONDS = 600


def run_folder(folder: Path, algorithm: str) -> Path:
    return folder / f"results/smoke/runs/OFF_POLICY/{algorithm}/seed0"


def is_training(job: dict[str, str], algorithm: str) -> bool:
    """Snakemake's comment names rule and wildcards, with _ for /."""
    return job["comment"].startswith("rule_train") and job["comment"].endswith(f"_{algorithm}_seed0")


class Decoy:
    """What a login process could leave behind in its environment: a server, which no job may call."""

    def __init__(self, path: Path) -> None:
        self.calls = 0
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        while True:
            caller, _ = self.listener.accept()
            self.calls += 1
            caller.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same runs without Slurm."""
    folder = tmp_path_factory.mktemp("undisturbed")
    targets = [str((run_folder(folder, name) / "run.json").relative_to(folder)) for name in ALGORITHMS]
    result = snakemake(folder, *CONFIG, targets=targets)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """Collected metrics, made on the cluster; in `seen`, what was done to each of three jobs and when."""
    folder = tmp_path_factory.mktemp("pipeline")
    for name in ("configs", "notebooks", "src", "profiles", "pyproject.toml"):
        (folder / name).symlink_to(Path(__file__).parents[2] / name)
    short = tmp_path_factory.mktemp("s")
    decoy = Decoy(short / "server")
    seen: dict[str, dict] = {"decoy": decoy}
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = cluster.environment | {
            "PATH": path,
            SERVER: str(short / "server"),
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "snakemake",
            "results/smoke/metrics/summary.csv",
            "--snakefile",
            str(Path(__file__).parents[2] / "Snakefile"),
        ]
        with open(folder / "snakemake.log", "wb") as out:
            pipeline = subprocess.Popen(
                [*command, "--directory", str(folder), "--profile", "profiles/slurm", *SLURM, *CONFIG],
                cwd=folder, env=environment, stdout=out, stderr=out,
            )  # fmt: skip
        try:
            waiting = set(ALGORITHMS)

            def strike() -> bool:
                for job in cluster.jobs():
                    for name in sorted(waiting):
                        checkpoints = (run_folder(folder, name) / "checkpoint").glob("[0-9]*")
                        if job["state"] == "RUNNING" and is_training(job, name) and any(checkpoints):
                            waiting.remove(name)
                            seen[name] = job | {"time": datetime.now(UTC)}
                            if name == KILLED:
                                cluster.call("scancel", "--signal=KILL", "--full", job["id"])
                            elif name == REQUEUED:
                                cluster.call("scontrol", "requeue", job["id"])
                            else:
                                cluster.lose_node(job["node"])
                return not waiting or pipeline.poll() is not None

            until(strike, SECONDS, f"checkpoints of {waiting}", step=0.2)
            if LOST in seen:
                node = seen[LOST]["node"]
                until(lambda: cluster.state(node) == "DOWN", 90, f"{node} counts as lost")
                cluster.start_node(node)
                until(lambda: cluster.state(node) not in ("", "DOWN"), 60, f"{node} is back")
            seen["status"] = pipeline.wait(SECONDS)
            seen["jobs"] = {job["id"]: job for job in cluster.jobs()}
        finally:
            pipeline.terminate()
            pipeline.wait()
            seen["log"] = (folder / "snakemake.log").read_text()
            print(seen["log"][-6000:])
    return folder, seen


def test_pipeline_ends_although_a_job_was_killed_one_requeued_and_a_node_lost(disturbed):
    folder, seen = disturbed
    assert seen["status"] == 0 and set(ALGORITHMS) <= set(seen), seen["log"][-3000:]
    collected = pd.read_csv(folder / "results/smoke/metrics/summary.csv")
    assert set(collected["algorithm"]) == set(ALGORITHMS) and set(collected["status"]) == {"completed"}
    assert {job["node"] for job in seen["jobs"].values()} == set(NODES)


def test_killed_job_is_tried_again(disturbed):
    """By Snakemake in a second job, or by Slurm in the same one where its node was lost meanwhile."""
    _, seen = disturbed
    tries = [job for job in seen["jobs"].values() if is_training(job, KILLED)]
    assert "COMPLETED" in {job["state"] for job in tries}
    assert sum(1 + int(job["restarts"]) for job in tries) >= 2


@pytest.mark.parametrize("algorithm", [REQUEUED, LOST])
def test_slurm_runs_the_same_job_again(disturbed, algorithm):
    _, seen = disturbed
    job = seen["jobs"][seen[algorithm]["id"]]
    assert job["state"] == "COMPLETED" and int(job["restarts"]) >= 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_disturbed_run_goes_on_from_its_checkpoint_to_the_same_numbers(disturbed, undisturbed, algorithm):
    folder, seen = disturbed
    record = json.loads((run_folder(folder, algorithm) / "run.json").read_text())
    # A run that went on keeps its start; one that began again would have a later one.
    assert datetime.fromisoformat(record["started"]) < seen[algorithm]["time"]
    assert_same_metrics(run_folder(undisturbed, algorithm), run_folder(folder, algorithm))


def test_no_job_is_run_by_a_server_of_the_login_process(disturbed):
    _, seen = disturbed
    assert seen["decoy"].calls == 0
