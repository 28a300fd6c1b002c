"""Our losses against TRL's `GRPOTrainer._compute_loss`, at token and at sequence level."""

import math

import pytest
import torch
from hypothesis import given

from stppo.objectives import Ratio, kl_policy_to_behaviour
from stppo.trajectories import Layout
from tests.differential.cases import EPSILONS, case_of, cases, referee_settings
from tests.differential.peers import (
    TRL_LOSS_TYPES,
    objective,
    our_loss,
    pairs,
    trl_case,
    trl_loss,
    value_and_gradient,
)

pytestmark = pytest.mark.engines

RATIOS = {"token": Ratio("token"), "sequence": Ratio("sequence", "geometric")}


def ours(level, case, low, high, mode="trajectory_mean"):
    return value_and_gradient(our_loss(objective(RATIOS[level], low, high, mode), case), case.logprobs)


@pytest.mark.parametrize("level", RATIOS)
@pytest.mark.parametrize("mode", TRL_LOSS_TYPES)
@referee_settings
@given(case=cases(), low=EPSILONS, high=EPSILONS)
def test_losses_are_trls(referees, level, mode, case, low, high):
    """No clamp on either side, and the sequence level passes the ratio's true gradient: nothing to leave out,
    advantages that differ within a trajectory included."""
    metrics = {}
    theirs = trl_case(case, low, high, level, TRL_LOSS_TYPES[mode], metrics)
    name = {"token": "token GRPO / TRL token", "sequence": "GSPO / TRL sequence"}[level]
    referees.compare(f"{name}, {TRL_LOSS_TYPES[mode]}", **pairs(ours(level, case, low, high, mode), theirs))
    if level == "token":
        rule = objective(RATIOS[level], low, high, mode)
        diagnostics = rule(case.logprobs, case.batch, case.advantages).diagnostics
        for side, key in {"": "region_mean", "_low": "low_mean", "_high": "high_mean"}.items():
            mine = torch.tensor(diagnostics[f"clip_fraction{side}"])
            referees.compare(
                "clip fractions / TRL token", fraction=(mine, torch.tensor(metrics[f"clip_ratio/{key}"]))
            )


@pytest.mark.parametrize("level", RATIOS)
@referee_settings
@given(case=cases(advantages_per="row"), low=EPSILONS, high=EPSILONS)
def test_dapo_is_our_token_mean_and_dr_grpo_a_constant_multiple_of_it(referees, level, case, low, high):
    """Dr. GRPO divides by rows times the longest completion allowed, we by agent tokens: its choice keeps one
    scale over batches, ours is a mean; under Adam the constant is nothing."""
    value, gradient = ours(level, case, low, high, "token_mean")
    referees.compare(
        f"token_mean, {level} / TRL dapo",
        **pairs((value, gradient), trl_case(case, low, high, level, "dapo")),
    )
    scale = case.mask.double().mean()
    referees.compare(
        f"token_mean, {level}, rescaled / TRL dr_grpo",
        **pairs((scale * value, scale * gradient), trl_case(case, low, high, level, "dr_grpo")),
    )


def test_trl_counts_clipped_sequences_and_we_their_tokens():
    case = case_of([[3], [1]], [0.5] * 4, [1.0, 1.0, 1.0, -1.0])
    metrics = {}
    trl_case(case.with_advantages(torch.tensor([1.0, -1.0])), 0.2, 0.2, "sequence", "grpo", metrics)
    rule = objective(RATIOS["sequence"], 0.2, 0.2)
    mine = rule(case.logprobs, case.batch, case.advantages).diagnostics["clip_fraction"]
    assert (metrics["clip_ratio/region_mean"], mine) == (0.5, 0.75)


@referee_settings
@given(case=cases(log_ratios=(-20.0, 20.0), advantages_per="row"))
def test_trls_bias_corrected_kl_is_our_kl_policy_to_behaviour(referees, case):
    """With the behaviour policy as reference: r (exp(-l) + l - 1) = r l - r + 1."""
    still = case.with_advantages(torch.zeros_like(case.advantages))
    theirs = trl_case(still, 0.2, 0.2, "token", "bnpo", beta=1.0, use_bias_correction_kl=True)
    layout, behaviour = case.layout, case.batch.behaviour_logprobs
    mine = value_and_gradient(
        lambda x: kl_policy_to_behaviour(layout.gather(x - behaviour)).mean(), case.logprobs
    )
    referees.compare("kl_policy_to_behaviour / TRL use_bias_correction_kl", **pairs(mine, theirs))


@pytest.mark.parametrize("level", RATIOS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_garbage_off_the_mask_reaches_trls_gradient_but_not_ours(referees, level, garbage):
    """TRL multiplies by the mask, so it relies on clean padding; ours never reads those entries."""
    case = case_of([[3, 1], [2]], [0.1, -0.3, 0.0, 0.5, 0.2, 0.1], [1.0, 1.0, 1.0, 1.0, -2.0, -2.0])
    spoilt = case.off_the_mask(garbage)
    theirs = trl_case(case, 0.2, 0.2, level, "grpo")
    referees.compare("garbage off our mask / TRL without it", **pairs(ours(level, spoilt, 0.2, 0.2), theirs))
    assert trl_case(spoilt, 0.2, 0.2, level, "grpo")[1].isnan().any()


def test_trl_keeps_rows_without_agent_tokens_in_the_mean_over_rows(referees):
    """TRL counts an empty completion as a loss of 0, verl leaves it out. `Objective.evaluate` on a bare mask
    does as TRL; a whole `Trajectories` with such a row is refused, which settles the matter before."""
    mask = torch.tensor([[True, True, False], [False, False, False]])
    behaviour, logprobs = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    logprobs[0, :2] = torch.tensor([0.1, -0.1])
    advantages = torch.ones(2, 3, dtype=torch.float64)
    layout = Layout.of(mask)
    rule = objective(RATIOS["token"], 0.2, 0.2)
    mine = value_and_gradient(
        lambda x: rule.evaluate(layout.gather(x), layout.gather(advantages), layout).loss, logprobs
    )
    theirs = value_and_gradient(
        lambda x: trl_loss(x, behaviour, advantages, mask, 0.2, 0.2, "token"), logprobs
    )
    referees.compare("token ratio, an empty row / TRL token", **pairs(mine, theirs))
    assert mine[0].item() == pytest.approx(-(math.exp(0.1) + math.exp(-0.1)) / 4)
