"""Exact match per benchmark, of several agents side by side: a table and a figure."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from stppo.config.algorithms import SPARE_COLORS
from stppo.figures.style import Plot, style
from stppo.stats import with_intervals

_COLORS = ("#0061A8", "#D55E00", "#009E73", *SPARE_COLORS)
_MARKERS = "osDv^P*X"


def match_table(results: pd.DataFrame) -> pd.DataFrame:
    """One row per benchmark, one column per `agent` with "share [low, high]", and the plain mean over
    benchmarks.

    The mean is over an agent's own benchmarks and stands only where it played them all.
    """
    rows = with_intervals(results, "em")
    rows["text"] = [
        f"{value:.3f} [{low:.3f}, {high:.3f}]"
        for value, low, high in zip(rows["em"], rows["low"], rows["high"], strict=True)
    ]
    agents, benchmarks = rows["agent"].unique(), rows["benchmark"].unique()
    table = rows.pivot(index="benchmark", columns="agent", values="text").reindex(benchmarks)[agents]
    values = rows.pivot(index="benchmark", columns="agent", values="em")[agents]
    table.loc["mean"] = [f"{values[a].mean():.3f}" if values[a].notna().all() else None for a in agents]
    counts = rows.groupby("benchmark")["n_questions"].max().reindex(benchmarks)
    table.insert(0, "questions", [*map(str, counts), ""])
    return table.fillna("").rename_axis(columns=None).reset_index()


def match_plot(results: pd.DataFrame, name: str, title: str) -> Plot:
    """Exact match of each `agent` on each benchmark, with Wilson's 95% intervals."""
    rows = with_intervals(results, "em")
    agents, benchmarks = list(rows["agent"].unique()), list(rows["benchmark"].unique())
    with style():
        fig = Figure(figsize=(8.6, 1.3 + 0.5 * len(benchmarks)), layout="constrained")
        ax = fig.add_subplot()
        step = 0.6 / max(len(agents), 2)
        for k, agent in enumerate(agents):
            part = rows[rows["agent"] == agent]
            y = [benchmarks.index(b) + (k - (len(agents) - 1) / 2) * step for b in part["benchmark"]]
            color = _COLORS[k % len(_COLORS)]
            ax.hlines(y, part["low"], part["high"], color=color, lw=2.2, alpha=0.45)
            ax.plot(
                part["em"],
                y,
                _MARKERS[k % len(_MARKERS)],
                color=color,
                ms=6,
                label=agent,
                clip_on=False,
                zorder=3,
            )
        ax.set_yticks(range(len(benchmarks)), benchmarks)
        ax.set(xlim=(0, 1), ylim=(len(benchmarks) - 0.5, -0.5), xlabel="exact match")
        ax.grid(axis="y", visible=False)
        for y in range(1, len(benchmarks)):
            ax.axhline(y - 0.5, color="#E4E4E4", lw=0.7)
        fig.legend(
            *ax.get_legend_handles_labels(), loc="outside upper left", ncols=3, title=title, alignment="left"
        )
    sizes = rows["n_questions"]
    many = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    caption = (
        f"Exact match per benchmark, {many} questions each; lines: Wilson's 95% intervals over questions."
    )
    data = rows[["agent", "benchmark", "n_questions", "em", "low", "high"]]
    return Plot(name, fig, data, caption)
