"""Stabilisers: what an objective does about unreliable, far off-policy samples beyond the clip."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stppo.checks import in_range, one_of
from stppo.objectives.ratios import kl_behaviour_to_policy, kl_policy_to_behaviour
from stppo.trajectories import Layout


@dataclass(frozen=True)
class Stabilizer:
    """Interface: a divisor of the gradient and a penalty added to the loss; this one does neither."""

    # Which norm of the clipping bias `divisor` wants: exact, logprob or logit; None where it wants none.
    estimator: ClassVar[str | None] = None

    def divisor(self, bias_norm: float) -> float:
        """What to divide the (already norm-clipped) gradient by, given ||C||_2 of this update."""
        return 1.0

    def penalty(self, log_ratio: Tensor, out_of_range: Tensor, layout: Layout) -> Tensor | None:
        """Scalar added to the loss, from (N,) token log-ratios and token-level out-of-range flags."""
        return None


@dataclass(frozen=True)
class NoStabilizer(Stabilizer):
    """Plain clipped objective."""


@dataclass(frozen=True, kw_only=True)  # by position, `estimator` would come first: the base class names it
class ClippingBiasNorm(Stabilizer):
    """Divide the gradient by a function of the clipping bias' norm n = ||C||_2 (v1 Eq. 7 token, Eq. 8 turn).

        max      max(1, n / c0)   an update whose bias is below c0 is left alone
        one_plus 1 + n / c0       its smooth form
        floor    max(n, c0)       the bare norm with a floor: `max` times the constant c0

    The sources say "divided by the norm" and give neither floor nor constant; `max` with c0 = 0.1 was fixed
    beforehand. A minibatch norm is biased upward, so a c0 belongs to a batch size. Apply the divisor after
    gradient-norm clipping: a clip that binds afterwards cancels it. Adam is nearly free of scale: a constant
    divisor does nothing there, only the relative weight of updates inside its moments changes.
    A non-finite norm gives a non-finite divisor.
    """

    c0: float = 0.1
    form: str = "max"
    estimator: str = "exact"  # an option here, a constant elsewhere

    def __post_init__(self) -> None:
        in_range(self, "c0", 0.0, low_open=True)
        one_of(self, "form", ("max", "one_plus", "floor"))
        one_of(self, "estimator", ("exact", "logprob", "logit"))

    def divisor(self, bias_norm: float) -> float:
        if math.isnan(bias_norm):
            return math.nan  # max() would hide it
        if self.form == "max":
            return max(1.0, bias_norm / self.c0)
        if self.form == "one_plus":
            return 1.0 + bias_norm / self.c0
        return max(bias_norm, self.c0)


@dataclass(frozen=True)
class CtnKL(Stabilizer):
    """Clipping-triggered KL penalty (the other reading of v2): coefficient * E[share * KL].

    share_i is the detached share of trajectory i's agent tokens whose token-level ratio is out of the clip
    range, whatever the advantage's sign; KL_i the mean KL estimate over its agent tokens.

        inside   mean_i(share_i KL_i)               as the source's formula
        outside  mean_i(share_i) * mean_i(KL_i)     as its code; `inside` minus the covariance over the batch

    kl: policy_to_behaviour is KL(pi_theta || pi_old), estimated by r l - r + 1 on samples of pi_old;
    behaviour_to_policy is KL(pi_old || pi_theta), by r - 1 - l. Both see visited states only. The source
    gives no coefficient; 1 is our choice.
    """

    coefficient: float = 1.0
    formula: str = "inside"
    kl: str = "policy_to_behaviour"

    def __post_init__(self) -> None:
        in_range(self, "coefficient", 0.0)
        one_of(self, "formula", ("inside", "outside"))
        one_of(self, "kl", ("policy_to_behaviour", "behaviour_to_policy"))

    def penalty(self, log_ratio: Tensor, out_of_range: Tensor, layout: Layout) -> Tensor:
        share, kl = self.parts(log_ratio, out_of_range, layout)
        if self.formula == "inside":
            return self.coefficient * (share * kl).mean()
        return self.coefficient * share.mean() * kl.mean()

    def parts(self, log_ratio: Tensor, out_of_range: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """(B,) detached out-of-range share and (B,) mean KL estimate of each trajectory."""
        estimate = kl_policy_to_behaviour if self.kl == "policy_to_behaviour" else kl_behaviour_to_policy
        return layout.row_mean(out_of_range.to(log_ratio.dtype)), layout.row_mean(estimate(log_ratio))
