"""The study's picture of its own questions: a panel for each group of arms that answer one together (`stppo.study.arms`)."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from stppo.config.files import options
from stppo.figures.curves import WIDTH, page, source_of
from stppo.figures.findings import few_words, signed
from stppo.figures.style import Plot, style
from stppo.record.runs import Metrics
from stppo.stats import by_world, contrast, fewest_worlds, joint_level, mean
from stppo.study import arms
from stppo.study.arms import MAIN, Group

LEVEL = 0.95
ROW, HEAD = 0.25, 0.68  # inches of an arm, and of a panel's question
IN_ONE_COLUMN = 6  # panels; more are set in two


def effects(metrics: Metrics, groups: Mapping[str, Group]) -> pd.DataFrame:
    """Main effects of the factorials whose arms are all recorded, on final sampled success; a row a factor of two levels.

    Columns: group, factor, lower and upper (its levels), value (upper minus lower, mean over the other factors' settings and
    over the worlds that all arms share), low and high (worlds resampled; all of them hold at once with 95 %; NaN from fewer
    worlds than that level needs), worlds.
    """
    rows, found = [], []
    for group in groups.values():
        values = {arm: by_world(metrics.arm(group.regimes[0], arm), "final") for arm in group.levels()}
        if not values or not set.intersection(*(set(of) for of in values.values())):
            continue
        for factor, levels in group.factors.items():
            if len(levels) == 2:
                weights = group.main_effect(factor)
                found.append(contrast([values[arm] for arm in weights], list(weights.values())))
                rows.append([group.name, factor, *levels])
    level = _level(len(found))
    for row, one in zip(rows, found, strict=True):
        enough = one.n_worlds >= fewest_worlds(level)
        row += [one.value, *(one.interval(level) if enough else (math.nan, math.nan)), one.n_worlds]
    return pd.DataFrame(rows, columns=["group", "factor", "lower", "upper", "value", "low", "high", "worlds"])


def _level(n: int) -> float:
    """Of each of n effects that are looked at together."""
    return joint_level(max(1, n), 1 - LEVEL)


def questions_figure(metrics: Metrics, groups: Mapping[str, Group] | None = None) -> Plot | None:
    """Final sampled success of every run, arm by arm, below the question that the arms answer. A group of which every recorded
    arm is shown already is left out; None where no group has two. groups: of the runs' preset, read from its YAML by default."""
    if groups is None:
        preset = metrics.runs[0]["preset"]
        groups = arms.groups(preset) if preset in options("preset") else {}
    panels: dict[str, list[tuple[str, str]]] = {}
    for name, group in groups.items():
        rows = _recorded(metrics, group)
        if len(rows) > 1 and not set(rows) <= set(itertools.chain(*panels.values())):
            panels[name] = rows
    if not panels:
        return None
    found = effects(metrics, groups)
    drawn = [arm for rows in panels.values() for arm in rows]
    regimes, names = ({arm[i] for arm in drawn} for i in (0, 1))
    title = _title(metrics, groups, found)
    question = "Which arm answers what? Final success of every run, sampled, and the mean over worlds."
    bar = Line2D([], [], color="#222222", linewidth=2, marker="|", markersize=11, markeredgewidth=2)
    firm = any(metrics.arm(*arm)["world_seed"].nunique() >= fewest_worlds(LEVEL) for arm in drawn)
    bar.set_linestyle("-" if firm else "none")
    bar.set_label(f"mean, {LEVEL:.0%} interval over worlds".replace("%", " %") if firm else "mean")
    columns = _columns({name: ROW * len(rows) + HEAD for name, rows in panels.items()})
    height, width = max(sum(column.values()) for column in columns), WIDTH * (1 + 0.7 * (len(columns) - 1))
    table = []
    with style():
        source = source_of(metrics, sorted(regimes), sorted(names))
        fig = page(title, question, source, height, [bar], width)
        grid = fig.add_gridspec(1, len(columns))
        for place, column in zip(grid, columns, strict=True):
            ratios = [inches - 0.35 for inches in column.values()]
            axes = place.subgridspec(len(column), 1, height_ratios=ratios).subplots(
                sharex=True, squeeze=False
            )[:, 0]
            for ax, name in zip(axes, column, strict=True):
                table += _panel(ax, metrics, groups[name], panels[name], found[found["group"] == name])
            axes[-1].set(xlim=(0, 1), xlabel="final success, sampled")
    caption = (
        f"{question} Arms of one question in order of their mean, with their number of worlds; those with runs in fewer than "
        f"{fewest_worlds(LEVEL)} worlds get no interval."
    )
    if n := len(found):
        level = _level(n)
        caption += (
            " An effect of a factor is the mean over the settings of the others, in the worlds that all arms share. Its interval "
            f"is of {100 * level:.4g} %, so that those of all {n} hold at once with {100 * LEVEL:.0f} % (Bonferroni); from fewer "
            f"than {fewest_worlds(level)} worlds it has none."
        )
    return Plot("questions", fig, pd.DataFrame(table), caption, {"effects": found}, title)


def _recorded(metrics: Metrics, group: Group) -> list[tuple[str, str]]:
    """(regime, arm) of a group's arms that have runs, the highest first."""
    both = [(regime, arm) for regime in group.regimes for arm in group.arms]
    ends = {key: metrics.arm(*key)["final"].mean() for key in both if len(metrics.arm(*key))}
    return sorted(ends, key=lambda key: -ends[key])


def _columns(heights: Mapping[str, float]) -> list[dict[str, float]]:
    """The panels, with their heights in inches, in one column, or in two that are as even as their order allows."""
    if len(heights) <= IN_ONE_COLUMN:
        return [dict(heights)]
    names = list(heights)
    cuts = [(names[:cut], names[cut:]) for cut in range(1, len(names))]
    best = min(cuts, key=lambda both: max(sum(heights[name] for name in column) for column in both))
    return [{name: heights[name] for name in column} for column in best]


def _title(metrics: Metrics, groups: Mapping[str, Group], found: pd.DataFrame) -> str:
    """The effects of all factorials in words, or from where to where the first question's arms end."""
    if len(found):
        clear = (found["low"] > 0) | (found["high"] < 0)
        told = [
            f"{factor}, {rows['upper'].iloc[0]} for {rows['lower'].iloc[0]}: {' and '.join(map(signed, rows['value']))}"
            for factor, rows in found[clear].groupby("factor", sort=False)
        ]
        said = [f"What changes final success: {'; '.join(told)}"] if told else []
        few = found["low"].isna()
        names = [" and ".join(dict.fromkeys(found["factor"][of])) for of in (~clear & ~few, few)]
        said += [f"No clear effect: {names[0]}"] if names[0] else []
        said += [f"{few_words(found['worlds'][few].max())}: {names[1]}"] if names[1] else []
        return ". ".join(said)
    group = next(group for group in groups.values() if len(_recorded(metrics, group)) > 1)
    ends = [
        (metrics.arm(*arm).groupby("world_seed")["final"].mean().mean(), metrics.look(arm[1]).label)
        for arm in _recorded(metrics, group)
    ]
    (most, first), *_, (least, last) = ends
    return f"{len(ends)} arms end from {most:.2f} (“{first}”) down to {least:.2f} (“{last}”)"


def _panel(
    ax: Axes, metrics: Metrics, group: Group, rows: list[tuple[str, str]], found: pd.DataFrame
) -> list[dict]:
    """One question: dots of the runs, mean and interval of each arm; the rows of what was drawn."""
    drawn = []
    for y, (regime, name) in enumerate(rows):
        look, values = metrics.look(name), by_world(metrics.arm(regime, name), "final")
        ends = np.fromiter(values.values(), float)
        ax.plot(ends, np.full(len(ends), y), "o", color=look.color, markersize=4, alpha=0.55, clip_on=False)
        low = high = np.nan
        if len(values) >= fewest_worlds(LEVEL):
            low, high = np.clip(mean(values, n_draws=4000).interval(LEVEL), 0, 1)
            ax.plot([low, high], [y, y], color="#222222", linewidth=1.8, solid_capstyle="butt", zorder=4)
        ax.plot([ends.mean()] * 2, [y - 0.3, y + 0.3], color="#222222", linewidth=2, zorder=5)
        label = look.label
        if regime != MAIN and len(group.regimes) > 1:
            label += f", {regime.lower().replace('_', ' ')}"
        key = {"group": group.name, "regime": regime, "algorithm": name, "label": f"{label} ({len(values)})"}
        drawn.append(key | {"mean": ends.mean(), "low": low, "high": high, "worlds": len(values)})
    ax.set_yticks(range(len(rows)), [row["label"] for row in drawn])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0, labelcolor="#333333", labelsize=8.5)
    ax.grid(axis="y", visible=False)
    told = [
        f"{row.factor} {signed(row.value)}"
        + ("" if math.isnan(row.low) else f" [{signed(row.low)}, {signed(row.high)}]")
        for row in found.itertuples()
    ]
    text = group.question + (f" Effects: {'; '.join(told)}" if told else "")
    ax.set_title(textwrap.fill(text, 58), fontsize=9.5, color="#333333", x=0, loc="left")
    return drawn
