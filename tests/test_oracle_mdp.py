"""The enumerable MDP against its grammar, walked by an independent recursion."""

import pytest
import torch

from stppo.oracle import TokenMDP
from stppo.trajectories import turn_ids

SIZES = [(1, 1, 1, 1, 1), (2, 1, 2, 3, 1), (1, 3, 2, 1, 2), (2, 2, 3, 2, 2), (3, 2, 2, 2, 1), (2, 3, 2, 2, 2)]


def spelled(mdp):
    """All trajectories as {token names: turns}, one token after the other from the rules in words."""
    found = {}

    def write(text, turns, turn):
        for token in range(mdp.n_actions):
            name, grown = mdp.token_name(token), [*turn, token]
            if name == "ANSWER" or (len(turns) + 1 == mdp.max_turns and ended(name, grown)):
                found[(*text, name)] = [*turns, grown]
            elif ended(name, grown):
                for observation in range(mdp.n_observations):
                    write((*text, name, f"o{observation}"), [*turns, grown], [])
            else:
                write((*text, name), turns, grown)

    def ended(name, turn):
        return name in ("SEARCH", "ANSWER") or len(turn) == mdp.max_turn_tokens

    for prompt in range(mdp.n_prompts):
        write((f"q{prompt}",), [], [])
    return found


@pytest.mark.parametrize("sizes", SIZES)
def test_tree_holds_every_trajectory_of_the_grammar_once_with_its_turns(sizes):
    mdp = TokenMDP(*sizes)
    tree = mdp.enumerate()
    expected = spelled(mdp)
    turns = turn_ids(tree.agent_mask)
    found = {}
    for row in range(len(tree)):
        tokens = tree.tokens[row, : tree.lengths[row]]
        names = tuple(mdp.token_name(int(token)) for token in tokens)
        ids = turns[row, : tree.lengths[row]]
        found[names] = [tokens[ids == k].tolist() for k in range(int(ids.max()) + 1)]
    assert len(found) == len(tree) == mdp.n_trajectories
    assert found == expected


def test_simple_cases_that_would_hide_mistakes_are_not_the_default():
    tree = TokenMDP().enumerate()
    layout = tree.layout
    assert len(layout.row_lengths.unique()) > 3
    assert len(layout.row_turns.unique()) > 1
    assert len(layout.turn_lengths.unique()) == 3
    moves = tree.history_probabilities[(tree.history_edges >= 0) & (tree.history_positions == 0)]
    assert moves.min() > 0 and moves.max() < 1
    assert set(tree.rewards.tolist()) == {0.0, 1.0}


def test_environment_moves_of_each_choice_sum_to_one():
    tree = TokenMDP(2, 2, 3, 3, 2).enumerate()
    after = tree.history_edges >= 0
    total = torch.zeros(tree.n_edges, dtype=torch.float64)
    total.index_add_(0, tree.history_edges[after], tree.history_probabilities[after])
    continued = total > 0
    torch.testing.assert_close(total[continued], torch.ones_like(total[continued]), rtol=0, atol=1e-14)
    # A choice either goes on or ends exactly one trajectory.
    ends = torch.zeros(tree.n_edges, dtype=torch.long).index_add_(
        0, tree.last_edges, torch.ones_like(tree.last_edges)
    )
    assert torch.equal(ends == 1, ~continued) and int(ends.max()) == 1
    assert float(tree.history_probabilities[~after].sum()) == pytest.approx(1, abs=1e-14)


def test_seed_decides_rewards_and_environment():
    one, same, other = (TokenMDP(seed=seed).enumerate() for seed in (1, 1, 2))
    assert torch.equal(one.rewards, same.rewards)
    assert torch.equal(one.environment_logprobs, same.environment_logprobs)
    assert not torch.equal(one.rewards, other.rewards)
    assert not torch.equal(one.environment_logprobs, other.environment_logprobs)


def test_reward_needs_an_answer():
    tree = TokenMDP().enumerate()
    last = tree.last_edges % tree.mdp.n_actions
    assert not tree.rewards[last != tree.mdp.answer].any()


def test_too_large_says_how_large_and_what_the_limit_is():
    with pytest.raises(ValueError, match=r"20,017 trajectories, the limit is 20,000; lower max_turns"):
        TokenMDP(2, 3, 3, 2, 1)
    assert len(TokenMDP(2, 3, 3, 2, 1, limit=20_017).enumerate()) == 20_017


@pytest.mark.parametrize(
    "field", ["n_words", "max_turn_tokens", "max_turns", "n_observations", "n_prompts", "limit"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_sizes_must_be_positive_integers(field, value):
    with pytest.raises(ValueError, match=f"TokenMDP.{field}={value}"):
        TokenMDP(**{field: value})


def test_other_rewards_replace_those_drawn_and_are_checked():
    tree = TokenMDP(1, 1, 2, 1, 1).enumerate()
    rewards = torch.arange(len(tree)).double()
    assert torch.equal(tree.with_rewards(rewards).rewards, rewards)
    with pytest.raises(ValueError, match=r"rewards: expected shape \(7,\), got \(4,\)"):
        tree.with_rewards(torch.zeros(4))
    with pytest.raises(ValueError, match="rewards: must be finite, trajectory 2 has nan"):
        tree.with_rewards(torch.tensor([0.0, 1.0, float("nan"), 0.0, 0.0, 0.0, 0.0]))


def test_size_of_a_huge_one_is_told_without_building_it():
    with pytest.raises(ValueError, match=r"[0-9,]{40,} trajectories"):
        TokenMDP(50, 20, 10)
