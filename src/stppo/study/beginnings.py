"""What in the first iterations tells how a run ends: every signal's early mean against final success, run by
run."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from scipy import stats

from stppo.figures.curves import INK, line_handles, name_rows, page, source_of
from stppo.figures.style import Plot, style
from stppo.figures.words import NAMES, signed
from stppo.record.runs import Metrics
from stppo.record.tidy import KEYS, Runs

EARLY = 10  # iterations whose mean is taken
FEWEST = 8  # runs below which nothing is said
SIGNALS = (
    "entropy",
    "valid_format_rate",
    "kl_behaviour_k3",
    "kl_policy_to_behaviour",
    "effective_sample_size",
    "clip_fraction",
    "ratio_p99_token",
    "ratio_p99_turn",
    "update_norm",
    "gradient_norm",
    "clipping_bias_norm",
    "advantage_raw_std",
)


def beginnings_of(runs: Runs) -> pd.DataFrame:
    """One row per run: `algorithm`, `world`, `seed`, `final` success, and each signal's mean over its first
    `EARLY` iterations; NaN where it was not recorded. Runs of fewer than twice as many iterations are left
    out."""
    long = runs.runs[runs.runs["iterations"] >= 2 * EARLY]
    rows = runs.rows.reindex(columns=[*KEYS, "iteration", *SIGNALS])
    early = rows[rows["iteration"].between(1, EARLY)].groupby(KEYS)[list(SIGNALS)].mean()
    columns = [*KEYS, "world_seed", "final"]
    return long[columns].rename(columns={"world_seed": "world"}).merge(early, left_on=KEYS, right_index=True)


def correlations(table: pd.DataFrame) -> pd.DataFrame:
    """Rank correlation of each signal with final success, over the runs of a world, and its mean over the
    worlds.

    Columns: `signal`, `correlation` (mean over worlds), `low`, `high` (of the worlds), `runs`, `worlds`. A
    world counts where `FEWEST` runs have the signal and it is not the same in all of them; a signal without
    such a world is left out.
    """
    rows = []
    for signal in SIGNALS:
        worlds = [world for _, world in table.dropna(subset=[signal, "final"]).groupby("world")]
        worlds = [
            w for w in worlds if len(w) >= FEWEST and min(w[signal].nunique(), w["final"].nunique()) > 1
        ]
        found = [float(stats.spearmanr(world[signal], world["final"]).statistic) for world in worlds]
        if found:
            row = {
                "signal": signal,
                "correlation": float(np.mean(found)),
                "low": min(found),
                "high": max(found),
            }
            rows.append({**row, "runs": sum(map(len, worlds)), "worlds": len(found)})
    return pd.DataFrame(rows)


def beginnings(metrics: Metrics) -> Plot | None:
    """Rank correlations of early signals with final success, and the strongest of them run by run."""
    runs = metrics.main
    table = beginnings_of(runs)
    found = correlations(table)
    if found.empty:
        return None
    first = found.loc[found["correlation"].abs().idxmax()]
    name = NAMES[first["signal"]]
    title = (
        f"Runs end {'high' if first['correlation'] > 0 else 'low'} where {name} is high in the first {EARLY} "
        f"iterations: rank correlation {signed(first['correlation']).removeprefix('+')} over methods"
    )
    question = (
        f"What in the first {EARLY} iterations tells how a run ends? Left: the strongest signal, a dot for "
        "each run. Right: rank correlation of each signal with final success, over the methods of a world."
    )
    drawn = found.sort_values("correlation", key=abs, ascending=False).reset_index(drop=True)
    with style():
        fig = page(title, question, source_of(runs), 3.6, line_handles(runs.looks))
        left, right = fig.subplots(1, 2, width_ratios=[1.15, 1])
        palette = dict(runs.looks["color"])
        sns.scatterplot(
            table,
            x=first["signal"],
            y="final",
            hue="algorithm",
            palette=palette,
            legend=False,
            ax=left,
            alpha=0.85,
        )
        left.set(
            xlabel=f"{name}, mean of the first {EARLY} iterations",
            ylabel="final success, sampled",
            ylim=(0, None),
        )
        colors = np.where(drawn["correlation"] > 0, "#0061A8", "#D55E00")
        right.barh(drawn.index, drawn["correlation"], color=colors, height=0.62)
        several = drawn[drawn["worlds"] > 1]
        right.hlines(several.index, several["low"], several["high"], color=INK, linewidth=1.2)
        right.axvline(0, color="#999999", linewidth=0.8)
        name_rows(right, [NAMES[signal] for signal in drawn["signal"]], 8.5)
        right.set(xlim=(-1, 1), xlabel="rank correlation with final success")
        right.grid(axis="y", visible=False)
    caption = (
        f"{question} Bars: mean over the worlds; lines: from the lowest world to the highest. Runs differ in "
        "their algorithm, so this says what goes along with a method's success, not what causes it."
    )
    columns = {first["signal"]: "value"}
    data = table.rename(columns=columns)[["algorithm", "world", "seed", "value", "final"]]
    data = data.assign(metric=first["signal"], regime=runs.runs["regime"].iloc[0])
    return Plot("beginnings", fig, data, caption, tables={"correlations": found}, title=title)
