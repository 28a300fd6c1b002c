#!/usr/bin/env bash
# Guessed: a learning rate that a training lowers by hand, optimizer.param_groups[0]["lr"] *= 0.1, stays lowered.
# So is: it depends on the scheduler. StepLR, ExponentialLR, LinearLR and CosineAnnealingLR go on from the rate that they find; LambdaLR,
# OneCycleLR and CosineAnnealingWarmRestarts write what they had planned at their next step. All schedulers of transformers, whatever
# they are called, are a LambdaLR: its "cosine" takes the rate back, torch's keeps it. torch 2.13.0, transformers 5.10.4.
# Why it matters: a rate that follows the measured KL, or is cut after a spike, is cut for one update. The run looks as if it did not help.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet transformers==5.10.4 torch==2.13.0
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys

import torch
import transformers
from torch.optim import lr_scheduler
from transformers import get_scheduler

STEPS = 100
SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, STEPS),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, STEPS),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, STEPS),
    **{
        f"transformers {name}": lambda optimizer, name=name: get_scheduler(name, optimizer, 0, STEPS)
        for name in ("linear", "cosine", "constant_with_warmup")
    },
}


def rates(make, cut_at):
    """The rate of each of ten steps, where it is divided by ten before step `cut_at`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for step in range(10):
        if step == cut_at:
            optimizer.param_groups[0]["lr"] *= 0.1
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


print("torch", torch.__version__, "transformers", transformers.__version__)
taken_back = []
for name, make in SCHEDULERS.items():
    planned, cut = rates(make, None), rates(make, 5)
    taken_back.append(abs(cut[6] / planned[6] - 1) < 1e-6)
    print(f"{name:34} of the planned rate: {cut[5] / planned[5]:.2f} at once, {cut[6] / planned[6]:.2f} one step later")
if taken_back != [False] * 3 + [True] * 6:
    sys.exit("CHANGED: other schedulers keep a rate that was set by hand")
PYTHON
