#!/usr/bin/env bash
# Guessed: rliable's interval of a mean over sixteen worlds with one run each is wide, since worlds differ.
# So is: laid out as its documentation asks, (runs, tasks) = (1, 16), the interval has no width at all. Runs are drawn again within
# each task, and one run can only be drawn as itself. task_bootstrap=True, or the worlds as runs of one task, give the interval.
# rliable 1.2.0.
# Why it matters: one run in each of many worlds is the better design, and its figure then claims certainty. Nothing warns.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet rliable==1.2.0 scipy==1.17.1
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
from rliable import library, metrics

worlds = np.random.default_rng(0).uniform(0, 1, 16)


def width(scores, **options):
    """Of the 95 % interval of the mean."""
    _, found = library.get_interval_estimates(
        {"a": scores}, lambda x: np.array([metrics.aggregate_mean(x)]), reps=2000, **options
    )
    low, high = found["a"].ravel()
    return float(high - low)


by_task, by_run = width(worlds[None, :]), width(worlds[:, None])
resampled = width(worlds[None, :], task_bootstrap=True)
print("rliable", version("rliable"), f"worlds from {worlds.min():.2f} to {worlds.max():.2f}")
print(f"width of the interval: one run of 16 tasks {by_task:.2f}; with task_bootstrap {resampled:.2f}; 16 runs of one task {by_run:.2f}")
if by_task > 1e-9 or by_run < 0.1 or resampled < 0.1:
    sys.exit("CHANGED: one run a task gives an interval")
PYTHON
