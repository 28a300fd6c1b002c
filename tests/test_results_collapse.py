import numpy as np
import pytest

from stppo.results.collapse import detect_collapse, trailing_mean

START = 0.22


def judge(success, start=START, every=2, **keywords):
    return detect_collapse(np.arange(len(success)) * every, success, start, **keywords)


def test_trailing_mean_starts_with_the_third_value():
    np.testing.assert_allclose(trailing_mean([0.3, 0.6, 0.0, 0.3]), [np.nan, np.nan, 0.3, 0.3])


def test_step_collapse_is_dated_at_the_first_of_three_low_means():
    # S: .4 up to index 9, then .2667, .1333, 0 ...: the first S <= .2 is at index 11, iteration 22.
    verdict = judge([0.4] * 10 + [0.0] * 6)
    assert (verdict.collapsed, verdict.iteration, verdict.cause) == (True, 22, "success")
    assert verdict.label == "collapsed" and verdict.peak == pytest.approx(0.4)


def test_two_low_means_are_no_collapse():
    # Ends with exactly two means below the threshold.
    assert not judge([0.4] * 10 + [0.0] * 3).collapsed
    assert judge([0.4] * 10 + [0.0] * 4).collapsed


def test_fall_to_just_above_half_is_no_collapse():
    assert not judge([0.4] * 10 + [0.21] * 10).collapsed
    assert judge([0.4] * 10 + [0.19] * 10).collapsed


@pytest.mark.parametrize(("fraction", "collapsed"), [(0.4, False), (0.5, True), (0.6, True)])
def test_line_can_be_drawn_elsewhere(fraction, collapsed):
    assert judge([0.4] * 10 + [0.18] * 10, fraction=fraction).collapsed == collapsed
    assert judge([0.4] * 10 + [0.22] * 10, fraction=fraction).collapsed == (fraction == 0.6)


def test_small_fall_is_no_collapse_even_below_half():
    # From .12 to .03: below half, but only .09 lost.
    assert not judge([0.12] * 8 + [0.03] * 8, start=0.12).collapsed


def test_warm_start_counts_into_the_peak():
    # Never evaluated above .1, yet the start had .22.
    verdict = judge([0.1] * 3 + [0.05] * 6)
    assert verdict.collapsed and verdict.never_improved


def test_stable_run_learned():
    verdict = judge(np.linspace(0.22, 0.5, 21))
    assert (verdict.collapsed, verdict.never_improved, verdict.label) == (False, False, "learned")


def test_flat_run_never_improved_without_collapsing():
    verdict = judge([0.22] * 21)
    assert (verdict.collapsed, verdict.never_improved, verdict.label) == (False, True, "never improved")


def test_recovery_makes_a_collapse_transient():
    verdict = judge([0.4] * 8 + [0.0] * 6 + [0.4] * 8)
    assert verdict.collapsed and verdict.transient and verdict.label == "collapsed, recovered"


def test_brief_recovery_is_not_enough():
    # One good evaluation among bad ones lifts no three means above half.
    assert not judge([0.4] * 8 + [0.0] * 6 + [0.5] + [0.0] * 6).transient


def test_brief_dip_is_no_collapse():
    assert not judge([0.4] * 8 + [0.0] * 2 + [0.4] * 8).collapsed


def test_non_finite_run_is_a_collapse_without_recovery():
    verdict = judge([0.3] * 10, non_finite_iteration=19)
    assert (verdict.collapsed, verdict.iteration, verdict.cause) == (True, 19, "non_finite")
    assert verdict.label == "non-finite" and not verdict.transient


def test_the_earlier_of_two_causes_dates_the_collapse():
    success = [0.4] * 10 + [0.0] * 6
    assert judge(success, non_finite_iteration=30).cause == "success"
    assert judge(success, non_finite_iteration=21).iteration == 21


@pytest.mark.parametrize("length", range(5))
def test_too_short_series_cannot_be_decided(length):
    verdict = judge([0.3, 0.0, 0.0, 0.0][:length])
    assert not verdict.collapsed and not verdict.decidable and verdict.label == "too short"
    assert (verdict.never_improved is None) == (length < 3)


def test_five_evaluations_are_the_shortest_collapse():
    verdict = judge([0.0] * 5)
    assert verdict.decidable and verdict.collapsed and verdict.iteration == 4


def test_spacing_is_reported():
    assert judge([0.3] * 6, every=5).spacing == 5


@pytest.mark.parametrize("level", [0.20, 0.25, 0.35])
def test_sampling_noise_raises_no_alarm(level):
    rng = np.random.default_rng(0)
    series = rng.binomial(256, level, size=(1000, 46)) / 256
    assert sum(judge(success, start=level).collapsed for success in series) == 0


@pytest.mark.parametrize("level", [0.20, 0.25, 0.35])
def test_a_real_fall_under_the_same_noise_is_found_in_time(level):
    rng = np.random.default_rng(0)
    mean = np.r_[np.full(10, level), np.full(10, 0.03)]
    verdicts = [judge(rng.binomial(256, mean) / 256, start=level) for _ in range(200)]
    assert all(v.collapsed and 20 <= v.iteration <= 26 for v in verdicts)


@pytest.mark.parametrize(
    ("iterations", "success", "start", "message"),
    [
        ([0, 2, 2], [0.1] * 3, 0.2, "increasing"),
        ([0, 2], [0.1] * 3, 0.2, "one length"),
        ([0, 2, 4], [0.1, np.nan, 0.1], 0.2, "finite"),
        ([0, 2, 4], [0.1] * 3, 20.0, r"\[0, 1\]"),
    ],
)
def test_bad_series_are_refused(iterations, success, start, message):
    with pytest.raises(ValueError, match=message):
        detect_collapse(iterations, success, start)
