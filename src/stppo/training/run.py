"""One run in a folder of its own: sole use, resuming, record, tables, checkpoint and what stops it."""

import datetime
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm.auto import tqdm

from stppo.config.files import dotted
from stppo.config.identity import code_of, fingerprint, identity_section, targets
from stppo.config.loading import LoadedRun
from stppo.config.planned import label_of
from stppo.config.provenance import environment, other_torch
from stppo.config.settings import RunConfig
from stppo.files import parse_json, read_yaml, write_atomically, write_json
from stppo.policy.compute import device_of
from stppo.policy.policy import save_policy
from stppo.record.ownership import FolderLock
from stppo.record.schema import (
    CHECKPOINT_DIR,
    COMPLETED,
    CONFIG_FILE,
    NON_FINITE,
    POLICY_DIR,
    RUN_FILE,
    RUNNING,
    WarmStart,
    check_record,
)
from stppo.training.checkpoint import load_checkpoint, newest, save_checkpoint, set_aside
from stppo.training.controls import identity
from stppo.training.elsewhere import Elsewhere
from stppo.training.failures import what_stopped
from stppo.training.loggers import Loggers, check_installed
from stppo.training.metrics import (
    evaluate,
    give_back_memory,
    gpu_peak_memory_mb,
    peak_memory_mb,
    read_tables,
    write_sample,
    write_tables,
)
from stppo.training.trainer import Trainer

log = logging.getLogger(__name__)


def engine_rounds_adapters(settings: RunConfig) -> bool:
    """Whether roll-outs come from an engine that holds adapters merged into weights of half precision."""
    rollout = settings.rollout
    if settings.policy.lora is None or rollout.engine == "torch":
        return False
    dtype = settings.training.precision if rollout.dtype == "policy" else rollout.dtype
    return dtype != "float32"


class Run:
    """One training run in `folder`, from a saved warm start.

    loaded: what `config.loading.load` gives. on_iteration: called after each iteration with the `Trainer`,
    for live
    curves. variant: the overrides that tell this run from others of its algorithm and seed, for its record.
    title: of the progress bar; default: algorithm and seed. Raises ConfigError or ValueError for invalid
    input, before training."""

    def __init__(
        self,
        loaded: LoadedRun,
        folder: Path,
        start: Path,
        on_iteration: Callable[[Trainer], None] | None = None,
        progress: bool = True,
        variant: str = "",
        title: str | None = None,
    ) -> None:
        self.config, self.settings, self.folder = loaded.config, loaded.settings, Path(folder)
        check_installed(self.settings.loggers)
        if engine_rounds_adapters(self.settings):
            log.warning(
                "policy.lora with vLLM in half precision: it samples from merged weights that are rounded, "
                "so small updates do not reach it; rollout.dtype=float32 avoids that"
            )
        self.on_iteration, self.progress, self.variant = on_iteration, progress, variant
        self.title = title or f"algorithm={self.settings.algorithm.name} seed={self.settings.seed}"
        self.start_folder = Path(start).name
        self.trainer = Trainer(loaded, Path(start))
        self.taken_up = 0  # iterations that an earlier process had made
        self.kernels = [self.trainer.models.kernels]
        self.resumed_on: list[dict[str, Any]] = []  # environments of later parts, where they differ
        self.seconds_before = self.cpu_before = 0.0
        self.tables_due = 0.0  # when they may be written again between checkpoints
        self.code_hash = code_of("stppo.training.run", *targets(self.config))
        self.identity = identity(self.config, self.trainer.divisors)
        self.fingerprint = fingerprint([self.identity, self.trainer.start_weights, self.code_hash])
        training, algorithm = self.settings.training, self.settings.algorithm
        self.elsewhere = Elsewhere.asked_for(
            f"{training.regime}-{algorithm.name}-seed{self.settings.seed}-{self.fingerprint}"
        )

    def train(self, resume: str = "auto") -> dict[str, Any]:
        """Train to the end and return the run's record (`run.json`); that of a finished run as it stands,
        nothing written.

        resume: "auto" continues from a checkpoint if there is one and raises ValueError where it does not
        fit; "set_aside" renames such a checkpoint and starts again; "never" ignores checkpoints. FolderInUse
        where another process trains in this folder; RunStopped where memory runs out or a server is gone.
        """
        with FolderLock(self.folder) as self.lock:
            return self._train_alone(resume)

    def _train_alone(self, resume: str) -> dict[str, Any]:
        trainer = self.trainer
        if (self.folder / POLICY_DIR).is_file():  # it would be found hours later
            raise FileExistsError(f"{self.folder / POLICY_DIR}: a file is in the way of the weights; move it")
        self.began, self.cpu_began = time.perf_counter(), time.process_time()
        self.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.environment = environment()
        if (device := device_of(trainer.policy)).type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # an earlier run of this process may have taken more
        state = self._saved(resume)
        if resume != "never" and (ended := self._ended(state)) is not None:
            return ended
        taken_up = False
        try:
            _ = trainer.sampler  # before optimizer states fill the GPU
            self._take_up(state)
            del state  # as large as the models
            taken_up = True
            write_atomically(
                self.folder / CONFIG_FILE, lambda part: part.write_text(yaml.safe_dump(self.config))
            )
            self._write(RUNNING)
            trainer.loggers = self._make_loggers()
            ended = self._train()
        except Exception as error:
            stopped = what_stopped(error, self.settings, self.folder, trainer.iteration)
            if stopped is None:
                raise
            if taken_up:
                self._write(RUNNING)
                if trainer.is_whole:
                    self._checkpoint()
            raise stopped from error
        finally:
            trainer.loggers.close()
            trainer.close()
        save_policy(trainer.policy, self.folder / POLICY_DIR, trainer.tokenizer)
        return ended or self._write(COMPLETED)  # only now: a completed run is whole, and never taken up again

    def _train(self) -> dict[str, Any] | None:
        """The record of a run that a number which is not finite has ended; None where all iterations are
        done."""
        trainer, n = self.trainer, self.settings.evaluation.trajectories
        try:
            with tqdm(
                total=self.settings.training.iterations,
                initial=trainer.iteration,
                desc=self.title,
                disable=not self.progress,
                mininterval=1,
            ) as bar:
                for evaluated in trainer.iterations():
                    self._keep(evaluated)
                    bar.update()
                    bar.set_postfix(
                        success=f"{trainer.evaluation_rows[-1]['success']:.3f}",
                        clip=f"{trainer.update_rows[-1]['clip_fraction']:.3f}",
                    )
                    if self.on_iteration is not None:
                        self.on_iteration(trainer)
        except FloatingPointError as stop:
            log.error("run stopped: %s; metrics up to here are kept in %s", stop, self.folder)
            return self._write(NON_FINITE, {"what": str(stop), "update": trainer.update})
        asked = trainer.evaluation_questions[:n]
        _, rollout = evaluate(trainer.evaluator, trainer.policy, asked, False, seed=self.settings.seed)
        write_sample(self.folder, trainer.sampler, rollout, n)
        self._checkpoint()  # kept, so that running a finished run again repeats nothing
        return None

    def _keep(self, evaluated: bool) -> None:
        """Write what an iteration has brought: a checkpoint where one is due, or the tables for who follows
        the run."""
        done, training = self.trainer.iteration, self.settings.training
        if done % training.checkpoint_every == 0 and done < training.iterations:
            self._write(RUNNING)
            self._checkpoint()
        elif evaluated and time.perf_counter() > self.tables_due:
            self._write(RUNNING)

    def _write(self, status: str, non_finite: dict | None = None) -> dict[str, Any]:
        self.lock.check()
        began = time.perf_counter()
        write_tables(self.folder, self.trainer.update_rows, self.trainer.evaluation_rows)
        record = {
            "status": status,
            "regime": self.settings.training.regime,
            "algorithm": self.settings.algorithm.name,
            "label": label_of(self.config),
            "seed": self.settings.seed,
            "variant": self.variant,
            "preset": self.config["preset"],
            "world": self.config["world"]["_target_"].rsplit(".", 1)[-1].removesuffix("World").lower(),
            "warm_start_seed": self.settings.warm_start_seed,
            "warm_start_folder": self.start_folder,
            "warm_start_weights": self.trainer.start_weights,
            "world_seed": self.config["world"].get("seed") or 0,  # a world of one's own may have none
            "policy": self.settings.policy.name,
            "policy_parameters": sum(p.numel() for p in self.trainer.parameters),
            "config_fingerprint": fingerprint(self.identity),
            "code_hash": self.code_hash,
            **self.environment,
            "resumed_on": self.resumed_on,
            "kernels": self.kernels,
            "started": self.started,
            "wall_seconds": round(self._elapsed(), 1),
            "cpu_seconds": round(self._cpu_elapsed(), 1),
            "peak_memory_mb": round(peak_memory_mb(), 1),
            "gpu_peak_memory_mb": gpu_peak_memory_mb(device_of(self.trainer.policy)),
            "iterations": self.trainer.iteration,
            "updates": self.trainer.update,
            "warm_start": {name: self.trainer.warm_start[name] for name in WarmStart.model_fields},
            "non_finite": non_finite,
        }
        check_record(record, str(self.folder), "a fix of this code")
        write_json(self.folder / RUN_FILE, record)
        now = time.perf_counter()
        self.tables_due = now + 20 * (
            now - began
        )  # tables grow: a long run would write them most of its time
        return record

    def _make_loggers(self) -> Loggers:
        settings = self.settings
        name = f"{settings.training.regime}/{settings.algorithm.name}/seed{settings.seed}"
        identifier = fingerprint([self.fingerprint, self.started])  # the same where the run goes on
        return Loggers(settings.loggers, self.folder, name, identifier, self.trainer.update)

    def _elapsed(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def _cpu_elapsed(self) -> float:
        return self.cpu_before + time.process_time() - self.cpu_began

    # ---- checkpoints ----------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        save_checkpoint(self.folder / CHECKPOINT_DIR, self.fingerprint, self._state())
        give_back_memory()
        if self.elsewhere is not None:
            self.elsewhere.store(newest(self.folder / CHECKPOINT_DIR))

    def _fetch_checkpoint(self) -> None:
        """Bring the newest copy of this run's checkpoint here, where this folder has none."""
        if self.elsewhere is None or newest(self.folder / CHECKPOINT_DIR) is not None:
            return
        if copies := self.elsewhere.copies():
            set_aside(self.folder)  # of a run that came to no checkpoint
            self.elsewhere.fetch(copies, self.folder / CHECKPOINT_DIR)

    def _state(self) -> dict[str, Any]:
        return self.trainer.state() | {
            "environment": self.environment,
            "resumed_on": self.resumed_on,
            "kernels": self.kernels,
            "started": self.started,
            "seconds": self._elapsed(),
            "cpu_seconds": self._cpu_elapsed(),
        }

    def _saved(self, mode: str) -> dict[str, Any] | None:
        """The checkpoint's state, tensors on the CPU; None where the run begins. See `train` for the mode."""
        if mode != "never":
            self._fetch_checkpoint()
            try:
                return load_checkpoint(
                    self.folder / CHECKPOINT_DIR, self.fingerprint, self._state(), self._difference
                )
            except ValueError as error:
                if mode != "set_aside":
                    raise
                log.warning("%s", error)
        return None

    def _difference(self) -> str:
        """What the run whose files are in the folder differs from this one by, for a message."""
        try:
            theirs = read_yaml(self.folder / CONFIG_FILE)
            code = parse_json((self.folder / RUN_FILE).read_bytes()).get("code_hash")
            old, new = (dict(dotted(identity_section(config))) for config in (theirs, self.config))
        except (OSError, ValueError, LookupError, AttributeError, TypeError):  # damaged, or of an old form
            return "another config or code"
        keys = [k for k, v in {**old, **new}.items() if old.get(k) != new.get(k) and not isinstance(v, dict)]
        said = [f"{key} = {old.get(key)!r} there, {new.get(key)!r} here" for key in keys[:3]]
        if len(keys) > 3:
            said.append(f"and {len(keys) - 3} settings more")
        if code != self.code_hash:
            said.append("the code has changed")
        return "; ".join(said) or "its warm start or a file that it reads has changed"

    def _ended(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """The record of this very run, by config and code, where it is completed, or where a number that is
        not finite ended it: it would end so again. Its rows and, of a completed run, its checkpoint's state
        are taken up; nothing is written."""
        mine = {"config_fingerprint": fingerprint(self.identity), "code_hash": self.code_hash}
        try:
            record = parse_json((self.folder / RUN_FILE).read_bytes())
            if not isinstance(record, dict) or not mine.items() <= record.items():
                return None
            start = self.trainer.start_weights
            if record.get("warm_start_weights", start) != start:  # of no start in records of old versions
                return None
            rows = read_tables(self.folder)
        except (OSError, ValueError):  # none yet, or damaged: the checkpoint decides, and all is written anew
            return None
        if record.get("status") == NON_FINITE:
            self.trainer.update_rows, self.trainer.evaluation_rows = rows
            self._say_other_torch(record)
            return record
        whole = state is not None and state["iteration"] == self.settings.training.iterations
        if record.get("status") != COMPLETED or not whole or not (self.folder / POLICY_DIR).is_dir():
            return None
        self._take_up(state)
        return record

    def _say_other_torch(self, made: dict[str, Any]) -> None:
        if said := other_torch(made):
            log.warning("%s: %s; --resume never makes the run anew", self.folder, said)

    def _take_up(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state, or make room for a run that begins."""
        if state is None:
            aside = set_aside(self.folder)
            if aside is not None:
                log.warning("an earlier run's files were moved to %s", aside)
            return
        self.trainer.take_up(state)
        self.taken_up = self.trainer.iteration
        here = self.trainer.models.kernels
        self.kernels = state["kernels"]
        if self.kernels[-1] != here:
            log.warning("the run goes on with %s kernels: equal up to rounding", here)
            self.kernels = [*self.kernels, here]
        here, self.environment = self.environment, state["environment"]
        self.resumed_on = state["resumed_on"]
        self._say_other_torch(self.environment | {"resumed_on": self.resumed_on})
        if here != (self.resumed_on or [self.environment])[-1]:
            self.resumed_on = [*self.resumed_on, here]
        self.started, self.seconds_before = state["started"], state["seconds"]
        self.cpu_before = state["cpu_seconds"]
        if self.taken_up < self.settings.training.iterations:
            log.info("resumed after iteration %d", self.taken_up)
