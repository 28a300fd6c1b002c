#!/usr/bin/env bash
# Guessed: numpy's default_rng([seed, worker]) gives each worker a stream of its own, and none of them is that of default_rng(seed).
# So is: a short seed is filled up with zeros, so [7, 0] is 7: worker 0 draws the very numbers that the main process draws. [7, 0, 0]
# is the same again: question 0 of epoch 0 too. [0, 7] is none of them, nor is [7, 1], nor what SeedSequence(7).spawn gives.
# numpy 2.4.6.
# Why it matters: initial weights, noise and questions that should be independent are the same draws, in run, worker or epoch 0 alone.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet numpy==2.4.6
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys

import numpy as np

seeds = {"7": 7, "[7, 0]": [7, 0], "[7, 0, 0]": [7, 0, 0], "[7, 1]": [7, 1], "[0, 7]": [0, 7]}
seeds["the first that 7 spawns"] = np.random.SeedSequence(7).spawn(1)[0]
drawn = {name: np.random.default_rng(seed).normal(size=3) for name, seed in seeds.items()}
print("numpy", np.__version__)
for name, numbers in drawn.items():
    print(f"{name:24}", numbers.round(4))
same = [name for name, numbers in drawn.items() if np.array_equal(numbers, drawn["7"])]
if same != ["7", "[7, 0]", "[7, 0, 0]"]:
    sys.exit("CHANGED: a trailing zero makes another stream")
PYTHON
