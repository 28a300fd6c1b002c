"""Optional loggers: TensorBoard and Weights & Biases get each row as it is recorded, and nothing else.

What they show is a copy: `updates.parquet` and `evaluations.parquet` hold the same numbers whatever becomes
of it. A logger that fails (full disk, no network) says so once and is off; the run goes on as if it had never
been there."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stppo.checks import install
from stppo.config.files import ConfigError

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
_PLACE = {"update", "iteration", "temperature"}  # of a row, what says where it belongs


def update_scalars(row: Row) -> dict[str, float]:
    """The finite numbers of an update row by tag, such as `update/gradient_norm`."""
    return _scalars("update/{}", row)


def evaluation_scalars(row: Row) -> dict[str, float]:
    """The same of an evaluation, such as `evaluation/success/greedy` or, of one benchmark,
    `.../greedy/nq`."""
    decoding = "sampled" if row["temperature"] else "greedy"
    parts = _scalars(f"evaluation/success/{decoding}/{{}}", row.get("by_benchmark", {}))
    return _scalars(f"evaluation/{{}}/{decoding}", row) | parts


def _scalars(tag: str, row: Row) -> dict[str, float]:
    numbers = {n: x for n, x in row.items() if n not in _PLACE and isinstance(x, int | float)}
    return {tag.format(name): number for name, number in numbers.items() if math.isfinite(number)}


class TensorBoardLogger:
    """Event files in RUN/tensorboard. A run that goes on after `step` updates takes back what came behind
    them."""

    def __init__(self, run_dir: Path, name: str, identifier: str, step: int) -> None:
        # One event a row; torch's SummaryWriter writes one a number, which costs as much as a small update.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.Event, self.Summary = Event, Summary
        self.writer = EventFileWriter(str(run_dir / "tensorboard"))
        if step:
            self._add(step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        values = [self.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._add(step, summary=self.Summary(value=values))

    def _add(self, step: int, **content: Any) -> None:
        self.writer.add_event(self.Event(step=step, wall_time=time.time(), **content))
        self.writer.flush()  # a killed run keeps it; and what the writer's thread met is raised here

    def close(self) -> None:
        self.writer.close()


class WandbLogger:
    """A run of the project `stppo` (or WANDB_PROJECT) in RUN/wandb; WANDB_MODE=offline keeps it on this disk.

    A run that goes on keeps its identifier, and W&B drops steps that it has. Nothing but rows is sent: no
    code, no console, no machine."""

    def __init__(self, run_dir: Path, name: str, identifier: str, step: int) -> None:
        import wandb

        quiet = {"silent": True, "console": "off", "disable_code": True, "disable_git": True}
        quiet |= {"x_disable_meta": True, "x_disable_stats": True, "x_save_requirements": False}
        project, settings = os.environ.get("WANDB_PROJECT", "stppo"), wandb.Settings(**quiet)
        options = {"dir": run_dir, "name": name, "id": identifier, "resume": "allow"}
        self.run = wandb.init(project=project, settings=settings, **options)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self.run.log(scalars, step=step)

    def close(self) -> None:
        self.run.finish()


LOGGERS = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}
FOLDERS = tuple(LOGGERS)  # in a run folder; each logger's is named as it is


def check_installed(names: Sequence[str]) -> None:
    """Raise ConfigError, naming the extra, for a logger whose package is missing."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"loggers: {name} is not installed; {install(name)}, or leave {name} out of loggers"
            )


class Loggers:
    """Those of a run. The first error of each is a warning, then it is off.

    names: of `LOGGERS`. name, identifier: of the run, for people and for W&B. step: updates done so far.
    """

    def __init__(
        self, names: Sequence[str], run_dir: Path, name: str = "", identifier: str = "", step: int = 0
    ) -> None:
        self._on: dict[str, Any] = {}
        for kind in dict.fromkeys(names):
            try:
                self._on[kind] = LOGGERS[kind](run_dir, name, identifier, step)
            except Exception as error:
                self._off(kind, error)

    def update_row(self, row: Row) -> None:
        """A row of `updates.parquet` (`stppo.record.schema.UPDATE_COLUMNS`)."""
        self._each("write", row["update"], update_scalars(row))

    def evaluation_row(self, row: Row) -> None:
        """A row of `evaluations.parquet`; where questions of several benchmarks were asked, with
        `by_benchmark`."""
        self._each("write", row["update"], evaluation_scalars(row))

    def close(self) -> None:
        """Write what is left."""
        self._each("close")
        self._on = {}

    def _each(self, method: str, *content: Any) -> None:
        for kind, logger in list(self._on.items()):
            try:
                getattr(logger, method)(*content)
            except Exception as error:
                self._off(kind, error)

    def _off(self, kind: str, error: Exception) -> None:
        self._on.pop(kind, None)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("logger %s is off from here on, the run goes on without it: %s", kind, reason)
