"""The figures, each drawn from recorded runs alone, in the order in which they are shown.

A figure is one function from `Metrics` to a `Plot`, or None where the runs do not support it, with one entry
in `FIGURES`. Its title says what the runs show, its first line below asks the question. "Fig. n" is the
figure of the paper's first version that asks the same; what is drawn is always our own measurement.
`Metrics.main` holds what most of them draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from stppo.figures.curves import (
    BANDS,
    GREY,
    INK,
    LEVEL,
    Panel,
    bands,
    baseline_handle,
    draw_examples,
    draw_lines,
    examples,
    finish_axis,
    line_handles,
    name_rows,
    page,
    panel_figure,
    plotted,
    source_of,
    start_handle,
    start_line,
    thin_handle,
    top_of,
)
from stppo.figures.style import STYLE_NOTE, Plot, style
from stppo.figures.words import (
    capital,
    compare,
    geometric,
    headline,
    hedged,
    pair,
    too_short,
)
from stppo.record.outcomes import LABELS
from stppo.record.runs import Metrics
from stppo.record.tidy import BASELINE, GREEDY, SUCCESS, Runs
from stppo.stats import by_world, fewest_worlds, mean

HAPPENS, WHY = "what happens", "why"  # groups, in the order of the report

SAMPLED_PANEL = Panel(SUCCESS, "success, sampled", share=True)
GREEDY_PANEL = Panel(GREEDY, "success, greedy", share=True)
OUT_OF_RANGE = "out_of_range_fraction_token"
CLIP_PANELS = (
    Panel("clip_fraction", "clipped by\nthe algorithm", share=True, idle="no clip"),
    Panel(OUT_OF_RANGE, "own ratio out\nof the range", share=True, idle="no clip"),
    Panel("kl_behaviour_k3", "KL to behaviour\n(nats/token)", log=True),
)
NORM_PANELS = (
    Panel("gradient_norm", log=True),
    Panel("gradient_norm_max", "gradient norm,\nlargest update", log=True),
    Panel("ppo_gradient_norm", "gradient norm,\nsurrogate alone", log=True, idle="the gradient norm above"),
    Panel("clipping_bias_norm", log=True),
    Panel("stabilizer_divisor", "divisor of\nthe gradient", log=True, idle="1 throughout"),
)
SIGNAL_PANELS = (
    Panel("entropy", "entropy (nats)"),
    Panel("valid_format_rate", share=True),
    Panel("ratio_max_token", log=True),
    Panel("effective_sample_size", share=True),
    Panel("critic_explained_variance", idle="no critic"),
    Panel("advantage_variance"),
)
MARKERS = dict(zip(LABELS, ("o", "D", "X", "o", "v"), strict=True))
HOLLOW = LABELS[3:]  # outcomes of runs that never learned


# ---- what happens -------------------------------------------------------------------------------
def learning(metrics: Metrics) -> Plot | None:
    """Fig. 4 (and 3a): success against the iteration, sampled and greedy, of a few and of your own."""
    every = metrics.main
    runs = every.of(algorithms=headline(every))
    base, *others = pair(runs.algorithms)
    arm = runs.runs[runs.runs["algorithm"] == base].sort_values(["area", "seed"])
    seeds = [int(arm["seed"].iloc[len(arm) // 2])] if len(arm) > 2 else []
    question = (
        "Who learns, and who keeps it? Success on held-out questions, sampled at temperature 1 and greedy."
    )
    title = too_short(runs) or _ends_title(runs, base, *others)
    handles = [*line_handles(runs.looks), start_handle(runs.runs)]
    handles += (
        [thin_handle(f"{runs.looks.loc[base, 'short']}, run of median area", arm["color"].iloc[0])]
        if seeds
        else []
    )
    parts = []
    with style():
        fig = page(title, question, source_of(runs), 3.1, handles)
        axes = fig.subplots(1, 2, sharey=True)
        for ax, panel, start in zip(
            axes, (SAMPLED_PANEL, GREEDY_PANEL), ("start", "greedy_start"), strict=True
        ):
            parts.append(bands(runs, runs.algorithms, panel))
            draw_lines(ax, parts[-1], runs.looks)
            start_line(ax, runs.runs, start)
            finish_axis(ax, panel)
            ax.set(xlabel="iteration")
            ax.set_title(panel.label, fontsize=10.5, color="#333333")
        parts.append(examples(runs, base, SUCCESS, seeds))
        draw_examples(axes[0], parts[-1], runs.looks.loc[base, "color"])
        data = plotted(parts)
        axes[0].set_ylim(0, top_of(data))
    caption = f"{question} The title compares final sampled success. {BANDS} {STYLE_NOTE}"
    return Plot("learning", fig, data, caption, title=title)


def _ends_title(runs: Runs, base: str, other: str | None = None) -> str:
    """How the two compared algorithms end, the higher first; of the only one, what became of its runs."""
    if other is None:
        label, table = runs.looks.loc[base, "short"], runs.runs
        learned, collapsed = table["learned"].sum(), table["collapsed"].sum()
        return capital(f"{label} learns in {learned} of {len(table)} runs and collapses in {collapsed}")
    means = runs.means("final")
    found = compare(means[base], means[other])
    ends = [(found.one, base), (found.other, other)]
    (high, first), (low, second) = sorted(ends, reverse=True)
    short = runs.looks["short"]
    return hedged(f"{short[first]} ends at {high:.2f}, {short[second]} at {low:.2f}{found.note}", [found])


def every_algorithm(metrics: Metrics) -> Plot | None:
    """A panel for every algorithm, the baseline's mean behind it."""
    runs, looks = metrics.main, metrics.main.looks
    counts = runs.runs.assign(crashed=runs.runs["crash_iteration"].notna()).groupby("algorithm")
    counts = counts[["learned", "crashed", "collapsed"]].sum().assign(runs=counts.size()).loc[runs.algorithms]
    learn = counts[counts["learned"] * 2 > counts["runs"]]
    fall = (learn["crashed"] * 2 > learn["learned"]).sum()
    title = too_short(runs) or (
        f"{len(learn)} of {len(counts)} algorithms learn in most runs; {fall or 'none'} of them then crash "
        "in most"
    )
    question = (
        "How does every algorithm fare? Sampled success on held-out questions; below each name, what became "
        "of its runs."
    )
    n_columns = min(3 if len(looks) <= 21 else 4, len(looks))
    n_rows = -(-len(looks) // n_columns)
    behind = BASELINE in looks.index and len(looks) > 1
    thin = counts["runs"].max() > 2
    handles = [start_handle(runs.runs), *([baseline_handle(looks)] if behind else [])]
    handles += [thin_handle("lowest and highest final success")] if thin else []
    lines, parts = bands(runs, runs.algorithms, SAMPLED_PANEL), []
    with style():
        fig = page(title, question, source_of(runs), 1.75 * n_rows + 0.2, handles)
        axes = list(fig.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False).flat)
        for ax, (name, its) in zip(axes, looks.iterrows(), strict=False):
            arm = runs.runs[runs.runs["algorithm"] == name].sort_values(["final", "seed"])
            if behind and name != BASELINE:
                base = lines[lines["algorithm"] == BASELINE]
                ax.plot(base["iteration"], base["value"], color=GREY, linewidth=1.6, zorder=1)
            ends = arm["seed"].iloc[[0, -1]].tolist() if len(arm) > 2 else []
            parts += [lines[lines["algorithm"] == name], examples(runs, name, SUCCESS, ends)]
            draw_lines(ax, parts[-2], looks)
            draw_examples(ax, parts[-1], its["color"])
            start_line(ax, arm)
            finish_axis(ax, SAMPLED_PANEL)
            size = 9.5 if len(its["label"]) < 26 else 8
            ax.set_title(its["label"], fontsize=size, fontweight="bold", color=its["color"], pad=15)
            what = "{learned} of {runs} learned, {crashed} crashed, {collapsed} collapsed".format(
                **counts.loc[name]
            )
            text = ax.text(
                0, 1.03, what, transform=ax.transAxes, fontsize=7.8 if n_columns < 4 else 6, color="#666666"
            )
            text.set_in_layout(False)
        for i, ax in enumerate(axes):
            ax.set_visible(i < len(looks))
            ax.tick_params(labelbottom=i + n_columns >= len(looks))
            ax.set_xlabel("iteration" if i // n_columns == n_rows - 1 else "")
        data = plotted(parts)
        axes[0].set_ylim(0, top_of(data))
    caption = (
        f"{question} A run crashed when it lost more than half of what it had gained, and collapsed "
        f"when it did not make that good by the end (or its loss stopped being finite). {BANDS}"
    )
    return Plot("every_algorithm", fig, data, caption, title=title)


def stability(metrics: Metrics) -> Plot | None:
    """Final success of every run, by algorithm, sampled and greedy."""
    runs, looks = metrics.main, metrics.main.looks
    means = runs.means("final").mean()
    names = sorted(runs.algorithms, key=lambda name: -means[name])
    title = too_short(runs) or _stability_title(runs, names)
    question = "Where do the runs end? Mean success of the last tenth of each run, and the mean over worlds."
    firm = runs.runs.groupby("algorithm")["world_seed"].nunique().max() >= fewest_worlds(LEVEL)
    bar = {"marker": "|", "markersize": 11, "markeredgewidth": 2, "linewidth": 2 if firm else 0}
    interval = Line2D([], [], color=INK, label="mean, 95 % interval" if firm else "mean", **bar)
    present = [label for label in LABELS if (runs.runs["outcome"] == label).any()]
    handles = [
        Line2D([], [], linestyle="none", marker=MARKERS[label], label=label, **_fill(label, "#555555"))
        for label in present
    ]
    handles += [interval, start_handle(runs.runs)]
    parts = []
    with style():
        fig = page(title, question, source_of(runs), 0.33 * len(names) + 0.65, handles)
        axes = fig.subplots(1, 2, sharey=True)
        columns = (
            ("final", "start", "final success, sampled"),
            ("greedy_final", "greedy_start", "final success, greedy"),
        )
        for ax, (column, start, label) in zip(axes, columns, strict=True):
            parts += [_ends(ax, runs, name, column, y) for y, name in enumerate(names)]
            start_line_x = runs.runs.groupby("world_seed")[start].mean().mean()
            ax.axvline(start_line_x, color="#777777", linewidth=1, linestyle=(0, (1, 2)), zorder=1)
            ax.set_title(label, fontsize=10.5, color="#333333")
            ax.grid(axis="y", visible=False)
        data = pd.concat(parts, ignore_index=True)
        for ax in axes:
            ax.set_xlim(0, top_of(data[["value"]]))
            ax.tick_params(axis="y", length=0)
        name_rows(axes[0], looks.loc[names, "label"])
    caption = (
        f"{question} Bars: 95 % bootstrap intervals of the mean over worlds, from {fewest_worlds(LEVEL)} "
        "worlds or more. The "
        "title counts differences that are clear for all comparisons together (Bonferroni)."
    )
    return Plot("stability", fig, data, caption, title=title)


def _stability_title(runs: Runs, names: list[str]) -> str:
    """How many algorithms end clearly above and below the baseline, or from where to where all end."""
    if len(names) == 1:
        return _ends_title(runs, *names)
    means, short = runs.means("final"), runs.looks["short"]
    found = [
        compare(means[name], means[BASELINE], len(names) - 1)
        for name in names
        if BASELINE in names and name != BASELINE
    ]
    if not found or all(one.few for one in found):
        (high, first), (low, last) = ((means[name].mean(), short[name]) for name in (names[0], names[-1]))
        return hedged(f"final success from {low:.2f} ({last}) to {high:.2f} ({first})", found)
    above, below = (sum(one.clear and (one.one > one.other) == up for one in found) for up in (True, False))
    return (
        f"{above or 'None'} of {len(found)} algorithms end clearly above {short[BASELINE]}, "
        f"{below or 'none'} clearly below"
    )


def _fill(label: str, color: str) -> dict[str, object]:
    """Dots of runs that never learned are hollow."""
    edge = (
        {"markerfacecolor": "white"}
        if label in HOLLOW
        else {"markeredgecolor": "white", "markeredgewidth": 0.6}
    )
    return {"color": color, "markersize": 8 if MARKERS[label] == "X" else 6.5, **edge}


def _ends(ax: Axes, runs: Runs, name: str, column: str, y: float) -> pd.DataFrame:
    """Dots of the runs of an algorithm, its mean and interval; the rows of what was drawn."""
    arm = runs.runs[runs.runs["algorithm"] == name].dropna(subset=[column]).sort_values("seed")
    spread = np.linspace(-0.25, 0.25, len(arm)) if len(arm) > 1 else [0.0]
    for shift, run in zip(spread, arm.itertuples(), strict=True):
        dot = {"marker": MARKERS[run.outcome], "alpha": 0.75, "zorder": 3, "clip_on": False}
        ax.plot(getattr(run, column), y + shift, linestyle="none", **dot, **_fill(run.outcome, run.color))
    rows = arm[["outcome", "world_seed", "seed", column]].set_axis(["kind", "world", "seed", "value"], axis=1)
    if values := by_world(arm, column):
        row = {"kind": "mean", "value": float(np.mean(list(values.values()))), "low": np.nan, "high": np.nan}
        if len(values) >= fewest_worlds(LEVEL):
            row["low"], row["high"] = np.clip(mean(values, n_draws=4000).interval(LEVEL), 0, 1)
            ax.plot(
                [row["low"], row["high"]], [y, y], color=INK, linewidth=1.8, solid_capstyle="butt", zorder=4
            )
        ax.plot([row["value"]] * 2, [y - 0.28, y + 0.28], color=INK, linewidth=2, zorder=5)
        rows = pd.concat([rows, pd.DataFrame([row])], ignore_index=True)
    keys = {"regime": runs.runs["regime"].iloc[0], "metric": column, "algorithm": name}
    rows = rows.assign(**keys).reindex(columns=[*keys, "kind", "world", "seed", "value", "low", "high"])
    return rows.astype({"world": "Int64", "seed": "Int64"})


def clip_ratio(metrics: Metrics) -> Plot | None:
    """Fig. 5: what is clipped by two definitions, and KL to the behaviour policy."""
    runs = metrics.main
    question = (
        "How much is clipped, by either of two definitions, and how far does the policy move from the one "
        "that sampled?"
    )
    caption = (
        "First row: the share of agent tokens whose term takes the clipped branch, as the algorithm clips; a "
        "turn-level clip takes a whole turn. Second row, one yardstick for all: the share of tokens whose "
        "own ratio leaves the algorithm's range [1 − ε, 1 + ε], whatever the sign of the advantage. Methods "
        "that weigh and do not clip have neither. KL: means are geometric. The lowest 3 % of a logarithmic "
        "axis are cut off."
    )
    if not (title := too_short(runs)):
        title, caption = _clip_title(runs), f"{caption} The title gives means over all iterations."
    return panel_figure(runs, "clip_ratio", CLIP_PANELS, title, question, caption, filling=True, shared=False)


def _clip_title(runs: Runs) -> str:
    """Means of both shares, of the two algorithms that titles compare."""
    names = pair(runs.algorithms)[::-1]
    told, short = [], runs.looks["short"]
    for column in ("clip_fraction", OUT_OF_RANGE):
        curves = [runs.curves(name, column) for name in names]
        if all(map(len, curves)):
            means = [of.mean().groupby("world").mean() for of in curves]
            told.append(compare(means[0], means[-1], 2))
    if not told:
        return "No share of clipped tokens was recorded"
    clipped, *own = told
    if len(names) == 1:
        return capital(f"{short[names[0]]} clips {100 * clipped.one:.0f} % of tokens")
    title = (
        f"{short[names[0]]} clips {100 * clipped.one:.0f} % of tokens, {short[names[1]]} "
        f"{100 * clipped.other:.0f} %"
    )
    for one in own:
        title += (
            f"{clipped.note}; by their own ratios it would be {100 * one.one:.0f} % and "
            f"{100 * one.other:.0f} %{one.note}"
        )
    return hedged(title, told)


# ---- why ----------------------------------------------------------------------------------------
def norms(metrics: Metrics) -> Plot | None:
    """Fig. 3b-d: norms of the gradient, of the surrogate's gradient and of the clipping bias, and the
    divisor."""
    runs = metrics.main
    title = too_short(runs) or _course_title(runs, "gradient_norm", "gradient norm")
    question = (
        "Do gradients explode before success falls? L2 norms before any clipping, means over each "
        "iteration's updates."
    )
    caption = (
        "Largest update: of an iteration's. ‖C‖: norm of the gradient that clipping removed, measured on one "
        "update in a few where the objective does not use it. Not drawn: the surrogate's norm where it is "
        "the whole gradient's, and a divisor of 1. Means are geometric. The title compares the first third "
        "of the iterations with the last. The lowest 3 % of a logarithmic axis are cut off."
    )
    return panel_figure(runs, "norms", NORM_PANELS, title, question, caption)


def signals(metrics: Metrics) -> Plot | None:
    """Fig. 2: entropy, format, ratios, critic and the spread of advantages, which may change before success
    does."""
    runs = metrics.main
    title = too_short(runs) or _course_title(runs, "entropy", "entropy")
    question = (
        "What changes while success does? Entropy, format, ratios, critic and advantages of the training "
        "batches."
    )
    caption = (
        "Effective sample size: of the trajectories' product ratios, as a share of the minibatch. Explained "
        "variance and the variance of advantages (before whitening) are those of the sampled batch. Means on "
        "a logarithmic axis are geometric, and so are those of the title, which compares the first third of "
        "the iterations with the last."
    )
    return panel_figure(runs, "signals", SIGNAL_PANELS, title, question, caption)


def _course_title(runs: Runs, column: str, what: str) -> str:
    """A quantity in the first and in the last third of the iterations at full staleness, of the two compared
    algorithms."""
    told, found = [], []
    for name in pair(runs.algorithms):
        curves = runs.curves(name, column)
        curves = curves[curves.index >= runs.filled]
        if len(curves) > 2:
            change = compare(geometric(curves, "late"), geometric(curves, "early"), 2)
            early, late = np.exp(change.other), np.exp(change.one)
            note = change.note.replace("difference", "change")
            begin = "" if told else f" {what} goes"
            told.append(f"{runs.looks.loc[name, 'short']}'s{begin} from {early:.2f} to {late:.2f}{note}")
            found.append(change)
    return hedged(", ".join(told), found) if told else f"No {what} was recorded"


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
        (HAPPENS, stability),
        (HAPPENS, clip_ratio),
        (WHY, norms),
        (WHY, signals),
    )
}
