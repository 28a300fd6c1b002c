"""Turn rewards in a world that can be enumerated: a potential changes neither the best policy nor the expected
gradient (Ng, Harada and Russell 1999), and a plain bonus changes both."""

import itertools
from dataclasses import replace

import pytest
import torch

from stppo.derivations.group_baselines import NOTHING, Groups
from stppo.objectives import GroupCentred, GroupNormalised, LeaveOneOut, TokenGAE, TurnGAE
from tests.oracle_cases import KINDS, close, moved, small_oracle, tiny_oracle


def turn_starts(tree):
    """(H,) the history in which the turn of each history began."""
    starts = list(range(tree.n_histories))
    for history, edge in enumerate(tree.history_edges.tolist()):
        if int(tree.history_positions[history]):
            starts[history] = starts[edge // tree.mdp.n_actions]
    return torch.tensor(starts)


def potential(tree, seed=0):
    """(H,) a number for each state in which a turn begins, those of the prompts included."""
    return torch.rand(tree.n_histories, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shaped(oracle, phi, gamma=1.0, trajectories=None):
    """The tree's trajectories with gamma phi(s') - phi(s) more at the end of each turn, by a plain loop."""
    batch, starts = trajectories or oracle.trajectories, oracle.layout.turn_starts
    states, rows = oracle.histories[starts].tolist(), oracle.layout.turn_rows.tolist()
    last = (oracle.layout.positions[starts] + oracle.layout.turn_lengths - 1).tolist()
    rewards = batch.rewards.clone()
    for turn, (state, row, place) in enumerate(zip(states, rows, last, strict=True)):
        goes_on = turn + 1 < len(rows) and rows[turn + 1] == row
        after = float(phi[states[turn + 1]]) if goes_on else 0.0
        rewards.view(-1)[place] += gamma * after - float(phi[state])
    return replace(batch, rewards=rewards)


def bonus(oracle, amount):
    """The tree's trajectories with `amount` more at the end of each turn that asks, by a plain loop."""
    batch = oracle.trajectories
    rewards = batch.rewards.clone()
    rewards[batch.tokens.eq(oracle.tree.mdp.search) & batch.agent_mask] += amount
    return replace(batch, rewards=rewards)


def discounted(batch, gamma):
    """(N,) returns, discounted by gamma a turn."""
    layout = batch.layout
    place = (
        torch.arange(len(layout.turn_rows))
        - (layout.row_turns.cumsum(0) - layout.row_turns)[layout.turn_rows]
    )
    paid = batch.turn_rewards * gamma ** place.double()
    return torch.zeros(len(batch), dtype=torch.float64).index_add(0, layout.turn_rows, paid)


def objective_and_gradient(oracle, batch, theta, gamma=1.0):
    """Expected return under theta and its gradient, over all trajectories."""
    theta = theta.detach().requires_grad_()
    value = (oracle.trajectory_probabilities(theta) * discounted(batch, gamma)).sum()
    return value.detach(), torch.autograd.grad(value, theta)[0]


def solved(oracle, batch, gamma=1.0):
    """(H,) values of the best policy and (H, A) of its choices, by going backwards through the histories."""
    tree, layout, n = oracle.tree, oracle.layout, oracle.tree.mdp.n_actions
    states, rows = oracle.histories[layout.turn_starts].tolist(), layout.turn_rows.tolist()
    q, arrival = [0.0] * tree.n_edges, [0.0] * tree.n_histories
    for turn, paid in enumerate(batch.turn_rewards.tolist()):
        if turn + 1 < len(rows) and rows[turn + 1] == rows[turn]:
            arrival[states[turn + 1]] = paid  # it may depend on what the environment answered
        else:
            q[int(tree.last_edges[rows[turn]])] = paid
    v = [0.0] * tree.n_histories
    for history in reversed(range(tree.n_histories)):
        v[history] = max(q[history * n : (history + 1) * n])
        edge, chance = int(tree.history_edges[history]), float(tree.history_probabilities[history])
        if edge >= 0:
            begins = int(tree.history_positions[history]) == 0
            q[edge] += chance * (arrival[history] + (gamma if begins else 1.0) * v[history])
    return torch.tensor(v, dtype=torch.float64), torch.tensor(q, dtype=torch.float64).view(-1, n)


def best_choices(q):
    """(H, A) bool: the choices that are as good as the best."""
    return q > q.max(1, keepdim=True).values - 1e-9


def worth(oracle, choices, batch):
    """Expected return of the policy that takes one of the choices, all with the same probability."""
    log_probs = (choices / choices.sum(1, keepdim=True).double()).log()
    chances = (
        oracle.layout.row_sum(log_probs.reshape(-1)[oracle.tree.edges]) + oracle.tree.environment_logprobs
    )
    return float(chances.exp() @ batch.returns)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_potential_shifts_the_return_of_every_policy_alike_and_no_gradient(kind, gamma):
    oracle = small_oracle(kind)
    phi, roots = potential(oracle.tree), oracle.tree.history_edges < 0
    plain, paying = oracle.trajectories, shaped(oracle, phi, gamma)
    shift = -(phi[roots] @ oracle.tree.history_probabilities[roots])
    values = []
    for theta in (oracle.behaviour, moved(oracle), moved(oracle, 3.0)):
        before, gradient = objective_and_gradient(oracle, plain, theta, gamma)
        after, other = objective_and_gradient(oracle, paying, theta, gamma)
        close(after - before, shift)
        close(other, gradient)
        values.append(float(before))
    assert len({round(value, 6) for value in values}) == 3 and shift < -0.1


def test_under_another_discount_than_the_return_s_a_potential_does_not_cancel():
    oracle = small_oracle()
    plain, paying = oracle.trajectories, shaped(oracle, potential(oracle.tree), 0.8)
    gradients = [objective_and_gradient(oracle, batch, oracle.behaviour)[1] for batch in (plain, paying)]
    assert (gradients[1] - gradients[0]).norm() > 0.05 * gradients[0].norm()


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_a_potential_leaves_the_best_policy_as_it_is(seed, gamma):
    oracle = small_oracle(seed=seed)
    tree = oracle.tree
    phi = potential(tree, seed)
    v, q = solved(oracle, oracle.trajectories, gamma)
    shaped_v, shaped_q = solved(oracle, shaped(oracle, phi, gamma), gamma)
    assert torch.equal(best_choices(shaped_q), best_choices(q)) and not best_choices(q).all()
    close(shaped_v, v - phi[turn_starts(tree)])
    close(shaped_q, q - phi[turn_starts(tree)][:, None])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_plain_bonus_makes_another_policy_the_best_one(seed):
    """Three tenths for every search: the best policy then searches where it might have answered rightly, and loses
    .3 of its right answers. As the difference of a potential the same bonus is harmless."""
    oracle = tiny_oracle(seed=seed)
    plain, tree = oracle.trajectories, oracle.tree
    best = best_choices(solved(oracle, plain)[1])
    paying = bonus(oracle, 0.3)
    assert (paying.returns - plain.returns).max() < 1, "the answer's reward is still the largest part"
    misled = best_choices(solved(oracle, paying)[1])
    assert worth(oracle, best, plain) == pytest.approx(1) and worth(oracle, misled, plain) < 0.75
    assert worth(oracle, misled, paying) > worth(oracle, best, paying) + 0.05
    searches = torch.zeros(tree.n_histories, dtype=torch.float64)
    for history, edge in enumerate(tree.history_edges.tolist()):
        if edge >= 0:
            asked = edge % tree.mdp.n_actions == tree.mdp.search
            searches[history] = searches[edge // tree.mdp.n_actions] + asked
    harmless = shaped(oracle, 0.3 * searches)
    assert torch.equal(best_choices(solved(oracle, harmless)[1]), best)
    batches = (plain, harmless, paying)
    gradients = [objective_and_gradient(oracle, batch, oracle.behaviour)[1] for batch in batches]
    close(gradients[1], gradients[0])
    assert (gradients[2] - gradients[0]).norm() > 0.1 * gradients[0].norm()


def exact_values(oracle, batch, gamma):
    """(N, T) expected discounted rewards from each agent token on, under the behaviour policy: the mean over all
    trajectories that pass through its history."""
    layout, p = oracle.layout, oracle.probabilities[oracle.layout.rows]
    later, paid = torch.zeros_like(p), layout.gather(batch.rewards)
    for token in reversed(range(len(p))):
        follows = token + 1 < len(p) and layout.rows[token + 1] == layout.rows[token]
        step = gamma if follows and layout.turns[token + 1] != layout.turns[token] else 1.0
        later[token] = paid[token] + (step * later[token + 1] if follows else 0.0)
    zeros = torch.zeros(oracle.tree.n_histories, dtype=torch.float64)
    total, weight = (zeros.index_add(0, oracle.histories, x) for x in (p * later, p))
    return layout.scatter((total / weight)[oracle.histories])


@pytest.mark.parametrize(
    "rule",
    [TokenGAE(whiten=False), TokenGAE(lam=0.6, whiten=False), TurnGAE(whiten=False), TurnGAE(lam=0.6, whiten=False),
     TurnGAE(gamma=0.8, lam=0.6, whiten=False)],
    ids=str,
)  # fmt: skip
def test_with_an_exact_critic_a_potential_changes_no_advantage(rule):
    oracle = tiny_oracle()
    paying = shaped(oracle, potential(oracle.tree), rule.gamma)
    plain, other = (
        rule(batch, exact_values(oracle, batch, rule.gamma)).advantages
        for batch in (oracle.trajectories, paying)
    )
    close(other, plain)
    assert plain.abs().max() > 0.1


def group_gradient(oracle, batch, rule):
    """(P,) expected gradient of all pairs of trajectories, with their probabilities, under a group credit."""
    possible = (oracle.probabilities > NOTHING).nonzero().squeeze(1)
    pairs = torch.tensor(list(itertools.product(possible.tolist(), repeat=2)))
    rows, weight = pairs.reshape(-1), oracle.probabilities[pairs].prod(1).repeat_interleave(2) / 2
    chosen = batch.select(rows)
    chosen = replace(chosen, group_ids=torch.arange(len(pairs)).repeat_interleave(2))
    advantages = rule(chosen).advantages * weight[:, None]
    total = torch.zeros(batch.rewards.shape, dtype=torch.float64)
    total.index_add_(0, rows, torch.nn.functional.pad(advantages, (0, total.shape[1] - advantages.shape[1])))
    theta = oracle.behaviour.clone().requires_grad_()
    return torch.autograd.grad((oracle.layout.gather(total) * oracle.token_logprobs(theta)).sum(), theta)[0]


@pytest.fixture(scope="module")
def paid_tree():
    """A policy that chooses how many turns there are, each of them paid at random."""
    oracle = Groups(fixed=False).oracle
    layout = oracle.layout
    ends = layout.turn_starts + layout.turn_lengths - 1
    pay = torch.randn(oracle.tree.n_edges, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    rewards = torch.zeros(len(layout.rows), dtype=torch.float64)
    rewards[ends] = pay[oracle.tree.edges[ends]]
    return oracle, replace(oracle.trajectories, rewards=layout.scatter(rewards))


@pytest.mark.parametrize("returns", ["trajectory", "turn"])
def test_group_credits_of_turns_are_unbiased_where_the_policy_chooses_the_number_of_turns(paid_tree, returns):
    """Up to the factor (n - 1) / n of a mean that the own trajectory is part of."""
    oracle, batch = paid_tree
    truth = objective_and_gradient(oracle, batch, oracle.behaviour)[1]
    close(group_gradient(oracle, batch, LeaveOneOut(group_size=2, returns=returns)), truth)
    close(group_gradient(oracle, batch, GroupCentred(group_size=2, returns=returns)), truth / 2)


def test_a_potential_changes_the_advantages_of_turns_in_a_group_and_not_their_expected_gradient(paid_tree):
    oracle, batch = paid_tree
    paying = shaped(oracle, potential(oracle.tree), trajectories=batch)
    rule = LeaveOneOut(group_size=2, returns="turn")
    close(group_gradient(oracle, paying, rule), group_gradient(oracle, batch, rule))
    pair = [0, len(batch) - 1]
    group = {"group_ids": torch.zeros(2, dtype=torch.int64)}
    one, other = (rule(replace(b.select(pair), **group)).advantages for b in (batch, paying))
    assert (one - other).abs().max() > 0.01
    whole = [GroupNormalised(group_size=2), LeaveOneOut(group_size=2)]
    start = torch.full((oracle.tree.n_histories,), 0.5, dtype=torch.float64) * (
        oracle.tree.history_edges >= 0
    )
    zero_at_first = shaped(oracle, start, trajectories=batch)
    for rule in whole:  # the sum is 0: nothing is left of it
        one, other = (rule(replace(b.select(pair), **group)).advantages for b in (batch, zero_at_first))
        torch.testing.assert_close(one, other)
