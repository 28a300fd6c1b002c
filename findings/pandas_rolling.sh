#!/usr/bin/env bash
# Guessed: pandas' running mean over a window that holds an infinite number is infinite or NaN, and a running standard deviation is right
# again once a spike has left its window.
# So is: infinite numbers are taken for missing ones. With min_periods=1, as one smooths a curve, the mean and even the maximum pass over
# them; so do ewm and expanding. A running deviation is carried from window to window with its rounding errors: where a loss is of
# the size of .001, one step of a million leaves a deviation of 0 behind, for as long as the curve goes on. pandas 2.3.3.
# Why it matters: smoothing is what a gradient norm or loss gets before it is drawn or watched by an alarm. The step that was infinite is
# not there, and after a large one an alarm that counts in deviations divides by 0 for good.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet pandas==2.3.3
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys

import numpy as np
import pandas as pd

norm = pd.Series([1.0, 1.0, np.inf, 1.0, 1.0])
window = norm.rolling(3, min_periods=1)
found = {"rolling mean": window.mean(), "rolling max": window.max(), "ewm": norm.ewm(alpha=0.5).mean()}
print("pandas", pd.__version__, "gradient norm", norm.tolist())
for name, smooth in found.items():
    print(f"{name:13}", smooth.tolist())

loss = np.random.default_rng(0).normal(scale=1e-3, size=200)
loss[50] = 1e6
running, right = pd.Series(loss).rolling(20).std().iloc[-1], loss[-20:].std(ddof=1)
print(f"150 steps after the spike: the running deviation of 20 losses is {running:.5f}; of these 20 losses alone {right:.5f}")
if any((smooth != 1).any() for smooth in found.values()) or abs(running - right) < 0.5 * right:
    sys.exit("CHANGED: pandas sees infinite numbers, or forgets a spike")
PYTHON
