"""An objective: credit x ratio x clip x stabiliser x loss aggregation. An algorithm is one point of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stppo.checks import one_of
from stppo.objectives.advantages import CreditRule
from stppo.objectives.clipping import Clip
from stppo.objectives.diagnostics import diagnose
from stppo.objectives.ratios import Ratio
from stppo.objectives.stabilizers import Stabilizer
from stppo.trajectories import Layout, Trajectories

LOSS_AGGREGATIONS = ("trajectory_mean", "token_mean", "turn_mean")


@dataclass(eq=False)
class Surrogate:
    """What one minibatch's surrogate gives, in signs that are easy to get wrong:

    ppo_loss        -J, to minimise; loss = ppo_loss + the stabiliser's penalty
    bias_surrogate  its parameter gradient is C(theta), the clipping bias, with J's sign: the part of the
                    unclipped ascent direction that clipping removed, so
                    grad J = grad J_unclipped - C, and grad ppo_loss = -(grad J_unclipped - C)
    any_clipped     False: C is exactly 0 and its backward pass can be skipped
    diagnostics     plain floats, columns of the metrics row
    """

    loss: Tensor
    ppo_loss: Tensor
    bias_surrogate: Tensor
    any_clipped: bool
    diagnostics: dict[str, float]


@dataclass(frozen=True)
class Objective:
    """J = sum_t weight_t min(w_t A_t, clip(w_t) A_t) over agent tokens, weights by `loss_aggregation`.

    trajectory_mean  mean over trajectories of the mean over their agent tokens   (1/|y|, v1)
    token_mean       mean over all agent tokens of the batch
    turn_mean        mean over trajectories of the mean over their turns of the mean over the turn's tokens
                     (1/n over turns, v2's other reading)
    """

    credit: CreditRule
    ratio: Ratio
    clip: Clip
    stabilizer: Stabilizer
    loss_aggregation: str = "trajectory_mean"

    def __post_init__(self) -> None:
        one_of(self, "loss_aggregation", LOSS_AGGREGATIONS)
        if self.clip.clip_on == "turn" and self.ratio.granularity != "turn":
            raise ValueError(
                f"Clip.clip_on='turn' needs Ratio.granularity='turn', got {self.ratio.granularity!r}; "
                "use clip_on='token'"
            )

    def surrogate(
        self, logprobs: Tensor, batch: Trajectories, advantages: Tensor, weights: Tensor | None = None
    ) -> Surrogate:
        """Surrogate of a minibatch.

        logprobs (B, T): log pi_theta(token t | tokens before t) in nats, with graph; advantages (B, T) from
        `credit`; weights (B, T): constant factors of the terms, such as truncated importance weights against the
        engine that sampled. Only entries at agent tokens are read. Overflow and NaN are passed on, never masked.
        """
        layout = batch.layout
        behaviour = layout.gather(batch.behaviour_logprobs)
        log_ratio = layout.gather(logprobs) - behaviour
        factors = None if weights is None else layout.gather(weights)
        return self.evaluate(log_ratio, layout.gather(advantages), layout, factors)

    def evaluate(
        self, log_ratio: Tensor, advantages: Tensor, layout: Layout, factors: Tensor | None = None
    ) -> Surrogate:
        """The same from (N,) token log-ratios (with graph), advantages and weights, for callers with a mask alone."""
        advantages = advantages.detach().to(log_ratio.dtype)
        weights = _weights(layout, self.loss_aggregation, log_ratio.dtype)
        if factors is not None:
            weights = weights * factors.detach().to(log_ratio.dtype)
        ratio = self.ratio(log_ratio, layout)
        clipped = self.clip(ratio, advantages, layout)
        ppo_loss = -(weights * clipped.terms).sum()
        bias_surrogate = (weights * clipped.unclipped_terms)[clipped.clipped].sum()

        values = diagnose(
            log_ratio.detach(), ratio.detach(), advantages, weights, clipped, layout, self.ratio, self.clip
        )
        out_of_range = self.clip.out_of_range(log_ratio.detach().exp())
        penalty = self.stabilizer.penalty(log_ratio, out_of_range, layout)
        values["ctn_penalty"] = torch.zeros(()) if penalty is None else penalty.detach()
        # One host transfer for all of them: per-key .item() calls would cost more than the loss itself.
        host = torch.stack([value.to(torch.float64) for value in values.values()]).tolist()
        diagnostics = dict(zip(values, host, strict=True))
        return Surrogate(
            loss=ppo_loss if penalty is None else ppo_loss + penalty,
            ppo_loss=ppo_loss,
            bias_surrogate=bias_surrogate,
            any_clipped=diagnostics["clip_fraction"] > 0,
            diagnostics=diagnostics,
        )


def loss_weights(agent_mask: Tensor, loss_aggregation: str, dtype: torch.dtype | None = None) -> Tensor:
    """(B, T) weights (default: torch's default float), 0 off the mask and 1 in sum, so that
    ppo_loss = -sum(weights * terms)."""
    if loss_aggregation not in LOSS_AGGREGATIONS:
        allowed = ", ".join(LOSS_AGGREGATIONS)
        raise ValueError(f"loss_aggregation={loss_aggregation!r}: must be one of {allowed}")
    layout = Layout.of(agent_mask)
    return layout.scatter(_weights(layout, loss_aggregation, dtype or torch.get_default_dtype()))


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

    logprobs (B, T) is the tensor that `Objective.surrogate` got; squared_prob_sum (B, T) is sum_v p_v^2 of the
    distribution that token t was drawn from under pi_theta. The graph is kept for the real backward pass.
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
