#!/usr/bin/env bash
# Guessed: Adam on bfloat16 weights is Adam with some rounding noise: its second moment follows the square of the gradients.
# So is: torch keeps the moments in the weights' type. There, a decay of one in a thousand is rounded away, and so are small additions:
# for gradients of 1 the second moment stops at .5, and after a single spike it stays where the spike put it. torch 2.13.0.
# Why it matters: without a spike steps are in the end 1.4 times too long, and after one all are too short for good, whatever the learning
# rate says. A run that spikes and one that does not are from then on trained at different rates.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys

import torch

SPIKE = 500


def second_moment(dtype, spike):
    """Before the update with the spike, and 4,500 updates with gradients of 1 after it."""
    weight = torch.zeros(100, dtype=dtype, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    seen = []
    for update in range(SPIKE + 4500):
        weight.grad = torch.full_like(weight, spike if update == SPIKE else 1.0)
        optimizer.step()
        if update in (SPIKE - 1, SPIKE + 4499):
            bias = 1 - 0.999 ** (update + 1)  # as Adam corrects it: 1 is right
            seen.append(float(optimizer.state[weight]["exp_avg_sq"][0]) / bias)
    return [round(value, 3) for value in seen]


print("torch", torch.__version__)
found = {(str(dtype), spike): second_moment(dtype, spike) for dtype in (torch.float32, torch.bfloat16) for spike in (1.0, 30.0)}
for (dtype, spike), (before, after) in found.items():
    print(f"{dtype}, largest gradient {spike:g}: second moment over the true one {before} after 500 updates, {after} at the end")
if abs(found["torch.float32", 30.0][1] - 1) > 0.02 or found["torch.bfloat16", 1.0][1] > 0.7 or found["torch.bfloat16", 30.0][1] < 1.2:
    sys.exit("CHANGED: the second moment follows the gradients in bfloat16")
PYTHON
