"""Every planned run of a preset, trained without notebooks: several processes, each of which trains many runs.

`snakemake all` executes a notebook per run; hundreds of runs of a study or a benchmark need none, and importing torch once
a process instead of once a run saves more time than a short run takes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import multiprocessing
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from stppo.config import Config, PlannedRun, warm_start_dir
from stppo.files import repository_path
from stppo.ownership import announce_parent, is_orphan


@dataclass(frozen=True)
class Done:
    """One finished job of a campaign; `error` says in one line why a job failed."""

    name: str
    seconds: float
    text: str
    error: str | None = None


def run_folder(preset: str, run: PlannedRun) -> Path:
    """Where a planned run is recorded, by the pipeline and here alike."""
    return repository_path("results") / preset / "runs" / run.name


def train_planned(
    preset: str, runs: Sequence[PlannedRun], jobs: int, report: Callable[[Done, int, int], None]
) -> list[Done]:
    """Train runs in their order, `jobs` at a time, each warm start before the first run that needs it.

    A finished run is found complete and costs a second; an interrupted one goes on from its checkpoint. report(done, n,
    total) is called after each job. A run that fails is reported and the others go on. Returns what failed.
    """
    for run in runs:
        run.config  # noqa: B018 (composed and checked before anything is trained)
    starts = {run.name: warm_start_dir(run.config) for run in runs}
    pending, ready, failed = list(runs), set[Path](), list[Done]()
    total = len(runs) + len(set(starts.values()))
    announce_parent()  # killed, it leaves no run behind for longer than to its next checkpoint
    finished = 0
    active: dict[Future[Done], tuple[PlannedRun | None, Path]] = {}
    context = multiprocessing.get_context("spawn")  # torch does not survive a fork with threads
    with ProcessPoolExecutor(jobs, context, initializer=_quiet) as pool:
        try:
            while pending or active:
                while len(active) < jobs and (job := _next(pending, starts, ready, active)):
                    run, start = job
                    if run is None:
                        first = next(r for r in pending if starts[r.name] == start)
                        active[pool.submit(_start, first.config)] = (None, start)
                    else:
                        pending.remove(run)
                        folder = run_folder(preset, run)
                        active[pool.submit(_train, run.name, run.config, folder, start)] = (run, start)
                for future in wait(active, return_when=FIRST_COMPLETED).done:
                    run, start = active.pop(future)
                    done = future.result()
                    finished += 1
                    if done.error is not None:
                        failed.append(done)
                    if run is None and done.error is None:
                        ready.add(start)
                    elif run is None:
                        pending = [other for other in pending if starts[other.name] != start]
                    report(done, finished, total)
        except KeyboardInterrupt:
            for process in list(pool._processes.values()):
                process.terminate()
            raise
    return failed


def _next(
    pending: list[PlannedRun], starts: dict[str, Path], ready: set[Path], active: dict
) -> tuple[PlannedRun | None, Path] | None:
    """The first run whose warm start is there, or the first warm start that nobody makes yet."""
    making = {start for run, start in active.values() if run is None}
    for run in pending:
        start = starts[run.name]
        if start in ready:
            return run, start
        if start not in making:
            return None, start
    return None


def _quiet() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger().setLevel(logging.WARNING)


def _between_jobs() -> None:
    """End where the campaign is gone: its queue still holds jobs. Else give back what the job before has freed: glibc keeps
    it in pieces, and a process of ten runs grew to twice one's."""
    if is_orphan():
        os._exit(1)
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)


def _start(config: dict) -> Done:
    from stppo.training.warm_start import WARM_START_FILE, warm_start

    _between_jobs()
    path, began = warm_start_dir(config), time.perf_counter()
    name = f"warm start {path.name}"
    try:
        if (path / WARM_START_FILE).is_file():
            return Done(name, 0.0, "there already")
        if (kept := _recorded_start(config, path.name)) is not None:
            shutil.copytree(kept, path)
            return Done(name, 0.0, f"that of {kept.parent}, which the recorded runs began from")
        record = warm_start(config, path, progress=False, again=False)
    except Exception as error:  # one job's failure is reported; the others go on
        return Done(name, time.perf_counter() - began, "", _line(error))
    text = f"sampled {record['success_sampled']:.2f}, greedy {record['success_greedy']:.2f}"
    return Done(name, time.perf_counter() - began, text)


def _recorded_start(config: Config, name: str) -> Path | None:
    """The warm start that the preset's recorded runs of this world began from, where it was kept: made again on another
    kind of processor it has other weights, and the runs of a world are compared because they begin alike.

    It is told by its seed, world and policy: the rest of its folder's name changes with the code, its weights do not.
    One that had reached this run's target before its last measurement is another start.
    """
    from stppo.training.warm_start import WARM_START_FILE, made_for

    folder = (config.get("pipeline") or {}).get("recorded")
    if not folder:
        return None
    kept = sorted((repository_path(folder) / "warm_start").glob(f"{name.partition('-')[0]}-*"))
    for start in kept:
        record = json.loads((start / WARM_START_FILE).read_text("utf-8"))
        history = record.get("history", [])
        on_the_way = [row["success"] for row in history if row["stage"] == "searching"][:-1]
        reached = any(success >= config["warm_start"]["target_success"] for success in on_the_way)
        if record.get("made_for") == made_for(config) and not reached:
            return start
    return None


def _train(name: str, config: dict, folder: Path, start: Path) -> Done:
    from stppo.training.trainer import Trainer

    _between_jobs()
    began = time.perf_counter()
    try:
        trainer = Trainer(config, folder, start, progress=False)
        record = trainer.train()
    except Exception as error:  # as above
        return Done(name, time.perf_counter() - began, "", _line(error))
    rows = [row["success"] for row in trainer.evaluation_rows if row["temperature"] == 1.0]
    ends = f"{rows[0]:.2f} to {rows[-1]:.2f}" if rows else "no evaluation"
    return Done(name, time.perf_counter() - began, f"{record['status']}, sampled {ends}")


def _line(error: Exception) -> str:
    """The error in one line, with its place where that is a file of the user's own."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(Path(__file__).parents[1])
        and not re.search(r"[/\\](site-packages|lib[/\\]python[^/\\]*)[/\\]|^<", frame.filename)
    ]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
