#!/usr/bin/env bash
# Guessed: the mean of a float32 array over its rows is the mean of its columns, whichever way the array lies in memory.
# So is: numpy adds in pairs, which keeps rounding small, only along the axis that is contiguous. Down the rows of an ordinary array it adds
# one number after another. In float32 the sum of ones stops growing at 16,777,216, so the mean of 34 million ones is .5.
# numpy 2.4.6.
# Why it matters: log-probabilities, rewards and metrics are kept in float32, one row for each token or step. Long before it stops the sum
# is off: one per cent at a million rows of .1. x.mean(axis=0, dtype="float64") is right, as is the same mean in torch.
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

rows = 2**25
ones = np.ones((rows, 2), dtype=np.float32)
stopped = ones.mean(axis=0)
print("numpy", np.__version__)
print(f"{rows:,} ones in float32: mean over rows {stopped[0]}, of the whole {ones.mean()}, of one column copied {ones[:, 0].copy().mean()}")
print("in float64:", ones.mean(axis=0, dtype=np.float64)[0])
tenth = np.full((1_000_000, 2), 0.1, dtype=np.float32)
off = abs(tenth.mean(axis=0)[0] / 0.1 - 1)
right = abs(np.asfortranarray(tenth).mean(axis=0)[0] / 0.1 - 1)
print(f"a million times .1: the mean over rows is off by {off:.2%}, where columns are contiguous by {right:.1e}")
if stopped[0] != 0.5 or off < 5e-4 or right > 1e-5:
    sys.exit("CHANGED: numpy's mean over rows is exact")
PYTHON
