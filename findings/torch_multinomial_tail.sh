#!/usr/bin/env bash
# Guessed: `torch.multinomial(p, n, replacement=True)` draws n times what `torch.multinomial(p, 1)` draws once.
# So is: it adds the probabilities up in their own precision. In float32 entries below 3e-8 that stand behind a likely one are never drawn, and ones of 1e-7
# a fifth too often; in front of it they are drawn as they should be. One draw at a time, or float64, is right. torch 2.13.0.
# Why it matters: of a language model's vocabulary most tokens have such probabilities. Which of them a policy can ever try depends on their numbers.
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

RARE, DRAWS = 20_000, 10_000_000


def share(probability, place, dtype):
    """How often one of 20,000 rare entries is drawn, over how often it should be. place: where the one likely entry stands."""
    p = torch.full((RARE + 1,), probability, dtype=torch.float64)
    p[place] = 1 - RARE * probability
    drawn = torch.multinomial(p.to(dtype), DRAWS, replacement=True)
    return round(float((drawn != place % (RARE + 1)).double().mean()) / (RARE * probability), 2)


torch.manual_seed(0)
print("torch", torch.__version__, "- how often rare entries are drawn, over their probability")
found = {}
for probability in (2e-8, 1e-7):
    for name, place in (("behind", 0), ("in front of", -1)):
        for dtype in (torch.float32, torch.float64):
            found[probability, name, dtype] = share(probability, place, dtype)
            print(f"{probability:g} each, {name:11} the likely one, {str(dtype):13} {found[probability, name, dtype]:.2f}")
behind, right = found[2e-8, "behind", torch.float32], [of for (_, name, kind), of in found.items() if kind == torch.float64]
if behind != 0 or found[1e-7, "behind", torch.float32] < 1.1 or any(abs(of - 1) > 0.1 for of in right):
    sys.exit("CHANGED: how often rare entries are drawn")
PYTHON
