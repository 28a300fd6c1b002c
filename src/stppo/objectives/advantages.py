"""Credit: from rewards (and a critic's values) to one advantage per agent token.

Recursions run over agent tokens, or over turns; environment tokens take no part in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from stppo.checks import in_range, one_of
from stppo.trajectories import Layout, Trajectories

POOLINGS = ("token", "turn_mean", "turn_sum")


@dataclass(frozen=True, eq=False)
class Credit:
    """advantages (B, T), 0 off the agent mask; with a critic also its regression targets `returns` (B, T) and
    the mask (B, T) of the positions whose value is trained; raw_std: standard deviation of the advantages
    over agent tokens before whitening and pooling; kept (B,) bool: the trajectories to train on, None:
    all."""

    advantages: Tensor
    returns: Tensor | None
    value_mask: Tensor | None
    raw_std: float
    kept: Tensor | None = None


class Estimate(NamedTuple):
    """What a credit rule says of the N agent tokens, (N,) each: advantages, and where it reads a critic the
    regression targets of its values and which positions have one (bool). kept (B,) bool: the trajectories
    that the policy is trained on; None, or none of them: all."""

    advantages: Tensor
    targets: Tensor | None = None
    trained: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class CreditRule(ABC):
    """Base of all credits: write `estimate`; set `needs_critic` where it reads a critic's values, and
    `group_size` where it compares trajectories of one question.

    whiten: shift and scale advantages to mean 0, variance 1 over all agent tokens of the iteration (of its
    kept trajectories, where the rule keeps some only), before pooling (verl's masked_whiten, the baseline
    stack's choice). center: shift alone; `whiten` includes it.
    pooling: keep advantages per token, or give every token of a turn the mean or the sum of its turn.
    """

    pooling: str = "token"
    whiten: bool = True
    center: bool = False

    needs_critic: ClassVar[bool] = False
    critic_passes: ClassVar[int] = 1  # over a batch, for each of training.critic_epochs
    group_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        one_of(self, "pooling", POOLINGS)

    @torch.no_grad()
    def __call__(self, trajectories: Trajectories, values: Tensor | None = None) -> Credit:
        """Credit one whole iteration.

        `values` (B, T) holds V of the state before token t; read on agent tokens only, ignored by credits
        without a critic. Raises ValueError where it is needed and missing or misshapen, or the estimate is.
        """
        layout = trajectories.layout
        if self.needs_critic:
            if values is None:
                raise ValueError(f"{type(self).__name__}: needs a critic's values, got none")
            if values.shape != trajectories.rewards.shape:
                expected, got = tuple(trajectories.rewards.shape), tuple(values.shape)
                raise ValueError(f"{type(self).__name__}: values must have shape {expected}, got {got}")
            values = layout.gather(values.detach())
        found = self.estimate(trajectories, layout, values)
        shape = getattr(getattr(found, "advantages", None), "shape", None)
        if not isinstance(found, Estimate) or shape != layout.rows.shape:
            got = type(found).__name__ if shape is None else f"advantages {tuple(shape)}"
            raise ValueError(
                f"{type(self).__name__}.estimate: expected an Estimate with one advantage a token, "
                f"{tuple(layout.rows.shape)}, got {got}"
            )
        advantages, targets, trained, kept = found
        kept = kept if kept is not None and kept.any() else None
        counted = advantages if kept is None else advantages[kept[layout.rows]]
        spread = counted.std(correction=min(1, len(counted) - 1))
        if self.center or self.whiten:
            advantages = advantages - counted.mean()
        if self.whiten:
            advantages = advantages * (spread.square() + 1e-8).rsqrt()
        if self.pooling == "turn_mean":
            advantages = layout.turn_mean(advantages)[layout.turns]
        elif self.pooling == "turn_sum":
            advantages = layout.turn_sum(advantages)[layout.turns]
        return Credit(
            advantages=layout.scatter(advantages),
            returns=None if targets is None else layout.scatter(targets),
            value_mask=None if trained is None else layout.scatter(trained),
            raw_std=spread.item(),
            kept=kept,
        )

    @abstractmethod
    def estimate(self, trajectories: Trajectories, layout: Layout, values: Tensor | None) -> Estimate:
        """Advantages before whitening and pooling, of a whole iteration; `values` (N,) of the critic, None
        without. Called without graph."""


@dataclass(frozen=True, kw_only=True)
class _GAECredit(CreditRule):
    """Credits by generalised advantage estimation (arXiv 1506.02438), whatever a step is."""

    gamma: float = 1.0
    lam: float = 1.0

    needs_critic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, "gamma", 0.0, 1.0)
        in_range(self, "lam", 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class TokenGAE(_GAECredit):
    """Generalised advantage estimation with one step per agent token.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the next agent
    token, across the environment's tokens between turns. Value targets: A_t + V_t on every agent token.
    """

    def estimate(self, trajectories, layout, values):
        rewards = layout.gather(trajectories.rewards)
        advantages = _gae(rewards, values, layout.rows, layout.row_lengths, self.gamma, self.lam)
        return Estimate(advantages, advantages + values, torch.ones_like(layout.rows, dtype=torch.bool))


@dataclass(frozen=True, kw_only=True)
class TurnGAE(_GAECredit):
    """GAE with one step per turn: the turn's reward is the sum of its tokens', its state the one before its
    first token, whose value alone is read and trained. Every token of a turn gets the turn's advantage."""

    def estimate(self, trajectories, layout, values):
        return _turn_credit(trajectories, layout, values, self.gamma, self.lam)


@dataclass(frozen=True, kw_only=True)
class TurnReturnMinusValue(CreditRule):
    """A^k = R_k - V(s_k): the return from turn k on, discounted by gamma per turn, minus the value of the
    state before the turn's first token (reading B). Equal to TurnGAE at lam = 1."""

    gamma: float = 1.0

    needs_critic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, "gamma", 0.0, 1.0)

    def estimate(self, trajectories, layout, values):
        return _turn_credit(trajectories, layout, values, self.gamma, 1.0)


@dataclass(frozen=True, kw_only=True)
class _GroupCredit(CreditRule):
    """Credits that compare the `group_size` trajectories of one question (equal `group_ids`).

    returns: "trajectory" compares R, the sum of a trajectory's rewards. "turn" compares for each turn k the
    rewards from it on, undiscounted; a trajectory with fewer turns takes part with its last one's. With a
    reward of the last turn alone both are the same."""

    group_size: int = 8
    whiten: bool = False
    returns: str = "trajectory"

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.group_size
        if not isinstance(size, int) or size < 2:
            raise ValueError(
                f"{type(self).__name__}.group_size={size!r}: a group needs at least 2 trajectories"
            )
        one_of(self, "returns", ("trajectory", "turn"))

    def estimate(self, trajectories, layout, values):
        compared, turns = trajectories.returns[None], torch.zeros_like(layout.rows)
        if self.returns == "turn":
            compared, turns = _returns_to_go(trajectories, layout)
        return Estimate(self._compare(trajectories.group_ids, compared)[turns, layout.rows])

    def _compare(self, group_ids: Tensor, compared: Tensor) -> Tensor:
        """(K, B) less the mean over the trajectory's group, times the group's factor, in each row."""
        ids, order = group_ids.sort(stable=True)
        groups, counts = ids.unique_consecutive(return_counts=True)
        wrong = (counts != self.group_size).nonzero()
        if len(wrong):
            group, count = int(groups[wrong[0]]), int(counts[wrong[0]])
            raise ValueError(
                f"{type(self).__name__}: group {group} has {count} trajectories in this batch, "
                f"group_size is {self.group_size}; credit whole iterations, not minibatches"
            )
        rows = order.view(-1, self.group_size)
        returns = compared[:, rows]
        # A group that agrees carries no signal; without this, rounding over eps would invent some.
        low, high = returns.amin(-1, keepdim=True), returns.amax(-1, keepdim=True)
        differs = high - low > 1e-6 * torch.maximum(high, -low).clamp_min(1.0)
        scale = self._scale(returns) * differs.to(returns.dtype)
        advantages = torch.zeros_like(compared)
        advantages[:, rows] = (returns - returns.mean(-1, keepdim=True)) * scale
        return advantages

    def _scale(self, returns: Tensor) -> Tensor | float:
        """Factor of each group, from its returns (..., group_size)."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class GroupNormalised(_GroupCredit):
    """GRPO (arXiv 2402.03300): (R - mean) / (std + eps) over the group, std with Bessel's correction. With
    returns="turn" reading B's SO-GRPO."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, "eps", 0.0)

    def _scale(self, returns):
        return 1.0 / (returns.std(-1, keepdim=True) + self.eps)


@dataclass(frozen=True, kw_only=True)
class GroupCentred(_GroupCredit):
    """Dr. GRPO (arXiv 2503.20783): R - mean over the group."""


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(_GroupCredit):
    """RLOO (arXiv 2402.14740): R minus the mean of the group's other returns."""

    def _scale(self, returns):
        return self.group_size / (self.group_size - 1)


@dataclass(frozen=True, kw_only=True)
class BatchBaseline(CreditRule):
    """REINFORCE with the iteration's mean return as baseline: R - mean over all trajectories."""

    whiten: bool = False

    def estimate(self, trajectories, layout, values):
        returns = trajectories.returns
        return Estimate((returns - returns.mean())[layout.rows])


def _turn_credit(trajectories, layout, values, gamma, lam):
    state_values = values[layout.turn_starts]
    advantages = _gae(trajectories.turn_rewards, state_values, layout.turn_rows, layout.row_turns, gamma, lam)
    first = torch.zeros_like(layout.rows, dtype=torch.bool)
    first[layout.turn_starts] = True
    targets = (advantages + state_values)[layout.turns] * first
    return Estimate(advantages[layout.turns], targets, first)


def _returns_to_go(trajectories: Trajectories, layout: Layout) -> tuple[Tensor, Tensor]:
    """(K, B) rewards from each of a trajectory's turns on, beyond its last one those of the last; (N,) which
    of its trajectory's turns each token belongs to."""
    to_go = _discounted_sum(trajectories.turn_rewards, layout.turn_rows, layout.row_turns, 1.0)
    first = layout.row_turns.cumsum(0) - layout.row_turns
    turns = torch.arange(int(layout.row_turns.max()), device=first.device)[:, None]
    held = torch.minimum(turns, layout.row_turns - 1)
    return to_go[first + held], layout.turns - first[layout.rows]


def _gae(rewards: Tensor, values: Tensor, rows: Tensor, counts: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE over S steps (agent tokens or turns) sorted by row, `counts` (B,) of them in each row."""
    next_values = torch.zeros_like(values)
    same_row = rows[1:] == rows[:-1]
    next_values[:-1] = values[1:].where(same_row, torch.zeros_like(values[1:]))
    return _discounted_sum(rewards + gamma * next_values - values, rows, counts, gamma * lam)


def _discounted_sum(steps: Tensor, rows: Tensor, counts: Tensor, discount: float) -> Tensor:
    """y_s = x_s + discount * y_{s+1} within each row; (S,) -> (S,)."""
    columns = torch.arange(len(steps), device=steps.device) - (counts.cumsum(0) - counts)[rows]
    packed = steps.new_zeros(len(counts), int(counts.max()))
    packed[rows, columns] = steps
    total = steps.new_zeros(len(counts))
    for column in reversed(range(packed.shape[1])):
        total = packed[:, column] + discount * total
        packed[:, column] = total
    return packed[rows, columns]
