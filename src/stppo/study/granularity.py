"""Token, turn, sequence: what a coarser ratio does where nothing else differs, by the recorded configs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from stppo.figures.curves import INK, LEVEL, page, source_of, start_handle, start_line, top_of
from stppo.figures.style import Plot, style
from stppo.figures.words import compare, hedged, too_short
from stppo.record.runs import Metrics
from stppo.record.tidy import Runs
from stppo.stats import by_world, fewest_worlds, mean

RUNGS = ("token", "turn", "sentence", "sequence")


def granularity(metrics: Metrics) -> Plot | None:
    """Final success as the ratio goes from token to turn to sequence, everything else equal by the recorded
    configs."""
    main = metrics.main
    regime = main.runs["regime"].iloc[0]
    every = metrics.all.of([regime])
    ladders = families((record for record in metrics.runs if record["regime"] == regime), every.algorithms)
    if not ladders:
        return None
    runs = every.of(algorithms=[name for ladder in ladders for name in ladder.values()])
    rungs = [rung for rung in RUNGS if any(rung in ladder for ladder in ladders)]
    question = (
        f"Does a coarser ratio help in regime {regime}? Final sampled success, all else in the configs of a "
        "line being equal."
    )
    title = too_short(runs) or _title(runs, ladders)
    parts = []
    with style():
        n_columns = min(3 if len(ladders) > 4 else 4, len(ladders))
        n_rows = -(-len(ladders) // n_columns)
        fig = page(title, question, source_of(runs), 2.6 * n_rows + 0.1, [start_handle()])
        axes = list(fig.subplots(n_rows, n_columns, squeeze=False, sharey=True).flat)
        for ax, ladder in zip(axes, ladders, strict=False):
            key = {"regime": regime, "family": runs.looks.loc[next(iter(ladder.values())), "label"]}
            rows = [_rung(ax, runs, name, rungs.index(rung)) for rung, name in ladder.items()]
            places = [rungs.index(rung) for rung in ladder]
            means = [part["value"].iloc[-1] for part in rows]
            ax.plot(places, means, color="#999999", linewidth=1.3, zorder=2)
            for (rung, name), part in zip(ladder.items(), rows, strict=True):
                parts.append(part.assign(**key, granularity=rung, algorithm=name))
            start_line(ax, runs.runs[runs.runs["algorithm"].isin(ladder.values())])
            names = {rungs.index(rung): runs.looks.loc[name, "label"] for rung, name in ladder.items()}
            ticks = [
                f"{rung}\n{textwrap.fill(names.get(x, ''), 13, break_on_hyphens=False)}"
                for x, rung in enumerate(rungs)
            ]
            ax.set_xticks(range(len(rungs)), ticks, fontsize=7.5)
            ax.set_xlim(-0.5, len(rungs) - 0.5)
        for ax in axes[len(ladders) :]:
            ax.set_visible(False)
        columns = [
            "regime",
            "family",
            "granularity",
            "algorithm",
            "kind",
            "world",
            "seed",
            "value",
            "low",
            "high",
        ]
        data = pd.concat(parts, ignore_index=True)[columns]
        axes[0].set_ylim(0, top_of(data[["value"]]))
        for ax in axes[::n_columns]:
            ax.set_ylabel("final success, sampled")
    caption = (
        f"{question} Dots: runs; diamonds: means over worlds, with 95 % bootstrap intervals from "
        f"{fewest_worlds(LEVEL)} worlds or more. Algorithms share a panel where their objective and training "
        "differ in the ratio's granularity and aggregation alone, clip range included."
    )
    return Plot("granularity", fig, data, caption, title=title)


def _rung(ax, runs: Runs, name: str, x: int) -> pd.DataFrame:
    """Dots of an arm's runs, its mean and interval; the rows of what was drawn."""
    arm = runs.runs[runs.runs["algorithm"] == name].sort_values("seed")
    color, values = runs.looks.loc[name, "color"], by_world(arm, "final")
    spread = np.linspace(-0.15, 0.15, len(arm)) if len(arm) > 1 else [0.0]
    ax.plot(
        x + np.asarray(spread),
        arm["final"],
        "o",
        color=color,
        ms=4.5,
        alpha=0.55,
        mec="white",
        mew=0.4,
        zorder=3,
    )
    found, low, high = mean(values, n_draws=4000), np.nan, np.nan
    if len(values) >= fewest_worlds(LEVEL):
        low, high = found.interval(LEVEL)
    ax.plot([x, x], np.clip([low, high], 0, 1), color=INK, linewidth=1.8, zorder=4)
    ax.plot([x], [found.value], "D", color=color, ms=8, mec="white", zorder=5)
    dots = (
        arm[["world_seed", "seed", "final"]].set_axis(["world", "seed", "value"], axis=1).assign(kind="run")
    )
    return pd.concat([dots, pd.DataFrame([{"kind": "mean", "value": found.value, "low": low, "high": high}])])


def _title(runs: Runs, ladders: list[dict[str, str]]) -> str:
    """In how many steps to a coarser ratio success ends higher, and in how many clearly higher or lower."""
    names = [list(ladder.values()) for ladder in ladders]
    steps = [step for ladder in names for step in zip(ladder, ladder[1:], strict=False)]
    means = runs.means("final")
    found = [compare(means[one], means[other], len(steps)) for one, other in steps]
    higher = sum(one.other > one.one for one in found)
    better, worse = (sum(one.clear and (one.other > one.one) == up for one in found) for up in (True, False))
    counted = "" if all(one.few for one in found) else f", clearly in {better or 'none'}"
    counted += f", clearly lower in {worse}" if worse else ""
    regime = runs.runs["regime"].iloc[0]
    return hedged(
        f"in {regime} a coarser ratio ends higher in {higher or 'none'} of {len(steps)} comparisons{counted}",
        found,
    )


def families(records: Iterable[dict[str, Any]], order: list[str]) -> list[dict[str, str]]:
    """Granularity -> algorithm, for each set of algorithms whose recorded configs differ in it alone; in an
    order of names."""
    first: dict[str, dict[str, Any]] = {}
    for record in records:
        first.setdefault(record["algorithm"], record)
    found: dict[str, dict[str, str]] = {}
    for name in order:
        objective = first[name].get("objective") or {}
        ratio = dict(objective.get("ratio") or {})
        if (rung := ratio.pop("granularity", None)) is None:
            continue
        aggregation = ratio.pop("aggregation", None)
        if rung != "token" and aggregation != "geometric":
            ratio["aggregation"] = aggregation
        key = json.dumps([{**objective, "ratio": ratio}, first[name].get("training")], sort_keys=True)
        found.setdefault(key, {}).setdefault(rung, name)
    ladders = [{rung: family[rung] for rung in RUNGS if rung in family} for family in found.values()]
    return [ladder for ladder in ladders if len(ladder) > 1]
