"""Means of curves; intervals over worlds: against closed forms and simulated coverage."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import beta, norm, t

from stppo import stats
from stppo.stats import (
    area_under_curve,
    contrast,
    difference,
    fewest_worlds,
    final_mean,
    joint_level,
    mean,
)

SHARE = (0.0, 1.0)


def worlds(values):
    return dict(enumerate(np.asarray(values, dtype=float), start=31))


def ones(k, n):
    """1 in the first k of n worlds, 0 in the others."""
    return worlds(np.arange(n) < k)


def width(estimate, level=0.95):
    low, high = estimate.interval(level)
    return high - low


def test_runs_of_one_world_count_as_one():
    runs = pd.DataFrame({"world_seed": [31, 31, 32, 33], "final": [0.2, 0.6, 1.0, math.nan]})
    assert stats.by_world(runs, "final") == {31: 0.4, 32: 1.0}
    assert stats.by_world(runs.assign(learned=runs["final"] > 0.5), "learned") == {31: 0.5, 32: 1, 33: 0}


def test_standard_error_is_that_of_a_mean():
    values = np.random.default_rng(0).normal(size=12)
    estimate = mean(worlds(values))
    assert estimate.draws.mean() == pytest.approx(estimate.value, abs=0.01)
    assert estimate.draws.std() == pytest.approx(values.std(ddof=1) / math.sqrt(12), rel=0.02)


def bimodal(rng, n):
    """Successes as near a critical learning rate: some worlds learn, some die."""
    return np.where(rng.random(n) < 0.6, 0.8, 0.1) + rng.normal(0, 0.05, n)


@pytest.mark.parametrize("alike", [False, True], ids=["points of their own", "points of a world alike"])
def test_a_small_share_of_points_is_covered_as_often_as_said(alike):
    """2 % of two points in each of 20 worlds: 200 simulated sets. By the plain bootstrap half of them or more
    would miss."""
    rng, at = np.random.default_rng(3), np.repeat(np.arange(20), 2)
    weights = stats.shares_of(at, 1000)
    missed = {None: 0, SHARE: 0}
    for _ in range(200):
        won = (np.repeat(rng.random(20), 2) if alike else rng.random(40)) < 0.02
        for bounds in missed:
            found = stats.estimate(won.mean(), weights @ won, 20, bounds)
            low, high = found.interval(0.95)
            missed[bounds] += not low <= 0.02 <= high
    assert missed[SHARE] <= 16 and missed[None] >= 80


@pytest.mark.parametrize(
    ("draw", "truth", "n", "level"),
    [
        (lambda rng, n: rng.normal(size=n), 0.0, 3, 0.95),
        (lambda rng, n: rng.normal(size=n), 0.0, 6, 0.95),
        (lambda rng, n: rng.normal(size=n), 0.0, 12, 0.99),
        (bimodal, 0.52, 12, 0.95),
        (lambda rng, n: bimodal(rng, n) - bimodal(rng, n), 0.0, 12, 0.99),
    ],
)
def test_interval_misses_as_often_as_it_says(draw, truth, n, level):
    """Simulated: 600 sets of worlds. By percentiles alone 12 to 20 % of the first two would miss at 95 %."""
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(600):
        low, high = mean(worlds(draw(rng, n)), n_draws=800).interval(level)
        missed += not low < truth < high
    assert missed / 600 < 1.5 * (1 - level) + 0.01
    assert level > 0.95 or missed / 600 > 0.3 * (1 - level), "wider than it says"


def test_student_widens_what_is_no_share():
    free, bounded = mean(ones(3, 6)), mean(ones(3, 6), SHARE)
    q = (1 + 0.99) / 2
    assert width(free, 0.99) == pytest.approx(
        np.ptp(np.quantile(free.draws, [1 - q, q])) * t.ppf(q, 5) / norm.ppf(q)
    )
    assert width(bounded, 0.99) == pytest.approx(np.ptp(np.quantile(bounded.draws, [1 - q, q])))


def test_arms_are_paired_by_world():
    noise = np.random.default_rng(0).normal(size=12)
    one, other = worlds(noise + 0.1), worlds(noise)
    assert difference(one, other).interval(0.99) == pytest.approx((0.1, 0.1))
    shuffled = dict(zip(other, np.roll(noise, 5), strict=True))
    assert width(difference(one, shuffled)) > 0.5


def test_only_worlds_that_all_arms_have_count():
    one = worlds([1.0, 1.0, 1.0, 100.0])
    other = {31: 0.0, 32: 0.0, 33: 0.0, 34: math.nan, 99: 7.0}
    assert (difference(one, other).value, difference(one, other).n_worlds) == (1.0, 3)
    with pytest.raises(ValueError, match="no world in common"):
        difference(one, {99: 7.0})


@pytest.mark.parametrize("level", [0.95, joint_level(15)])
def test_no_collapse_has_jeffreys_interval(level):
    low, high = mean(ones(0, 12), SHARE).interval(level)
    assert high == pytest.approx(beta.ppf((1 + level) / 2, 0.5, 12.5), rel=0.03)
    assert 0 <= low < 0.001
    mirrored = mean(ones(12, 12), SHARE).interval(level)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=0.03)


@pytest.mark.parametrize(("one", "other"), [(0, 0), (12, 12), (12, 0)])
def test_difference_of_sure_shares_has_width(one, other):
    low, high = difference(ones(one, 12), ones(other, 12), SHARE).interval(0.95)
    assert high - low > 0.1 and low >= -1 and high <= 1


def test_main_effect_is_the_mean_of_the_simple_effects():
    arms = [worlds(row) for row in np.random.default_rng(0).normal(size=(4, 12))]
    means = [np.mean(list(arm.values())) for arm in arms]
    estimate = contrast(arms, [0.5, 0.5, -0.5, -0.5])
    assert estimate.value == pytest.approx((means[0] - means[2] + means[1] - means[3]) / 2)
    assert estimate.interval(0.95)[0] < estimate.value < estimate.interval(0.95)[1]


def test_one_world_has_no_interval():
    assert np.isnan(mean({31: 0.5}).interval(0.95)).all()


def test_more_verdicts_need_a_higher_level_and_more_worlds():
    assert joint_level(1) == 0.95 and joint_level(10) == pytest.approx(0.995)
    for level in (0.95, 0.99, joint_level(13), joint_level(25)):
        n = fewest_worlds(level)
        assert 2 * 0.5**n <= 1 - level < 2 * 0.5 ** (n - 1)  # all worlds on one side of zero


def test_a_curve_has_the_mean_and_the_interval_of_its_worlds():
    curves = np.random.default_rng(0).normal(size=(9, 2))
    curves[8, 1] = np.nan
    value, low, high, n = stats.curve_band(curves, [31, 31, *range(32, 39)], 400, 0.95)
    first = mean(worlds([curves[:2, 0].mean(), *curves[2:, 0]]), n_draws=400)
    assert (value[0], low[0], high[0]) == pytest.approx((first.value, *first.interval(0.95)))
    assert n.tolist() == [8, 7] and value[1] == pytest.approx(
        np.mean([curves[:2, 1].mean(), *curves[2:8, 1]])
    )


def test_the_band_of_few_worlds_is_their_range_and_one_world_has_none():
    value, low, high, _ = stats.curve_band(
        [[1.0, np.nan], [3.0, np.nan], [5.0, 4.0]], [31, 31, 32], 200, 0.95
    )
    assert (
        (value[0], low[0], high[0]) == (3.5, 2.0, 5.0)
        and value[1] == 4.0
        and np.isnan([low[1], high[1]]).all()
    )


# ---- curves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "expected"), [(1, 1.0), (10, 10.0), (11, 10.5), (40, 38.5)])
def test_final_is_the_mean_of_the_last_tenth(n, expected):
    assert final_mean(np.arange(1, n + 1)) == expected
    assert math.isnan(final_mean([]))


def test_area_is_the_mean_height():
    assert area_under_curve([0, 1, 4], [0, 1, 1]) == pytest.approx((0.5 + 3) / 4)
    assert math.isnan(area_under_curve([1], [1]))
