#!/usr/bin/env bash
# Guessed: seaborn's band, a 95 % confidence interval by bootstrap, holds the true mean 19 times in 20, whatever the number of seeds.
# So is: of three seeds it holds it three times in four, of five five times in six, and that for the tamest of distributions. Draws of
# three numbers spread too little, and nothing makes up for it. Of two seeds the band is what lies between them. seaborn 0.13.2.
# Why it matters: three to five seeds under this band is how most learning curves are shown. Two methods that are the same have bands apart
# far more often than 95 % suggests. Student's interval holds what it says here.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet seaborn==0.13.2 pandas==2.3.3 matplotlib==3.11.2 scipy==1.17.1
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from scipy import stats

rng, points = np.random.default_rng(0), 600  # each iteration of the curve is a study of its own
print("seaborn", version("seaborn"), "- normal numbers with mean 0")
held = {}
for seeds in (2, 3, 5, 10):
    values = rng.normal(size=(points, seeds))
    curve = pd.DataFrame({"iteration": np.repeat(np.arange(points), seeds), "value": values.ravel()})
    _, ax = plt.subplots()
    sns.lineplot(curve, x="iteration", y="value", n_boot=500, seed=0, ax=ax)
    edges = pd.DataFrame(ax.collections[0].get_paths()[0].vertices, columns=["x", "y"])
    band = edges[edges["x"].between(0, points - 1)].groupby("x")["y"].agg(["min", "max"])
    low, high = stats.t.interval(0.95, seeds - 1, values.mean(axis=1), stats.sem(values, axis=1))
    held[seeds] = float(((band["min"] <= 0) & (band["max"] >= 0)).mean())
    student = float(((low <= 0) & (high >= 0)).mean())
    print(f"{seeds} seeds: the mean is in the band {held[seeds]:.0%}, in Student's interval {student:.0%} of {len(band)} times")
if held[3] > 0.85 or held[5] > 0.92:
    sys.exit("CHANGED: the band of three seeds holds the mean as often as it says")
PYTHON
