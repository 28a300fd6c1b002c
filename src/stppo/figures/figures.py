"""The figures, each drawn from recorded metrics alone, in the order in which they are shown.

A figure is one function from `Metrics` to a `Plot`, or None where the runs do not support it, with one entry in `FIGURES`.
Its title says what the runs show (`results.findings`), its first line below asks the question. "Fig. n" is the figure of the
paper's first version that asks the same; what is drawn is always our own measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from stppo.config.algorithms import in_order
from stppo.figures import findings
from stppo.figures.beginnings import beginnings
from stppo.figures.curves import (
    BANDS,
    BASELINE,
    GREEDY,
    LEVEL,
    SUCCESS,
    Panel,
    band,
    baseline_handle,
    curves_of,
    draw_line,
    examples,
    finish_axis,
    line_handles,
    moves,
    page,
    panel_figure,
    plotted,
    queue_filled,
    source_of,
    start_handle,
    start_line,
    top_of,
)
from stppo.figures.each_seed import each_seed
from stppo.figures.early_warning import early_warning
from stppo.figures.findings import main_regime
from stppo.figures.granularity import granularity
from stppo.figures.one_change import one_change
from stppo.figures.settings_map import settings_map
from stppo.figures.style import STYLE_NOTE, Plot, style
from stppo.figures.tolerance import tolerance
from stppo.record.outcomes import LABELS, LEARNED
from stppo.record.runs import Metrics, clips
from stppo.stats import by_world, fewest_worlds, log_linear_trend, mean

HAPPENS, TOLERATES, WHY = "what happens", "how much it tolerates", "why"  # groups, in the order of the report

SAMPLED_PANEL = Panel(SUCCESS, "success, sampled", share=True)
GREEDY_PANEL = Panel(GREEDY, "success, greedy", share=True)
CLIP_PANELS = (
    Panel("clip_fraction", "clip fraction", share=True, idle="no clip"),
    Panel("kl_behaviour_k3", "KL to behaviour\n(nats per token)", log=True),
)
BOUND_PANELS = (Panel("clip_low", "lower clip bound"), Panel("clip_high", "upper clip bound"))
NORM_PANELS = (
    Panel("gradient_norm", "gradient norm", log=True),
    Panel("ppo_gradient_norm", "gradient norm,\nsurrogate alone", log=True, idle="the gradient norm above"),
    Panel("clipping_bias_norm", "clipping-bias\nnorm ‖C‖", log=True),
    Panel("stabilizer_divisor", "divisor of\nthe gradient", log=True, idle="1 throughout"),
)
SIGNAL_PANELS = (
    Panel("entropy", "entropy (nats)"),
    Panel("valid_format_rate", "valid format", share=True),
    Panel("ratio_max_token", "largest\ntoken ratio", log=True),
    Panel("effective_sample_size", "effective\nsample size", share=True),
    Panel("critic_explained_variance", "critic, explained\nvariance", idle="no critic"),
    Panel("advantage_variance", "advantage\nvariance"),
)
MARKERS = dict(zip(LABELS, ("o", "D", "X", "o", "v"), strict=True))
HOLLOW = LABELS[3:]  # outcomes of runs that never learned


# ---- what happens -------------------------------------------------------------------------------
def learning(metrics: Metrics) -> Plot | None:
    """Fig. 4 (and 3a): success against the iteration, sampled and greedy, of at most four algorithms."""
    regime = main_regime(metrics)
    algorithms = findings.headline(metrics, regime)
    question = (
        "Who learns, and who keeps it? Success on held-out questions, sampled at temperature 1 and greedy."
    )
    title = findings.learning(metrics, regime, algorithms)
    base = findings.pair(metrics, regime, algorithms)[0]
    seeds = _typical(metrics, regime, base)
    rows: list[pd.DataFrame] = []
    with style():
        fig = page(
            title,
            question,
            source_of(metrics, [regime], algorithms),
            3.1,
            [*line_handles(metrics, algorithms), start_handle()],
        )
        axes = fig.subplots(1, 2, sharey=True)
        for ax, panel in zip(axes, (SAMPLED_PANEL, GREEDY_PANEL), strict=True):
            drawn = [row for name in algorithms for row in draw_line(ax, metrics, regime, name, panel)]
            start_line(ax, metrics, regime, algorithms, panel.column)
            finish_axis(ax, panel)
            ax.set(xlabel="iteration")
            ax.set_title(panel.label, fontsize=10.5, color="#333333")
            rows += drawn
        rows += examples(axes[0], metrics, regime, base, SAMPLED_PANEL, seeds)
        axes[0].set_ylim(0, top_of(rows))
    thin = f"Thin: one run of {metrics.look(base).label}, the one of median area. " if seeds else ""
    caption = (
        f"{question} The title compares sampled success: of runs that learned (rose by {LEARNED:.2f}), the share of that gain "
        f"which the last tenth of the run keeps, else final success; means over all worlds, while lines leave out the best and the "
        f"worst quarter. {thin}{BANDS} {STYLE_NOTE}"
    )
    return Plot("learning", fig, plotted(rows), caption, title=title)


def _typical(metrics: Metrics, regime: str, algorithm: str) -> list[int]:
    """Seed of the run of median area, where there are several."""
    arm = metrics.arm(regime, algorithm).sort_values(["area", "seed"])
    return [int(arm["seed"].iloc[len(arm) // 2])] if len(arm) > 2 else []


def every_algorithm(metrics: Metrics) -> Plot | None:
    """A panel for every algorithm, the baseline's mean behind it."""
    regime = main_regime(metrics)
    algorithms = in_order(metrics.methods(regime))
    question = "How does every algorithm fare? Sampled success on held-out questions; below each name, what became of its runs."
    title = findings.every_algorithm(metrics, regime)
    n_columns = min(3 if len(algorithms) <= 21 else 4, len(algorithms))
    n_rows = -(-len(algorithms) // n_columns)
    behind = BASELINE in algorithms and len(algorithms) > 1
    handles = [start_handle(), *([baseline_handle(metrics)] if behind else [])]
    rows: list[pd.DataFrame] = []
    counts = metrics.table[metrics.table["regime"] == regime].set_index("algorithm")
    several = counts.loc[algorithms, "runs"].max() > 2
    thin = "Thin: the runs with the lowest and the highest final success. " if several else ""
    with style():
        fig = page(title, question, source_of(metrics, [regime], algorithms), 1.75 * n_rows + 0.2, handles)
        axes = list(fig.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False).flat)
        for i, (ax, name) in enumerate(zip(axes, algorithms, strict=False)):
            if behind and name != BASELINE:
                draw_line(ax, metrics, regime, BASELINE, SAMPLED_PANEL, grey=True)
            drawn = draw_line(ax, metrics, regime, name, SAMPLED_PANEL)
            arm = metrics.arm(regime, name).sort_values(["final", "seed"])
            if len(arm) > 2:
                ends = arm["seed"].iloc[[0, -1]].tolist()
                drawn += examples(ax, metrics, regime, name, SAMPLED_PANEL, ends)
            rows += drawn
            start_line(ax, metrics, regime, [name], SUCCESS)
            finish_axis(ax, SAMPLED_PANEL)
            its, row = metrics.look(name), counts.loc[name]
            ax.set_title(
                its.label,
                fontsize=9.5 if len(its.label) < 26 else 8,
                fontweight="bold",
                color=its.color,
                pad=15,
            )
            what = f"{row['learned']} of {row['runs']} learned, {row['crashed']} crashed, {row['collapsed']} collapsed"
            size = 7.8 if n_columns < 4 else 6
            text = ax.text(0, 1.03, what, transform=ax.transAxes, fontsize=size, color="#666666")
            text.set_in_layout(False)
            if i + n_columns >= len(algorithms):
                ax.tick_params(labelbottom=True)
            if i // n_columns == n_rows - 1:
                ax.set_xlabel("iteration")
        for ax in axes[len(algorithms) :]:
            ax.set_visible(False)
        axes[0].set_ylim(0, top_of(rows))
    caption = (
        f"{question} A run crashed when it lost half of what it had gained, and collapsed when it did not make that good by the "
        f"end (or its loss stopped being finite). {thin}{BANDS}"
    )
    return Plot("every_algorithm", fig, plotted(rows), caption, title=title)


def stability(metrics: Metrics) -> Plot | None:
    """Final success of every run, by algorithm, sampled and greedy."""
    regime = main_regime(metrics)
    means = {
        name: metrics.arm(regime, name).groupby("world_seed")["final"].mean().mean()
        for name in metrics.methods(regime)
    }
    algorithms = sorted(in_order(means), key=lambda name: -means[name])
    question = "Where do the runs end? Mean success of the last tenth of each run, and the mean over worlds."
    title = findings.stability(metrics, regime)
    summary = pd.concat([metrics.arm(regime, name) for name in algorithms])
    present = [label for label in LABELS if (summary["outcome"] == label).any()]
    handles = [_mark(label, "#555555") for label in present]
    firm = summary.groupby("algorithm")["world_seed"].nunique().max() >= fewest_worlds(LEVEL)
    text = f"mean, {100 * LEVEL:.0f} % interval" if firm else "mean"
    bar = {"marker": "|", "markersize": 11, "markeredgewidth": 2, "linewidth": 2 if firm else 0}
    interval = Line2D([], [], color="#222222", label=text, **bar)
    handles += [interval, start_handle()]
    rows = []
    with style():
        fig = page(
            title, question, source_of(metrics, [regime], algorithms), 0.33 * len(algorithms) + 0.65, handles
        )
        axes = fig.subplots(1, 2, sharey=True)
        for ax, panel in zip(axes, (SAMPLED_PANEL, GREEDY_PANEL), strict=True):
            column = "final" if panel is SAMPLED_PANEL else "greedy_final"
            for y, name in enumerate(algorithms):
                rows += _ends(ax, metrics, regime, name, column, y)
            level = (
                summary.groupby("world_seed")["start" if column == "final" else "greedy_start"].mean().mean()
            )
            ax.axvline(level, color="#777777", linewidth=1, linestyle=(0, (1, 2)), zorder=1)
            ax.set_title(panel.label.replace("success", "final success"), fontsize=10.5, color="#333333")
            ax.set_xlim(0, top_of([pd.DataFrame(rows)[["value"]]]))
        axes[0].set_yticks(range(len(algorithms)), [metrics.look(name).label for name in algorithms])
        axes[0].set_ylim(len(algorithms) - 0.5, -0.5)
        for ax in axes:
            ax.tick_params(axis="y", length=0, labelcolor="#333333", labelsize=9)
            ax.grid(axis="y", visible=False)
    caption = (
        f"{question} Algorithms in order of mean final sampled success. Bars: {LEVEL:.0%} bootstrap intervals of the mean over "
        f"worlds, from {fewest_worlds(LEVEL)} worlds or more; the dotted line is the success before training. The title "
        "counts differences that are clear for all comparisons together (Bonferroni)."
    ).replace("%", " %", 1)
    return Plot("stability", fig, pd.DataFrame(rows), caption, title=title)


def _mark(label: str, color: str) -> Line2D:
    hollow = (
        {"markerfacecolor": "white"}
        if label in HOLLOW
        else {"markeredgecolor": "white", "markeredgewidth": 0.6}
    )
    size = 8 if MARKERS[label] == "X" else 6.5
    return Line2D(
        [], [], linestyle="none", marker=MARKERS[label], markersize=size, color=color, label=label, **hollow
    )


def _ends(ax: Axes, metrics: Metrics, regime: str, name: str, column: str, y: float) -> list[dict[str, Any]]:
    """Dots of the runs of an algorithm, its mean and interval; the rows of what was drawn."""
    arm, color = metrics.arm(regime, name).dropna(subset=[column]), metrics.look(name).color
    rows, low, high = [], math.nan, math.nan
    keys = {"regime": regime, "metric": column, "algorithm": name}
    spread = 0.5 * (np.arange(len(arm)) / max(1, len(arm) - 1) - 0.5) if len(arm) > 1 else [0.0]
    for shift, run in zip(spread, arm.sort_values("seed").to_dict("records"), strict=True):
        mark = _mark(run["outcome"], color)
        mark.set_data([run[column]], [y + shift])
        mark.set_alpha(0.75)
        mark.set_zorder(3)
        mark.set_clip_on(False)
        ax.add_line(mark)
        run_keys = {"kind": run["outcome"], "world": run["world_seed"], "seed": run["seed"]}
        rows.append({**keys, **run_keys, "value": run[column]})
    if not (values := by_world(arm, column)):
        return rows
    if len(values) >= fewest_worlds(LEVEL):
        low, high = np.clip(mean(values, n_draws=4000).interval(LEVEL), 0, 1)
        ax.plot([low, high], [y, y], color="#222222", linewidth=1.8, solid_capstyle="butt", zorder=4)
    middle = float(np.mean(list(values.values())))
    ax.plot([middle, middle], [y - 0.28, y + 0.28], color="#222222", linewidth=2, zorder=5)
    rows.append({**keys, "kind": "mean", "value": middle, "low": low, "high": high})
    return rows


def clip_ratio(metrics: Metrics) -> Plot | None:
    """Fig. 5: clip fraction and KL to the behaviour policy; the bounds too, where they were recorded and move."""
    regime = main_regime(metrics)
    free = {r["algorithm"] for r in metrics.runs if r["regime"] == regime and not clips(r)}
    bounds = [panel for panel in BOUND_PANELS if _varies(metrics, regime, panel.column, free)]
    return panel_figure(
        metrics,
        "clip_ratio",
        regime,
        metrics.methods(regime),
        [*CLIP_PANELS, *bounds],
        findings.trend_of(metrics, regime, "clip_fraction", "clip fraction", "{:.0f}", " %", 100),
        "How much is clipped, and how far does the policy move from the one that sampled?",
        "Clip fraction: share of agent tokens whose term takes the clipped branch. A turn-level clip takes a whole turn, so "
        "compare the course of one algorithm, not levels across granularities. No clip fraction is drawn of "
        "methods that weigh and do not clip, such as TOPR. The title compares the first third of the "
        "iterations (after the queue has filled) with the last. The lowest 3 % of a logarithmic axis are cut off.",
        filling=True,
        without={panel.column: free for panel in (CLIP_PANELS[0], *BOUND_PANELS)},
    )


def _varies(metrics: Metrics, regime: str, column: str, but: Collection[str]) -> bool:
    """Whether an algorithm's own values change, those of `but` apart."""
    if column not in metrics.iterations:
        return False
    rows = metrics.iterations[metrics.iterations["regime"] == regime]
    values = rows[~rows["algorithm"].isin(but)].groupby("algorithm")[column]
    return bool((values.max() - values.min() > 1e-6 * values.max().abs()).any())


# ---- why ----------------------------------------------------------------------------------------
def norms(metrics: Metrics) -> Plot | None:
    """Fig. 3b-d: norms of the gradient, of the surrogate's gradient and of the clipping bias, and the divisor."""
    regime = main_regime(metrics)
    return panel_figure(
        metrics,
        "norms",
        regime,
        metrics.methods(regime),
        NORM_PANELS,
        findings.spikes(metrics, regime),
        "Do gradients explode before success falls? L2 norms before any clipping, means over each iteration's updates.",
        "The title speaks of single updates, the lines of means over an iteration's. ‖C‖: norm of the gradient that "
        "clipping removed, measured on one update in a few where the objective does not use it. Not drawn: the surrogate's norm where it is the whole gradient's, and a "
        "divisor of 1. The lowest 3 % of a logarithmic axis are cut off.",
    )


def signals(metrics: Metrics) -> Plot | None:
    """Fig. 2: entropy, format, ratios, critic and the spread of advantages, which may change before success does."""
    regime = main_regime(metrics)
    return panel_figure(
        metrics,
        "signals",
        regime,
        metrics.methods(regime),
        SIGNAL_PANELS,
        findings.trend_of(metrics, regime, "entropy", "entropy", "{:.2f}", " nats"),
        "What changes while success does? Entropy, format, ratios, critic and advantages of the training batches.",
        "Effective sample size: of the trajectories' product ratios, as a share of the minibatch. Explained variance and the "
        "variance of advantages (before whitening) are those of the sampled batch. The title compares the first third of the "
        "iterations with the last.",
    )


def trends(metrics: Metrics) -> Plot | None:
    """Reviewers' question 4: log-linear trends of the norms, with their R^2, for every algorithm."""
    regime = main_regime(metrics)
    algorithms = in_order(metrics.methods(regime))
    rows = []
    for panel in NORM_PANELS[:3]:
        for name in algorithms:
            if not moves(metrics, regime, name, panel.column):
                continue
            curves = curves_of(metrics, regime, name, panel.column)
            middle = band(curves[curves.index >= queue_filled(metrics, regime)], panel)
            fit = log_linear_trend(middle["iteration"], middle["value"])
            if math.isfinite(fit.slope):
                keys = {"regime": regime, "metric": panel.column, "algorithm": name}
                factor = math.exp(10 * fit.slope)
                numbers = {"factor_per_10": factor, "r_squared": fit.r_squared, "intercept": fit.intercept}
                rows.append({**keys, **numbers, "n": fit.n})
    if not rows:
        return None
    table = pd.DataFrame(rows)
    panels = [panel for panel in NORM_PANELS[:3] if (table["metric"] == panel.column).any()]
    question = "Do the norms grow? Factor per 10 iterations of a log-linear fit to each algorithm's line, with its R²."
    title = _trends_title(metrics, regime, table)
    with style():
        body = 0.3 * len(algorithms) + 0.75
        fig = page(title, question, source_of(metrics, [regime], algorithms), body)
        axes = np.atleast_1d(fig.subplots(1, len(panels), sharey=True))
        for ax, panel in zip(axes, panels, strict=True):
            part = table[table["metric"] == panel.column].set_index("algorithm")
            ax.axvline(1, color="#999999", linewidth=0.9, zorder=1)
            for y, name in enumerate(algorithms):
                if name not in part.index:
                    continue
                row, color = part.loc[name], metrics.look(name).color
                ax.plot([1, row["factor_per_10"]], [y, y], color=color, linewidth=2.2, zorder=2)
                firm = row["r_squared"] >= FIRM
                ax.plot(
                    row["factor_per_10"],
                    y,
                    "o",
                    color=color,
                    markersize=6.5,
                    markerfacecolor=color if firm else "white",
                    zorder=3,
                )
                ax.annotate(
                    f"R² {row['r_squared']:.2f}",
                    (1, y),
                    xycoords=("axes fraction", "data"),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7.5,
                    color="#666666",
                )
            ax.set_title(panel.label, fontsize=10, color="#333333")
            _factor_axis(ax, table.loc[table["metric"] == panel.column, "factor_per_10"])
            ax.set_xlabel("factor per 10 iterations")
            ax.grid(axis="y", visible=False)
        axes[0].set_yticks(range(len(algorithms)), [metrics.look(name).label for name in algorithms])
        for ax in axes:
            ax.tick_params(axis="y", length=0, labelcolor="#333333", labelsize=9)
        axes[0].set_ylim(len(algorithms) - 0.5, -0.5)
    caption = (
        f"{question} Fitted from the iteration at which the queue of stale batches has filled. Filled: R² of {FIRM} or more. "
        "Values of a curve are correlated, so R² says how much of it the trend describes, not whether it is significant."
    )
    return Plot("trends", fig, table, caption, title=title)


FIRM = 0.3  # R^2 from which a trend is called one


def _factor_axis(ax: Axes, factors: pd.Series) -> None:
    """Logarithmic, 1 within, with plain numbers."""
    low, high = min(factors.min(), 1) / 1.08, max(factors.max(), 1) * 1.08
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    steps = [0.1, 0.2, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100]
    ticks = [tick for tick in steps if low <= tick <= high]
    if len(ticks) < 3:
        ticks = [tick for tick in (0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3) if low <= tick <= high]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    ax.set_xticks([], minor=True)


def _trends_title(metrics: Metrics, regime: str, table: pd.DataFrame) -> str:
    if short := findings.too_short(metrics, [regime]):
        return short
    metric = (
        "clipping_bias_norm" if (table["metric"] == "clipping_bias_norm").any() else table["metric"].iloc[0]
    )
    part = table[table["metric"] == metric].set_index("algorithm")
    what = {"clipping_bias_norm": "clipping-bias norm ‖C‖"}.get(metric, "gradient norm")
    told, named = [], findings.pair(metrics, regime, list(part.index))
    for name in named:
        row = part.loc[name]
        firm = row["r_squared"] >= FIRM
        trend = f"× {row['factor_per_10']:.2f} per 10 iterations" + ("" if firm else ", unsteadily,")
        told.append(f"{trend} with {findings.name_of(metrics, name)} (R² {row['r_squared']:.2f})")
    n_worlds = min(metrics.arm(regime, name)["world_seed"].nunique() for name in named)
    few = f"{findings.few_words(n_worlds)}: " if n_worlds < fewest_worlds(LEVEL) else ""
    return f"{few}{what if few else what[0].upper() + what[1:]}: {', '.join(told)}"


# ---- the list -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Kind:
    """A figure of the list."""

    group: str
    draw: Callable[[Metrics], Plot | None]


FIGURES: dict[str, Kind] = {
    draw.__name__: Kind(group, draw)
    for group, draw in (
        (HAPPENS, learning),
        (HAPPENS, every_algorithm),
        (HAPPENS, each_seed),
        (HAPPENS, stability),
        (HAPPENS, clip_ratio),
        (TOLERATES, tolerance),
        (TOLERATES, settings_map),
        (TOLERATES, one_change),
        (WHY, beginnings),
        (WHY, norms),
        (WHY, signals),
        (WHY, early_warning),
        (WHY, granularity),
        (WHY, trends),
    )
}
