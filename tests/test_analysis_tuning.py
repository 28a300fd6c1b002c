"""The rules by which tuning runs decide: which cell, which learning rate, which matched setting."""

from types import SimpleNamespace

import pandas as pd
import pytest

from stppo.analysis.tuning import (
    best_factor,
    choose_main,
    collapse_shares,
    early_mean,
    interpolate,
)

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


def finals(**by_regime):
    rows = [
        {"regime": r, "algorithm": "grpo", "success_final": f}
        for r, values in by_regime.items()
        for f in values
    ]
    return SimpleNamespace(summary=pd.DataFrame(rows))


def test_best_rate_has_the_highest_mean_final_success():
    factors = {"low": 0.5, "mid": 0.71, "high": 1.0}
    assert best_factor(finals(low=[0.1, 0.2], mid=[0.0, 0.5], high=[0.2, 0.2]), "grpo", factors) == 0.71
    assert best_factor(finals(low=[0.2], mid=[0.1], high=[0.2]), "grpo", factors) == 0.5, "a tie: the lower"
    with pytest.raises(ValueError, match="no tuning run in mid"):
        best_factor(finals(low=[0.1], high=[0.2]), "grpo", factors)


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


@pytest.mark.parametrize("target", [0.5, 3.0, 20.0, 200.0])
@pytest.mark.parametrize("power", [2.0, -1.5])
def test_interpolation_is_exact_for_power_laws_within_and_beyond(power, target):
    x = [2.0, 0.5, 1.0]
    assert interpolate(x, [v**power for v in x], target) == pytest.approx(target ** (1 / power))


def test_interpolation_goes_through_its_points_and_refuses_what_is_not_monotone():
    assert interpolate([1.0, 2.0, 4.0], [1.0, 3.0, 4.0], 3.0) == pytest.approx(2.0)
    assert 2.0 < interpolate([1.0, 2.0, 4.0], [1.0, 3.0, 4.0], 3.5) < 4.0
    with pytest.raises(ValueError, match="not monotone"):
        interpolate([1.0, 2.0, 4.0], [1.0, 3.0, 2.0], 2.0)
