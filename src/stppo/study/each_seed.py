"""Few seeds of one world: every run's curve, a column for each seed. So few have no interval worth the
name."""

from __future__ import annotations

import pandas as pd

from stppo.figures.curves import line_handles, page, plotted, source_of
from stppo.figures.style import Plot, style
from stppo.figures.words import NAMES, listed, pair, too_short
from stppo.record.runs import Metrics
from stppo.record.tidy import GREEDY, SUCCESS

MOST = 4  # seeds side by side
FEW = 10  # points, which are marked
WINDOW = 5  # iterations in a running mean: a batch of 32 trajectories jumps too much for seven lines
VALID = "valid_format_rate"
ROWS = {GREEDY: "success, greedy", SUCCESS: "success, sampled", VALID: NAMES[VALID]}


def each_seed(metrics: Metrics) -> Plot | None:
    """Success of every run, greedy and sampled, and the running share of its own trajectories' turns that are
    valid.

    None unless the main regime has two to four seeds, all in one world.
    """
    runs = metrics.main
    seeds = sorted(runs.runs["seed"].unique())
    if runs.runs["world_seed"].nunique() > 1 or not 1 < len(seeds) <= MOST:
        return None
    ends = runs.runs.pivot(index="seed", columns="algorithm", values="greedy_final")[runs.algorithms]
    shown = ends[
        pair(list(ends.dropna(axis="columns")) or runs.algorithms)
    ].dropna()  # those that every seed has
    told = [
        f"{runs.looks.loc[name, 'label']} at {listed([f'{end:.2f}' for end in shown[name]])}"
        for name in shown
    ]
    title = too_short(runs) or (
        f"Greedy success ends, from {runs.runs['greedy_start'].mean():.2f} and seed by seed, with "
        f"{' and with '.join(told)}"
    )
    question = (
        "What became of each run? Success on the same held-out questions, and valid turns among those it was "
        f"trained on, a running mean of {WINDOW} iterations; a column for each seed."
    )
    parts: list[pd.DataFrame] = []
    with style():
        fig = page(title, question, source_of(runs), 4.6, line_handles(runs.looks))
        axes = fig.subplots(len(ROWS), len(seeds), squeeze=False, sharex=True, sharey="row")
        for line, (column, label) in zip(axes, ROWS.items(), strict=True):
            line[0].set_ylabel(label)
            for name, its in runs.looks.iterrows():
                for (world, seed), curve in runs.curves(name, column).items():
                    curve = curve.dropna()
                    if column == VALID:
                        curve = curve.rolling(WINDOW, min_periods=1).mean()
                    marks = {"marker": "o", "markersize": 3} if len(curve) < FEW else {}
                    line[seeds.index(seed)].plot(curve, color=its["color"], linestyle=its["line"], **marks)
                    keys = {"regime": runs.runs["regime"].iloc[0], "metric": column, "algorithm": name}
                    parts.append(curve.rename("value").reset_index().assign(**keys, world=world, seed=seed))
            line[0].set_ylim(bottom=0)
        for ax, seed in zip(axes[0], seeds, strict=True):
            ax.set_title(f"seed {seed}", fontsize=10.5, color="#333333")
        for ax in axes[-1]:
            ax.set_xlabel("iteration")
    return Plot("each_seed", fig, plotted(parts), question, title=title)
