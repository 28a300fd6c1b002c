"""The warm start of a pretrained model on real questions: what is imitated, what is trained, what is measured on the way.

The model is a random one of two layers, the records are made up, so nothing here shows that anything is learned but loss.
"""

import json
import random

import pytest
import torch

from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.policy.compute import body_of
from stppo.policy.policy import load_policy, load_tokenizer
from stppo.pretrained.tiny_model import make_tiny_model
from stppo.training import warm_start as module
from stppo.training.warm_start import warm_start
from stppo.world.encoding import DialogueEncoder
from stppo.world.rewards import score
from stppo.world.scripted import DemonstrationNoise, play
from tests.test_world_single_hop import made_up


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    words = (
        "Look it up: <search> query </search> <answer> short answer </answer> <information> Title name red"
    )
    make_tiny_model(folder, [words] * 20, vocabulary=400)
    return folder


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    file = tmp_path_factory.mktemp("records") / "musique.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in made_up(60, 90)))
    return file


@pytest.fixture
def small(model, records):
    """Compose the preset, shrunk to seconds, with further overrides."""
    shrunk = [
        "preset=smollm",
        f"policy.pretrained={model}",
        "policy.trainable_layers=null",  # of two
        "warm_start.trained_weights=all",
        "world.benchmark=musique_single_hop",
        "world.train=musique_single_hop",
        f"world.records={records}",
        "world.cache_dir=null",
        "warm_start.demonstrations=40",
        "warm_start.max_steps=6",
        "warm_start.evaluate_every=3",
        "warm_start.first_questions=4",
        "warm_start.evaluate_questions=8",
        "warm_start.final_samples=8",
        "warm_start.learning_rate=1e-2",
        "warm_start.target_success=0",
        "evaluation.questions=8",
        "rollout.max_tokens=700",
        "world.max_start_tokens=400",
        "world.max_observation_tokens=120",
    ]
    return lambda *overrides: compose([*shrunk, *overrides])


def test_loss_falls_and_format_and_success_are_reported_on_the_way(tmp_path, small, monkeypatch):
    measured = iter(
        [0.0, 0.1, 0.6, 0.6]
    )  # success: of the first four, then (near the target) of four and of all eight
    real, asked = module.evaluate, []

    def evaluate(sampler, policy, questions, greedy, seed):
        row, rollout = real(sampler, policy, questions, greedy, seed)
        asked.append(len(questions))
        return row | {"success": next(measured, row["success"])}, rollout

    monkeypatch.setattr(module, "evaluate", evaluate)
    config = small("warm_start.target_success=0.6", "warm_start.max_steps=9")
    record = warm_start(load(config), tmp_path, progress=False)
    history = record["history"]
    assert asked == [4, 4, 4, 8, 8, 8], "few far from the target; then all; S0 sampled and greedy"
    assert [row["step"] for row in history] == [3, 6, 9] and record["steps"] == 9
    assert [row["n_questions"] for row in history] == [4, 4, 8]
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    assert all({"success", "f1", "valid_format_rate"} <= row.keys() for row in history)
    assert load_policy(tmp_path).num_parameters() == record["parameters"]


def test_few_questions_alone_never_end_it(tmp_path, small, monkeypatch):
    real = module.evaluate

    def evaluate(sampler, policy, questions, greedy, seed):
        row, rollout = real(sampler, policy, questions, greedy, seed)
        return row | {"success": float(len(questions) == 4)}, rollout  # lucky on the first four, never on all

    monkeypatch.setattr(module, "evaluate", evaluate)
    with pytest.raises(ValueError, match="sampled success 0.000 after warm_start.max_steps=6 is below"):
        warm_start(load(small("warm_start.target_success=0.5")), tmp_path, progress=False)


def demonstrations(config, noise):
    world = build(config["world"], "world")
    encoder = DialogueEncoder(world.environment.protocol, load_tokenizer(config["policy"]["pretrained"]))
    return play(world, world.questions("train"), random.Random(0), noise), encoder


def test_only_demonstrations_that_succeed_and_fit_are_imitated(small, caplog):
    config = small()
    run = load(config).settings
    episodes, encoder = demonstrations(config, DemonstrationNoise(0, 0, 0.3))
    right = [e for e in episodes if score(e.question, e.answer) == 1]
    assert 0 < len(right) < len(episodes)
    with caplog.at_level("INFO"):
        data = module._successes(episodes, encoder, run)
    assert (
        len(data.lengths) == len(right) and f"{len(right)} of {len(episodes)} demonstrations" in caplog.text
    )
    for row, episode in enumerate(right):
        written = encoder.tokenizer.decode(data.tokens[row][data.agent_mask[row]])
        assert written.endswith(f"<answer> {episode.answer} </answer>")
    limit = int(data.lengths.sort().values[len(right) // 2])
    short = module._successes(episodes, encoder, load(small(f"rollout.max_tokens={limit}")).settings)
    assert 0 < len(short.lengths) < len(right) and int(short.lengths.max()) <= limit
    with pytest.raises(
        ValueError, match=r"shortest demonstration has \d+ tokens, above rollout.max_tokens=20: raise"
    ):
        module._successes(episodes, encoder, load(small("rollout.max_tokens=20")).settings)
    with pytest.raises(
        ValueError, match=r"none of \d+ demonstrations succeeded.*warm_start.noise.*stppo play"
    ):
        module._successes([e for e in episodes if e not in right], encoder, run)


@pytest.mark.parametrize("steps", [(), ("warm_start.max_steps=0",)], ids=["trained", "as it is"])
def test_a_training_question_that_is_too_long_stops_before_anything_is_trained(
    tmp_path, small, monkeypatch, steps
):
    monkeypatch.setattr(module, "_supervised_step", None)
    monkeypatch.setattr(module, "evaluate", None)
    monkeypatch.setattr(module, "_successes", lambda *_: object())
    config = small("world.max_start_tokens=30", *steps)
    with pytest.raises(
        ValueError, match="exceeds max_start_tokens=30: raise it, or leave that question out"
    ) as error:
        warm_start(load(config), tmp_path, progress=False)
    assert "\n" not in str(error.value)
    config = small("rollout.max_tokens=60", *steps)
    with pytest.raises(ValueError, match="rollout.max_tokens=60 leaves no room for a turn after the"):
        warm_start(load(config), tmp_path / "start", progress=False)


def changed(before, after):
    old, new = load_policy(before).state_dict(), load_policy(after).state_dict()
    return {name for name in old if not torch.equal(old[name], new[name])}


def test_all_weights_are_trained_in_micro_batches_as_at_once(tmp_path, small, model):
    for budget in ("null", "300"):
        warm_start(load(small(f"training.micro_batch_tokens={budget}")), tmp_path / budget, progress=False)
    assert changed(model, tmp_path / "null") == set(load_policy(model).state_dict())
    one, cut = (load_policy(tmp_path / budget).state_dict() for budget in ("null", "300"))
    for name in one:
        torch.testing.assert_close(one[name], cut[name], atol=5e-3, rtol=0)


def test_it_is_trained_in_the_precision_of_the_training(tmp_path, small, monkeypatch):
    step, computed = module._supervised_step, []

    def watched(policy, *others):
        computed.append(body_of(policy).autocast_dtype)
        return step(policy, *others)

    monkeypatch.setattr(module, "_supervised_step", watched)
    brief = ("warm_start.max_steps=1", "warm_start.evaluate_every=1")
    warm_start(load(small("training.precision=bfloat16", *brief)), tmp_path, progress=False)
    assert computed == [torch.bfloat16]


def test_adapters_alone_are_trained_and_merged_into_what_is_saved(tmp_path, small, model):
    pytest.importorskip("peft", reason="peft is not installed; `make test-engines` installs it")
    lora = ("policy.lora={rank: 4, alpha: 8}", "warm_start.trained_weights=policy")
    warm_start(load(small(*lora)), tmp_path, progress=False)
    found = changed(model, tmp_path)
    assert found and all("_proj.weight" in name for name in found)


def test_top_layers_alone_are_trained(tmp_path, small, model):
    top = ("policy.trainable_layers=1", "warm_start.trained_weights=policy")
    warm_start(load(small(*top)), tmp_path, progress=False)
    found = changed(model, tmp_path)
    assert found and all(".layers.1." in name or name == "model.norm.weight" for name in found)
