"""One algorithm at one setting, with one thing changed at a time: every run's curve, a panel for each change."""

from __future__ import annotations

import pandas as pd
from matplotlib.lines import Line2D

from stppo.figures.curves import BASELINE, page, plotted, source_of, start_handle
from stppo.figures.settings_map import COLORS, SHOWN, cells, draw_runs
from stppo.figures.style import Plot, style
from stppo.record.outcomes import LABELS
from stppo.record.runs import Metrics

FEWEST = 3  # regimes that a comparison of changes needs
COLUMNS = 4


def one_change(metrics: Metrics) -> Plot | None:
    """Sampled success of every run against the iteration, in the colour of how it ended, regime by regime.

    None unless the baseline alone was trained, in three regimes or more of one learning rate, number of epochs and staleness.
    """
    table = cells(metrics) if metrics.algorithms() == [BASELINE] else pd.DataFrame()
    if len(table) < FEWEST or len(table[["epochs", "staleness", "learning_rate"]].drop_duplicates()) > 1:
        return None
    shown = int((table["share"] >= SHOWN).sum())
    label = metrics.look(BASELINE).label
    title = (
        f"One thing changed at a time: {label} learns and then loses half of its gain in most runs of {shown} of "
        f"{len(table)} settings"
    )
    question = (
        "What does its fate depend on? Sampled success of every run, coloured by its end. Highest: mean of three "
        "evaluations in a row, averaged over runs."
    )
    ends = [outcome for outcome in LABELS if table[outcome].any()]
    handles = [Line2D([], [], color=COLORS[outcome], linewidth=2, label=outcome) for outcome in ends]
    rows: list[pd.DataFrame] = []
    with style():
        height = -(-len(table) // COLUMNS)
        source = source_of(metrics, list(table["regime"]), [BASELINE])
        fig = page(title, question, source, 1.75 * height, [*handles, start_handle()])
        axes = fig.subplots(height, COLUMNS, squeeze=False, sharey=True).flatten()
        for ax, row in zip(axes, table.to_dict("records"), strict=False):
            rows += draw_runs(ax, metrics, row["regime"])
            name = row["regime"].replace("_", " ").lower()
            ax.set_title(f"{name}: highest {row['peak']:.2f}", fontsize=9.5)
            ax.set(ylim=(0, 1), yticks=[0, 0.5, 1], xlabel="iteration")
        for ax in axes[len(table) :]:
            ax.set_axis_off()
        axes[0].set_ylabel("success, sampled")
    return Plot("one_change", fig, plotted(rows), question, tables={"changes": table}, title=title)
