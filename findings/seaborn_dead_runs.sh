#!/usr/bin/env bash
# Guessed: seaborn's mean line goes on with the runs that are left, or stops, where runs end; a reader sees the fall of those that died.
# So is: rows without a number are left out before anything is averaged. Where half of the runs collapse to .1 and then to NaN, the
# line rises from .45 to .80 at the moment of their death, and its band closes. seaborn 0.13.2.
# Why it matters: a loss that stops being finite ends a run. The picture of collapse shows a recovery; such runs must count as 0 from
# there on.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet seaborn==0.13.2
fi
MPLBACKEND=Agg "$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
import pandas as pd
import seaborn as sns

rows = []
for run in range(6):
    for iteration in range(10):
        survives = run < 3
        success = 0.8 if survives else 0.1 if iteration < 5 else np.nan
        rows.append((run, iteration, success))
table = pd.DataFrame(rows, columns=["run", "iteration", "success"])
ax = sns.lineplot(table, x="iteration", y="success")
line = ax.lines[0].get_ydata()
band = ax.collections[0].get_paths()[0].vertices
last = band[band[:, 0] == 9, 1]
print("seaborn", version("seaborn"))
print("mean line:", [round(float(y), 2) for y in line], f"; width of its band at the end: {np.ptp(last):.2f}")
if not np.allclose(line[:5], 0.45) or not np.allclose(line[5:], 0.8) or np.ptp(last) > 1e-9:
    sys.exit("CHANGED: runs without a number are drawn in another way")
PYTHON
