"""The rules by which tuning runs decide: which cell, which learning rate, which matched setting."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from omegaconf import OmegaConf

from stppo.results.runs import Metrics, load_metrics
from stppo.study import tuning
from stppo.study.arms import BEST, NINE
from stppo.study.tuning import (
    best_factor,
    choose_main,
    collapse_shares,
    early_mean,
    interpolate,
)
from tests.study_cases import PRESET as STUDY_PRESET
from tests.synthetic_runs import Behaviour, make_metrics, replicates

RATES = {"a": 1.0, "b": 2.0, "c": 3.0}


def test_main_cell_is_the_nearest_to_four_in_five():
    assert choose_main({"a": 0.2, "b": 0.6, "c": 1.0}, RATES) == "b", "equally near: the lower rate"
    assert choose_main({"a": 0.2, "b": 0.4, "c": 0.8}, RATES) == "c"
    with pytest.raises(ValueError, match="extend the grid"):
        choose_main({"a": 0.2, "b": 0.4, "c": 0.4}, RATES)


def test_shares_count_collapses_of_one_algorithm():
    verdicts = {("x", "token_ppo", s): SimpleNamespace(collapsed=s < 3) for s in range(5)}
    verdicts |= {("x", "st_ppo", 0): SimpleNamespace(collapsed=True)}
    verdicts |= {("y", "token_ppo", 0): SimpleNamespace(collapsed=False)}
    assert collapse_shares(SimpleNamespace(collapses=verdicts)) == {"x": 0.6, "y": 0.0}


FACTORS = {"low": 0.5, "mid": 0.71, "high": 1.0}
TWO = replicates(worlds=1, warm_starts=2, seeds=1)


def tuned(**behaviours):
    return make_metrics({(regime, "grpo"): b for regime, b in behaviours.items()}, TWO)


def test_best_rate_has_the_highest_mean_final_success():
    one, other, poor = Behaviour(final=0.45), Behaviour(final=0.42), Behaviour(final=0.3)
    assert best_factor(tuned(low=poor, mid=one, high=other), "grpo", FACTORS) == 0.71


def test_of_equally_good_rates_the_lowest_is_taken():
    metrics = tuned(low=Behaviour(), mid=Behaviour(), high=Behaviour())
    metrics.evaluations["success"] = 0.4
    assert best_factor(metrics, "grpo", FACTORS) == 0.5


def test_rate_that_stops_at_a_non_finite_value_is_not_best():
    early = Behaviour(final=0.6, risk=1.0, non_finite=True)
    arms = {(regime, "grpo"): Behaviour() if regime == "mid" else early for regime in FACTORS}
    arms |= {(regime, "gspo"): Behaviour() for regime in FACTORS}  # whose runs tell how long the regime is
    assert best_factor(make_metrics(arms, TWO), "grpo", FACTORS) == 0.71


def test_rates_are_compared_on_the_same_replicates():
    arms = {(regime, "grpo"): Behaviour() for regime in FACTORS}
    metrics = make_metrics(arms, {arm: TWO[: 1 + (arm[0] != "mid")] for arm in arms})
    with pytest.raises(ValueError, match="grpo: the tuning runs .* differ .low 2, mid 1, high 2."):
        best_factor(metrics, "grpo", FACTORS)


def test_early_mean_weighs_runs_alike_and_stops_in_time():
    rows = pd.DataFrame(
        {
            "regime": "r",
            "algorithm": "grpo",
            "seed": [1, 1, 1, 2],
            "iteration": [1, 2, 3, 1],
            "update_norm": [1.0, 3.0, 100.0, 6.0],
        }
    )
    assert early_mean(SimpleNamespace(iterations=rows), "r", "grpo", "update_norm", 2) == 4.0
    with pytest.raises(ValueError, match="r/st_ppo"):
        early_mean(SimpleNamespace(iterations=rows), "r", "st_ppo", "update_norm", 2)


@pytest.mark.parametrize("target", [0.5, 0.8, 1.5])
@pytest.mark.parametrize("power", [2.0, -1.5])
def test_interpolation_is_exact_for_power_laws(power, target):
    x = [2.0, 0.5, 1.0]
    assert interpolate(x, [v**power for v in x], target) == pytest.approx(target ** (1 / power))


def test_interpolation_goes_through_its_points():
    assert interpolate([1.0, 2.0, 4.0], [1.0, 3.0, 4.0], 3.0) == pytest.approx(2.0)
    assert 2.0 < interpolate([1.0, 2.0, 4.0], [1.0, 3.0, 4.0], 3.5) < 4.0
    assert interpolate([0.5, 1.0, 2.0, 4.0], [0.0, 1.0, 3.0, 4.0], 3.0) == pytest.approx(2.0), "0: left out"


def test_points_that_are_not_monotone_are_read_off_the_line_through_all():
    x = np.array([0.25, 0.5, 1.0, 2.0, 4.0])
    y = x**1.2 * np.exp([0.0, 0.9, -0.9, 0.9, -0.3])
    slope, intercept = scipy.stats.linregress(np.log(x), np.log(y))[:2]
    assert interpolate(x, y, 1.4) == pytest.approx(np.exp((np.log(1.4) - intercept) / slope))


@pytest.mark.parametrize("y", [[1.0, 2.0, 4.0], [4.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
@pytest.mark.parametrize("target", [0.9, 4.1])
def test_target_outside_the_grid_asks_for_a_longer_one(y, target):
    with pytest.raises(ValueError, match="extend the grid"):
        interpolate([1.0, 2.0, 4.0], y, target)


def stage_three():
    """Made-up tuning runs in which every quantity is a power of what it is to be matched by."""
    rows = []

    def add(regime, algorithm, **columns):
        rows.extend(
            {"regime": regime, "algorithm": algorithm, "seed": s, "iteration": i, **columns}
            for s in (9001, 9002)
            for i in range(1, 11)
        )

    for regime, f in tuning.FACTORS.items():
        for algorithm in ("token_ppo", "turn_ppo", "turn_grpo"):
            add(regime, algorithm, kl_behaviour_k3=f**2, update_norm=f, out_of_range_fraction=0.08 * f)
    for algorithm in ("s_ppo", "st_ppo", "so_grpo"):
        add("F1", algorithm, kl_behaviour_k3=0.25, update_norm=0.6, out_of_range_fraction=0.0)
    for algorithm, tried in tuning.EPSILONS.items():
        for e in tried:
            add("EPSILON", f"{algorithm}_epsilon{e:g}", out_of_range_fraction=0.01 / e)
    for rate in tuning.SGD_RATES:
        add("SGD", f"turn_ppo_sgd{rate:g}", update_norm=4 * rate)
    finals = {"F0.25": 0.1, "F0.35_FULL": 0.2, "F0.5": 0.3, "F0.71": 0.45, "F1": 0.4}
    runs = make_metrics({(r, a): Behaviour(final=f) for r, f in finals.items() for a in NINE}, TWO)
    return Metrics(runs.runs, pd.DataFrame(rows), runs.evaluations)


def test_stage_three_decides_by_its_rules():
    decision = tuning.decide(stage_three())
    assert decision.best == dict.fromkeys(NINE, 0.71)
    for untreated in ("token_ppo", "turn_ppo", "turn_grpo"):
        assert decision.factor[f"{untreated}_kl_matched"] == pytest.approx(0.5)
        assert decision.factor[f"{untreated}_step_matched"] == pytest.approx(0.6)
    assert decision.epsilon == {"turn_ppo": pytest.approx(0.125), "gspo": pytest.approx(0.125)}
    assert decision.sgd_rate == pytest.approx(0.25)


def test_stage_three_names_the_run_that_is_missing():
    metrics = stage_three()
    rows = metrics.iterations
    kept = rows[~((rows["regime"] == "F0.35") & (rows["algorithm"] == "turn_grpo"))]
    with pytest.raises(ValueError, match="F0.35/turn_grpo: no tuning run"):
        tuning.decide(Metrics(metrics.runs, kept, metrics.evaluations))


@pytest.mark.parametrize("miss", [0.09, -0.09, 0.12, -0.12])
def test_checked_factor_stands_within_a_tenth_and_is_interpolated_once_more_beyond(miss):
    metrics, rows = stage_three(), []
    decision = tuning.decide(metrics)
    for name in decision.factor:
        reached = {"kl_behaviour_k3": 0.25 * (1 + miss), "update_norm": 0.6 * (1 + miss)}
        rows += [
            {"regime": tuning.CHECK, "algorithm": name, "seed": s, "iteration": i, **reached}
            for s in (9001, 9002)
            for i in range(1, 11)
        ]
    checks = Metrics([], pd.DataFrame(rows), metrics.evaluations)
    factors, errors = tuning.settle(metrics, checks, decision)
    assert errors == {name: pytest.approx(miss) for name in decision.factor}
    for name, factor in factors.items():
        if abs(miss) < 0.1:
            assert factor == decision.factor[name]
        elif "step" in name:  # the target of the others is a point of the grid
            assert np.sign(decision.factor[name] - factor) == np.sign(miss), "too far: a smaller step"
            assert factor == pytest.approx(decision.factor[name], rel=0.3)


def committed(stage):
    return load_metrics(STUDY_PRESET.parents[2] / "results" / "reference" / "study" / "tuning" / stage)


def arms_of(preset):
    """Arm -> its overrides, as key -> value."""
    arms = OmegaConf.to_container(OmegaConf.load(STUDY_PRESET.with_name(f"{preset}.yaml")))["pipeline"][
        "arms"
    ]
    return {name: dict(override.split("=", 1) for override in overrides) for name, overrides in arms.items()}


def test_the_check_tries_the_rates_that_stage_three_interpolated():
    tried, decision = arms_of("study_tuning_3"), tuning.decide(committed("stage3"))
    rates = {name: tuning.MAIN_RATE * factor for name, factor in decision.factor.items()}
    for name, value in (rates | {"st_ppo_sgd": decision.sgd_rate}).items():
        assert float(tried[name]["training.learning_rate"]) == float(f"{value:.3g}"), name


def test_study_runs_what_stage_three_decided():
    metrics, checks = committed("stage3"), committed("stage3_check")
    decision = tuning.decide(metrics)
    factors, _ = tuning.settle(metrics, checks, decision)
    divisor = early_mean(checks, tuning.CHECK, "st_ppo_sgd", "stabilizer_divisor", 10)
    rates = {name: tuning.MAIN_RATE * factor for name, factor in factors.items()}
    rate = float(f"{decision.sgd_rate:.3g}")
    rates |= dict.fromkeys(("turn_ppo_sgd", "st_ppo_sgd", "so_ppo_ctn_sgd"), rate)
    rates["turn_ppo_sgd_constant"] = rate / divisor
    epsilon = {f"{name}_epsilon_matched": value for name, value in decision.epsilon.items()}
    arms = arms_of("study")
    for key, decided in (
        ("training.learning_rate", rates),
        ("algorithm.objective.clip.epsilon_high", epsilon),
    ):
        for name, value in decided.items():
            assert float(arms[name][key]) == float(f"{value:.3g}"), name
    regimes = OmegaConf.load(STUDY_PRESET).pipeline.regimes
    best = [plan for entry, plan in regimes.items() if plan.get("regime", entry) == BEST]
    chosen = {name: plan.overrides for plan in best for name in plan.algorithms}
    assert {name: OmegaConf.from_dotlist(list(overrides)).training for name, overrides in chosen.items()} == {
        name: {"learning_rate": pytest.approx(tuning.MAIN_RATE * factor)}
        for name, factor in decision.best.items()
        if factor != 1
    }
    assert (
        float(OmegaConf.load(STUDY_PRESET.parents[1] / "training/study_main.yaml").learning_rate)
        == tuning.MAIN_RATE
    )
