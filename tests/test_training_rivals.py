"""What related methods ask of the trainer: kept trajectories, one turn at a time, the step's length, an early end."""

import dataclasses

import numpy as np
import pytest
import torch

from stppo.objectives import Objective
from stppo.training.batches import Batches
from stppo.training.updates import CriticUpdates, PolicyUpdates
from tests.training_runs import assert_same_metrics, interrupted, run, tables

SHORT = ["training.iterations=2", "training.checkpoint_every=1", "training.learning_rate=0.01"]


@pytest.fixture
def steps(monkeypatch):
    """Every minibatch that the policy is trained on: (batch, advantages, weights)."""
    seen, step = [], PolicyUpdates.step

    def watched(self, row, batch, advantages, reference, weights, *proximal):
        seen.append((batch, advantages[:, : batch.tokens.shape[1]], weights))
        step(self, row, batch, advantages, reference, weights, *proximal)

    monkeypatch.setattr(PolicyUpdates, "step", watched)
    return seen


@pytest.mark.parametrize("algorithm", ["loop_token", "starpo_s"])
def test_only_kept_trajectories_are_trained_on(tiny, barely_trained, tmp_path, steps, algorithm):
    group = "algorithm.objective.credit.group_size=4"
    run(tiny(f"algorithm={algorithm}", group, *SHORT), tmp_path, barely_trained)
    updates = tables(tmp_path)[0]
    sizes = [len(batch) for batch, _, _ in steps]
    assert len(updates) == len(sizes) == 2 * 2 * 2, "as many updates as minibatches, however few are left"
    assert min(sizes) < 16 // 2, "some groups agree, so some trajectories are dropped"
    if algorithm == "loop_token":
        short = [batch for batch in steps if len(batch[0]) < 8]
        assert all((a.abs() * b.agent_mask).amax(1).min() >= 0.01 for b, a, _ in short)


def test_seeupo_steps_on_the_last_turns_first_and_resumes(tiny, barely_trained, tmp_path, steps):
    config = tiny("algorithm=seeupo", *SHORT)
    run(config, tmp_path / "whole", barely_trained)
    turns = []
    for batch, _, weights in steps:
        on = (weights[:, : batch.tokens.shape[1]] > 0) & batch.agent_mask
        (turn,) = batch.turn_ids[on].unique().tolist()
        assert torch.equal(on, batch.turn_ids == turn)
        turns.append(turn)
    updates = tables(tmp_path / "whole")[0]
    epochs = updates.groupby(["iteration", "epoch"])
    assert len(epochs) == 4 and not updates.duplicated(["iteration", "epoch", "minibatch"]).any()
    for _, rows in epochs:
        its = [turns[int(update) - 1] for update in rows["update"]]
        assert its == sorted(its, reverse=True) and its[-1] == 0 and len(its) > 2
    interrupted(config, tmp_path / "resumed", barely_trained, after=1)
    run(config, tmp_path / "resumed", barely_trained)
    assert_same_metrics(tmp_path / "whole", tmp_path / "resumed")


def test_a_divisor_of_the_step_divides_the_learning_rate_of_its_update_alone(tiny, barely_trained, tmp_path):
    """Under SGD a step is rate x gradient; the gradient's own norm is recorded undivided."""
    run(tiny("algorithm=vcpo", "training.optimizer=sgd", *SHORT), tmp_path, barely_trained)
    updates = tables(tmp_path)[0]
    divisor = updates["effective_sample_size"] ** -0.5
    np.testing.assert_allclose(updates["stabilizer_divisor"], divisor, rtol=1e-9)
    assert divisor.max() > 1.01
    step = updates["learning_rate"] * updates["gradient_norm"] / divisor
    np.testing.assert_allclose(updates["update_norm"], step, rtol=1e-3, atol=1e-8)
    assert (updates["learning_rate"] == 0.01).all()


def test_a_divisor_over_its_running_median_goes_on_where_a_run_resumes(tiny, barely_trained, tmp_path):
    """It stays near 1, it depends on the updates up to now alone, and a resumed run has the same."""
    options = ("c0=0.001", "divides=step", "over_median=true")
    own = ("" if option.startswith("c0") else "+" for option in options)
    changed = [f"{plus}algorithm.objective.stabilizer.{o}" for plus, o in zip(own, options, strict=True)]
    config = tiny("algorithm=st_ppo", *changed, *SHORT)
    run(config, tmp_path / "whole", barely_trained)
    updates = tables(tmp_path / "whole")[0]
    plain = (updates["clipping_bias_norm"] / 0.001).clip(lower=1).to_numpy()
    assert len(set(plain)) > 2
    expected = [plain[i] / np.median(plain[: i + 1]) for i in range(len(plain))]
    np.testing.assert_allclose(updates["stabilizer_divisor"], expected, rtol=1e-12)
    interrupted(config, tmp_path / "resumed", barely_trained, after=1)
    run(config, tmp_path / "resumed", barely_trained)
    assert_same_metrics(tmp_path / "whole", tmp_path / "resumed")


def test_kl_stop_is_the_trainers_own(tiny, barely_trained, tmp_path):
    run(tiny("algorithm=kl_stop", "algorithm.objective.stabilizer.target_kl=0.01", *SHORT), tmp_path / "a", barely_trained)  # fmt: skip
    run(tiny("algorithm=token_ppo", "training.target_kl=0.01", *SHORT), tmp_path / "b", barely_trained)
    assert len(tables(tmp_path / "a")[0]) < 8, "some updates are left out"
    assert_same_metrics(tmp_path / "a", tmp_path / "b")


def test_gradient_clip_is_the_trainers_own(tiny, barely_trained, tmp_path):
    run(tiny("algorithm=grad_clip", "algorithm.objective.stabilizer.max_norm=0.1", *SHORT), tmp_path / "a", barely_trained)  # fmt: skip
    run(tiny("algorithm=token_ppo", "training.max_grad_norm=0.1", *SHORT), tmp_path / "b", barely_trained)
    ours, theirs = (tables(tmp_path / name)[0] for name in "ab")
    assert ours["stabilizer_divisor"].max() > 1
    # PyTorch divides by the norm plus 1e-6; Adam hardly notices.
    for column in ("gradient_norm", "update_norm", "clip_fraction"):
        np.testing.assert_allclose(ours[column].iloc[:2], theirs[column].iloc[:2], rtol=1e-3)


@pytest.fixture
def far_off(monkeypatch):
    """Batches whose trajectories the policy has become so much likelier to sample that float32 has no number for it."""
    collect = Batches.collect

    def changed(self, update):
        rollout = collect(self, update)
        batch = rollout.trajectories
        behaviour = torch.where(batch.agent_mask, -60.0, batch.behaviour_logprobs)
        return dataclasses.replace(
            rollout, trajectories=dataclasses.replace(batch, behaviour_logprobs=behaviour)
        )

    monkeypatch.setattr(Batches, "collect", changed)


@pytest.mark.parametrize("algorithm", ["topr", "vcpo", "vespo", "successes_only"])
def test_a_clipping_bias_beyond_float32_does_not_stop_a_run_that_only_watches_it(
    tiny, barely_trained, tmp_path, far_off, algorithm
):
    record = run(tiny(f"algorithm={algorithm}", *SHORT), tmp_path, barely_trained)
    assert record["status"] == "completed" and record["iterations"] == 2
    updates = tables(tmp_path)[0]
    assert np.isfinite(updates[["gradient_norm", "update_norm", "stabilizer_divisor"]]).all(axis=None)
    assert not np.isfinite(updates["clipping_bias_norm_logprob"]).any(), "recorded as it is"


def test_a_clipping_bias_beyond_float32_stops_a_run_that_divides_by_it(
    tiny, barely_trained, tmp_path, monkeypatch
):
    column = "clipping_bias_norm_logprob"
    monkeypatch.setattr(
        "stppo.training.updates.estimated_bias_norms", lambda *_: {column: np.inf, "clipping_bias_norm_logit": 0.0}
    )  # fmt: skip
    record = run(
        tiny("algorithm=st_ppo", "algorithm.objective.stabilizer.estimator=logprob", *SHORT),
        tmp_path,
        barely_trained,
    )
    assert record["status"] == "non_finite" and "stabilizer divisor" in record["non_finite"]["what"]
    assert list(tables(tmp_path)[0][column]) == [np.inf], "what was measured is kept"


@pytest.mark.parametrize("algorithm", ["p3o", "vaco", "gigpo", "minpro"])
def test_methods_of_2026_train_on_stale_batches(tiny, barely_trained, tmp_path, algorithm):
    stale = ["training.staleness_iterations=1", "training.epochs=2", "training.learning_rate=0.002"]
    record = run(tiny(f"algorithm={algorithm}", *SHORT[:2], *stale), tmp_path, barely_trained)
    assert record["status"] == "completed" and record["iterations"] == 2
    updates = tables(tmp_path)[0]
    assert np.isfinite(updates[["gradient_norm", "update_norm"]]).all(axis=None)
    assert updates["update_norm"].max() > 0


@pytest.mark.parametrize("algorithm", ["decoupled_ppo", "a3po"])
def test_the_proximal_policy_is_that_before_the_iterations_updates(
    tiny, barely_trained, tmp_path, monkeypatch, algorithm
):
    """Scored: its log-probs stay the same over an iteration, and are the policy's own at the first update.
    Interpolated: by hand, from the updates made."""
    seen, call = [], Objective.__call__

    def watched(self, logprobs, batch, advantages, weights=None, entropy=None, proximal=None):
        seen.append((logprobs.detach().clone(), batch, proximal))
        return call(self, logprobs, batch, advantages, weights, entropy, proximal)

    monkeypatch.setattr(Objective, "__call__", watched)
    stale = ["training.staleness_iterations=1", "training.iterations=3", "training.epochs=2"]
    config = tiny(f"algorithm={algorithm}", *SHORT[1:], *stale, "training.minibatches=1")
    run(config, tmp_path / "whole", barely_trained)
    assert len(seen) == 6
    for done, (logprobs, batch, proximal) in enumerate(seen):
        on, begun = batch.agent_mask, done - done % 2
        old, sampled = batch.behaviour_logprobs, batch.policy_updates.double()
        if algorithm == "a3po":
            share = torch.where(sampled < done, (begun - sampled) / (done - sampled), 0.0)[:, None]
            torch.testing.assert_close(proximal[on], (old + share * (logprobs - old)).float()[on])
        elif done == begun:
            torch.testing.assert_close(proximal[on], logprobs[on])
            first = (proximal * on).sum(1).sort().values
        else:
            again = (proximal * on).sum(1).sort().values  # the same trajectories in another order
            torch.testing.assert_close(again, first, rtol=0, atol=1e-4)
            assert (logprobs - proximal)[on].abs().max() > 1e-4, "the policy has moved on"
    if algorithm == "a3po":
        monkeypatch.undo()
        interrupted(config, tmp_path / "resumed", barely_trained, after=1)
        run(config, tmp_path / "resumed", barely_trained)
        assert_same_metrics(tmp_path / "whole", tmp_path / "resumed")


def test_saos_critic_goes_over_a_batch_twice(tiny, barely_trained, tmp_path, monkeypatch):
    steps, backward = [], CriticUpdates._backward
    monkeypatch.setattr(CriticUpdates, "_backward", lambda self, *a: steps.append(1) or backward(self, *a))
    counts = {}
    for name in ("token_ppo", "sao"):
        steps.clear()
        run(tiny(f"algorithm={name}", *SHORT), tmp_path / name, barely_trained)
        counts[name] = len(steps)
    assert counts["sao"] == 2 * counts["token_ppo"] > 0
