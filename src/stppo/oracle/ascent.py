"""Exact ascent: what an objective does to the policy when nothing is left to sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from stppo.objectives import Objective
from stppo.oracle.estimators import check_has_limit, expected_surrogate
from stppo.oracle.exact import Oracle
from stppo.oracle.mdp import Tree
from stppo.oracle.policies import Policy

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


def ascend(
    tree: Tree,
    policy: Policy,
    theta: Tensor,
    objective: Objective,
    credit: Callable[[Oracle], Tensor],
    *,
    iterations: int,
    updates: int,
    learning_rate: float,
    optimizer: str = "sgd",
    max_grad_norm: float | None = None,
    clip_norm_first: bool = True,
    rollout_size: int | None = None,
    minibatch_size: int | None = None,
    generator: torch.Generator | None = None,
) -> list[dict[str, Any]]:
    """Off-policy training from theta (P,), with expectations in place of batches unless `rollout_size` is
    given.

    Each iteration freezes the behaviour policy, takes advantages `credit(oracle)` (M,) and makes `updates`
    steps on the clipped surrogate; `max_grad_norm` clips the gradient's norm before the stabiliser's divisor,
    or after it with clip_norm_first=False. With `rollout_size`, each iteration draws that many trajectories
    with `generator` and its updates go through them in minibatches of `minibatch_size` (default: all),
    shuffled anew in each pass; advantages stay those of `credit`. Returns one row per update, all measured
    before its step unless said:

    iteration, update, expected_return (J), gradient_norm, clipping_bias_norm, divisor, clip_fraction,
    step_norm (of the step made), cosine (of that step and the true policy gradient), theta (P,) after the
    step

    ValueError for an unknown optimizer, minibatches that do not divide the roll-out, or as soon as theta
    stops being finite."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r}: must be one of {', '.join(OPTIMIZERS)}")
    check_has_limit(objective)
    if minibatch_size is not None and rollout_size is None:
        raise ValueError(
            f"minibatch_size={minibatch_size}: needs rollout_size; without it there are no samples"
        )
    if rollout_size is not None and rollout_size % (minibatch_size or rollout_size):
        raise ValueError(f"minibatch_size={minibatch_size}: must divide rollout_size={rollout_size}")
    theta = theta.detach().clone().requires_grad_()
    steps = OPTIMIZERS[optimizer]([theta], lr=learning_rate)
    rows: list[dict[str, Any]] = []
    for iteration in range(iterations):
        oracle = Oracle(tree, policy, theta)
        advantages = credit(oracle)
        batches = _batches(oracle, rollout_size, minibatch_size, generator)
        for _ in range(updates):
            expected = expected_surrogate(oracle, objective, theta, advantages, next(batches))
            bias = torch.autograd.grad(expected.bias, theta, retain_graph=True)[0]
            gradient = torch.autograd.grad(expected.surrogate - expected.penalty, theta)[0]
            divisor = objective.stabilizer.divisor(float(bias.norm()))
            norm = float(gradient.norm())
            if max_grad_norm is not None and clip_norm_first:
                gradient = gradient * min(1.0, max_grad_norm / max(norm, 1e-300))
            gradient = gradient / divisor
            if max_grad_norm is not None and not clip_norm_first:
                gradient = gradient * min(1.0, max_grad_norm / max(float(gradient.norm()), 1e-300))
            before = theta.detach().clone().requires_grad_()
            expected_return = oracle.expected_return(before)
            (true_gradient,) = torch.autograd.grad(expected_return, before)
            theta.grad = -gradient  # the optimizers minimise
            steps.step()
            step = theta.detach() - before.detach()
            rows.append(
                {
                    "iteration": iteration,
                    "update": len(rows),
                    "expected_return": float(expected_return.detach()),
                    "gradient_norm": norm,
                    "clipping_bias_norm": float(bias.norm()),
                    "divisor": divisor,
                    "clip_fraction": expected.clip_fraction,
                    "step_norm": float(step.norm()),
                    "cosine": float(cosine_similarity(step, true_gradient, dim=0)),
                    "theta": theta.detach().clone(),
                }
            )
    return rows


def _batches(
    oracle: Oracle, rollout_size: int | None, minibatch_size: int | None, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Probabilities (N,) of the trajectories for one update after another, without end."""
    if rollout_size is None:
        while True:
            yield oracle.probabilities
    rows = oracle.sample(rollout_size, generator)
    while True:
        shuffled = rows[torch.randperm(rollout_size, generator=generator)]
        for batch in shuffled.split(minibatch_size or rollout_size):
            yield batch.bincount(minlength=len(oracle.tree)).double() / len(batch)
