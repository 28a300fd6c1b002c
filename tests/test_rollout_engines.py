"""What roll-out engines share, without an engine: settings, mismatch, its correction, prompts and ends of turns."""

import math
import sys

import pytest
import torch

from stppo.config.files import ConfigError
from stppo.config.loading import load
from stppo.objectives import Clip, NoStabilizer, Objective, Ratio, TokenGAE
from stppo.policy.policy import PolicyConfig, build_policy, score
from stppo.policy.weights import named_weights
from stppo.record.schema import ENGINE_COLUMNS, UPDATE_COLUMNS
from stppo.rollout.engines import make_rollout
from stppo.rollout.mismatch import mismatch, trainer_logprobs, truncated_weights
from stppo.rollout.rollout import RolloutConfig, TurnEnd, VLLMRolloutConfig, at_temperature_one, through_first
from stppo.world.encoding import DialogueEncoder
from stppo.world.knowledge import SyntheticWorld
from tests.objectives_cases import TabularPolicy, mixed_batch, normal


def test_mismatch_against_plain_sums():
    batch = mixed_batch()
    trainer = batch.behaviour_logprobs + normal(batch.rewards, 1, 0.1)
    got = mismatch(trainer, batch, batch.behaviour_logprobs)
    rows = [
        [float(trainer[i, t] - batch.behaviour_logprobs[i, t]) for t in mask.nonzero().flatten()]
        for i, mask in enumerate(batch.agent_mask)
    ]
    flat = [x for row in rows for x in row]
    ratios = [math.exp(sum(row)) for row in rows]
    assert got["mismatch_mean"] == pytest.approx(sum(map(abs, flat)) / len(flat))
    assert got["mismatch_max"] == pytest.approx(max(map(abs, flat)))
    assert got["mismatch_kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in flat) / len(flat))
    size = sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios)
    assert got["mismatch_effective_sample_size"] == pytest.approx(size)
    assert set(got) <= set(ENGINE_COLUMNS) <= set(UPDATE_COLUMNS)


def test_truncated_weights_are_ratios_up_to_the_cap():
    batch = mixed_batch()
    trainer = (batch.behaviour_logprobs + normal(batch.rewards, 1, 1.0)).requires_grad_()
    got = truncated_weights(trainer, batch, batch.behaviour_logprobs, 2.0)
    expected = (trainer - batch.behaviour_logprobs).exp().clamp(max=2.0) * batch.agent_mask
    torch.testing.assert_close(got, expected.detach())
    assert (got == 2).any() and ((got > 0) & (got < 1)).any() and not got.requires_grad


def test_weights_multiply_the_terms_and_the_clipping_bias_alike():
    batch, policy = mixed_batch(), TabularPolicy()
    objective = Objective(TokenGAE(), Ratio("token"), Clip(0.2, 0.2), NoStabilizer(), "trajectory_mean")
    advantages, weights = normal(batch.rewards, 2), normal(batch.rewards, 3).exp()
    logprobs = policy.logprobs(batch.tokens)
    plain, weighed = (objective(logprobs, batch, advantages, w) for w in (None, weights))
    # min(w A, clip(w) A) scales with |weight|, so a positive weight may as well multiply the advantage.
    scaled = objective(logprobs, batch, advantages * weights)
    for name in ("loss", "bias_surrogate"):
        torch.testing.assert_close(getattr(weighed, name), getattr(scaled, name))
        assert not torch.isclose(getattr(weighed, name), getattr(plain, name))
    ones = objective(logprobs, batch, advantages, torch.ones_like(weights))
    assert ones.loss == plain.loss and ones.diagnostics == plain.diagnostics


@pytest.fixture(scope="module")
def world():
    return SyntheticWorld(n_train=8, n_validation=8, n_test=8)


def test_trainer_scores_a_few_rows_at_a_time(world):
    torch.manual_seed(0)
    policy = build_policy(PolicyConfig(name="tiny"), world.tokenizer)
    sampler = make_rollout(world.environment, world.tokenizer, RolloutConfig(), policy)
    batch = sampler.collect(
        policy, world.questions("train") * 5, torch.Generator().manual_seed(0)
    ).trajectories
    with torch.no_grad():
        expected = score(policy, batch, 0.7).logprobs
        torch.testing.assert_close(trainer_logprobs(policy, batch, 0.7), expected, atol=1e-5, rtol=0)
        seen = []
        policy.base_model.register_forward_pre_hook(
            lambda _, __, given: seen.append(given["input_ids"].shape), with_kwargs=True
        )
        longest = int(batch.lengths.max())
        for budget in (2 * longest, 1):
            found = trainer_logprobs(policy, batch, 0.7, budget)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            assert all(rows * (width + 1) <= budget or rows == 1 for rows, width in seen), seen
            assert sum(rows for rows, _ in seen) == len(batch)
            seen.clear()


@pytest.mark.parametrize("tied", [True, False])
def test_handed_over_weights_always_name_the_output_layer(world, tied):
    policy = build_policy(PolicyConfig(name="tiny", tie_word_embeddings=tied), world.tokenizer)
    weights = dict(named_weights(policy))
    assert torch.equal(weights["lm_head.weight"], policy.get_output_embeddings().weight)
    assert sum(w.numel() for w in weights.values()) == sum(p.numel() for p in policy.parameters()) + (
        policy.lm_head.weight.numel() if tied else 0
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<search> a </search>", "<search> a </search>"),
        ("<search> a </search>. So", "<search> a </search>"),
        ("<answer> a </answer> <search> b </search>", "<answer> a </answer>"),
        ("<think> a </think>", "<think> a </think>"),
    ],
)
def test_action_ends_with_the_first_closing_tag(text, expected):
    assert through_first(text, ("</search>", "</answer>")) == expected


def test_first_end_of_a_turn(world):
    end = TurnEnd(DialogueEncoder(world.environment.protocol, world.tokenizer))

    def first(text):
        return end.first(world.tokenizer(text, add_special_tokens=False)["input_ids"])

    assert first("<search> mentor </search> mentor </answer>") == 3
    assert first("<search> mentor <eos> mentor") == 3
    assert first("<think> mentor </think>") is None and first("") is None
    beyond = len(world.tokenizer) + 5  # output layers can be padded
    assert end.first([beyond, world.tokenizer.eos_token_id]) == 2


# --- settings --------------------------------------------------------------------------------------


def test_evaluation_is_at_temperature_one_and_compares_nothing():
    config = VLLMRolloutConfig(temperature=0.7, importance_correction="truncated", max_num_seqs=3)
    assert at_temperature_one(config) == VLLMRolloutConfig(max_num_seqs=3, behaviour_logprobs="engine")
    assert at_temperature_one(RolloutConfig(temperature=0.7, batch_size=3)) == RolloutConfig(batch_size=3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+rollout.max_num_seqs=3"], "rollout.max_num_seqs: unknown key; allowed: engine, temperature, max_tokens, batch_size"),
        (["rollout=vllm", "+rollout.batch_size=3"], "rollout.batch_size: unknown key; allowed: engine, temperature, .*max_num_seqs"),
        (["rollout=vllm", "rollout.sleep_level=3"], "rollout.sleep_level = 3: Input should be 0, 1 or 2"),
        (["rollout=vllm", "rollout.gpu_memory_utilization=1"], "rollout.gpu_memory_utilization = 1: "),
        (["rollout.engine=tgi"], "rollout: Input tag 'tgi' .* 'torch', 'vllm'"),
        (
            ["rollout=vllm", "rollout.importance_correction=truncated", "rollout.behaviour_logprobs=engine"],
            "rollout.importance_correction=truncated needs behaviour_logprobs=trainer",
        ),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(tiny, overrides, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        load(tiny(*overrides))


def test_without_vllm_one_line_names_the_extra(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # not importable
    for module in ("vllm_rollout", "vllm_engine"):
        monkeypatch.delitem(sys.modules, f"stppo.plugins.{module}", raising=False)
    policy = build_policy(PolicyConfig(name="tiny"), world.tokenizer)
    with pytest.raises(ImportError, match=r"pip install -e '.*\[vllm\]'") as caught:
        make_rollout(world.environment, world.tokenizer, VLLMRolloutConfig(), policy)
    assert "\n" not in str(caught.value)
