"""Ascent on sampled batches: a batch's surrogate is the production loss's, and minibatches share out a roll-out."""

import pytest
import torch

from stppo.oracle import Oracle, ascend, expected_surrogate, surrogate_gradient
from stppo.oracle.ascent import _batches
from tests.oracle_cases import STABILIZERS, all_terms, close, moved, objective, small_oracle, wrong_critic


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


def test_minibatches_share_out_the_rollout_in_each_pass():
    oracle = small_oracle()
    random = torch.Generator().manual_seed(4)
    batches = _batches(oracle, 12, 4, random)
    passes = [torch.stack([next(batches) for _ in range(3)]) for _ in range(2)]
    rows = oracle.sample(12, torch.Generator().manual_seed(4))
    rollout = rows.bincount(minlength=len(oracle.tree)).double() / 12
    for minibatches in passes:
        close(minibatches.mean(0), rollout)
    assert not torch.equal(*passes)  # shuffled anew


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


def test_minibatches_must_divide_the_rollout():
    oracle = small_oracle()
    with pytest.raises(ValueError, match="minibatch_size=5: must divide rollout_size=12"):
        ascend(oracle.tree, oracle.policy, oracle.behaviour, objective(), Oracle.token_advantages, iterations=1,
               updates=1, learning_rate=1.0, rollout_size=12, minibatch_size=5)  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rollout_size": 0}, "rollout_size=0: must be an integer of at least 1"),
        ({"rollout_size": 4, "minibatch_size": 0}, "minibatch_size=0: must be an integer of at least 1"),
        ({"minibatch_size": 4}, "minibatch_size=4: needs rollout_size"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(sizes, message):
    oracle = small_oracle()
    with pytest.raises(ValueError, match=message):
        ascend(oracle.tree, oracle.policy, oracle.behaviour, objective(), Oracle.token_advantages, iterations=1,
               updates=1, learning_rate=1.0, **sizes)  # fmt: skip
