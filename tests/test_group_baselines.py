"""Group baselines by enumeration, against what can be said on paper."""

import itertools
import math
from collections import Counter

import pandas as pd
import pytest
import torch

from stppo.derivations.bias_variance import bias_variance_table
from stppo.derivations.group_baselines import AGGREGATIONS, BASELINES, GROUP, Groups, group_baseline_table
from stppo.files import repository_path


@pytest.fixture(scope="module", params=[False, True], ids=["chosen", "fixed"])
def groups(request):
    return Groups(request.param)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("baseline", ["none", *(name for name in BASELINES if "the others" in name)])
def test_a_baseline_that_leaves_the_own_trajectory_out_is_unbiased(groups, baseline):
    close(groups.gradient(baseline), groups.truth())


@pytest.mark.parametrize("baseline", ["trajectory, all", "turn, all, absent as 0"])
def test_a_mean_over_the_whole_group_shortens_by_one_member(groups, baseline):
    close(groups.gradient(baseline), groups.truth() * (1 - 1 / GROUP))


def test_a_mean_over_those_that_have_a_turn_shortens_each_turn_by_its_own_factor(groups):
    """Of a turn that a trajectory has with probability q, n - 1 others are binomial: E[1 - 1 / n] in closed form."""
    units = groups.units["turn"]
    layout = groups.oracle.layout
    expected = torch.zeros_like(groups.truth())
    for turn in range(units.has.shape[1]):
        theta = groups.oracle.behaviour.clone().requires_grad_()
        gains = torch.zeros(len(groups.oracle.tree), dtype=torch.float64)
        gains[groups.rows] = groups.p * units.to_go[:, turn]
        tokens = (gains[layout.rows] * (units.place == turn) * groups.oracle.token_logprobs(theta)).sum()
        q = float(groups.p @ units.has[:, turn].double())
        factor = 1 - (1 - (1 - q) ** GROUP) / (GROUP * q)
        expected += factor * torch.autograd.grad(tokens, theta)[0]
    close(groups.gradient("turn, all"), expected)


def test_division_and_token_mean_are_those_of_loops_over_every_group():
    groups = Groups(False)
    units, layout = groups.units["turn"], groups.oracle.layout
    p, lengths = groups.p.tolist(), groups.lengths.tolist()
    to_go, has = units.to_go.tolist(), units.has.tolist()
    coefficients = torch.zeros(units.has.shape, dtype=torch.float64)
    for members in itertools.combinations_with_replacement(range(len(p)), GROUP):
        orders = math.factorial(GROUP) / math.prod(map(math.factorial, Counter(members).values()))
        weight = orders * math.prod(p[i] for i in members) / sum(lengths[i] for i in members)
        for turn in range(units.has.shape[1]):
            rewards = [to_go[i][turn] for i in members if has[i][turn]]
            mean = sum(rewards) / max(1, len(rewards))
            spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards)))
            for i in members:
                if has[i][turn] and spread > 1e-12:
                    coefficients[i, turn] += weight * (to_go[i][turn] - mean) / spread
    theta = groups.oracle.behaviour.clone().requires_grad_()
    spread_out = torch.zeros(len(groups.oracle.tree), units.has.shape[1], dtype=torch.float64)
    spread_out[groups.rows] = coefficients
    tokens = spread_out[layout.rows, units.place] * groups.oracle.token_logprobs(theta)
    (expected,) = torch.autograd.grad(tokens.sum(), theta)
    close(groups.gradient("turn, all, divided", "token mean"), expected)


def test_the_recorded_algorithms_are_what_is_computed():
    found = bias_variance_table(["topr", "grpo", "st_ppo"]).set_index(["algorithm", "data"])
    recorded = pd.read_csv(repository_path("results/reference/oracle/algorithms.csv"))
    recorded = recorded.set_index(["algorithm", "data"]).loc[found.index]
    assert set(recorded["sampled"]) == {False, True}
    pd.testing.assert_frame_equal(found, recorded[list(found)], rtol=1e-4)


def test_the_recorded_table_is_what_is_computed():
    found = group_baseline_table(0)
    recorded = pd.read_csv(repository_path("results/reference/oracle/group_baselines.csv"))
    recorded = recorded[recorded["tree"] == 0].reset_index(drop=True)
    assert set(found["aggregation"]) == set(AGGREGATIONS) and set(found["baseline"]) == set(BASELINES)
    pd.testing.assert_frame_equal(found, recorded[list(found)], rtol=1e-4)
