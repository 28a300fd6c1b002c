"""The batch on which losses are compared, what our YAML files make of it, and how far two gradients are apart.

Two questions of eight trajectories, two turns each of one to seven tokens, an observation between them, reward 0 or 1 on the
last token. Log-ratios have a standard deviation of about 0.6, and some are as large as a token that was hardly ever sampled has
them. A gradient is that of the loss by the agent tokens' log-probs, (B, T) in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from stppo.objectives import GroupNormalised
from stppo.plugins import methods
from stppo.trajectories import Layout, Trajectories

GROUP = 8  # trajectories of a question, as the YAML files have it


@dataclass(frozen=True)
class Batch:
    """(B, T) each: the agent's tokens (bool), log-probs when sampled and now, rewards, a critic's values; (B,) questions."""

    mask: Tensor
    old: Tensor
    new: Tensor
    rewards: Tensor
    values: Tensor
    questions: Tensor

    @property
    def lengths(self) -> list[int]:
        """Tokens of each response, observations included."""
        return (self.mask.shape[1] - self.mask.flip(1).int().argmax(1)).tolist()


@cache
def fixed_batch() -> Batch:
    generator = torch.Generator().manual_seed(49)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, width = 2 * GROUP, 17
    mask, rewards = torch.zeros(rows, width, dtype=torch.bool), torch.zeros(rows, width, dtype=torch.float64)
    for i in range(rows):
        first, gap, second = whole(1, 7), whole(2, 4), whole(1, 6)
        mask[i, :first] = mask[i, first + gap : first + gap + second] = True
        rewards[i, first + gap + second - 1] = float(
            i in (0, 3, 5, 8, 9, 10, 12, 13, 15)
        )  # 3 of 8, and 6 of 8
    old = -normal(rows, width).abs() - 0.05
    log_ratio = 0.3 * normal(rows, 1) + 0.5 * normal(rows, width)
    agent = mask.nonzero()
    for place, value in zip(
        agent[:: len(agent) // 8], (3.2, 1.3, 1.8, 1.4, -1.5, 1.7, 1.2, 2.1), strict=False
    ):
        log_ratio[tuple(place)] = value
    old = torch.minimum(old, -log_ratio - 0.02)  # a probability now is at most 1
    values = 0.5 + 0.2 * normal(rows, width)
    return Batch(mask, old, old + log_ratio, rewards, values, torch.arange(rows) // GROUP)


def trajectories(batch: Batch) -> Trajectories:
    """The batch in our terms, with one column in front that stands for the prompt."""
    pad = torch.nn.functional.pad
    mask = pad(batch.mask, (1, 0))
    return Trajectories(
        tokens=torch.zeros(mask.shape, dtype=torch.int64),
        lengths=torch.full((len(mask),), mask.shape[1]),
        agent_mask=mask,
        behaviour_logprobs=pad(batch.old, (1, 0)) * mask,
        rewards=pad(batch.rewards, (1, 0)),
        group_ids=batch.questions,
        policy_updates=torch.zeros(len(mask), dtype=torch.int64),
    )


def ours(name: str, batch: Batch, advantages: Tensor | None = None, eps: float | None = None) -> Tensor:
    """The gradient of `configs/algorithm/NAME.yaml`: its credit, or the (B, T) advantages given; `eps` in place of the 1e-6
    that GRPO's credit adds to a standard deviation."""
    rule = methods.objective(name)
    if advantages is None:
        credit = rule.credit
        if eps is not None and isinstance(credit, GroupNormalised):
            credit = replace(credit, eps=eps)
        values = torch.nn.functional.pad(batch.values, (1, 0))
        advantages = credit(trajectories(batch), values).advantages[:, 1:]
    logprobs, layout = batch.new.clone().requires_grad_(), Layout.of(batch.mask)
    log_ratio, behaviour = layout.gather(logprobs - batch.old), layout.gather(batch.old)
    found = rule.evaluate(log_ratio, layout.gather(advantages), layout, behaviour_logprobs=behaviour)
    return torch.autograd.grad(found.loss, logprobs)[0]


def compared(got: Tensor, wanted: Tensor) -> dict[str, float]:
    """Cosine of two gradients, |got| / |wanted|, and |got - wanted| / |wanted|."""
    sizes = got.norm(), wanted.norm()
    return {
        "cosine": float((got * wanted).sum() / sizes[0] / sizes[1]) if sizes[0] > 0 else float("nan"),
        "norm_ratio": float(sizes[0] / sizes[1]),
        "distance": float((got - wanted).norm() / sizes[1]),
    }
