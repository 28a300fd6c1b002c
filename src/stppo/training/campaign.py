"""Every planned run of a preset, trained without notebooks.

`snakemake all` executes a notebook per run; hundreds of runs of a study or a benchmark need none. Jobs of
both are forks of a process that has imported torch (`preloaded`). Snakemake orders its own by what pages need
and by changed content, and deletes what a job made before it makes it again; here a run needs its warm start
and nothing else, and what a finished one recorded is never touched.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stppo.config.files import own_config_dir, own_line
from stppo.config.identity import warm_start_dir
from stppo.config.planned import PlannedRun
from stppo.config.provenance import code_hash, usable_cores
from stppo.files import repository_path, told
from stppo.preloaded import JOB, TRAINING, Fork, serving
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
    return usable_cores()


def run_folder(preset: str, run: PlannedRun) -> Path:
    """Where a planned run is recorded, by the pipeline and here alike."""
    return repository_path("results") / preset / "runs" / run.name


def train_planned(
    preset: str, runs: Sequence[PlannedRun], jobs: int | None, report: Callable[[Done, int, int], None]
) -> list[Done]:
    """Train runs in their order, `jobs` at a time, each warm start before the first run that needs it.

    jobs: None takes `runs_at_a_time`. report(done, n, total) is called after each job. A finished run is
    found complete and costs a second; an interrupted one goes on from its checkpoint. One that fails or is
    killed, or whose warm start failed, is reported and the others go on. Returns what failed.
    """
    with saying(f"composing the {len(runs)} runs of preset={preset}"):
        # All are composed, and so checked, before any is trained.
        starts = {run.name: warm_start_dir(run.config) for run in runs}
        jobs = jobs or runs_at_a_time(runs)
    pending, ready, failed, finished = list(runs), set[Path](), list[Done](), 0
    total = len(runs) + len(set(starts.values()))

    def tell(done: Done) -> None:
        nonlocal finished
        finished += 1
        if done.error is not None:
            failed.append(done)
        report(done, finished, total)

    forks, stopped = set[Fork](), threading.Event()
    active: dict[Future[Done], tuple[PlannedRun | None, Path]] = {}
    with serving(TRAINING), ThreadPoolExecutor(jobs) as pool:
        try:
            while pending or active:
                while len(active) < jobs and (job := _next(pending, starts, ready, active)):
                    run, folder = job
                    if run is None:
                        config = next(r.config for r in pending if starts[r.name] == folder)
                        name, wish = f"warm start {folder.name}", (config, str(folder))
                    else:
                        pending.remove(run)
                        name, wish = run.name, (run.config, str(run_folder(preset, run)), str(folder))
                    active[pool.submit(_in_fork, name, wish, forks, stopped)] = job
                for future in wait(active, return_when=FIRST_COMPLETED).done:
                    (run, folder), done = active.pop(future), future.result()
                    tell(done)
                    if run is None and done.error is None:
                        ready.add(folder)
                    elif run is None:
                        for other in [other for other in pending if starts[other.name] == folder]:
                            pending.remove(other)
                            tell(Done(other.name, 0.0, "", f"its warm start failed: {done.error}"))
        finally:
            # After an interruption some still run, and one may have been submitted and not be in `active`.
            stopped.set()
            while forks or wait(active, timeout=0).not_done:
                for fork in list(forks):
                    fork.terminate()
                time.sleep(0.1)
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


_KILLED = "its process was killed: often for want of memory (--jobs 1 needs less); the same command goes on"


def _in_fork(name: str, wish: tuple[Any, ...], forks: set[Fork], stopped: threading.Event) -> Done:
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out, open(os.devnull) as nothing:
        streams = nothing.fileno(), out.fileno(), out.fileno()
        if stopped.is_set():
            return Done(name, 0.0, "", "stopped")
        try:
            fork = Fork([JOB, json.dumps(wish)], os.environ | {"OMP_NUM_THREADS": "1"}, streams=streams)
        except OSError:  # the server, too, can be killed
            return Done(name, 0.0, "", _KILLED)
        forks.add(fork)
        if stopped.is_set():
            fork.terminate()
        try:
            status = fork.wait()
        finally:
            forks.discard(fork)
        out.seek(0)
        last = (out.read().strip().splitlines() or [""])[-1]
    error = None if status == 0 else _KILLED if status < 0 else last
    return Done(name, time.perf_counter() - began, "" if error else last, error)


def warm_up() -> None:
    """What every run would do anew: hash its code, import what is imported when it is first used."""
    import pyarrow.parquet  # noqa: F401

    code_hash(["stppo.training.run", "stppo.training.warm_start"])


def job() -> None:
    """What a fork does: make a warm start, or train a run. The last line that it prints says how it ended."""
    try:
        own_config_dir()  # puts it on the path, where the classes lie that the config names
        config, *folders = json.loads(sys.argv[1])
        print((train_run if len(folders) == 2 else make_start)(config, *map(Path, folders)))
    except Exception as error:  # one job's failure is reported; the others go on
        place = own_line(error)
        said = f"{type(error).__name__}: {' '.join(told(error).split())}"
        sys.exit(f"{said} ({place})" if place else said)


def make_start(config: dict, folder: Path) -> str:
    """Make a warm start where it is not there yet; returns how good it is."""
    from stppo.training.warm_start import WARM_START_FILE, recorded_start, warm_start_of

    if (folder / WARM_START_FILE).is_file():
        return "there already"
    kept, record = recorded_start(config), warm_start_of(config, folder, False)
    of = "" if kept is None else f": that of {kept.parent}, which the recorded runs began from"
    return f"sampled {record['success_sampled']:.2f}, greedy {record['success_greedy']:.2f}{of}"


def train_run(config: dict, folder: Path, start: Path) -> str:
    """Train one run; returns how it ended."""
    from stppo.config.loading import load
    from stppo.training.run import Run

    run = Run(load(config), folder, start, progress=False)
    record = run.train()
    rows = [row["success"] for row in run.trainer.evaluation_rows if row["temperature"] == 1.0]
    ends = f"{rows[0]:.2f} to {rows[-1]:.2f}" if rows else "no evaluation"
    return f"{record['status']}, sampled {ends}"
