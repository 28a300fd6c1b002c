"""Falls are found where they are, alarms are judged in other worlds than they are tuned in, and chance is no
alarm."""

import math

import numpy as np
import pandas as pd
import pytest

from stppo.study import alarms
from stppo.study.alarms import NEVER, Watched, by_chance, distance, fall_of, judged, rings, tuned


def quiet(seed: int, n: int = 80) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n)


def run(world: int, fall: float = math.nan, **spikes: tuple[int, float]) -> Watched:
    """Noise in two signals; a spike (iteration, size) in one of them."""
    read = {name: quiet(100 * world + i) for i, name in enumerate(("entropy", "clip_fraction"))}
    for name, (iteration, size) in spikes.items():
        read[name][iteration - 1] = size
    return Watched(world, fall, np.arange(1, 81), read)


def test_a_distance_is_that_from_the_runs_own_past():
    values = np.cumsum(quiet(0, 60))
    values[10] = np.nan
    for i, found in enumerate(distance(values)):
        past = pd.Series(values[max(0, i - alarms.PAST) : i]).dropna()
        if len(past) < alarms.LEAST:
            assert np.isnan(found)
        elif np.isfinite(values[i]):
            spread = max((past - past.median()).abs().median(), 1e-3 * abs(past.median()) + 1e-9)
            assert found == pytest.approx((values[i] - past.median()) / spread)


def test_a_fall_is_the_first_evaluation_below_the_line_of_its_crash():
    iterations, success = np.arange(2, 22, 2), np.array([0.2, 0.5, 0.8, 0.8, 0.8, 0.1, 0.1, 0.7, 0.8, 0.8])
    smoothed = pd.Series(success).rolling(3).mean()
    crash = iterations[np.flatnonzero((smoothed < 0.2 + (0.8 - 0.2) / 2) & (iterations > 6))[0]]
    assert crash == 14, "the mean of three crosses the line an evaluation later than success does"
    assert fall_of(iterations, success, 0.2, crash) == 12


def test_a_ring_announces_a_fall_only_in_the_iterations_before_it():
    runs = [
        run(0, 40, entropy=(36, 50.0)),
        run(1, 40, entropy=(40, 50.0)),
        run(2, 40, entropy=(20, 50.0)),
        run(3),
    ]
    runs += [run(4, 40, entropy=(41, 50.0))]
    found = rings(runs, "entropy", 1, 20)
    assert found.leads == (4, 0, NEVER, NEVER) and (found.announced, found.false) == (1, 1)
    assert found.iterations == 29 * 4 + 80, "a run counts up to where a ring would announce its fall"
    assert rings(runs, "entropy", -1, 20).leads == (NEVER,) * 4


def test_chance_is_what_the_alarm_does_in_other_runs_in_the_same_iterations():
    """Two healthy runs ring, one where runs fall and one elsewhere; a run that fell, or falls soon after,
    says nothing."""
    falls = [run(0, 40, entropy=(36, 50.0)), run(1, 44, entropy=(39, 50.0)), run(2, 20)]
    healthy = [run(3, entropy=(35, 50.0)), run(4, entropy=(60, 50.0)), run(5)]
    ended = Watched(6, math.nan, np.arange(1, 31), {"entropy": quiet(6, 30)})
    found = by_chance([*falls, *healthy, ended], "entropy", 1, 20)
    assert found == pytest.approx([1 / 3, 1 / 3, 0])
    assert math.isnan(by_chance(falls[:2], "entropy", 1, 20)[0]), "no run to compare with"


def test_alarms_that_ring_at_certain_iterations_in_all_runs_are_no_better_than_chance():
    """Every run moves at iteration 36 and 24 of 40 fall at 40: over whole runs such alarms are rare, at 36
    they are not."""
    runs = [run(world, 40 if world % 5 < 3 else math.nan, clip_fraction=(36, 30.0)) for world in range(40)]
    row = judged(runs).set_index("signal").loc["clip_fraction"]
    assert row["announced"] > 15 and row["by_chance"] == pytest.approx(row["announced"], abs=3)


def test_thresholds_keep_to_the_false_alarms_allowed():
    runs = [run(world) for world in range(20)]
    for signal in ("entropy", "clip_fraction"):
        _, threshold, found = tuned(runs, signal)
        assert found.rate <= alarms.BUDGET and math.isfinite(threshold)


def test_a_signal_that_warns_is_found_and_noise_is_not():
    runs = [run(world, 40, clip_fraction=(37, -30.0)) for world in range(12)] + [
        run(world) for world in range(20, 32)
    ]
    table = judged(runs).set_index("signal")
    # not quite all: after a false ring an alarm is silent
    assert table.loc["clip_fraction", "announced"] >= 10 and table.loc["clip_fraction", "lead"] == 3
    assert table.loc["clip_fraction", "chosen"] == "falls"
    assert table.loc["best", "chosen"] == "clip fraction" and table.loc["best", "announced"] >= 10
    assert table.loc["entropy", "announced"] <= 5
    assert 0.3 < table.loc["entropy", "by_chance"] < 3
    assert table.loc["clip_fraction", "low"] > 0.3 and table.loc["entropy", "low"] < 0


def test_what_is_chosen_in_one_half_is_judged_in_the_other():
    """Each half of the worlds has a signal of its own, so what is best in one announces nothing in the
    other."""
    runs = [run(w, 40, **{("entropy", "clip_fraction")[w % 2]: (37, 30.0)}) for w in range(12)]
    table = judged(runs).set_index("signal")
    assert table.loc["best", "announced"] <= 3


def test_few_crashes_say_nothing():
    assert judged([run(world, 40, entropy=(36, 50.0)) for world in range(7)]).empty
