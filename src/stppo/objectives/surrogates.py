"""Surrogates: what stands where PPO has min(w A, clip(w) A), one term for each agent token.

Each rule gives its terms and what they would be without any restriction. The clipping bias C(theta) is the
gradient of the difference: what restricting took away from *this* surrogate's ascent direction. At theta =
theta_old every shipped rule has the unrestricted term, so that C = 0.

| rule | term | unrestricted | clipped token |
| --- | --- | --- | --- |
| MinClip | min(w A, clip(w) A) | w A | the min takes the bound: no gradient |
| ClippedWeight | sg(clip(w)) A log pi | sg(w) A log pi | w leaves the bounds: the weight is cut to one |
| Mask | sg(w) m A log pi, m 0 or 1 | sg(w) A log pi | m = 0: no gradient |
| Gate | f(w) A, f smooth | w A | f takes more than half of the term's gradient |

sg is "stop gradient": a constant factor. For MinClip and Mask, C sums what clipped tokens alone would have
given; for ClippedWeight the part beyond the bound; for Gate, whose restriction has no edge, a part of every
token with w != 1, so there C can be nonzero with no clipped token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from stppo.checks import in_range
from stppo.objectives.clipping import Bounds
from stppo.objectives.tokens import Tokens, per_token


class Terms(NamedTuple):
    """(N,) each: `terms` to maximise, with graph; the same `unrestricted`, with graph and equal, entry by
    entry, exactly where nothing was restricted; `clipped` bool, the tokens that count in clip fractions."""

    terms: Tensor
    unrestricted: Tensor
    clipped: Tensor


class SurrogateRule(ABC):
    """Base of all surrogates: write `terms`.

    sees_batch: declare it where a token's term depends on other trajectories, as for `ClipRule`.
    one_turn_at_a_time: the trainer makes one update for each turn of a minibatch, the last turns first.
    proximal: where the trainer takes `Tokens.proximal` from, for a rule that reads it: "scored", the policy
    as it was before the iteration's updates; "interpolated", on the line from log pi_old to log pi as far as
    the updates before the iteration are of those since the trajectory was sampled."""

    sees_batch: ClassVar[bool] = False
    one_turn_at_a_time: ClassVar[bool] = False
    proximal: ClassVar[str | None] = None

    @abstractmethod
    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        """Terms from what is known of the tokens and the clip's bounds, (N,) each."""

    def __call__(self, tokens: Tokens, bounds: Bounds) -> Terms:
        """`terms`; ValueError unless they are `Terms` of one value a token each."""
        found = self.terms(tokens, bounds)
        if not isinstance(found, Terms):
            raise ValueError(
                f"{type(self).__name__}.terms: expected Terms(terms, unrestricted, clipped), got "
                f"{type(found).__name__}"
            )
        for name, value in found._asdict().items():
            per_token(value, tokens, f"{type(self).__name__}.terms ({name})")
        return found


@dataclass(frozen=True)
class MinClip(SurrogateRule):
    """PPO's pessimistic min (arXiv 1707.06347): min(w A, clip(w) A)."""

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        ratio = tokens.ratio.detach()
        clipped = beyond(tokens, bounds)
        unrestricted = tokens.ratio * tokens.advantages
        # Branching on the sign rather than taking a min makes the zero gradient of a clipped term explicit.
        bound = ratio.clamp(bounds.low, bounds.high) * tokens.advantages
        return Terms(torch.where(clipped, bound, unrestricted), unrestricted, clipped)


def beyond(tokens: Tokens, bounds: Bounds) -> Tensor:
    """(N,) bool: A > 0 with a ratio above its bound, or A < 0 with one below: a step would lead further
    away."""
    ratio, advantages = tokens.ratio.detach(), tokens.advantages
    return ((advantages > 0) & (ratio > bounds.high)) | ((advantages < 0) & (ratio < bounds.low))


class Weight(SurrogateRule):
    """Base of sg(f) A log pi: write `factor`. Unrestricted: f = w, whose gradient is that of w A for token
    ratios."""

    @abstractmethod
    def factor(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        """(N,) f, without graph"""

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        ratio = tokens.ratio.detach()
        factor = self.factor(tokens, bounds).detach()
        # log pi up to a constant, so that a term's value is f A as in the other surrogates.
        score = 1 + tokens.log_ratio - tokens.log_ratio.detach()
        weighted = tokens.advantages * score
        return Terms(factor * weighted, ratio * weighted, factor != ratio)


@dataclass(frozen=True)
class ClippedWeight(Weight):
    """CISPO (arXiv 2506.13585): f = clip(w), on either side whatever the advantage's sign; every token keeps
    a gradient. Its authors bound w from above alone: Clip with epsilon_low = 1 does so, since ratios are
    positive."""

    def factor(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        return tokens.ratio.detach().clamp(bounds.low, bounds.high)


@dataclass(frozen=True)
class Mask(Weight):
    """MiniRL (arXiv 2512.01374): f = w, and 0 where PPO's min would clip. Other masks write `keep`."""

    def keep(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        """(N,) bool"""
        return ~beyond(tokens, bounds)

    def factor(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        kept = per_token(self.keep(tokens, bounds), tokens, f"{type(self).__name__}.keep")
        return torch.where(kept, tokens.ratio.detach(), 0.0)


@dataclass(frozen=True)
class Gate(SurrogateRule):
    """SAPO: f(w) A with f(w) = 1 + (4 / tau) (sigmoid(tau (w - 1)) - 1/2), tau by the advantage's sign.

    f(1) = f'(1) = 1, and f' = 4 sigmoid (1 - sigmoid) falls to 0 on both sides: nothing is cut off, far
    ratios fade. (The constant that makes f(1) = 1 is ours; it has no gradient.) The clip's bounds say what
    counts as out of range, and change no term."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        in_range(self, "tau_positive", 0.0, low_open=True)
        in_range(self, "tau_negative", 0.0, low_open=True)

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        positive = tokens.advantages > 0
        tau = torch.full_like(tokens.advantages, self.tau_negative).masked_fill(positive, self.tau_positive)
        sigmoid = (tau * (tokens.ratio - 1)).sigmoid()
        gate = 1 + 4 / tau * (sigmoid - 0.5)
        slope = (4 * sigmoid * (1 - sigmoid)).detach()
        return Terms(gate * tokens.advantages, tokens.ratio * tokens.advantages, slope < 0.5)
