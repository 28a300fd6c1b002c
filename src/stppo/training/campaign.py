"""Every planned run of a preset, trained without notebooks: several processes, each of which trains many
runs.

`snakemake all` executes a notebook per run; hundreds of runs of a study or a benchmark need none, and
importing torch once a process instead of once a run saves more time than a short run takes."""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from stppo.config.identity import warm_start_dir
from stppo.config.planned import PlannedRun
from stppo.files import repository_path
from stppo.record.ownership import announce_parent, is_orphan
from stppo.training.processes import engine_apart
from stppo.waiting import saying


@dataclass(frozen=True)
class Done:
    """One finished job of a campaign; `error` says in one line why a job failed."""

    name: str
    seconds: float
    text: str
    error: str | None = None


def runs_at_a_time(runs: Sequence[PlannedRun]) -> int:
    """One for each core; where runs compute on a GPU one alone, for they would not find its memory free."""
    configs = [run.config for run in runs]
    if any(c["training"]["device"] != "cpu" or c["rollout"]["engine"] == "vllm" for c in configs):
        import torch

        if torch.cuda.is_available():
            return 1
    return os.cpu_count() or 1


def run_folder(preset: str, run: PlannedRun) -> Path:
    """Where a planned run is recorded, by the pipeline and here alike."""
    return repository_path("results") / preset / "runs" / run.name


def train_planned(
    preset: str, runs: Sequence[PlannedRun], jobs: int | None, report: Callable[[Done, int, int], None]
) -> list[Done]:
    """Train runs in their order, `jobs` at a time, each warm start before the first run that needs it.

    jobs: None takes `runs_at_a_time`. report(done, n, total) is called after each job. A finished run is
    found complete and costs a second; an interrupted one goes on from its checkpoint. A run that fails is
    reported and the others go on, also where its process was killed (whatever ran beside it fails with it) or
    its warm start failed. Returns what failed."""
    with saying(f"composing the {len(runs)} runs of preset={preset}"):
        # All are composed, and so checked, before any is trained.
        starts = {run.name: warm_start_dir(run.config) for run in runs}
        jobs = jobs or runs_at_a_time(runs)
    pending, ready, failed = list(runs), set[Path](), list[Done]()
    total = len(runs) + len(set(starts.values()))
    announce_parent()  # killed, it leaves no run behind for longer than to its next checkpoint
    finished = 0

    def tell(done: Done) -> None:
        nonlocal finished
        finished += 1
        if done.error is not None:
            failed.append(done)
        report(done, finished, total)

    active: dict[Future[Done], tuple[PlannedRun | None, Path]] = {}
    pool = _pool(jobs)
    try:
        while pending or active:
            while len(active) < jobs and (job := _next(pending, starts, ready, active)):
                run, start = job
                try:
                    if run is None:
                        first = next(r for r in pending if starts[r.name] == start)
                        future = pool.submit(_start, first.config)
                    else:
                        future = pool.submit(_train, run.name, run.config, run_folder(preset, run), start)
                except BrokenProcessPool:  # a process was killed after the last wait
                    if active:
                        break  # one of them says so below
                    pool.shutdown()
                    pool = _pool(jobs)
                    continue
                active[future] = job
                if run is not None:
                    pending.remove(run)
            ended = wait(active, return_when=FIRST_COMPLETED).done
            if any(isinstance(future.exception(), BrokenProcessPool) for future in ended):
                ended = wait(active).done  # the pool has ended every other process with it
                pool.shutdown()
                pool = _pool(jobs)
            for future in ended:
                run, start = active.pop(future)
                try:
                    done = future.result()
                except BrokenProcessPool:
                    name = f"warm start {start.name}" if run is None else run.name
                    done = Done(name, 0.0, "", _KILLED)
                tell(done)
                if run is None and done.error is None:
                    ready.add(start)
                elif run is None:
                    for other in [other for other in pending if starts[other.name] == start]:
                        pending.remove(other)
                        tell(Done(other.name, 0.0, "", f"its warm start failed: {done.error}"))
    except KeyboardInterrupt:
        for process in list((pool._processes or {}).values()):  # None: it has just been shut down
            process.terminate()
        raise
    finally:
        pool.shutdown()
    return failed


_KILLED = (
    "its process was killed, or one beside it was: often for want of memory (--jobs 1 needs less); the same "
    "command goes on"
)


def _pool(jobs: int) -> ProcessPoolExecutor:
    """Processes for `jobs` jobs; spawned, because torch does not survive a fork with threads."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_quiet)


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
    """End where the campaign is gone: its queue still holds jobs. Else give back what the job before has
    freed: glibc keeps it in pieces, and a process of ten runs grew to twice one's."""
    if is_orphan():
        os._exit(1)
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)


def _start(config: dict) -> Done:
    from stppo.training.warm_start import WARM_START_FILE, recorded_start

    _between_jobs()
    path, began = warm_start_dir(config), time.perf_counter()
    name = f"warm start {path.name}"
    try:
        if (path / WARM_START_FILE).is_file():
            return Done(name, 0.0, "there already")
        kept = recorded_start(config)
        engine = config["rollout"]["engine"]
        record = engine_apart(engine, "stppo.training.warm_start:warm_start_of", config, path, False)
    except Exception as error:  # one job's failure is reported; the others go on
        return Done(name, time.perf_counter() - began, "", _line(error))
    text = f"sampled {record['success_sampled']:.2f}, greedy {record['success_greedy']:.2f}"
    if kept is not None:
        text += f": that of {kept.parent}, which the recorded runs began from"
    return Done(name, time.perf_counter() - began, text)


def _train(name: str, config: dict, folder: Path, start: Path) -> Done:
    _between_jobs()
    began = time.perf_counter()
    try:
        engine = config["rollout"]["engine"]
        text = engine_apart(engine, "stppo.training.campaign:train_run", config, folder, start)
    except Exception as error:  # as above
        return Done(name, time.perf_counter() - began, "", _line(error))
    return Done(name, time.perf_counter() - began, text)


def train_run(config: dict, folder: Path, start: Path) -> str:
    """Train one run; returns how it ended."""
    from stppo.config.loading import load
    from stppo.training.metrics import forget_peaks
    from stppo.training.run import Run

    forget_peaks()
    run = Run(load(config), folder, start, progress=False)
    record = run.train()
    rows = [row["success"] for row in run.trainer.evaluation_rows if row["temperature"] == 1.0]
    ends = f"{rows[0]:.2f} to {rows[-1]:.2f}" if rows else "no evaluation"
    return f"{record['status']}, sampled {ends}"


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
