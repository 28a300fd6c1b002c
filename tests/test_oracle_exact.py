"""Values, advantages, return and gradient of the oracle against other ways of computing them."""

import pytest
import torch
from scipy import stats

from stppo.objectives import BatchBaseline, GroupNormalised, TokenGAE, TurnReturnMinusValue
from stppo.oracle import NeuralSoftmax, Oracle, TabularSoftmax, TokenMDP
from tests.oracle_cases import KINDS, close, moved, numerical_gradient, small_oracle, tiny_oracle


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_conditional_expectations_of_the_return(kind):
    # The recursion goes backwards through the histories; here all trajectories through one are averaged.
    oracle = small_oracle(kind)
    weight, reward = (x[oracle.layout.rows] for x in (oracle.probabilities, oracle.tree.rewards))

    def mean_by(index, size):
        zeros = torch.zeros(size, dtype=torch.float64)
        return zeros.index_add(0, index, weight * reward) / zeros.index_add(0, index, weight)

    close(oracle.values(), mean_by(oracle.histories, oracle.tree.n_histories))
    close(oracle.action_values().reshape(-1), mean_by(oracle.tree.edges, oracle.tree.n_edges))


def test_values_exist_where_the_policy_never_goes():
    oracle = tiny_oracle()
    far = oracle.behaviour.clone()
    far[oracle.tree.mdp.answer :: oracle.tree.mdp.n_actions] = 2000.0  # other choices have probability 0
    values = Oracle(oracle.tree, oracle.policy, far).values()
    answers = torch.arange(oracle.tree.n_histories) * oracle.tree.mdp.n_actions + oracle.tree.mdp.answer
    ended = [int((oracle.tree.last_edges == edge).nonzero()) for edge in answers]
    assert torch.equal(values, oracle.tree.rewards[ended])
    assert set(values[oracle.tree.history_turns == 1].tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_token_advantages_have_mean_zero_at_every_history(kind):
    oracle = small_oracle(kind)
    p = oracle.behaviour_log_probs.exp()
    close(
        (p * (oracle.action_values() - oracle.values()[:, None])).sum(1),
        torch.zeros(oracle.tree.n_histories).double(),
    )


def test_turn_advantage_is_the_sum_of_its_tokens_advantages():
    # Within a turn the environment does not move, so Q(h_t, y_t) = V(h_{t+1}) and the sum telescopes.
    oracle = small_oracle()
    layout = oracle.layout
    close(oracle.turn_advantages(), layout.turn_sum(oracle.token_advantages())[layout.turns])


@pytest.mark.parametrize("kind", KINDS)
def test_policy_gradient_equals_finite_differences(kind):
    oracle = tiny_oracle(kind)
    theta = moved(oracle)
    with torch.no_grad():
        expected = numerical_gradient(oracle.expected_return, theta)
    close(oracle.policy_gradient(theta), expected, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("credit", ["return", "token_advantages", "turn_advantages", "group_advantages"])
def test_policy_gradient_theorem_holds_with_every_unbiased_credit(kind, credit):
    oracle = small_oracle(kind)
    advantages = {
        "return": oracle.tree.rewards[oracle.layout.rows],
        "group_advantages": oracle.group_advantages(normalise=False),
    }.get(credit)
    if advantages is None:
        advantages = getattr(oracle, credit)()
    weight = oracle.probabilities[oracle.layout.rows] * advantages
    scores = oracle.policy.jacobian(oracle.behaviour)[oracle.tree.edges]
    close(weight @ scores, oracle.policy_gradient(oracle.behaviour), 1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_trajectory_ratios_give_the_return_of_every_policy(kind):
    oracle = small_oracle(kind)
    theta = moved(oracle, 1.0)
    rho = oracle.layout.row_sum(oracle.log_ratio(theta)).exp()
    assert float((oracle.probabilities * rho * oracle.tree.rewards).sum()) == pytest.approx(
        float(oracle.expected_return(theta)), abs=1e-13
    )


def test_group_advantages_are_the_limit_of_grpos():
    oracle = tiny_oracle()
    advantages = oracle.layout.row_mean(oracle.group_advantages())
    p = oracle.probabilities
    assert float((p * advantages).sum()) == pytest.approx(0, abs=1e-13)
    assert float((p * advantages.square()).sum()) == pytest.approx(1, abs=1e-13)
    rows = oracle.sample(50_000, torch.Generator().manual_seed(0))
    batch = oracle.trajectories.select(rows)
    sampled = GroupNormalised(group_size=len(rows))(batch).advantages
    got = batch.layout.row_mean(batch.layout.gather(sampled))
    torch.testing.assert_close(got, advantages[rows], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("normalise", [True, False])
def test_a_prompt_whose_outcomes_agree_gives_no_group_advantage(normalise):
    oracle = small_oracle()
    rewards = torch.full((len(oracle.tree),), 0.3, dtype=torch.float64)  # its mean is 0.3 but for rounding
    same = Oracle(oracle.tree.with_rewards(rewards), oracle.policy, oracle.behaviour)
    assert not same.group_advantages(normalise).any()


def test_whitening_leaves_nothing_of_equal_advantages():
    oracle = small_oracle()
    assert not oracle.whiten(torch.full((len(oracle.tree.edges),), 0.3, dtype=torch.float64)).any()


def test_gae_with_exact_values_is_unbiased_for_each_choice():
    oracle = small_oracle()
    for rule, exact in (
        (TokenGAE(whiten=False), oracle.token_advantages()),
        (TokenGAE(whiten=False, lam=0.5), oracle.token_advantages()),
        (TurnReturnMinusValue(whiten=False), oracle.turn_advantages()),
    ):
        sampled = oracle.credit(rule)
        weight = oracle.probabilities[oracle.layout.rows]
        # A turn's credit is known once its last token is: compare there, for the token rules everywhere.
        at = oracle.layout.turn_starts + oracle.layout.turn_lengths - 1
        if isinstance(rule, TokenGAE):
            at = torch.arange(len(weight))
        zeros = torch.zeros(oracle.tree.n_edges, dtype=torch.float64)
        edges = oracle.tree.edges[at]
        mean = zeros.index_add(0, edges, (weight * sampled)[at]) / zeros.index_add(0, edges, weight[at])
        close(mean[edges], exact[at])
        assert not torch.allclose(sampled, exact)


@pytest.mark.parametrize("rule", [TokenGAE(), GroupNormalised(group_size=2), BatchBaseline()])
def test_credits_that_compare_a_batch_are_refused(rule):
    with pytest.raises(
        ValueError, match=f"credit: {type(rule).__name__}.* compares the trajectories of a batch"
    ):
        tiny_oracle().credit(rule)


def test_whitening_matches_that_of_a_large_batch():
    oracle = tiny_oracle()
    rows = oracle.sample(100_000, torch.Generator().manual_seed(1))
    batch = oracle.trajectories.select(rows)
    values = oracle.layout.scatter(oracle.values()[oracle.histories])[rows][:, : batch.tokens.shape[1]]
    sampled = batch.layout.gather(TokenGAE()(batch, values).advantages)
    exact = oracle.layout.scatter(oracle.whiten(oracle.credit(TokenGAE(whiten=False))))[rows]
    torch.testing.assert_close(
        sampled, batch.layout.gather(exact[:, : batch.tokens.shape[1]]), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_finite_differences(kind):
    oracle = tiny_oracle(kind)
    theta = moved(oracle)
    jacobian = oracle.policy.jacobian(theta)
    for edge in (0, 7, oracle.tree.n_edges - 1):
        expected = numerical_gradient(lambda t, e=edge: oracle.policy.log_probs(t).reshape(-1)[e], theta)
        close(jacobian[edge], expected, 1e-8)


def test_policies_share_parameters_among_histories():
    tree = TokenMDP().enumerate()
    assert TabularSoftmax(tree, "none").n_parameters == tree.n_edges
    assert TabularSoftmax(tree).n_parameters < tree.n_edges / 5
    # Behind equal turn, place, previous token and observation stand different beginnings.
    alike = TabularSoftmax(tree).contexts.bincount().argmax()
    together = tree.history_tokens[TabularSoftmax(tree).contexts == alike]
    assert len(together) > 1 and len(together.unique(dim=0)) == len(together)
    neural = NeuralSoftmax(tree)
    assert neural.n_parameters < tree.n_edges / 5
    assert not torch.allclose(neural.log_probs(neural.initial(0))[0], neural.log_probs(neural.initial(0))[1])


# ---- sampled against exact -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_trajectories_have_the_enumerated_probabilities(kind):
    oracle = tiny_oracle(kind)
    n = 100_000
    counts = torch.bincount(
        oracle.sample(n, torch.Generator().manual_seed(5)), minlength=len(oracle.tree)
    ).double()
    expected = n * oracle.probabilities
    assert expected.min() > 5  # else the chi-squared approximation fails
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3
    wrong = expected.roll(1)
    assert stats.chisquare(counts.numpy(), wrong.numpy()).pvalue < 1e-12


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theta", "message"),
    [
        (torch.zeros(3, dtype=torch.float64), r"theta: expected shape \(18,\), got \(3,\)"),
        (torch.zeros(18), "theta: expected a float64 tensor, got torch.float32"),
        ([0.0] * 18, "theta: expected a float64 tensor"),
        (torch.full((18,), float("inf"), dtype=torch.float64), "theta: must be finite"),
    ],
)
def test_bad_parameters_are_named(theta, message):
    policy = tiny_oracle().policy
    assert policy.n_parameters == 18
    for method in (policy.log_probs, policy.jacobian):
        with pytest.raises(ValueError, match=message):
            method(theta)


def test_bad_policies_and_values_are_named():
    oracle = tiny_oracle()
    with pytest.raises(ValueError, match="TabularSoftmax.sharing='all': must be one of none, recent"):
        TabularSoftmax(oracle.tree, "all")
    with pytest.raises(ValueError, match="NeuralSoftmax.hidden=0"):
        NeuralSoftmax(oracle.tree, 0)
    with pytest.raises(ValueError, match="policy: was made for another tree"):
        Oracle(TokenMDP().enumerate(), oracle.policy, oracle.behaviour)
    with pytest.raises(ValueError, match=r"values: expected shape \(14,\)"):
        oracle.credit(TokenGAE(whiten=False), torch.zeros(2).double())
