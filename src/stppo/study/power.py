"""How many worlds a claim needs, from the differences that a pilot showed.

A paired difference over n worlds has the standard error sd / sqrt(n), sd that of the differences world by world. Its interval
lies wholly beyond a threshold with the power of Student's t at that level, by the noncentral t distribution. sd is known only
from a pilot: the table gives the worlds needed for the pilot's own sd and for its upper confidence limit (chi-squared, normal
differences), and a protocol should count on the latter. Differences between runs that learn and runs that die have two modes,
and then the formula is too hopeful: where a fifth of the runs die it says 0.81 for 11 worlds that decide 0.6 of simulated
studies. `simulated_power` draws worlds from the pilot's own differences and judges them as the study will.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

from stppo.stats import fewest_worlds, mean

MOST = 10_000


def power(n: int, sd: float, size: float, level: float) -> float:
    """Probability that the interval at `level` of a mean over n worlds lies wholly above a threshold that the true mean
    exceeds by `size`; size and sd in the same units, both positive."""
    needed = stats.t.ppf((1 + level) / 2, n - 1)
    return float(stats.nct.sf(needed, n - 1, size / sd * math.sqrt(n)))


def worlds_needed(sd: float, size: float, level: float, wanted: float = 0.8) -> int:
    """Fewest worlds with that power, and at least `fewest_worlds(level)`. ValueError for an sd or size that is not positive,
    and where even 10,000 worlds would not do."""
    if not (sd > 0 and size > 0):
        raise ValueError(f"sd={sd:g} and size={size:g} must be positive")
    low, high = fewest_worlds(level) - 1, MOST
    if power(high, sd, size, level) < wanted:
        raise ValueError(f"a difference of {size:g} with sd {sd:g} needs more than {MOST} worlds")
    while high - low > 1:  # power grows with n
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle, sd, size, level) >= wanted else (middle, high)
    return high


def simulated_power(
    differences: ArrayLike, n: int, size: float, level: float, studies: int = 400, seed: int = 0
) -> float:
    """Share of simulated studies of n worlds whose interval lies wholly above the threshold and has a width: worlds are drawn
    from a pilot's differences, moved so that their mean exceeds the threshold by `size`."""
    pilot = np.asarray(differences, dtype=np.float64)
    pilot = pilot[np.isfinite(pilot)]
    drawn = np.random.default_rng(seed).choice(pilot - pilot.mean() + size, (studies, n))
    limits = [mean(dict(enumerate(study)), n_draws=2000).interval(level) for study in drawn]
    return float(np.mean([low > 0 and high - low > 1e-12 for low, high in limits]))


def upper_sd(differences: ArrayLike, confidence: float = 0.8) -> float:
    """Upper confidence limit of the standard deviation of normal differences; infinite from fewer than two."""
    known = np.asarray(differences, dtype=np.float64)
    known = known[np.isfinite(known)]
    if len(known) < 2:
        return math.inf
    return float(
        known.std(ddof=1) * math.sqrt((len(known) - 1) / stats.chi2.ppf(1 - confidence, len(known) - 1))
    )


def table(
    pilots: Mapping[str, ArrayLike], sizes: Sequence[float], level: float, wanted: float = 0.8
) -> pd.DataFrame:
    """Worlds that each comparison of a pilot needs, one row per comparison and size.

    pilots: comparison -> its differences, one per pilot world. Columns: comparison, pilot_worlds, mean, sd, sd_upper, size
    (distance of the true mean from the threshold), worlds and worlds_upper (for sd and sd_upper; NaN where unknown).
    """
    rows = []
    for comparison, values in pilots.items():
        known = np.asarray(values, dtype=np.float64)
        known = known[np.isfinite(known)]
        sds = (float(known.std(ddof=1)) if len(known) > 1 else math.nan, upper_sd(known))
        mean = float(known.mean()) if len(known) else math.nan
        for size in sizes:
            needed = [worlds_needed(sd, size, level, wanted) if 0 < sd < math.inf else math.nan for sd in sds]
            rows.append([comparison, len(known), mean, *sds, size, *needed])
    columns = ["comparison", "pilot_worlds", "mean", "sd", "sd_upper", "size", "worlds", "worlds_upper"]
    return pd.DataFrame(rows, columns=columns)
