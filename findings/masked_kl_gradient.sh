#!/usr/bin/env bash
# Guessed: where two Categorical distributions rule out the same tokens by logits of -inf, their KL divergence is that of the tokens that
# are left, and so is its gradient, as it is with entropy() and log_prob().
# So is: the value is right and the gradient NaN, of every logit. What is not possible is set to 0 after -inf - (-inf) was computed, and
# the backward pass goes through that. torch 2.13.0.
# Why it matters: logits are masked where a grammar, top_k or the tool's format allows some tokens alone. A KL penalty beside such a
# policy logs well, and its first step makes all weights NaN. Mask with a large negative number, such as -1e9.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import math
import sys

import torch
from torch.distributions import Categorical, kl_divergence

print("torch", torch.__version__)


def with_gradient(of, mask):
    """Value and gradient by the logits of a policy whose third token is masked."""
    logits = torch.tensor([1.0, 2.0, mask], requires_grad=True)
    value = of(Categorical(logits=logits), Categorical(logits=torch.tensor([0.5, 1.0, mask])))
    value.backward()
    print(f"mask {mask:>6}: {value.item():.4f}, gradient {logits.grad.tolist()}")
    return value.item(), logits.grad


print("KL(policy, reference)")
(masked, broken), (finite, right) = (with_gradient(kl_divergence, mask) for mask in (-math.inf, -1e9))
print("entropy of the policy")
_, entropy = with_gradient(lambda policy, _: policy.entropy(), -math.inf)
if abs(masked - finite) > 1e-6 or not broken.isnan().all() or right.isnan().any() or entropy.isnan().any():
    sys.exit("CHANGED: the KL divergence of masked distributions has a gradient")
PYTHON
