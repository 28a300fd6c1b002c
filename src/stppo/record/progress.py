"""How far the runs of a folder are, from what they have recorded so far: `run.json`, `evaluations.parquet`,
`config.yaml`.

A running run writes them at each evaluation, so this works from another terminal, and on a cluster's shared
folder.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from stppo.files import duration, parse_json, printable, read_yaml
from stppo.record.ownership import in_use
from stppo.record.schema import COMPLETED, CONFIG_FILE, EVALUATIONS_FILE, RUN_FILE, RUNNING, is_set_aside

_WIDTH = 20  # of a bar


@dataclass(frozen=True)
class Progress:
    """One run as it stands on disk."""

    name: str  # path below the folder that was asked about
    status: str
    iteration: int
    iterations: int  # that it is to have
    success: float | None  # newest sampled success on held-out questions
    seconds: float | None  # an iteration, evaluations included; None before the first
    age: float  # seconds since it was written
    is_stopped: bool  # it has not ended, and nobody goes on with it

    def state(self) -> str:
        """Whether it has ended or stopped, or how long it still needs at the pace so far."""
        if self.is_stopped:
            return f"stopped {duration(self.age)} ago: the same command goes on from its checkpoint"
        if self.status != RUNNING:
            return self.status.replace("_", "-")
        if self.seconds is None:
            return "started"
        left = max(0.0, (self.iterations - self.iteration) * self.seconds - self.age)
        return f"{duration(self.seconds)} an iteration, about {duration(left)} left"


def read_progress(record: Path, folder: Path) -> Progress | None:
    """The run whose `run.json` this is; None where its files are not (yet) readable."""
    try:
        content: dict[str, Any] = parse_json(record.read_bytes())
        config = read_yaml(record.parent / CONFIG_FILE)
        evaluations = pd.read_parquet(record.parent / EVALUATIONS_FILE)
        sampled = evaluations[evaluations["temperature"] > 0]["success"]
        status, done, iterations = content["status"], content["iterations"], config["training"]["iterations"]
        if not (isinstance(status, str) and 0 <= done <= iterations and iterations > 0):
            return None
        return Progress(
            name=printable(str(record.parent.relative_to(folder))),
            status=status,
            iteration=done,
            iterations=iterations,
            success=float(sampled.iloc[-1]) if len(sampled) else None,
            seconds=content["wall_seconds"] / done if done else None,
            age=max(0.0, time.time() - record.stat().st_mtime),
            is_stopped=status == RUNNING and not in_use(record.parent),
        )
    except Exception:  # whatever a file that is half written, or none of ours, leads to
        return None


def all_progress(folder: str | Path) -> list[Progress]:
    """Every run below a folder, not those that were set aside. FileNotFoundError where there is no such
    folder."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no folder {folder}; runs are below results/PRESET")
    records = sorted(path for path in Path(folder).rglob(RUN_FILE) if not is_set_aside(path, Path(folder)))
    found = (read_progress(record, Path(folder)) for record in records)
    return [run for run in found if run is not None]


def table(runs: list[Progress]) -> str:
    """One line for each run, with a bar, and a line that counts them."""
    if not runs:
        return "no run has recorded anything yet"
    width = max(len(run.name) for run in runs)
    lines = []
    for run in runs:
        bar = "#" * round(_WIDTH * run.iteration / run.iterations)
        success = "" if run.success is None else f"{run.success:.2f}"
        lines.append(
            f"{run.name:<{width}}  {bar:.<{_WIDTH}}  {run.iteration:>4} of {run.iterations:<4}  "
            f"success {success:4}  {run.state()}"
        )
    ended = sum(run.status == COMPLETED for run in runs)
    running = sum(run.status == RUNNING and not run.is_stopped for run in runs)
    return "\n".join([*lines, f"{len(runs)} runs begun: {ended} completed, {running} running"])
