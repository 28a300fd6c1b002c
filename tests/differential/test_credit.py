"""Advantages and value targets against verl's estimators: GAE, GRPO, Dr. GRPO, RLOO."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given

from stppo.objectives import (
    GroupCentred,
    GroupNormalised,
    LeaveOneOut,
    TokenGAE,
    TurnGAE,
    TurnReturnMinusValue,
)
from stppo.trajectories import Trajectories
from tests.differential.cases import case_of, credited, referee_settings
from tests.differential.peers import turns_as_tokens

pytestmark = pytest.mark.engines

DISCOUNTS = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


def verl_gae(rewards, values, mask, gamma, lam):
    """verl's whitened advantages, the ones before whitening (its returns minus values), and its returns"""
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    whitened, returns = compute_gae_advantage_return(rewards, values, mask.double(), gamma, lam)
    return whitened, returns - values, returns


@referee_settings
@given(data=credited(), gamma=DISCOUNTS, lam=DISCOUNTS)
def test_token_gae_before_whitening_is_verls(referees, data, gamma, lam):
    batch, values = data
    _, advantages, returns = (
        verl_gae(batch.rewards, values, batch.agent_mask, gamma, lam)
        if (batch.agent_mask.sum() > 1)
        else (None, None, None)
    )
    assume(advantages is not None)  # one agent token in all: verl's whitening raises, see below
    on = batch.agent_mask
    credit = TokenGAE(gamma=gamma, lam=lam, whiten=False)(batch, values)
    referees.compare(
        "token GAE / verl gae",
        advantage=(credit.advantages[on], advantages[on]),
        target=(credit.returns[on], returns[on]),
    )


# verl's mean divides by n + 1e-8, so it leaves 1e-8 of the mean in advantages, which whitening magnifies by
# 1 / std: to 1e-6 where the spread is at least a tenth of the mean. Below, see the test after this one.
@referee_settings
@given(data=credited(), gamma=DISCOUNTS, lam=DISCOUNTS)
def test_whitened_token_gae_is_verls(referees, data, gamma, lam):
    batch, values = data
    on = batch.agent_mask
    assume(on.sum() > 1)
    credit = TokenGAE(gamma=gamma, lam=lam)(batch, values)
    raw = TokenGAE(gamma=gamma, lam=lam, whiten=False)(batch, values).advantages[on]
    assume(credit.raw_std > 0.1 * raw.abs().max() and credit.raw_std > 1e-3)
    whitened, _, returns = verl_gae(batch.rewards, values, on, gamma, lam)
    referees.compare(
        "token GAE, whitened / verl gae",
        advantage=(credit.advantages[on], whitened[on]),
        target=(credit.returns[on], returns[on]),
    )


def test_verl_whitens_equal_advantages_to_noise_and_we_to_zero():
    """1e-8 in a divisor times 1e4 from rsqrt(1e-8): verl gives 0.015 for advantages that are all 300. Ours is
    right, equal advantages carry no signal; with rewards of order 1 the difference is 5e-5."""
    batch = case_of([[1], [1]], [0.0, 0.0], [0.0, 0.0]).batch
    for size, noise in ((300.0, 0.015), (1.0, 5e-5)):
        data = Trajectories(**{**batch.state_dict(), "rewards": size * batch.agent_mask})
        mine = TokenGAE()(data, torch.zeros_like(data.rewards)).advantages
        theirs = verl_gae(data.rewards, torch.zeros_like(data.rewards), data.agent_mask, 1.0, 1.0)[0]
        assert not mine.any()
        assert theirs[data.agent_mask].tolist() == pytest.approx([noise, noise], rel=1e-3)


def test_verl_cannot_whiten_a_single_token():
    """Its variance is 0 / 0; ours takes 0, so the advantage whitens to 0."""
    batch = case_of([[1]], [0.0], [0.0]).batch
    data = Trajectories(**{**batch.state_dict(), "rewards": 2.0 * batch.agent_mask})
    values = torch.zeros_like(data.rewards)
    assert not TokenGAE()(data, values).advantages.any()
    with pytest.raises(ValueError, match="sum of the mask is one"):
        verl_gae(data.rewards, values, data.agent_mask, 1.0, 1.0)


def test_garbage_values_off_the_mask_reach_verls_advantages_but_not_ours(referees):
    """As with the losses: verl multiplies by the mask, ours does not read what a critic says there."""
    batch = case_of([[2, 1]], [0.0] * 3, [0.0] * 3).batch
    on = batch.agent_mask
    rewards = torch.arange(on.numel(), dtype=torch.float64) * on
    data = Trajectories(**{**batch.state_dict(), "rewards": rewards})
    values = 0.5 * on.double()
    spoilt = values.masked_fill(~on, torch.nan)
    mine = TokenGAE(whiten=False)(data, spoilt).advantages
    referees.compare(
        "token GAE / verl gae", advantage=(mine[on], verl_gae(data.rewards, values, on, 1.0, 1.0)[1][on])
    )
    assert verl_gae(data.rewards, spoilt, on, 1.0, 1.0)[1][on].isnan().any()


@referee_settings
@given(data=credited(), gamma=DISCOUNTS, lam=DISCOUNTS)
def test_turn_gae_is_verls_gae_of_turns(referees, data, gamma, lam):
    """verl has no turn-level GAE; its token-level one on a batch whose tokens are our turns is one. (AgileRL
    has one, with another value of a turn: the mean over its tokens, or the last one's.)"""
    batch, values = data
    layout = batch.layout
    assume(len(layout.turn_lengths) > 1)
    rewards, mask = turns_as_tokens(layout, layout.turn_sum(layout.gather(batch.rewards)))
    state_values, _ = turns_as_tokens(layout, layout.gather(values)[layout.turn_starts])
    _, advantages, returns = verl_gae(rewards, state_values, mask, gamma, lam)
    credit = TurnGAE(gamma=gamma, lam=lam, whiten=False)(batch, values)
    starts = layout.turn_starts
    referees.compare(
        "turn GAE / verl gae of turns",
        advantage=(layout.gather(credit.advantages), advantages[mask][layout.turns]),
        target=(layout.gather(credit.returns)[starts], returns[mask]),
    )
    if lam == 1.0:
        credit = TurnReturnMinusValue(gamma=gamma, whiten=False)(batch, values)
        referees.compare(
            "turn return minus value / verl gae of turns, lam 1",
            advantage=(layout.gather(credit.advantages), advantages[mask][layout.turns]),
        )


def verl_groups(estimator, batch, **options):
    from verl.trainer.ppo import core_algos

    function = getattr(core_algos, f"compute_{estimator}_outcome_advantage")
    index = np.array(batch.group_ids.tolist())
    return function(batch.rewards.clone(), batch.agent_mask.double(), index, **options)[0]


GROUPS = {
    "GRPO": (GroupNormalised, "grpo", {}),
    "Dr. GRPO": (GroupCentred, "grpo", {"norm_adv_by_std_in_grpo": False}),
    "RLOO": (LeaveOneOut, "rloo", {}),
    "RLOO, vectorised": (LeaveOneOut, "rloo_vectorized", {}),
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("size", [2, 5])
@referee_settings
@given(data=st.data())
def test_group_advantages_are_verls(referees, name, size, data):
    """Groups in any order, with rewards inside turns too, and groups that agree; eps 1e-6 and Bessel's
    correction on both sides (TRL's eps is 1e-4: GroupNormalised(eps=1e-4))."""
    batch, _ = data.draw(credited(group_size=size))
    rule, estimator, options = GROUPS[name]
    mine = rule(group_size=size)(batch).advantages
    referees.compare(f"{name} / verl", advantage=(mine, verl_groups(estimator, batch, **options)))


def test_verl_invents_advantages_in_a_group_of_equal_large_rewards():
    """The rounding of the mean over eps. Ours sets a group that agrees to 0, which is right: no signal."""
    batch = case_of([[1]] * 5, [0.0] * 5, [0.0] * 5).batch
    changed = {"rewards": 1e8 * 1.1 * batch.agent_mask.double(), "group_ids": torch.zeros(5).long()}
    data = Trajectories(**{**batch.state_dict(), **changed})
    assert not GroupNormalised(group_size=5)(data).advantages.any()
    assert verl_groups("grpo", data).abs().max() > 1e-3


def test_groups_of_one_are_refused_here_and_read_in_two_ways_by_verl():
    """verl's rloo gives the bare reward, its vectorised form 0. A mean without other members is undefined, so
    ours asks for at least two."""
    batch = case_of([[1]], [0.0], [0.0]).batch
    data = Trajectories(**{**batch.state_dict(), "rewards": 2.0 * batch.agent_mask.double()})
    assert verl_groups("rloo", data).max() == verl_groups("grpo", data).max().round() == 2.0
    assert not verl_groups("rloo_vectorized", data).any()
    with pytest.raises(ValueError, match="at least 2 trajectories"):
        LeaveOneOut(group_size=1)
