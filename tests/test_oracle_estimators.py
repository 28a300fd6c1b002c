"""Exact moments of the gradient estimators: against the production loss, plain loops and finite differences."""

import dataclasses
import itertools
import math

import pytest
import torch

from stppo.objectives import (
    Clip,
    ClippedWeight,
    ClippingBiasNorm,
    CtnKL,
    Divisor,
    Gate,
    Mask,
    NoStabilizer,
    OwnClippingBias,
    Penalty,
    Ratio,
    estimated_bias_norms,
)
from stppo.objectives.rivals import PrefixRatio
from stppo.oracle import UNCLIPPED, decompose, estimators, expected_surrogate, surrogate_gradient
from tests.oracle_cases import (
    CLIPS,
    KINDS,
    RATIOS,
    STABILIZERS,
    all_terms,
    close,
    loss_weight,
    moved,
    numerical_gradient,
    objective,
    ratio_and_gradient,
    segments,
    small_oracle,
    tiny_oracle,
    wrong_critic,
)


def production(oracle, its, theta, advantages, rows):
    """Gradient (ascent), clipping bias and cheap norms that the training code finds on a batch of rows."""
    theta = theta.detach().requires_grad_()
    batch = oracle.trajectories.select(rows)
    width = batch.tokens.shape[1]
    logprobs = oracle.layout.scatter(oracle.token_logprobs(theta))[rows][:, :width]
    logprobs.retain_grad()
    surrogate = its(logprobs, batch, oracle.layout.scatter(advantages)[rows][:, :width])
    p = oracle.policy.log_probs(theta).exp().detach()
    squared = oracle.layout.scatter(p.square().sum(1)[oracle.histories])[rows][:, :width]
    cheap = estimated_bias_norms(surrogate, logprobs, squared)
    bias = torch.zeros_like(theta)
    if surrogate.any_clipped:
        bias = torch.autograd.grad(surrogate.bias_surrogate, theta, retain_graph=True)[0]
    return -torch.autograd.grad(surrogate.loss, theta)[0], bias, cheap


def divided(its, gradient, bias, cheap):
    """What the trainer steps along."""
    norms = {"exact": float(bias.norm()), None: 0.0}
    norms |= {name: cheap[f"clipping_bias_norm_{name}"] for name in ("logprob", "logit")}
    return gradient / its.stabilizer.divisor(norms[its.stabilizer.estimator])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", ["trajectory_mean", "turn_mean"])
@pytest.mark.parametrize("stabilizer", STABILIZERS, ids=str)
@pytest.mark.parametrize("ratio", RATIOS, ids=str)
def test_a_batch_has_the_production_losss_gradient(ratio, stabilizer, aggregation, kind):
    oracle = small_oracle(kind)
    its = objective(ratio, stabilizer=stabilizer, aggregation=aggregation)
    theta, advantages = moved(oracle), wrong_critic(oracle)
    estimator = surrogate_gradient(oracle, its, theta, advantages)
    rows = oracle.sample(40, torch.Generator().manual_seed(2))
    gradient, bias, cheap = production(oracle, its, theta, advantages, rows)
    batch = estimator.batches(rows[None])
    close(batch.gradients[0], divided(its, gradient, bias, cheap))
    close(estimator.biases[rows].mean(0), bias)
    for name, squared in (("logprob", estimator.squared_logprob), ("logit", estimator.squared_logit)):
        expected = float(squared[rows].sum().sqrt()) / 40
        assert cheap[f"clipping_bias_norm_{name}"] == pytest.approx(expected, abs=1e-14)
    assert bias.norm() > 1e-4  # the comparison is not one of zeros


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("aggregation", ["trajectory_mean", "token_mean", "turn_mean"])
@pytest.mark.parametrize("ratio", RATIOS, ids=str)
def test_mean_and_bias_equal_autograd_through_the_expected_surrogate(ratio, aggregation, clip):
    oracle = small_oracle("neural")
    its = objective(ratio, CLIPS[clip], aggregation=aggregation)
    theta, advantages = moved(oracle).requires_grad_(), wrong_critic(oracle)
    estimator = surrogate_gradient(oracle, its, theta, advantages)
    expected = expected_surrogate(oracle, its, theta, advantages)
    close(estimator.mean, torch.autograd.grad(expected.surrogate, theta, retain_graph=True)[0])
    close(estimator.clipping_bias, torch.autograd.grad(expected.bias, theta)[0])
    assert estimator.clip_fraction == expected.clip_fraction
    assert (estimator.clip_fraction > 0.02) == (clip == "clipped")


def test_covariance_and_variance_are_those_of_single_trajectories():
    oracle = tiny_oracle()
    estimator = surrogate_gradient(oracle, objective(), moved(oracle), oracle.token_advantages())
    for rows, covariance, variance in (
        (estimator.gradients, estimator.covariance, estimator.variance),
        (estimator.biases, estimator.clipping_bias_covariance, estimator.clipping_bias_variance),
    ):
        mean = sum(p * g for p, g in zip(estimator.probabilities, rows, strict=True))
        expected = sum(
            p * torch.outer(g - mean, g - mean) for p, g in zip(estimator.probabilities, rows, strict=True)
        )
        close(covariance, expected)
        assert variance == pytest.approx(float(expected.trace()), rel=1e-12)
        assert variance > 1e-4


@pytest.mark.parametrize("stabilizer", STABILIZERS, ids=str)
def test_moments_of_batches_of_two_equal_a_loop_over_all_pairs(stabilizer):
    oracle = tiny_oracle()
    its = objective(Ratio("turn"), stabilizer=stabilizer)
    theta, advantages = moved(oracle), wrong_critic(oracle)
    mean = torch.zeros_like(theta)
    second = torch.zeros(len(theta), len(theta), dtype=torch.float64)
    for pair in itertools.combinations_with_replacement(range(len(oracle.tree)), 2):
        weight = oracle.probabilities[list(pair)].prod() * (1 if pair[0] == pair[1] else 2)
        gradient = divided(its, *production(oracle, its, theta, advantages, list(pair)))
        mean += weight * gradient
        second += weight * torch.outer(gradient, gradient)
    got_mean, got_covariance = surrogate_gradient(oracle, its, theta, advantages).batch_moments(2)
    close(got_mean, mean)
    close(got_covariance, second - torch.outer(mean, mean))


def test_moments_do_not_depend_on_how_batches_are_cut_into_chunks(monkeypatch):
    oracle = tiny_oracle()
    estimator = surrogate_gradient(
        oracle, objective(stabilizer=STABILIZERS[1]), moved(oracle), wrong_critic(oracle)
    )
    whole, draws = estimator.batch_moments(2), estimator.minibatches(8, 50, torch.Generator().manual_seed(0))
    monkeypatch.setattr(estimators, "CHUNK", 700)
    for got, expected in zip(estimator.batch_moments(2), whole, strict=True):
        close(got, expected, 1e-15)
    for got, expected in zip(
        estimator.minibatches(8, 50, torch.Generator().manual_seed(0)), draws, strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("stabilizer", STABILIZERS, ids=str)
def test_sampled_batches_lie_in_the_interval_of_the_exact_mean(stabilizer):
    oracle = tiny_oracle()
    estimator = surrogate_gradient(
        oracle, objective(Ratio("turn"), stabilizer=stabilizer), moved(oracle), wrong_critic(oracle)
    )
    mean, covariance = estimator.batch_moments(3)
    n = 40_000
    drawn = estimator.minibatches(3, n, torch.Generator().manual_seed(4)).gradients.mean(0)
    error = (covariance.diagonal() / n).sqrt()
    free = error > 1e-9  # the others have neither gradient nor variance
    deviation = ((drawn - mean)[free] / error[free]).abs().max()
    assert deviation < 4.2  # 99.9 % for 18 coordinates (Bonferroni)
    shifted = ((drawn - estimator.batch_moments(1)[0])[free] / error[free]).abs().max()
    if stabilizer not in (
        NoStabilizer(),
        CtnKL(),
    ):  # a divisor makes the expectation depend on the batch size, and this would see it
        assert shifted > 6


def test_production_batches_lie_in_the_interval_of_the_exact_mean():
    oracle = small_oracle()
    its, theta, advantages = objective(Ratio("turn")), moved(oracle), wrong_critic(oracle)
    n = 50_000
    rows = oracle.sample(n, torch.Generator().manual_seed(8))
    gradient, bias, _ = production(oracle, its, theta, advantages, rows)
    estimator = surrogate_gradient(oracle, its, theta, advantages)
    for got, mean, covariance in (
        (gradient, estimator.mean, estimator.covariance),
        (bias, estimator.clipping_bias, estimator.clipping_bias_covariance),
    ):
        error = (covariance.diagonal() / n).sqrt()
        free = error > 1e-9
        assert ((got - mean)[free] / error[free]).abs().max() < 4.6  # 99.9 % for up to 100 coordinates
        assert free.sum() > 20 and (mean[free] / error[free]).abs().max() > 20


def test_limit_is_the_gradient_over_the_divisor_of_the_exact_bias():
    oracle = tiny_oracle()
    theta, advantages = moved(oracle), wrong_critic(oracle)
    its = objective(stabilizer=ClippingBiasNorm(c0=0.01))
    estimator = surrogate_gradient(oracle, its, theta, advantages)
    divisor = float(estimator.clipping_bias.norm()) / 0.01
    assert divisor > 1.5
    close(estimator.limit(), estimator.mean / divisor)
    large = estimator.minibatches(20_000, 20, torch.Generator().manual_seed(0)).gradients.mean(0)
    assert (large - estimator.limit()).norm() < 0.02 * estimator.limit().norm()


@pytest.mark.parametrize("formula", ["inside", "outside"])
def test_limit_subtracts_the_penaltys_gradient(formula):
    oracle = tiny_oracle()
    its = objective(stabilizer=CtnKL(coefficient=2.0, formula=formula))
    theta, advantages = moved(oracle).requires_grad_(), wrong_critic(oracle)
    expected = expected_surrogate(oracle, its, theta, advantages)
    assert float(expected.penalty.detach()) > 1e-3
    gradient = torch.autograd.grad(expected.surrogate - expected.penalty, theta)[0]
    close(surrogate_gradient(oracle, its, theta, advantages).limit(), gradient)


# ---- the lemmas ----------------------------------------------------------------------------------


def looped(oracle, its, theta, credit, only=None):
    """E[sum_t weight_t credit_t grad w_t] by a loop over trajectories and segments; `only` picks tokens."""
    log_ratio = oracle.log_ratio(theta).detach()
    scores = oracle.policy.jacobian(theta)[oracle.tree.edges]
    total = torch.zeros(oracle.policy.n_parameters, dtype=torch.float64)
    for row, p in enumerate(oracle.probabilities.tolist()):
        for segment in segments(oracle, row, its.ratio.granularity):
            w, gradient = ratio_and_gradient(log_ratio, scores, segment, its.ratio.aggregation)
            for t in segment:
                if only is None or only(w, float(credit[t])):
                    total += (
                        p * loss_weight(oracle, row, t, its.loss_aggregation) * float(credit[t]) * gradient
                    )
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ratio", "aggregation"), all_terms(), ids=str)
def test_lemma_4_2_term_by_term(ratio, aggregation, kind):
    oracle = tiny_oracle(kind)
    its = objective(ratio, aggregation=aggregation)
    # With lam = 1 a critic's error would be a mere baseline, whose term vanishes for token ratios.
    theta, advantages = moved(oracle), wrong_critic(oracle, lam=0.5)
    terms = decompose(oracle, its, theta, advantages)
    exact = oracle.token_advantages()

    def clipped(w, a):
        return (a > 0 and w > 1.2) or (a < 0 and w < 0.8)

    close(terms.exact_advantage, looped(oracle, its, theta, exact))
    close(terms.advantage_error, looped(oracle, its, theta, advantages - exact))
    close(terms.clipping_bias, looped(oracle, its, theta, advantages, clipped))
    expected = numerical_gradient(lambda t: expected_surrogate(oracle, its, t, advantages).surrogate, theta)
    close(terms.gradient, expected, 1e-9)
    assert terms.residual < 1e-14
    assert min(t.norm() for t in (terms.exact_advantage, terms.advantage_error, terms.clipping_bias)) > 1e-5


@pytest.mark.parametrize("aggregation", ["product", "geometric"])
@pytest.mark.parametrize("kind", KINDS)
def test_lemma_4_2_of_a_prefix_ratio(kind, aggregation):
    """Each token's ratio is that of the tokens up to it, by a loop over trajectories and tokens."""
    oracle = tiny_oracle(kind)
    its = objective(PrefixRatio(aggregation))
    theta, advantages = moved(oracle), wrong_critic(oracle, lam=0.5)
    terms = decompose(oracle, its, theta, advantages)
    log_ratio = oracle.log_ratio(theta).detach()
    scores = oracle.policy.jacobian(theta)[oracle.tree.edges]
    bias = torch.zeros(oracle.policy.n_parameters, dtype=torch.float64)
    for row, p in enumerate(oracle.probabilities.tolist()):
        (tokens,) = segments(oracle, row, "sequence")
        for n, t in enumerate(tokens, 1):
            w, gradient = ratio_and_gradient(log_ratio, scores, tokens[:n], aggregation)
            a = float(advantages[t])
            if (a > 0 and w > 1.2) or (a < 0 and w < 0.8):
                bias += p * loss_weight(oracle, row, t, its.loss_aggregation) * a * gradient
    close(terms.clipping_bias, bias)
    expected = numerical_gradient(lambda x: expected_surrogate(oracle, its, x, advantages).surrogate, theta)
    close(terms.gradient, expected, 1e-9)
    assert terms.residual < 1e-14 and bias.norm() > 1e-5


def test_what_the_oracle_has_no_limit_of_is_refused():
    oracle = tiny_oracle()
    for stabilizer in (OwnClippingBias(), ClippingBiasNorm(over_median=True)):
        with pytest.raises(ValueError, match=f"{type(stabilizer).__name__}.*the oracle"):
            surrogate_gradient(oracle, objective(stabilizer=stabilizer), moved(oracle), wrong_critic(oracle))


@pytest.mark.parametrize("clip_on", ["token", "turn"])
@pytest.mark.parametrize("kind", KINDS)
def test_lemma_4_2_on_the_larger_tree(kind, clip_on):
    oracle = small_oracle(kind)
    its = objective(Ratio("turn"), Clip(0.1, 0.3, clip_on))
    assert decompose(oracle, its, moved(oracle), wrong_critic(oracle)).residual < 1e-14


@pytest.mark.parametrize("ratio", [Ratio("token"), Ratio("turn")], ids=str)
def test_lemma_4_2_survives_ratios_that_underflow(ratio):
    oracle = tiny_oracle()
    theta = oracle.behaviour.clone()
    theta[0] -= 1e4
    assert (ratio(oracle.log_ratio(theta), oracle.layout) == 0).any()
    terms = decompose(oracle, objective(ratio), theta, wrong_critic(oracle))
    assert terms.residual < 1e-14 and terms.clipping_bias.isfinite().all()


def test_lemma_4_2_residual_would_show_a_wrong_term():
    oracle = small_oracle()
    terms = decompose(oracle, objective(Ratio("turn")), moved(oracle), wrong_critic(oracle))
    for name in ("exact_advantage", "advantage_error", "clipping_bias"):
        spoilt = {**vars(terms), name: 1.01 * vars(terms)[name]}
        assert type(terms)(**spoilt).residual > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_lemma_4_1(kind):
    # E[1/|y| sum_k w^k (sum_{t in k} A_t) / |y^k| grad log pi(y^k)], geometric ratio, no clip.
    oracle = small_oracle(kind)
    its = objective(Ratio("turn"), UNCLIPPED)
    theta, advantages = moved(oracle), oracle.token_advantages()
    layout = oracle.layout
    scores = oracle.policy.jacobian(theta)[oracle.tree.edges]
    turn_scores = (
        torch.zeros(len(layout.turn_lengths), scores.shape[1]).double().index_add(0, layout.turns, scores)
    )
    w = (layout.turn_sum(oracle.log_ratio(theta)) / layout.turn_lengths).exp()
    rows = layout.turn_rows
    weight = oracle.probabilities[rows] / layout.row_lengths[rows]
    expected = (weight * w * layout.turn_sum(advantages) / layout.turn_lengths) @ turn_scores
    close(surrogate_gradient(oracle, its, theta, advantages).mean, expected)


def test_product_of_the_whole_trajectory_with_its_return_is_the_true_gradient():
    oracle = small_oracle()
    theta = moved(oracle, 1.0)
    its = objective(Ratio("sequence", "product"), UNCLIPPED)
    returns = oracle.tree.rewards[oracle.layout.rows]
    close(surrogate_gradient(oracle, its, theta, returns).mean, oracle.policy_gradient(theta))


@pytest.mark.parametrize("critic_error", [0.0, 1.0])
@pytest.mark.parametrize("lam", [0.5, 1.0])
@pytest.mark.parametrize("aggregation", ["trajectory_mean", "token_mean"])
def test_when_a_critic_leaves_no_error_in_the_token_surrogate(aggregation, lam, critic_error):
    # Under a constant normaliser, and with an exact critic or one that is only a baseline (lam = 1).
    oracle = small_oracle()
    its = objective(RATIOS[0], aggregation=aggregation)
    terms = decompose(oracle, its, moved(oracle), wrong_critic(oracle, critic_error, lam))
    vanishes = aggregation == "token_mean" and (lam == 1.0 or critic_error == 0.0)
    assert (terms.advantage_error.norm() < 1e-14) == vanishes


# ---- what is refused -----------------------------------------------------------------------------


def test_bad_advantages_are_named():
    oracle = tiny_oracle()
    theta = oracle.behaviour
    bad = oracle.token_advantages()
    bad[3] = math.nan
    for function in (expected_surrogate, surrogate_gradient, decompose):
        with pytest.raises(ValueError, match=r"advantages: expected shape \(\d+,\), got \(2,\)"):
            function(oracle, objective(), theta, torch.zeros(2).double())
        with pytest.raises(ValueError, match="advantages: must be finite"):
            function(oracle, objective(), theta, bad)


def test_too_large_a_table_says_how_large(monkeypatch):
    oracle = tiny_oracle()
    monkeypatch.setattr(estimators, "TABLE_LIMIT", 500)
    with pytest.raises(ValueError, match="32 trajectories x 18 parameters is beyond 500 numbers"):
        surrogate_gradient(oracle, objective(), oracle.behaviour, oracle.token_advantages())


def test_too_many_batches_say_how_many_unless_none_need_be_enumerated():
    oracle = small_oracle()
    theta, advantages = moved(oracle), oracle.token_advantages()
    divided_ = surrogate_gradient(oracle, objective(stabilizer=STABILIZERS[1]), theta, advantages)
    with pytest.raises(ValueError, match=r"1334\^3 = 2,373,927,704 batches, the limit is 2,000,000"):
        divided_.batch_moments(3)
    plain = surrogate_gradient(oracle, objective(), theta, advantages)
    mean, covariance = plain.batch_moments(1000)
    close(mean, plain.mean)
    close(covariance, plain.covariance / 1000)


@pytest.mark.parametrize("estimator", ["logprob", "logit"])
def test_norm_estimators_have_no_limit(estimator):
    oracle = tiny_oracle()
    its = objective(stabilizer=ClippingBiasNorm(estimator=estimator))
    with pytest.raises(ValueError, match=f"estimator='{estimator}': its norm goes to 0 as the batch grows"):
        surrogate_gradient(oracle, its, moved(oracle), oracle.token_advantages()).limit()


# --- other surrogates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", [ClippedWeight(), Mask(), Gate()], ids=str)
@pytest.mark.parametrize("ratio", [Ratio("token"), Ratio("turn")], ids=str)
def test_other_surrogates_have_the_production_losss_gradient_and_bias(surrogate, ratio):
    oracle = small_oracle()
    its = dataclasses.replace(objective(ratio), surrogate=surrogate)
    theta, advantages = moved(oracle), wrong_critic(oracle)
    rows = oracle.sample(16, torch.Generator().manual_seed(2))
    gradient, bias, _ = production(oracle, its, theta, advantages, rows)
    exact = surrogate_gradient(oracle, its, theta, advantages)
    assert bias.norm() > 1e-3
    close(exact.gradients[rows].mean(0), gradient)
    close(exact.biases[rows].mean(0), bias)


def test_what_has_no_expectation_over_the_tree_is_refused():
    oracle = tiny_oracle()
    theta, advantages, plain = moved(oracle), wrong_critic(oracle), objective()

    class Moving(Clip):
        sees_batch = True

    class ByShare(Divisor):
        estimator = "clip_fraction"

        def divisor(self, value):
            return value

    class Extra(Penalty):
        def penalty(self, tokens, bounds):
            return tokens.log_ratio.mean()

    for changes, message in (
        ({"clip": Moving()}, "Moving: looks at a whole batch, which the tree is not"),
        ({"stabilizer": ByShare()}, "ByShare.estimator='clip_fraction': the oracle divides here by"),
        ({"stabilizer": Extra()}, "Extra: its expectation over the tree is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            surrogate_gradient(oracle, dataclasses.replace(plain, **changes), theta, advantages)
    with pytest.raises(ValueError, match="Lemma 4.2 is about MinClip, got the surrogate Gate"):
        decompose(oracle, dataclasses.replace(plain, surrogate=Gate()), theta, advantages)
