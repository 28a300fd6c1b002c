import math

import numpy as np
import pytest
from rliable import metrics

from stppo.results.statistics import (
    area_under_curve,
    band_note,
    bootstrap_band,
    final_mean,
    iqm,
    kaplan_meier,
    log_linear_trend,
    restricted_mean_survival,
)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 11])
def test_iqm_is_rliables(n):
    values = np.random.default_rng(n).normal(size=(n, 6))
    expected = [metrics.aggregate_iqm(values[:, [place]]) for place in range(6)]
    np.testing.assert_allclose(iqm(values), expected, rtol=1e-12)


def test_iqm_ignores_one_outlier_of_eight():
    assert iqm([1.0] * 7 + [1000.0]) == 1.0


def test_band_contains_the_point_and_stays_within_the_seeds():
    curves = np.random.default_rng(0).normal(size=(3, 20))
    band = bootstrap_band(curves, 300)
    assert (band.low <= band.value).all() and (band.value <= band.high).all()
    assert (band.low >= curves.min(axis=0) - 1e-12).all()
    assert (band.high <= curves.max(axis=0) + 1e-12).all()
    assert (band.low < band.high).all()


def test_band_narrows_with_more_seeds():
    rng = np.random.default_rng(0)
    width = [np.mean((b := bootstrap_band(rng.normal(size=(n, 30)), 300)).high - b.low) for n in (5, 80)]
    assert width[1] < 0.5 * width[0]


def test_band_covers_the_true_value_for_many_seeds():
    rng = np.random.default_rng(1)
    band = bootstrap_band(rng.normal(size=(40, 400)), 300)
    assert 0.88 < np.mean((band.low < 0) & (band.high > 0)) < 0.99


def test_band_is_deterministic_whatever_the_global_generator():
    curves = np.random.default_rng(0).normal(size=(3, 5))
    np.random.seed(1)
    one = bootstrap_band(curves, 100)
    np.random.seed(2)
    np.testing.assert_array_equal(one.high, bootstrap_band(curves, 100).high)


def test_band_leaves_the_global_generator_alone():
    np.random.seed(7)
    expected = np.random.random(2)[1]
    np.random.seed(7)
    np.random.random()
    bootstrap_band([[0.0], [1.0]], 10)
    assert np.random.random() == expected


def test_one_seed_has_no_band():
    band = bootstrap_band([[0.1, 0.2]])
    np.testing.assert_array_equal(band.value, [0.1, 0.2])
    assert np.isnan(band.low).all() and np.isnan(band.high).all()


def test_places_use_the_runs_that_have_a_value():
    nan = np.nan
    band = bootstrap_band([[1.0, 1.0, nan], [3.0, nan, nan], [5.0, 5.0, nan]], 100)
    np.testing.assert_array_equal(band.n_runs, [3, 2, 0])
    np.testing.assert_allclose(band.value, [3.0, 3.0, nan])


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([1, 1], "no band"),
        ([3, 3], "means of 3 seeds"),
        ([2, 3], "2–3 seeds"),
        ([3], "too narrow"),
        ([5], "interquartile means of 5"),
    ],
)
def test_note_is_honest_about_few_seeds(counts, words):
    assert words in band_note(counts)


@pytest.mark.parametrize("counts", [[2, 3], [18, 18]])
def test_note_on_warm_starts_of_several_seeds_says_how_their_bands_are_made(counts):
    note = band_note(counts, clustered=True)
    assert "each warm start with the same weight" in note and "none from fewer than three" in note
    assert "cannot reach beyond" not in note and "interquartile means need four" not in note
    assert band_note([1, 1], clustered=True) == "One seed: no band."


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


# Six runs: events at 2, 3 and 5; one lost at 3, two watched to 8. By hand: 5/6, then x 4/5, then x 2/3.
TIMES, OBSERVED = [2, 3, 3, 5, 8, 8], [True, True, False, True, False, False]


def test_survival_curve_by_hand():
    curve = kaplan_meier(TIMES, OBSERVED)
    np.testing.assert_allclose(curve["time"], [0, 2, 3, 5, 8])
    np.testing.assert_allclose(curve["survival"], [1, 5 / 6, 2 / 3, 4 / 9, 4 / 9])
    np.testing.assert_array_equal(curve["at_risk"], [6, 6, 5, 3, 2])
    assert (curve["low"] < curve["survival"])[1:].all() and (curve["survival"] < curve["high"])[1:].all()


def test_restricted_mean_survival_by_hand():
    expected = 2 * 1 + 1 * 5 / 6 + 2 * 2 / 3 + 3 * 4 / 9
    assert restricted_mean_survival(TIMES, OBSERVED, 8) == pytest.approx(expected)
    assert restricted_mean_survival(TIMES, OBSERVED, 4) == pytest.approx(2 + 5 / 6 + 2 / 3)


def test_restricted_mean_of_runs_watched_to_the_end_is_the_mean_time():
    times = [4, 7, 10, 10]
    assert restricted_mean_survival(times, [True, True, False, False], 10) == pytest.approx(np.mean(times))


@pytest.mark.parametrize(("observed", "survival"), [([False] * 3, [1, 1]), ([True] * 3, [1, 0])])
def test_certain_survival_has_no_interval_rather_than_one_without_width(observed, survival):
    curve = kaplan_meier([5, 5, 5], observed)
    np.testing.assert_allclose(curve["survival"], survival)
    assert curve[["low", "high"]].isna().all(axis=None)


def test_no_run_has_no_survival_curve():
    with pytest.raises(ValueError, match="at least one run"):
        kaplan_meier([], [])


def test_area_is_the_mean_height():
    assert area_under_curve([0, 1, 4], [0, 1, 1]) == pytest.approx((0.5 + 3) / 4)
    assert math.isnan(area_under_curve([1], [1]))
