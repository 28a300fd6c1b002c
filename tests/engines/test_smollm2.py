"""SmolLM2-135M-Instruct as `stppo fetch smollm2` leaves it: what it answers, and that its layers train."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stppo.config.composition import compose
from stppo.config.loading import load
from stppo.policy.known_models import KNOWN
from stppo.policy.policy import load_policy, load_tokenizer
from stppo.pretrained.fetch import answer
from stppo.record.schema import COMPLETED, EVALUATION_COLUMNS
from stppo.rollout.rollout import RolloutBuffer
from stppo.training.warm_start import warm_start
from tests.test_world_single_hop import made_up
from tests.training_runs import run, tables

pytestmark = pytest.mark.engines
ASKED = 4  # questions of an evaluation


def test_it_answers_what_was_asked_when_it_was_fetched_and_stops(smollm2):
    policy, tokenizer = load_policy(smollm2), load_tokenizer(smollm2)
    assert policy.num_parameters() == 134_515_008 and tokenizer.eos_token == "<|im_end|>"
    for question, expected in KNOWN["smollm2"].answers.items():
        assert expected in answer(policy, tokenizer, question)
    assert (
        answer(policy, tokenizer, "What is the capital of France?", 60) == "The capital of France is Paris."
    )


@pytest.fixture
def config(first_layers, tmp_path):
    """The preset with two layers of the model, of which the upper one is trained, and questions about made-up things."""
    records = tmp_path / "musique.jsonl"
    records.write_text("".join(json.dumps(record) + "\n" for record in made_up(30, 40)))
    return compose(
        [
            "preset=smollm",
            f"policy.pretrained={first_layers(2)}",
            "policy.trainable_layers=1",
            "world.benchmark=musique_single_hop",
            "world.train=musique_single_hop",
            f"world.records={records}",
            "world.cache_dir=null",
            "world.turn_budget=1",
            "world.max_turn_tokens=8",
            "warm_start.demonstrations=16",
            "warm_start.max_steps=1",
            "warm_start.evaluate_every=1",
            "warm_start.first_questions=null",
            f"warm_start.evaluate_questions={ASKED}",
            f"warm_start.final_samples={ASKED}",
            "warm_start.target_success=0",
            "training.iterations=1",
            "training.trajectories_per_iteration=4",
            "training.epochs=1",
            "training.minibatches=1",
            "training.staleness_iterations=0",
            "evaluation.every=1",
            "evaluation.greedy_every=1",
            f"evaluation.questions={ASKED}",
        ]
    )


@pytest.fixture
def rewarded(monkeypatch):
    """The reward is the share of sampled tokens with an even id: two layers answer nothing right, and no reward, no update."""
    finish = RolloutBuffer.finish

    def with_reward(buffer, *rest):
        even = (buffer.tokens % 2 == 0) & buffer.agent_mask
        shares = even.sum(1) / buffer.agent_mask.sum(1)
        for episode, share in zip(buffer.episodes, shares.tolist(), strict=True):
            episode.reward = share
        return finish(buffer, *rest)

    monkeypatch.setattr(RolloutBuffer, "finish", with_reward)


def weights(folder):
    return load_file(folder / "model.safetensors")


def changed(before, after):
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_a_step_of_warm_start_and_an_iteration_train_the_upper_layer_alone(tmp_path, config, rewarded):
    start, folder = tmp_path / "start", tmp_path / "run"
    record = warm_start(load(config), start, progress=False)
    cut, begun = weights(Path(config["policy"]["pretrained"])), weights(start)
    upper = {name for name in cut if ".layers.1." in name} | {"model.norm.weight"}
    assert record["steps"] == 1 and len(upper) == 10 and changed(cut, begun) == upper

    record = run(config, folder, start)
    assert record["status"] == COMPLETED and record["updates"] == 1
    assert changed(begun, weights(folder / "policy")) == upper
    assert record["policy_parameters"] == sum(cut[name].numel() for name in upper)
    updates, evaluations = tables(folder)
    assert updates["update_norm"].item() > 0 and updates["tokens_rollout"].item() >= 4
    assert (evaluations["n_questions"] == ASKED).all()
    asked = evaluations[["iteration", "update", "temperature"]].itertuples(index=False, name=None)
    assert sorted(asked) == [(0, 0, 0.0), (0, 0, 1.0), (1, 1, 0.0), (1, 1, 1.0)]
    assert evaluations[list(EVALUATION_COLUMNS)].notna().all(axis=None)
