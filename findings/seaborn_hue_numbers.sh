#!/usr/bin/env bash
# Guessed: a seaborn plot coloured by learning rate or by seed has one line in its legend for each rate or seed, each with a colour of its own.
# So is: a column of numbers is a scale. With more than six values the legend names round numbers of that scale, none of which need have
# been run, and colours are spread evenly over it: of seven rates from 1e-5 to 1e-2 the first three look the same. seaborn 0.13.2.
# Why it matters: a reader looks up a rate of .002 that nobody trained with, or seed 8 of runs whose seeds are 0 to 5 and 11. Up to six
# seeds all is as guessed; it changes with the seventh. Make the column text, or set legend="full" and hue_norm.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet seaborn==0.13.2 pandas==2.3.3 matplotlib==3.11.2
fi
MPLBACKEND=Agg "$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import matplotlib.colors
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns


def legend_and_colours(values):
    """What the legend names, and the colours of the lines."""
    curves = pd.DataFrame([(value, step, step * value) for value in values for step in range(3)], columns=["run", "step", "score"])
    axes = plt.figure().subplots()
    sns.lineplot(curves, x="step", y="score", hue="run", ax=axes)
    drawn = [matplotlib.colors.to_rgb(line.get_color()) for line in axes.lines if len(line.get_xdata())]
    return [text.get_text() for text in axes.get_legend().texts], drawn


print("seaborn", version("seaborn"))
RATES = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
SEEDS = [0, 1, 2, 3, 4, 5, 11]
rates, colours = legend_and_colours(RATES)
seeds, _ = legend_and_colours(SEEDS)
few, _ = legend_and_colours(SEEDS[-6:])
text, _ = legend_and_colours([str(rate) for rate in RATES])
apart = max(abs(a - b) for a, b in zip(colours[0], colours[2]))
print("rates", RATES, "legend", rates)
print("seeds", SEEDS, "legend", seeds)
print("six seeds", SEEDS[-6:], "legend", few, " rates as text", text)
print(f"colours of 1e-5 and 1e-4 are {apart:.3f} apart (0 to 1)")
named = {float(name) for name in rates}
if named & {rate for rate in RATES if rate < 0.01} or set(map(int, seeds)) <= set(SEEDS) or apart > 0.02:
    sys.exit("CHANGED: the legend names what was run, in colours that differ")
if list(map(int, few)) != SEEDS[-6:] or len(text) != len(RATES):
    sys.exit("CHANGED: few seeds, or rates as text, have another legend")
PYTHON
