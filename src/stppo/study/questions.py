"""The study's picture of its own questions: a panel for each group of arms that answer one together
(`stppo.study.arms`)."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from stppo.config.files import options
from stppo.figures.curves import INK, LEVEL, name_rows, page, source_of
from stppo.figures.style import Plot, style
from stppo.figures.words import capital, few_words, signed
from stppo.record.runs import Metrics
from stppo.record.tidy import Runs
from stppo.stats import by_world, contrast, fewest_worlds, joint_level, mean
from stppo.study import arms
from stppo.study.arms import MAIN, Group

ROW, HEAD = 0.19, 0.7  # inches of an arm, and of a panel's question


def effects(metrics: Metrics, groups: Mapping[str, Group]) -> pd.DataFrame:
    """Main effects of the factorials whose arms are all recorded, on final sampled success; a row a factor of
    two levels.

    Columns: group, factor, lower and upper (its levels), value (upper minus lower, mean over the other
    factors' settings and over the worlds that all arms share), low and high (worlds resampled; all of them
    hold at once with 95 %; NaN from fewer worlds than that level needs), worlds.
    """
    rows, found = [], []
    for group in groups.values():
        values = {arm: by_world(metrics.arm(group.regimes[0], arm), "final") for arm in group.levels()}
        if values and set.intersection(*(set(of) for of in values.values())):
            for factor, levels in group.factors.items():
                if len(levels) == 2:
                    weights = group.main_effect(factor)
                    found.append(contrast([values[arm] for arm in weights], list(weights.values())))
                    rows.append([group.name, factor, *levels])
    level = joint_level(max(1, len(found)))
    for row, one in zip(rows, found, strict=True):
        ends = one.interval(level) if one.n_worlds >= fewest_worlds(level) else (np.nan, np.nan)
        row += [one.value, *ends, one.n_worlds]
    return pd.DataFrame(rows, columns=["group", "factor", "lower", "upper", "value", "low", "high", "worlds"])


def by_level(metrics: Metrics, groups: Mapping[str, Group]) -> pd.DataFrame:
    """Factors of more than two levels, of the factorials whose arms are all recorded; a row each. Columns:
    group, factor, said (each level and its final sampled success, mean over the other factors' settings and
    over the worlds that all arms share; the highest first), worlds."""
    rows = []
    for group in groups.values():
        values = {arm: by_world(metrics.arm(group.regimes[0], arm), "final") for arm in group.levels()}
        worlds = set.intersection(*map(set, values.values())) if values else ()
        ends = pd.Series({arm: np.mean([of[w] for w in worlds]) for arm, of in values.items() if worlds})
        for factor, levels in group.factors.items():
            if len(levels) > 2 and len(ends):
                means = ends.groupby({arm: of[factor] for arm, of in group.levels().items()}).mean()
                means = means.sort_values(ascending=False, kind="stable")
                said = ", ".join(f"{level} {end:.2f}" for level, end in means.items())
                rows.append([group.name, factor, said, len(worlds)])
    return pd.DataFrame(rows, columns=["group", "factor", "said", "worlds"])


def questions_figure(metrics: Metrics, groups: Mapping[str, Group] | None = None) -> Plot | None:
    """Final sampled success of every run, arm by arm, below the question that the arms answer. A group of
    which every recorded arm is shown already is left out; None where no group has two. groups: of the runs'
    preset, read from its YAML by default."""
    if groups is None:
        preset = metrics.runs[0]["preset"]
        groups = arms.groups(preset) if preset in options("preset") else {}
    ends = ends_of(metrics.all)
    panels: dict[str, pd.DataFrame] = {}
    for name, group in groups.items():
        known = ends.reindex(itertools.product(group.regimes, group.arms)).dropna(subset="mean")
        shown = set().union(*(set(panel.index) for panel in panels.values()))
        if len(known) > 1 and not set(known.index) <= shown:
            panels[name] = known.sort_values("mean", ascending=False, kind="stable")
    if not panels:
        return None
    found, levels = effects(metrics, groups), by_level(metrics, groups)
    drawn = pd.concat(
        [panel.assign(group=name).reset_index() for name, panel in panels.items()], ignore_index=True
    )
    several = drawn["group"].map(lambda name: len(groups[name].regimes) > 1) & (drawn["regime"] != MAIN)
    drawn["label"] += np.where(several, ", " + drawn["regime"].str.lower().str.replace("_", " "), "")
    drawn["label"] += " (" + drawn["worlds"].astype(str) + ")"
    title = _title(next(iter(panels.values())), found, levels)
    question = "Which arm answers what? Final success of every run, sampled, and the mean over worlds."
    firm = drawn["low"].notna().any()
    bar = Line2D([], [], color=INK, linewidth=2, marker="|", markersize=11, markeredgewidth=2)
    bar.set_linestyle("-" if firm else "none")
    bar.set_label("mean, 95 % interval over worlds" if firm else "mean")
    heights = [ROW * len(rows) + HEAD for rows in panels.values()]
    with style():
        source = source_of(metrics.all.of(drawn["regime"], drawn["algorithm"]))
        fig = page(title, question, source, sum(heights), [bar])
        # Letters are wider in the saved file than when it is laid out.
        fig.get_layout_engine().set(w_pad=0.25)
        ratios = [inches - 0.45 for inches in heights]
        axes = fig.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for ax, name in zip(axes, panels, strict=True):
            _panel(ax, metrics.all, drawn[drawn["group"] == name], groups[name], found, levels)
        axes[-1].set(xlim=(0, 1), xlabel="final success, sampled")
    caption = (
        f"{question} Arms of one question in order of their mean, with their number of worlds; those with "
        f"runs in fewer than {fewest_worlds(LEVEL)} worlds get no interval."
    )
    if n := len(found):
        level = joint_level(n)
        caption += (
            " An effect of a factor is the mean over the settings of the others, in the worlds that all arms "
            f"share. Its interval is of {100 * level:.4g} %, so that those of all {n} hold at once with 95 % "
            f"(Bonferroni); from fewer than {fewest_worlds(level)} worlds it has none."
        )
    data = drawn[["group", "regime", "algorithm", "label", "mean", "low", "high", "worlds"]]
    return Plot("questions", fig, data, caption, {"effects": found}, title)


def ends_of(runs: Runs) -> pd.DataFrame:
    """Where each arm's runs end, sampled, by (regime, algorithm): label, color, mean over worlds, low, high
    (its interval, from enough worlds), worlds."""
    rows = {}
    for key, arm in runs.runs.groupby(["regime", "algorithm"]):
        values, low, high = by_world(arm, "final"), np.nan, np.nan
        if len(values) >= fewest_worlds(LEVEL):
            low, high = np.clip(mean(values, n_draws=4000).interval(LEVEL), 0, 1)
        row = {
            "label": arm["label"].iloc[0],
            "color": arm["color"].iloc[0],
            "mean": np.mean(list(values.values())),
        }
        rows[key] = row | {"low": low, "high": high, "worlds": len(values)}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["regime", "algorithm"])


def _title(first: pd.DataFrame, found: pd.DataFrame, levels: pd.DataFrame) -> str:
    """The effects of all factorials, or from where to where the first question's arms end."""
    if found.empty and levels.empty:
        high, low = first.iloc[0], first.iloc[-1]
        most, least = f"{high['mean']:.2f} (“{high['label']}”)", f"{low['mean']:.2f} (“{low['label']}”)"
        return f"{len(first)} arms end from {most} down to {least}"
    clear, few = (found["low"] > 0) | (found["high"] < 0), found["low"].isna()
    told = [
        f"{factor}, {rows['upper'].iloc[0]} for {rows['lower'].iloc[0]}: "
        f"{' and '.join(map(signed, rows['value']))}"
        for factor, rows in found[clear].groupby("factor", sort=False)
    ]
    said = [f"What changes final success: {'; '.join(told)}"] if told else []
    named = levels["factor"] + " (" + levels["said"] + ")"
    many = levels["worlds"] >= fewest_worlds(LEVEL)
    said += [f"Means by {name}" for name in named[many]]
    if len(unclear := found["factor"][~clear & ~few]):
        said.append(f"No clear effect: {' and '.join(dict.fromkeys(unclear))}")
    if names := [*named[~many], *found["factor"][few]]:
        worlds = max([*levels["worlds"][~many], *found["worlds"][few]])
        said.append(f"{capital(few_words(worlds))}: {' and '.join(dict.fromkeys(names))}")
    return ". ".join(said)


def _panel(
    ax: Axes, runs: Runs, rows: pd.DataFrame, group: Group, found: pd.DataFrame, levels: pd.DataFrame
) -> None:
    """One question: dots of the runs, mean and interval of each arm."""
    for y, row in enumerate(rows.itertuples()):
        arm = runs.runs[(runs.runs["regime"] == row.regime) & (runs.runs["algorithm"] == row.algorithm)]
        ends = list(by_world(arm, "final").values())
        ax.plot(ends, [y] * len(ends), "o", color=row.color, markersize=3.5, alpha=0.55, clip_on=False)
        ax.plot([row.low, row.high], [y, y], color=INK, linewidth=1.8, solid_capstyle="butt", zorder=4)
        ax.plot([row.mean] * 2, [y - 0.3, y + 0.3], color=INK, linewidth=2, zorder=5)
    name_rows(ax, rows["label"], 7.5)
    ax.tick_params(axis="x", labelbottom=True, labelsize=8)
    ax.grid(axis="y", visible=False)
    told = [f"{row.factor} ({row.said})" for row in levels.itertuples() if row.group == group.name]
    told += [
        f"{row.factor} {signed(row.value)}"
        + ("" if np.isnan(row.low) else f" [{signed(row.low)}, {signed(row.high)}]")
        for row in found.itertuples()
        if row.group == group.name
    ]
    text = group.question + (f" Effects: {'; '.join(told)}" if told else "")
    ax.set_title(textwrap.fill(text, 62), fontsize=9, color="#333333", x=0, loc="left")
