import math

import numpy as np
import pytest

from stppo.results.resampling import Replicate
from stppo.study.outcomes import Arm, Study, differences_by_tenth, tenths
from tests.synthetic_runs import Behaviour, make_metrics, replicates

MAIN = "MAIN"
ILL, WELL, DIP = Arm(MAIN, "token_ppo"), Arm(MAIN, "st_ppo"), Arm(MAIN, "turn_ppo")
BROKEN = Arm(MAIN, "s_ppo")
ARMS = {
    ILL: Behaviour(risk=12 / 18),
    WELL: Behaviour(final=0.45, clip=0.04),
    DIP: Behaviour(dip=True),
    BROKEN: Behaviour(risk=6 / 18, non_finite=True),
}


@pytest.fixture(scope="module")
def study():
    return Study(make_metrics(ARMS))


@pytest.fixture(scope="module")
def table(study):
    return study.table(MAIN, baseline="token_ppo").set_index("algorithm")


def test_runs_are_found_by_arm_and_replicate(study):
    assert set(study.arms) == set(ARMS)
    assert list(study.runs(WELL)) == sorted(replicates())
    assert study.runs(Arm(MAIN, "gspo")) == {}


def test_table_finds_the_truth(table):
    assert table.loc["token_ppo", ["runs", "warm_starts", "collapsed"]].tolist() == [18, 6, 12]
    assert table.loc["token_ppo", "collapse_risk"] == pytest.approx(12 / 18)
    assert table.loc["st_ppo", "collapsed"] == 0 and table.loc["st_ppo", "survival"] == 40
    assert table.loc["st_ppo", "final_success"] == pytest.approx(0.45, abs=0.02)
    assert table.loc["st_ppo", "risk_difference"] == pytest.approx(12 / 18)
    assert table.loc["st_ppo", "improvement"] > 0.95
    assert 10 < table.loc["token_ppo", "survival"] < 40


def test_a_dip_that_recovers_is_a_labelled_collapse(table):
    assert table.loc["turn_ppo", ["collapsed", "recovered"]].tolist() == [18, 18]
    assert table.loc["turn_ppo", "final_success"] > 0.3


def test_every_interval_holds_its_value(table):
    names = [name[: -len("_low")] for name in table if name.endswith("_low")]
    assert len(names) == 8
    for name in names:
        rows = table[table[name].notna() & table[f"{name}_low"].notna()]
        inside = (rows[f"{name}_low"] <= rows[name]) & (rows[name] <= rows[f"{name}_high"])
        assert inside.all() and len(rows), name


def test_baseline_has_no_difference_to_itself(table):
    assert math.isnan(table.loc["token_ppo", "risk_difference"])


def test_a_run_stopped_by_a_non_finite_value_ends_at_nothing(study):
    stopped = [run for run in study.runs(BROKEN).values() if run["non_finite"]]
    assert len(stopped) == 6
    assert [study.final_success(run) for run in stopped] == [0.0] * 6
    assert [study.survival_time(run) for run in stopped] == [16.0] * 6
    curve = study.success(stopped[0])
    assert len(curve) == 21 and curve[16] > 0.2 and (curve[curve.index > 16] == 0).all()


def test_mean_success_is_the_area_under_the_curve(study):
    run = next(iter(study.runs(WELL).values()))
    curve = study.success(run).to_numpy()
    expected = (curve[:-1] + curve[1:]).sum() / 2 / 20
    assert study.mean_success(run) == pytest.approx(expected)


def test_a_run_evaluated_too_rarely_has_no_verdict_on_collapse():
    short = Study(make_metrics({WELL: Behaviour()}, iterations=6))
    runs = short.runs(WELL).values()
    assert all(math.isnan(short.collapsed(run)) and math.isnan(short.survival_time(run)) for run in runs)
    row = short.table(MAIN).iloc[0]
    assert math.isnan(row["collapse_risk"]) and row["runs"] == 18


def test_survival_curves_count_collapses(study):
    curves = study.survival_curves(MAIN, ["token_ppo", "st_ppo", "gspo"])
    last = curves.groupby("algorithm")["survival"].last()
    assert last.to_dict() == pytest.approx({"token_ppo": 6 / 18, "st_ppo": 1.0})
    assert study.survival_curves(MAIN, ["gspo"]).empty


def test_main_effect_of_survival_is_a_share_of_the_horizon(study):
    gain = study.survival_contrast([WELL, ILL], [1.0, -1.0])
    times = [study.survival_time(run) for run in study.runs(ILL).values()]
    assert gain.value == pytest.approx(1 - np.mean(times) / 40)


@pytest.mark.parametrize("horizon", [40, 90, 25])
def test_tenths_divide_training_evenly(horizon):
    sizes = np.bincount(tenths(np.arange(1, horizon + 1), horizon), minlength=10)
    assert len(sizes) == 10 and sizes.max() - sizes.min() <= 1


def test_clip_fractions_are_compared_in_pairs_before_the_first_collapse(study):
    by_tenth = differences_by_tenth(study, WELL, ILL, "clip_fraction")
    assert len(by_tenth[0]) == 18 and len(by_tenth[9]) == 6  # the pairs in which token PPO survives
    for tenth, values in enumerate(by_tenth):
        for replicate, value in values.items():
            assert isinstance(replicate, Replicate) and value == pytest.approx(-0.06, abs=0.03)
            collapse = study.collapse_iteration(study.runs(ILL)[replicate])
            assert 4 * (tenth + 1) < collapse
