"""What in the first iterations tells how a run ends: every signal's early mean against final success, run by run."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats

from stppo.config.algorithms import in_order
from stppo.figures.curves import line_handles, page, source_of
from stppo.figures.findings import main_regime, signed
from stppo.figures.style import Plot, style
from stppo.record.runs import Metrics, clips

EARLY = 10  # iterations whose mean is taken
FEWEST = 8  # runs below which nothing is said
SIGNALS = {  # column of the iterations: name
    "success_train": "success on the batches",
    "entropy": "entropy (nats)",
    "valid_format_rate": "valid format",
    "kl_behaviour_k3": "KL to behaviour (nats per token)",
    "kl_policy_to_behaviour": "KL from behaviour (nats per token)",
    "effective_sample_size": "effective sample size",
    "clip_fraction": "clip fraction",
    "ratio_p99_token": "99th percentile of token ratios",
    "ratio_p99_turn": "99th percentile of turn ratios",
    "update_norm": "size of a step",
    "gradient_norm": "gradient norm",
    "clipping_bias_norm": "clipping-bias norm ‖C‖",
    "advantage_raw_std": "spread of advantages",
}


def beginnings_of(metrics: Metrics, regime: str) -> pd.DataFrame:
    """One row per run of a regime's `Metrics.methods`: `algorithm`, `world`, `seed`, `final` success, and each signal's mean over its first
    `EARLY` iterations; NaN where it was not recorded."""
    rows, methods = [], metrics.methods(regime)
    for record in metrics.runs:
        shown = record["regime"] == regime and record["algorithm"] in methods
        if not shown or record["iterations"] < 2 * EARLY:
            continue
        its = metrics.select(metrics.iterations, record)
        early = its[its["iteration"] <= EARLY]
        known = {name: float(early[name].mean()) if name in early else math.nan for name in SIGNALS}
        if not clips(record):
            known["clip_fraction"] = math.nan
        keys = {"algorithm": record["algorithm"], "world": record["world_seed"], "seed": record["seed"]}
        rows.append({**keys, "final": metrics.outcome(record).final, **known})
    return pd.DataFrame(rows)


def correlations(table: pd.DataFrame) -> pd.DataFrame:
    """Rank correlation of each signal with final success, over the runs of a world, and its mean over the worlds.

    Columns: `signal`, `correlation` (mean over worlds), `low`, `high` (of the worlds), `runs`, `worlds`. A world counts where
    `FEWEST` runs have the signal and it is not the same in all of them; a signal without such a world is left out.
    """
    rows = []
    for signal in SIGNALS:
        known = table.dropna(subset=[signal, "final"])
        found, runs = [], 0
        for _, world in known.groupby("world"):
            if len(world) >= FEWEST and world[signal].nunique() > 1 and world["final"].nunique() > 1:
                found.append(float(stats.spearmanr(world[signal], world["final"]).statistic))
                runs += len(world)
        if found:
            keys = {"correlation": float(np.mean(found)), "low": min(found), "high": max(found)}
            rows.append({"signal": signal, **keys, "runs": runs, "worlds": len(found)})
    return pd.DataFrame(rows)


def beginnings(metrics: Metrics) -> Plot | None:
    """Rank correlations of early signals with final success, and the strongest of them run by run."""
    regime = main_regime(metrics)
    table = beginnings_of(metrics, regime)
    found = correlations(table) if len(table) else pd.DataFrame()
    found = found[found["signal"] != "success_train"].reset_index(drop=True) if len(found) else found
    if found.empty:
        return None
    first = found.loc[found["correlation"].abs().idxmax()]
    name = SIGNALS[first["signal"]]
    more = "high" if first["correlation"] > 0 else "low"
    title = (
        f"Runs end {more} where {name.partition(' (')[0]} is high in the first {EARLY} iterations: rank correlation "
        f"{signed(first['correlation']).removeprefix('+')} over methods"
    )
    question = (
        f"What in the first {EARLY} iterations tells how a run ends? Left: the strongest signal, a dot for each run. Right: "
        "rank correlation of each signal with final success, over the methods of a world."
    )
    algorithms = in_order(metrics.methods(regime))
    with style():
        fig = page(
            title, question, source_of(metrics, [regime], algorithms), 3.6, line_handles(metrics, algorithms)
        )
        left, right = fig.subplots(1, 2, width_ratios=[1.15, 1])
        for algorithm, runs in table.groupby("algorithm"):
            color = metrics.look(algorithm).color
            left.plot(runs[first["signal"]], runs["final"], "o", color=color, markersize=6, alpha=0.85)
        left.set(
            xlabel=f"{name}, mean of the first {EARLY} iterations",
            ylabel="final success, sampled",
            ylim=(0, None),
        )
        drawn = found.sort_values("correlation", key=abs).reset_index(drop=True)
        for y, row in drawn.iterrows():
            color = "#0061A8" if row["correlation"] > 0 else "#D55E00"
            right.barh(y, row["correlation"], color=color, height=0.62)
            if row["worlds"] > 1:
                right.plot([row["low"], row["high"]], [y, y], color="#222222", linewidth=1.2)
        right.axvline(0, color="#999999", linewidth=0.8)
        right.set_yticks(
            range(len(drawn)),
            [SIGNALS[signal].partition(" (")[0] for signal in drawn["signal"]],
            fontsize=8.5,
        )
        right.set(xlim=(-1, 1), xlabel="rank correlation with final success")
        right.grid(axis="y", visible=False)
    worlds = int(found["worlds"].max())
    caption = (
        f"{question} Bars: mean over {worlds} world{'s' if worlds > 1 else ''}; lines: from the lowest world to the highest. Runs "
        "differ in their algorithm, so this says what goes along with a method's success, not what causes it."
    )
    columns = table.rename(columns={first["signal"]: "value"})[
        ["algorithm", "world", "seed", "value", "final"]
    ]
    data = columns.assign(metric=first["signal"], regime=regime)
    return Plot("beginnings", fig, data, caption, tables={"correlations": found}, title=title)
