"""The off-policy training loop: roll out, queue, score, several epochs of minibatch updates, evaluate.

Off-policy on purpose: a batch is reused for `epochs` passes, and a queue trains on batches that are
`staleness_iterations` old. Everything random comes from one generator that is saved with the checkpoint,
so a resumed run on the CPU repeats an uninterrupted one bit for bit.

Batches, credit and objective live on the CPU; the models compute on `training.device`.
"""

import datetime
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from tqdm.auto import tqdm

from stppo.agent.compute import device_of
from stppo.agent.critic import explained_variance
from stppo.agent.engines import make_rollout
from stppo.agent.mismatch import scored_anew
from stppo.agent.policy import check_vocabulary, load_tokenizer, save_policy
from stppo.agent.rollout import Rollout, Sampler
from stppo.config import Config, ConfigError, build, code_of, fingerprint, label_of, validate
from stppo.files import write_atomically
from stppo.foreign import parse_json
from stppo.objectives import Objective
from stppo.ownership import FolderLock, is_orphan
from stppo.provenance import config_targets, environment
from stppo.schema import COMPLETED, CONFIG_FILE, NON_FINITE, POLICY_DIR, RUN_FILE, RUNNING
from stppo.settings import RunConfig
from stppo.training.checkpoint import (
    CHECKPOINT_DIR,
    load_checkpoint,
    restore,
    restore_optimizer,
    save_checkpoint,
    set_aside,
    trained,
)
from stppo.training.controls import ReplayedDivisors, generator_for, identity
from stppo.training.failures import RunStopped, what_stopped
from stppo.training.gradients import Passes
from stppo.training.loggers import Logger, Loggers, check_installed
from stppo.training.metrics import (
    evaluate,
    gpu_peak_memory_mb,
    peak_memory_mb,
    read_tables,
    rollout_metrics,
    write_record,
    write_sample,
    write_tables,
)
from stppo.training.models import make_models
from stppo.training.monte_carlo import TrueValues, true_values
from stppo.training.optimizers import make_optimizer
from stppo.training.updates import CriticUpdates, PolicyUpdates
from stppo.training.warm_start import evaluation_questions, load_warm_start, made_for
from stppo.trajectories import Trajectories
from stppo.waiting import saying
from stppo.world.protocol import Question

log = logging.getLogger(__name__)


@dataclass
class QueuedBatch:
    """A sampled batch waiting to be trained on, with the metrics of its roll-out."""

    trajectories: Trajectories
    metrics: dict[str, float]
    iteration: int  # iterations done when it was sampled
    truth: TrueValues | None  # values of the policy that sampled it, where they are asked for
    weights: Tensor | None  # (B, T) of the surrogate's terms, where the roll-out corrects for its engine


def engine_rounds_adapters(settings: RunConfig) -> bool:
    """Whether roll-outs come from an engine that holds adapters merged into weights of half precision."""
    rollout = settings.rollout
    if settings.policy.lora is None or rollout.engine == "torch":
        return False
    dtype = settings.training.precision if rollout.dtype == "policy" else rollout.dtype
    return dtype != "float32"


class Trainer:
    """One training run in `run_dir`, from a saved warm start.

    config: composed config (see `stppo.config.compose`). on_iteration: called after each iteration with
    this trainer, for live curves. variant: the overrides that tell this run from others of its algorithm and seed, for
    its record. title: of the progress bar; default: algorithm and seed. Raises ConfigError or ValueError for invalid input, before training.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        warm_start_dir: Path,
        on_iteration: Callable[["Trainer"], None] | None = None,
        progress: bool = True,
        variant: str = "",
        title: str | None = None,
    ) -> None:
        torch.set_num_threads(1)  # runs are parallel, not threads; and sums keep one order
        self.config, self.run_dir = config, Path(run_dir)
        self.settings = validate(config)
        check_installed(self.settings.loggers)
        if engine_rounds_adapters(self.settings):
            log.warning(
                "policy.lora with vLLM in half precision: it samples from merged weights that are rounded, so small updates "
                "do not reach it; rollout.dtype=float32 avoids that"
            )
        self.on_iteration, self.progress = on_iteration, progress
        self.variant = variant
        self.title = title or f"algorithm={self.settings.algorithm.name} seed={self.settings.seed}"
        self.objective: Objective = build(config["algorithm"]["objective"], "algorithm.objective")
        training = self.settings.training
        self.divisors = None
        if training.divisors.from_run is not None:
            self.divisors = ReplayedDivisors(training, self.objective, self.settings.seed)
        self._check_values()
        with saying("building the world: its questions and passages are read"):
            self.world = build(config["world"], "world")
            self.train_questions = self.world.questions("train")
            self.evaluation_questions = evaluation_questions(self.world, self.settings.evaluation.questions)

        torch.manual_seed(self.settings.seed)
        self.generator = torch.Generator().manual_seed(self.settings.seed)
        warm_start_dir = Path(warm_start_dir)
        self.warm_start_folder = warm_start_dir.name
        with saying(f"reading the weights of {warm_start_dir}"):
            found = load_warm_start(warm_start_dir, self.settings.policy.attention)
            policy, self.warm_start, self.warm_start_weights = found
        if self.warm_start.get("made_for") != made_for(config):
            raise ValueError(
                f"warm start {warm_start_dir} was made for another world or policy; make one for this config with "
                "`stppo warm-start`"
            )
        tokenizer = self.world.tokenizer
        if tokenizer is None:
            tokenizer = load_tokenizer(warm_start_dir)
        check_vocabulary(policy, tokenizer)
        learns_values = self.objective.credit.needs_critic and training.values == "critic"
        with saying("placing policy, reference and critic"):
            self.models = make_models(policy, warm_start_dir, self.settings, learns_values)
        self.policy, self.critic = self.models.policy, self.models.critic
        self.reference = self.models.reference
        self.kernels = [self.models.kernels]
        self.resumed_on: list[dict[str, Any]] = []  # environments of later parts, where they differ
        self.tokenizer = tokenizer
        self.passes = Passes(training.micro_batch_tokens, training.length_chunks)
        self.parameters = list(trained(self.policy).values())
        self.optimizer = make_optimizer(training.optimizer, self.parameters, training.learning_rate)
        self.policy_updates = PolicyUpdates(
            self.policy,
            self.optimizer,
            self.objective,
            training,
            self.passes,
            self.settings.rollout.temperature,
            self.divisors,
        )
        if self.critic is not None:
            kind = "adam8bit" if training.optimizer == "adam8bit" else "adam"
            self.critic_optimizer = make_optimizer(
                kind, list(trained(self.critic).values()), training.critic_learning_rate
            )
            self.critic_updates = CriticUpdates(self.critic, self.critic_optimizer, training, self.passes)

        self.iteration = self.update = 0
        self.taken_up = 0  # iterations that an earlier call of `train` had made
        self.is_whole = True  # between iterations, or after all updates of one
        self.queue: deque[QueuedBatch] = deque()
        self.question_order = torch.empty(0, dtype=torch.long)
        self.update_rows: list[dict[str, float]] = []
        self.evaluation_rows: list[dict[str, float]] = []
        self.loggers: Logger = Loggers((), self.run_dir)  # those of the settings begin with `train`
        self.seconds_before = self.cpu_before = 0.0
        self.code_hash = code_of("stppo.training.trainer", *config_targets(config))
        self.identity = identity(config, self.divisors)
        self.fingerprint = fingerprint([self.identity, self.warm_start_weights, self.code_hash])

    @functools.cached_property
    def sampler(self) -> Sampler:
        """Made at first use: vLLM takes minutes to start, which a checkpoint that does not fit need not cost."""
        training, rollout = self.settings.training, self.settings.rollout
        budget = training.micro_batch_tokens
        with saying(f"starting the engine that samples ({rollout.engine})"):
            return make_rollout(self.world.environment, self.tokenizer, rollout, self.policy, budget)

    @functools.cached_property
    def evaluator(self) -> Sampler:
        return self.sampler.for_evaluation()

    # ---- the loop -------------------------------------------------------------------------------

    def train(self, resume: str = "auto") -> dict[str, Any]:
        """Train to the end and return the run's record (`run.json`); that of a finished run as it stands, nothing written.

        resume: "auto" continues from a checkpoint if there is one and raises ValueError where it does not
        fit; "set_aside" renames such a checkpoint and starts again; "never" ignores checkpoints.
        FolderInUse where another process trains in this folder; RunStopped where the pipeline that started it is gone.
        """
        with FolderLock(self.run_dir) as self.lock:
            return self._train_alone(resume)

    def _train_alone(self, resume: str) -> dict[str, Any]:
        if (self.run_dir / POLICY_DIR).is_file():  # it would be found hours later
            raise FileExistsError(
                f"{self.run_dir / POLICY_DIR}: a file is in the way of the weights; move it"
            )
        self.began, self.cpu_began = time.perf_counter(), time.process_time()
        self.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.environment = environment()
        if (device := device_of(self.policy)).type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # an earlier run of this process may have taken more
        state = self._saved(resume)
        if resume != "never" and (ended := self._ended(state)) is not None:
            return ended
        taken_up = False
        try:
            _ = self.sampler  # before optimizer states fill the GPU
            self._take_up(state)
            del state  # as large as the models
            taken_up = True
            write_atomically(
                self.run_dir / CONFIG_FILE, lambda part: part.write_text(yaml.safe_dump(self.config))
            )
            self._write(RUNNING)
            self.loggers = self._make_loggers()
            ended = self._train()
        except Exception as error:
            stopped = what_stopped(error, self.settings, self.run_dir, self.iteration)
            if stopped is None:
                raise
            if taken_up:
                self._write(RUNNING)
                if self.is_whole:
                    self._checkpoint()
            raise stopped from error
        finally:
            self.loggers.close()
            if "sampler" in self.__dict__:
                self.sampler.close()
        save_policy(self.policy, self.run_dir / POLICY_DIR, self.tokenizer)
        return ended or self._write(COMPLETED)  # only now: a completed run is whole, and never taken up again

    def _train(self) -> dict[str, Any] | None:
        """The record of a run that a number which is not finite has ended; None where all iterations are done."""
        training = self.settings.training
        try:
            if self._evaluation_is_due():
                with saying(f"evaluating the start on {len(self.evaluation_questions)} questions"):
                    self._evaluate()
            with saying("sampling the first batches"):
                while self._queue_is_short():
                    self.queue.append(self._sample())
            with tqdm(
                total=training.iterations,
                initial=self.iteration,
                desc=self.title,
                disable=not self.progress,
                mininterval=1,
            ) as bar:
                while self.iteration < training.iterations:
                    self._iterate()
                    bar.update()
                    bar.set_postfix(
                        success=f"{self.evaluation_rows[-1]['success']:.3f}",
                        clip=f"{self.update_rows[-1]['clip_fraction']:.3f}",
                    )
                    if self.on_iteration is not None:
                        self.on_iteration(self)
        except FloatingPointError as stop:  # the roll-out raises it too, on non-finite logits
            log.error("run stopped: %s; metrics up to here are kept in %s", stop, self.run_dir)
            return self._write(NON_FINITE, {"what": str(stop), "update": self.update})
        n = self.settings.evaluation.trajectories
        _, rollout = evaluate(
            self.evaluator, self.policy, self.evaluation_questions[:n], False, seed=self.settings.seed
        )
        write_sample(self.run_dir, self.sampler, rollout, n)
        self._checkpoint()  # kept, so that running a finished run again repeats nothing
        return None

    def _iterate(self) -> None:
        """Train on the oldest batch of the queue, sample a new one, evaluate, checkpoint."""
        training = self.settings.training
        self.is_whole = False
        queued = self.queue.popleft()
        shared = dict(queued.metrics)
        began = time.perf_counter()
        batch = self.models.with_states(queued.trajectories)
        values = self._values(queued, batch)
        reference = self.models.reference_logprobs(batch, self.passes, self.settings.rollout.temperature)
        credit = self.objective.credit(batch, values)
        shared["advantage_raw_std"] = float(credit.raw_std)
        shared["seconds_scoring"] += time.perf_counter() - began
        shared["critic_loss"] = shared["critic_explained_variance"] = math.nan
        shared["critic_value_rmse"] = shared["true_value_std"] = math.nan
        began = time.perf_counter()
        if self.critic is not None:
            if queued.truth is not None:
                error = queued.truth.error(values, batch.layout)
                shared["critic_value_rmse"], shared["true_value_std"] = error
            shared["critic_explained_variance"] = explained_variance(
                values, credit.returns, credit.value_mask
            )
            shared["critic_loss"] = self.critic_updates.regress(
                batch,
                credit.returns,
                credit.value_mask,
                values,
                self.generator,
                self.update,
                self.iteration,
            )
        shared["seconds_critic"] = time.perf_counter() - began if self.critic is not None else 0.0
        shared["staleness_iterations"] = self.iteration - queued.iteration
        self.iteration += 1
        for epoch, minibatch, rows, turn in self._minibatches(batch, credit.kept):
            row = shared | {"iteration": self.iteration, "epoch": epoch, "minibatch": minibatch}
            self.update_rows.append(row)
            weights = None if queued.weights is None else queued.weights[rows]
            if turn is not None:
                on = (batch.turn_ids[rows] == turn).float()
                weights = on if weights is None else weights * on
            self.update += 1
            row["update"] = self.update
            self.policy_updates.step(
                row,
                batch.select(rows),
                credit.advantages[rows],
                None if reference is None else reference[rows],
                weights,
            )
            self.loggers.update_row(row)
            if training.target_kl is not None and row["kl_behaviour_k3"] > training.target_kl:
                break
            if self.objective.stabilizer.ends_iteration(row):
                break
        self.is_whole = True
        evaluated = self._evaluation_is_due()
        if evaluated:
            self._evaluate()
        if self._queue_is_short():
            self.queue.append(self._sample())
        if self.iteration % training.checkpoint_every == 0 and self.iteration < training.iterations:
            self._write(RUNNING)
            self._checkpoint()
            if is_orphan():
                raise RunStopped(
                    f"stopped after iteration {self.iteration}, which is kept: the pipeline that started this run is gone"
                )
        elif evaluated:
            self._write(RUNNING)  # for who follows the run

    def _minibatches(
        self, batch: Trajectories, kept: Tensor | None
    ) -> Iterator[tuple[int, int, Tensor, int | None]]:
        """Epoch, minibatch, its rows, and the turn that it trains on (None: all); an epoch that is not reached draws no
        random numbers. kept (B,) bool: the rows to train on, None: all. Minibatches without that turn are left out."""
        training = self.settings.training
        rows = torch.arange(len(batch)) if kept is None else kept.nonzero().squeeze(1)
        size = -(-len(rows) // training.minibatches)
        turns: list[int | None] = [None]
        if self.objective.surrogate.one_turn_at_a_time:
            turns = list(reversed(range(int(batch.n_turns.max()))))
        for epoch in range(training.epochs):
            parts = (
                (part, turn)
                for turn in turns
                for part in rows[torch.randperm(len(rows), generator=self.generator)].split(size)
                if turn is None or (batch.n_turns[part] > turn).any()
            )
            for minibatch, (part, turn) in enumerate(parts):
                yield epoch, minibatch, part, turn

    def _queue_is_short(self) -> bool:
        """Whether another batch must be sampled: no more than the remaining iterations will train on."""
        training = self.settings.training
        remaining = training.iterations - self.iteration
        return len(self.queue) < min(training.staleness_iterations + 1, remaining)

    def _sample(self) -> QueuedBatch:
        """Roll out one batch with the current policy. A roll-out that fails leaves the random stream as it was."""
        before = self.generator.get_state(), self.question_order
        began = time.perf_counter()
        try:
            rollout = self._collect()
            metrics = rollout_metrics(rollout, time.perf_counter() - began)
            began = time.perf_counter()
            truth = self._true_values(rollout)
        except Exception:
            self.generator.set_state(before[0])
            self.question_order = before[1]
            raise
        metrics["seconds_scoring"] = metrics.get("seconds_scoring", 0.0) + time.perf_counter() - began
        return QueuedBatch(rollout.trajectories, metrics, self.iteration, truth, rollout.weights)

    def _collect(self) -> Rollout:
        """A roll-out that will be trained on."""
        self.sampler.keeps_states = True  # of frozen layers: they are needed again
        try:
            rollout = self.sampler.collect(self.policy, *self._draw_questions(), policy_updates=self.update)
        finally:
            self.sampler.keeps_states = False
        settings = self.settings
        if settings.rollout.engine == "torch" and settings.scores_anew:  # vLLM's roll-out has done it
            budget = settings.training.micro_batch_tokens
            return scored_anew(self.policy, rollout, settings.rollout.temperature, budget)
        return rollout

    def _draw_questions(self) -> tuple[list[Question], torch.Generator, list[int]]:
        """Questions of a batch, drawn without replacement, epoch-wise, and their group ids."""
        group = self.objective.credit.group_size
        n_groups = self.settings.training.trajectories_per_iteration // group
        while len(self.question_order) < n_groups:
            shuffled = torch.randperm(len(self.train_questions), generator=self.generator)
            self.question_order = torch.cat([self.question_order, shuffled])
        drawn, self.question_order = self.question_order[:n_groups], self.question_order[n_groups:]
        questions = [self.train_questions[i] for i in drawn.tolist() for _ in range(group)]
        return questions, self.generator, [g for g in range(n_groups) for _ in range(group)]

    # ---- values ---------------------------------------------------------------------------------

    def _check_values(self) -> None:
        """Raise ConfigError where Monte-Carlo values would not be the values that the credit means."""
        credit, training = self.objective.credit, self.settings.training
        if training.values == "monte_carlo" and not credit.needs_critic:
            raise ConfigError(
                f"training.values = 'monte_carlo': the credit {type(credit).__name__} reads no values; use 'critic'"
            )
        measured = training.values == "monte_carlo" or self.settings.evaluation.value_error_every
        if measured and getattr(credit, "gamma", 1.0) != 1.0:
            raise ConfigError(
                f"algorithm.objective.credit.gamma = {credit.gamma}: Monte-Carlo values are undiscounted; set gamma "
                "to 1, or training.values to critic and evaluation.value_error_every to 0"
            )

    def _true_values(self, rollout: Rollout) -> TrueValues | None:
        """Monte-Carlo values of the current policy on a batch that it has just sampled, from a generator of their
        own: at all starts of turns as the credit's values, or at some of them to measure the critic by."""
        training, evaluation = self.settings.training, self.settings.evaluation
        iteration = self.iteration + len(self.queue) + 1  # that will train on this batch
        n, n_turns = training.monte_carlo_continuations, None
        if training.values == "critic":
            every = evaluation.value_error_every
            if self.critic is None or not every or iteration % every:
                return None
            n, n_turns = evaluation.value_continuations, evaluation.value_states
        generator = generator_for("true values", self.settings.seed, iteration)
        return true_values(self.sampler, self.policy, rollout, n, generator, n_turns)

    def _values(self, queued: QueuedBatch, batch: Trajectories) -> Tensor | None:
        """(B, T) values that the credit reads, of the queued batch as it is trained on; None where it reads none."""
        if self.critic is not None:
            return self.critic_updates.values(batch)
        return None if queued.truth is None else queued.truth.per_token(queued.trajectories)

    # ---- evaluation and records -----------------------------------------------------------------

    def _evaluation_is_due(self) -> bool:
        done = bool(self.evaluation_rows) and self.evaluation_rows[-1]["iteration"] == self.iteration
        last = self.iteration == self.settings.training.iterations
        return not done and (last or self.iteration % self.settings.evaluation.every == 0)

    def _evaluate(self) -> None:
        """Sampled, and every `greedy_every` iterations greedy, on the fixed held-out questions."""
        settings = self.settings.evaluation
        kinds = [True] if self.iteration % settings.greedy_every == 0 else []
        if self.iteration == self.settings.training.iterations:
            kinds = [True]
        rows = []
        for greedy in [*kinds, False]:  # sampled last, so that the newest row is the primary metric
            seed = self.settings.seed * 1_000_003 + self.iteration
            row, _ = evaluate(self.evaluator, self.policy, self.evaluation_questions, greedy, seed)
            rows.append({"iteration": self.iteration, "update": self.update} | row)
        self.evaluation_rows += rows
        for row in rows:
            self.loggers.evaluation_row(row)

    def _write(self, status: str, non_finite: dict | None = None) -> dict[str, Any]:
        self.lock.check()
        write_tables(self.run_dir, self.update_rows, self.evaluation_rows)
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
            "warm_start_folder": self.warm_start_folder,
            "warm_start_weights": self.warm_start_weights,
            "world_seed": self.config["world"].get("seed") or 0,  # a world of one's own may have none
            "policy": self.settings.policy.name,
            "policy_parameters": sum(p.numel() for p in self.parameters),
            "config_fingerprint": fingerprint(self.identity),
            "code_hash": self.code_hash,
            **self.environment,
            "resumed_on": self.resumed_on,
            "kernels": self.kernels,
            "started": self.started,
            "wall_seconds": round(self._elapsed(), 1),
            "cpu_seconds": round(self._cpu_elapsed(), 1),
            "peak_memory_mb": round(peak_memory_mb(), 1),
            "gpu_peak_memory_mb": gpu_peak_memory_mb(device_of(self.policy)),
            "iterations": self.iteration,
            "updates": self.update,
            "warm_start": {k: self.warm_start[k] for k in ("success_sampled", "success_greedy", "n_sampled")},
            "non_finite": non_finite,
        }
        write_record(self.run_dir, record)
        return record

    def _make_loggers(self) -> Logger:
        settings = self.settings
        name = f"{settings.training.regime}/{settings.algorithm.name}/seed{settings.seed}"
        identifier = fingerprint([self.fingerprint, self.started])  # the same where the run goes on
        return Loggers(settings.loggers, self.run_dir, name, identifier, self.update)

    def _elapsed(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def _cpu_elapsed(self) -> float:
        return self.cpu_before + time.process_time() - self.cpu_began

    # ---- checkpoints ----------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        save_checkpoint(self.run_dir / CHECKPOINT_DIR, self.fingerprint, self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "update": self.update,
            "policy": trained(self.policy),
            "optimizer": self.optimizer.state_dict(),
            "critic": self.critic and trained(self.critic),
            "critic_optimizer": self.critic and self.critic_optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "environment": self.environment,
            "resumed_on": self.resumed_on,
            "kernels": self.kernels,
            "question_order": self.question_order,
            "queue": [
                (q.trajectories.state_dict(), q.metrics, q.iteration, q.truth and vars(q.truth), q.weights)
                for q in self.queue
            ],
            "update_rows": self.update_rows,
            "evaluation_rows": self.evaluation_rows,
            "started": self.started,
            "seconds": self._elapsed(),
            "cpu_seconds": self._cpu_elapsed(),
        }

    def _saved(self, mode: str) -> dict[str, Any] | None:
        """The checkpoint's state, tensors on the CPU; None where the run begins. See `train` for the mode."""
        if mode != "never":
            try:
                return load_checkpoint(self.run_dir / CHECKPOINT_DIR, self.fingerprint, self._state())
            except ValueError as error:
                if mode != "set_aside":
                    raise
                log.warning("%s", error)
        return None

    def _ended(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """The record of this very run, by config and code, where it is completed, or where a number that is not finite ended it:
        it would end so again. Its rows and, of a completed run, its checkpoint's state are taken up; nothing is written.
        """
        mine = {"config_fingerprint": fingerprint(self.identity), "code_hash": self.code_hash}
        try:
            record = parse_json((self.run_dir / RUN_FILE).read_bytes())
            if not isinstance(record, dict) or not mine.items() <= record.items():
                return None
            rows = read_tables(self.run_dir)
        except (OSError, ValueError):  # none yet, or damaged: the checkpoint decides, and all is written anew
            return None
        if record.get("status") == NON_FINITE:
            self.update_rows, self.evaluation_rows = rows
            return record
        whole = state is not None and state["iteration"] == self.settings.training.iterations
        if record.get("status") != COMPLETED or not whole or not (self.run_dir / POLICY_DIR).is_dir():
            return None
        self._take_up(state)
        return record

    def _take_up(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state, or make room for a run that begins."""
        if state is None:
            aside = set_aside(self.run_dir)
            if aside is not None:
                log.warning("an earlier run's files were moved to %s", aside)
            return
        self.iteration, self.update = state["iteration"], state["update"]
        self.taken_up = self.iteration
        restore(self.policy, state["policy"])
        restore_optimizer(self.optimizer, state["optimizer"])
        if self.critic is not None:
            restore(self.critic, state["critic"])
            restore_optimizer(self.critic_optimizer, state["critic_optimizer"])
        self.generator.set_state(state["generator"])
        if state["kernels"][-1] != self.models.kernels:
            log.warning("the run goes on with %s kernels: equal up to rounding", self.models.kernels)
            self.kernels = [*state["kernels"], self.models.kernels]
        else:
            self.kernels = state["kernels"]
        here, self.environment = self.environment, state["environment"]
        self.resumed_on = state["resumed_on"]
        if here != (self.resumed_on or [self.environment])[-1]:
            self.resumed_on = [*self.resumed_on, here]
        self.question_order = state["question_order"]
        self.queue = deque(
            QueuedBatch(
                Trajectories.from_state_dict(t), metrics, iteration, truth and TrueValues(**truth), weights
            )
            for t, metrics, iteration, truth, weights in state["queue"]
        )
        self.update_rows, self.evaluation_rows = state["update_rows"], state["evaluation_rows"]
        self.policy_updates.remember(self.update_rows)
        self.started, self.seconds_before = state["started"], state["seconds"]
        self.cpu_before = state["cpu_seconds"]
        if self.iteration < self.settings.training.iterations:
            log.info("resumed after iteration %d", self.iteration)
