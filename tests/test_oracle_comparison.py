"""Bias and noise of gradients on the oracle: theorems, enumeration of all batches, and exact against sampled."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from stppo.config import files as config_files
from stppo.config.loading import build
from stppo.objectives import (
    BatchBaseline,
    Clip,
    ClippedWeight,
    CreditRule,
    MinClip,
    NoStabilizer,
    Objective,
    Ratio,
)
from stppo.objectives.rivals import GradientClip, KeepLikelihood, SampleSizeStep, Unweighted
from stppo.oracle import (
    UNCLIPPED,
    BatchGradient,
    expected_surrogate,
    gradient_quality,
    limiting_advantages,
    surrogate_gradient,
)
from tests.oracle_cases import close, moved, numerical_gradient, small_oracle, tiny_oracle

FILES = {file.stem: config_files.read(file) for file in config_files.option_files("algorithm")}
ALL = [name for name, content in FILES.items() if "objective" in content]


def load(name):
    return build(FILES[name]["objective"], "algorithm.objective")


def reinforce(surrogate, ratio, clip=UNCLIPPED, stabilizer=None):
    return Objective(BatchBaseline(), ratio, clip, stabilizer or NoStabilizer(), "token_mean", surrogate)


@pytest.mark.parametrize("name", ALL)
def test_every_algorithm_has_a_quality_on_fresh_data(name):
    """And a bound that none may pass: efficiency is a cosine's share."""
    found = gradient_quality(tiny_oracle(), load(name), tiny_oracle().behaviour, n_batches=20)
    assert 0 <= found.bias <= 1 and found.noise > 0
    assert -1 <= found.efficiency <= math.sqrt(1 - found.bias**2) / math.sqrt(1 + found.noise**2) + 1e-9


@pytest.mark.parametrize("name", ["dr_grpo", "minirl", "topr", "dapo"])
def test_a_token_mean_of_plain_returns_is_unbiased_on_fresh_data(name):
    """One prompt, so that a group's mean and deviation are constants; then E[g] is the policy gradient up to scale."""
    oracle = tiny_oracle()
    assert gradient_quality(oracle, load(name), oracle.behaviour).bias < 1e-6
    token_mean = replace(load("grpo"), loss_aggregation="token_mean")
    assert gradient_quality(oracle, token_mean, oracle.behaviour).bias < 1e-6
    assert gradient_quality(oracle, load("grpo"), oracle.behaviour).bias > 0.01, (
        "1/|y| is what makes the difference"
    )


def test_only_the_full_trajectory_ratio_is_unbiased_off_policy_and_it_is_noisier():
    oracle = small_oracle()
    theta = moved(oracle)
    full = gradient_quality(oracle, reinforce(ClippedWeight(), Ratio("sequence", "product")), theta)
    token = gradient_quality(oracle, reinforce(ClippedWeight(), Ratio("token")), theta)
    none = gradient_quality(oracle, reinforce(Unweighted(), Ratio("token")), theta)
    assert full.bias < 1e-6 < token.bias < none.bias
    assert full.noise > none.noise


@pytest.mark.parametrize(
    "objective",
    [
        load("turn_ppo"),
        replace(load("turn_ppo"), stabilizer=load("st_ppo").stabilizer),
        replace(load("token_ppo"), stabilizer=GradientClip(max_norm=0.05)),
        replace(load("token_ppo"), stabilizer=SampleSizeStep()),
    ],
    ids=lambda o: type(o.stabilizer).__name__,
)
def test_a_batchs_gradient_is_the_oracles(objective):
    """The objective on a real batch, as in training, and the oracle's table of single trajectories agree."""
    oracle = tiny_oracle()
    theta, rows = moved(oracle), torch.tensor([3, 7, 7, 20])
    advantages = limiting_advantages(oracle, objective.credit)
    ours = BatchGradient(oracle, objective, theta, advantages)(rows)
    theirs = surrogate_gradient(oracle, objective, theta, advantages).batches(rows[None]).gradients[0]
    close(ours, theirs)
    free = replace(objective, stabilizer=NoStabilizer())
    assert (BatchGradient(oracle, free, theta, advantages)(rows) - ours).norm() > 1e-4 or free == objective


@pytest.mark.parametrize("name", ["m2po", "bapo", "vcpo"])
def test_sampled_moments_are_those_of_all_batches(name):
    """Every batch of two of the 32 trajectories, gone through one by one."""
    oracle, objective = tiny_oracle(), load(name)
    theta, p = moved(oracle), oracle.probabilities
    advantages = limiting_advantages(oracle, objective.credit)
    mean, square = 0.0, 0.0
    for i, j in itertools.combinations_with_replacement(range(len(p)), 2):
        gradient = BatchGradient(oracle, objective, theta, advantages)(torch.tensor([i, j]))
        weight = p[i] * p[j] * (1 if i == j else 2)
        mean, square = mean + weight * gradient, square + weight * gradient @ gradient
    noise = math.sqrt(square - mean @ mean) / mean.norm()
    true = oracle.policy_gradient(theta)
    cosine = mean @ true / mean.norm() / true.norm()
    found = gradient_quality(oracle, objective, theta, batch_size=2, n_batches=1500)
    assert found.sampled
    assert found.noise == pytest.approx(noise.item(), rel=0.1)
    assert found.efficiency == pytest.approx((cosine / math.sqrt(1 + noise**2)).item(), rel=0.1)


def test_a_token_penaltys_gradient_is_its_expectations():
    oracle = tiny_oracle()
    theta = moved(oracle)
    objective = replace(load("grpo"), stabilizer=KeepLikelihood(coefficient=2.0))
    advantages = limiting_advantages(oracle, objective.credit)

    def value(t):
        expected = expected_surrogate(oracle, objective, t, advantages)
        return (expected.surrogate - expected.penalty).item()

    found = surrogate_gradient(oracle, objective, theta, advantages).mean
    close(found, numerical_gradient(value, theta), 1e-7)
    plain = replace(objective, stabilizer=NoStabilizer())
    assert (surrogate_gradient(oracle, plain, theta, advantages).mean - found).norm() > 1e-3


def test_credit_without_a_limit_is_refused_by_name():
    class Odd(CreditRule):
        def estimate(self, trajectories, layout, values):
            raise AssertionError

    with pytest.raises(ValueError, match="Odd: its advantages in an infinite batch are not known"):
        limiting_advantages(tiny_oracle(), Odd())
    assert Objective(Odd(), Ratio(), Clip(), NoStabilizer()).surrogate == MinClip()
