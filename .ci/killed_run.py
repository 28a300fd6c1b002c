"""Kill a training process of the smoke pipeline with SIGKILL: Snakemake finishes the run all the same.

From the repository root, in its environment, after `make all PRESET=smoke`: python .ci/killed_run.py
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from filelock import SoftFileLease

from stppo.record.ownership import LOCK_FILE
from stppo.record.schema import TIMING_COLUMNS

RUN = Path("results/smoke/runs/OFF_POLICY/token_ppo/seed0")
SECONDS = 300


def tables() -> list[pd.DataFrame]:
    return [pd.read_parquet(RUN / f"{name}.parquet") for name in ("updates", "evaluations")]


def main() -> None:
    undisturbed = tables()
    shutil.rmtree(RUN)
    snakemake = subprocess.Popen(["snakemake", str(RUN / "run.json"), "--config", "preset=smoke"])
    try:
        deadline = time.monotonic() + SECONDS
        while not list((RUN / "checkpoint").glob("[0-9]*")):
            if snakemake.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"FAILED: no checkpoint appeared in {RUN} while snakemake was running")
            time.sleep(0.02)
        os.kill(SoftFileLease(RUN / LOCK_FILE).pid, signal.SIGKILL)  # whoever trains holds the folder
        killed = datetime.now(UTC)
        if (RUN / "run.json").exists() and json.loads((RUN / "run.json").read_text())[
            "status"
        ] == "completed":
            sys.exit("FAILED: the run was over before it could be killed")
        if snakemake.wait(SECONDS):
            sys.exit("FAILED: snakemake gave the killed run up")
    finally:
        snakemake.terminate()
    # A run that went on keeps its start; one that began again would have a later one.
    if datetime.fromisoformat(json.loads((RUN / "run.json").read_text())["started"]) >= killed:
        sys.exit("FAILED: the killed run began again instead of going on from its checkpoint")
    for before, after in zip(undisturbed, tables(), strict=True):
        kept = [column for column in before if column not in TIMING_COLUMNS]
        pd.testing.assert_frame_equal(after[kept], before[kept], check_exact=True)
        print(f"equal: {len(kept)} columns, {len(before)} rows")


if __name__ == "__main__":
    main()
