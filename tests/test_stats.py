import math

import numpy as np
import pytest

from stppo.stats import area_under_curve, final_mean, log_linear_trend


def test_trend_recovers_an_exponential():
    x = np.arange(1, 41)
    trend = log_linear_trend(x, 0.3 * np.exp(0.05 * x))
    assert trend.slope == pytest.approx(0.05) and trend.r_squared == pytest.approx(1.0)
    np.testing.assert_allclose(trend.at([0, 10]), [0.3, 0.3 * math.exp(0.5)])


def test_noise_has_no_trend():
    y = np.exp(np.random.default_rng(0).normal(size=500))
    trend = log_linear_trend(np.arange(500), y)
    assert abs(trend.slope) < 1e-3 and trend.r_squared < 0.02


def test_trend_skips_zeros_and_gaps():
    x = np.arange(1, 9, dtype=float)
    y = np.exp(x)
    y[[1, 3]] = 0, np.nan
    trend = log_linear_trend(x, y)
    assert trend.n == 6 and trend.slope == pytest.approx(1.0)


def test_two_points_make_no_trend():
    assert math.isnan(log_linear_trend([1, 2], [1, 2]).slope)


@pytest.mark.parametrize(("n", "expected"), [(1, 1.0), (10, 10.0), (11, 10.5), (40, 38.5)])
def test_final_is_the_mean_of_the_last_tenth(n, expected):
    assert final_mean(np.arange(1, n + 1)) == expected


def test_final_of_nothing_is_nan():
    assert math.isnan(final_mean([]))


def test_area_is_the_mean_height():
    assert area_under_curve([0, 1, 4], [0, 1, 1]) == pytest.approx((0.5 + 3) / 4)
    assert math.isnan(area_under_curve([1], [1]))
