"""Figure 1: what distinguishes the algorithms, drawn from their axes table and a worked example of each."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from stppo.config.algorithms import look
from stppo.figures.style import Plot, style
from stppo.record.tidy import BASELINE

INK, SOFT, FAINT = "#1D2530", "#5D6875", "#D9DDE2"
BAND, CHANGED = "#E9F3EA", "#FDEBD0"
# Column heading, width (relative), and characters per line of each axis in the matrix; others get the
# default.
COLUMNS = {
    "credit": ("credit", 1.95, 25),
    "pooling": ("pooling", 0.74, 10),
    "whiten": ("whiten", 0.68, 8),
    "ratio": ("ratio", 0.75, 10),
    "aggregation": ("aggregation", 1.1, 12),
    "clip": ("clip range", 1.3, 17),
    "surrogate": ("surrogate", 0.92, 12),
    "stabiliser": ("stabiliser", 1.63, 23),
    "loss aggregation": ("loss\naggregation", 0.95, 11),
}
ROW, PANEL = 0.36, 2.95  # heights in inches


def objectives_figure(table: pd.DataFrame, examples: Mapping[str, pd.DataFrame], axes: Sequence[str]) -> Plot:
    """Worked examples in two columns, above the matrix of all algorithms.

    table: index algorithm, columns `label` and the `axes`, as text. examples: by algorithm, one row per token
    with turn, token_ratio, advantage, low, high, ratio, clipped, gradient, divisor and step.
    """
    rows = -(-len(examples) // 2)
    heights = [PANEL * rows + 0.7, ROW * (len(table) + 1.6)]
    title = _examples_title(table, examples)
    with style():
        fig = Figure(figsize=(10.0, sum(heights)), layout="constrained")
        fig.get_layout_engine().set(h_pad=0.05, w_pad=0.05)
        above, below = fig.subfigures(2, 1, height_ratios=heights)
        above.suptitle(title, x=0.012, ha="left")
        panels = np.atleast_2d(above.subfigures(rows, 2, wspace=0.03, hspace=0.03)).flat
        limits = _limits(examples)
        for panel, (algorithm, example) in zip(panels, examples.items(), strict=False):
            _panel(panel, table.loc[algorithm], example, look(algorithm).color, limits)
        _legend(above)
        below.suptitle(_matrix_title(table, axes), x=0.012, ha="left")
        _matrix(below.subplots(), table, axes)
    caption = (
        "Schematic, from the algorithms' configs. Above: a made-up trajectory, its token ratios and the "
        "signs of its advantages (+, −) the same in all panels; ratios, clipped terms, gradients by "
        "log-probability (times |y|) and divisors are computed by the objectives themselves, ‖C‖ over the "
        "log-probabilities of this one trajectory. Below: every algorithm's choice on each axis; shaded "
        "where it differs from token PPO."
    )
    stacked = pd.concat(dict(examples), names=["algorithm"])
    tables = {"example": stacked.reset_index(level=0).reset_index(drop=True)}
    return Plot("objectives", fig, table.reset_index(), caption, tables, title)


def _examples_title(table: pd.DataFrame, examples: Mapping[str, pd.DataFrame]) -> str:
    """What the algorithms do to the same tokens: how many they clip, and in how many turns these stand."""
    told, n_tokens = [], 0
    for name, frame in examples.items():
        clipped = frame[(frame["turn"] >= 0) & (frame["clipped"] > 0)]
        n_tokens = int((frame["turn"] >= 0).sum())
        turns = clipped["turn"].nunique()
        told.append(f"{table.loc[name, 'label']} {len(clipped)} in {turns} turn{'s' if turns != 1 else ''}")
    text = f"Of the same {n_tokens} made-up tokens are clipped: by {', '.join(told)}"
    return textwrap.fill(text, 92, break_on_hyphens=False)


def _matrix_title(table: pd.DataFrame, axes: Sequence[str]) -> str:
    """In how many choices the algorithms differ from token PPO."""
    others = table.drop(index=BASELINE)
    counts = (others[list(axes)] != table.loc[BASELINE, list(axes)]).sum(axis=1)
    low, high = counts.min(), counts.max()
    many = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"Every algorithm differs from {table.loc[BASELINE, 'label']} in {many} of {len(axes)} choices "
        "(shaded)"
    )


def _limits(examples: Mapping[str, pd.DataFrame]) -> tuple[float, float, float]:
    """Shared by all panels: lowest and highest ratio, largest gradient."""
    every = pd.concat(examples.values())
    ratios = every[["ratio", "token_ratio"]].to_numpy()
    return np.nanmin(ratios) - 0.1, np.nanmax(ratios) + 0.42, np.nanmax(every["gradient"].abs()) * 1.15


def _panel(
    panel: SubFigure, row: pd.Series, example: pd.DataFrame, color: str, limits: tuple[float, float, float]
) -> None:
    upper, strip, lower = panel.subplots(3, 1, sharex=True, height_ratios=(3.2, 0.55, 1.6))
    shared = f"one ratio per {row['ratio']}" + (
        "" if row["aggregation"] == "–" else f", {row['aggregation']}"
    )
    upper.set_title(row["label"], fontweight="bold", color=color, fontsize=11.5, pad=16)
    said = f"{shared}; stabiliser: {row['stabiliser']}"
    upper.text(0, 1.04, said, transform=upper.transAxes, color=SOFT, fontsize=8.8)
    _ratios(upper, row["ratio"] == "token", example, color, limits)
    _strip(strip, example)
    _gradients(lower, example, color, limits[2])
    for ax in (upper, strip, lower):
        ax.grid(False)
        ax.tick_params(bottom=False, labelbottom=False)
        ax.spines["bottom"].set_visible(False)
    lower.set_xlim(-0.7, len(example) - 0.3)


def _ratios(
    ax: Axes, per_token: bool, example: pd.DataFrame, color: str, limits: tuple[float, float, float]
) -> None:
    agent = example[example["turn"] >= 0]
    low, high = example["low"].iloc[0], example["high"].iloc[0]
    ax.axhspan(low, high, color=BAND, zorder=0)
    ax.axhline(1, color=SOFT, linewidth=0.8, zorder=1)
    # Tokens of a turn that share ratio and fate are one block.
    blocks = agent.groupby("position" if per_token else ["turn", "ratio", "clipped"])
    for _, block in blocks:
        centre, width = block["position"].mean(), len(block) - 0.26
        fill = {"facecolor": "white", "hatch": "/////"} if block["clipped"].any() else {"facecolor": color}
        height = block["ratio"].iloc[0] - 1
        ax.bar(centre, height, width, bottom=1, edgecolor=color, linewidth=0.9, zorder=2, **fill)
    if not per_token:
        ax.plot(
            agent["position"],
            agent["token_ratio"],
            "o",
            color=INK,
            markersize=4,
            mec="white",
            mew=0.6,
            zorder=4,
        )
    for turn, tokens in agent.groupby("turn"):
        centre = tokens["position"].mean()
        ax.text(centre, limits[1] - 0.06, f"turn {turn + 1}", ha="center", va="top", color=SOFT, fontsize=8.5)
    clipped = f"{agent['clipped'].sum():.0f} of {len(agent)} tokens clipped"
    ax.text(1, 0.02, clipped, transform=ax.transAxes, ha="right", va="bottom", color=SOFT, fontsize=8.5)
    ax.set_ylim(limits[0], limits[1])
    ticks = [low, 1, high] if high - low > 0.2 else [1]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_ylabel("ratio w")


def _strip(ax: Axes, example: pd.DataFrame) -> None:
    for token in example.itertuples():
        agent = token.turn >= 0
        ax.add_patch(
            Rectangle(
                (token.position - 0.44, 0.1),
                0.88,
                0.8,
                facecolor="white" if agent else FAINT,
                edgecolor=SOFT if agent else FAINT,
                linewidth=0.8,
            )
        )
        if agent:
            sign = "+" if token.advantage > 0 else "−"
            ax.text(token.position, 0.47, sign, ha="center", va="center", fontsize=9, color=INK)
    ax.set_ylim(0, 1)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)


def _gradients(ax: Axes, example: pd.DataFrame, color: str, largest: float) -> None:
    agent = example[example["turn"] >= 0]
    divisor = example["divisor"].iloc[0]
    if divisor != 1:
        before = {"facecolor": "none", "edgecolor": SOFT, "linewidth": 0.9, "linestyle": ":"}
        ax.bar(agent["position"], agent["gradient"], 0.74, **before)
        ax.text(
            1,
            0,
            f"all divided by {divisor:.2f}",
            transform=ax.transAxes,
            ha="right",
            color=SOFT,
            fontsize=8.5,
        )
    ax.bar(agent["position"], agent["step"], 0.74, color=color)
    ax.axhline(0, color=SOFT, linewidth=0.8)
    ax.set_ylim(-largest, largest)
    ax.set_yticks([0], ["0"])
    ax.set_ylabel("gradient")


def _legend(fig: SubFigure) -> None:
    handles = [
        Patch(facecolor=BAND, label="clip range"),
        Patch(facecolor=SOFT, label="ratio used"),
        Patch(facecolor="white", edgecolor=SOFT, hatch="/////", label="clipped: no gradient of its own"),
        Line2D(
            [],
            [],
            color=INK,
            marker="o",
            markersize=4,
            linestyle="none",
            label="token ratios within the turn",
        ),
        Patch(facecolor=FAINT, label="environment token"),
        Patch(facecolor="none", edgecolor=SOFT, linestyle=":", label="gradient before the divisor"),
    ]
    fig.legend(
        handles=handles, loc="outside lower left", ncols=6, fontsize=8.5, columnspacing=1.2, handlelength=1.6
    )


def _matrix(ax: Axes, table: pd.DataFrame, axes: Sequence[str]) -> None:
    """Rows algorithms, columns axes; cells that differ from token PPO's are shaded."""
    first = 1.75
    columns = {name: COLUMNS.get(name, (name, 1.0, 12)) for name in axes}
    edges = first + np.cumsum([0.0, *(width for _, width, _ in columns.values())])
    ax.set_xlim(0, edges[-1])
    ax.set_ylim(len(table) + 0.05, -1.0)
    ax.axis("off")
    for (heading, _, _), left in zip(columns.values(), edges, strict=False):
        ax.text(left + 0.06, -0.45, heading, va="center", fontweight="bold", color=SOFT, fontsize=8.5)
    for i, (algorithm, row) in enumerate(table.iterrows()):
        ax.axhline(i, color=FAINT, linewidth=0.8)
        ax.add_patch(Rectangle((0.02, i + 0.32), 0.12, 0.36, color=look(algorithm).color))
        ax.text(0.2, i + 0.5, row["label"], va="center", fontweight="bold", fontsize=9, color=INK)
        for name, left, right in zip(columns, edges, edges[1:], strict=False):
            changed = row[name] != table.loc[BASELINE, name]
            if changed:
                ax.add_patch(
                    Rectangle((left, i + 0.05), right - left - 0.03, 0.9, color=CHANGED, linewidth=0)
                )
            text = textwrap.fill(row[name], columns[name][2])
            ax.text(
                left + 0.06,
                i + 0.5,
                text,
                va="center",
                fontsize=8.2,
                linespacing=1.05,
                color=INK if changed else SOFT,
            )
    ax.axhline(len(table), color=FAINT, linewidth=0.8)
