"""The baseline at every setting that was tried, run by run."""

from __future__ import annotations

import textwrap

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from stppo.figures.curves import page, plain, plotted, source_of, start_handle, start_line
from stppo.figures.style import Plot, style
from stppo.figures.words import capital
from stppo.record.outcomes import LABELS, LEARNED
from stppo.record.runs import Metrics
from stppo.record.tidy import BASELINE, SUCCESS, Runs

COLORS = dict(zip(LABELS, ("#0061A8", "#E69F00", "#D55E00", "#8A8A8A", "#1D2530"), strict=True))
SETTING = {"epochs": "{} epochs", "staleness": "staleness {}", "learning_rate": "learning rate {}"}
FEWEST = 3  # settings below which a picture says nothing
MOST_COLUMNS = 5
SHOWN = 0.6  # share of a setting's runs that must learn and then lose half, for the setting to show it


def cells(runs: Runs) -> pd.DataFrame:
    """One row per regime of the runs of one algorithm: its setting, and how its runs went.

    Columns: `regime`, `iterations`, `epochs`, `staleness` (iterations), `learning_rate`, `intensity`
    (learning rate x epochs), `runs`, numbers of runs by `outcomes.LABELS`, `shows` (runs that learned and
    later lost at least half of what they had gained, recovered or not), `share` of these, means of `start`,
    `peak`, `final` and `greedy_final`.
    """
    rows = []
    for regime, arm in runs.runs.groupby("regime"):
        first, shows = arm.iloc[0], int((arm["learned"] & arm["crash_iteration"].notna()).sum())
        rows.append(
            {
                "regime": regime,
                "iterations": arm["iterations"].max(),
                **{name: float(first[name]) for name in SETTING},
                "intensity": float(first["learning_rate"] * first["epochs"]),
                "runs": len(arm),
                **{label: int((arm["outcome"] == label).sum()) for label in LABELS},
                "shows": shows,
                "share": shows / len(arm),
                **arm[["start", "peak", "final", "greedy_final"]].mean().to_dict(),
            }
        )
    return pd.DataFrame(rows)


def every_setting(metrics: Metrics) -> Plot | None:
    """Sampled success of every run against the iteration, in the colour of how it ended, a panel for each
    regime. None unless the baseline alone was trained, in `FEWEST` regimes or more."""
    if metrics.algorithms() != [BASELINE] or len(metrics.regimes) < FEWEST:
        return None
    runs = metrics.all
    table = cells(runs).sort_values(["iterations", "staleness", "epochs", "learning_rate"], kind="stable")
    varied = [name for name in SETTING if table[name].nunique() > 1]
    title = capital(
        f"{runs.looks.loc[BASELINE, 'label']} learns and then loses half of its gain in "
        f"{table['shows'].sum()} of {table['runs'].sum()} runs, in most runs of "
        f"{(table['share'] >= SHOWN).sum()} of {len(table)} settings"
    )
    question = (
        "Where does it learn, and where does it collapse? Sampled success of every run, coloured by its end; "
        "a panel for each setting."
    )
    columns = min(MOST_COLUMNS, len(table))
    rows = -(-len(table) // columns)
    parts: list[pd.DataFrame] = []
    with style():
        fig = page(title, question, source_of(runs), 1.5 * rows, _handles(table, runs.runs))
        axes = fig.subplots(rows, columns, squeeze=False, sharey=True)
        for ax, row in zip(axes.flat, table.to_dict("records"), strict=False):
            parts += _draw_runs(ax, runs.of([row["regime"]]))
            words = [SETTING[name].format(plain(row[name])) for name in varied]
            name = ", ".join(words) or row["regime"].replace("_", " ").lower()
            ax.set_title(textwrap.fill(name, 24), fontsize=7.5)
            ax.set(ylim=(0, 1), yticks=[0, 0.5, 1])
            ax.tick_params(labelsize=6.5)
        for ax in list(axes.flat)[len(table) :]:
            ax.set_axis_off()
        axes[0][0].set_ylabel("success, sampled", fontsize=8)
        for ax in axes[-1]:
            ax.set_xlabel("iteration", fontsize=8)
    caption = (
        f"{question} A run learned once its mean of three evaluations rose by {LEARNED:.2f}; it collapsed if "
        "it then lost half of its gain for good."
    )
    return Plot("every_setting", fig, plotted(parts), caption, tables={"cells": table}, title=title)


def _handles(table: pd.DataFrame, runs: pd.DataFrame) -> list[Line2D]:
    """Legend of the outcomes that occur."""
    ends = [
        Line2D([], [], color=COLORS[label], linewidth=2, label=label)
        for label in LABELS
        if table[label].any()
    ]
    return [*ends, start_handle(runs)]


def _draw_runs(ax: Axes, runs: Runs) -> list[pd.DataFrame]:
    """Curves of a regime's runs, in the colours of their ends; what was drawn."""
    curves, parts = runs.curves(BASELINE, SUCCESS), []
    ends = runs.runs.set_index("seed")["outcome"]
    for world, seed in curves:
        curve = curves[(world, seed)].dropna()
        ax.plot(curve.index, curve, color=COLORS[ends[seed]], linewidth=1.3)
        keys = {
            "regime": runs.runs["regime"].iloc[0],
            "metric": SUCCESS,
            "algorithm": BASELINE,
            "kind": ends[seed],
        }
        parts.append(curve.rename("value").reset_index().assign(**keys, world=world, seed=seed))
    start_line(ax, runs.runs)
    return parts
