"""Random batches of several turns for both plug-ins, and a method's YAML evaluated by our own objective on them."""

import torch

from stppo.config import files as config_files
from stppo.config.loading import build
from stppo.objectives import loss_weights
from stppo.trajectories import Layout


def yaml_objective(name, **changes):
    """Built from the file itself; changes are section={key: value}, or the loss aggregation."""
    section = config_files.read(config_files.config_dir() / "algorithm" / f"{name}.yaml")["objective"]
    for part, change in changes.items():
        section = section | {part: section[part] | change if isinstance(change, dict) else change}
    return build(section, "objective")


def random_case(seed, spread=0.6, n_rows=6, per_row=False):
    """(mask, old, new, advantages), (B, T) in float64: one to four turns of one to five tokens a row with two to four
    tokens of observation between them, log-ratios of standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    width = 4 * 5 + 3 * 4 + 2
    mask = torch.zeros(n_rows, width, dtype=torch.bool)
    for row in mask:
        at = 0
        for _ in range(whole(1, 4)):
            turn = whole(1, 5)
            row[at : at + turn] = True
            at += turn + whole(2, 4)
    old = -normal(n_rows, width).abs()
    advantages = normal(n_rows, 1).expand(n_rows, width).clone() if per_row else normal(n_rows, width)
    return mask, old, old + spread * normal(n_rows, width), advantages


def evaluated(objective, mask, old, new, advantages):
    """(loss, (B, T) gradient by the log-probs) of `Objective.evaluate`."""
    layout = Layout.of(mask)
    logprobs = new.clone().requires_grad_()
    found = objective.evaluate(
        layout.gather(logprobs - old),
        layout.gather(advantages),
        layout,
        behaviour_logprobs=layout.gather(old),
    )
    return found.loss.detach(), torch.autograd.grad(found.loss, logprobs)[0]


def plain_gradient(objective, mask, advantages):
    """(B, T) gradient of -sum(weight A log pi)."""
    return -loss_weights(mask, objective.loss_aggregation, torch.float64) * advantages
