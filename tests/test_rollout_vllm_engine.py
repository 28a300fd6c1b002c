"""What stands between a policy and vLLM, with a stand-in for vLLM that computes in transformers."""

import copy
import importlib
import random
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from stppo.plugins.vllm_weights import WeightSync
from stppo.policy.compute import place
from stppo.policy.policy import PolicyConfig, build_policy
from stppo.rollout.rollout import VLLMRolloutConfig
from stppo.world.knowledge import SyntheticWorld


class StandIn:
    """vLLM's `LLM` as far as `Engine` uses it. lost: what a hand-over does not reach: None, "weights", or "copies" of them
    that it computes with."""

    lost = None

    def __init__(self, model, dtype, **_):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)  # as vLLM does
        shape = AutoConfig.from_pretrained(model, tie_word_embeddings=False)
        self.model = AutoModelForCausalLM.from_config(shape).to(getattr(torch, dtype)).eval()
        self.computing, self.asked = self.model, []
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        handed = dict(kwargs["weights_iterator"])
        if self.lost == "copies":
            self.computing = copy.deepcopy(self.model)
        if self.lost != "weights":
            for name, weight in self.model.named_parameters():
                weight.copy_(handed[name])

    def apply_model(self, function):
        return [function(self.model)]

    def sleep(self, level):
        pass

    def wake_up(self, tags):
        pass

    def reset_prefix_cache(self):
        return True

    def enqueue(self, requests, params, use_tqdm):
        self.asked = [
            (request["prompt_token_ids"], p.max_tokens) for request, p in zip(requests, params, strict=True)
        ]

    def wait_for_completion(self, use_tqdm):
        return [self._answer(list(prompt), n) for prompt, n in self.asked]

    def _answer(self, tokens, n):
        given, logprobs = len(tokens), []
        for _ in range(n):
            found = self.computing(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
            tokens.append(int(found.argmax()))
            logprobs.append(float(found.max()))
        answer = SimpleNamespace(token_ids=tokens[given:], logprobs=SimpleNamespace(logprobs=logprobs))
        return SimpleNamespace(outputs=[answer], num_cached_tokens=0)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start an engine for a policy, on what vLLM takes for a GPU."""
    parts = {
        "vllm": {
            "LLM": StandIn,
            "SamplingParams": SimpleNamespace,
            "TokensPrompt": dict,
            "envs": SimpleNamespace(VLLM_CACHE_ROOT=str(tmp_path)),
        },
        "vllm.distributed": {"cleanup_dist_env_and_memory": lambda: None},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
        "vllm.v1.attention.backends.cpu_attn": {"CPUAttentionBackend": None},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delitem(sys.modules, "stppo.plugins.vllm_engine", raising=False)
    monkeypatch.setattr(StandIn, "lost", None)
    engine = importlib.import_module("stppo.plugins.vllm_engine").Engine
    yield lambda policy: engine(policy, WORLD.tokenizer, VLLMRolloutConfig(max_tokens=64))
    sys.modules.pop("stppo.plugins.vllm_engine")


WORLD = SyntheticWorld(n_train=8, n_validation=8, n_test=8)


@pytest.fixture
def policy():
    torch.manual_seed(1)
    policy = build_policy(PolicyConfig(name="tiny"), WORLD.tokenizer)
    place(policy, torch.device("cpu"), "bfloat16")
    return policy


def updated(policy):
    """After an update of some thousandths, of which log-probs in bfloat16 tell nothing."""
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(2e-3 * torch.randn_like(weight))
    return other


def test_new_weights_are_sampled_from(start, policy):
    engine = start(policy)
    engine.sync(policy)
    engine.sync(policy)
    engine.sync(updated(policy))
    assert len(engine.handover.comparable) == len(list(policy.parameters()))


@pytest.mark.parametrize(
    ("lost", "said"), [("weights", r"\d+ weights, lm_head.weight"), ("copies", "what it computes with")]
)
def test_weights_that_stop_arriving_are_noticed_where_log_probs_do_not_tell(
    start, policy, monkeypatch, lost, said
):
    engine = start(policy)
    assert engine.dtype == torch.bfloat16
    engine.sync(policy)
    monkeypatch.setattr(StandIn, "lost", lost)
    with pytest.raises(RuntimeError, match=f"{said}.* did not change with them"):
        engine.sync(updated(policy))
    monkeypatch.setattr(StandIn, "lost", None)
    engine.llm.computing = engine.llm.model
    engine.sync(policy)  # an earlier failure is no reason for another


def test_weights_packed_and_padded_by_the_engine_are_found(policy):
    """One below the other, and a vocabulary that ends in rows of nothing; what has another form, or is a lone number, is left out."""
    weights = {
        n: torch.randn(rows, 4)
        for n, rows in (("a.q_proj", 4), ("a.k_proj", 2), ("a.v_proj", 2), ("lm_head", 5), ("b", 3))
    }
    weights["scale"] = torch.tensor(2.0)
    model = nn.Module()
    model.a, model.a.qkv_proj, model.lm_head, model.b = (
        nn.Module(),
        nn.Linear(4, 8, bias=False),
        nn.Linear(4, 9),
        nn.Linear(3, 4),
    )
    handover = WeightSync(torch.float32)

    def handed(changed=None):
        list(handover.noting((f"{n}.weight", w + (n == changed)) for n, w in weights.items()))
        return handover.missing(model)

    with torch.no_grad():
        model.a.qkv_proj.weight.copy_(torch.cat([w for n, w in weights.items() if n.startswith("a.")]))
        model.lm_head.weight[:5] = weights["lm_head"]
        model.b.weight.copy_(weights["b"].t())
    assert handed() == []
    assert handover.comparable == {"a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight", "lm_head.weight"}
    for name in ("a.q_proj", "a.k_proj", "a.v_proj", "lm_head"):
        assert handed(name) == [f"{name}.weight"]
    assert handed("b") == [] and handed("scale") == []


def test_an_engine_starts_without_touching_the_global_generators(start, policy):
    def drawn():
        return random.random(), np.random.rand(), float(torch.rand(()))

    def seed():
        random.seed(5), np.random.seed(5), torch.manual_seed(5)

    seed()
    expected = drawn()
    seed()
    start(policy)
    assert drawn() == expected


def test_what_pytorch_keeps_is_freed_before_the_engine_wakes(start, policy, monkeypatch):
    """Whoever wakes it: a roll-out, its Monte-Carlo continuations, an evaluation, the last sample of a run."""
    engine, calls = start(policy), []
    engine.sync(policy)
    engine.sleep()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("freed"))
    monkeypatch.setattr(engine.llm, "wake_up", lambda tags: calls.append(*tags))
    engine.sync(policy)
    assert calls == ["freed", "weights", "freed", "kv_cache"]


def test_a_process_has_one_engine_at_a_time_on_a_gpu(start, policy):
    first, second = start(policy), start(policy)
    assert first.llm is None and second.llm is not None, "the first has given its memory back"
    with pytest.raises(RuntimeError, match="^this vLLM engine is closed"):
        first.sync(policy)
    first.sleep()  # as a roll-out does in the end, and must not hide what happened
    first.close()  # once more does nothing
    second.sync(policy)
    second.close()
