"""Every model family: sampled log-probs are scoring log-probs, the critic reads its states, gradients are complete."""

import pytest
import torch
from pydantic import ValidationError

from stppo.policy.critic import Critic
from stppo.policy.policy import PolicyConfig, load_policy, score
from tests.conftest import strong_policy

POLICIES = ["tiny", "tiny_gpt2", "tiny_llama"]  # one of each family, from scratch


@pytest.fixture(scope="module", params=POLICIES)
def played(request):
    """(policy, batch)"""
    policy, sampler, questions = strong_policy(f"policy={request.param}")
    return policy, sampler.collect(policy, questions, torch.Generator().manual_seed(1)).trajectories


def test_sampled_logprobs_equal_scored_logprobs(played):
    policy, batch = played
    assert batch.n_turns.max() > 2 and len(set(batch.lengths.tolist())) > 4, "slots must differ in length"
    with torch.no_grad():
        again = score(policy, batch, n_chunks=3).logprobs
    torch.testing.assert_close(again, batch.behaviour_logprobs, atol=1e-4, rtol=0)
    # The comparison would notice a position that is off by one, wherever the family has positions at all.
    with torch.no_grad():
        positions = torch.arange(1, batch.tokens.shape[1] + 1)[None]
        stretched = positions * torch.where(torch.arange(batch.tokens.shape[1]) < 20, 1, 2)
        plain, moved = (
            policy(input_ids=batch.tokens, position_ids=ids).logits
            for ids in (positions - 1, stretched.clamp(max=policy.config.max_position_embeddings - 1))
        )
    assert (plain - moved).abs().max() > 0.1


def test_critic_reads_the_state_before_each_agent_token(played):
    policy, batch = played
    critic = Critic(policy)
    torch.nn.init.normal_(critic.head.weight)
    with torch.no_grad():
        values = critic(batch, n_chunks=2)
        hidden = critic.body(input_ids=batch.tokens).last_hidden_state
    expected = torch.zeros_like(values)
    expected[:, 1:] = critic.head(hidden[:, :-1]).squeeze(-1).detach()
    expected[~batch.agent_mask] = 0
    torch.testing.assert_close(values, expected, atol=1e-3, rtol=1e-4)
    assert (values != 0).any()


def test_every_parameter_gets_a_gradient(played):
    policy, batch = played
    policy.zero_grad()
    score(policy, batch).logprobs.sum().backward()
    without = [name for name, weight in policy.named_parameters() if weight.grad is None]
    assert not without
    policy.zero_grad()


def test_nothing_is_random_in_training_mode(played):
    policy, batch = played
    assert policy.train().training
    with torch.no_grad():
        first, second = (score(policy, batch).logprobs for _ in range(2))
    assert torch.equal(first, second)


def test_saved_weights_load_with_untied_output(played, tmp_path):
    policy, batch = played
    policy.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert not loaded.config.tie_word_embeddings
    assert loaded.get_output_embeddings().weight is not loaded.get_input_embeddings().weight
    with torch.no_grad():
        torch.testing.assert_close(score(loaded, batch).logprobs, score(policy, batch).logprobs)


def test_gpt2_groups_no_keys():
    with pytest.raises(ValidationError, match=r"policy\.kv_heads=2 must equal heads=4"):
        PolicyConfig(name="x", family="gpt2", kv_heads=2)
    assert PolicyConfig(name="x", family="llama", kv_heads=2).kv_heads == 2
