"""What methods that tolerate off-policy data have in common: two signals of their first iterations against where they end."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from scipy import stats

from stppo.figures.beginnings import EARLY
from stppo.figures.curves import page, source_of
from stppo.figures.findings import signed
from stppo.figures.style import Plot, style
from stppo.record.runs import Metrics
from stppo.study.benchmark import BASELINE, REGIME, leaderboard

PUSH = "negative_advantage_gradient_share"
PLACES = (  # of a name: offset from its dot in points, and how it is aligned there
    ((5, 0), "left", "center_baseline"),
    ((-5, 0), "right", "center_baseline"),
    ((0, 5), "center", "bottom"),
    ((0, -5), "center", "top"),
)
AWAY = tuple(  # of the baseline's name where the crowd leaves no room beside its dot: a line leads there
    ((distance * across, distance * along), ("left", "center", "right")[1 - across], "center")
    for distance in (30, 45, 60)
    for across in (1, -1, 0)
    for along in (0.5, -0.5, 1, -1, 0)
    if across or along
)
LINE = {"arrowstyle": "-", "color": "#777777", "linewidth": 0.6}
RADIUS = 4  # of a dot, in pixels
PART = 4  # a quarter of the methods: those that push least, those that end highest


def signals_of_methods(metrics: Metrics) -> pd.DataFrame:
    """One row per method that was run at every point, the highest first: method, label, final (sampled success, mean over
    points), push (share of the gradient, by |d loss / d log-prob|, on tokens with A < 0; mean over points and over the first
    `EARLY` iterations) and entropy_change (nats; the tenth iteration's less the first's, mean over points)."""
    table = leaderboard(metrics)
    rows = metrics.iterations[metrics.iterations["regime"] == REGIME]
    rows = rows[rows["iteration"] <= EARLY]
    push = rows.groupby("algorithm")[PUSH].mean()
    entropy = rows.pivot_table(index="algorithm", columns="iteration", values="entropy").reindex(
        columns=[1, EARLY]
    )
    whole = table[table["complete"]][["method", "label", "best_of_1"]].rename(columns={"best_of_1": "final"})
    return whole.assign(
        push=push.reindex(whole["method"]).to_numpy(),
        entropy_change=(entropy[EARLY] - entropy[1]).reindex(whole["method"]).to_numpy(),
    ).reset_index(drop=True)


def signals_figure(metrics: Metrics) -> Plot | None:
    """Where methods end against how much of their gradient pushes failures down, and against how their entropy moves; None
    where fewer than `PART` methods were run at every point or the signals were not recorded."""
    table = signals_of_methods(metrics).dropna()
    if len(table) < PART:
        return None
    few = -(-len(table) // PART)
    least, highest = (set(part["method"]) for part in (table.nsmallest(few, "push"), table.head(few)))
    both = len(least & highest)
    title = (
        f"Of the {few} methods that push least at failures, {both} {'is' if both == 1 else 'are'} among the {few} that end highest "
        f"(by chance {few * few / len(table):.1f})"
    )
    if few == 1:
        title = f"The method that pushes least at failures {'ends' if least == highest else 'does not end'} highest"
    question = f"What do methods that tolerate old data have in common? Means over the settings; signals of the first {EARLY} iterations."
    panels = {
        "push": "share of the gradient that comes from failures (A < 0)",
        "entropy_change": f"entropy after {EARLY} iterations, less the first's (nats)",
    }
    ranks = {name: stats.spearmanr(table[name], table["final"]).statistic for name in panels}
    with style():
        fig = page(title, question, source_of(metrics, [REGIME], list(table["method"])), 3.7)
        FigureCanvasAgg(fig)
        axes = fig.subplots(1, 2, sharey=True)
        for ax, (name, label) in zip(axes, panels.items(), strict=True):
            for row in table.itertuples():
                ax.plot(
                    getattr(row, name), row.final, "o", color=metrics.look(row.method).color, markersize=6
                )
            ax.set_xlabel(label, fontsize=8.5)
            ax.set_title(f"rank correlation {signed(ranks[name])}", fontsize=9.5, color="#333333")
            ax.margins(x=0.22)
        axes[1].axvline(0, color="#777777", linewidth=1, linestyle=(0, (1, 2)))
        axes[0].set(ylim=(0, 1), ylabel="final success, sampled")
        axes[0].set_xlim(left=-0.03)  # a share
        fig.draw_without_rendering()
        for ax, name in zip(axes, panels, strict=True):
            _name_dots(ax, table, name)
    caption = (
        f"{question} Left: of the sum of |d loss / d log-prob| over tokens, the part on tokens with a negative advantage. Dots "
        "without room for a name are in the table. This says what goes along with tolerance, not what causes it."
    )
    return Plot("benchmark_signals", fig, table, caption, title=title)


def _name_dots(ax: Axes, table: pd.DataFrame, column: str) -> None:
    """Names beside dots, the outermost first, wherever no dot and no earlier name is in the way."""
    renderer = ax.figure.canvas.get_renderer()
    dots = dict(zip(table.index, ax.transData.transform(table[[column, "final"]].to_numpy()), strict=True))
    apart = (table["final"] - table["final"].median()).abs() + (table[column] - table[column].median()).abs()
    apart[table["method"] == BASELINE] = math.inf  # the baseline is named first
    order = apart.sort_values(ascending=False, kind="stable").index
    tries = [(i, PLACES, None) for i in order]
    tries += [(i, AWAY, LINE) for i in order if table.loc[i, "method"] == BASELINE]
    named: dict[int, Bbox] = {}
    for i, places, line in tries:
        for shift, across, along in places if i not in named else ():
            text = ax.annotate(
                table.loc[i, "label"],
                (table.loc[i, column], table.loc[i, "final"]),
                shift,
                textcoords="offset points",
                fontsize=6.8,
                color="#444444",
                ha=across,
                va=along,
                arrowprops=line,
            )
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer).expanded(1.04, 1.15)  # without its line
            near = box.padded(RADIUS)
            if (
                ax.bbox.contains(box.x0, box.y0)
                and ax.bbox.contains(box.x1, box.y1)
                and not any(box.overlaps(other) for other in named.values())
                and not any(near.contains(*dot) for k, dot in dots.items() if k != i)
            ):
                named[i] = box
                break
            text.remove()
