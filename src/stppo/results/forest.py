"""Forest plots: arms as rows, estimates with their intervals as columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stppo.results.captions import describe_setting
from stppo.results.drawing import WIDTH
from stppo.results.runs import Metrics
from stppo.results.style import Plot, look, style

ROW, HEADING, GAP = 0.235, 0.30, 0.12  # inches
SMALLEST_SPAN = 0.1  # of an axis of differences, to either side of 0
COLUMNS = {  # quantity of a comparison -> label of its panel
    "collapse_risk": "collapse risk",
    "extra_risk": "collapse risk,\nminus the default's",
    "final_success": "final success",
    "final_difference": "final success,\nminus the default's",
}
INTERVALS = (
    "Bars: 95 % bootstrap intervals over warm starts, then seeds, each on its own; those of risks smoothed by half a run at "
    "either bound, all others widened by Student's factor for their number of warm starts (three: × 2.2, six: × 1.3); none from "
    "a single warm start."
)


def forest(
    metrics: Metrics,
    name: str,
    title: str,
    what: str,
    tables: Mapping[str, pd.DataFrame],
    columns: Sequence[str] = ("collapse_risk", "final_success", "final_difference"),
    labels: Mapping[str, str] | None = None,
    role: str = "default",
) -> Plot | None:
    """Tables of `comparisons.compare` below one another, each under its heading; None without tables.

    A hollow diamond is the default of its table, whose value a dashed line continues; an arm without runs is named
    as such. `labels` renames columns, `role` says what the first arm of a table is.
    """
    if not tables:
        return None
    labels = COLUMNS | dict(labels or {})
    setting = describe_setting(
        metrics, {arm.split("/")[0] for table in tables.values() for arm in table["arm"]}
    )
    n_rows = sum(map(len, tables.values()))
    body = n_rows * ROW + sum(GAP + HEADING * bool(heading) for heading in tables)
    with style():
        fig = Figure(figsize=(WIDTH, body + 2.0), layout="constrained")
        axes = list(np.atleast_1d(fig.subplots(1, len(columns), sharey=True)))
        ticks: list[tuple[float, str]] = []
        y = 0.0
        for heading, table in tables.items():
            y += GAP + HEADING * bool(heading)
            for ax in axes if heading else ():
                ax.axhline(y - HEADING * 0.35, color="#DDDDDD", linewidth=0.8, zorder=0)
            axes[0].annotate(
                heading,
                (0, y - HEADING * 0.55),
                xycoords=("axes fraction", "data"),
                xytext=(-245, 0),
                textcoords="offset points",
                fontweight="bold",
                fontsize=9.5,
                va="center",
                annotation_clip=False,
            )
            places = [y + (i + 0.5) * ROW for i in range(len(table))]
            for ax, column in zip(axes, columns, strict=True):
                _column(ax, column, table, places)
            ticks += list(zip(places, map(_label, table.to_dict("records")), strict=True))
            y += len(table) * ROW
        axes[0].set_yticks([place for place, _ in ticks], [text for _, text in ticks])
        axes[0].set_ylim(y + 0.1, 0)
        for ax, column in zip(axes, columns, strict=True):
            ax.set_xlabel(labels[column])
            ax.tick_params(axis="y", length=0, labelsize=8.5, labelcolor="#333333")
            ax.grid(axis="y", visible=False)
            if column == "collapse_risk":
                ax.set_xlim(-0.03, 1.03)
            elif column == "final_success":
                right = min(ax.get_xlim()[1], 1.03)
                ax.set_xlim(-0.03 * right, right)
            else:  # a difference; small ones are not to look large, nor may an interval from two warm starts hide the others
                ax.axvline(0, color="#999999", linewidth=0.9, zorder=0)
                low, high = ax.get_xlim()
                ax.set_xlim(max(min(low, -SMALLEST_SPAN), -1.03), min(max(high, SMALLEST_SPAN), 1.03))
        fig.suptitle(textwrap.fill(title, 95), x=0.012, ha="left")
        fig.legend(
            handles=_handles(role),
            loc="outside lower center",
            ncols=4,
            title=f"{setting} · own measurement",
            title_fontproperties={"size": 8},
        ).get_title().set_color("#777777")
    data = pd.concat([table.assign(heading=heading) for heading, table in tables.items()], ignore_index=True)
    text = f"{what} Behind each arm: collapsed of all runs. {INTERVALS} Our own measurement: {setting}."
    return Plot(name, fig, data[["heading", *data.columns.drop("heading")]], text)


def _label(row: Mapping[str, object]) -> str:
    if not row["runs"]:
        return f"{row['label']}   not run"
    return f"{row['label']}   {row['collapsed']}/{row['runs']}"


def _column(ax: Axes, column: str, table: pd.DataFrame, places: Sequence[float]) -> None:
    """One quantity of one table: a mark and an interval for each row that has it."""
    for i, (row, y) in enumerate(zip(table.to_dict("records"), places, strict=True)):
        value, low, high = row[column], row[f"{column}_low"], row[f"{column}_high"]
        if math.isnan(value):
            continue
        color = look(row["arm"].split("/")[1]).color
        if math.isfinite(low):
            ax.plot([low, high], [y, y], color=color, linewidth=1.6, solid_capstyle="butt", zorder=2)
        if i == 0:
            ax.plot(
                [value, value],
                [places[0], places[-1] + ROW / 2],
                color=color,
                linewidth=0.8,
                linestyle=(0, (3, 3)),
                zorder=1,
            )
        marker = {"marker": "D", "markerfacecolor": "white"} if i == 0 else {"marker": "o"}
        ax.plot(
            [value], [y], color=color, markersize=6, markeredgewidth=1.3, linestyle="none", zorder=3, **marker
        )


def _handles(role: str) -> list[Line2D]:
    grey = "#666666"
    return [
        Line2D([], [], color=grey, marker="D", markerfacecolor="white", linestyle="none", label=role),
        Line2D([], [], color=grey, marker="o", linestyle="none", label="other arm"),
        Line2D([], [], color=grey, linewidth=1.6, label="95 % interval"),
        Line2D([], [], color=grey, linewidth=0.8, linestyle=(0, (3, 3)), label="level of the diamond"),
    ]
