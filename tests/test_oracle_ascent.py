"""Exact ascent: its steps are the optimiser's on the exact gradient. On sampled batches: a batch's surrogate is the production
loss's, and minibatches share out a roll-out."""

import pytest
import torch

from stppo.objectives import ClippingBiasNorm, NoStabilizer, Ratio
from stppo.oracle import Oracle, ascend, expected_surrogate, surrogate_gradient
from tests.oracle_cases import STABILIZERS, all_terms, close, moved, objective, small_oracle, wrong_critic


def run(oracle, its, **options):
    options = {"iterations": 2, "updates": 6, "learning_rate": 60.0, **options}
    return ascend(oracle.tree, oracle.policy, oracle.behaviour, its, Oracle.token_advantages, **options)


def test_sgd_steps_along_the_limit_of_the_estimator():
    oracle = small_oracle("neural")
    its = objective(Ratio("turn"), stabilizer=ClippingBiasNorm(c0=0.005))
    rows = run(oracle, its, updates=3)
    theta = oracle.behaviour
    for i, row in enumerate(rows):
        if i % 3 == 0:
            frozen = Oracle(oracle.tree, oracle.policy, theta)
        estimator = surrogate_gradient(frozen, its, theta, frozen.token_advantages())
        assert row["expected_return"] == pytest.approx(float(frozen.expected_return(theta)))
        assert row["gradient_norm"] == pytest.approx(float(estimator.mean.norm()))
        assert row["clipping_bias_norm"] == pytest.approx(float(estimator.clipping_bias.norm()), abs=1e-14)
        assert (row["iteration"], row["update"]) == (i // 3, i)
        step = 60.0 * estimator.limit()
        assert row["step_norm"] == pytest.approx(float(step.norm()))
        truth = frozen.policy_gradient(theta)
        assert row["cosine"] == pytest.approx(float(step @ truth / step.norm() / truth.norm()))
        theta = theta + step
        close(row["theta"], theta)
    assert max(row["divisor"] for row in rows) > 1.5


def test_a_norm_clip_that_binds_after_the_divisor_cancels_it():
    oracle = small_oracle("neural")
    its = objective(stabilizer=ClippingBiasNorm(c0=0.005))
    options = {"max_grad_norm": 0.0005, "learning_rate": 1000.0}
    none = run(oracle, objective(stabilizer=NoStabilizer()), **options)
    after = run(oracle, its, clip_norm_first=False, **options)
    before = run(oracle, its, **options)
    assert max(row["divisor"] for row in before) > 1.5
    close(after[-1]["theta"], none[-1]["theta"])
    assert all(row["step_norm"] == pytest.approx(0.5 / row["divisor"]) for row in before)


def test_what_is_refused():
    oracle = small_oracle("neural")
    with pytest.raises(ValueError, match="optimizer='lion': must be one of sgd, adam"):
        run(oracle, objective(), optimizer="lion")
    with pytest.raises(ValueError, match="estimator='logit'"):
        run(oracle, objective(stabilizer=ClippingBiasNorm(estimator="logit")))
    with pytest.raises(ValueError, match="theta: must be finite"):
        run(oracle, objective(), learning_rate=float("inf"))


# ---- sampled batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("stabilizer", STABILIZERS, ids=str)
@pytest.mark.parametrize(("ratio", "aggregation"), all_terms(), ids=str)
def test_surrogate_of_a_batch_is_that_of_the_production_loss(ratio, aggregation, stabilizer):
    oracle = small_oracle()
    its = objective(ratio, stabilizer=stabilizer, aggregation=aggregation)
    theta, advantages = moved(oracle), wrong_critic(oracle)
    rows = oracle.sample(40, torch.Generator().manual_seed(2))
    shares = rows.bincount(minlength=len(oracle.tree)).double() / 40
    ours = expected_surrogate(oracle, its, theta, advantages, shares)
    logprobs, credit = (oracle.layout.scatter(x)[rows] for x in (oracle.token_logprobs(theta), advantages))
    batch = oracle.trajectories.select(rows)
    width = batch.tokens.shape[1]
    loss = its(logprobs[:, :width], batch, credit[:, :width])
    close(ours.surrogate, -loss.ppo_loss)
    close(ours.bias, loss.bias_surrogate)
    close(ours.penalty, loss.loss - loss.ppo_loss)
    assert ours.clip_fraction == pytest.approx(loss.diagnostics["clip_fraction"])


def test_sampled_first_step_averages_to_the_exact_one():
    oracle = small_oracle()

    def step(**options):
        row = ascend(oracle.tree, oracle.policy, oracle.behaviour, objective(), Oracle.token_advantages,
                     iterations=1, updates=1, learning_rate=1.0, **options)[0]  # fmt: skip
        return row["theta"] - oracle.behaviour

    random = torch.Generator().manual_seed(5)
    steps = torch.stack([step(rollout_size=64, generator=random) for _ in range(200)])
    estimator = surrogate_gradient(oracle, objective(), oracle.behaviour, oracle.token_advantages())
    expected = estimator.variance / (64 * 200)  # of the squared error, were they 200 fresh batches of 64
    assert 0.3 < float((steps.mean(0) - step()).square().sum() / expected) < 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rollout_size": 12, "minibatch_size": 5}, "minibatch_size=5: must divide rollout_size=12"),
        ({"minibatch_size": 4}, "minibatch_size=4: needs rollout_size"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        run(small_oracle(), objective(), iterations=1, updates=1, **sizes)
