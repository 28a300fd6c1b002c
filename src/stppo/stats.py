"""Statistics of runs: intervals over worlds, ends and areas of curves, intervals over questions.

Intervals are a bootstrap of the independent units that a study has.

Every world has its own facts, its own warm start and its own seed, so two worlds share nothing and two runs
of one world share nearly everything. An arm is one number per world (the mean, where a world has several
runs); a bootstrap draw takes worlds with replacement, the same for every arm: arms are compared in the worlds
that all of them have, world by world.

- **Few worlds.** Deviations of the draws are stretched by sqrt(n / (n - 1)) for n worlds, which makes up for
  the spread that n draws lose (Hesterberg 2015, arXiv 1411.5279), and intervals once more by Student's
  quantile with n - 1 degrees of freedom over the normal one, since that spread is itself known only from n
  worlds. Simulated success that is .8 in some worlds and .1 in the others is then covered as often as said
  (12 worlds: 96 % at 95 %, 99.4 % at 99.6 %). What no interval can know of is a loss that happened in none of
  the worlds: one that strikes 15 % of worlds leaves 12 of them alone in 14 % of studies. With success .8 in
  four worlds of five and .1 in the rest, a 95 % interval covers the mean 74 times in 100 from 6 worlds, 88
  from 10, 96 from 16.
- **Too few.** `fewest_worlds(level)`: fewer carry no verdict. It is the n at which the most extreme outcome
  of a sign test, every world on one side, has a probability of 1 - level: 6 worlds at 95 %, 10 at 99.6 %. No
  interval makes up for that.
- **No collapse, or nothing but.** A plain bootstrap of 0 collapses in n runs is an interval of no width. So a
  share (values 0 or 1, `bounds=(0, 1)`) is mixed, draw by draw, with half a run at either bound, in weights
  from Dirichlet(n, 1/2, 1/2): for 0 of n that is Jeffreys' Beta(1/2, n + 1/2) (Brown, Cai & DasGupta 2001),
  elsewhere it widens slightly. Each arm is smoothed on its own; Student's factor is not for shares. A share
  of 2 % of two points in each of 20 worlds is so covered 95 to 99 times in 100, whatever two points of a
  world have in common; by the plain bootstrap 35 to 50 times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.stats import binomtest

CONFIDENCE = 0.95
DRAWS = 40_000
Values = Mapping[int, float]  # world -> the arm's number there; NaN: it has none


@dataclass(frozen=True)
class Estimate:
    """A value with its bootstrap draws."""

    value: float
    draws: NDArray[np.float64] = field(repr=False, compare=False)
    n_worlds: int
    bounded: bool = False  # smoothed, and not widened by Student's factor

    def interval(self, level: float) -> tuple[float, float]:
        """Central percentile interval, widened to hold the value and as described above; NaN from a single
        world."""
        if self.n_worlds < 2:
            return math.nan, math.nan
        q = (1 + level) / 2
        low, high = np.quantile(self.draws, [1 - q, q])
        factor = 1.0 if self.bounded else stats.t.ppf(q, self.n_worlds - 1) / stats.norm.ppf(q)
        below, above = max(self.value - low, 0.0), max(high - self.value, 0.0)
        return float(self.value - factor * below), float(self.value + factor * above)


def joint_level(n: int, error: float = 0.05) -> float:
    """Bonferroni: level of each of n intervals that all hold at once with probability 1 - error."""
    return 1 - error / n


def fewest_worlds(level: float) -> int:
    """Worlds below which nothing gets a verdict at a level in (0, 1): the least n with 2 * 2**-n <= 1 -
    level."""
    return math.ceil(1 - math.log2(1 - level))


def by_world(runs: pd.DataFrame, column: str) -> dict[int, float]:
    """One number per world from a table of an arm's runs (columns `world_seed` and `column`): the mean of its
    runs, NaN skipped; a world without any is left out."""
    means = runs[column].astype("float64").groupby(runs["world_seed"]).mean().dropna()
    return {int(world): float(value) for world, value in means.items()}


def contrast(
    arms: Sequence[Values],
    weights: Sequence[float],
    bounds: tuple[float, float] | None = None,
    n_draws: int = DRAWS,
    seed: int = 0,
) -> Estimate:
    """sum over arms of weight x mean over worlds: a mean (1), a difference (1, -1), a main effect (1/2, 1/2,
    -1/2, -1/2).

    bounds: of the values, for the smoothing described above; None for values that are no shares.
    Deterministic in `seed`. ValueError where the arms have no world in common in which each has a value.
    """
    values = _common(arms)  # (arms, worlds)
    means = values.mean(axis=1)
    draws = _stretched(values @ _shares(values.shape[1], n_draws, seed).T, means[:, None], values.shape[1])
    if bounds is not None:
        draws = _smoothed(draws, values.shape[1], bounds, seed)
    weights = np.asarray(weights, dtype=np.float64)
    return Estimate(float(weights @ means), weights @ draws, values.shape[1], bounds is not None)


def mean(values: Values, bounds: tuple[float, float] | None = None, **options: int) -> Estimate:
    """Mean over worlds; with bounds (0, 1) of collapses: the risk of one."""
    return contrast([values], [1.0], bounds, **options)


def difference(
    one: Values, other: Values, bounds: tuple[float, float] | None = None, **options: int
) -> Estimate:
    """Mean of `one` minus mean of `other`, over the worlds of both."""
    return contrast([one, other], [1.0, -1.0], bounds, **options)


def curve_band(
    curves: ArrayLike, worlds: Sequence[int], n_draws: int, level: float, seed: int = 0
) -> tuple[NDArray[np.float64], ...]:
    """`mean` at every place of (runs, places) curves: value, low, high, number of worlds (places,).

    worlds: of the runs, in their order; runs of one world are averaged. A NaN is a run without a value there;
    a place without any is NaN. From fewer worlds than the level needs (`fewest_worlds`) low and high are the
    range of the worlds; from one NaN.
    """
    by_place = pd.DataFrame(np.asarray(curves, dtype=np.float64)).groupby(np.asarray(worlds)).mean()
    n_worlds = by_place.notna().sum().to_numpy()
    low, high = (np.where(n_worlds > 1, edge, np.nan) for edge in (by_place.min(), by_place.max()))
    for place in np.flatnonzero(n_worlds >= fewest_worlds(level)):
        known = by_place[place].dropna().to_dict()
        low[place], high[place] = mean(known, n_draws=n_draws, seed=seed).interval(level)
    return by_place.mean().to_numpy(), low, high, n_worlds


def shares_of(worlds: ArrayLike, n_draws: int = DRAWS, seed: int = 0) -> NDArray[np.float64]:
    """(draws, n): weight of each of n runs in each draw of worlds, those of one world together; rows sum to
    1.

    worlds: (n,), of the runs. For a statistic that no mean over worlds gives; its draws go to `estimate`.
    """
    names, place = np.unique(worlds, return_inverse=True)
    weights = _shares(len(names), n_draws, seed)[:, place]
    return weights / weights.sum(axis=1, keepdims=True)


def estimate(
    value: float, draws: NDArray[np.float64], n_worlds: int, bounds: tuple[float, float] | None = None
) -> Estimate:
    """A value whose draws (draws,) were computed with the weights of `shares_of`, from n_worlds worlds;
    bounds: of a share, as in `contrast`."""
    draws = _stretched(draws, value, n_worlds)
    if bounds is not None:
        draws = _smoothed(draws, n_worlds, bounds, seed=0)
    return Estimate(value, draws, n_worlds, bounds is not None)


def _common(arms: Sequence[Values]) -> NDArray[np.float64]:
    """(arms, worlds) values in the worlds in which every arm has one."""
    worlds = set.intersection(*({w for w, v in arm.items() if math.isfinite(v)} for arm in arms))
    if not worlds:
        raise ValueError("the arms have no world in common in which each has a value")
    return np.array([[arm[world] for world in sorted(worlds)] for arm in arms], dtype=np.float64)


@lru_cache(maxsize=16)  # most arms of a study have as many worlds
def _shares(n_worlds: int, n_draws: int, seed: int) -> NDArray[np.float64]:
    """(draws, worlds): how often each draw takes each world, as a share."""
    drawn = np.random.default_rng(seed).multinomial(n_worlds, np.full(n_worlds, 1 / n_worlds), n_draws)
    return drawn / n_worlds


def _stretched(draws: NDArray[np.float64], value: ArrayLike, n: int) -> NDArray[np.float64]:
    return value + math.sqrt(n / (n - 1)) * (draws - value) if n > 1 else draws


def _smoothed(
    draws: NDArray[np.float64], n: int, bounds: tuple[float, float], seed: int
) -> NDArray[np.float64]:
    """Draws (..., draws) of bounded means mixed with half a run at either bound, each arm by weights of its
    own."""
    share = np.random.default_rng([seed, 1]).dirichlet([n, 0.5, 0.5], draws.shape)
    return share[..., 0] * np.clip(draws, *bounds) + share[..., 1:] @ np.asarray(bounds)


# ---- curves and shares of one run ---------------------------------------------------------------
def final_mean(values: ArrayLike) -> float:
    """Mean of the last tenth of a series, at least one value; NaN for an empty one."""
    values = np.asarray(values, dtype=np.float64)
    return float(values[-math.ceil(len(values) / 10) :].mean()) if len(values) else math.nan


def area_under_curve(x: ArrayLike, y: ArrayLike) -> float:
    """Mean height of a curve over its range of x, by the trapezoidal rule; NaN for fewer than two points."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    return float(np.trapezoid(y, x) / np.ptp(x)) if len(x) > 1 else math.nan


def with_intervals(results: pd.DataFrame, measure: str = "em") -> pd.DataFrame:
    """Rows of `schema.BENCHMARK_COLUMNS` with `low` and `high`: Wilson's 95% interval of a share of
    questions.

    Wilson's, because `em` +- standard error has no width at 0 and 1. A share may be rounded to five digits,
    as tables of runs hold it. ValueError for a measure that is no such share.
    """
    counts = results[measure] * results["n_questions"]
    if ((counts - counts.round()).abs() > 1e-5 * results["n_questions"]).any():
        raise ValueError(f"{measure} is no share of questions, so it has no binomial interval")
    intervals = [
        binomtest(int(count), int(n)).proportion_ci(CONFIDENCE, "wilson")
        for count, n in zip(counts.round(), results["n_questions"], strict=True)
    ]
    return results.assign(low=[i.low for i in intervals], high=[i.high for i in intervals])
