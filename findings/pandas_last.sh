#!/usr/bin/env bash
# Guessed: groupby("run").last() is the last row of each run, and interpolate() fills in between numbers that are known.
# So is: last() takes for each column the last number that is none of NaN, from whichever row: a run that collapsed to NaN ends with
# its last success, beside the step of its end. interpolate() goes on after the last number too, with that number. pandas 2.3.3.
# Why it matters: both are the short way to a table of final scores and to curves on a common grid. A run that died counts there as one
# that stood still at its best. tail(1) gives the row; interpolate(limit_area="inside") stops.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet pandas==2.3.3
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys

import pandas as pd

died = {"run": "died", "step": [0, 1, 2, 3], "success": [0.2, 0.8, None, None]}
lived = {"run": "lived", "step": [0, 1, 2, 3], "success": [0.2, 0.4, 0.6, 0.7]}
runs = pd.concat([pd.DataFrame(died), pd.DataFrame(lived)])
last, tail = runs.groupby("run").last(), runs.groupby("run").tail(1).set_index("run")
print("pandas", pd.__version__)
print(runs.to_string(index=False), "last()", last, "tail(1)", tail, sep="\n")
curve = pd.DataFrame(died).set_index("step")["success"].reindex([0, 0.5, 1, 2, 3, 4]).interpolate()
print("on a finer grid, interpolate():", curve.tolist())
if last.loc["died"].tolist() != [3, 0.8] or not tail.isna().loc["died", "success"] or curve.iloc[-1] != 0.8:
    sys.exit("CHANGED: a dead run no longer ends with its last success")
PYTHON
