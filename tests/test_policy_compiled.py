"""Compiled code against eager PyTorch: scores, gradients, values, roll-outs, 20 updates; and falling back to eager."""

import copy
import gc
import json
import logging

import pytest
import torch
from torch.autograd.function import BackwardCFunction
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from stppo.config.loading import build, load
from stppo.policy.compiled import choose_kernels
from stppo.policy.compiler import compiled_library
from stppo.policy.critic import Critic
from stppo.policy.policy import build_policy, score
from stppo.training.trainer import Trainer
from tests.conftest import strong_policy
from tests.training_runs import run

POLICIES = {
    "qwen2": ["policy=tiny"],
    "llama": ["policy=tiny_llama"],
    "gpt2": ["policy=tiny_gpt2"],
    "grouped keys": ["policy=tiny_llama", "policy.kv_heads=2"],
    "heads of 8": ["policy=tiny", "policy.hidden_size=32", "policy.intermediate_size=48"],
    "heads of 32, one layer": ["policy=tiny", "policy.heads=2", "policy.kv_heads=2", "policy.layers=1"],
}


@pytest.fixture(scope="module", params=POLICIES)
def played(request):
    """(policy, compiled copy, batch, sampler)"""
    policy, sampler, questions = strong_policy(*POLICIES[request.param])
    batch = sampler.collect(policy, questions, torch.Generator().manual_seed(1)).trajectories
    compiled = copy.deepcopy(policy)
    if choose_kernels(compiled, "auto") == "eager":
        pytest.skip("no C++ compiler here")
    return policy, compiled, batch, (sampler, questions)


def gradients(model, scalar):
    model.zero_grad()
    scalar.backward()
    return {name: weight.grad.double().clone() for name, weight in model.named_parameters()}


def assert_close_to(exact: dict, found: dict):
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() <= 2e-5 * gradient.norm(), name


def test_scores_and_all_gradients_are_those_of_float64(played):
    policy, compiled, batch, _ = played
    exact = copy.deepcopy(policy).double()
    generator = torch.Generator().manual_seed(2)
    of_logprobs, of_entropy = torch.randn(2, *batch.tokens.shape, generator=generator)
    found = {}
    for model in (exact, compiled):
        scores = score(model, batch, temperature=0.7, entropy_gradient=True)
        scalar = (of_logprobs * scores.logprobs).sum() + (of_entropy * scores.entropy).sum()
        found[model] = scores, gradients(model, scalar)
    for name in ("logprobs", "entropy", "squared_prob_sum"):
        left, right = (getattr(found[model][0], name) for model in (exact, compiled))
        torch.testing.assert_close(right.double(), left, atol=1e-5, rtol=1e-5)
    assert_close_to(found[exact][1], found[compiled][1])


def test_gradient_of_a_few_tokens_and_of_a_second_scalar(played):
    policy, compiled, batch, _ = played
    exact = copy.deepcopy(policy).double()
    found = {}
    for model in (exact, compiled):
        logprobs = score(model, batch).logprobs
        row = int(batch.n_turns.argmax())
        first = logprobs[row][batch.agent_mask[row]][1]  # no gradient behind it, nor in other rows
        parts = torch.autograd.grad(first, list(model.parameters()), retain_graph=True)
        of_first = dict(zip(dict(model.named_parameters()), (p.double() for p in parts), strict=True))
        found[model] = of_first, gradients(model, logprobs.sum())
    for left, right in zip(found[exact], found[compiled], strict=True):
        assert_close_to(left, right)


def test_a_pass_gives_its_memory_back_at_once(played):
    _, compiled, batch, _ = played
    gc.collect()
    gc.disable()  # a cycle would hold megabytes until Python looks for cycles
    try:
        score(compiled, batch).logprobs.sum().backward()
        held = [found for found in gc.get_objects() if isinstance(found, BackwardCFunction)]
    finally:
        gc.enable()
    compiled.zero_grad()
    assert held == []


def test_critic_values_and_gradients(played):
    policy, compiled, batch, _ = played
    torch.manual_seed(3)
    found = []
    head = torch.randn(1, policy.config.hidden_size)
    for model in (copy.deepcopy(policy).double(), compiled):
        critic = Critic(model)
        critic.head.to(next(model.parameters()).dtype).weight.data.copy_(head)
        values = critic(batch)
        found.append((values.detach().double(), gradients(critic, values.square().sum())))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-4, rtol=1e-4)
    assert_close_to(found[0][1], found[1][1])


def test_roll_outs_take_the_same_turns_and_record_their_logprobs(played):
    policy, compiled, _, (sampler, questions) = played
    left, right = (
        sampler.collect(model, questions, torch.Generator().manual_seed(4)) for model in (policy, compiled)
    )
    same = sum(a.turns == b.turns for a, b in zip(left.episodes, right.episodes, strict=True))
    assert same >= len(questions) - 2  # a draw at an edge may fall on its other side
    with torch.no_grad():
        again = score(policy, right.trajectories).logprobs
    torch.testing.assert_close(right.trajectories.behaviour_logprobs, again, atol=1e-4, rtol=0)


def test_not_a_number_stays_visible(played):
    _, compiled, batch, _ = played
    broken = copy.deepcopy(compiled)
    with torch.no_grad():
        list(broken.parameters())[-1].view(-1)[0] = float("nan")
        assert score(broken, batch).logprobs[batch.agent_mask].isnan().all()


def test_twenty_updates_agree_with_eager(tmp_path, tiny, barely_trained):
    config = tiny("algorithm=st_ppo", "training.learning_rate=1e-3", "training.epochs=10")
    trainers = [
        Trainer(load(config | {"training": config["training"] | {"kernels": kernels}}), barely_trained)
        for kernels in ("eager", "auto")
    ]
    if trainers[1].models.kernels == "eager":
        pytest.skip("no C++ compiler here")
    batch = trainers[0].batches.sample(0, 0)
    for trainer in trainers:
        trainer.queue.append(copy.copy(batch))
        trainer.generator.manual_seed(5)
        trainer.fill_queue = lambda: None
        trainer._evaluation_is_due = lambda: False
        trainer.iterate()
    eager, compiled = (trainer.update_rows for trainer in trainers)
    assert len(eager) == len(compiled) == 20
    assert any(row["clipping_bias_norm"] > 0 for row in eager)
    for column in ("gradient_norm", "clipping_bias_norm", "entropy", "update_norm"):
        left, right = (torch.tensor([row[column] for row in rows]) for rows in (eager, compiled))
        torch.testing.assert_close(right, left, rtol=1e-3, atol=1e-6)
    with torch.no_grad():
        left, right = (score(t.policy, batch.trajectories).logprobs for t in trainers)
    assert (left - batch.trajectories.behaviour_logprobs).abs().max() > 0.1, "the policy has moved"
    torch.testing.assert_close(right, left, atol=2e-4, rtol=1e-3)


# ---- falling back ---------------------------------------------------------------------------------


@pytest.fixture
def warned(caplog, monkeypatch, tmp_path):
    """Compiles anew, in a folder of its own; returns what was logged."""
    compiled_library.cache_clear()
    monkeypatch.setenv("STPPO_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.WARNING, "stppo")
    yield caplog
    compiled_library.cache_clear()


@pytest.fixture
def policy(tiny):
    config = tiny()
    torch.manual_seed(0)
    return build_policy(load(config).settings.policy, build(config["world"], "world").tokenizer)


FALLS_BACK = {  # what is set, what the warning names
    "no compiler": ({"PATH": "", "CXX": ""}, "there is no C++ compiler; install g++"),
    "one that fails": ({"CXX": "false"}, "set CXX"),
    "one that is not there": ({"CXX": "/nowhere/g++"}, "/nowhere/g++"),
    "a cache that cannot be written": ({"STPPO_CACHE_DIR": __file__}, "set STPPO_CACHE_DIR"),
}


@pytest.mark.parametrize("way", FALLS_BACK)
def test_without_compiled_code_it_is_eager_and_one_warning(policy, warned, monkeypatch, way):
    variables, named = FALLS_BACK[way]
    for name, value in variables.items():
        monkeypatch.setenv(name, value) if value or name == "PATH" else monkeypatch.delenv(
            name, raising=False
        )
    assert choose_kernels(policy, "auto") == "eager"
    assert len(warned.messages) == 1 and named in warned.messages[0]


def test_library_that_is_damaged(policy, warned, tmp_path):
    if choose_kernels(policy, "auto") == "eager":
        pytest.skip("no C++ compiler here")
    (built,) = (tmp_path / "cache").glob("*.so")
    copied = tmp_path / "other"
    copied.mkdir()
    (copied / built.name).write_bytes(b"damaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STPPO_CACHE_DIR", str(copied))
        compiled_library.cache_clear()
        assert choose_kernels(policy, "auto") == "eager"
    assert len(warned.messages) == 1 and str(copied) in warned.messages[0]


def test_other_families_and_widths(policy, warned):
    shape = GPTNeoXConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    assert choose_kernels(GPTNeoXForCausalLM(shape), "auto") == "eager"
    assert len(warned.messages) == 1 and "GPTNeoXModel is none of" in warned.messages[0]
    policy.config.hidden_act = "gelu"
    assert choose_kernels(policy, "auto") == "eager"
    assert len(warned.messages) == 2 and "unusual" in warned.messages[1]


def test_run_without_a_compiler_is_the_eager_run(tmp_path, tiny, barely_trained, warned, monkeypatch):
    short = ("training.iterations=1", "training.staleness_iterations=0")
    run(tiny(*short, "training.kernels=eager"), tmp_path / "eager", barely_trained)
    monkeypatch.setenv("CXX", "false")
    run(tiny(*short), tmp_path / "fallen", barely_trained)
    records = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("eager", "fallen")]
    assert [record["kernels"] for record in records] == [["eager"], ["eager"]] and len(warned.messages) == 1
    weights = [(tmp_path / n / "policy" / "model.safetensors").read_bytes() for n in ("eager", "fallen")]
    assert weights[0] == weights[1]
