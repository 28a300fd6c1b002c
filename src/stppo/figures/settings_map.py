"""How runs end at every setting that was tried: epochs by staleness by learning rate, one algorithm at a time."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.lines import Line2D

from stppo.figures.curves import BASELINE, SUCCESS, curves_of, page, plain, plotted, source_of, start_handle
from stppo.figures.style import Plot, style
from stppo.record.outcomes import LABELS, LEARNED
from stppo.record.runs import Metrics

COLORS = dict(zip(LABELS, ("#0061A8", "#E69F00", "#D55E00", "#8A8A8A", "#1D2530"), strict=True))
FEWEST = 6  # settings below which a map says no more than `tolerance`


def cells(metrics: Metrics, algorithm: str = BASELINE) -> pd.DataFrame:
    """One row per regime of an algorithm: its setting, and how its runs went.

    Columns: `regime`, `iterations`, `epochs`, `staleness` (iterations), `learning_rate`, `intensity` (learning rate x
    epochs), `runs`, numbers of runs by `results.outcomes.LABELS`, `shows` (runs that learned and later lost at least half of
    what they had gained, recovered or not), `share` of these, means of `start`, `peak`, `final` and `greedy_final`.
    """
    rows = []
    for regime in metrics.regimes:
        arm = metrics.arm(regime, algorithm)
        records = [r for r in metrics.runs if (r["regime"], r["algorithm"]) == (regime, algorithm)]
        if arm.empty:
            continue
        setting = pd.DataFrame([metrics.settings(record) for record in records]).iloc[0]
        shows = int((arm["learned"] & arm["crash_iteration"].notna()).sum())
        rows.append(
            {
                "regime": regime,
                "iterations": max(record["iterations"] for record in records),
                **{name: float(setting[name]) for name in ("epochs", "staleness", "learning_rate")},
                "intensity": float(setting["learning_rate"] * setting["epochs"]),
                "runs": len(arm),
                **{label: int((arm["outcome"] == label).sum()) for label in LABELS},
                "shows": shows,
                "share": shows / len(arm),
                **arm[["start", "peak", "final", "greedy_final"]].mean().to_dict(),
            }
        )
    return pd.DataFrame(rows)


def settings_map(metrics: Metrics) -> Plot | None:
    """Every run's curve of sampled success, in the colour of how it ended, at its place among the settings."""
    table = cells(metrics) if BASELINE in metrics.algorithms() else pd.DataFrame()
    if len(table):  # a setting with a number of epochs that no other has is no part of a grid
        table = table[table.groupby("epochs")["regime"].transform("size") > 1]
    if not len(table) or table["learning_rate"].nunique() < 2:
        return None  # regimes of one rate differ in their world, policy or length
    if len(table) < FEWEST or (table[["epochs", "staleness", "learning_rate"]].nunique() > 1).sum() < 2:
        return None  # along one setting alone `tolerance` shows more
    table["rate"] = table["intensity"].map(
        lambda value: float(f"{value:.2g}")
    )  # 2.8e-3 from any of its factors
    its = metrics.look(BASELINE)
    n_shows, n_cells, n_runs = int((table["share"] >= SHOWN).sum()), len(table), int(table["runs"].sum())
    title = (
        f"{its.label[0].upper()}{its.label[1:]} learns and then loses half of its gain in {int(table['shows'].sum())} of {n_runs} runs, "
        f"in most runs of {n_shows} of {n_cells} settings"
    )
    question = (
        "Where does it learn, and where does it collapse? Sampled success of every run, coloured by its end. "
        "Columns: learning rate × epochs."
    )
    handles = [
        Line2D([], [], color=COLORS[label], linewidth=2, label=label)
        for label in LABELS
        if table[label].any()
    ]
    horizons = sorted(table["iterations"].unique())
    rows: list[pd.DataFrame] = []
    with style():
        body = sum(1.05 * part["epochs"].nunique() + 0.75 for _, part in table.groupby("iterations"))
        source = source_of(metrics, list(table["regime"]), [BASELINE])
        fig = page(title, question, source, body, [*handles, start_handle()])
        blocks = fig.subfigures(len(horizons), 1, squeeze=False)[:, 0]
        for block, horizon in zip(blocks, horizons, strict=True):
            part = table[table["iterations"] == horizon]
            rows += _block(block, metrics, part, f"{horizon} iterations" if len(horizons) > 1 else "")
    caption = (
        f"{question} In a column the steps of an iteration add up to the same. A run learned "
        f"once its mean of three evaluations rose by {LEARNED:.2f}; it collapsed if it then lost half of its gain for good."
    )
    return Plot("settings_map", fig, plotted(rows), caption, tables={"cells": table}, title=title)


SHOWN = 0.6  # share of a setting's runs that must learn and then lose half, for the setting to show it


def _block(block, metrics: Metrics, table: pd.DataFrame, heading: str) -> list[pd.DataFrame]:
    """One horizon: panels of epochs by rate, side by side for each staleness; empty where nothing was run."""
    stale, epochs = sorted(table["staleness"].unique()), sorted(table["epochs"].unique())
    rates = {lag: sorted(table.loc[table["staleness"] == lag, "rate"].unique()) for lag in stale}
    columns = [(lag, rate) for lag in stale for rate in rates[lag]]
    axes = block.subplots(len(epochs), len(columns), squeeze=False, sharex=True, sharey=True)
    rows: list[pd.DataFrame] = []
    for c, (lag, rate) in enumerate(columns):
        for r, n_epochs in enumerate(epochs):
            ax = axes[r][c]
            found = table[
                (table["staleness"] == lag) & (table["rate"] == rate) & (table["epochs"] == n_epochs)
            ]
            ax.set(ylim=(0, 1), yticks=[0, 0.5, 1])
            ax.tick_params(labelsize=6.5, length=0)
            if found.empty:
                ax.text(0.5, 0.5, "not run", transform=ax.transAxes, ha="center", fontsize=7, color="#888888")
            for regime in found["regime"]:
                rows += draw_runs(ax, metrics, regime)
            if c == 0:
                ax.set_ylabel(f"{plain(n_epochs)} epochs", fontsize=8)
        first = lag not in [other for other, _ in columns[:c]]
        axes[0][c].set_title((f"staleness {plain(lag)}\n" if first else "\n") + plain(rate), fontsize=8)
        axes[-1][c].set_xlabel("iteration", fontsize=7)
    if heading:
        block.suptitle(heading, x=0.01, ha="left", fontsize=10)
    return rows


def draw_runs(ax, metrics: Metrics, regime: str) -> list[pd.DataFrame]:
    """Curves of a regime's runs of the baseline, from the start of each, in the colours of their ends; what was drawn."""
    curves, rows = curves_of(metrics, regime, BASELINE, SUCCESS), []
    arm = metrics.arm(regime, BASELINE).set_index("seed")
    for world, seed in curves:
        curve = curves[(world, seed)].dropna()
        if not len(curve) or math.isnan(curve.iloc[0]):
            continue
        outcome = arm.loc[seed, "outcome"]
        ax.plot(curve.index, curve, color=COLORS[outcome], linewidth=1.3)
        keys = {"regime": regime, "metric": SUCCESS, "algorithm": BASELINE, "kind": outcome}
        rows.append(curve.rename("value").reset_index().assign(**keys, world=world, seed=seed))
    ax.axhline(arm["start"].mean(), color="#777777", linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    return rows
