"""Our losses for a host's own loss function: (log-probs, old log-probs, advantages, mask) -> (loss, metrics).

Every adapter in this folder but TRL's ends here. A host's loss sees log-probs alone, so ||C|| is the norm
over tokens' log-probs, as `stppo.plugins.verl` explains; its c0 is another than the exact norm's, and one
batch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stppo.checks import meant
from stppo.config.files import options
from stppo.objectives import ClippingBiasNorm, Objective, Surrogate
from stppo.plugins import methods
from stppo.trajectories import Layout

# Of a host's log -> of `stppo.objectives.diagnostics`.
METRICS = {
    "clip_fraction": "clip_fraction",  # share of agent tokens whose term is clipped
    "clip_fraction_turn": "turn_fully_clipped_fraction",  # share of turns clipped as a whole
    "out_of_range_fraction": "out_of_range_fraction",
    "out_of_range_fraction_token": "out_of_range_fraction_token",
    "ratio_mean_turn": "ratio_mean_turn",
    "ratio_mean_token": "ratio_mean_token",
    "kl_behaviour": "kl_behaviour_k1",
}


def objective_of(name: str, knobs: Mapping[str, Any] | None = None) -> Objective:
    """An algorithm's objective as its YAML has it, but for `knobs`, nested as there: {"clip": {"epsilon_low":
    0.1}}. A divisor reads the norm that a loss can have.

    ValueError for a name that is no algorithm, for a method that is more than a loss, and for knobs that it
    lacks."""
    if why := methods.more_than_a_loss(name):
        raise ValueError(f"{name}: not offered, since {why}")
    if name not in (known := [*options("algorithm"), *methods.PAPER]):
        raise ValueError(f"{name}: no algorithm{meant(name, known)}")
    found = methods.objective(name, knobs)
    if isinstance(found.stabilizer, ClippingBiasNorm):
        if found.stabilizer.estimator == "last_block":
            raise ValueError(f"{name}: not offered, since it needs the last block's gradient")
        found = replace(found, stabilizer=replace(found.stabilizer, estimator="logprob"))
    return found


class Evaluated(NamedTuple):
    """surrogate: not divided; norm: over tokens' log-probs, scaled; divisor: of the surrogate's
    `ppo_loss`."""

    surrogate: Surrogate
    norm: float
    divisor: float


def evaluate(
    objective: Objective,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    layout: Layout,
    weights: Tensor,
    scale: float = 1.0,
) -> Evaluated:
    """The surrogate of a micro-batch and what divides it.

    Tensors are (B, T), log-probs in nats, `logprobs` with graph; every row has agent tokens. weights (N,): of
    the terms, as the host aggregates them. scale: from this micro-batch's norm to the minibatch's."""
    # Half precision cannot sum a turn: in bfloat16, 256 + 1 is 256.
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    behaviour = layout.gather(old_logprobs.detach())
    log_ratio = layout.gather(logprobs) - behaviour
    if not log_ratio.requires_grad:  # the norm below looks at a gradient
        log_ratio = log_ratio.detach().requires_grad_()
    advantages = layout.gather(advantages.detach())
    found = objective.evaluate(log_ratio, advantages, layout, None, behaviour, weights=weights)
    (bias,) = torch.autograd.grad(found.bias_surrogate, log_ratio, retain_graph=True)
    norm = float(bias.norm()) * scale
    return Evaluated(found, norm, objective.stabilizer.divisor(norm))


def weights_of(aggregate: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The weight of each term, of the shape of `like`, in a host's own aggregation, which is linear in the
    terms."""
    with torch.enable_grad():
        terms = torch.zeros_like(like, requires_grad=True)
        return torch.autograd.grad(aggregate(terms), terms)[0]


def loss_and_metrics(
    objective: Objective,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics of (B, T) tensors; rows without agent tokens add nothing. weights (B, T): of the
    terms.

    ValueError for shapes that differ."""
    given = {"old_logprobs": old_logprobs, "advantages": advantages, "mask": mask, "weights": weights}
    for name, value in given.items():
        if value.shape != logprobs.shape or value.ndim != 2:
            raise ValueError(
                f"{name}: must be (B, T) as logprobs, {tuple(logprobs.shape)}, got {tuple(value.shape)}"
            )
    rows = mask.bool().any(1)
    if not rows.any():
        return 0.0 * logprobs.sum(), {}
    layout = Layout.of(mask.bool()[rows])
    parts = (value[rows] for value in (logprobs, old_logprobs, advantages))
    found, norm, divisor = evaluate(objective, *parts, layout, layout.gather(weights[rows]))
    loss = found.ppo_loss / divisor
    if found.penalty is not None:
        loss = loss + weights[rows].sum() * found.penalty  # a mean, on the scale of the other terms
    metrics = {name: found.diagnostics[source] for name, source in METRICS.items()}
    return loss, metrics | {"clipping_bias_norm_logprob": norm, "stabilizer_divisor": divisor}


def by_name(function: Callable[..., Any], module: str) -> Callable[[str], Any]:
    """A module's `__getattr__` that gives `function` for each algorithm, so that a host can import
    MODULE.st_ppo."""

    def get(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            objective_of(name)
        except ValueError as error:
            raise AttributeError(f"module {module!r}: {error}") from None
        return partial(function, name)

    return get
