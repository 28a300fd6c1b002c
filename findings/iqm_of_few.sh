#!/usr/bin/env bash
# Guessed: the interquartile mean of rliable leaves out the lowest and the highest quarter of the runs.
# So is: it leaves out whole runs, a quarter of their number rounded down. Of three runs none is left out: it is the mean. Of
# seven it leaves out one at either end, so that two that collapsed lower it where the middle half hardly holds the second.
# rliable 1.2.0, scipy 1.17.1.
# Why it matters: with three seeds of one task a single outlier moves the "robust" number as it moves the mean, and a table of
# interquartile means over 3, 5 and 8 seeds compares three different statistics.
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
from rliable import metrics


def between_quartiles(values):
    """Mean of the middle half, runs at its edges counted in part."""
    edges = np.linspace(0, 1, len(values) + 1)
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0, None)
    return float(np.sort(values) @ weights / weights.sum())


print("rliable", version("rliable"), "scipy", version("scipy"))
table = {}
for n, collapsed in ((3, 1), (5, 1), (6, 2), (7, 2), (8, 2)):
    scores = np.full(n, 0.8)
    scores[:collapsed] = 0.0
    table[n] = metrics.aggregate_iqm(scores[:, None]), scores.mean(), between_quartiles(scores)
    said = "{} of {} runs at 0, the others at .8: rliable {:.3f}, mean {:.3f}, middle half {:.3f}"
    print(said.format(collapsed, n, *table[n]))
rliable, mean, middle = table[3]
if not np.isclose(rliable, mean) or np.isclose(mean, middle) or np.isclose(table[7][0], table[7][2]):
    sys.exit("CHANGED: of three runs the interquartile mean is no longer the mean")
PYTHON
