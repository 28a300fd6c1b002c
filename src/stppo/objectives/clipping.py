"""PPO's clip: which surrogate terms it removes, and the clipping bias that this leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stppo.checks import in_range, one_of
from stppo.trajectories import Layout


@dataclass(frozen=True)
class Clip:
    """Clip ratios to [1 - epsilon_low, 1 + epsilon_high] in the pessimistic min (PPO, arXiv 1707.06347).

    clip_on="token": every token's term is min(w A_t, clip(w) A_t), with the ratio that its segment shares.
    clip_on="turn": the turn's summed term is, min(w sum A, clip(w) sum A). Both are equal unclipped and
    whenever the advantages of a turn agree in sign. epsilon may be inf (no bound on that side).
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    clip_on: str = "token"

    def __post_init__(self) -> None:
        in_range(self, "epsilon_low", 0.0, low_open=True)
        in_range(self, "epsilon_high", 0.0, low_open=True)
        one_of(self, "clip_on", ("token", "turn"))

    def __call__(self, ratio: Tensor, advantages: Tensor, layout: Layout) -> ClippedTerms:
        """(N,) ratios and advantages -> the terms to maximise, with the clipped ones marked."""
        if self.clip_on == "turn":
            # min(w sum A, clip(w) sum A) = n min(w mean A, clip(w) mean A): the turn's mean advantage in the
            # token-wise min is the same loss and gradient (w and the loss weight are constant in a turn),
            # and needs no second code path.
            advantages = layout.turn_mean(advantages)[layout.turns]
        low, high = 1.0 - self.epsilon_low, 1.0 + self.epsilon_high
        detached = ratio.detach()
        clipped_high = (advantages > 0) & (detached > high)
        clipped_low = (advantages < 0) & (detached < low)
        clipped = clipped_high | clipped_low
        unclipped_terms = ratio * advantages
        # Branching on the sign rather than taking a min makes the zero gradient of a clipped term explicit.
        terms = torch.where(clipped, detached.clamp(low, high) * advantages, unclipped_terms)
        return ClippedTerms(terms, unclipped_terms, clipped, clipped_high, clipped_low)

    def out_of_range(self, ratio: Tensor) -> Tensor:
        """(N,) bool, whatever the advantage's sign: w beyond [1 - epsilon_low, 1 + epsilon_high]."""
        return (ratio > 1.0 + self.epsilon_high) | (ratio < 1.0 - self.epsilon_low)


@dataclass(frozen=True, eq=False)
class ClippedTerms:
    """(N,) each; `clipped` = `clipped_high` or `clipped_low` marks the terms without gradient."""

    terms: Tensor
    unclipped_terms: Tensor
    clipped: Tensor
    clipped_high: Tensor
    clipped_low: Tensor
