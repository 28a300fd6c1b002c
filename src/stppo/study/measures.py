"""One number per run that a claim can ask for: the columns of `summary.csv`, and a few of the run's course.

What moves first, and whether a spike foretells a crash, is no number of one run and not measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import stats

from stppo.record import schema
from stppo.record.runs import Metrics

SHARES = ("learned", "collapsed")  # 0 or 1 of a run, so a mean is a share
NUMBERS = (
    *(name for name in schema.SUMMARY_COLUMNS if name.startswith(("after_", "greedy_"))),
    *("start", "peak", "final", "area", "gain_kept", "rapid_crashes"),
    *("clip_fraction_mean", "gradient_norm_max", "updates", "wall_seconds"),
)
MIN_POINTS = 5  # measured iterations below which a growth is NaN


def gradient_spike(iterations: pd.DataFrame) -> float:
    """Largest finite gradient norm of any update over the median of the iterations' means, as log10; NaN
    where none is known."""
    largest = iterations.get("gradient_norm_max", iterations["gradient_norm"])
    peak, usual = largest[np.isfinite(largest)].max(), iterations["gradient_norm"].median()
    return float(np.log10(peak / usual)) if usual > 0 and peak > 0 else math.nan


def clipping_bias_growth(iterations: pd.DataFrame) -> float:
    """Slope of the natural logarithm of the clipping-bias norm, per ten iterations, from the first iteration
    at full staleness on (before it the norm grows because the lag does)."""
    if "clipping_bias_norm" not in iterations:
        return math.nan
    age = iterations["staleness_iterations"]
    norm = iterations["clipping_bias_norm"]
    steady = iterations[(age == age.max()) & (norm > 0) & np.isfinite(norm)]
    if len(steady) < MIN_POINTS:
        return math.nan
    return 10 * float(stats.linregress(steady["iteration"], np.log(steady["clipping_bias_norm"])).slope)


def critic_error(iterations: pd.DataFrame) -> float:
    """Root mean squared error of the critic over the standard deviation of the true values, mean over the
    iterations at which both were measured; 1 is the error of a constant. NaN without a measurement."""
    if not {"critic_value_rmse", "true_value_std"} <= set(iterations):
        return math.nan
    return float((iterations["critic_value_rmse"] / iterations["true_value_std"]).mean())


def own_ratio_out_of_range(iterations: pd.DataFrame) -> float:
    """Share of agent tokens whose own ratio leaves [1 - epsilon, 1 + epsilon], mean over the iterations: a
    clip ratio with the same yardstick for every algorithm. NaN where it was not measured."""
    return float(iterations.get("out_of_range_fraction_token", pd.Series(dtype=float)).mean())


COURSE: dict[str, Callable[[pd.DataFrame], float]] = {
    "gradient_spike": gradient_spike,
    "clipping_bias_growth": clipping_bias_growth,
    "critic_error": critic_error,
    "own_ratio_out_of_range": own_ratio_out_of_range,
}
# Every column that a claim may ask for, with its meaning.
COLUMNS: dict[str, str] = {
    **{name: f"share of runs; {schema.SUMMARY_COLUMNS[name]}" for name in SHARES},
    **{name: schema.SUMMARY_COLUMNS[name] for name in NUMBERS},
    "lost": f"peak - final; peak is the {schema.SUMMARY_COLUMNS['peak'].removeprefix('P: ')}",
    **{name: " ".join((measure.__doc__ or "").split()).rstrip(".") for name, measure in COURSE.items()},
}


def per_run(metrics: Metrics) -> pd.DataFrame:
    """One row per run: `Metrics.summary`, `lost` and the columns of `COURSE`."""
    table = metrics.summary.assign(lost=lambda runs: runs["peak"] - runs["final"])
    for column, measure in COURSE.items():
        table[column] = [measure(metrics.select(metrics.iterations, record)) for record in metrics.runs]
    return table
