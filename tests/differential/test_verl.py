"""Our losses against verl's `vanilla`, `gspo` and `geo_mean`: where they must agree, and where they differ."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from stppo.objectives import Clip, GroupNormalised, NoStabilizer, Objective, Ratio, loss_weights
from tests.differential.cases import EPSILONS, Case, case_of, cases, credited, referee_settings
from tests.differential.peers import (
    NO_DUAL_CLIP,
    UNCLIPPED,
    VERL_AGGREGATIONS,
    objective,
    our_loss,
    pairs,
    value_and_gradient,
    verl_case,
    verl_loss,
)

pytestmark = pytest.mark.engines

MODES = st.sampled_from(sorted(VERL_AGGREGATIONS))
TOKEN, SEQUENCE = Ratio("token"), Ratio("sequence", "geometric")
MEAN = "seq-mean-token-mean"


def ours(rule: Objective, case: Case):
    return value_and_gradient(our_loss(rule, case), case.logprobs)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


# verl divides by lengths + 1e-8 in seq-mean-token-mean and in its metrics, hence differences of that size.
# It clamps log-ratios at +-20 and clips twice (at 3, for negative advantages); neither is in the objective
# as published (arXiv 1707.06347), so the comparison keeps clear of the first and turns the second off.
@pytest.mark.parametrize("mode", VERL_AGGREGATIONS)
@referee_settings
@given(case=cases(log_ratios=(-19.9, 19.9)), low=EPSILONS, high=EPSILONS)
def test_token_ppo_is_verls_vanilla(referees, mode, case, low, high):
    rule, metrics = objective(TOKEN, low, high, mode), {}
    theirs = verl_case(
        "vanilla", case, low, high, VERL_AGGREGATIONS[mode], metrics, clip_ratio_c=NO_DUAL_CLIP
    )
    diagnostics = rule(case.logprobs, case.batch, case.advantages).diagnostics
    referees.compare(
        f"token PPO / verl vanilla, {VERL_AGGREGATIONS[mode]}",
        **pairs(ours(rule, case), theirs),
        clip_fraction=(scalar(diagnostics["clip_fraction"]), scalar(metrics["actor/pg_clipfrac"])),
        kl_k1=(scalar(diagnostics["kl_behaviour_k1"]), scalar(metrics["actor/ppo_kl"])),
    )


@referee_settings
@given(case=cases(log_ratios=(-19.9, 19.9)), low=EPSILONS, high=EPSILONS, mode=MODES)
def test_verls_dual_clip_is_the_whole_difference(referees, case, low, high, mode):
    """verl's default holds the term of a token with A < 0 and ratio > 3 at 3 A and drops its gradient. Ours is
    PPO's objective; the dual clip (arXiv 1912.09729) is an addition, and a fourth stabiliser in disguise."""
    value, gradient = ours(objective(TOKEN, low, high, mode), case)
    weights = loss_weights(case.mask, mode, torch.float64)
    ratio = (case.logprobs - case.batch.behaviour_logprobs).where(case.mask, 0.0 * case.logprobs).exp()
    held = case.mask & (case.advantages < 0) & (ratio > 3.0)
    value = value + (weights * case.advantages * (ratio - 3.0))[held].sum()
    expected = value, gradient.masked_fill(held, 0.0)
    theirs = verl_case("vanilla", case, low, high, VERL_AGGREGATIONS[mode])
    referees.compare("token PPO, dual clip added by hand / verl vanilla", **pairs(expected, theirs))


def test_verls_dual_clip_binds_by_default():
    case = case_of([[1]], [2.0], [-1.0])
    assert [x.sum().item() for x in ours(objective(TOKEN, 0.2, 0.2), case)] == pytest.approx(
        [math.exp(2)] * 2
    )
    assert [x.sum().item() for x in verl_case("vanilla", case, 0.2, 0.2, MEAN)] == pytest.approx([3.0, 0.0])


def test_verl_clamps_log_ratios_at_20():
    """Beyond, verl's loss is constant: value exp(20), no gradient. Ours is the derivative of the loss stated;
    verl's is a guard against overflow that also hides the worst tokens from the gradient."""
    case = case_of([[1]], [25.0], [-1.0])
    mine = ours(objective(TOKEN, 0.2, 0.2), case)
    theirs = verl_case("vanilla", case, 0.2, 0.2, MEAN, clip_ratio_c=NO_DUAL_CLIP)
    assert [x.sum().item() for x in mine] == pytest.approx([math.exp(25)] * 2)
    assert [x.sum().item() for x in theirs] == pytest.approx([math.exp(20), 0.0])


@referee_settings
@given(case=cases(log_ratios=(-19.9, 19.9)), low=EPSILONS, high=EPSILONS, mode=MODES)
def test_clipping_bias_is_verls_clipped_gradient_minus_its_unclipped_one(referees, case, low, high, mode):
    rule = objective(TOKEN, low, high, mode)
    aggregation = VERL_AGGREGATIONS[mode]
    clipped = verl_case("vanilla", case, low, high, aggregation, clip_ratio_c=NO_DUAL_CLIP)[1]
    free = verl_case("vanilla", case, UNCLIPPED, UNCLIPPED, aggregation, clip_ratio_c=NO_DUAL_CLIP)[1]
    _, bias = value_and_gradient(
        lambda x: rule(x, case.batch, case.advantages).bias_surrogate + 0.0 * x.sum(), case.logprobs
    )
    # J's sign: grad J = grad J_unclipped - C, and the losses are -J.
    referees.compare("clipping bias / verl vanilla", gradient=(bias, clipped - free))


# verl caps the sequence's log-ratio at 10 and its `gspo` is the paper's GSPO-token, whose gradient is GSPO's
# where advantages are constant over a trajectory.
@pytest.mark.parametrize("mode", VERL_AGGREGATIONS)
@referee_settings
@given(case=cases(log_ratios=(-30.0, 9.9), advantages_per="row"), low=EPSILONS, high=EPSILONS)
def test_sequence_ratio_is_verls_gspo(referees, mode, case, low, high):
    rule, metrics = objective(SEQUENCE, low, high, mode), {}
    theirs = verl_case("gspo", case, low, high, VERL_AGGREGATIONS[mode], metrics)
    fraction = rule(case.logprobs, case.batch, case.advantages).diagnostics["clip_fraction"]
    referees.compare(
        f"GSPO / verl gspo, {VERL_AGGREGATIONS[mode]}",
        **pairs(ours(rule, case), theirs),
        clip_fraction=(scalar(fraction), scalar(metrics["actor/pg_clipfrac"])),
    )


@referee_settings
@given(case=cases(log_ratios=(-30.0, 9.9)), low=EPSILONS, high=EPSILONS)
def test_verls_gspo_spreads_an_uneven_gradient_differently(referees, case, low, high):
    """With advantages that differ within a trajectory, verl leaves each token its own term's gradient, ours
    gives every token their mean: the derivative of the ratio that they share. Values and row sums agree."""
    value, gradient = ours(objective(SEQUENCE, low, high), case)
    their_value, their_gradient = verl_case("gspo", case, low, high, MEAN)
    layout = case.layout
    mean = layout.scatter(layout.row_mean(layout.gather(their_gradient))[layout.rows])
    referees.compare(
        "GSPO, uneven advantages / verl gspo, row means",
        value=(value, their_value),
        gradient=(gradient, mean),
    )


def test_verls_gspo_is_gspo_token():
    case = case_of([[2]], [0.1, 0.3], [1.0, -0.5])
    ratio = math.exp(0.2)
    mine = ours(objective(SEQUENCE, 10.0, 10.0), case)
    theirs = verl_case("gspo", case, 10.0, 10.0, MEAN)
    assert case.layout.gather(mine[1]).tolist() == pytest.approx([-0.25 * ratio / 2] * 2)
    assert case.layout.gather(theirs[1]).tolist() == pytest.approx([-0.5 * ratio, 0.25 * ratio])
    assert mine[0].item() == pytest.approx(theirs[0].item())


def test_verl_caps_a_sequences_log_ratio_at_10():
    """As with +-20 above: ours is the loss stated, verl's guards against overflow and drops the gradient."""
    case = case_of([[2]], [11.0, 13.0], [-1.0, -1.0])
    mine = ours(objective(SEQUENCE, 0.2, 0.2), case)
    theirs = verl_case("gspo", case, 0.2, 0.2, MEAN)
    assert [x.sum().item() for x in mine] == pytest.approx([math.exp(12)] * 2)
    assert [x.sum().item() for x in theirs] == pytest.approx([math.exp(10), 0.0])


@referee_settings
@given(case=cases(advantages_per="row"))
def test_unclipped_sequence_ratio_is_verls_geo_mean(referees, case):
    """GMPO clips log-ratios inside the mean, another rule altogether; where nothing is clipped they agree."""
    theirs = verl_case("geo_mean", case, 50.0, 50.0, "not used")
    mine = ours(objective(SEQUENCE, UNCLIPPED, UNCLIPPED), case)
    referees.compare("sequence ratio, unclipped / verl geo_mean", **pairs(mine, theirs))


REWARDS = st.sampled_from([0.0, 0.5, 1.0])


@referee_settings
@given(data=st.data(), low=EPSILONS, high=EPSILONS, mode=MODES)
def test_grpo_from_rewards_to_gradient_is_verls(referees, data, low, high, mode):
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    batch, values = data.draw(credited(group_size=4, rewards=REWARDS))
    log_ratio = 0.3 * values
    rule = Objective(GroupNormalised(group_size=4), TOKEN, Clip(low, high), NoStabilizer(), mode)
    mine = Case(batch, batch.behaviour_logprobs + log_ratio, rule.credit(batch).advantages)
    index = np.array(batch.group_ids.tolist())
    advantages = compute_grpo_outcome_advantage(batch.rewards.clone(), batch.agent_mask.double(), index)[0]
    theirs = verl_case(
        "vanilla",
        mine.with_advantages(advantages),
        low,
        high,
        VERL_AGGREGATIONS[mode],
        clip_ratio_c=NO_DUAL_CLIP,
    )
    referees.compare("GRPO, rewards to gradient / verl grpo + vanilla", **pairs(ours(rule, mine), theirs))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "ratio"), [("vanilla", TOKEN), ("gspo", SEQUENCE)])
def test_garbage_off_the_mask_reaches_verls_loss_but_not_ours(referees, name, ratio, garbage):
    """verl multiplies by the mask, and NaN times 0 is NaN: its loss is NaN, and `gspo` has no gradient then.
    Ours never reads those entries, which is right: they are nobody's log-probabilities."""
    case = case_of([[3, 1], [2]], [0.1, -0.3, 0.0, 0.5, 0.2, 0.1], [1.0, 1.0, 1.0, 1.0, -2.0, -2.0])
    spoilt = case.off_the_mask(garbage)
    theirs = verl_case(name, case, 0.2, 0.2, MEAN)
    referees.compare(
        "garbage off our mask / verl without it", **pairs(ours(objective(ratio, 0.2, 0.2), spoilt), theirs)
    )
    value, gradient = verl_case(name, spoilt, 0.2, 0.2, MEAN)
    assert value.isnan()
    assert gradient.any() == (name == "vanilla")


@pytest.mark.parametrize("mode", sorted(VERL_AGGREGATIONS))
def test_verl_leaves_rows_without_agent_tokens_out(referees, mode):
    """Ours refuses such a trajectory (it has no turn); verl drops it from the mean over rows, as it should."""
    case = case_of([[3, 1], [2]], [0.1, -0.3, 0.0, 0.5, 0.2, 0.1], [1.0, -1.0, 0.5, 1.0, -2.0, -2.0])
    behaviour, advantages, mask = case.batch.behaviour_logprobs, case.advantages, case.mask
    theirs = value_and_gradient(
        lambda x: verl_loss(
            "vanilla",
            *(_with_empty_row(y) for y in (x, behaviour, advantages, mask)),
            0.2,
            0.2,
            VERL_AGGREGATIONS[mode],
        ),
        case.logprobs,
    )
    mine = ours(objective(TOKEN, 0.2, 0.2, mode), case)
    referees.compare("token PPO / verl vanilla with an empty row", **pairs(mine, theirs))


def _with_empty_row(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.zeros_like(x[:1])])
