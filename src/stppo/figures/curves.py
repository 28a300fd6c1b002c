"""What the figures share: curves of runs with their bands, panels, and a page with its title, question and source."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from stppo.config.algorithms import in_order
from stppo.figures.style import STYLE_NOTE, Plot, style
from stppo.record.runs import Metrics
from stppo.stats import curve_band, fewest_worlds

WIDTH = 8.0  # inches
LEVEL, DRAWS = 0.95, 2000  # of the bands
TOGETHER = 4  # algorithms in one panel at most
BASELINE = "token_ppo"  # drawn in grey behind the others
GREY = "#B5B5B5"
SUCCESS, GREEDY = "success", "success_greedy"  # columns that come from the evaluations: temperature 1, and 0
BANDS = (
    f"Lines: interquartile means over worlds; bands: {LEVEL:.0%} bootstrap intervals over worlds or, from fewer than "
    f"{fewest_worlds(LEVEL)} worlds, the range of the worlds."
).replace("%", " %")


@dataclass(frozen=True)
class Panel:
    """One quantity to draw against the iteration."""

    column: str  # of iterations.parquet, `SUCCESS`, `GREEDY` or `advantage_variance`
    label: str
    log: bool = False
    share: bool = False  # lies in [0, 1], and so do its bands
    idle: str = ""  # what a panel says where none of its algorithms `moves`


# ---- data ---------------------------------------------------------------------------------------
def curves_of(metrics: Metrics, regime: str, algorithm: str, column: str) -> pd.DataFrame:
    """One row per iteration, one column per run; columns are (world, seed). NaN where a run has no value.

    Success counts as 0 after a run stopped for a non-finite loss or gradient, as in `results.outcomes`.
    """
    success = column in (SUCCESS, GREEDY)
    rows = metrics.rows_of(regime, algorithm, evaluations=success)
    if success:
        rows = rows[rows["temperature"] == (0.0 if column == GREEDY else 1.0)]
    name = {"advantage_variance": "advantage_raw_std", SUCCESS: "success", GREEDY: "success"}.get(
        column, column
    )
    if name not in rows or rows.empty:
        return pd.DataFrame()
    curves = rows.pivot(index="iteration", columns="seed", values=name).astype("float64")
    curves = curves.replace([np.inf, -np.inf], np.nan)
    if column == "advantage_variance":
        curves = curves**2
    records = [r for r in metrics.runs if (r["regime"], r["algorithm"]) == (regime, algorithm)]
    stopped = [r["seed"] for r in records if r.get("non_finite") and r["seed"] in curves]
    if success and stopped:
        every = metrics.evaluations[metrics.evaluations["regime"] == regime]
        every = every.loc[every["temperature"] == (0.0 if column == GREEDY else 1.0), "iteration"].unique()
        curves = curves.reindex(curves.index.union(every))
        curves[stopped] = curves[stopped].mask(
            curves[stopped].bfill().isna(), 0.0
        )  # from its last evaluation on
    worlds = metrics.arm(regime, algorithm).set_index("seed")["world_seed"]
    keys = [(int(worlds[seed]), seed) for seed in curves]
    curves.columns = pd.MultiIndex.from_tuples(keys, names=["world", "seed"])
    return curves.sort_index().dropna(how="all").rename_axis("iteration")


def moves(metrics: Metrics, regime: str, algorithm: str, column: str) -> bool:
    """Whether a quantity says anything of an algorithm's runs: recorded and somewhere finite, a divisor other than 1, and a
    norm of the surrogate's gradient that is not that of the whole gradient (by the recorded config or, without it, by the
    numbers to 1e-6)."""
    rows = metrics.rows_of(regime, algorithm)
    if column in (SUCCESS, GREEDY):
        return len(curves_of(metrics, regime, algorithm, column)) > 0
    column = {"advantage_variance": "advantage_raw_std"}.get(column, column)
    if column not in rows or not np.isfinite(rows[column]).any():
        return False
    if column == "stabilizer_divisor":
        return not np.allclose(rows[column].dropna(), 1, rtol=1e-6)
    if column == "ppo_gradient_norm":
        records = [r for r in metrics.runs if (r["regime"], r["algorithm"]) == (regime, algorithm)]
        if any(_loss_is_the_surrogate(record) for record in records):
            return False
        both = rows[[column, "gradient_norm"]].to_numpy(float)
        return not np.allclose(*both.T, rtol=1e-6, atol=0, equal_nan=True)
    return True


def _loss_is_the_surrogate(record: dict) -> bool:
    """Whether the recorded config adds no regulariser to the surrogate."""
    training, objective = record.get("training"), record.get("objective")
    if not training or not objective:
        return False
    kind = str(objective.get("stabilizer", {}).get("_target_", "")).rpartition(".")[2]
    added = [training.get(f"{name}_coefficient") for name in ("entropy", "kl")]
    return kind in ("NoStabilizer", "ClippingBiasNorm") and added == [0, 0]


def band(curves: pd.DataFrame, panel: Panel) -> pd.DataFrame:
    """Rows iteration, value, low, high, runs, worlds: the middle of the worlds and the band around it (see `BANDS`).

    On logarithms where the panel's axis is logarithmic. From one world low and high are NaN.
    """
    values = curves.to_numpy().T
    if panel.log:
        values = np.log(np.where(values > 0, values, np.nan))
    worlds = curves.columns.get_level_values("world").to_numpy()
    value, low, high = curve_band(values, worlds, DRAWS, LEVEL)
    by_world = pd.DataFrame(values).groupby(worlds).mean()
    n_worlds = by_world.notna().sum().to_numpy()
    few = n_worlds < fewest_worlds(LEVEL)
    low, high = np.where(few, by_world.min(), low), np.where(few, by_world.max(), high)
    low, high = (np.where(n_worlds > 1, edge, np.nan) for edge in (low, high))
    if panel.log:
        value, low, high = np.exp([value, low, high])
    if panel.share:
        low, high = np.clip([low, high], 0, 1)
    runs = np.isfinite(values).sum(axis=0)
    columns = {"iteration": curves.index, "value": value, "low": low, "high": high}
    return pd.DataFrame({**columns, "runs": runs, "worlds": n_worlds, "kind": "iqm"})


def family_chunks(metrics: Metrics, regime: str, algorithms: Sequence[str]) -> list[list[str]]:
    """At most `TOGETHER` algorithms to a panel: those with a critic, then those without, in their order."""
    if len(algorithms) <= TOGETHER:
        return [list(algorithms)]
    losses = metrics.iterations.reindex(columns=["regime", "algorithm", "critic_loss"]).dropna()
    with_critic = set(losses.loc[losses["regime"] == regime, "algorithm"])
    chunks = []
    for critic in (True, False):
        family = [name for name in algorithms if (name in with_critic) == critic]
        chunks += [family[i : i + TOGETHER] for i in range(0, len(family), TOGETHER)]
    return chunks


def queue_filled(metrics: Metrics, regime: str) -> int:
    """First iteration at which batches are as old as they get; before it the queue of stale batches fills. 1: at once."""
    if "staleness_iterations" not in metrics.iterations:
        return 1
    rows = metrics.iterations[metrics.iterations["regime"] == regime].dropna(subset="staleness_iterations")
    full = rows.loc[rows["staleness_iterations"] == rows["staleness_iterations"].max(), "iteration"]
    return int(full.min()) if len(full) else 1


def plotted(rows: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The parts of a figure's data as one table."""
    keys = ["regime", "metric", "algorithm", "kind", "world", "seed", "iteration"]
    names = [*keys, "value", "low", "high", "runs", "worlds"]
    present = [part for part in rows if len(part)]
    table = pd.concat([part.reindex(columns=names).astype(object) for part in present], ignore_index=True)
    integers = dict.fromkeys(("world", "seed", "iteration", "runs", "worlds"), "Int64")
    return table.astype({**integers, **dict.fromkeys(("value", "low", "high"), "float64")})


def top_of(rows: Sequence[pd.DataFrame]) -> float:
    """Upper end of an axis of successes, from the `value` and `high` of what was drawn: 1, or less where nothing comes near."""
    highest = max(
        (np.nanmax(part[["value", "high"]].to_numpy(float)) if "high" in part else part["value"].max())
        for part in rows
    )
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


def source_of(metrics: Metrics, regimes: Sequence[str], algorithms: Sequence[str]) -> str:
    """Model, world, setting and runs in one short line."""
    runs = [r for r in metrics.runs if r["regime"] in regimes and r["algorithm"] in algorithms]
    parts = []
    if names := sorted({str(run["policy"]) for run in runs if run.get("policy")}):
        millions = [run["policy_parameters"] / 1e6 for run in runs if run.get("policy_parameters")]
        size = _range([float(f"{value:.2g}") for value in millions])
        size = f" ({size} M)" if size else ""
        parts.append(f"{', '.join(names)} policy{size}")
    parts.append(f"{', '.join(sorted({str(run['world']) for run in runs}))} world")
    settings = pd.DataFrame([metrics.settings(run) for run in runs])
    words = {"learning_rate": "learning rate {}", "epochs": "{} epochs", "staleness": "staleness {}"}
    found = {name: _range(settings[name]) for name in words}
    parts += [words[name].format(text) for name, text in found.items() if text]
    parts.append(f"{_range([run['iterations'] for run in runs])} iterations")
    arms = metrics.table[metrics.table["regime"].isin(regimes) & metrics.table["algorithm"].isin(algorithms)]
    n_worlds, each = _range(arms["worlds"]), _range(arms["runs"])
    many = f"{each} run{'s' if each != '1' else ''} each"
    where = f"{n_worlds} world{'s' if n_worlds != '1' else ''}"
    parts.append(f"{many} in {where}" if n_worlds != each or each == "1" else f"{where}, one run each")
    return " · ".join(parts)


# ---- the page -----------------------------------------------------------------------------------
def line_handles(metrics: Metrics, algorithms: Sequence[str]) -> list[Line2D]:
    """Legend entries of algorithms."""
    looks = [metrics.look(name) for name in algorithms]
    return [
        Line2D([], [], color=one.color, linestyle=one.line, linewidth=2, label=one.label) for one in looks
    ]


def start_handle() -> Line2D:
    """Legend entry of the level before training."""
    return Line2D([], [], color="#777777", linewidth=1, linestyle=(0, (1, 2)), label="before training")


def baseline_handle(metrics: Metrics) -> Line2D:
    """Legend entry of the baseline drawn in grey."""
    return Line2D([], [], color=GREY, linewidth=1.8, label=f"{metrics.look(BASELINE).label}, for comparison")


def _in_lines(text: str, width: int) -> str:
    """Lines of at most `width` characters, in which no number is parted from its %."""
    unbroken = text.replace(" %", "\u00a0%")  # a space at which textwrap breaks no line
    return textwrap.fill(unbroken, width, break_on_hyphens=False).replace("\u00a0", " ")


def page(
    title: str,
    question: str,
    source: str,
    body: float,
    handles: Sequence[Line2D | Patch] = (),
    width: float = WIDTH,
) -> Figure:
    """An empty figure of `body` inches below a title, a question and a legend and above a source line.

    Call within `style()`; panels placed in it keep clear of the texts.
    """
    texts = [
        (_in_lines(title, int(width * 9.3)), 13, "bold", "#1D2530", 0.235),
        (_in_lines(question, int(width * 14.2)), 9.5, "normal", "#555555", 0.18),
    ]
    columns = _legend_columns([str(handle.get_label()) for handle in handles], width)
    legend = 0.21 * -(-len(handles) // columns) + 0.06 if handles else 0.0
    head = 0.14 + sum(line * (text.count("\n") + 1) + 0.05 for text, *_, line in texts) + legend
    below = _in_lines(source, int(width * 17))
    foot = 0.12 + 0.15 * (below.count("\n") + 1)
    height = head + body + foot
    fig = Figure(figsize=(width, height), layout="constrained")
    rect = (0, foot / height, 1, (body - 0.02) / height)
    fig.get_layout_engine().set(rect=rect, h_pad=0.04, w_pad=0.05)
    y = height - 0.12
    for text, size, weight, color, line in texts:
        at = {"va": "top", "ha": "left", "fontsize": size, "fontweight": weight, "color": color}
        fig.text(0.1 / width, y / height, text, linespacing=1.2, **at)
        y -= line * (text.count("\n") + 1) + 0.05
    fig.text(0.1 / width, 0.1 / height, below, va="bottom", ha="left", fontsize=7.7, color="#777777")
    if handles:
        legend = fig.legend(
            handles=list(handles),
            loc="upper left",
            bbox_to_anchor=(0.04 / width, (y + 0.04) / height),
            ncols=columns,
            borderaxespad=0,
            columnspacing=1.4,
            handletextpad=0.5,
        )
        legend.set_in_layout(False)
    return fig


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """The most columns in which entries of this length fit."""
    inches = [0.55 + 0.083 * len(label) for label in labels]
    for columns in range(len(labels), 1, -1):
        rows = -(-len(labels) // columns)
        widths = [max(inches[i : i + rows]) for i in range(0, len(labels), rows)]
        if sum(widths) <= width - 0.1:
            return -(-len(labels) // rows)
    return 1


def draw_line(
    ax: Axes, metrics: Metrics, regime: str, algorithm: str, panel: Panel, grey: bool = False
) -> list[pd.DataFrame]:
    """One algorithm's line and band (or its line alone, in grey); returns what was drawn, empty if nothing was recorded."""
    curves = curves_of(metrics, regime, algorithm, panel.column)
    if curves.empty:
        return []
    rows, its = band(curves, panel), metrics.look(algorithm)
    if grey:
        ax.plot(rows["iteration"], rows["value"], color=GREY, linewidth=1.6, zorder=1)
        return []
    ax.fill_between(
        rows["iteration"], rows["low"], rows["high"], color=its.color, alpha=0.16, linewidth=0, zorder=2
    )
    marker = {"marker": "o", "markersize": 3} if len(rows) < 8 else {}
    ax.plot(
        rows["iteration"], rows["value"], color=its.color, linestyle=its.line, linewidth=2, zorder=4, **marker
    )
    return [rows.assign(regime=regime, metric=panel.column, algorithm=algorithm)]


def examples(
    ax: Axes, metrics: Metrics, regime: str, algorithm: str, panel: Panel, seeds: Sequence[int]
) -> list[pd.DataFrame]:
    """Single runs, faint."""
    curves, rows = curves_of(metrics, regime, algorithm, panel.column), []
    for world, seed in curves:
        if seed in seeds:
            curve = curves[(world, seed)].dropna()
            ax.plot(curve.index, curve, color=metrics.look(algorithm).color, lw=0.9, alpha=0.55, zorder=3)
            keys = {"regime": regime, "metric": panel.column, "algorithm": algorithm, "kind": "run"}
            rows.append(curve.rename("value").reset_index().assign(**keys, world=world, seed=seed))
    return rows


def start_line(ax: Axes, metrics: Metrics, regime: str, algorithms: Sequence[str], column: str) -> None:
    """Dotted level of the warm starts, mean over worlds."""
    arms = pd.concat([metrics.arm(regime, name) for name in algorithms])
    name = "greedy_start" if column == GREEDY else "start"
    level = arms.groupby("world_seed")[name].mean().mean()
    ax.axhline(level, color="#777777", linewidth=1, linestyle=(0, (1, 2)), zorder=1)


def finish_axis(ax: Axes, panel: Panel) -> None:
    """Whole iterations from 0, and a logarithmic axis with plain numbers."""
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.set_xlim(left=0)
    if panel.log:
        ax.set_yscale("log")


def set_limits(axes: Sequence[Axes], panel: Panel, values: np.ndarray) -> None:
    """One range for all panels of a quantity: that of its lines, without the lowest 3 % on a logarithmic axis.

    The first updates after sampling have next to no divergence: their 1e-13 would leave no room for anything else.
    """
    values = values[np.isfinite(values) & ((values > 0) | (not panel.log))]
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
        if panel.share and high > 0.6:
            low, high = 0, 1.02
    for ax in axes:
        ax.set_ylim(low, high)
        if panel.log:
            plain_log(ax, low, high)


def plain_log(ax: Axes, low: float, high: float) -> None:
    """Ticks such as 0.2 on a logarithmic axis: decades alone where there are many, else also 2 and 5."""
    subs = (1.0,) if high / low > 300 else (1.0, 3.0) if high / low > 30 else (1.0, 2.0, 5.0)
    ax.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: plain(x)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def shade_filling(ax: Axes, metrics: Metrics, regime: str) -> None:
    """Grey ground behind the iterations in which the queue of stale batches fills."""
    if (full := queue_filled(metrics, regime)) > 1:
        ax.axvspan(0, full, color="#EDEDED", linewidth=0, zorder=0)


def filling_handle() -> Patch:
    """Legend entry of `shade_filling`."""
    return Patch(facecolor="#E4E4E4", label="queue of stale batches fills")


def name_lines(ax: Axes, metrics: Metrics, algorithms: Sequence[str], room: int, columns: int = 1) -> None:
    """The algorithms of a column, named above its first panel in their colours; `room` rows are kept free for them."""
    handles = line_handles(metrics, algorithms)
    long = any(len(handle.get_label()) > 20 for handle in handles)  # would touch the next column's
    legend = ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        fontsize=7.5 if long else 8.5,
        borderaxespad=0.1,
        labelspacing=0.25,
        handlelength=2.2,
        ncols=columns,
        columnspacing=1.2,
    )
    legend.set_in_layout(False)  # its width is not to move the panels apart; its height is that of this title
    ax.set_title("\n".join(" " * room), fontsize=9.5, pad=3)


def panel_figure(
    metrics: Metrics,
    name: str,
    regime: str,
    algorithms: Sequence[str],
    panels: Sequence[Panel],
    title: str,
    question: str,
    caption: str,
    filling: bool = False,
    without: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Plot | None:
    """Quantities against the iteration: up to four algorithms together, more in columns with the baseline in grey.

    without: algorithms that a column says nothing of. Panels of which nothing was recorded are left out; None if that is
    all of them.
    """
    algorithms = in_order(algorithms)
    moving = {
        p.column: {a for a in algorithms if moves(metrics, regime, a, p.column)}
        - set(without.get(p.column, ()))
        for p in panels
    }
    panels = [panel for panel in panels if moving[panel.column]]
    if not panels:
        return None
    chunks = family_chunks(metrics, regime, algorithms)
    behind = len(chunks) > 1 and BASELINE in algorithms
    handles = [] if len(chunks) > 1 else line_handles(metrics, algorithms)
    handles += [baseline_handle(metrics)] if behind else []
    handles += [filling_handle()] if filling and queue_filled(metrics, regime) > 1 else []
    source = source_of(metrics, [regime], algorithms)
    rows: list[pd.DataFrame] = []
    with style():
        fig, cells = _cells(title, question, source, handles, chunks, panels)
        for panel in panels:
            axes = [ax for (column, _), ax in cells.items() if column == panel.column]
            drawn: list[pd.DataFrame] = []
            for (column, i), ax in cells.items():
                if column != panel.column:
                    continue
                if filling:
                    shade_filling(ax, metrics, regime)
                for algorithm in chunks[i]:
                    if algorithm in moving[column]:
                        drawn += draw_line(ax, metrics, regime, algorithm, panel)
                if moving[column].intersection(chunks[i]):
                    if behind and BASELINE not in chunks[i] and BASELINE in moving[column]:
                        draw_line(ax, metrics, regime, BASELINE, panel, grey=True)
                else:
                    text = panel.idle or "not recorded"
                    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", color="#888888", fontsize=8)
                finish_axis(ax, panel)
            set_limits(axes, panel, np.concatenate([part["value"] for part in drawn]))
            rows += drawn
        if len(chunks) > 1:
            for i, chunk in enumerate(chunks):
                name_lines(cells[(panels[0].column, i)], metrics, chunk, max(map(len, chunks)))
    return Plot(name, fig, plotted(rows), f"{question} {caption} {BANDS} {STYLE_NOTE}", title=title)


def _cells(
    title: str,
    question: str,
    source: str,
    handles: Sequence[Line2D | Patch],
    chunks: Sequence[Sequence[str]],
    panels: Sequence[Panel],
) -> tuple[Figure, dict[tuple[str, int], Axes]]:
    """Axes by (column, number of the chunk): quantities side by side for one chunk, else rows of columns of chunks."""
    if len(chunks) == 1:
        n_columns = min(3 if len(panels) == 3 else 2, len(panels))
        n_rows = -(-len(panels) // n_columns)
        fig = page(title, question, source, 2.2 * n_rows + 0.25, handles)
        grid = list(fig.subplots(n_rows, n_columns, squeeze=False, sharex=True).flat)
        cells = {(panel.column, 0): ax for panel, ax in zip(panels, grid, strict=False)}
        for place, (panel, ax) in enumerate(zip(panels, grid, strict=False)):
            ax.set_title(panel.label.replace("\n", " "), fontsize=10, color="#333333")
            if place + n_columns >= len(panels):
                ax.set_xlabel("iteration")
                ax.tick_params(labelbottom=True)
        for ax in grid[len(panels) :]:
            ax.set_visible(False)
        return fig, cells
    n_columns = min(4 if len(chunks) > 3 else 3, len(chunks))
    n_blocks = -(-len(chunks) // n_columns)
    names = max(map(len, chunks)) * 0.19
    fig = page(title, question, source, n_blocks * (len(panels) * 1.42 + names + 0.3), handles)
    blocks = np.atleast_1d(fig.subfigures(n_blocks, 1))
    cells = {}
    for b, block in enumerate(blocks):
        grid = block.subplots(len(panels), n_columns, squeeze=False, sharex=True)
        for (r, c), ax in np.ndenumerate(grid):
            i = b * n_columns + c
            if i >= len(chunks):
                ax.set_visible(False)
                continue
            cells[(panels[r].column, i)] = ax
            ax.tick_params(labelleft=c == 0)
            if c == 0:
                ax.set_ylabel(panels[r].label)
            if r == len(panels) - 1:
                ax.set_xlabel("iteration")
    return fig, cells
