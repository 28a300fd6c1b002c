#!/usr/bin/env bash
# Guessed: after optimizer.step() the next forward pass uses the new weights, also where one torch.autocast context stands around the
# whole epoch of minibatches.
# So is: a context keeps the half-precision copies of weights that it made first, to its end. Every later minibatch is computed with the
# weights of the first (norms and embeddings apart), while the true ones move on. An outer context with enabled=False does the same to
# those within it. torch 2.13.0.
# Why it matters: importance ratios stay near 1 and nothing is clipped, however far the policy has gone; each further gradient is
# that of another policy. The context belongs around the forward pass alone.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from contextlib import nullcontext

import torch
from torch import nn


def ratios(around_all):
    """Mean ratio of the drawn actions' probabilities to those before any update: as each of four updates sees it, and in truth."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    states, actions = torch.randn(256, 16), torch.randint(8, (256, 1))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)

    def logprobs():
        return policy(states).float().log_softmax(-1).gather(-1, actions)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        old = logprobs()
    seen = []
    with torch.autocast("cpu", torch.bfloat16) if around_all else nullcontext():
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                ratio = (logprobs() - old).exp()
            seen.append(round(float(ratio.detach().mean()), 3))
            optimizer.zero_grad()
            (-ratio.mean()).backward()
            optimizer.step()
    with torch.no_grad():
        return seen, round(float((logprobs() - old).exp().mean()), 3)


print("torch", torch.__version__)
one, each = ratios(around_all=True), ratios(around_all=False)
print(f"one context around all updates: seen {one[0]}, in truth {one[1]} afterwards")
print(f"a context for each forward pass: seen {each[0]}, in truth {each[1]} afterwards")
if abs(one[0][-1] - 1) > 0.01 or one[1] < 1.02 or each[0][-1] < 1.02:
    sys.exit("CHANGED: new weights are seen within one context")
PYTHON
