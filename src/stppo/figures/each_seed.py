"""Few seeds of one world: every run's curve, a column for each seed. So few have no interval worth the name."""

from __future__ import annotations

import pandas as pd

from stppo.config.algorithms import in_order
from stppo.figures import findings
from stppo.figures.curves import GREEDY, SUCCESS, curves_of, line_handles, page, plotted, source_of
from stppo.figures.style import Plot, style
from stppo.record.runs import Metrics

MOST = 4  # seeds side by side
FEW = 10  # points, which are marked
WINDOW = 5  # iterations in a running mean: a batch of 32 trajectories jumps too much for seven lines
VALID = "valid_format_rate"
ROWS = {GREEDY: "success, greedy", SUCCESS: "success, sampled", VALID: "valid format"}


def each_seed(metrics: Metrics) -> Plot | None:
    """Success of every run, greedy and sampled, and the running share of its own trajectories' turns that are valid.

    None unless the main regime has two to four seeds, all in one world.
    """
    regime = findings.main_regime(metrics)
    names = in_order(metrics.methods(regime))
    runs = pd.concat([metrics.arm(regime, name) for name in names])
    seeds = sorted(runs["seed"].unique())
    if runs["world_seed"].nunique() > 1 or not 1 < len(seeds) <= MOST:
        return None
    title = findings.too_short(metrics, [regime]) or _title(metrics, runs, names)
    question = (
        "What became of each run? Success on the same held-out questions, and valid turns among those it was trained on, a "
        f"running mean of {WINDOW} iterations; a column for each seed."
    )
    rows: list[pd.DataFrame] = []
    with style():
        source = source_of(metrics, [regime], names)
        fig = page(title, question, source, 4.6, line_handles(metrics, names))
        axes = fig.subplots(len(ROWS), len(seeds), squeeze=False, sharex=True, sharey="row")
        for line, (column, label) in zip(axes, ROWS.items(), strict=True):
            line[0].set_ylabel(label)
            for name in names:
                curves, its = curves_of(metrics, regime, name, column), metrics.look(name)
                for world, seed in curves:
                    curve = curves[(world, seed)].dropna()
                    if column == VALID:
                        curve = curve.rolling(WINDOW, min_periods=1).mean()
                    marks = {"marker": "o", "markersize": 3} if len(curve) < FEW else {}
                    line[seeds.index(seed)].plot(
                        curve.index, curve, color=its.color, linestyle=its.line, **marks
                    )
                    keys = {
                        "regime": regime,
                        "metric": column,
                        "algorithm": name,
                        "world": world,
                        "seed": seed,
                    }
                    rows.append(curve.rename("value").reset_index().assign(**keys))
        for ax in axes[:, 0]:
            ax.set_ylim(bottom=0)
        for ax, seed in zip(axes[0], seeds, strict=True):
            ax.set_title(f"seed {seed}", fontsize=10.5, color="#333333")
        for ax in axes[-1]:
            ax.set_xlabel("iteration")
    return Plot("each_seed", fig, plotted(rows), question, title=title)


def _title(metrics: Metrics, runs: pd.DataFrame, names: list[str]) -> str:
    """Greedy ends of the title's pair, of the algorithms that every seed has where there are any; of one algorithm, its own."""
    every = [name for name in names if (runs["algorithm"] == name).sum() == runs["seed"].nunique()]
    shown = findings.pair(metrics, runs["regime"].iloc[0], every or names)
    ends = runs.pivot(index="seed", columns="algorithm", values="greedy_final")[list(shown)].dropna()
    told = [
        f"{metrics.look(name).label} at {findings.listed([f'{end:.2f}' for end in ends[name]])}"
        for name in shown
    ]
    return f"Greedy success ends, from {runs['greedy_start'].mean():.2f} and seed by seed, with {' and with '.join(told)}"
