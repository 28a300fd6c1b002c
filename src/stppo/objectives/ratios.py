"""Importance ratios over tokens, turns, sentences and sequences; KL estimators built on token log-ratios."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stppo.checks import one_of
from stppo.trajectories import SEGMENTS, Layout

AGGREGATIONS = ("geometric", "arithmetic", "product")


class RatioRule(ABC):
    """Base of all importance ratios: write `ratio`.

    granularity: the kind of segment (`stppo.trajectories.SEGMENTS`) whose tokens share a ratio.
    sees_batch: declare it where a ratio depends on other trajectories; the oracle, whose tree is no batch,
    then refuses the rule."""

    granularity: ClassVar[str] = "token"
    sees_batch: ClassVar[bool] = False

    @abstractmethod
    def ratio(self, log_ratio: Tensor, layout: Layout) -> Tensor:
        """(N,) token log-ratios, nats, with graph -> (N,) ratios w"""

    def __call__(self, log_ratio: Tensor, layout: Layout) -> Tensor:
        """`ratio`; ValueError unless there is one for each agent token. Overflow stays visible as inf."""
        found = self.ratio(log_ratio, layout)
        if getattr(found, "shape", None) != log_ratio.shape:
            name, wanted = f"{type(self).__name__}.ratio", tuple(log_ratio.shape)
            raise ValueError(
                f"{name}: expected one value a token, {wanted}, got {getattr(found, 'shape', found)}"
            )
        return found

    def pullback(self, log_ratio: Tensor, ratio: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        """(N,): sum_t weights_t * dw_t/dl_s for each agent token s; `ratio` is what the log-ratios gave."""
        with torch.enable_grad():
            leaf = log_ratio.detach().requires_grad_()
            return torch.autograd.grad((weights.detach() * self(leaf, layout)).sum(), leaf)[0]


class _Exp(torch.autograd.Function):
    """exp. Where it overflows and its gradient is not asked for, as of a clipped term, that is 0 and not 0 x
    inf = NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        value = x.exp()
        ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return torch.where(gradient == 0, gradient, gradient * value)


def safe_exp(x: Tensor) -> Tensor:
    """exp(x), whose gradient is 0 where none is asked for, even if it overflows."""
    return _Exp.apply(x)


@dataclass(frozen=True)
class Ratio(RatioRule):
    """Importance ratio w_t shared by the segment (token, turn, sentence, whole trajectory) that holds agent
    token t.

    With the token log-ratio l = log pi_theta - log pi_old (nats) over a segment of n agent tokens:

        geometric   exp(mean l)    v1 Eq. 4 for turns; GSPO (arXiv 2507.18071) for sequences
        arithmetic  mean(exp l)    the other reading of v2's turn ratio
        product     exp(sum l)     the exact ratio of the segment's probabilities

    A token is a segment of one, for which the three coincide.
    """

    granularity: str = "token"
    aggregation: str = "geometric"

    def __post_init__(self) -> None:
        one_of(self, "granularity", SEGMENTS)
        one_of(self, "aggregation", AGGREGATIONS)

    def ratio(self, log_ratio: Tensor, layout: Layout) -> Tensor:
        if self.granularity == "token":
            return safe_exp(log_ratio)
        segments = layout.segments(self.granularity)
        total = segments.share(
            segments.sum(safe_exp(log_ratio) if self.aggregation == "arithmetic" else log_ratio)
        )
        mean = total / segments.share(segments.lengths)
        if self.aggregation == "arithmetic":
            return mean
        return safe_exp(total if self.aggregation == "product" else mean)

    def pullback(self, log_ratio: Tensor, ratio: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        """In closed form (no graph needed)."""
        if self.granularity == "token":
            return weights * ratio
        segments = layout.segments(self.granularity)
        total = segments.share(segments.sum(weights))
        if self.aggregation == "product":
            return total * ratio
        slope = ratio if self.aggregation == "geometric" else log_ratio.exp()
        return total * slope / segments.share(segments.lengths)


def kl_behaviour_to_policy(log_ratio: Tensor) -> Tensor:
    """r - 1 - l: on samples of pi_old, an unbiased estimate of KL(pi_old || pi_theta), never negative."""
    return torch.expm1(log_ratio) - log_ratio


def kl_policy_to_behaviour(log_ratio: Tensor) -> Tensor:
    """r l - r + 1: on samples of pi_old, an unbiased estimate of KL(pi_theta || pi_old), never negative."""
    return log_ratio.exp() * log_ratio - torch.expm1(log_ratio)


def kl_to_reference(logprobs: Tensor, reference: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
    """Penalty that keeps a policy near a reference, nats, for each token of any shape: k3 = r - 1 - log r
    with r = pi_ref / pi_theta (Schulman 2020), as GRPO and Search-R1 have it.

    Its value estimates KL(pi_theta || pi_ref) on samples of pi_theta, but its gradient there is in
    expectation that of KL(pi_ref || pi_theta); on samples of an older policy it is that of neither.
    old_logprobs: of the policy that sampled. With them k3 is weighed by pi_theta / pi_old, and value and
    gradient are those of KL(pi_theta || pi_ref), at the states that the older policy reached."""
    log_ratio = reference - logprobs
    k3 = log_ratio.exp() - 1 - log_ratio
    return k3 if old_logprobs is None else (logprobs - old_logprobs).exp() * k3
