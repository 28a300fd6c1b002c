"""What an update's metrics row says about ratios, clipping and advantages; the keys are columns of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stppo.objectives.clipping import Bounds
from stppo.objectives.ratios import kl_behaviour_to_policy, kl_policy_to_behaviour
from stppo.objectives.surrogates import Terms
from stppo.objectives.tokens import Tokens


@torch.no_grad()
def diagnose(tokens: Tokens, bounds: Bounds, terms: Terms, gradient: Tensor) -> dict[str, Tensor]:
    """Scalar tensors; gradient (N,): d loss / d log pi(token t), penalty not counted.

    Fractions are shares of agent tokens (`turn_fully_clipped_fraction`: of turns), the bounds means over
    them. Ratio statistics are over agent tokens, over turns (one geometric-mean ratio each) and over
    trajectories (likewise); p99 is the nearest rank. `effective_sample_size` is that of the full trajectory
    ratios exp(sum l), as a share of B. `negative_advantage_gradient_share`: of sum_t |gradient_t|, the part
    on tokens with negative advantage."""
    log_ratio, ratio, advantages, layout = tokens.log_ratio, tokens.ratio, tokens.advantages, tokens.layout
    token_ratio = log_ratio.exp()
    out = {
        "clip_low": bounds.low.mean(),
        "clip_high": bounds.high.mean(),
        "clip_fraction": _share(terms.clipped),
        "clip_fraction_high": _share(terms.clipped & (ratio > 1)),
        "clip_fraction_low": _share(terms.clipped & (ratio < 1)),
        "out_of_range_fraction": _share(bounds.out_of_range(ratio)),
        "out_of_range_fraction_token": _share(bounds.out_of_range(token_ratio)),
    }
    clipped_share = layout.turn_mean(terms.clipped.to(log_ratio.dtype))
    out["turn_fully_clipped_fraction"] = _share(clipped_share == 1)

    row_sum = layout.row_sum(log_ratio)
    levels = {
        "token": token_ratio,
        "turn": layout.turn_mean(log_ratio).exp(),
        "sequence": (row_sum / layout.row_lengths).exp(),
    }
    for level, values in levels.items():
        low, high = values.aminmax()
        out[f"ratio_mean_{level}"] = values.mean()
        out[f"ratio_max_{level}"] = high
        out[f"ratio_p99_{level}"] = values.kthvalue(math.ceil(0.99 * len(values))).values
        out[f"ratio_min_{level}"] = low
    out["effective_sample_size"] = 1.0 / (len(row_sum) * row_sum.softmax(0).square().sum())

    out["kl_behaviour_k1"] = -log_ratio.mean()
    out["kl_behaviour_k3"] = kl_behaviour_to_policy(log_ratio).mean()
    out["kl_policy_to_behaviour"] = kl_policy_to_behaviour(log_ratio).mean()

    mass = gradient.abs()
    negative = mass.where(advantages < 0, torch.zeros_like(mass)).sum()
    # 0 where nothing has a gradient at all (every term clipped, or every advantage 0).
    out["negative_advantage_gradient_share"] = negative / mass.sum().clamp_min(torch.finfo(mass.dtype).tiny)

    out["advantage_mean"] = advantages.mean()
    out["advantage_std"] = advantages.std(correction=min(1, len(advantages) - 1))
    out["advantage_max"] = advantages.abs().max()
    return out


def _share(flags: Tensor) -> Tensor:
    return flags.to(torch.float64).mean()
