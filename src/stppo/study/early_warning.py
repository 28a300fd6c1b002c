"""The picture of what an alarm on each signal before a crash would have been worth (`stppo.study.alarms`)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from stppo.figures.curves import name_rows, page, source_of
from stppo.figures.style import Plot, style
from stppo.figures.words import capital, few_words
from stppo.record.outcomes import LEARNED
from stppo.record.runs import Metrics
from stppo.stats import fewest_worlds, joint_level
from stppo.study.alarms import AHEAD, BUDGET, judged, watched

CHANCE = {"color": "#E69F00", "marker": "|", "markersize": 11, "markeredgewidth": 3, "linestyle": "none"}
INTERVAL = {
    "color": "#1D2530",
    "linewidth": 1.3,
    "path_effects": [withStroke(linewidth=3, foreground="white")],
}
BARS = 0.75  # of the axis; what is right of them holds words


def early_warning(metrics: Metrics) -> Plot | None:
    """What share of the crashes an alarm on each signal announced, in worlds that it was not tuned in."""
    table = judged(watched(metrics))
    if table.empty:
        return None
    title = _title(table)
    question = (
        "Does anything announce a crash? An alarm on each signal of training, tuned in one half of the "
        "worlds and tried in the other."
    )
    bars = {"alarm rang before": 1.0, "rang in the fall's own iteration": 0.25}
    handles = [Patch(color="#0061A8", alpha=alpha, label=word) for word, alpha in bars.items()]
    told = table["low"].notna().any()
    handles.append(Line2D([], [], label="by chance", **CHANCE))
    if told:
        handles.append(Line2D([], [], label="difference from chance, interval", **INTERVAL))
    with style():
        fig = page(title, question, source_of(metrics.all), 4.0, handles)
        _alarms(fig.subplots(), table)
    caption = (
        f"{question} A run counts if it learned (rose by {LEARNED:.2f}); a fall is the first evaluation "
        f"below half of its gain. An alarm announces a fall if it rings in the {AHEAD} iterations before; "
        f"thresholds allow {BUDGET:g} false alarm in 100 iterations where they are tuned. By chance: in what "
        "share of the runs that went on and did not fall then the same alarm rings in the same iterations, "
        "mean over the crashes. "
    )
    if told:
        caption += (
            "Line: interval over worlds of the difference from chance, drawn about the bar's end, clear "
            "where it lies right of chance's mark; those of all signals hold at once with 95 % (Bonferroni). "
        )
    caption += (
        "Ahead: median, in iterations; false: alarms in 100 iterations that no fall follows. Dark: the "
        "signal that did best in the half that it was tuned in."
    )
    return Plot("early_warning", fig, table, caption, title=title)


def _alarms(ax: Axes, table: pd.DataFrame) -> None:
    """A bar a signal: the share of crashes that its alarm announces, and what chance would."""
    drawn = table.sort_values(["announced", "lead"], ascending=False).reset_index(drop=True)
    early, by_then, chance = (
        drawn[name] / drawn["crashes"] for name in ("announced", "at_the_fall", "by_chance")
    )
    low, high = (
        chance + drawn["low"],
        chance + drawn["high"],
    )  # clear of chance's mark where the difference is
    right = np.fmax(np.fmax(early + by_then, chance), high)
    for y, row in drawn.iterrows():
        color = "#1D2530" if row["signal"] == "best" else "#0061A8"
        ax.barh(y, early[y], color=color, height=0.62)
        ax.barh(y, by_then[y], left=early[y], color=color, alpha=0.25, height=0.62)
        ax.plot([low[y], high[y]], [y, y], zorder=3, **INTERVAL)
        ax.plot(chance[y], y, zorder=4, **CHANCE)
        words = f"{row['lead']:g} ahead, " if row["announced"] else ""
        words += f"{row['false_alarms']:.1f} false"
        ax.text(right[y] + 0.02 * right.max(), y, words, va="center", fontsize=7.5, color="#555555")
    name_rows(ax, drawn["name"], 8.5)
    ax.set_xlim(0, right.max() / BARS)
    ticks = [tick for tick in (0, 0.25, 0.5, 0.75, 1) if tick < right.max() + 0.25]
    ax.set_xticks(ticks, [f"{100 * tick:.0f} %" for tick in ticks])
    ax.spines["bottom"].set_bounds(0, ticks[-1])
    ax.set_xlabel("crashes announced", x=0, ha="left")
    ax.set_title(
        "iterations ahead, false alarms in 100 iterations", loc="right", fontsize=7.5, color="#555555"
    )
    ax.grid(axis="y", visible=False)


def _title(table: pd.DataFrame) -> str:
    """What an alarm chosen on other worlds announces, and how many signals do clearly better than chance."""
    each = table[table["signal"] != "best"]
    best = table.set_index("signal").loc["best"]
    title = f"an alarm chosen on other worlds announces {best['announced']} of {best['crashes']} crashes"
    if math.isfinite(best["by_chance"]):
        title += f" (by chance {best['by_chance']:.1f})"
    if best["announced"]:
        title += f", {best['lead']:g} iteration{'' if best['lead'] == 1 else 's'} ahead at the median"
    if best["worlds"] < fewest_worlds(joint_level(len(each))):
        return capital(f"{few_words(best['worlds'])}: {title}")
    return capital(f"{title}; {(each['low'] > 0).sum()} of {len(each)} signals beat chance")
