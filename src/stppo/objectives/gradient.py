"""From a surrogate to the gradient of an optimiser step, in a loop of one's own: clip, divide, report."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from stppo.objectives.objective import Objective, Surrogate


def backward(
    objective: Objective,
    surrogate: Surrogate,
    parameters: Iterable[Tensor],
    max_grad_norm: float | None = None,
) -> dict[str, float]:
    """Put the gradient of `surrogate.loss` into `parameters`, clipped, then divided as the objective's
    stabiliser says (v1 Eq. 7 and 8): step the optimiser afterwards.

    ||C|| is exact: it takes a second backward pass, left out where nothing was clipped. max_grad_norm: None
    does not clip. Returns gradient_norm (before the clip), clipping_bias_norm (0 where no stabiliser reads
    it) and stabilizer_divisor. ValueError for stabilisers that read another number than ||C|| or divide the
    step: those are the trainer's.
    """
    stabilizer, parameters = objective.stabilizer, [p for p in parameters if p.requires_grad]
    plain = stabilizer.divides == "gradient" and not stabilizer.over_median
    if stabilizer.estimator not in (None, "exact") or (stabilizer.estimator and not plain):
        raise ValueError(
            f"{type(stabilizer).__name__} reads {stabilizer.estimator!r} and divides the {stabilizer.divides}"
            f"{', over its median' * stabilizer.over_median}: use estimator='exact', divides='gradient' and "
            "over_median=False, or stppo's own trainer"
        )
    bias = 0.0
    if stabilizer.estimator and surrogate.any_clipped:
        removed = torch.autograd.grad(
            surrogate.bias_surrogate, parameters, retain_graph=True, materialize_grads=True
        )
        bias = math.sqrt(sum(float(part.double().square().sum()) for part in removed))
    surrogate.loss.backward()
    limit = math.inf if max_grad_norm is None else max_grad_norm
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
    divisor = stabilizer.divisor(bias) if stabilizer.estimator else 1.0
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(divisor)
    return {"gradient_norm": norm, "clipping_bias_norm": bias, "stabilizer_divisor": divisor}
