#!/usr/bin/env bash
# Guessed: a seed fixes a stream of numbers: the first 15 of torch.randn(16) are torch.randn(15), and four rows drawn at once are the four
# that would be drawn one after another, as it is with torch.rand and with numpy.
# So is: below 16 numbers torch makes normal ones in another way than above, and from 16 on it makes the last sixteen anew where their
# number is no multiple of 16. randn(15) and randn(16) share nothing; of randn(100) and randn(112) the first 84. torch 2.13.0, on a CPU.
# Why it matters: one token more in the vocabulary, one world more in a batch, and the same seed gives other weights or other noise. Where
# paired arms should start from the same draw, as in an ablation of a width, draw the larger one and cut it.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys

import numpy as np
import torch


def first(draw, few, many):
    """How many of `few` numbers, drawn under one seed, are the first of `many`."""
    torch.manual_seed(0)
    short = draw(few)
    torch.manual_seed(0)
    return int((short == draw(many)[:few]).sum())


def rows(draw):
    """Whether four rows of four, drawn one by one, are the four drawn at once."""
    torch.manual_seed(0)
    at_once = draw(4, 4)
    torch.manual_seed(0)
    return bool((at_once == torch.stack([draw(4) for _ in range(4)])).all())


print("torch", torch.__version__, "numpy", np.__version__)
sizes = [(15, 16), (16, 32), (100, 112)]
normal, uniform = ([first(draw, *pair) for pair in sizes] for draw in (torch.randn, torch.rand))
in_numpy = [int((np.random.default_rng(0).normal(size=a) == np.random.default_rng(0).normal(size=b)[:a]).sum()) for a, b in sizes]
for name, found in (("torch.randn", normal), ("torch.rand", uniform), ("numpy normal", in_numpy)):
    print(f"{name:12}", ", ".join(f"{same} of {few} are the first of {many}" for same, (few, many) in zip(found, sizes)))
print("four rows one by one are the four at once: rand", rows(torch.rand), "randn", rows(torch.randn))
if normal[0] > 0 or normal[2] == 100 or rows(torch.randn) or uniform != in_numpy or not rows(torch.rand):
    sys.exit("CHANGED: torch.randn is one stream")
PYTHON
