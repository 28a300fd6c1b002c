"""The baseline at every setting that was tried, run by run: a map of settings, and one thing changed at a
time."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D

from stppo.figures.curves import page, plain, plotted, source_of, start_handle, start_line
from stppo.figures.style import Plot, style
from stppo.figures.words import capital
from stppo.record.outcomes import LABELS, LEARNED
from stppo.record.runs import Metrics
from stppo.record.tidy import BASELINE, SUCCESS, Runs

COLORS = dict(zip(LABELS, ("#0061A8", "#E69F00", "#D55E00", "#8A8A8A", "#1D2530"), strict=True))
SETTING = ["epochs", "staleness", "learning_rate"]
MAP, CHANGES = 6, 3  # settings below which a picture says nothing
SHOWN = 0.6  # share of a setting's runs that must learn and then lose half, for the setting to show it
COLUMNS = 4


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


def settings_map(metrics: Metrics) -> Plot | None:
    """Every run's curve of sampled success, in the colour of how it ended, at its place among the settings.

    None unless two of epochs, staleness and learning rate vary, the rate among them, over `MAP` settings or
    more.
    """
    if BASELINE not in metrics.algorithms():
        return None
    runs = metrics.all.of(algorithms=[BASELINE])
    table = cells(runs)
    # A setting with a number of epochs that no other has is no part of a grid.
    table = table[table.groupby("epochs")["regime"].transform("size") > 1]
    varied = table[SETTING].nunique() > 1
    if len(table) < MAP or not varied["learning_rate"] or varied.sum() < 2:
        return None
    table["rate"] = table["intensity"].map(
        lambda value: float(f"{value:.2g}")
    )  # 2.8e-3 from any of its factors
    if table.duplicated(["iterations", *SETTING[:2], "rate"]).any():
        return None  # regimes differ in more than the setting
    runs = runs.of(table["regime"])
    title = capital(
        f"{runs.looks.loc[BASELINE, 'label']} learns and then loses half of its gain in "
        f"{table['shows'].sum()} of {table['runs'].sum()} runs, in most runs of "
        f"{(table['share'] >= SHOWN).sum()} of {len(table)} settings"
    )
    question = (
        "Where does it learn, and where does it collapse? Sampled success of every run, coloured by its end. "
        "Columns: learning rate × epochs."
    )
    parts: list[pd.DataFrame] = []
    with style():
        body = sum(1.05 * part["epochs"].nunique() + 0.75 for _, part in table.groupby("iterations"))
        fig = page(title, question, source_of(runs), body, _handles(table))
        blocks = fig.subfigures(table["iterations"].nunique(), 1, squeeze=False)[:, 0]
        for block, (horizon, part) in zip(blocks, table.groupby("iterations"), strict=True):
            parts += _block(block, runs, part)
            if len(blocks) > 1:
                block.suptitle(f"{horizon} iterations", x=0.01, ha="left", fontsize=10)
    caption = (
        f"{question} In a column the steps of an iteration add up to the same. A run learned once its mean "
        f"of three evaluations rose by {LEARNED:.2f}; it collapsed if it then lost half of its gain for good."
    )
    return Plot("settings_map", fig, plotted(parts), caption, tables={"cells": table}, title=title)


def _block(block: SubFigure, runs: Runs, table: pd.DataFrame) -> list[pd.DataFrame]:
    """One horizon: panels of epochs by rate, side by side for each staleness; empty where nothing was run."""
    epochs = sorted(table["epochs"].unique())
    columns = list(
        table[["staleness", "rate"]]
        .drop_duplicates()
        .sort_values(["staleness", "rate"])
        .itertuples(index=False)
    )
    axes = block.subplots(len(epochs), len(columns), squeeze=False, sharex=True, sharey=True)
    parts: list[pd.DataFrame] = []
    for c, (lag, rate) in enumerate(columns):
        for r, n_epochs in enumerate(epochs):
            ax = axes[r][c]
            here = (table["staleness"] == lag) & (table["rate"] == rate) & (table["epochs"] == n_epochs)
            ax.set(ylim=(0, 1), yticks=[0, 0.5, 1])
            ax.tick_params(labelsize=6.5, length=0)
            if not here.any():
                ax.text(0.5, 0.5, "not run", transform=ax.transAxes, ha="center", fontsize=7, color="#888888")
            for regime in table.loc[here, "regime"]:
                parts += _draw_runs(ax, runs.of([regime]))
            if c == 0:
                ax.set_ylabel(f"{plain(n_epochs)} epochs", fontsize=8)
        first = c == 0 or columns[c - 1][0] != lag
        axes[0][c].set_title((f"staleness {plain(lag)}\n" if first else "\n") + plain(rate), fontsize=8)
        axes[-1][c].set_xlabel("iteration", fontsize=7)
    return parts


def one_change(metrics: Metrics) -> Plot | None:
    """Sampled success of every run against the iteration, in the colour of how it ended, regime by regime.

    None unless the baseline alone was trained, in `CHANGES` regimes or more of one learning rate, number of
    epochs and staleness.
    """
    if metrics.algorithms() != [BASELINE]:
        return None
    runs = metrics.all
    table = cells(runs)
    if len(table) < CHANGES or len(table[SETTING].drop_duplicates()) > 1:
        return None
    title = (
        f"One thing changed at a time: {runs.looks.loc[BASELINE, 'label']} learns and then loses half of its "
        f"gain in most runs of {(table['share'] >= SHOWN).sum()} of {len(table)} settings"
    )
    question = (
        "What does its fate depend on? Sampled success of every run, coloured by its end. Highest: mean of "
        "three evaluations in a row, averaged over runs."
    )
    parts: list[pd.DataFrame] = []
    with style():
        height = -(-len(table) // COLUMNS)
        fig = page(title, question, source_of(runs), 1.75 * height, _handles(table))
        axes = fig.subplots(height, COLUMNS, squeeze=False, sharey=True).flatten()
        for ax, row in zip(axes, table.itertuples(), strict=False):
            parts += _draw_runs(ax, runs.of([row.regime]))
            ax.set_title(f"{row.regime.replace('_', ' ').lower()}: highest {row.peak:.2f}", fontsize=9.5)
            ax.set(ylim=(0, 1), yticks=[0, 0.5, 1], xlabel="iteration")
        for ax in axes[len(table) :]:
            ax.set_axis_off()
        axes[0].set_ylabel("success, sampled")
    return Plot("one_change", fig, plotted(parts), question, tables={"changes": table}, title=title)


def _handles(table: pd.DataFrame) -> list[Line2D]:
    """Legend of the outcomes that occur."""
    ends = [
        Line2D([], [], color=COLORS[label], linewidth=2, label=label)
        for label in LABELS
        if table[label].any()
    ]
    return [*ends, start_handle()]


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
