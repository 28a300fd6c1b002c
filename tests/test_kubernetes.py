"""`--profile profiles/kubernetes`: what it plans; the real plug-in's manifests; a retry that shares no folder with what was lost."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from tests.conftest import TINY
from tests.kubernetes_api import Api
from tests.test_pipeline import ROOT, planned, snakemake
from tests.training_runs import assert_same_metrics

pytestmark = pytest.mark.slow
for module in ("executor_plugin_kubernetes", "storage_plugin_fs"):
    pytest.importorskip(
        f"snakemake_{module}",
        reason="needs pip install snakemake-executor-plugin-kubernetes snakemake-storage-plugin-fs",
    )
if shutil.which("rsync") is None:
    pytest.skip("Snakemake's storage plug-in fs needs rsync", allow_module_level=True)

# Long enough to be killed between two checkpoints, and small.
SMALL = [o for o in TINY if not o.startswith(("preset=", "training.iterations="))]
SMALL += [
    "training.iterations=40",
    "warm_start.max_steps=20",
    "warm_start.evaluate_every=20",
    "warm_start.final_samples=32",
    "warm_start.target_success=0",
]
ALGORITHM = f"overrides={' '.join(SMALL)} pipeline.regimes.OFF_POLICY.algorithms=[st_ppo]"
CONFIG = ("--config", "preset=smoke", ALGORITHM)
RUN = "runs/OFF_POLICY/st_ppo/seed0"


def kubernetes(store: Path | None, *arguments: str, directory: Path = ROOT, **environment: str):
    """`snakemake --profile profiles/kubernetes`, run in a checkout, with the folder `store` for a bucket."""
    storage = ["--default-storage-provider", "fs"]
    storage += ["--default-storage-prefix", str(store)] if store else []
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", "profiles/kubernetes", *storage, *arguments],
        cwd=directory, capture_output=True, text=True, timeout=1800, env=os.environ | environment,
    )  # fmt: skip


def test_dry_run_needs_no_cluster_and_ends_with_the_metrics(tmp_path):
    result = kubernetes(tmp_path, "-n", "--config", "preset=smoke")
    assert planned(result, "train") == 9 and planned(result, "warm_start") == planned(result, "collect") == 1
    assert "gpu=" not in result.stdout
    gpu = kubernetes(tmp_path, "-n", *CONFIG[:2], "overrides=training.device=cuda")
    assert "gpu_manufacturer=nvidia, gpu=1" in gpu.stdout


@pytest.mark.parametrize(
    ("stored", "config", "said"),
    [
        (False, "preset=smoke", "--default-storage-prefix is missing: name the bucket"),
        (True, "present=smoke", "--config present: unknown; allowed here: preset, overrides"),
        (True, "preset=smok", "preset.*smoke"),
    ],
)
def test_bad_input_is_one_line(tmp_path, stored, config, said):
    result = kubernetes(tmp_path if stored else None, "-n", "--config", config)
    assert result.returncode != 0
    lines = (result.stdout + result.stderr).splitlines()
    assert any(re.search(said, line) for line in lines), lines[-20:]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """(folder of the storage, API, times) of a pipeline whose training pod was killed once, with all that it had."""
    folder, store = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("store")
    for name in ("Snakefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("configs", "notebooks", "profiles"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    subprocess.run("git init -q . && git add -A", shell=True, cwd=folder, check=True)  # what pods are sent
    killed = []

    def watch(job, kill) -> None:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        if killed or "train:run=" not in container["args"][1]:
            return
        while not [*(store / "checkpoints").glob("*/*-*/state.json")]:
            time.sleep(0.02)
        kill()
        killed.append(datetime.now(UTC))

    with Api(tmp_path_factory.mktemp("api") / "pods", watch) as api:
        options = ("--container-image", "registry/stppo:1", "--seconds-between-status-checks", "1")
        result = kubernetes(
            store, *options, "--envvars", "OWN_TOKEN", *CONFIG,
            directory=folder, KUBECONFIG=str(api.config), OWN_TOKEN="of mine",
        )  # fmt: skip
        logs = "".join(file.read_text() for file in (api.folder).glob("*.log"))
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:] + logs[-5000:]
    return store, api, killed


def test_manifest_has_image_command_resources_and_environment(disturbed):
    _, api, _ = disturbed
    kinds = [
        "warm_start:",
        "train:run=OFF_POLICY/st_ppo/seed0",
        "train:run=OFF_POLICY/st_ppo/seed0",
        "collect:",
    ]
    for job, kind in zip(api.jobs, kinds, strict=True):
        spec = job["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert container["image"] == "registry/stppo:1" and spec["restartPolicy"] == "Never"
        assert container["command"] == ["/bin/sh"] and kind in container["args"][1]
        assert container["workingDir"] == "/workdir" and spec["volumes"] == [
            {"name": "workdir", "emptyDir": {}}
        ]
        memory = "4000M" if kind == "collect:" else "2000M"
        asked = {"cpu": "950m", "memory": memory, "ephemeral-storage": "8000M"}
        assert container["resources"]["requests"] == asked
        asked_for = {variable["name"]: variable["valueFrom"] for variable in container["env"]}
        assert "secretKeyRef" in asked_for["OWN_TOKEN"]


def test_retry_in_an_empty_pod_goes_on_to_the_same_numbers(disturbed, tmp_path):
    store, _, (killed,) = disturbed
    run = store / "results/smoke" / RUN
    record = json.loads((run / "run.json").read_text())
    # A run that went on keeps its start; one that began again would have a later one.
    assert record["status"] == "completed" and datetime.fromisoformat(record["started"]) < killed
    result = snakemake(tmp_path, *CONFIG, targets=[f"results/smoke/{RUN}/run.json"])
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert_same_metrics(tmp_path / "results/smoke" / RUN, run)
    collected = pd.read_csv(store / "results/smoke/metrics/summary.csv")
    assert list(collected["algorithm"]) == ["st_ppo"] and (run / "policy").is_dir()
