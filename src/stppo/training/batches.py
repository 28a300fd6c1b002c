"""Batches: sampled with the policy of their time, waiting to be trained on."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stppo.config.files import ConfigError
from stppo.config.loading import LoadedRun
from stppo.config.settings import RunConfig
from stppo.objectives import Objective
from stppo.rollout.mismatch import scored_anew
from stppo.rollout.rollout import Rollout, Sampler
from stppo.training.controls import generator_for
from stppo.training.metrics import rollout_metrics
from stppo.training.monte_carlo import TrueValues, true_values
from stppo.trajectories import Trajectories
from stppo.world.protocol import Question


@dataclass
class QueuedBatch:
    """A sampled batch waiting to be trained on, with the metrics of its roll-out."""

    trajectories: Trajectories
    metrics: dict[str, float]
    iteration: float  # iterations done when it was sampled; of groups sampled apart the mean
    truth: TrueValues | None  # values of the policy that sampled it, where they are asked for
    weights: Tensor | None  # (B, T) of the surrogate's terms, where the roll-out corrects for its engine


class Batches:
    """Samples batches of training questions, drawn without replacement, epoch-wise.

    generator: training's; a batch that fails leaves it as it was. sampler: gives the engine, at first use.
    measured: whether a critic is there whose error is measured against Monte-Carlo values."""

    def __init__(
        self,
        run: LoadedRun,
        policy: PreTrainedModel,
        generator: torch.Generator,
        sampler: Callable[[], Sampler],
        measured: bool,
    ) -> None:
        self.settings, self.policy, self.generator = run.settings, policy, generator
        self.sampler, self.measured = sampler, measured
        self.questions = run.world.questions("train")
        self.group_size = run.objective.credit.group_size
        self.queue: deque[QueuedBatch] = deque()
        self.question_order = torch.empty(0, dtype=torch.long)

    def fill(self, iteration: int, update: int, left: int) -> None:
        """Sample batches until the queue is as long as they are to be stale, after so many iterations and
        updates; none beyond the `left` that will be trained on."""
        while len(self.queue) < min(self.settings.training.staleness_iterations + 1, left):
            self.queue.append(self.sample(iteration, update))

    def sample(self, iteration: int, update: int) -> QueuedBatch:
        """Roll out one batch with the current policy."""
        began = time.perf_counter()
        with self.drawing():
            rollout = self.collect(update)
            metrics = rollout_metrics(rollout, time.perf_counter() - began)
            began = time.perf_counter()
            truth = self._true_values(rollout, iteration + len(self.queue) + 1)
        metrics["seconds_scoring"] = metrics.get("seconds_scoring", 0.0) + time.perf_counter() - began
        return QueuedBatch(rollout.trajectories, metrics, iteration, truth, rollout.weights)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """What fails within leaves the random stream and the order of the questions as they were."""
        before = self.generator.get_state(), self.question_order
        try:
            yield
        except Exception:
            self.generator.set_state(before[0])
            self.question_order = before[1]
            raise

    def collect(self, update: int, n_groups: int | None = None) -> Rollout:
        """A roll-out that will be trained on, of so many questions (None: those of a batch)."""
        sampler, settings = self.sampler(), self.settings
        sampler.keeps_states = True  # of frozen layers: they are needed again
        try:
            drawn = self._draw_questions(n_groups)
            rollout = sampler.collect(self.policy, *drawn, policy_updates=update)
        finally:
            sampler.keeps_states = False
        if settings.rollout.engine == "torch" and settings.scores_anew:  # vLLM's roll-out has done it
            budget = settings.training.micro_batch_tokens
            return scored_anew(self.policy, rollout, settings.rollout.temperature, budget)
        return rollout

    def _draw_questions(self, n_groups: int | None) -> tuple[list[Question], torch.Generator, list[int]]:
        """Each question as often as its group wants it, and the group ids."""
        group = self.group_size
        n_groups = n_groups or self.settings.training.trajectories_per_iteration // group
        while len(self.question_order) < n_groups:
            shuffled = torch.randperm(len(self.questions), generator=self.generator)
            self.question_order = torch.cat([self.question_order, shuffled])
        drawn, self.question_order = self.question_order[:n_groups], self.question_order[n_groups:]
        questions = [self.questions[i] for i in drawn.tolist() for _ in range(group)]
        return questions, self.generator, [g for g in range(n_groups) for _ in range(group)]

    def _true_values(self, rollout: Rollout, iteration: int) -> TrueValues | None:
        """Monte-Carlo values of the current policy on a batch that it has just sampled, from a generator of
        their own: at all starts of turns as the credit's values, or at some of them to measure the critic by.

        iteration: that will train on this batch."""
        training, evaluation = self.settings.training, self.settings.evaluation
        n, n_turns = training.monte_carlo_continuations, None
        if training.values == "critic":
            every = evaluation.value_error_every
            if not self.measured or not every or iteration % every:
                return None
            n, n_turns = evaluation.value_continuations, evaluation.value_states
        generator = generator_for("true values", self.settings.seed, iteration)
        return true_values(self.sampler(), self.policy, rollout, n, generator, n_turns)

    def state(self) -> dict[str, Any]:
        """What an interruption must not lose, as `Trainer.state`."""
        return {
            "question_order": self.question_order,
            "queue": [
                (q.trajectories.state_dict(), q.metrics, q.iteration, q.truth and vars(q.truth), q.weights)
                for q in self.queue
            ],
        }

    def take_up(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self.question_order = state["question_order"]
        self.queue.clear()
        self.queue.extend(
            QueuedBatch(
                Trajectories.from_state_dict(t), metrics, iteration, truth and TrueValues(**truth), weights
            )
            for t, metrics, iteration, truth, weights in state["queue"]
        )


def check_values(settings: RunConfig, objective: Objective) -> None:
    """Raise ConfigError where Monte-Carlo values would not be the values that the credit means."""
    credit, training = objective.credit, settings.training
    if training.values == "monte_carlo" and not credit.needs_critic:
        raise ConfigError(
            f"training.values = 'monte_carlo': the credit {type(credit).__name__} reads no values; use "
            "'critic'"
        )
    if training.values == "monte_carlo" and training.staleness is not None:
        raise ConfigError(
            "training.staleness: true values are estimated for whole batches; set training.values to critic"
        )
    measured = training.values == "monte_carlo" or settings.evaluation.value_error_every
    if measured and getattr(credit, "gamma", 1.0) != 1.0:
        raise ConfigError(
            f"algorithm.objective.credit.gamma = {credit.gamma}: Monte-Carlo values are undiscounted; set "
            "gamma to 1, or training.values to critic and evaluation.value_error_every to 0"
        )
