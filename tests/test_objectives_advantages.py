import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stppo.objectives import (
    BatchBaseline,
    CreditRule,
    Estimate,
    GroupCentred,
    GroupNormalised,
    LeaveOneOut,
    TokenGAE,
    TurnGAE,
    TurnReturnMinusValue,
)
from stppo.trajectories import Trajectories
from tests.objectives_cases import batch_from_turns, mixed_batch, normal

CRITIC = [TokenGAE, TurnGAE, TurnReturnMinusValue]
GROUP = [GroupNormalised, GroupCentred, LeaveOneOut]
turn_lists = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def turns_of(batch, row):
    """The positions of each turn of a row, from its turn ids."""
    ids = batch.turn_ids[row].tolist()
    return [[t for t, k in enumerate(ids) if k == turn] for turn in range(max(ids) + 1)]


def gae_by_sum(rewards, values, gamma, lam):
    """A_s = sum_j (gamma lam)^j delta_{s+j}: the definition as a double sum, no recursion."""
    values = values + [0.0]
    deltas = [r + gamma * values[s + 1] - values[s] for s, r in enumerate(rewards)]
    n = len(rewards)
    return [sum((gamma * lam) ** j * deltas[s + j] for j in range(n - s)) for s in range(n)]


@given(turn_lists, st.sampled_from([(1.0, 1.0), (0.9, 0.7), (0.95, 1.0), (1.0, 0.0), (0.0, 0.5)]))
@settings(max_examples=30, deadline=None)
def test_token_gae_is_the_sum_over_agent_tokens(turns, discounts):
    gamma, lam = discounts
    batch = batch_from_turns(turns)
    values = normal(batch.rewards, 11)
    credit = TokenGAE(gamma=gamma, lam=lam, whiten=False)(batch, values)
    for i in range(len(batch)):
        at = [t for turn in turns_of(batch, i) for t in turn]
        expected = gae_by_sum(batch.rewards[i, at].tolist(), values[i, at].tolist(), gamma, lam)
        close(credit.advantages[i, at], torch.tensor(expected, dtype=torch.float64))
        close(credit.returns[i, at], torch.tensor(expected, dtype=torch.float64) + values[i, at])
    assert torch.equal(credit.value_mask, batch.agent_mask)
    assert (credit.advantages[~batch.agent_mask] == 0).all()
    assert (credit.returns[~batch.agent_mask] == 0).all()


@given(turn_lists, st.sampled_from([(1.0, 1.0), (0.9, 0.7), (1.0, 0.0)]))
@settings(max_examples=30, deadline=None)
def test_turn_gae_is_the_sum_over_turns(turns, discounts):
    gamma, lam = discounts
    batch = batch_from_turns(turns)
    values = normal(batch.rewards, 11)
    credit = TurnGAE(gamma=gamma, lam=lam, whiten=False)(batch, values)
    for i in range(len(batch)):
        places = turns_of(batch, i)
        rewards = [batch.rewards[i, at].sum().item() for at in places]
        first = [values[i, at[0]].item() for at in places]
        expected = gae_by_sum(rewards, first, gamma, lam)
        for at, advantage, value in zip(places, expected, first, strict=True):
            close(credit.advantages[i, at], torch.full((len(at),), advantage, dtype=torch.float64))
            close(credit.returns[i, at[0]], torch.tensor(advantage + value, dtype=torch.float64))
            assert credit.value_mask[i, at].tolist() == [True] + [False] * (len(at) - 1)
            assert (credit.returns[i, at[1:]] == 0).all()


@given(turn_lists, st.sampled_from([1.0, 0.8]))
@settings(max_examples=15, deadline=None)
def test_turn_return_minus_value_is_turn_gae_at_lambda_one(turns, gamma):
    batch = batch_from_turns(turns)
    values = normal(batch.rewards, 2)
    direct = TurnReturnMinusValue(gamma=gamma, whiten=False)(batch, values)
    gae = TurnGAE(gamma=gamma, lam=1.0, whiten=False)(batch, values)
    close(direct.advantages, gae.advantages)
    close(direct.returns, gae.returns)


@pytest.mark.parametrize("rule", CRITIC)
@pytest.mark.parametrize("garbage", [1e30, math.inf, math.nan])
def test_environment_positions_cannot_matter(rule, garbage):
    batch = mixed_batch()
    values = normal(batch.rewards, 2)
    dirty_values = values.masked_fill(~batch.agent_mask, garbage)
    dirty = Trajectories(
        **{
            **batch.state_dict(),
            "behaviour_logprobs": batch.behaviour_logprobs.masked_fill(~batch.agent_mask, garbage),
            "tokens": batch.tokens.masked_fill(~batch.agent_mask, 4),
        }
    )
    clean = rule(pooling="turn_mean")(batch, values)
    got = rule(pooling="turn_mean")(dirty, dirty_values)
    assert torch.equal(got.advantages, clean.advantages)
    assert torch.equal(got.returns, clean.returns)
    assert got.raw_std == clean.raw_std


@pytest.mark.parametrize("rule", [TurnGAE, TurnReturnMinusValue])
def test_turn_credit_reads_the_value_of_the_turns_first_token_alone(rule):
    batch = mixed_batch()
    values = normal(batch.rewards, 2)
    clean = rule()(batch, values)
    got = rule()(batch, values.masked_fill(~clean.value_mask, math.nan))
    assert torch.equal(got.advantages, clean.advantages)


@pytest.mark.parametrize("rule", CRITIC)
def test_whitening_is_over_agent_tokens_and_before_pooling(rule):
    batch = mixed_batch()
    values = normal(batch.rewards, 2)
    raw = rule(whiten=False)(batch, values)
    on = raw.advantages[batch.agent_mask]
    assert raw.raw_std == pytest.approx(on.std().item(), rel=1e-12)
    white = rule(whiten=True)(batch, values)
    close(white.advantages[batch.agent_mask], (on - on.mean()) / (on.var() + 1e-8).sqrt())
    assert white.raw_std == raw.raw_std
    close(white.returns, raw.returns)  # the critic's targets stay in units of reward
    centred = rule(whiten=False, center=True)(batch, values)
    close(centred.advantages[batch.agent_mask], on - on.mean())
    for pooling in ("turn_mean", "turn_sum"):
        pooled = rule(whiten=True, pooling=pooling)(batch, values)
        for i in range(len(batch)):
            for at in turns_of(batch, i):
                total = white.advantages[i, at].sum()
                expected = total / len(at) if pooling == "turn_mean" else total
                close(pooled.advantages[i, at], expected.expand(len(at)))


def grouped(returns, group_ids, turns=None):
    """Trajectories with a terminal reward each."""
    batch = batch_from_turns(turns or [[2, 1]] * len(returns))
    rewards = torch.zeros_like(batch.rewards)
    for i, value in enumerate(returns):
        rewards[i, turns_of(batch, i)[-1][-1]] = value
    return Trajectories(**{**batch.state_dict(), "rewards": rewards, "group_ids": torch.tensor(group_ids)})


def test_group_credits_by_hand():
    batch = grouped([1.0, 5.0, 0.0, 6.0], [9, 4, 9, 4])  # groups interleaved: {1, 0} and {5, 6}
    per_row = {
        GroupCentred: [0.5, -0.5, -0.5, 0.5],
        LeaveOneOut: [1.0, -1.0, -1.0, 1.0],
        GroupNormalised: [
            0.5 / math.sqrt(0.5),
            -0.5 / math.sqrt(0.5),
            -0.5 / math.sqrt(0.5),
            0.5 / math.sqrt(0.5),
        ],
    }
    for rule, expected in per_row.items():
        credit = rule(group_size=2)(batch)
        wanted = torch.tensor(expected, dtype=torch.float64)[:, None] * batch.agent_mask
        torch.testing.assert_close(credit.advantages, wanted, rtol=2e-6, atol=0)
        assert credit.returns is None and credit.value_mask is None
        assert credit.raw_std == pytest.approx(wanted[batch.agent_mask].std().item(), rel=1e-5)


def test_leave_one_out_is_its_definition():
    returns = [0.3, 1.0, -2.0, 0.7]
    credit = LeaveOneOut(group_size=4)(grouped(returns, [0] * 4))
    for i, value in enumerate(returns):
        others = [r for j, r in enumerate(returns) if j != i]
        assert credit.advantages[i].max() + credit.advantages[i].min() == pytest.approx(
            value - sum(others) / 3
        )


@pytest.mark.parametrize("rule", GROUP)
def test_a_group_that_agrees_has_no_advantage(rule):
    # The mean of eight 0.1s is not 0.1 in floating point.
    batch = grouped([0.1] * 8 + [0.0] * 4 + [1.0] * 4, [0] * 8 + [1] * 8)
    credit = rule(group_size=8)(batch)
    assert (credit.advantages[:8] == 0).all()
    assert (credit.advantages[8:][batch.agent_mask[8:]] != 0).all()


def test_turn_returns_equal_grpo_for_a_terminal_reward_and_count_only_what_follows_otherwise():
    turns = [[2, 1], [1], [3, 1, 1], [2, 2]]
    batch = grouped([1.0, 0.0, 0.5, 0.0], [0] * 4, turns)
    close(
        GroupNormalised(group_size=4, returns="turn")(batch).advantages,
        GroupNormalised(group_size=4)(batch).advantages,
    )
    rewards = batch.rewards.clone()
    rewards[0, turns_of(batch, 0)[0][-1]] = 0.25  # returns are now 1.25, 0, 0.5, 0
    batch = Trajectories(**{**batch.state_dict(), "rewards": rewards})
    advantages = GroupNormalised(group_size=4, returns="turn", eps=0.0)(batch).advantages
    whole, rest = (torch.tensor([own, 0.0, 0.5, 0.0], dtype=torch.float64) for own in (1.25, 1.0))
    first, second = turns_of(batch, 0)
    close(advantages[0, first], ((1.25 - whole.mean()) / whole.std()).expand(2))
    close(advantages[0, second], ((1.0 - rest.mean()) / rest.std()).expand(1))


def test_turn_returns_of_an_agreeing_group_stay_zero():
    batch = batch_from_turns([[1, 1], [1, 1]])
    rewards = batch.agent_mask.double() / 2
    state = {**batch.state_dict(), "rewards": rewards, "group_ids": torch.zeros(2, dtype=torch.int64)}
    credit = GroupNormalised(group_size=2, returns="turn")(Trajectories(**state))
    assert (credit.advantages == 0).all()


def test_batch_baseline():
    credit = BatchBaseline()(grouped([1.0, 0.0, 0.0, 3.0], [0, 1, 2, 3]))
    assert credit.advantages.sum(1).div(3).tolist() == [0.0, -1.0, -1.0, 2.0]


@pytest.mark.parametrize("rule", GROUP)
def test_groups_of_the_wrong_size_are_refused(rule):
    with pytest.raises(ValueError, match=r"group 5 has 3 trajectories in this batch, group_size is 2"):
        rule(group_size=2)(grouped([1.0] * 5, [3, 3, 5, 5, 5]))
    for size in (1, 0, 2.5):
        with pytest.raises(ValueError, match=rf"{rule.__name__}.group_size={size}: .*at least 2"):
            rule(group_size=size)


@pytest.mark.parametrize("rule", CRITIC)
def test_a_missing_critic_is_refused(rule):
    batch = mixed_batch()
    with pytest.raises(ValueError, match="needs a critic"):
        rule()(batch)
    with pytest.raises(ValueError, match="values must have shape"):
        rule()(batch, torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("found", "got"),
    [
        (lambda batch: Estimate(batch.returns), r"advantages \(\d+,\)"),
        (lambda batch: batch.returns[batch.layout.rows], "Tensor"),
        (lambda batch: None, "NoneType"),
    ],
)
def test_an_estimate_that_is_none_or_of_the_wrong_shape_is_refused(found, got):
    class Mine(CreditRule):
        def estimate(self, trajectories, layout, values):
            return found(trajectories)

    with pytest.raises(ValueError, match=rf"Mine.estimate: .*one advantage a token, \(34,\), got {got}"):
        Mine()(mixed_batch())


@pytest.mark.parametrize("rule", [*CRITIC, *GROUP, BatchBaseline])
def test_options_are_validated_and_traits_declared(rule):
    with pytest.raises(ValueError, match="pooling=.max.: must be one of token, turn_mean, turn_sum"):
        rule(pooling="max")
    assert rule.needs_critic is (rule in CRITIC)
    assert rule().group_size == (8 if rule in GROUP else 1)
    assert rule().whiten is (rule in CRITIC)


@pytest.mark.parametrize("options", [{"gamma": 1.5}, {"gamma": -0.1}, {"lam": math.nan}, {"gamma": "1"}])
def test_discounts_outside_the_unit_interval_are_refused(options):
    with pytest.raises(ValueError, match=rf"TokenGAE.{next(iter(options))}=.*\[0, 1\]"):
        TokenGAE(**options)
