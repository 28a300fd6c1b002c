"""The off-policy training loop: roll out, queue, score, several epochs of minibatch updates, evaluate.

Off-policy on purpose: a batch is reused for `epochs` passes, and a queue trains on batches that are
`staleness_iterations` old. Everything random comes from one generator that is saved with the checkpoint,
so a resumed run on the CPU repeats an uninterrupted one bit for bit.
"""

import datetime
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

from stppo.agent.critic import Critic, explained_variance
from stppo.agent.policy import load_policy, score
from stppo.agent.rollout import Rollout, make_rollout
from stppo.analysis.provenance import config_targets, environment
from stppo.config import Config, ConfigError, build, code_of, fingerprint, validate
from stppo.files import write_atomically
from stppo.objectives import Objective, Surrogate, estimated_bias_norms
from stppo.schema import COMPLETED, CONFIG_FILE, NON_FINITE, RUNNING
from stppo.training.checkpoint import CHECKPOINT_FILE, load_checkpoint, save_checkpoint, set_aside
from stppo.training.controls import ReplayedDivisors, generator_for, identity
from stppo.training.metrics import (
    evaluate,
    peak_memory_mb,
    rollout_metrics,
    write_record,
    write_sample,
    write_tables,
)
from stppo.training.monte_carlo import TrueValues, true_values
from stppo.training.warm_start import evaluation_questions, load_warm_start, made_for
from stppo.trajectories import Trajectories

log = logging.getLogger(__name__)

BIAS_NORM_COLUMNS = {
    "exact": "clipping_bias_norm",
    "logprob": "clipping_bias_norm_logprob",
    "logit": "clipping_bias_norm_logit",
}


class NonFinite(FloatingPointError):
    """A loss, gradient or parameter stopped being finite; ends the run, keeping what was measured."""


@dataclass
class QueuedBatch:
    """A sampled batch waiting to be trained on, with the metrics of its roll-out."""

    trajectories: Trajectories
    metrics: dict[str, float]
    iteration: int  # iterations done when it was sampled
    truth: TrueValues | None  # values of the policy that sampled it, where they are asked for
    weights: Tensor | None  # (B, T) of the surrogate's terms, where the roll-out corrects for its engine


def global_norm(tensors: list[Tensor]) -> float:
    """L2 norm of all tensors taken as one vector."""
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors])))


def gradient_of(scalar: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Gradient of a scalar, keeping the graph for the passes that follow."""
    found = torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True)
    return [g if g is not None else torch.zeros_like(p) for g, p in zip(found, parameters, strict=True)]


class Trainer:
    """One training run in `run_dir`, from a saved warm start.

    config: composed config (see `stppo.config.compose`). on_iteration: called after each iteration with
    this trainer, for live curves. Raises ConfigError or ValueError for invalid input, before training.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        warm_start_dir: Path,
        on_iteration: Callable[["Trainer"], None] | None = None,
        progress: bool = True,
    ) -> None:
        torch.set_num_threads(1)  # runs are parallel, not threads; and sums keep one order
        self.config, self.run_dir = config, Path(run_dir)
        self.settings = validate(config)
        self.on_iteration, self.progress = on_iteration, progress
        self.objective: Objective = build(config["algorithm"]["objective"], "algorithm.objective")
        training = self.settings.training
        self.divisors = None
        if training.divisors.from_run is not None:
            self.divisors = ReplayedDivisors(training, self.objective, self.settings.seed)
        self._check_values()
        self.world = build(config["world"], "world")
        tokenizer = self.world.tokenizer
        self.train_questions = self.world.questions("train")
        self.evaluation_questions = evaluation_questions(self.world, self.settings.evaluation.questions)

        torch.manual_seed(self.settings.seed)
        self.generator = torch.Generator().manual_seed(self.settings.seed)
        self.policy, self.warm_start, weights = load_warm_start(Path(warm_start_dir))
        if self.warm_start.get("made_for") != made_for(config):
            raise ValueError(
                f"warm start {warm_start_dir} was made for another world or policy; make one for this config with "
                "`stppo warm-start`"
            )
        self.sampler = make_rollout(self.world.environment, tokenizer, self.settings.rollout, self.policy)
        self.evaluator = self.sampler.for_evaluation()
        self.reference = load_policy(warm_start_dir).requires_grad_(False)
        self.parameters = list(self.policy.parameters())
        make = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[training.optimizer]
        self.optimizer = make(self.parameters, lr=training.learning_rate)
        learns_values = self.objective.credit.needs_critic and training.values == "critic"
        self.critic = Critic(self.policy) if learns_values else None
        if self.critic is not None:
            self.critic_optimizer = torch.optim.Adam(
                self.critic.parameters(), lr=training.critic_learning_rate
            )

        self.iteration = self.update = 0
        self.queue: deque[QueuedBatch] = deque()
        self.question_order = torch.empty(0, dtype=torch.long)
        self.update_rows: list[dict[str, float]] = []
        self.evaluation_rows: list[dict[str, float]] = []
        self.seconds_before = 0.0
        self.code_hash = code_of("stppo.training.trainer", *config_targets(config))
        self.identity = identity(config, self.divisors)
        self.fingerprint = fingerprint([self.identity, weights, self.code_hash])

    # ---- the loop -------------------------------------------------------------------------------

    def train(self, resume: str = "auto") -> dict[str, Any]:
        """Train to the end and return the run's record (`run.json`).

        resume: "auto" continues from a checkpoint if there is one and raises ValueError where it does not
        fit; "set_aside" renames such a checkpoint and starts again; "never" ignores checkpoints.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.began = time.perf_counter()
        self.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.environment = environment()
        self._resume(resume)
        write_atomically(
            self.run_dir / CONFIG_FILE, lambda part: part.write_text(yaml.safe_dump(self.config))
        )
        self._write(RUNNING)
        training = self.settings.training
        try:
            if not self.evaluation_rows:
                self._evaluate()
            while self._queue_is_short():
                self.queue.append(self._sample())
            with tqdm(
                total=training.iterations,
                initial=self.iteration,
                desc=f"{self.settings.algorithm.name} seed {self.settings.seed}",
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
            record = self._write(NON_FINITE, {"what": str(stop), "update": self.update})
        else:
            _, rollout = evaluate(
                self.evaluator, self.policy, self.evaluation_questions[:3], False, seed=self.settings.seed
            )
            write_sample(self.run_dir, self.sampler, rollout)
            record = self._write(COMPLETED)
            # Kept, so that running a finished run again repeats nothing.
            save_checkpoint(self.run_dir / CHECKPOINT_FILE, self.fingerprint, self._state())
        self.policy.save_pretrained(self.run_dir / "policy")
        return record

    def _iterate(self) -> None:
        """Train on the oldest batch of the queue, sample a new one, evaluate, checkpoint."""
        training = self.settings.training
        queued = self.queue.popleft()
        batch = queued.trajectories
        shared = dict(queued.metrics)
        began = time.perf_counter()
        with torch.no_grad():
            values = self._values(queued)
            reference = score(self.reference, batch, self.sampler.config.temperature, training.length_chunks)
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
            shared["critic_loss"] = self._update_critic(batch, credit.returns, credit.value_mask, values)
        shared["seconds_critic"] = time.perf_counter() - began if self.critic is not None else 0.0
        shared["staleness_iterations"] = self.iteration - queued.iteration
        self.iteration += 1
        for epoch, minibatch, rows in self._minibatches():
            row = shared | {"iteration": self.iteration, "epoch": epoch, "minibatch": minibatch}
            self.update_rows.append(row)
            weights = None if queued.weights is None else queued.weights[rows]
            self._update_policy(
                row, batch.select(rows), credit.advantages[rows], reference.logprobs[rows], weights
            )
            if training.target_kl is not None and row["kl_behaviour_k3"] > training.target_kl:
                break
        if self.iteration % self.settings.evaluation.every == 0 or self.iteration == training.iterations:
            self._evaluate()
        if self._queue_is_short():
            self.queue.append(self._sample())
        if self.iteration % training.checkpoint_every == 0 and self.iteration < training.iterations:
            self._write(RUNNING)
            save_checkpoint(self.run_dir / CHECKPOINT_FILE, self.fingerprint, self._state())

    def _minibatches(self) -> Iterator[tuple[int, int, Tensor]]:
        """Epoch, minibatch and its rows; an epoch that is not reached draws no random numbers."""
        training = self.settings.training
        size = training.trajectories_per_iteration // training.minibatches
        for epoch in range(training.epochs):
            order = torch.randperm(training.trajectories_per_iteration, generator=self.generator)
            for minibatch, rows in enumerate(order.split(size)):
                yield epoch, minibatch, rows

    def _queue_is_short(self) -> bool:
        """Whether another batch must be sampled: no more than the remaining iterations will train on."""
        training = self.settings.training
        remaining = training.iterations - self.iteration
        return len(self.queue) < min(training.staleness_iterations + 1, remaining)

    def _sample(self) -> QueuedBatch:
        """Roll out one batch with the current policy; questions are drawn without replacement, epoch-wise."""
        began = time.perf_counter()
        group = self.objective.credit.group_size
        n_groups = self.settings.training.trajectories_per_iteration // group
        while len(self.question_order) < n_groups:
            shuffled = torch.randperm(len(self.train_questions), generator=self.generator)
            self.question_order = torch.cat([self.question_order, shuffled])
        drawn, self.question_order = self.question_order[:n_groups], self.question_order[n_groups:]
        questions = [self.train_questions[i] for i in drawn.tolist() for _ in range(group)]
        groups = [g for g in range(n_groups) for _ in range(group)]
        rollout = self.sampler.collect(
            self.policy, questions, self.generator, groups, policy_updates=self.update
        )
        metrics = rollout_metrics(rollout, time.perf_counter() - began)
        began = time.perf_counter()
        truth = self._true_values(rollout)
        metrics["seconds_scoring"] = time.perf_counter() - began
        return QueuedBatch(rollout.trajectories, metrics, self.iteration, truth, rollout.weights)

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

    def _values(self, queued: QueuedBatch) -> Tensor | None:
        """(B, T) values that the credit reads; None where it reads none."""
        if self.critic is not None:
            return self.critic(queued.trajectories, self.settings.training.length_chunks)
        return None if queued.truth is None else queued.truth.per_token(queued.trajectories)

    # ---- updates --------------------------------------------------------------------------------

    def _update_policy(
        self,
        row: dict[str, float],
        batch: Trajectories,
        advantages: Tensor,
        reference: Tensor,
        weights: Tensor | None,
    ) -> None:
        """One optimiser step; fills `row` as it goes, so that a non-finite stop keeps what it measured."""
        began = time.perf_counter()
        training, stabilizer = self.settings.training, self.objective.stabilizer
        width = batch.tokens.shape[1]
        advantages, reference = advantages[:, :width], reference[:, :width]
        weights = None if weights is None else weights[:, :width]
        self.update += 1
        row |= {
            "update": self.update,
            "learning_rate": training.learning_rate,
            "staleness_updates": float(self.update - 1 - batch.policy_updates.float().mean()),
        }
        scores = score(
            self.policy,
            batch,
            self.sampler.config.temperature,
            training.length_chunks,
            entropy_gradient=training.entropy_coefficient > 0,
        )
        surrogate = self.objective.surrogate(scores.logprobs, batch, advantages, weights)
        row |= surrogate.diagnostics
        mask = batch.agent_mask
        log_ratio = (reference - scores.logprobs)[mask]
        kl_reference = (log_ratio.exp() - 1 - log_ratio).mean()
        entropy = scores.entropy[mask].mean()
        row |= {"kl_reference": float(kl_reference.detach()), "entropy": float(entropy.detach())}
        loss = surrogate.loss
        if training.kl_coefficient:
            loss = loss + training.kl_coefficient * kl_reference
        if training.entropy_coefficient:
            loss = loss - training.entropy_coefficient * entropy
        self._require_finite(loss, "loss")

        row |= self._bias_norms(surrogate, scores)
        divisor = 1.0
        if self.divisors is not None:
            divisor = self.divisors(row["iteration"], row["epoch"], row["minibatch"])
        elif stabilizer.estimator is not None:
            divisor = stabilizer.divisor(row[BIAS_NORM_COLUMNS[stabilizer.estimator]])
        self._require_finite(torch.tensor(divisor), "stabilizer divisor")
        row["ppo_gradient_norm"] = math.nan
        if loss is not surrogate.ppo_loss and self._watches_norms():
            row["ppo_gradient_norm"] = global_norm(gradient_of(surrogate.ppo_loss, self.parameters))
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        row["gradient_norm"] = global_norm(gradients)
        if loss is surrogate.ppo_loss:
            row["ppo_gradient_norm"] = row["gradient_norm"]
        self._require_finite(torch.tensor(row["gradient_norm"]), "gradient norm")
        row["stabilizer_divisor"] = divisor
        self._step(divisor, row)
        row["seconds_update"] = time.perf_counter() - began
        self._require_finite(torch.tensor(row["update_norm"]), "parameters")

    def _watches_norms(self) -> bool:
        """Whether this update pays for norms that only watch: each costs a backward pass. The iteration shifts
        the choice, so that it does not always fall on the same minibatch of an epoch."""
        return (self.update - 1 + self.iteration) % self.settings.training.bias_norm_every == 0

    def _bias_norms(self, surrogate: Surrogate, scores: Any) -> dict[str, float]:
        """‖C‖: exact by a second backward pass where the stabiliser needs it, else every few updates."""
        needed = self.objective.stabilizer.estimator == "exact"
        norms = estimated_bias_norms(surrogate, scores.logprobs, scores.squared_prob_sum)
        norms["clipping_bias_norm"] = math.nan
        if needed or self._watches_norms():
            clipped = surrogate.any_clipped
            norms["clipping_bias_norm"] = (
                global_norm(gradient_of(surrogate.bias_surrogate, self.parameters)) if clipped else 0.0
            )
        self._require_finite(
            torch.tensor([v for v in norms.values() if not math.isnan(v)]), "clipping bias norm"
        )
        return norms

    def _step(self, divisor: float, row: dict[str, float]) -> None:
        """Clip, divide, step. Dividing after a clip keeps the divisor; a clip that binds afterwards cancels it."""
        training = self.settings.training
        before = [p.detach().clone() for p in self.parameters]

        def divide() -> None:
            if divisor != 1.0:
                torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], divisor)

        if training.clip_order == "after_divisor":
            divide()
        if training.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, training.max_grad_norm)
        if training.clip_order == "before_divisor":
            divide()
        self.optimizer.step()
        row["update_norm"] = global_norm(
            [p.detach() - old for p, old in zip(self.parameters, before, strict=True)]
        )

    def _update_critic(self, batch: Trajectories, returns: Tensor, mask: Tensor, old: Tensor) -> float:
        """Regress V on the value targets; returns the mean loss of the pass (half squared error)."""
        training = self.settings.training
        size = training.trajectories_per_iteration // training.minibatches
        losses = []
        for _ in range(training.critic_epochs):
            for rows in torch.randperm(len(batch.lengths), generator=self.generator).split(size):
                part = batch.select(rows)
                width = part.tokens.shape[1]
                where, target, anchor = mask[rows, :width], returns[rows, :width], old[rows, :width]
                values = self.critic(part, training.length_chunks)
                error = (values - target).square()
                if training.value_clip is not None:
                    limited = anchor + (values - anchor).clamp(-training.value_clip, training.value_clip)
                    error = torch.maximum(error, (limited - target).square())
                loss = 0.5 * error[where].mean()
                self._require_finite(loss, "critic loss")
                self.critic_optimizer.zero_grad()
                loss.backward()
                gradients = [p.grad for p in self.critic.parameters() if p.grad is not None]
                self._require_finite(torch.tensor(global_norm(gradients)), "critic gradient norm")
                self.critic_optimizer.step()
                losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def _require_finite(self, value: Tensor, what: str) -> None:
        if not torch.isfinite(value).all():
            raise NonFinite(f"non-finite {what} at update {self.update}, iteration {self.iteration}")

    # ---- evaluation and records -----------------------------------------------------------------

    def _evaluate(self) -> None:
        """Sampled, and every `greedy_every` iterations greedy, on the fixed held-out questions."""
        settings = self.settings.evaluation
        kinds = [True] if self.iteration % settings.greedy_every == 0 else []
        if self.iteration == self.settings.training.iterations:
            kinds = [True]
        for greedy in [*kinds, False]:  # sampled last, so that the newest row is the primary metric
            seed = self.settings.seed * 1_000_003 + self.iteration
            row, _ = evaluate(self.evaluator, self.policy, self.evaluation_questions, greedy, seed)
            self.evaluation_rows.append({"iteration": self.iteration, "update": self.update} | row)

    def _write(self, status: str, non_finite: dict | None = None) -> dict[str, Any]:
        write_tables(self.run_dir, self.update_rows, self.evaluation_rows)
        record = {
            "status": status,
            "regime": self.settings.training.regime,
            "algorithm": self.settings.algorithm.name,
            "seed": self.settings.seed,
            "preset": self.config["preset"],
            "world": self.config["world"]["_target_"].rsplit(".", 1)[-1].removesuffix("World").lower(),
            "warm_start_seed": self.settings.warm_start_seed,
            "world_seed": self.config["world"].get("seed"),
            "policy": self.settings.policy.name,
            "policy_parameters": sum(p.numel() for p in self.parameters),
            "config_fingerprint": fingerprint(self.identity),
            "code_hash": self.code_hash,
            **self.environment,
            "started": self.started,
            "wall_seconds": round(self._elapsed(), 1),
            "peak_memory_mb": round(peak_memory_mb(), 1),
            "iterations": self.iteration,
            "updates": self.update,
            "warm_start": {k: self.warm_start[k] for k in ("success_sampled", "success_greedy", "n_sampled")},
            "non_finite": non_finite,
        }
        write_record(self.run_dir, record)
        return record

    def _elapsed(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    # ---- checkpoints ----------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "update": self.update,
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "critic": self.critic and self.critic.state_dict(),
            "critic_optimizer": self.critic and self.critic_optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "question_order": self.question_order,
            "queue": [
                (q.trajectories.state_dict(), q.metrics, q.iteration, q.truth and vars(q.truth), q.weights)
                for q in self.queue
            ],
            "update_rows": self.update_rows,
            "evaluation_rows": self.evaluation_rows,
            "started": self.started,
            "seconds": self._elapsed(),
        }

    def _resume(self, mode: str) -> None:
        path, state = self.run_dir / CHECKPOINT_FILE, None
        if mode != "never" and path.exists():
            try:
                state = load_checkpoint(path, self.fingerprint)
            except ValueError as error:
                if mode != "set_aside":
                    raise
                log.warning("%s", error)
        if state is None:
            aside = set_aside(self.run_dir)
            if aside is not None:
                log.warning("an earlier run's files were moved to %s", aside)
            return
        self.iteration, self.update = state["iteration"], state["update"]
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
            self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        self.generator.set_state(state["generator"])
        self.question_order = state["question_order"]
        self.queue = deque(
            QueuedBatch(
                Trajectories.from_state_dict(t), metrics, iteration, truth and TrueValues(**truth), weights
            )
            for t, metrics, iteration, truth, weights in state["queue"]
        )
        self.update_rows, self.evaluation_rows = state["update_rows"], state["evaluation_rows"]
        self.started, self.seconds_before = state["started"], state["seconds"]
        if self.iteration == self.settings.training.iterations:
            log.info("this very run is already complete in %s: nothing to train", self.run_dir)
        else:
            log.info("resumed after iteration %d", self.iteration)
