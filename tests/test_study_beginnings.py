"""Which early signal goes along with final success: over the runs of each world, and not over worlds."""

import numpy as np
import pandas as pd
import pytest

from stppo.study.beginnings import EARLY, FEWEST, SIGNALS, beginnings, beginnings_of, correlations
from tests.synthetic_runs import DYNAMICS, Dynamics, gather, simulate


def table(**columns):
    n = len(next(iter(columns.values())))
    known = {name: np.full(n, np.nan) for name in SIGNALS} | {"world": np.zeros(n, int), "seed": np.arange(n)}
    return pd.DataFrame({"algorithm": [f"a{i}" for i in range(n)], **known, **columns})


def test_a_correlation_is_that_within_worlds():
    """Within each world the signal falls as success rises; between worlds it rises with it."""
    within = np.arange(FEWEST)
    two = table(
        world=np.repeat([0, 1], FEWEST),
        final=np.concatenate([0.1 + 0.01 * within, 0.7 + 0.01 * within]),
        entropy=np.concatenate([1.0 - 0.1 * within, 5.0 - 0.1 * within]),
    )
    (row,) = correlations(two).to_dict("records")
    assert row == {"signal": "entropy", "correlation": -1, "low": -1, "high": -1, "runs": 16, "worlds": 2}


def test_a_world_with_few_runs_and_a_signal_that_never_differs_say_nothing():
    few = table(final=np.linspace(0, 1, FEWEST - 1), entropy=np.linspace(0, 1, FEWEST - 1))
    assert correlations(few).empty
    same = table(final=np.linspace(0, 1, FEWEST), entropy=np.ones(FEWEST))
    assert correlations(same).empty


def test_only_the_first_iterations_are_read():
    runs = [simulate(name, 0) for name in DYNAMICS]
    record, updates, evaluations = runs[0]
    late = updates.assign(entropy=updates["entropy"].where(updates["iteration"] <= EARLY, 99.0))
    found = [
        beginnings_of(gather(r).main).set_index("algorithm")["entropy"]
        for r in (runs, [(record, late, evaluations), *runs[1:]])
    ]
    assert found[0].equals(found[1]) and found[0].notna().all()
    short = gather([simulate(name, 0, iterations=EARLY) for name in DYNAMICS])
    assert beginnings_of(short.main).empty, "the beginning is no beginning where it is half of the run"
    assert beginnings(short) is None


def test_the_figure_shows_the_strongest_signal_run_by_run():
    levels = np.linspace(0.3, 0.9, FEWEST)
    runs = [
        simulate(f"token_ppo_{i}", world, dynamics=Dynamics(level, clip=0.5 - 0.4 * level))
        for i, level in enumerate(levels)
        for world in range(2)
    ]
    plot = beginnings(gather(runs))
    found = plot.tables["correlations"].set_index("signal")["correlation"]
    assert found["clip_fraction"] == pytest.approx(-1, abs=0.3)
    assert (plot.data["metric"] == found.abs().idxmax()).all() and len(plot.data) == 2 * FEWEST
