"""Aggregates over seeds, trends over iterations, survival curves.

Curves of arms with one seed per warm start are interquartile means with stratified-bootstrap bands (Agarwal et
al. 2021, arXiv 2108.13264) as implemented by rliable. Bands and intervals over warm starts and seeds: `resampling`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.stats import CensoredData, ecdf

REPETITIONS = 1000
CONFIDENCE = 0.95


def iqm(values: ArrayLike) -> NDArray[np.float64]:
    """Interquartile mean over the first axis; of fewer than four values it is the plain mean.

    The same number as rliable's `aggregate_iqm`, over many places at once.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=0)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut].mean(axis=0)


@dataclass(frozen=True)
class Band:
    """Point estimate and percentile interval at each of n places; the interval is NaN for one run."""

    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    n_runs: NDArray[np.int64]


def bootstrap_band(
    curves: ArrayLike, repetitions: int = REPETITIONS, confidence: float = CONFIDENCE, seed: int = 0
) -> Band:
    """IQM and bootstrap interval over runs at each place of (runs, places) curves.

    A NaN is a run that has no value there (it stopped, or the metric was not computed): each place
    uses the runs that have one. Deterministic in `seed`.
    """
    curves = np.atleast_2d(np.asarray(curves, dtype=np.float64))
    n_places = curves.shape[1]
    present = np.isfinite(curves)
    value, low, high = (np.full(n_places, np.nan) for _ in range(3))
    for pattern in np.unique(present, axis=1).T:
        places = (present == pattern[:, None]).all(axis=0)
        if not pattern.any():
            continue
        scores = curves[pattern][:, places]
        value[places] = iqm(scores)
        if len(scores) > 1:
            low[places], high[places] = _interval(scores, repetitions, confidence, seed)
    return Band(value, low, high, present.sum(axis=0))


def _interval(
    scores: NDArray[np.float64], repetitions: int, confidence: float, seed: int
) -> NDArray[np.float64]:
    """(2, places) percentile interval of the IQM of (runs, places) scores, runs resampled."""
    from rliable import library as rly  # here, because it imports for more than a second

    state = np.random.get_state()
    np.random.seed(seed)  # rliable resamples with numpy's global generator, whatever random_state it is given
    try:
        _, interval = rly.get_interval_estimates(
            {"": scores[:, None, :]},  # runs x one task x places
            lambda s: iqm(s.reshape(-1, s.shape[-1])),
            reps=repetitions,
            confidence_interval_size=confidence,
        )
    finally:
        np.random.set_state(state)
    return interval[""]


def band_note(n_runs: Sequence[int], confidence: float = CONFIDENCE, clustered: bool = False) -> str:
    """What lines and bands over so few runs do and do not say, for a caption; one count per line drawn.

    clustered: whether the lines are of arms with several seeds from a warm start (`resampling.curve_band`).
    """
    fewest, most = min(n_runs), max(n_runs)
    if most <= 1:
        return "One seed: no band."
    count = f"{most}" if fewest == most else f"{fewest}–{most}"
    level = f"{confidence:.0%}".replace("%", " %")
    if clustered:  # `resampling.curve_band`
        return (
            f"Lines: interquartile means of {count} seeds, each warm start with the same weight; bands: {level} bootstrap over "
            "warm starts, then seeds, widened for few warm starts (Student's factor); none from fewer than three. Both are of "
            "logarithms where the axis is logarithmic."
        )
    if most < 4:
        return (
            f"Lines: means of {count} seeds (interquartile means need four); bands: {level} bootstrap, which cannot "
            "reach beyond the seeds seen and so is too narrow."
        )
    return f"Lines: interquartile means of {count} seeds; bands: {level} bootstrap over seeds."


@dataclass(frozen=True)
class Trend:
    """log y = intercept + slope * x by least squares."""

    slope: float  # per unit of x, natural logarithm
    intercept: float
    r_squared: float  # of log y
    n: int

    def at(self, x: ArrayLike) -> NDArray[np.float64]:
        """Fitted y at x."""
        return np.exp(self.intercept + self.slope * np.asarray(x, dtype=np.float64))


def log_linear_trend(x: ArrayLike, y: ArrayLike) -> Trend:
    """Exponential trend of a positive quantity; zeros and non-finite values are left out.

    NaN coefficients for fewer than three points. Residuals of a training curve are correlated, so
    R^2 tells how much of the curve the trend describes, not whether it is significant.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    keep = np.isfinite(x) & np.isfinite(y) & (y > 0)
    x, log_y = x[keep], np.log(y[keep])
    if len(x) < 3 or np.ptp(x) == 0:
        return Trend(math.nan, math.nan, math.nan, len(x))
    slope, intercept = np.polyfit(x, log_y, 1)
    residual = ((log_y - intercept - slope * x) ** 2).sum()
    total = ((log_y - log_y.mean()) ** 2).sum()
    return Trend(
        float(slope), float(intercept), float(1 - residual / total) if total > 0 else math.nan, len(x)
    )


def final_mean(values: ArrayLike) -> float:
    """Mean of the last tenth of a series, at least one value; NaN for an empty one."""
    values = np.asarray(values, dtype=np.float64)
    return float(values[-math.ceil(len(values) / 10) :].mean()) if len(values) else math.nan


def area_under_curve(x: ArrayLike, y: ArrayLike) -> float:
    """Mean height of a curve over its range of x, by the trapezoidal rule; NaN for fewer than two points."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    return float(np.trapezoid(y, x) / np.ptp(x)) if len(x) > 1 else math.nan


def kaplan_meier(times: ArrayLike, observed: ArrayLike, confidence: float = CONFIDENCE) -> pd.DataFrame:
    """Survival curve (Kaplan & Meier 1958, by scipy): columns time, survival, low, high, at_risk.

    times: (n,) time of the event or of the end of observation; observed: (n,) true where the event came.
    The interval is pointwise (Greenwood, log-log) and takes runs as independent; it is NaN where nothing
    or everything has had its event, where it would have no width.
    """
    times, observed = np.asarray(times, dtype=np.float64), np.asarray(observed, dtype=bool)
    if not len(times):
        raise ValueError("a survival curve needs at least one run")
    curve = ecdf(CensoredData(times[observed], right=times[~observed])).sf
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The confidence interval is undefined")
        interval = curve.confidence_interval(confidence, method="log-log")
    steps, survival = curve.quantiles, curve.probabilities
    inside = (survival > 0) & (survival < 1)
    return pd.DataFrame(
        {
            "time": np.concatenate([[0.0], steps]),
            "survival": np.concatenate([[1.0], survival]),
            "low": np.concatenate([[np.nan], np.where(inside, interval.low.probabilities, np.nan)]),
            "high": np.concatenate([[np.nan], np.where(inside, interval.high.probabilities, np.nan)]),
            "at_risk": [len(times), *((times >= step).sum() for step in steps)],
        }
    )


def restricted_mean_survival(times: ArrayLike, observed: ArrayLike, horizon: float) -> float:
    """Mean time without event up to `horizon`: the area under the Kaplan-Meier curve (Royston & Parmar 2013).

    Where every run without event was watched up to the horizon, it is the mean of min(time, horizon).
    """
    curve = kaplan_meier(times, observed)
    edges = np.append(np.minimum(curve["time"], horizon), horizon)
    return float((np.diff(edges) * curve["survival"]).sum())
