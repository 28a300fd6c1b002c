"""Stabilisers: what an objective does about unreliable, far off-policy samples beyond the clip."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stppo.checks import in_range, one_of
from stppo.objectives.clipping import Bounds
from stppo.objectives.ratios import kl_behaviour_to_policy, kl_policy_to_behaviour
from stppo.objectives.surrogates import Terms
from stppo.objectives.tokens import Tokens


@dataclass(frozen=True)
class Stabilizer:
    """A divisor of the gradient, a penalty added to the loss, or a weight of each token; this one is none of
    them. To write one, start from `Divisor`, `Penalty` or `SampleWeight`."""

    # The number of an update that `divisor` wants, see `Divisor`; None where it wants none.
    estimator: ClassVar[str | None] = None
    # "gradient": it is divided; "step": the learning rate of this update is, which Adam does not undo.
    divides: ClassVar[str] = "gradient"
    # True: training divides by the divisor over the median of the run's divisors up to this update, so by
    # about 1.
    over_median: ClassVar[bool] = False

    def divisor(self, value: float) -> float:
        """What to divide the (already norm-clipped) gradient by."""
        return 1.0

    def penalty(self, tokens: Tokens, bounds: Bounds) -> Tensor | None:
        """Scalar added to the loss, with graph."""
        return None

    def weights(self, tokens: Tokens, terms: Terms) -> Tensor | None:
        """(N,) what each term, and its part of the clipping bias, is multiplied by, without graph."""
        return None

    def ends_iteration(self, row: dict[str, float]) -> bool:
        """Whether this update, with its metrics row, is the last on its batch."""
        return False


@dataclass(frozen=True)
class Divisor(Stabilizer, ABC):
    """Base of stabilisers that divide the gradient: write `divisor` and name what it reads.

    estimator: exact, last_block, logprob or logit, for that norm of the clipping bias, gradient_norm (before
    it is divided), or a key of the surrogate's diagnostics, such as effective_sample_size. divides:
    "gradient" or "step"; over_median; see `Stabilizer`."""

    estimator: ClassVar[str | None] = "exact"

    @abstractmethod
    def divisor(self, value: float) -> float:
        """Divisor of the (already norm-clipped) gradient from this update's value of `estimator`; a
        non-finite value must not be hidden, and ends the run."""


@dataclass(frozen=True)
class Penalty(Stabilizer, ABC):
    """Base of stabilisers that add to the loss: write `penalty`."""

    @abstractmethod
    def penalty(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        """Scalar to add to the loss, with graph, from all that is known of the tokens and the clip's (N,)
        bounds."""


@dataclass(frozen=True)
class TokenPenalty(Penalty):
    """Base of penalties that are a mean over agent tokens: write `costs`."""

    @abstractmethod
    def costs(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        """(N,) what each token adds, with graph, before the mean; nothing that depends on other
        trajectories."""

    def penalty(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        return self.costs(tokens, bounds).mean()


@dataclass(frozen=True)
class SampleWeight(Stabilizer, ABC):
    """Base of stabilisers that weigh each sample: write `weights`."""

    @abstractmethod
    def weights(self, tokens: Tokens, terms: Terms) -> Tensor:
        """(N,) what each term, and its part of the clipping bias, is multiplied by, without graph;
        positive."""


@dataclass(frozen=True)
class NoStabilizer(Stabilizer):
    """Plain clipped objective."""


@dataclass(frozen=True, kw_only=True)  # by position, `estimator` would come first: the base class names it
class ClippingBiasNorm(Divisor):
    """Divide the gradient by a function of the clipping bias' norm n = ||C||_2 (v1 Eq. 7 token, Eq. 8 turn).

        max      max(1, n / c0)   an update whose bias is below c0 is left alone
        one_plus 1 + n / c0       its smooth form
        floor    max(n, c0)       the bare norm with a floor: `max` times the constant c0
        bare     n                the words as they stand, without c0: it enlarges the gradient where n < 1.
                                  Where nothing is clipped n = 0, the quotient is undefined and there is
                                  nothing to correct: 1

    The sources say "divided by the norm" and give neither floor nor constant; `max` with c0 = 0.1 was fixed
    beforehand. A minibatch norm is biased upward, so a c0 belongs to a batch size. Apply the divisor after
    gradient-norm clipping: a clip that binds afterwards cancels it. Adam is nearly free of scale: a constant
    divisor does nothing there, only the relative weight of updates inside its moments changes.
    A non-finite norm gives a non-finite divisor.

    estimator: exact, over all parameters; last_block, over those of the last transformer block, whose
    backward pass ends there; logprob and logit, estimates without one (`estimated_bias_norms`). Each has a
    scale, and so a c0, of its own.
    divides: "gradient", or "step", the learning rate of the update, which Adam does not undo. over_median: by
    the divisor over the running median of its own run, so that half of the steps are longer than without it.
    """

    c0: float = 0.1
    form: str = "max"
    # options here, constants elsewhere
    estimator: str = "exact"
    divides: str = "gradient"
    over_median: bool = False

    def __post_init__(self) -> None:
        in_range(self, "c0", 0.0, low_open=True)
        one_of(self, "form", ("max", "one_plus", "floor", "bare"))
        one_of(self, "estimator", ("exact", "last_block", "logprob", "logit"))
        one_of(self, "divides", ("gradient", "step"))

    def divisor(self, value: float) -> float:
        if math.isnan(value):
            return math.nan  # max() would hide it
        if self.form == "max":
            return max(1.0, value / self.c0)
        if self.form == "one_plus":
            return 1.0 + value / self.c0
        if self.form == "bare":
            return value or 1.0
        return max(value, self.c0)


@dataclass(frozen=True, kw_only=True)
class OwnClippingBias(SampleWeight):
    """Divide each sample's term by a function of its own clipping, not the gradient by one of the
    minibatch's: a reading of ours of "downweighting unreliable, highly off-policy samples". A sample is a
    trajectory or a turn (`sample`).

        norm   max(1, n_i / c0)   n_i = ||C_i||, C_i the clipping bias of the mean over the sample's tokens of
                                  their terms
        share  1 + s_i            s_i the share of the sample's tokens that are clipped

    n_i exactly would take a backward pass for each sample. It is estimated in log-probability space, the norm
    of C_i with respect to its tokens' log-probabilities, as `logprob` is for the minibatch: it needs no pass,
    and grows with how far the clipped ratios and their advantages reach. A ratio of a whole trajectory mixes
    its turns: with sample = "turn" what falls on a turn's tokens then counts as its own."""

    form: str = "norm"
    sample: str = "sequence"
    c0: float = 0.01

    def __post_init__(self) -> None:
        one_of(self, "form", ("norm", "share"))
        one_of(self, "sample", ("sequence", "turn"))
        in_range(self, "c0", 0.0, low_open=True)

    def weights(self, tokens: Tokens, terms: Terms) -> Tensor:
        samples = tokens.layout.segments(self.sample)
        if self.form == "share":
            return samples.share(1 / (1 + samples.mean(terms.clipped.to(tokens.ratio.dtype))))
        removed = (terms.unrestricted - terms.terms) / samples.share(samples.lengths)
        (bias,) = torch.autograd.grad(removed.sum(), tokens.log_ratio, retain_graph=True)
        norm = samples.sum(bias.square()).sqrt()
        return samples.share(1 / (norm / self.c0).clamp_min(1))


@dataclass(frozen=True)
class CtnKL(Penalty):
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

    def penalty(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        share, kl = self.parts(tokens, bounds)
        if self.formula == "inside":
            return self.coefficient * (share * kl).mean()
        return self.coefficient * share.mean() * kl.mean()

    def parts(self, tokens: Tokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """(B,) detached out-of-range share and (B,) mean KL estimate of each trajectory."""
        log_ratio, layout = tokens.log_ratio, tokens.layout
        out_of_range = bounds.out_of_range(log_ratio.detach().exp()).to(log_ratio.dtype)
        estimate = kl_policy_to_behaviour if self.kl == "policy_to_behaviour" else kl_behaviour_to_policy
        return layout.row_mean(out_of_range), layout.row_mean(estimate(log_ratio))
