"""Importance ratios at token, turn and sequence level, and the KL estimators built on token log-ratios."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stppo.checks import one_of
from stppo.trajectories import Layout

GRANULARITIES = ("token", "turn", "sequence")
AGGREGATIONS = ("geometric", "arithmetic", "product")


@dataclass(frozen=True)
class Ratio:
    """Importance ratio w_t shared by the segment (token, turn, whole trajectory) that holds agent token t.

    With the token log-ratio l = log pi_theta - log pi_old (nats) over a segment of n agent tokens:

        geometric   exp(mean l)    v1 Eq. 4 for turns; GSPO (arXiv 2507.18071) for sequences
        arithmetic  mean(exp l)    the other reading of v2's turn ratio
        product     exp(sum l)     the exact ratio of the segment's probabilities

    A token is a segment of one, for which the three coincide.
    """

    granularity: str = "token"
    aggregation: str = "geometric"

    def __post_init__(self) -> None:
        one_of(self, "granularity", GRANULARITIES)
        one_of(self, "aggregation", AGGREGATIONS)

    def __call__(self, log_ratio: Tensor, layout: Layout) -> Tensor:
        """(N,) token log-ratios -> (N,) ratios; overflow stays visible as inf."""
        if self.granularity == "token":
            return log_ratio.exp()
        if self.aggregation == "arithmetic":
            return self._sum(log_ratio.exp(), layout) / self._lengths(layout)
        total = self._sum(log_ratio, layout)
        return (total if self.aggregation == "product" else total / self._lengths(layout)).exp()

    def pullback(self, log_ratio: Tensor, ratio: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        """(N,): sum_t weights_t * dw_t/dl_s for each agent token s, in closed form (no graph needed)."""
        if self.granularity == "token":
            return weights * ratio
        total = self._sum(weights, layout)
        if self.aggregation == "product":
            return total * ratio
        return total * (ratio if self.aggregation == "geometric" else log_ratio.exp()) / self._lengths(layout)

    def _sum(self, values: Tensor, layout: Layout) -> Tensor:
        if self.granularity == "turn":
            return layout.turn_sum(values)[layout.turns]
        return layout.row_sum(values)[layout.rows]

    def _lengths(self, layout: Layout) -> Tensor:
        if self.granularity == "turn":
            return layout.turn_lengths[layout.turns]
        return layout.row_lengths[layout.rows]


def kl_behaviour_to_policy(log_ratio: Tensor) -> Tensor:
    """r - 1 - l: on samples of pi_old, an unbiased estimate of KL(pi_old || pi_theta), never negative."""
    return torch.expm1(log_ratio) - log_ratio


def kl_policy_to_behaviour(log_ratio: Tensor) -> Tensor:
    """r l - r + 1: on samples of pi_old, an unbiased estimate of KL(pi_theta || pi_old), never negative."""
    return log_ratio.exp() * log_ratio - torch.expm1(log_ratio)
