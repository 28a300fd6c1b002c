"""Our losses in SkyRL's registry (skyrl 0.4): in the script that starts its trainer, before it does,

    from stppo.plugins import skyrl

    skyrl.register("st_ppo", knobs={"stabilizer": {"c0": 1.6e-4}})

and `trainer.algorithm.policy_loss_type=stppo_st_ppo` on its command line. SkyRL lays its `loss_reduction`
into the advantages and sums what a loss returns, so the average is its own: `sequence_mean` for the mean of
our YAML files. Its `off_policy_correction` is not read. A rule that reads a whole batch, and the divisor, see
one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stppo.objectives import Stabilizer
from stppo.plugins.losses import loss_and_metrics, objective_of

_THRESHOLDS = ("outlier_token_is_threshold", "token_mask_is_threshold")
_CORRECTIONS = (
    "tis_ratio_type",
    "sequence_mask_metric",
    *(f"{t}_{e}" for t in _THRESHOLDS for e in ("low", "high")),
)


def register(name: str, knobs: Mapping[str, Any] | None = None) -> str:
    """Add an algorithm to SkyRL's policy losses; returns its name there.

    knobs: constants in place of the YAML's, nested as there. ValueError for an unknown algorithm or knob, and
    for a method with a penalty."""
    if type(objective_of(name, knobs).stabilizer).penalty is not Stabilizer.penalty:
        raise ValueError(f"{name}: not offered, since SkyRL tells a loss no weight for its penalty")
    from skyrl.backends.skyrl_train.utils.ppo_utils import register_policy_loss

    register_policy_loss(f"stppo_{name}")(partial(loss, name, knobs))
    return f"stppo_{name}"


def loss(
    name: str,
    knobs: Mapping[str, Any] | None,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics as SkyRL's registry wants them; tensors (B, T), loss_mask 0/1 (None: all are the
    agent's).

    ValueError where `off_policy_correction` is on, which SkyRL leaves to each loss and ours do not apply."""
    correction = getattr(config, "off_policy_correction", None)
    for option in _CORRECTIONS:
        if getattr(correction, option, None) is not None:
            raise ValueError(
                f"{name}: off_policy_correction.{option} is not applied by this loss; set it to null"
            )
    mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
    weights = mask.to(log_probs.dtype)
    return loss_and_metrics(objective_of(name, knobs), log_probs, old_log_probs, advantages, mask, weights)
