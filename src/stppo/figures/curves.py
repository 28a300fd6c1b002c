"""What the figures share: lines with their bands, panels against the iteration, a page with title, question
and source."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from stppo.figures.style import STYLE_NOTE, Plot, style
from stppo.figures.words import NAMES
from stppo.record.tidy import BASELINE, Runs
from stppo.stats import curve_band, fewest_worlds

WIDTH = 8.0  # inches
LEVEL, DRAWS = 0.95, 2000  # of the bands
TOGETHER = 4  # algorithms in one panel at most
GREY, INK, SOFT = "#B5B5B5", "#222222", "#777777"
BANDS = (
    f"Lines: means over worlds; bands: 95 % bootstrap intervals or, from fewer than {fewest_worlds(LEVEL)} "
    "worlds, the range of the worlds."
)


@dataclass(frozen=True)
class Panel:
    """One quantity to draw against the iteration."""

    column: str  # of `Runs.rows`
    label: str = ""  # by default what `NAMES` calls it
    log: bool = False  # the axis; means and bands are then those of the logarithm
    share: bool = False  # lies in [0, 1], and so do its bands
    idle: str = "not recorded"  # what a panel says where it has nothing to draw

    def __post_init__(self) -> None:
        name = NAMES.get(self.column, self.column.replace("_", " "))
        object.__setattr__(self, "label", self.label or textwrap.fill(name, 18))


# ---- lines --------------------------------------------------------------------------------------
def band(curves: pd.DataFrame, panel: Panel) -> pd.DataFrame:
    """Rows iteration, value, low, high, runs, worlds: the mean of the worlds and the band around it (see
    `BANDS`).

    curves: of `Runs.curves`. From one world low and high are NaN.
    """
    values = curves.to_numpy(float).T
    if panel.log:
        values = np.log(np.where(values > 0, values, np.nan))
    worlds = curves.columns.get_level_values("world").to_numpy()
    value, low, high, n_worlds = curve_band(values, worlds, DRAWS, LEVEL)
    if panel.log:
        value, low, high = np.exp([value, low, high])
    if panel.share:
        low, high = np.clip([low, high], 0, 1)
    columns = {"iteration": curves.index, "value": value, "low": low, "high": high}
    runs = np.isfinite(values).sum(axis=0)
    return pd.DataFrame({**columns, "runs": runs, "worlds": n_worlds, "kind": "mean"})


def bands(runs: Runs, algorithms: Sequence[str], panel: Panel) -> pd.DataFrame:
    """`band` of each algorithm of which the quantity was recorded, below one another; empty if of none."""
    found = {name: runs.curves(name, panel.column) for name in algorithms}
    keys = {"regime": runs.runs["regime"].iloc[0], "metric": panel.column}
    parts = [
        band(curves, panel).assign(**keys, algorithm=name) for name, curves in found.items() if len(curves)
    ]
    return pd.concat(parts, ignore_index=True).dropna(subset="value") if parts else pd.DataFrame()


def examples(runs: Runs, algorithm: str, column: str, seeds: Sequence[int]) -> pd.DataFrame:
    """Single runs of an algorithm, as `bands` has its lines."""
    curves = runs.curves(algorithm, column)
    keys = {"regime": runs.runs["regime"].iloc[0], "metric": column, "algorithm": algorithm, "kind": "run"}
    parts = []
    for world, seed in (key for key in curves if key[1] in seeds):
        curve = curves[(world, seed)].dropna().rename("value").reset_index()
        parts.append(curve.assign(**keys, world=world, seed=seed))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def draw_lines(ax: Axes, lines: pd.DataFrame, looks: pd.DataFrame) -> None:
    """The lines of `bands` with their bands."""
    if lines.empty:
        return
    dashes = {name: "" if line == "-" else line[1] for name, line in looks["line"].items()}
    palette = dict(looks["color"])
    for name, line in lines.groupby("algorithm", sort=False):
        ax.fill_between(
            line["iteration"],
            line["low"],
            line["high"],
            color=palette[name],
            alpha=0.14,
            linewidth=0,
            zorder=2,
        )
    names = [name for name in looks.index if name in set(lines["algorithm"])]
    sns.lineplot(
        lines,
        x="iteration",
        y="value",
        hue="algorithm",
        style="algorithm",
        hue_order=names,
        style_order=names,
        palette={name: palette[name] for name in names},
        dashes={name: dashes[name] for name in names},
        estimator=None,
        linewidth=2,
        zorder=4,
        legend=False,
        ax=ax,
    )
    for name, line in lines.groupby("algorithm", sort=False):
        if len(line) == 1:  # a line of one point is none
            ax.plot(line["iteration"], line["value"], "o", color=palette[name], markersize=4, zorder=4)
    ax.set(xlabel="", ylabel="")


def draw_examples(ax: Axes, lines: pd.DataFrame, color: str) -> None:
    """Single runs, thin."""
    for _, line in lines.groupby("seed") if len(lines) else ():
        ax.plot(line["iteration"], line["value"], color=color, linewidth=0.9, alpha=0.55, zorder=3)


def start_line(ax: Axes, runs: pd.DataFrame, column: str = "start") -> None:
    """Dotted level of the warm starts of some runs, mean over worlds."""
    level = runs.groupby("world_seed")[column].mean().mean()
    ax.axhline(level, color=SOFT, linewidth=1, linestyle=(0, (1, 2)), zorder=1)


def finish_axis(ax: Axes, panel: Panel) -> None:
    """Whole iterations from 0, and a logarithmic axis with plain numbers."""
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.set_xlim(left=0)
    if panel.log:
        ax.set_yscale("log")


def set_limits(ax: Axes, panel: Panel, values: pd.Series) -> None:
    """The range of some lines, without the lowest 3 % on a logarithmic axis.

    The first updates after sampling have next to no divergence: their 1e-13 would leave no room for anything
    else.
    """
    values = values[(values > 0) | (not panel.log)].to_numpy(float)
    if not len(values):
        return
    if panel.log:
        low, high = np.quantile(values, 0.03) / 1.25, values.max() * 1.25
        if high / low < 3:
            low, high = low / 1.5, high * 1.5
    else:
        low, high = values.min(), values.max()
        if low < 0:  # explained variance has no floor
            low = max(low, np.quantile(values, 0.05) - 0.5 * np.ptp(np.quantile(values, [0.05, 0.95])))
        low, high = (0, high) if low >= 0 else (low, max(high, 0))
        spread = (high - low) or 1.0
        low, high = low - 0.05 * spread * (low < 0), high + 0.08 * spread
    ax.set_ylim(low, high)
    if panel.log:
        subs = (1.0,) if high / low > 300 else (1.0, 3.0) if high / low > 30 else (1.0, 2.0, 5.0)
        ax.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: plain(x)))
        ax.yaxis.set_minor_formatter(NullFormatter())


def plotted(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The parts of a figure's data as one table."""
    keys = ["regime", "metric", "algorithm", "kind", "world", "seed", "iteration"]
    names = [*keys, "value", "low", "high", "runs", "worlds"]
    present = [part.reindex(columns=names).astype(object) for part in parts if len(part)]
    integers = dict.fromkeys(("world", "seed", "iteration", "runs", "worlds"), "Int64")
    table = pd.concat(present, ignore_index=True)
    return table.astype({**integers, **dict.fromkeys(("value", "low", "high"), "float64")})


def top_of(data: pd.DataFrame) -> float:
    """Upper end of an axis of successes, from `value` and `high` of what was drawn: 1, or less where nothing
    comes near."""
    highest = np.nanmax(data.reindex(columns=["value", "high"]).to_numpy(float))
    return 1.02 if highest > 0.6 else max(1.1 * highest, 0.1)


# ---- words --------------------------------------------------------------------------------------
def plain(value: float) -> str:
    """At most four significant digits, as people write learning rates: 3.5e-4, 0.25, 8."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _range(values: Sequence[float]) -> str:
    known = sorted({plain(value) for value in values if math.isfinite(value)}, key=float)
    return "" if not known else known[0] if len(known) == 1 else f"{known[0]}–{known[-1]}"


def source_of(runs: Runs) -> str:
    """Model, world, setting and runs in one short line."""
    table, parts = runs.runs, []
    if names := sorted(set(table["policy"].dropna())):
        millions = table["policy_parameters"].dropna().astype(float) / 1e6
        size = _range([float(f"{value:.2g}") for value in millions])
        parts.append(f"{', '.join(names)} policy" + (f" ({size} M)" if size else ""))
    parts.append(f"{', '.join(sorted(set(table['world_name'])))} world")
    words = {"learning_rate": "learning rate {}", "epochs": "{} epoch{s}", "staleness": "staleness {}"}
    words |= {"iterations": "{} iteration{s}"}
    for name, text in words.items():
        if found := _range(table[name]):
            parts.append(text.format(found, s="" if found == "1" else "s"))
    arms = table.groupby(["regime", "algorithm"])["world_seed"].agg(["nunique", "size"])
    n_worlds, each = _range(arms["nunique"]), _range(arms["size"])
    where = f"{n_worlds} world{'s' if n_worlds != '1' else ''}"
    if n_worlds == each != "1":
        return " · ".join([*parts, f"{where}, one run each"])
    return " · ".join([*parts, f"{each} run{'s' if each != '1' else ''} each in {where}"])


# ---- the page -----------------------------------------------------------------------------------
def line_handles(looks: pd.DataFrame) -> list[Line2D]:
    """Legend entries of algorithms (`Runs.looks`)."""
    return [
        Line2D([], [], color=row.color, linestyle=row.line, linewidth=2, label=row.label)
        for row in looks.itertuples()
    ]


def start_handle(runs: pd.DataFrame) -> Line2D:
    """Legend entry of the level before training (`Runs.runs`), of more samples than one evaluation has."""
    on = _range(runs["start_samples"].replace(0, math.nan).astype(float))
    label = f"before training (sampled {on} times)" if on else "before training"
    return Line2D([], [], color=SOFT, linewidth=1, linestyle=(0, (1, 2)), label=label)


def thin_handle(label: str, color: str = "#555555") -> Line2D:
    """Legend entry of a single run."""
    return Line2D([], [], color=color, linewidth=0.9, alpha=0.7, label=label)


def baseline_handle(looks: pd.DataFrame) -> Line2D:
    """Legend entry of the baseline drawn in grey."""
    return Line2D([], [], color=GREY, linewidth=1.8, label=f"{looks.loc[BASELINE, 'label']}, for comparison")


def page(
    title: str,
    question: str,
    source: str,
    body: float,
    handles: Sequence[Line2D | Patch] = (),
) -> Figure:
    """An empty figure of `body` inches below a title, a question and a legend and above a source line.

    Call within `style()`; panels placed in it keep clear of the texts.
    """
    texts = [
        (_in_lines(title, int(WIDTH * 9.3)), 13, "bold", "#1D2530", 0.235),
        (_in_lines(question, int(WIDTH * 14.2)), 9.5, "normal", "#555555", 0.18),
    ]
    columns = _legend_columns([str(handle.get_label()) for handle in handles])
    legend = 0.21 * -(-len(handles) // columns) + 0.06 if handles else 0.0
    head = 0.14 + sum(line * (text.count("\n") + 1) + 0.05 for text, *_, line in texts) + legend
    below = _in_lines(source, int(WIDTH * 17))
    foot = 0.12 + 0.15 * (below.count("\n") + 1)
    height = head + body + foot
    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    rect = (0, foot / height, 1, (body - 0.02) / height)
    fig.get_layout_engine().set(rect=rect, h_pad=0.04, w_pad=0.05)
    y = height - 0.12
    for text, size, weight, color, line in texts:
        at = {"va": "top", "ha": "left", "fontsize": size, "fontweight": weight, "color": color}
        fig.text(0.1 / WIDTH, y / height, text, linespacing=1.2, **at)
        y -= line * (text.count("\n") + 1) + 0.05
    fig.text(0.1 / WIDTH, 0.1 / height, below, va="bottom", ha="left", fontsize=7.7, color=SOFT)
    if handles:
        legend = fig.legend(
            handles=list(handles),
            loc="upper left",
            bbox_to_anchor=(0.04 / WIDTH, (y + 0.04) / height),
            ncols=columns,
            borderaxespad=0,
            columnspacing=1.4,
            handletextpad=0.5,
        )
        legend.set_in_layout(False)
    return fig


def _in_lines(text: str, width: int) -> str:
    """Lines of at most `width` characters, in which no number is parted from its %."""
    unbroken = text.replace(" %", "\u00a0%")  # a space at which textwrap breaks no line
    return textwrap.fill(unbroken, width, break_on_hyphens=False).replace("\u00a0", " ")


def _legend_columns(labels: Sequence[str]) -> int:
    """The most columns in which entries of this length fit."""
    inches = [0.55 + 0.083 * len(label) for label in labels]
    for columns in range(len(labels), 1, -1):
        rows = -(-len(labels) // columns)
        widths = [max(inches[i : i + rows]) for i in range(0, len(labels), rows)]
        if sum(widths) <= WIDTH - 0.1:
            return -(-len(labels) // rows)
    return 1


def name_rows(ax: Axes, labels: Sequence[str], size: float = 9) -> None:
    """A horizontal axis of names, the first on top."""
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0, labelcolor="#333333", labelsize=size)


# ---- panels against the iteration ---------------------------------------------------------------
def panel_figure(
    runs: Runs,
    name: str,
    panels: Sequence[Panel],
    title: str,
    question: str,
    caption: str = "",
    filling: bool = False,
    shared: bool = True,
) -> Plot | None:
    """Quantities against the iteration: up to four algorithms together, more in columns with the baseline in
    grey.

    filling: grey ground behind the iterations in which the queue of old batches fills; shared: one axis of a
    share for all columns. Panels of which nothing was recorded are left out; None if that is all of them.
    """
    lines = {panel: bands(runs, runs.algorithms, panel) for panel in panels}
    lines = {panel: found for panel, found in lines.items() if len(found)}
    if not lines:
        return None
    looks, chunks = runs.looks, _chunks(runs)
    behind = len(chunks) > 1 and BASELINE in runs.algorithms
    handles = [] if len(chunks) > 1 else line_handles(looks)
    handles += [baseline_handle(looks)] if behind else []
    filling = filling and runs.filled > 1
    handles += [Patch(facecolor="#E4E4E4", label="queue of old batches fills")] if filling else []
    with style():
        fig, cells = _cells(title, question, source_of(runs), handles, chunks, list(lines))
        for (panel, i), ax in cells.items():
            drawn = lines[panel]
            mine = drawn[drawn["algorithm"].isin(chunks[i])]
            if filling:
                ax.axvspan(0, runs.filled, color="#EDEDED", linewidth=0, zorder=0)
            if len(mine) and behind and BASELINE not in chunks[i]:
                base = drawn[drawn["algorithm"] == BASELINE]
                ax.plot(base["iteration"], base["value"], color=GREY, linewidth=1.6, zorder=1)
            draw_lines(ax, mine, looks)
            if mine.empty:
                ax.text(
                    0.5, 0.5, panel.idle, transform=ax.transAxes, ha="center", color="#888888", fontsize=8
                )
            finish_axis(ax, panel)
        for (panel, i), ax in cells.items():
            drawn = lines[panel]
            apart = panel.share and not shared
            mine = drawn[drawn["algorithm"].isin([BASELINE, *chunks[i]])] if apart else drawn
            set_limits(ax, panel, mine["value"])
        if len(chunks) > 1:
            for i, chunk in enumerate(chunks):
                _name_lines(cells[(next(iter(lines)), i)], looks.loc[chunk], max(map(len, chunks)))
        _label(cells, chunks, shared)
    caption = " ".join(filter(None, (question, caption, BANDS, STYLE_NOTE)))
    return Plot(name, fig, plotted(list(lines.values())), caption, title=title)


def _chunks(runs: Runs) -> list[list[str]]:
    """At most `TOGETHER` algorithms to a column: those with a critic, then those without, in their order."""
    algorithms = runs.algorithms
    if len(algorithms) <= TOGETHER:
        return [algorithms]
    with_critic = set(runs.runs.loc[runs.runs["critic"], "algorithm"])
    families = ([name for name in algorithms if (name in with_critic) == critic] for critic in (True, False))
    return [names[i : i + TOGETHER] for names in families for i in range(0, len(names), TOGETHER)]


Cells = Mapping[tuple[Panel, int], Axes]


def _cells(
    title: str,
    question: str,
    source: str,
    handles: Sequence[Line2D | Patch],
    chunks: Sequence[Sequence[str]],
    panels: Sequence[Panel],
) -> tuple[Figure, Cells]:
    """Axes by (panel, number of the chunk): quantities side by side for one chunk, else rows of columns of
    chunks."""
    if len(chunks) == 1:
        n_columns = 3 if len(panels) in (3, 5, 6) else min(2, len(panels))
        n_rows = -(-len(panels) // n_columns)
        fig = page(title, question, source, 2.2 * n_rows + 0.25, handles)
        grid = list(fig.subplots(n_rows, n_columns, squeeze=False, sharex=True).flat)
        for ax in grid[len(panels) :]:
            ax.set_visible(False)
        return fig, {(panel, 0): ax for panel, ax in zip(panels, grid, strict=False)}
    n_columns = min(4 if len(chunks) > 3 else 3, len(chunks))
    n_blocks = -(-len(chunks) // n_columns)
    names = max(map(len, chunks)) * 0.19
    fig = page(title, question, source, n_blocks * (len(panels) * 1.42 + names + 0.3), handles)
    cells = {}
    for b, block in enumerate(np.atleast_1d(fig.subfigures(n_blocks, 1))):
        grid = block.subplots(len(panels), n_columns, squeeze=False, sharex=True)
        for (r, c), ax in np.ndenumerate(grid):
            if (i := b * n_columns + c) < len(chunks):
                cells[(panels[r], i)] = ax
            else:
                ax.set_visible(False)
    return fig, cells


def _label(cells: Cells, chunks: Sequence[Sequence[str]], shared: bool) -> None:
    """Names of quantities and iterations at the edges."""
    for (panel, _), ax in cells.items():
        place = ax.get_subplotspec()
        if len(chunks) == 1:
            ax.set_title(panel.label.replace("\n", " "), fontsize=10, color="#333333")
            below = place.num2 + place.get_gridspec().ncols >= len(cells)
        else:
            ax.tick_params(labelleft=place.is_first_col() or (panel.share and not shared))
            ax.set_ylabel(panel.label if place.is_first_col() else "")
            below = place.is_last_row()
        if below:
            ax.set_xlabel("iteration")
            ax.tick_params(labelbottom=True)


def _name_lines(ax: Axes, looks: pd.DataFrame, room: int) -> None:
    """The algorithms of a column, named above its first panel in their colours; `room` rows are kept free for
    them."""
    longest = looks["label"].str.len().max()
    legend = ax.legend(
        handles=line_handles(looks),
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        fontsize=6.2 if longest > 28 else 7.5 if longest > 20 else 8.5,  # else it touches the next column's
        borderaxespad=0.1,
        labelspacing=0.25,
        handlelength=2.2,
    )
    legend.set_in_layout(False)  # its width is not to move the panels apart; its height is that of this title
    ax.set_title("\n".join(" " * room), fontsize=9.5, pad=3)
