"""The study's own pictures of made-up runs: what they draw, and of which runs they draw nothing."""

import numpy as np
import pandas as pd
import pytest

from stppo.study.beginnings import EARLY, FEWEST, SIGNALS, beginnings, beginnings_of, correlations
from stppo.study.figures import FIGURES
from stppo.study.settings import cells
from tests.synthetic_runs import DYNAMICS, Dynamics, gather, simulate

LEARNS, COLLAPSES = Dynamics(0.8), Dynamics(0.7, onset=24)


def study_of(names, worlds=3, **options):
    return [simulate(name, world, **options) for name in names for world in range(worlds)]


def in_one_world(runs):
    for record, *_ in runs:
        record["world_seed"] = 0
    return gather(runs)


# ---- every seed ----------------------------------------------------------------------------------
def test_few_seeds_of_one_world_are_drawn_run_by_run():
    draw, names = FIGURES["each_seed"].draw, ("token_ppo", "turn_ppo", "grpo")
    assert draw(gather(study_of(names))) is None, "each seed is a world of its own"
    metrics = in_one_world(study_of(names)[:-1])  # GRPO lacks the last seed
    plot = draw(metrics)
    assert plot.data.groupby("algorithm")["seed"].nunique().to_dict() == dict(
        zip(names, (3, 3, 2), strict=True)
    )
    last = plot.data.query("algorithm == 'turn_ppo' and seed == 1 and metric == 'success_greedy'")
    run = metrics.evaluations.query("algorithm == 'turn_ppo' and seed == 1 and temperature == 0")
    assert last["value"].tolist() == run.sort_values("iteration")["success"].tolist()
    valid = plot.data.query("algorithm == 'turn_ppo' and seed == 1 and metric == 'valid_format_rate'")
    trained = metrics.iterations.query("algorithm == 'turn_ppo' and seed == 1").sort_values("iteration")
    assert valid["value"].iloc[-1] == pytest.approx(trained["valid_format_rate"].tail(5).mean())


# ---- settings ------------------------------------------------------------------------------------
def grid(dynamics=LEARNS):
    runs = []
    for epochs in (4, 8):
        for lag, rate in ((0, 5e-4), (2, 5e-4), (2, 1e-3)):
            setting = {"epochs": epochs, "staleness_iterations": lag, "learning_rate": rate}
            runs += [
                simulate("token_ppo", w, f"E{epochs}_L{lag}_{rate:g}", dynamics=dynamics, **setting)
                for w in range(2)
            ]
    return runs


def test_every_setting_and_run_has_its_panel():
    plot = FIGURES["every_setting"].draw(gather(grid(COLLAPSES)))
    assert len(plot.tables["cells"]) == 6 and plot.tables["cells"]["runs"].eq(2).all()
    assert plot.data.groupby("regime")["seed"].nunique().eq(2).all() and "12 of 12 runs" in plot.title
    names = [ax.get_title("left").replace("\n", " ") for ax in plot.figure.axes]
    assert len({*names} - {""}) == 6 and "4 epochs, staleness 0, learning rate 5e-4" in names


def test_a_cell_counts_runs_that_learned_and_lost_half():
    runs = [simulate("token_ppo", 0, dynamics=COLLAPSES), simulate("token_ppo", 1, dynamics=LEARNS)]
    row = cells(gather(runs).all).iloc[0]
    assert (row["runs"], row["shows"], row["collapsed"], row["learned"]) == (2, 1, 1, 1)


# ---- beginnings ------------------------------------------------------------------------------------


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
