#!/usr/bin/env bash
# Guessed: Categorical(probs=p).log_prob(i) is log p[i], as Categorical(logits=log p) has it.
# So is: probabilities are clamped at float32's epsilon first. No token has a log-probability below -15.94, however rare it is.
# torch 2.13.0.
# Why it matters: the behaviour policy's log-probability of a rare token is then too high by several nats, and the importance ratio of
# just the tokens that decide about stability is too small by that factor. Hand it logits.
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
from torch.distributions import Categorical

logits = torch.tensor([0.0, -12.0, -18.0, -24.0, -30.0])
tokens = torch.arange(len(logits))
by_probs = Categorical(probs=logits.softmax(-1)).log_prob(tokens)
by_logits = Categorical(logits=logits).log_prob(tokens)
print("torch", torch.__version__)
print("log-probabilities by probs: ", [round(x, 2) for x in by_probs.tolist()])
print("log-probabilities by logits:", [round(x, 2) for x in by_logits.tolist()])
if not torch.allclose(by_probs[:2], by_logits[:2], atol=1e-3) or (by_probs[2:] < -16).any() or by_logits[-1] > -29:
    sys.exit("CHANGED: probabilities are not clamped")
PYTHON
