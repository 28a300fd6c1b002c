"""An objective: credit x ratio x clip x surrogate x stabiliser x loss aggregation. An algorithm is one point
of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stppo.checks import one_of
from stppo.objectives.advantages import CreditRule
from stppo.objectives.clipping import Bounds, ClipRule
from stppo.objectives.diagnostics import diagnose
from stppo.objectives.ratios import RatioRule
from stppo.objectives.stabilizers import Stabilizer
from stppo.objectives.surrogates import MinClip, SurrogateRule, Terms
from stppo.objectives.tokens import Tokens, per_token
from stppo.trajectories import SEGMENTS, Layout, Trajectories

LOSS_AGGREGATIONS = ("trajectory_mean", "token_mean", "turn_mean")


@dataclass(eq=False)
class Surrogate:
    """What one minibatch's surrogate gives, in signs that are easy to get wrong:

    ppo_loss        -J, to minimise; loss = ppo_loss + the stabiliser's penalty
    bias_surrogate  its parameter gradient is C(theta), the clipping bias, with J's sign: the part of the
                    unrestricted ascent direction that clipping (masking, gating) removed, so
                    grad J = grad J_unrestricted - C, and grad ppo_loss = -(grad J_unrestricted - C)
    any_clipped     False: no term is restricted, C is exactly 0 and its backward pass can be skipped
    diagnostics     plain floats, columns of the metrics row
    """

    loss: Tensor
    ppo_loss: Tensor
    bias_surrogate: Tensor
    any_clipped: bool
    diagnostics: dict[str, float]
    penalty: Tensor | None = None  # the stabiliser's, None where it has none


@dataclass(frozen=True)
class Objective:
    """J = sum_t weight_t term_t over agent tokens, weights by `loss_aggregation`; with the default surrogate
    term_t = min(w_t A_t, clip(w_t) A_t).

    trajectory_mean  mean over trajectories of the mean over their agent tokens   (1/|y|, v1)
    token_mean       mean over all agent tokens of the batch
    turn_mean        mean over trajectories of the mean over their turns of the mean over the turn's tokens
                     (1/n over turns, v2's other reading)
    """

    credit: CreditRule
    ratio: RatioRule
    clip: ClipRule
    stabilizer: Stabilizer
    loss_aggregation: str = "trajectory_mean"
    surrogate: SurrogateRule = MinClip()

    def __post_init__(self) -> None:
        one_of(self, "loss_aggregation", LOSS_AGGREGATIONS)
        one_of(self.ratio, "granularity", SEGMENTS)
        if self.clip.clip_on == "turn" and self.ratio.granularity != "turn":
            raise ValueError(
                f"Clip.clip_on='turn' needs Ratio.granularity='turn', got {self.ratio.granularity!r}; "
                "use clip_on='token'"
            )

    def __call__(
        self,
        logprobs: Tensor,
        batch: Trajectories,
        advantages: Tensor,
        weights: Tensor | None = None,
        entropy: Tensor | None = None,
        proximal: Tensor | None = None,
    ) -> Surrogate:
        """Surrogate of a minibatch.

        logprobs (B, T): log pi_theta(token t | tokens before t) in nats, with graph; advantages (B, T) from
        `credit`; weights (B, T): constant factors of the terms, such as truncated importance weights against
        the engine that sampled; entropy (B, T) of the distribution that token t is drawn from under pi_theta,
        for rules that read it; proximal (B, T): log-probs under the proximal policy, likewise. Only entries
        at agent tokens are read. Overflow and NaN are passed on, never
        masked. What comes in half precision is computed in float32: a turn of 1,000 tokens in bfloat16 would
        lose its ratio."""
        layout = batch.layout
        behaviour = _single(layout.gather(batch.behaviour_logprobs))
        log_ratio = _single(layout.gather(logprobs)) - behaviour
        weights, entropy = (None if x is None else layout.gather(x.detach()) for x in (weights, entropy))
        if proximal is not None:
            proximal = _single(layout.gather(proximal.detach())) - behaviour
        known = {"behaviour_logprobs": behaviour, "entropy": entropy, "proximal": proximal}
        return self.evaluate(log_ratio, layout.gather(advantages), layout, weights, **known)

    def loss(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        agent_mask: Tensor,
        entropy: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
    ) -> Surrogate:
        """Surrogate of a minibatch, for a loop of your own: minimise `Surrogate.loss`, or hand it to
        `backward`.

        All are (B, T): log-probs in nats of the tokens under the policy (with graph) and under the one that
        sampled them; advantages; agent_mask bool, true where the policy emitted the token. Turns are its runs
        of ones. entropy, and proximal_logprobs as proximal: as in `__call__`. ValueError for shapes that
        differ, for a row without agent tokens, for old log-probs or advantages that are not finite there, and
        where both log-probs are swapped.

        It is the loss alone. Advantages are yours, and so is what else a method does: which trajectories it
        keeps (LOOP, StarPO-S), when it ends the updates on a batch (the KL stop), one update a turn
        (SeeUPO)."""
        if logprobs.ndim != 2:
            raise ValueError(f"logprobs: must be (B, T), got {tuple(logprobs.shape)}")
        given = {"old_logprobs": old_logprobs, "advantages": advantages, "agent_mask": agent_mask}
        for name, value in given.items():
            if value.shape != logprobs.shape:
                raise ValueError(
                    f"{name}: must have the shape of logprobs, {tuple(logprobs.shape)}, got "
                    f"{tuple(value.shape)}"
                )
        mask = agent_mask.bool()
        if not mask.any(1).all():
            row = int((~mask.any(1)).nonzero()[0])
            raise ValueError(f"agent_mask: row {row} has no agent token; leave it out of the batch")
        for name, value in (("old_logprobs", old_logprobs), ("advantages", advantages)):
            if not value[mask].isfinite().all():
                raise ValueError(f"{name}: must be finite at every agent token")
        if old_logprobs.requires_grad and not logprobs.requires_grad and torch.is_grad_enabled():
            raise ValueError("logprobs: has no graph, and old_logprobs has one; they seem to be swapped")
        old_logprobs, advantages = old_logprobs.detach(), advantages.detach()
        layout = Layout.of(mask)
        behaviour = _single(layout.gather(old_logprobs))
        log_ratio = _single(layout.gather(logprobs)) - behaviour
        entropy = None if entropy is None else layout.gather(entropy.detach())
        proximal = proximal_logprobs
        if proximal is not None:
            proximal = _single(layout.gather(proximal.detach())) - behaviour
        known = {"behaviour_logprobs": behaviour, "entropy": entropy, "proximal": proximal}
        return self.evaluate(log_ratio, layout.gather(advantages), layout, **known)

    def evaluate(
        self,
        log_ratio: Tensor,
        advantages: Tensor,
        layout: Layout,
        factors: Tensor | None = None,
        behaviour_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        weights: Tensor | None = None,
        proximal: Tensor | None = None,
    ) -> Surrogate:
        """The same from (N,) token log-ratios (with graph), advantages and factors of the terms, for callers
        with a mask alone. weights (N,): of the terms, in place of those of `loss_aggregation`, where a host
        aggregates in its own way. proximal (N,): as in `Tokens`."""
        log_ratio = _single(log_ratio)
        if not log_ratio.requires_grad:  # the diagnostics look at a gradient
            log_ratio = log_ratio.detach().requires_grad_()
        if weights is None:
            weights = _weights(layout, self.loss_aggregation, log_ratio.dtype)
        if factors is not None:
            weights = weights * factors.detach().to(log_ratio.dtype)
        with torch.enable_grad():
            tokens = self.tokens(log_ratio, advantages, layout, behaviour_logprobs, entropy, proximal)
            terms, bounds = self.terms(tokens)
            scale = self.stabilizer.weights(tokens, terms)
            if scale is not None:
                scale = per_token(scale.detach(), tokens, f"{type(self.stabilizer).__name__}.weights")
                weights = weights * scale
            ppo_loss = -(weights * terms.terms).sum()
            bias_surrogate = (weights * (terms.unrestricted - terms.terms)).sum()
            penalty = self.stabilizer.penalty(tokens, bounds)
            (gradient,) = torch.autograd.grad(ppo_loss, log_ratio, retain_graph=True)

        given = replace(tokens, advantages=advantages.detach().to(log_ratio.dtype))
        values = diagnose(given, bounds, terms, gradient)
        values["ctn_penalty"] = torch.zeros(()) if penalty is None else penalty.detach()
        if scale is not None:
            values["sample_divisor"] = (1 / scale).mean()
        values["any_clipped"] = (terms.terms != terms.unrestricted).any()
        # One host transfer for all of them: per-key .item() calls would cost more than the loss itself.
        host = torch.stack([value.to(torch.float64) for value in values.values()]).tolist()
        diagnostics = dict(zip(values, host, strict=True))
        any_clipped = bool(diagnostics.pop("any_clipped"))
        return Surrogate(
            loss=ppo_loss if penalty is None else ppo_loss + penalty,
            ppo_loss=ppo_loss,
            bias_surrogate=bias_surrogate,
            any_clipped=any_clipped,
            diagnostics=diagnostics,
            penalty=penalty,
        )

    def tokens(
        self,
        log_ratio: Tensor,
        advantages: Tensor,
        layout: Layout,
        behaviour_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        proximal: Tensor | None = None,
    ) -> Tokens:
        """What the clip, the surrogate and the stabiliser see of (N,) log-ratios and advantages."""
        advantages = advantages.detach().to(log_ratio.dtype)
        if self.clip.clip_on == "turn":
            advantages = layout.turn_mean(advantages)[layout.turns]
        ratio = self.ratio(log_ratio, layout)
        return Tokens(log_ratio, ratio, advantages, layout, behaviour_logprobs, entropy, proximal)

    def terms(self, tokens: Tokens) -> tuple[Terms, Bounds]:
        """The surrogate's terms and the (N,) bounds of the clip that they were made with."""
        bounds = self.clip(tokens)
        return self.surrogate(tokens, bounds), bounds


def loss_weights(agent_mask: Tensor, loss_aggregation: str, dtype: torch.dtype | None = None) -> Tensor:
    """(B, T) weights (default: torch's default float), 0 off the mask and 1 in sum, so that
    ppo_loss = -sum(weights * terms)."""
    if loss_aggregation not in LOSS_AGGREGATIONS:
        allowed = ", ".join(LOSS_AGGREGATIONS)
        raise ValueError(f"loss_aggregation={loss_aggregation!r}: must be one of {allowed}")
    layout = Layout.of(agent_mask)
    return layout.scatter(_weights(layout, loss_aggregation, dtype or torch.get_default_dtype()))


def _single(x: Tensor) -> Tensor:
    """float32 of what is in half precision, all else as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _weights(layout: Layout, loss_aggregation: str, dtype: torch.dtype) -> Tensor:
    if loss_aggregation == "token_mean":
        count = torch.full_like(layout.rows, len(layout.rows))
    elif loss_aggregation == "trajectory_mean":
        count = layout.shape[0] * layout.row_lengths[layout.rows]
    else:
        count = layout.shape[0] * layout.row_turns[layout.rows] * layout.turn_lengths[layout.turns]
    return count.to(dtype).reciprocal()


def estimated_bias_norms(
    surrogate: Surrogate, logprobs: Tensor, squared_prob_sum: Tensor | None = None
) -> dict[str, float]:
    """Two stand-ins for ||C||_2 that need no backward pass through the policy.

    With c_t = d bias_surrogate / d log pi(token t):

        clipping_bias_norm_logprob  sqrt(sum_t c_t^2)
        clipping_bias_norm_logit    sqrt(sum_t c_t^2 (1 - 2 p_t + sum_v p_v^2)), the norm of C with respect to
                                    the logits, if every position had its own; NaN without `squared_prob_sum`

    logprobs (B, T) is the tensor that `Objective.__call__` (or `loss`) got; squared_prob_sum (B, T) is
    sum_v p_v^2 of the distribution that token t was drawn from under pi_theta. The graph is kept for the real
    backward pass.
    """
    if not surrogate.any_clipped:
        return {
            "clipping_bias_norm_logprob": 0.0,
            "clipping_bias_norm_logit": math.nan if squared_prob_sum is None else 0.0,
        }
    (gradient,) = torch.autograd.grad(surrogate.bias_surrogate, logprobs, retain_graph=True)
    on = gradient != 0  # NaN != 0 holds, so a non-finite gradient stays visible
    squared = gradient[on].square()
    logit = math.nan
    if squared_prob_sum is not None:
        p = logprobs.detach()[on].exp()
        # 1 - 2p + sum p^2, written as squares of what is left so that rounding near p = 1 cannot go negative.
        factor = (1 - p).square() + (squared_prob_sum[on] - p.square()).clamp_min(0)
        logit = (squared * factor).sum().sqrt().item()
    return {"clipping_bias_norm_logprob": squared.sum().sqrt().item(), "clipping_bias_norm_logit": logit}
