"""Token, turn, sequence: what a coarser ratio does where nothing else differs, by the recorded configs."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Mapping

import numpy as np
import pandas as pd

from stppo.config.algorithms import in_order
from stppo.figures import findings
from stppo.figures.curves import (
    LEVEL,
    SUCCESS,
    page,
    source_of,
    start_handle,
    start_line,
    top_of,
)
from stppo.figures.findings import main_regime
from stppo.figures.style import Plot, style
from stppo.record.runs import Metrics
from stppo.stats import by_world, fewest_worlds, mean

LABEL = 0.16  # of an axis: height of a label of two lines
RUNGS = ("token", "turn", "sentence", "sequence")


def granularity(metrics: Metrics) -> Plot | None:
    """Final success as the ratio goes from token to turn to sequence, everything else equal by the recorded configs."""
    regime = main_regime(metrics)
    ladders = families(metrics, regime)
    if not ladders:
        return None
    rungs = [rung for rung in RUNGS if any(rung in family for family in ladders)]
    question = (
        "Does a coarser ratio help? Final sampled success, all else in the configs of a line being equal."
    )
    algorithms = in_order(name for family in ladders for name in family.values())
    title = findings.coarser(metrics, regime, ladders)
    rows = []
    with style():
        n_columns = min(3 if len(ladders) > 4 else 4, len(ladders))
        n_rows = -(-len(ladders) // n_columns)
        fig = page(
            title, question, source_of(metrics, [regime], algorithms), 2.6 * n_rows + 0.1, [start_handle()]
        )
        axes = list(fig.subplots(n_rows, n_columns, squeeze=False, sharey=True, sharex=True).flat)
        for ax, family in zip(axes, ladders, strict=False):
            middles, labelled = {}, -math.inf
            for rung, name in family.items():
                x, color = rungs.index(rung), metrics.look(name).color
                arm = metrics.arm(regime, name).sort_values("seed")
                spread = 0.3 * (np.arange(len(arm)) / max(1, len(arm) - 1) - 0.5) if len(arm) > 1 else [0.0]
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
                values = by_world(arm, "final")
                found = mean(values, n_draws=4000)
                low, high = (
                    found.interval(LEVEL) if len(values) >= fewest_worlds(LEVEL) else (math.nan, math.nan)
                )
                ax.plot([x, x], np.clip([low, high], 0, 1), color="#222222", linewidth=1.8, zorder=4)
                ax.plot([x], [found.value], "D", color=color, ms=8, mec="white", zorder=5)
                label = metrics.look(name).label.replace(", ", ",\n")
                outermost = x == 0 and "\n" in label  # begins at the axis instead of crossing it
                if outermost:
                    parts = (textwrap.wrap(part, 14, break_on_hyphens=False) for part in label.split("\n"))
                    label = "\n".join(itertools.chain.from_iterable(parts))
                above = arm["final"].max() < 0.97 - 0.06 * (1 + label.count("\n"))  # else it leaves the panel
                place = arm["final"].max() if above else arm["final"].min()
                if above and "\n" in label and abs(place - labelled) < LABEL:
                    place = labelled + LABEL  # so wide a label would overlap the one before
                labelled = place if above else labelled
                ax.annotate(
                    label,
                    (-0.45 if outermost else x, place),
                    xytext=(0, 9 if above else -9),
                    textcoords="offset points",
                    ha="left" if outermost else "center",
                    va="bottom" if above else "top",
                    fontsize=7.5,
                    color=color,
                    fontweight="bold",
                )
                middles[x] = found.value
                keys = {
                    "regime": regime,
                    "family": _family_name(metrics, family),
                    "granularity": rung,
                    "algorithm": name,
                }
                rows += [
                    {**keys, "kind": "run", "world": r.world_seed, "seed": r.seed, "value": r.final}
                    for r in arm.itertuples()
                ]
                rows.append({**keys, "kind": "mean", "value": found.value, "low": low, "high": high})
            ax.plot(list(middles), list(middles.values()), color="#999999", linewidth=1.3, zorder=2)
            start_line(ax, metrics, regime, list(family.values()), SUCCESS)
            ax.set_xticks(range(len(rungs)), rungs)
            ax.set_xlim(-0.5, len(rungs) - 0.5)
        for ax in axes[len(ladders) :]:
            ax.set_visible(False)
        for ax in axes[max(0, len(ladders) - n_columns) : len(ladders)]:
            ax.tick_params(labelbottom=True)  # the lowest of its column
        axes[0].set_ylim(0, top_of([pd.DataFrame(rows)[["value"]]]))
        for ax in axes[::n_columns]:
            ax.set_ylabel("final success, sampled")
    caption = (
        f"{question} Dots: runs; diamonds: means over worlds, with {LEVEL:.0%} bootstrap intervals from {fewest_worlds(LEVEL)} "
        "worlds or more. Algorithms share a panel where their objective and training differ in the ratio's granularity and "
        "aggregation alone, clip range included."
    ).replace("%", " %", 1)
    return Plot("granularity", fig, pd.DataFrame(rows), caption, title=title)


def families(metrics: Metrics, regime: str) -> list[dict[str, str]]:
    """Granularity -> algorithm, for each set of algorithms whose recorded configs differ in it alone."""
    found: dict[str, dict[str, str]] = {}
    for name in in_order(metrics.algorithms(regime)):
        record = next(r for r in metrics.runs if (r["regime"], r["algorithm"]) == (regime, name))
        ratio = (record.get("objective") or {}).get("ratio")
        if not ratio or "granularity" not in ratio:
            continue
        rest = {
            **record["objective"],
            "ratio": {k: v for k, v in ratio.items() if k not in ("granularity", "aggregation")},
        }
        if ratio["granularity"] != "token" and ratio.get("aggregation") != "geometric":
            rest["ratio"]["aggregation"] = ratio.get("aggregation")
        key = json.dumps([rest, record.get("training")], sort_keys=True)
        found.setdefault(key, {}).setdefault(ratio["granularity"], name)
    ladders = [{rung: family[rung] for rung in RUNGS if rung in family} for family in found.values()]
    return [ladder for ladder in ladders if len(ladder) > 1]


def _family_name(metrics: Metrics, family: Mapping[str, str]) -> str:
    return metrics.look(next(iter(family.values()))).label
