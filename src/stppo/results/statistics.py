"""Trends over iterations, the numbers that stand for a curve, and intervals over questions. Those over worlds:
`results.resampling`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest

CONFIDENCE = 0.95


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


def with_intervals(results: pd.DataFrame, measure: str = "em") -> pd.DataFrame:
    """Rows of `schema.BENCHMARK_COLUMNS` with `low` and `high`: Wilson's 95% interval of a share of questions.

    Wilson's, because `em` +- standard error has no width at 0 and 1. A share may be rounded to five digits, as tables of
    runs hold it. ValueError for a measure that is no such share.
    """
    counts = results[measure] * results["n_questions"]
    if ((counts - counts.round()).abs() > 1e-5 * results["n_questions"]).any():
        raise ValueError(f"{measure} is no share of questions, so it has no binomial interval")
    intervals = [
        binomtest(int(count), int(n)).proportion_ci(CONFIDENCE, "wilson")
        for count, n in zip(counts.round(), results["n_questions"], strict=True)
    ]
    return results.assign(low=[i.low for i in intervals], high=[i.high for i in intervals])
