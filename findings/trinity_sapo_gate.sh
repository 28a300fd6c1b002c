#!/usr/bin/env bash
# Guessed: SAPO in Trinity-RFT is SAPO: a token with ratio 1 pulls once, and one that is far from 1 hardly pulls any more.
# So is: the gate, a sigmoid of the ratio, is detached and weighs log pi. A token with ratio 1 pulls twice as hard, and the pull grows with the ratio
# up to 4. The paper's gate is differentiated itself: its slope is what fades. trinity-rft 0.6.0.
# Why it matters: SAPO is chosen for its soft trust region. Here there is none: tokens that have moved far up are pushed hardest.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy safetensors ray==2.52.1 omegaconf==2.3.0 transformers==5.24.0
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps trinity-rft==0.6.0 # of its requirements these parts need the ones above
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from trinity.algorithm import POLICY_LOSS_FN

RATIOS = [0.25, 0.5, 1.0, 2.0, 4.0, 16.0]
old = torch.full((1, len(RATIOS)), -3.0, dtype=torch.float64)
Loss = POLICY_LOSS_FN.get("sapo")
loss = Loss(**Loss.default_args())


def pull(of, advantage):
    """The gradient by each token's log pi, over its advantage. of: a loss of log pi, a mean over tokens."""
    new = (old + torch.tensor(RATIOS, dtype=torch.float64).log()).requires_grad_()
    (gradient,) = torch.autograd.grad(of(new, torch.full_like(old, advantage)), new)
    return [round(float(g), 2) for g in -gradient[0] * len(RATIOS) / advantage]


def trinity(new, advantages):
    return loss(logprob=new, old_logprob=old, action_mask=torch.ones_like(old), advantages=advantages)[0]


def paper(new, advantages):
    tau = torch.where(advantages > 0, 1.0, 1.05)
    return -(4 / tau * torch.sigmoid(tau * ((new - old).exp() - 1)) * advantages).mean()


print("trinity-rft", version("trinity-rft"), "- ratios", RATIOS)
found = {name: pull(of, 1.0) for name, of in (("Trinity-RFT", trinity), ("the paper's formula", paper))}
for name, of in found.items():
    print(f"{name:20} {of}")
here, there = found.values()
if not (here == sorted(here) and abs(here[2] - 2) < 0.01 and abs(there[2] - 1) < 0.01 and there[-1] < 0.01):
    sys.exit("CHANGED: how SAPO weighs a token")
PYTHON
