"""Worlds that a claim needs: against closed forms, an independent calculation and simulated studies."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from stppo.stats import fewest_worlds, joint_level
from stppo.study import power


@pytest.mark.parametrize(("n", "sd", "size", "level"), [(12, 0.2, 0.2, 0.95), (20, 0.3, 0.25, 0.997)])
def test_power_is_that_of_a_paired_t_test(n, sd, size, level):
    needed = stats.t.ppf((1 + level) / 2, n - 1)

    def decided(spread):  # given the sample's sd, as a multiple of the true one
        return stats.norm.sf(needed * spread - size / sd * math.sqrt(n)) * 2 * spread * (n - 1) * stats.chi2.pdf((n - 1) * spread**2, n - 1)  # fmt: skip

    known = integrate.quad(decided, 0, 4)[0]
    assert power.power(n, sd, size, level) == pytest.approx(known, abs=1e-6)


def test_many_worlds_follow_the_normal_formula():
    quantiles = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert power.worlds_needed(1.0, 0.1, 0.95) == pytest.approx((quantiles / 0.1) ** 2, rel=0.01)


def test_needed_worlds_have_the_power_and_one_less_has_not():
    n = power.worlds_needed(0.25, 0.2, joint_level(16))
    assert power.power(n, 0.25, 0.2, joint_level(16)) >= 0.8 > power.power(n - 1, 0.25, 0.2, joint_level(16))


def test_clear_differences_still_need_the_fewest_worlds_of_the_level():
    assert power.worlds_needed(0.01, 0.5, joint_level(16)) == fewest_worlds(joint_level(16))


def test_simulated_studies_are_decided_as_often_as_said():
    pilot = stats.norm.ppf((np.arange(200) + 0.5) / 200, scale=0.2)
    n = power.worlds_needed(0.2, 0.25, 0.99)
    assert power.simulated_power(pilot, n, 0.25, 0.99) == pytest.approx(
        power.power(n, 0.2, 0.25, 0.99), abs=0.08
    )


def test_runs_that_die_make_the_formula_too_hopeful():
    """The numbers of the docstring: a fifth of the worlds lie 0.5 below the others."""
    dying = [-0.5] + [0.0] * 4
    n = power.worlds_needed(np.std(dying), 0.25, 0.99)
    assert n == 11 and power.power(n, np.std(dying), 0.25, 0.99) == pytest.approx(0.81, abs=0.01)
    assert power.simulated_power(dying, n, 0.25, 0.99, studies=1000) == pytest.approx(0.6, abs=0.1)
    assert power.simulated_power(dying, 20, 0.25, 0.99) > 0.9


def test_upper_limit_of_sd_is_passed_by_a_fifth_of_pilots():
    rng = np.random.default_rng(1)
    limits = [power.upper_sd(rng.normal(0, 1, 5)) for _ in range(2000)]
    assert np.mean(np.array(limits) < 1) == pytest.approx(0.2, abs=0.03)
    assert power.upper_sd([0.3]) == math.inf


def test_table_of_a_pilot():
    found = power.table({"a": [0.1, 0.3, math.nan, 0.2], "b": [0.1]}, [0.1, 0.2], 0.95).set_index(["comparison", "size"])  # fmt: skip
    a = found.loc[("a", 0.1)]
    assert (a["pilot_worlds"], a["mean"], a["sd"]) == (3, pytest.approx(0.2), pytest.approx(0.1))
    assert a["worlds"] == power.worlds_needed(0.1, 0.1, 0.95) < a["worlds_upper"]
    assert math.isnan(found.loc[("b", 0.2), "worlds"]) and math.isinf(found.loc[("b", 0.2), "sd_upper"])


@pytest.mark.parametrize(("sd", "size", "said"), [(0, 0.1, "must be positive"), (5, 0.001, "more than 10000 worlds")])  # fmt: skip
def test_what_cannot_be_planned_says_so(sd, size, said):
    with pytest.raises(ValueError, match=said):
        power.worlds_needed(sd, size, 0.95)
