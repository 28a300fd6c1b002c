"""Our losses in prime-rl, which imports a loss by its path:

    [trainer.loss]
    type = "custom"
    import_path = "stppo.plugins.prime_rl.turn_ppo"  # or another name of configs/algorithm
    kwargs = { knobs = { clip = { epsilon_low = 0.1 } } }

prime-rl hands over one trajectory at a time and divides the sum of all losses by the number of trained
tokens, so the mean is over tokens whatever the YAML says. What reads a whole batch (the divisor, BAPO, M2PO)
is refused. Signature and aggregation: prime-rl's docs/algorithms.md of 2026."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stppo.objectives import ClippingBiasNorm
from stppo.plugins.losses import by_name, loss_and_metrics, objective_of


def loss(name: str, inputs: Any, knobs: Mapping[str, Any] | None = None) -> Any:
    """prime-rl's LossOutputs of one trajectory: the sum of its terms.

    inputs: LossInputs, tensors (T,): trainer_logprobs, inference_logprobs (nats), advantages, loss_mask.
    ValueError for rules that read a whole batch."""
    objective = objective_of(name, knobs)
    parts = objective.ratio, objective.clip, objective.surrogate
    if isinstance(objective.stabilizer, ClippingBiasNorm) or any(
        getattr(p, "sees_batch", False) for p in parts
    ):
        raise ValueError(
            f"{name}: it reads a whole batch, and prime-rl hands over one trajectory at a time; use turn_ppo"
        )
    given = (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask)
    logprobs, old, advantages, mask = (value[None] for value in given)
    found, metrics = loss_and_metrics(objective, logprobs, old, advantages, mask, mask.to(logprobs.dtype))
    from prime_rl.trainer.rl.loss import LossOutputs

    return LossOutputs(loss=found, metrics={key: torch.tensor(value) for key, value in metrics.items()})


__getattr__ = by_name(loss, __name__)
