"""The rules of `record.outcomes` on curves made by hand: evaluations every second iteration, a start of
0.2."""

import math

import numpy as np
import pytest

from stppo.record.outcomes import LABELS, judge, trailing_mean, with_zeros

START = 0.2


def judged(success, start=START, every=2, **options):
    return judge(np.arange(len(success)) * every, success, start, **options)


RISEN = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]
CURVES = {
    "learned": [*RISEN, *[0.8] * 10],
    "crashed and recovered": [*RISEN, 0.1, 0.1, 0.1, 0.1, *[0.8] * 10],
    "collapsed": [*RISEN, *[0.1] * 10],
    "did not learn": [0.2] * 16,
    "lost its start": [0.2, 0.1, *[0.05] * 14],
}


@pytest.mark.parametrize("label", LABELS)
def test_each_label_has_its_curve(label):
    assert judged(CURVES[label]).label == label


def test_smoothing_needs_three_evaluations():
    np.testing.assert_allclose(trailing_mean([0.0, 0.3, 0.6, 0.9]), [np.nan, np.nan, 0.3, 0.6])
    assert np.isnan(trailing_mean([0.5, 0.5])).all()


def test_numbers_of_a_collapse_by_hand():
    run = judged(CURVES["collapsed"])
    assert run.peak == pytest.approx(0.8) and run.final == pytest.approx(0.1)
    assert run.gain_kept == pytest.approx((0.1 - 0.2) / (0.8 - 0.2))
    # After (0.8, 0.1, 0.1) the mean of three, 1/3, is the first below 0.2 + 0.6 / 2 = 0.5: the eighth
    # evaluation.
    assert run.crash_iteration == 14


FALLEN = [*RISEN, *[0.1] * 6]
EDGES = [  # what is recorded, one of its properties, whether the run has it
    ("a rise of less than a tenth", [START] * 3 + [START + 0.099] * 10, "learned", False),
    ("a rise of a tenth", [START] * 3 + [START + 0.101] * 10, "learned", True),
    ("one high evaluation", [0.2, 0.2, 0.2, 0.45, 0.2, 0.2, 0.2, 0.2], "learned", False),
    ("more than half of the gain is kept", [*RISEN, *[0.51] * 6], "crashed", False),
    ("less than half of the gain is kept", [*RISEN, *[0.49] * 6], "crashed", True),
    ("0.33 keeps half of a gain of 0.2", [0.2, 0.4, 0.4, 0.4, 0.33, 0.33, 0.33, 0.33], "crashed", False),
    ("but not of 0.6", [0.2, 0.4, 0.4, 0.4, 0.8, 0.8, 0.8, 0.33, 0.33, 0.33], "crashed", True),
    ("less than half of the start is left", [0.2, *[0.099] * 19], "lost_start", True),
    ("more than half of the start is left", [0.2, *[0.101] * 19], "lost_start", False),
    ("back to more than half of the gain", [*FALLEN, *[0.52] * 4], "collapsed", False),
    ("back to less than half of the gain", [*FALLEN, *[0.48] * 4], "collapsed", True),
    ("the mean of the last tenth", [0.2] * 19 + [0.6], "final", pytest.approx(0.4)),
]


@pytest.mark.parametrize(("case", "success", "name", "expected"), EDGES, ids=[edge[0] for edge in EDGES])
def test_where_an_outcome_begins(case, success, name, expected):
    assert getattr(judged(success), name) == expected


def test_the_start_is_part_of_the_peak():
    run = judged([0.1] * 10, start=0.5)
    assert run.peak == 0.5 and run.label == "lost its start" and math.isnan(run.gain_kept)


def test_a_non_finite_run_collapses_whatever_it_had_reached():
    run = judged(RISEN, non_finite_iteration=11.0, horizon=40)
    assert run.label == "collapsed" and run.non_finite and run.final == 0.0
    assert run.crash_iteration == 11.0


def test_success_is_zero_after_a_non_finite_stop():
    whole = judged(RISEN, non_finite_iteration=10.0, horizon=30)
    to_its_end = judged(RISEN)
    assert whole.area == pytest.approx(np.trapezoid([*RISEN, *[0.0] * 10], dx=2) / 30)
    assert to_its_end.area == pytest.approx(np.trapezoid(RISEN, dx=2) / 10)
    assert whole.after[20] < 0.1 and math.isnan(to_its_end.after[20])


@pytest.mark.parametrize("stopped", [10, 11, 12])
def test_a_stop_off_the_grid_leaves_a_number_after_every_iteration(stopped):
    """Evaluated at 0, 2, ..., 10 of 40; wherever the run stopped behind that, the zeros stand at 12, 14, ...,
    40."""
    run = judged(RISEN, non_finite_iteration=float(stopped), horizon=40)
    assert run.after[20] == run.after[40] == 0.0 and math.isnan(run.after[60])
    assert run.area == pytest.approx(np.trapezoid([*RISEN, *[0.0] * 15], dx=2) / 40)


def test_the_horizon_has_a_zero_where_it_is_off_the_grid():
    iterations, success = with_zeros(np.arange(0.0, 11, 3), np.ones(4), 10.0, 20)
    assert iterations.tolist() == [0, 3, 6, 9, 12, 15, 18, 20] and success.tolist() == [1] * 4 + [0] * 4
    iterations, success = with_zeros(np.arange(0.0, 11, 3), np.ones(4), 14.0, 20)
    assert iterations.tolist() == [0, 3, 6, 9, 15, 18, 20], "success is 1 until it stops"
    iterations, _ = with_zeros(np.arange(0.0, 11, 5), np.ones(3), 10.0, 10)
    assert iterations.tolist() == [0, 5, 10]


def test_an_earlier_crash_is_not_postponed_by_the_stop():
    assert judged(CURVES["collapsed"], non_finite_iteration=31.0, horizon=40).crash_iteration == 14


def test_a_run_without_evaluations_that_stops_has_collapsed():
    run = judge([], [], START, non_finite_iteration=0.0, horizon=10)
    assert run.collapsed and run.final == 0.0


def test_a_run_of_two_evaluations_has_no_verdict_on_its_course():
    run = judged([0.2, 0.9])
    assert run.label == "did not learn" and not run.crashed and run.final == 0.9
    assert all(math.isnan(value) for value in run.after.values())


def test_success_after_n_iterations_is_the_smoothed_one_then():
    run = judged(np.linspace(0.2, 0.8, 16))
    assert run.after[10] == pytest.approx(np.linspace(0.2, 0.8, 16)[3:6].mean())
    assert math.isnan(run.after[40])


FALL = [0.8, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("success", "count"),
    [
        (CURVES["learned"], 0),
        ([*RISEN, *FALL], 1),
        ([*RISEN, *FALL, *[0.1] * 8], 1),  # staying down is not falling again
        ([*RISEN, *FALL, *[0.8] * 4, *FALL], 2),
        ([*RISEN, *np.linspace(0.8, 0.1, 15)], 0),  # half of the gain in 12 iterations
        (CURVES["lost its start"], 0),
    ],
)
def test_rapid_crashes_are_falls_within_ten_iterations(success, count):
    assert judged(success).rapid_crashes == count


@pytest.mark.parametrize(
    ("iterations", "success", "start"),
    [
        ([0, 2], [0.1], 0.2),
        ([2, 0], [0.1, 0.1], 0.2),
        ([0, 2], [0.1, 1.2], 0.2),
        ([0, 2], [0.1, np.nan], 0.2),
    ],
)
def test_curves_that_are_none_are_refused(iterations, success, start):
    with pytest.raises(ValueError, match="success|order"):
        judge(iterations, success, start)
