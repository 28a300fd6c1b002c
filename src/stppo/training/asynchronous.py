"""Batches as an asynchronous trainer makes them: of the groups that finish first.

Dialogues go on while the trainer trains; a group is done with its longest dialogue, and a batch is trained on
as soon as enough groups are done. Time is counted in turns, which all dialogues play at one pace. A group is
of the policy under which it was begun, and its age are the iterations since.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stppo.rollout.rollout import Rollout
from stppo.training.batches import Batches, QueuedBatch
from stppo.training.metrics import rollout_metrics
from stppo.trajectories import Trajectories

SUMS = ("seconds_rollout", "seconds_scoring", "tokens_rollout")
MEANS_OVER_TURNS = ("valid_format_rate", "agent_tokens_per_turn")


@dataclass
class Group:
    """The trajectories of one question, with the metrics of their roll-out."""

    trajectories: Trajectories
    metrics: dict[str, float]
    iteration: int  # iterations done when it was begun
    turns_left: int  # until its longest dialogue ends; below 0: for how long it has been done
    weights: Tensor | None  # as of `QueuedBatch`


class AsynchronousBatches(Batches):
    """`training.staleness`: as many groups as `staleness_iterations` + 1 batches have are under way or wait.

    While a batch is trained on, every dialogue plays `turns_per_iteration` turns; where too few groups are
    done by then, the trainer waits. Groups begun more than `discard_above` iterations ago are thrown away
    once they are done, and others begun in their place. A critic's error is not measured."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.under_way: list[Group] = []
        self.done: deque[Group] = deque()
        self.played = self.discarded = 0  # the iteration up to which turns were played; groups of this batch

    def fill(self, iteration: int, update: int, left: int) -> None:
        """The next batch, after so many iterations and updates, of `left` that will be trained on."""
        training = self.settings.training
        if self.queue or not left:
            return
        n_groups = training.trajectories_per_iteration // self.group_size
        room = n_groups * min(training.staleness_iterations + 1, left)
        if self.played < iteration:
            self._play(training.staleness.turns_per_iteration)
            self.played = iteration
        while True:
            self._discard(iteration)
            if missing := room - len(self.under_way) - len(self.done):
                self._begin(missing, iteration, update)
            if len(self.done) >= n_groups:
                break
            self._play(1)
        self.queue.append(self._batch([self.done.popleft() for _ in range(n_groups)]))
        self.discarded = 0

    def _play(self, turns: int) -> None:
        """So many turns of every dialogue; groups that end wait in the order in which they did."""
        for group in self.under_way:
            group.turns_left -= turns
        self.done.extend(sorted((g for g in self.under_way if g.turns_left <= 0), key=lambda g: g.turns_left))
        self.under_way = [group for group in self.under_way if group.turns_left > 0]

    def _discard(self, iteration: int) -> None:
        oldest = self.settings.training.staleness.discard_above
        if oldest is None:
            return
        young = [group for group in self.done if iteration - group.iteration <= oldest]
        self.discarded += len(self.done) - len(young)
        self.done = deque(young)

    def _begin(self, n_groups: int, iteration: int, update: int) -> None:
        began = time.perf_counter()
        with self.drawing():
            rollout = self.collect(update, n_groups)
        share = (time.perf_counter() - began) / n_groups
        for g in range(n_groups):
            rows = (rollout.trajectories.group_ids == g).nonzero().flatten().tolist()
            shared = {name: x / n_groups if name in SUMS else x for name, x in rollout.metrics.items()}
            trajectories = rollout.trajectories.select(rows)
            weights = (
                None if rollout.weights is None else rollout.weights[rows, : trajectories.tokens.shape[1]]
            )
            part = Rollout(trajectories, [rollout.episodes[row] for row in rows], weights, shared)
            metrics = rollout_metrics(part, share)
            turns = int(trajectories.n_turns.max())
            self.under_way.append(Group(trajectories, metrics, iteration, turns, weights))

    def _batch(self, groups: list[Group]) -> QueuedBatch:
        trajectories = Trajectories.cat([group.trajectories for group in groups])
        trajectories.group_ids = torch.arange(len(groups)).repeat_interleave(self.group_size)
        weights = None
        if groups[0].weights is not None:
            weights = torch.zeros(trajectories.tokens.shape)
            for g, group in enumerate(groups):
                rows = slice(g * self.group_size, (g + 1) * self.group_size)
                weights[rows, : group.weights.shape[1]] = group.weights
        begun = sum(group.iteration for group in groups) / len(groups)
        metrics = {"seconds_scoring": 0.0} | together([group.metrics for group in groups])
        metrics["discarded_groups"] = self.discarded
        return QueuedBatch(trajectories, metrics, begun, None, weights)

    def state(self) -> dict[str, Any]:
        groups = [*self.under_way, *self.done]
        return super().state() | {
            "groups": [
                (g.trajectories.state_dict(), g.metrics, g.iteration, g.turns_left, g.weights) for g in groups
            ],
            "played": self.played,
            "discarded": self.discarded,
        }

    def take_up(self, state: dict[str, Any]) -> None:
        super().take_up(state)
        groups = [Group(Trajectories.from_state_dict(t), *others) for t, *others in state["groups"]]
        self.under_way = [group for group in groups if group.turns_left > 0]
        self.done = deque(group for group in groups if group.turns_left <= 0)
        self.played, self.discarded = state["played"], state["discarded"]


def together(parts: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of a batch from those of its groups, which are of one size."""
    turns = sum(part["turns_per_trajectory"] for part in parts)
    found = {}
    for name in parts[0]:
        if name in SUMS:
            found[name] = sum(part[name] for part in parts)
        elif name in MEANS_OVER_TURNS:
            found[name] = sum(part[name] * part["turns_per_trajectory"] for part in parts) / turns
        else:
            found[name] = sum(part[name] for part in parts) / len(parts)
    return found | {"tokens_per_second": found["tokens_rollout"] / found["seconds_rollout"]}
