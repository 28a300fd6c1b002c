"""What the figures are built of: curves of runs, their words, panels and grids of panels."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter, MaxNLocator

from stppo.results.captions import caption, describe_regime, describe_setting, is_clustered, replicates
from stppo.results.resampling import Replicate, curve_band
from stppo.results.runs import Metrics
from stppo.results.statistics import CONFIDENCE, REPETITIONS, Band, bootstrap_band
from stppo.results.style import Plot, in_order, look, style
from stppo.study.arms import COVERED, MAIN, ON_POLICY

WIDTH = 10.0
SEED_COLORS = (
    "#D55E00",
    "#E69F00",
    "#7A2E00",
    "#0061A8",
    "#56B4E9",
    "#003554",
)  # by warm start; two worlds of three


@dataclass(frozen=True)
class Panel:
    """One quantity to draw against the iteration."""

    column: str  # of iterations.parquet; "success" and "success_greedy" come from the evaluations
    label: str
    log: bool = False


# --- data -------------------------------------------------------------------------------------
def curves_of(metrics: Metrics, regime: str, algorithm: str, column: str) -> pd.DataFrame:
    """One column per seed, one row per iteration; NaN where a seed has no value."""
    records = [r for r in metrics.runs if (r["regime"], r["algorithm"]) == (regime, algorithm)]
    curves = {}
    for record in records:
        if column in ("success", "success_greedy"):
            rows = metrics.success(record, 0.0 if column == "success_greedy" else 1.0)
            curves[record["seed"]] = rows.set_index("iteration")["success"]
        else:
            rows = metrics.select(metrics.iterations, record).set_index("iteration").sort_index()
            if column == "advantage_variance" and "advantage_raw_std" in rows:
                curves[record["seed"]] = rows["advantage_raw_std"] ** 2
            elif column in rows:
                curves[record["seed"]] = rows[column]
    return pd.DataFrame(curves, dtype="float64").replace([np.inf, -np.inf], np.nan).dropna(how="all")


def _seed_rows(curves: pd.DataFrame) -> pd.DataFrame:
    rows = curves.rename_axis("iteration").rename_axis("seed", axis=1).stack().rename("value").reset_index()
    return rows.assign(kind="seed")


def _mean_rows(
    curves: pd.DataFrame, of: Mapping[int, Replicate], repetitions: int, log: bool
) -> pd.DataFrame:
    values = curves.to_numpy().T
    if is_clustered(of.values()):
        runs = [of[int(seed)] for seed in curves]
        n_runs = np.isfinite(values).sum(axis=0)
        # A band is widened to both sides alike: on logarithms where the axis has them, else it could reach zero.
        found = curve_band(np.log(values) if log else values, runs, repetitions, CONFIDENCE)
        band = Band(*map(np.exp, found) if log else found, n_runs)
    else:
        band = bootstrap_band(values, repetitions)
    return pd.DataFrame(
        {
            "iteration": curves.index,
            "value": band.value,
            "low": band.low,
            "high": band.high,
            "n_seeds": band.n_runs,
            "kind": "iqm",
        }
    )


# --- drawing ----------------------------------------------------------------------------------
def _mark_collapses(
    ax: Axes, metrics: Metrics, regime: str, algorithm: str, curves: pd.DataFrame, color: str
) -> None:
    for seed in curves:
        verdict = metrics.collapses[(regime, algorithm, int(seed))]
        curve = curves[seed].dropna()
        if verdict.iteration is None or curve.empty:
            continue
        value = np.interp(verdict.iteration, curve.index, curve)
        ax.plot(
            [verdict.iteration],
            [value],
            marker="X",
            markersize=8,
            markerfacecolor=color,
            markeredgecolor="white",
            markeredgewidth=0.9,
            linestyle="none",
            zorder=6,
        )


def _draw(ax: Axes, algorithm: str, curves: pd.DataFrame, mean: pd.DataFrame, log: bool) -> None:
    """Faint seeds, then band and line of their mean."""
    its = look(algorithm)
    hide = {"where": mean["low"] > 0} if log else {}
    if curves.shape[1] > 1:
        for seed in curves:
            curve = curves[seed].dropna()
            ax.plot(curve.index, curve, color=its.color, linewidth=0.7, alpha=0.35, zorder=2)
        ax.fill_between(
            mean["iteration"],
            mean["low"],
            mean["high"],
            color=its.color,
            alpha=0.13,
            linewidth=0,
            zorder=1,
            **hide,
        )
    ax.plot(mean["iteration"], mean["value"], color=its.color, linestyle=its.line, linewidth=1.9, zorder=4)


def _draw_seeds(ax: Axes, algorithm: str, curves: pd.DataFrame, groups: Mapping[int, str]) -> None:
    """Each seed as a line of its own: a mean over different collapse times would show none of them."""
    for seed in curves:
        curve = curves[seed].dropna()
        ax.plot(curve.index, curve, **_seed_line(algorithm, groups[int(seed)], groups), zorder=4)


def _seed_line(algorithm: str, group: str, groups: Mapping[int, str]) -> dict[str, Any]:
    """Colour of a seed: from dark to light, or where seeds share warm starts one of `SEED_COLORS` for each of these."""
    names = list(dict.fromkeys(groups.values()))
    place = names.index(group)
    if len(names) < len(groups):
        return {"color": SEED_COLORS[place % len(SEED_COLORS)], "linewidth": 1.3}
    return {"color": _shade(look(algorithm).color, place / max(1, len(names) - 1)), "linewidth": 1.6}


def _shade(color: str, amount: float) -> tuple[float, float, float]:
    """The colour from dark (0) to light (1)."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    mixed = rgb * 0.55 + (rgb * 0.45) * amount * 2 if amount < 0.5 else rgb + (1 - rgb) * (amount - 0.5)
    return tuple(float(value) for value in np.clip(mixed, 0, 1))


class PlainLog(LogFormatter):
    """Numbers such as 0.2 on a log axis, where the parent class writes 2e-01."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _finish(ax: Axes, panel: Panel) -> None:
    ax.set_ylabel(panel.label)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_xlim(left=0)
    if panel.log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(PlainLog())
        ax.yaxis.set_minor_formatter(PlainLog(minor_thresholds=(1.2, 0.5)))
        ax.tick_params(axis="y", which="minor", labelsize=7.5)


def from_zero(axes: Iterable[Axes]) -> None:
    """Let linear axes start at zero; last, for it ends autoscaling."""
    for ax in axes:
        if ax.get_yscale() == "linear":
            ax.set_ylim(bottom=0)


def frame(fig: Figure, title: str, metrics: Metrics, regimes: Sequence[str], handles: list[Line2D]) -> None:
    """Title, legend, and what runs these are."""
    fig.suptitle(title, x=0.012, ha="left")
    inches = [0.66 + 0.08 * len(str(handle.get_label())) for handle in handles]
    fitting = (  # filled column by column, each as wide as its widest entry
        rows
        for rows in range(1, len(inches) + 1)
        if sum(max(inches[i : i + rows]) for i in range(0, len(inches), rows)) <= fig.get_figwidth()
    )
    n_rows = next(fitting, max(1, len(inches)))
    fig.legend(
        handles=handles,
        loc="outside lower center",
        ncols=math.ceil(len(handles) / n_rows),
        title=f"{describe_setting(metrics, regimes)} · own measurement",
        title_fontproperties={"size": 8},
    ).get_title().set_color("#777777")


def line_handles(algorithms: Sequence[str]) -> list[Line2D]:
    return [
        Line2D([], [], color=look(name).color, linestyle=look(name).line, linewidth=2, label=look(name).label)
        for name in algorithms
    ]


def _seed_groups(metrics: Metrics, algorithm: str) -> dict[int, str]:
    """What each seed's line is called: its warm start where there are several, and several seeds share one, else the seed."""
    runs = {r["seed"]: r for r in metrics.runs if r["algorithm"] == algorithm}
    starts = {
        seed: f"world {runs[seed]['world_seed']}, warm start {runs[seed]['warm_start_seed']}"
        for seed in sorted(runs)
    }
    if 1 < len(set(starts.values())) < len(starts):
        return starts
    return {seed: f"seed {seed}" for seed in starts}


def _seed_handles(metrics: Metrics, algorithm: str) -> list[Line2D]:
    groups = _seed_groups(metrics, algorithm)
    return [
        Line2D([], [], **_seed_line(algorithm, group, groups), label=f"{look(algorithm).label}, {group}")
        for group in dict.fromkeys(groups.values())
    ]


def collapse_handle(metrics: Metrics, regimes: Sequence[str], algorithms: Sequence[str]) -> list[Line2D]:
    """A legend entry for the collapse mark, if there is one to explain."""
    keys = [key for key, verdict in metrics.collapses.items() if verdict.collapsed]
    if not any(regime in regimes and algorithm in algorithms for regime, algorithm, _ in keys):
        return []
    look_ = {"marker": "X", "markersize": 8, "markeredgecolor": "white", "linestyle": "none"}
    return [Line2D([], [], color="#777777", label="collapse", **look_)]


def start_handle() -> list[Line2D]:
    """The legend entry of the level before training."""
    return [Line2D([], [], color="#999999", linewidth=0.9, linestyle=(0, (1, 2)), label="warm start")]


def present(
    metrics: Metrics, algorithms: Sequence[str], regimes: Sequence[str] | None = None
) -> tuple[list[str], list[str]]:
    """Of the regimes (those with curves) the ones that hold any of the algorithms, and the algorithms there."""
    for name in in_order(metrics.algorithms()):
        look(name)  # all choose in one order, so that every figure of a study has the same colours
    regimes = [r for r in regimes or with_curves(metrics) if set(metrics.algorithms(r)) & set(algorithms)]
    return regimes, in_order(set(algorithms) & {name for r in regimes for name in metrics.algorithms(r)})


def with_curves(metrics: Metrics) -> list[str]:
    """Regimes drawn iteration by iteration, those of the study first: all that none of its figures covers."""
    regimes = [regime for regime in metrics.regimes if regime not in COVERED]
    first = (MAIN, ON_POLICY)
    return sorted(regimes, key=lambda r: (first.index(r) if r in first else len(first), r))


def _start_line(ax: Axes, metrics: Metrics, regime: str) -> None:
    """Success before training: the level that a run must leave upwards."""
    starts = [r["warm_start"]["success_sampled"] for r in metrics.runs if r["regime"] == regime]
    ax.axhline(float(np.mean(starts)), color="#999999", linewidth=0.9, linestyle=(0, (1, 2)), zorder=0)


def draw_panel(
    ax: Axes,
    panel: Panel,
    metrics: Metrics,
    regime: str,
    algorithms: Sequence[str],
    repetitions: int,
    individual: bool = False,
) -> list[pd.DataFrame]:
    """Draw one panel; returns the rows drawn."""
    rows = []
    if panel.column == "success":
        _start_line(ax, metrics, regime)
    for algorithm in algorithms:
        curves = curves_of(metrics, regime, algorithm, panel.column)
        if panel.log:
            curves = curves.where(curves > 0).dropna(how="all")
        if curves.empty:
            continue
        parts = [_seed_rows(curves)]
        if individual:
            _draw_seeds(ax, algorithm, curves, _seed_groups(metrics, algorithm))
        else:
            parts.append(_mean_rows(curves, replicates(metrics, regime, algorithm), repetitions, panel.log))
            _draw(ax, algorithm, curves, parts[-1], panel.log)
        color = "#222222" if individual else look(algorithm).color
        if panel.column != "success_greedy":  # evaluated too rarely to have a value there
            _mark_collapses(ax, metrics, regime, algorithm, curves, color)
        rows += [part.assign(regime=regime, metric=panel.column, algorithm=algorithm) for part in parts]
    _finish(ax, panel)
    return rows


def plotted_data(rows: list[pd.DataFrame]) -> pd.DataFrame:
    columns = [
        "regime",
        "metric",
        "algorithm",
        "kind",
        "seed",
        "iteration",
        "value",
        "low",
        "high",
        "n_seeds",
    ]
    frame = pd.concat([part.reindex(columns=columns).astype(object) for part in rows], ignore_index=True)
    integers = {name: "Int64" for name in ("seed", "iteration", "n_seeds")}
    return frame.astype({**integers, "value": "float64", "low": "float64", "high": "float64"})


def grid(
    metrics: Metrics,
    name: str,
    title: str,
    what: str,
    algorithms: Sequence[str],
    panels: Sequence[Panel],
    repetitions: int = REPETITIONS,
    individual: bool = False,
    regimes: Sequence[str] | None = None,
) -> Plot | None:
    """Panels as rows, regimes (all with curves, unless given) as columns; `what` opens the caption."""
    regimes, algorithms = present(metrics, algorithms, regimes)
    if not regimes:
        return None
    rows: list[pd.DataFrame] = []
    with style():
        width = WIDTH if len(regimes) > 1 else 7.5
        height = 1.3 + len(panels) * (2.9 if len(panels) == 1 else 2.05)
        fig = Figure(figsize=(width, height), layout="constrained")
        axes = fig.subplots(len(panels), len(regimes), squeeze=False, sharex="col", sharey="row")
        for i, panel in enumerate(panels):
            for j, regime in enumerate(regimes):
                ax = axes[i, j]
                rows += draw_panel(ax, panel, metrics, regime, algorithms, repetitions, individual)
                if i == 0:
                    settings = describe_regime(metrics, regime, algorithms)
                    ax.set_title(f"regime {regime}\n{textwrap.fill(settings, 110 // len(regimes))}")
                if i == len(panels) - 1:
                    ax.set_xlabel("iteration")
                if j:
                    ax.set_ylabel("")
        from_zero(axes.flat)
        lines = _seed_handles(metrics, algorithms[0]) if individual else line_handles(algorithms)
        handles = lines + collapse_handle(metrics, regimes, algorithms)
        if any(panel.column == "success" for panel in panels):
            handles += start_handle()
        frame(fig, title, metrics, regimes, handles)
    return Plot(name, fig, plotted_data(rows), caption(metrics, what, regimes, algorithms, not individual))
