"""LoRA by peft: what is trained, saved, merged, sampled with, and which policy is the reference."""

import dataclasses
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from stppo.config.composition import compose
from stppo.config.loading import load
from stppo.policy.compute import body_of
from stppo.policy.critic import Critic
from stppo.policy.frozen import freeze_below, states_below
from stppo.policy.policy import LoraSettings, load_policy, load_tokenizer, save_policy, score
from stppo.policy.weights import named_weights
from stppo.training.checkpoint import newest
from stppo.training.gradients import Passes, PolicyPass, WatchedNorm
from stppo.training.run import Run
from stppo.training.trainer import Trainer
from stppo.training.warm_start import made_for
from stppo.trajectories import Trajectories
from tests.conftest import TINY
from tests.training_runs import assert_same_metrics, interrupted, run, tables

pytestmark = pytest.mark.engines
peft = pytest.importorskip("peft", reason="peft is not installed; `make test-engines` installs it")

LORA = [
    "policy.lora={rank: 4, alpha: 8}",
    "training.iterations=3",
    "training.learning_rate=1e-2",
    "training.kl_coefficient=0.1",
]


@pytest.fixture(scope="module")
def start(barely_trained, tmp_path_factory):
    """The same weights as a warm start of the config with adapters."""
    folder = tmp_path_factory.mktemp("lora") / "start"
    shutil.copytree(barely_trained, folder)
    record = json.loads((folder / "warm_start.json").read_text())
    record["made_for"] = made_for(compose([*TINY, *LORA]))
    (folder / "warm_start.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def trainer(tiny, tmp_path, start):
    return Trainer(load(tiny(*LORA)), start)


def shake(trainer):
    """Adapters that do something, as after training."""
    with torch.no_grad():
        for weight in trainer.parameters:
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))


def test_only_adapters_are_trained_and_start_without_effect(trainer, start):
    names = [name for name, weight in trainer.policy.named_parameters() if weight.requires_grad]
    assert names and all("lora_" in name for name in names)
    assert sum(p.numel() for p in trainer.parameters) < 0.5 * sum(
        p.numel() for p in trainer.policy.parameters()
    )
    batch = trainer.batches.sample(0, 0).trajectories
    with torch.no_grad():
        plain = score(load_policy(start), batch).logprobs
        torch.testing.assert_close(score(trainer.policy, batch).logprobs, plain)
        torch.testing.assert_close(plain, batch.behaviour_logprobs, atol=1e-4, rtol=0)


def test_reference_is_the_policy_without_its_adapters(trainer, start):
    batch = trainer.batches.sample(0, 0).trajectories
    shake(trainer)
    found = trainer.models.reference_logprobs(batch, Passes(200), 1.0)
    with torch.no_grad():
        torch.testing.assert_close(found, score(load_policy(start), batch).logprobs, atol=1e-5, rtol=1e-5)
        assert (score(trainer.policy, batch).logprobs - found).abs().max() > 0.05, "they are back on"
    assert all(weight.requires_grad for weight in trainer.parameters)


def test_saved_policy_has_the_adapters_merged(trainer, tmp_path):
    shake(trainer)
    batch = trainer.batches.sample(0, 0).trajectories
    save_policy(trainer.policy, tmp_path / "policy")
    merged = load_policy(tmp_path / "policy")
    with torch.no_grad():
        torch.testing.assert_close(
            score(merged, batch).logprobs, score(trainer.policy, batch).logprobs, atol=1e-4, rtol=1e-4
        )
    assert type(merged).__name__ == "Qwen2ForCausalLM"


def test_small_changes_survive_beside_frozen_weights_of_bfloat16(tiny, tmp_path, start):
    """Far below bfloat16's resolution: what is merged and saved is base + delta in float32."""
    its_run = Run(load(tiny(*LORA, "training.precision=bfloat16")), tmp_path / "run", start, progress=False)
    trainer = its_run.trainer
    with torch.no_grad():
        for name, weight in trainer.policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=1e-5)
    kept = {name: weight.clone() for name, weight in trainer.policy.state_dict().items()}
    merged = dict(named_weights(trainer.policy))
    assert all(torch.equal(w, kept[name]) for name, w in trainer.policy.state_dict().items())
    save_policy(trainer.policy, tmp_path / "policy")
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == "float32"
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype="auto").state_dict()
    changed = 0
    for name, layer in trainer.policy.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        base, delta = layer.get_base_layer().weight, layer.get_delta_weight("default")
        assert base.dtype == torch.bfloat16 and delta.any()
        plain = name.removeprefix("base_model.model.") + ".weight"
        expected = base.float() + delta
        assert torch.equal(merged[plain], expected) and torch.equal(saved[plain], expected)
        assert (expected.bfloat16() == base).float().mean() > 0.8, "hardly anything would be left in bfloat16"
        changed += 1
    assert changed == 2 * 7 and all(weight.dtype == torch.float32 for weight in saved.values())


def test_adapters_that_are_no_plain_lora_are_refused(start):
    policy = peft.get_peft_model(
        load_policy(start), peft.LoraConfig(use_dora=True, target_modules=["q_proj"])
    )
    with pytest.raises(ValueError, match="q_proj cannot be merged"):
        dict(named_weights(policy))


def test_critic_has_adapters_of_its_own(trainer):
    names = [name for name, weight in trainer.critic.named_parameters() if weight.requires_grad]
    assert {"head.weight", "head.bias"} < set(names)
    assert all("lora_" in name for name in names if not name.startswith("head"))
    batch = trainer.batches.sample(0, 0).trajectories
    torch.nn.init.normal_(trainer.critic.head.weight)
    with torch.no_grad():
        before = trainer.critic(batch)
        shake(trainer)
        assert torch.equal(trainer.critic(batch), before), "it does not move with the policy"
    trainer.critic(batch).sum().backward()
    assert all(p.grad is None for name, p in trainer.critic.named_parameters() if name not in names)


def test_micro_batches_and_checkpointed_layers_keep_gradient_and_norm(trainer):
    batch = trainer.batches.sample(0, 0).trajectories
    shake(trainer)
    found = []
    for budget, again in ((None, False), (200, False), (200, True)):
        body_of(trainer.policy).checkpoint_layers = again
        trainer.optimizer.zero_grad()
        scored = PolicyPass(trainer.policy, batch, Passes(budget))
        loss = scored.scores.logprobs.square().mean()
        watched = WatchedNorm(scored.scores.logprobs.mean(), trainer.parameters)
        norm = scored.backward(loss, {"c": watched})["c"]
        found.append((torch.cat([p.grad.flatten() for p in trainer.parameters]), norm))
    for gradient, norm in found[1:]:
        torch.testing.assert_close(gradient, found[0][0], atol=1e-6, rtol=1e-4)
        assert norm == pytest.approx(found[0][1], rel=1e-4) and norm > 0


def test_run_with_adapters_resumes_bit_for_bit_and_saves_them_alone(tmp_path, tiny, start):
    record = run(tiny(*LORA), tmp_path / "whole", start)
    assert record["status"] == "completed"
    updates = tables(tmp_path / "whole")[0]
    assert updates["kl_reference"].iloc[0] == pytest.approx(0, abs=1e-5)
    assert updates["kl_reference"].iloc[-1] > 1e-3 and (updates["update_norm"] > 0).all()
    interrupted(tiny(*LORA), tmp_path / "cut", start)
    saved = newest(tmp_path / "cut" / "checkpoint") / "policy.safetensors"
    assert saved.stat().st_size < 0.6 * (start / "model.safetensors").stat().st_size
    run(tiny(*LORA), tmp_path / "cut", start)
    assert_same_metrics(tmp_path / "whole", tmp_path / "cut")


def test_frozen_weights_are_bfloat16_beside_float32_adapters(tiny, tmp_path, start):
    config = tiny(*LORA, "training.precision=bfloat16", "training.micro_batch_tokens=400")
    its_run = Run(load(config), tmp_path, start, progress=False)
    trainer = its_run.trainer
    assert {p.dtype for p in trainer.parameters} == {torch.float32}
    frozen = [
        p for model in (trainer.policy, trainer.critic) for p in model.parameters() if not p.requires_grad
    ]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert its_run.train()["status"] == "completed"
    updates = tables(tmp_path)[0]
    assert updates["kl_reference"].iloc[0] == pytest.approx(0, abs=1e-4), "one model, one precision"


def test_rotary_frequencies_are_not_rounded_beside_weights_in_bfloat16(tiny, start):
    """They are a buffer; rounded, they turn far tokens by wrong angles, and saved weights are another policy."""
    trainer = Trainer(load(tiny(*LORA, "training.precision=bfloat16")), start)
    expected = body_of(load_policy(start)).rotary_emb.inv_freq
    for body in (body_of(trainer.policy), trainer.critic.body):
        found = body_of(body).rotary_emb.inv_freq
        assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_adapters_are_put_on_the_upper_layers_alone(start):
    """Beside policy.trainable_layers: one pass through the frozen layers serves policy, critic and reference."""
    from stppo.policy.lora import with_lora

    policy = load_policy(start).double()
    whole = load_policy(start).double()
    freeze_below(policy, 1)
    critic = Critic(policy, LoraSettings(rank=4)).double()
    policy = with_lora(policy, LoraSettings(rank=4)).double()
    for model in (policy, critic.body):
        names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        assert names and all("lora_" in name for name in names)
    assert all(".layers.1." in n for n, p in policy.named_parameters() if p.requires_grad)
    assert sum(p.numel() for p in critic.body.parameters()) < 0.6 * body_of(whole).num_parameters()
    tokens = torch.randint(len(load_tokenizer(start)), (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 20, dtype=torch.bool)
    mask[:, 5:9] = mask[:, 14:19] = True
    zeros, n = torch.zeros(3, 20), torch.arange(3)
    batch = Trajectories(tokens, torch.full((3,), 20), mask, zeros, zeros, n, n)
    kept = dataclasses.replace(batch, below=states_below(body_of(policy), batch))
    with torch.no_grad():
        expected = score(whole, batch).logprobs
        torch.testing.assert_close(score(policy, kept).logprobs, expected, rtol=0, atol=1e-10)
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
        found = [score(policy, this).logprobs for this in (batch, kept)]
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)
        assert (found[0] - expected).abs().max() > 1e-3
        merged = policy.merge_and_unload()
        del body_of(merged).frozen_layers
        torch.testing.assert_close(score(merged, batch).logprobs, found[0], rtol=0, atol=1e-9)
    torch.nn.init.normal_(critic.head.weight)
    critic(kept).sum().backward()
