#!/usr/bin/env bash
# Guessed: a seaborn line of four runs is their mean, whether its axis was made logarithmic before the line was drawn or after.
# So is: on an axis that is logarithmic already, runs are averaged by their logarithms: the line is the geometric mean, and so are
# bars and points. A run at 0 counts as 1e-1000 or so and pulls the line off the page. The authors mean it so. seaborn 0.13.2.
# Why it matters: gradient norms, ratios and KL are drawn on logarithmic axes. Of four runs one of which spikes to 1000, the line shows
# 6 or 251, by the place of one line of code, and under the same name.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet seaborn==0.13.2 matplotlib==3.11.2 pandas==2.3.3
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
import warnings
from importlib.metadata import version

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns

warnings.simplefilter("ignore")
runs = pd.DataFrame({"iteration": [0] * 4 + [1] * 4, "norm": [1, 1, 1, 1, 1.0, 1, 1, 1000]})


def shown(before):
    """What a line, a point and a bar show of the second iteration."""
    heights = {}
    for draw in (sns.lineplot, sns.pointplot, sns.barplot):
        _, ax = plt.subplots()
        if before:
            ax.set_yscale("log")
        draw(runs, x="iteration", y="norm", errorbar=None, ax=ax)
        if not before:
            ax.set_yscale("log")
        marks = [bar.get_height() for bar in ax.patches] if draw is sns.barplot else ax.lines[0].get_ydata()
        heights[draw.__name__] = float(marks[1])
    return heights


print("seaborn", version("seaborn"), "four runs at", runs["norm"][4:].tolist())
before, after = shown(True), shown(False)
print("axis made logarithmic before drawing:", before)
print("axis made logarithmic after drawing: ", after)
if not np.allclose(list(after.values()), 250.75) or not np.allclose(list(before.values()), 1000**0.25):
    sys.exit("CHANGED: the order no longer decides which mean is drawn")
PYTHON
