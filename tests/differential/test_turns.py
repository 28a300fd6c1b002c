"""Turn ratios against peers that know sequences or tokens only, and against AgileRL's published definition.

A turn cut out as a row of its own is a sequence: verl's and TRL's sequence ratios are then the geometric turn
ratio. A turn packed into one token with the sum of its log-probabilities is a token: verl's token ratio is
then the product. No peer has the arithmetic mean of ratios.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from stppo.objectives import Ratio
from tests.differential.cases import EPSILONS, Case, case_of, cases, referee_settings
from tests.differential.peers import (
    NO_DUAL_CLIP,
    agilerl_turn_grpo,
    agilerl_turn_ppo,
    objective,
    our_loss,
    pairs,
    trl_loss,
    turns_as_rows,
    turns_as_tokens,
    value_and_gradient,
    verl_loss,
)

pytestmark = pytest.mark.engines

GEOMETRIC, PRODUCT = Ratio("turn", "geometric"), Ratio("turn", "product")
AGILERL_POOLING = {"geometric": "mean", "product": "sum"}


def ours(rule, case: Case):
    return value_and_gradient(our_loss(rule, case), case.logprobs)


def cut(case: Case):
    """(behaviour, advantages, mask) with one turn per row"""
    ones = torch.ones_like(case.advantages)
    behaviour, advantages = case.batch.behaviour_logprobs, case.advantages
    return [turns_as_rows(case.layout, x) for x in (behaviour, advantages, ones)]


def log_ratio(case: Case, logprobs: torch.Tensor) -> torch.Tensor:
    """(B, T), 0 off the mask"""
    return case.layout.scatter(case.layout.gather(logprobs - case.batch.behaviour_logprobs))


@referee_settings
@given(case=cases(), low=EPSILONS, high=EPSILONS)
def test_geometric_turn_ratio_is_trls_sequence_ratio_of_each_turn(referees, case, low, high):
    behaviour, advantages, mask = cut(case)
    theirs = value_and_gradient(
        lambda x: trl_loss(
            turns_as_rows(case.layout, x), behaviour, advantages, mask, low, high, "sequence", "bnpo"
        ),
        case.logprobs,
    )
    mine = ours(objective(GEOMETRIC, low, high, "token_mean"), case)
    referees.compare("turn ratio, geometric / TRL sequence of turns", **pairs(mine, theirs))


@referee_settings
@given(case=cases(log_ratios=(-30.0, 9.9), advantages_per="turn"), low=EPSILONS, high=EPSILONS)
def test_geometric_turn_ratio_is_verls_gspo_of_each_turn(referees, case, low, high):
    """Mean over trajectories of the mean over turns, by giving verl one trajectory after another; its cap at
    10 and its GSPO-token gradient as in test_verl."""
    row_turns = case.layout.row_turns.tolist()
    pieces = [x.split(row_turns) for x in cut(case)]

    def theirs(logprobs):
        rows = turns_as_rows(case.layout, logprobs).split(row_turns)
        losses = [
            verl_loss("gspo", *trajectory, low, high, "seq-mean-token-mean")
            for trajectory in zip(rows, *pieces, strict=True)
        ]
        return torch.stack(losses).mean()

    mine = ours(objective(GEOMETRIC, low, high, "turn_mean"), case)
    referees.compare(
        "turn ratio, geometric / verl gspo of turns", **pairs(mine, value_and_gradient(theirs, case.logprobs))
    )


@referee_settings
@given(case=cases(log_ratios=(-3.9, 3.9)), low=EPSILONS, high=EPSILONS)
def test_product_turn_ratio_is_verls_token_ratio_of_packed_turns(referees, case, low, high):
    """One clipped term per turn (clip_on="turn"); at most five tokens of 3.9 stay below verl's clamp at 20."""
    layout = case.layout
    advantages, mask = turns_as_tokens(layout, layout.turn_mean(layout.gather(case.advantages)))

    def packed(values):
        return turns_as_tokens(layout, layout.turn_sum(layout.gather(values)))[0]

    behaviour = packed(case.batch.behaviour_logprobs)
    theirs = value_and_gradient(
        lambda x: verl_loss(
            "vanilla",
            packed(x),
            behaviour,
            advantages,
            mask,
            low,
            high,
            "seq-mean-token-mean",
            clip_ratio_c=NO_DUAL_CLIP,
        ),
        case.logprobs,
    )
    mine = ours(objective(PRODUCT, low, high, "turn_mean", clip_on="turn"), case)
    referees.compare("turn ratio, product / verl vanilla of packed turns", **pairs(mine, theirs))


@pytest.mark.parametrize("aggregation", AGILERL_POOLING)
@referee_settings
@given(case=cases(equal_turns=True), epsilon=EPSILONS)
def test_turn_ppo_is_agilerls(referees, aggregation, case, epsilon):
    """Trajectories with as many turns each: AgileRL averages over all turns of the batch, we over turns and
    then over trajectories, see below."""
    ids, pooling = case.batch.turn_ids, AGILERL_POOLING[aggregation]
    theirs = value_and_gradient(
        lambda x: agilerl_turn_ppo(log_ratio(case, x), case.advantages, ids, epsilon, pooling), case.logprobs
    )
    rule = objective(Ratio("turn", aggregation), epsilon, epsilon, "turn_mean", clip_on="turn")
    referees.compare(f"turn PPO, {aggregation} / AgileRL's definition", **pairs(ours(rule, case), theirs))


@pytest.mark.parametrize("aggregation", AGILERL_POOLING)
@referee_settings
@given(case=cases(), epsilon=EPSILONS)
def test_turn_ppo_is_the_mean_of_agilerls_over_trajectories(referees, aggregation, case, epsilon):
    """Any number of turns: one trajectory at a time, then our mean over trajectories."""
    ids, pooling = case.batch.turn_ids, AGILERL_POOLING[aggregation]

    def theirs(logprobs):
        rows = zip(log_ratio(case, logprobs), case.advantages, ids, strict=True)
        losses = [agilerl_turn_ppo(l[None], a[None], i[None], epsilon, pooling) for l, a, i in rows]
        return torch.stack(losses).mean()

    rule = objective(Ratio("turn", aggregation), epsilon, epsilon, "turn_mean", clip_on="turn")
    referees.compare(
        f"turn PPO, {aggregation} / AgileRL's definition, row by row",
        **pairs(ours(rule, case), value_and_gradient(theirs, case.logprobs)),
    )


def test_agilerl_weighs_trajectories_by_their_turns():
    """Neither is wrong: AgileRL's mean is over the batch's turns, so long trajectories weigh more; ours over
    trajectories first, as the paper's 1/G sum_i 1/n_i. verl's token-mean and seq-mean differ likewise."""
    case = case_of([[1, 1, 1], [1]], [0.0] * 4, [1.0, 1.0, 1.0, -1.0])
    mine = ours(objective(GEOMETRIC, 0.2, 0.2, "turn_mean", clip_on="turn"), case)
    ids = case.batch.turn_ids
    theirs = agilerl_turn_ppo(log_ratio(case, case.logprobs), case.advantages, ids, 0.2, "mean")
    assert (mine[0].item(), theirs.item()) == (0.0, -0.5)


def test_agilerls_default_is_the_product_and_ours_the_geometric_mean():
    """A turn of 40 tokens, 2 % each: the product leaves any clip range, the mean does not. The product is the
    importance weight itself, the geometric mean the paper's (v1 Eq. 4)."""
    case = case_of([[40]], [0.02] * 40, [1.0] * 40)
    l = log_ratio(case, case.logprobs)
    product, mean = (
        agilerl_turn_ppo(l, case.advantages, case.batch.turn_ids, 0.2, pooling).item()
        for pooling in ("sum", "mean")
    )
    assert product == pytest.approx(-1.2)
    assert mean == pytest.approx(-math.exp(0.02))
    assert ours(objective(GEOMETRIC, 0.2, 0.2), case)[0].item() == pytest.approx(mean)


@referee_settings
@given(case=cases(), low=EPSILONS, high=EPSILONS)
def test_turn_grpo_is_agilerls(referees, case, low, high):
    ids = case.batch.turn_ids
    theirs = value_and_gradient(
        lambda x: agilerl_turn_grpo(log_ratio(case, x), case.advantages, ids, low, high), case.logprobs
    )
    mine = ours(objective(GEOMETRIC, low, high, "trajectory_mean"), case)
    referees.compare("turn GRPO, geometric / AgileRL's definition", **pairs(mine, theirs))


@referee_settings
@given(case=cases(equal_turns=True), epsilon=EPSILONS, stride=st.integers(2, 3))
def test_empty_turns_do_not_count_in_agilerl(referees, case, epsilon, stride):
    """AgileRL's turn numbers come from the environment and may name turns without tokens, which it leaves
    out; ours are runs of agent tokens, so there are none to leave out."""
    ids = case.batch.turn_ids
    sparse = torch.where(ids >= 0, ids * stride + 1, ids)
    theirs = value_and_gradient(
        lambda x: agilerl_turn_ppo(log_ratio(case, x), case.advantages, sparse, epsilon, "mean"),
        case.logprobs,
    )
    rule = objective(GEOMETRIC, epsilon, epsilon, "turn_mean", clip_on="turn")
    referees.compare("turn PPO / AgileRL's definition, empty turns", **pairs(ours(rule, case), theirs))
