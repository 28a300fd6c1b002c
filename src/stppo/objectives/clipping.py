"""Clips: the range in which a ratio is trusted, per token. What happens beyond it is the surrogate's
business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from stppo.checks import in_range, one_of
from stppo.objectives.tokens import Tokens, per_token


class Bounds(NamedTuple):
    """Lowest and highest trusted ratio: numbers, or one for each token (N,); infinite where there is no
    bound."""

    low: Tensor | float
    high: Tensor | float

    def out_of_range(self, ratio: Tensor) -> Tensor:
        """(N,) bool, whatever the advantage's sign"""
        return (ratio > self.high) | (ratio < self.low)


class ClipRule(ABC):
    """Base of all clips: write `bounds`.

    clip_on: "turn" replaces advantages by their turn's mean before anything else sees them, see `Clip`.
    sees_batch: declare it where a token's bounds depend on other trajectories; the oracle, whose tree is no
    batch, then refuses the rule."""

    clip_on: ClassVar[str] = "token"
    sees_batch: ClassVar[bool] = False

    @abstractmethod
    def bounds(self, tokens: Tokens) -> Bounds:
        """The range of each token, or one for all. It may depend on ratios, advantages and the rest of the
        whole minibatch, and takes no gradient: it is called without graph."""

    @torch.no_grad()
    def __call__(self, tokens: Tokens) -> Bounds:
        """`bounds` as (N,) tensors of the ratio's type; ValueError unless there is one for all or one a
        token."""
        whole = []
        for side, value in zip(("low", "high"), self.bounds(tokens), strict=True):
            if not isinstance(value, Tensor) or value.ndim == 0:
                value = torch.full_like(tokens.ratio, float(value))
            whole.append(per_token(value, tokens, f"{type(self).__name__}.bounds ({side})"))
        return Bounds(*whole)


@dataclass(frozen=True)
class Clip(ClipRule):
    """Fixed bounds [1 - epsilon_low, 1 + epsilon_high] (PPO, arXiv 1707.06347); epsilon may be inf.

    clip_on="token": every token's term is min(w A_t, clip(w) A_t), with the ratio that its segment shares.
    clip_on="turn": the turn's summed term is, min(w sum A, clip(w) sum A). Both are equal unclipped and
    whenever the advantages of a turn agree in sign. The second needs no code of its own: it equals
    n min(w mean A, clip(w) mean A), the first with the turn's mean advantage, since w and the loss weight are
    constant in a turn.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    clip_on: str = "token"

    def __post_init__(self) -> None:
        in_range(self, "epsilon_low", 0.0, low_open=True)
        in_range(self, "epsilon_high", 0.0, low_open=True)
        one_of(self, "clip_on", ("token", "turn"))

    def bounds(self, tokens: Tokens) -> Bounds:
        return Bounds(1.0 - self.epsilon_low, 1.0 + self.epsilon_high)
