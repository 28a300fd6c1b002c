"""Roll-out against scoring, the cache, the ends of turns, and what is recorded."""

import copy
import dataclasses

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.policy.compute import body_of
from stppo.policy.critic import explained_variance
from stppo.policy.frozen import freeze_below, states_below
from stppo.policy.policy import build_policy, load_policy, score
from stppo.rollout import rollout_torch
from stppo.rollout.rollout import RolloutConfig, TurnEnd
from stppo.rollout.rollout_torch import TorchRollout
from stppo.trajectories import Trajectories
from stppo.world import DialogueEncoder, Protocol


@pytest.fixture(scope="module")
def setting(barely_trained):
    from tests.conftest import TINY

    config = compose(TINY)
    world = build(config["world"], "world")
    policy = load_policy(barely_trained)
    return world, policy, TorchRollout(world.environment, world.tokenizer, RolloutConfig(max_tokens=192))


@pytest.fixture(scope="module")
def rollout(setting):
    world, policy, sampler = setting
    return sampler.collect(policy, world.questions("train")[:24], torch.Generator().manual_seed(1))


def test_scoring_in_chunks_changes_nothing(setting, rollout):
    _, policy, _ = setting
    with torch.no_grad():
        one, many = (score(policy, rollout.trajectories, n_chunks=n) for n in (1, 5))
    torch.testing.assert_close(one.logprobs, many.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(one.entropy, many.entropy, atol=1e-5, rtol=0)


def test_score_matches_a_plain_forward_pass_at_temperature(setting, rollout):
    _, policy, _ = setting
    batch, temperature = rollout.trajectories, 0.7
    with torch.no_grad():
        logits = policy(input_ids=batch.tokens).logits[:, :-1] / temperature
        scores = score(policy, batch, temperature)
    log_probs = torch.log_softmax(logits, -1)
    expected = torch.zeros_like(batch.behaviour_logprobs)
    expected[:, 1:] = log_probs.gather(2, batch.tokens[:, 1:, None]).squeeze(2)
    expected[~batch.agent_mask] = 0
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=0)
    squares = torch.zeros_like(expected)
    squares[:, 1:] = log_probs.exp().square().sum(-1)
    torch.testing.assert_close(
        scores.squared_prob_sum[batch.agent_mask], squares[batch.agent_mask], atol=1e-5, rtol=0
    )


def test_temperature_scales_the_recorded_logprobs(setting):
    world, policy, _ = setting
    sampler = TorchRollout(world.environment, world.tokenizer, RolloutConfig(temperature=0.5))
    batch = sampler.collect(
        policy, world.questions("train")[:8], torch.Generator().manual_seed(0)
    ).trajectories
    with torch.no_grad():
        again = score(policy, batch, temperature=0.5).logprobs
    torch.testing.assert_close(again, batch.behaviour_logprobs, atol=1e-5, rtol=0)


def test_greedy_takes_the_most_likely_token(setting):
    world, policy, sampler = setting
    batch = sampler.collect(policy, world.questions("train")[:8], torch.Generator(), greedy=True).trajectories
    with torch.no_grad():
        best = policy(input_ids=batch.tokens).logits[:, :-1].argmax(-1)
    mask = batch.agent_mask[:, 1:]
    assert torch.equal(best[mask], batch.tokens[:, 1:][mask])


def test_tokens_are_prompt_turns_and_observations_in_order(setting, rollout):
    world, _, _ = setting
    batch = rollout.trajectories
    for row, episode in enumerate(rollout.episodes):
        length = int(batch.lengths[row])
        ids, mask = batch.tokens[row, :length], batch.agent_mask[row, :length]
        spoken = [episode.prompt] + [turn.observation for turn in episode.turns if turn.observation]
        expected = [
            i for text in spoken for i in world.tokenizer(text, add_special_tokens=False)["input_ids"]
        ]
        environment = ids[~mask].tolist()
        assert environment == expected[: len(environment)]
        for k, turn in enumerate(episode.turns):
            own = ids[batch.turn_ids[row, :length] == k]
            assert world.tokenizer.decode(own, skip_special_tokens=True) == turn.text


def test_every_token_enters_the_cache_at_most_once_and_finished_lanes_leave(setting, monkeypatch):
    world, policy, sampler = setting
    fed, slots = [], []
    original = rollout_torch._KVCache.feed

    def feed(self, ids, chunk, mask):
        fed.append(int(mask.sum()))
        slots.append(len(chunk))
        return original(self, ids, chunk, mask)

    monkeypatch.setattr(rollout_torch._KVCache, "feed", feed)
    batch = sampler.collect(
        policy, world.questions("train")[:24], torch.Generator().manual_seed(1)
    ).trajectories
    # All tokens but the last one of each trajectory: nothing is computed twice across turns.
    assert sum(fed) == int((batch.lengths - 1).sum())
    assert slots[0] == 24 and slots[-1] < 24


VOCABULARIES = [50, 5000]  # drawn from in two ways


@pytest.mark.parametrize("size", VOCABULARIES)
def test_draws_follow_the_distribution_and_never_take_what_cannot_be(size):
    shares = torch.zeros(size)
    shares[[3, 4, 20, size - 5]] = torch.tensor([0.5, 0.05, 0.15, 0.3])
    generator, n = torch.Generator().manual_seed(0), 400
    drawn = torch.cat(
        [rollout_torch.draw(shares.expand(n, -1), torch.arange(n), n, generator) for _ in range(25)]
    )
    counts = torch.bincount(drawn, minlength=size) / len(drawn)
    assert (counts[shares == 0] == 0).all()
    assert ((counts - shares).abs() <= 4 * (shares * (1 - shares) / len(drawn)).sqrt()).all()


@pytest.mark.parametrize("size", VOCABULARIES)
def test_a_draw_does_not_hang_on_which_rows_are_computed(size):
    probs = torch.rand(6, size, generator=torch.Generator().manual_seed(1)).softmax(-1)
    rows = torch.tensor([1, 2, 5])
    one, other = (torch.Generator().manual_seed(2) for _ in range(2))
    for _ in range(3):
        of_all = rollout_torch.draw(probs, torch.arange(6), 6, one)
        assert rollout_torch.draw(probs[rows], rows, 6, other).tolist() == of_all[rows].tolist()


@pytest.mark.parametrize("greedy", [False, True])
def test_dropping_closed_lanes_changes_no_sample(greedy, setting, monkeypatch):
    world, policy, sampler = setting
    cache, found = rollout_torch._KVCache, []
    original, feed = cache.__init__, cache.feed
    for drops in (True, False):
        rows = []

        def begin(self, *arguments, drops=drops):
            original(self, *arguments)
            self.drops_closed = drops

        def count(self, ids, chunk, mask, rows=rows):
            rows.append(len(chunk))
            return feed(self, ids, chunk, mask)

        monkeypatch.setattr(cache, "__init__", begin)
        monkeypatch.setattr(cache, "feed", count)
        generator = torch.Generator().manual_seed(1)
        batch = sampler.collect(policy, world.questions("train")[:24], generator, greedy=greedy).trajectories
        found.append((batch, generator.get_state(), sum(rows)))
    (dropped, state, fewer), (whole, expected, all_rows) = found
    assert fewer < all_rows, "there was something to drop"
    assert torch.equal(state, expected)
    for name, value in dropped.state_dict().items():
        if name != "behaviour_logprobs":
            assert torch.equal(value, getattr(whole, name)), name
    torch.testing.assert_close(dropped.behaviour_logprobs, whole.behaviour_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["tiny", "tiny_gpt2", "tiny_llama"])
def test_states_of_frozen_layers_are_kept_on_request(name, setting):
    world, _, sampler = setting
    torch.manual_seed(0)
    family = load(compose([f"policy={name}"])).settings.policy
    policy = build_policy(
        dataclasses.replace(family, kv_heads=4 if name == "tiny_gpt2" else 2), world.tokenizer
    )
    freeze_below(policy, 1)

    def collect():
        generator = torch.Generator().manual_seed(1)
        return sampler.collect(policy, world.questions("train")[:24], generator).trajectories

    assert collect().below is None
    sampler = copy.copy(sampler)
    sampler.keeps_states = True
    batch = collect()
    expected = states_below(body_of(policy), batch)
    read = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None] - 1
    torch.testing.assert_close(batch.below[read], expected[read], atol=1e-4, rtol=1e-4)
    assert expected[read].abs().max() > 0.05 and (batch.n_turns > 1).any()
    with torch.no_grad():
        again = score(policy, batch).logprobs
    torch.testing.assert_close(again, batch.behaviour_logprobs, atol=1e-4, rtol=0)


def agent_tokens(batch) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(batch.tokens, batch.agent_mask, strict=True)]


@pytest.mark.parametrize("other_policy", [False, True])
def test_trajectory_whose_tokens_are_all_forced_is_the_same(other_policy, setting, rollout):
    world, policy, sampler = setting
    batch, questions = rollout.trajectories, [episode.question for episode in rollout.episodes]
    if other_policy:
        policy = copy.deepcopy(policy)
        torch.nn.init.normal_(policy.lm_head.weight, std=0.1)
    again = sampler.collect(policy, questions, torch.Generator().manual_seed(2), forced=agent_tokens(batch))
    for name, value in again.trajectories.state_dict().items():
        if name != "behaviour_logprobs":
            assert torch.equal(value, getattr(batch, name)), name
    assert [e.turns for e in again.episodes] == [e.turns for e in rollout.episodes]
    with torch.no_grad():
        expected = score(policy, batch).logprobs
    torch.testing.assert_close(again.trajectories.behaviour_logprobs, expected, atol=1e-5, rtol=0)


def test_forced_start_is_continued_lane_by_lane(setting, rollout):
    """Prefixes of different lengths, some within a turn; where they end, the policy goes on by itself."""
    world, policy, sampler = setting
    batch, questions = rollout.trajectories, [episode.question for episode in rollout.episodes]
    forced = [ids[: 5 * row % (len(ids) + 1)] for row, ids in enumerate(agent_tokens(batch))]
    assert len({len(ids) for ids in forced}) > 5
    played = sampler.collect(policy, questions, torch.Generator(), greedy=True, forced=forced).trajectories
    assert all(ids[: len(start)] == start for ids, start in zip(agent_tokens(played), forced, strict=True))
    with torch.no_grad():
        best = policy(input_ids=played.tokens).logits[:, :-1].argmax(-1)
    number = played.agent_mask.cumsum(1)
    own = played.agent_mask & (number > torch.tensor([len(ids) for ids in forced])[:, None])
    assert own.any(1).sum() > 12
    assert torch.equal(best[own[:, 1:]], played.tokens[own])


def test_reward_sits_on_the_last_agent_token(rollout):
    batch = rollout.trajectories
    rewards = torch.tensor([float(e.reward) for e in rollout.episodes])
    torch.testing.assert_close(batch.rewards.sum(1), rewards)
    last = torch.where(batch.agent_mask, torch.arange(batch.tokens.shape[1]), -1).max(1).values
    torch.testing.assert_close(batch.rewards[torch.arange(len(last)), last], rewards)


def test_sentence_ends_are_marked_turn_by_turn(setting, rollout):
    sampler = setting[2]
    batch = rollout.trajectories
    for row in range(len(batch)):
        for turn in range(int(batch.n_turns[row])):
            at = batch.turn_ids[row] == turn
            expected = sampler.encoder.sentence_ends(batch.tokens[row, at].tolist())
            assert batch.sentence_ends[row, at].tolist() == expected
    assert batch.sentence_ends.any() and not batch.sentence_ends[~batch.agent_mask].any()


def test_turn_that_never_closes_is_cut_at_the_limit_and_corrected(setting):
    world, policy, sampler = setting
    word, turns = world.tokenizer.convert_tokens_to_ids("mentor"), world.turn_budget + 1
    babble = [[word] * (turns * world.max_turn_tokens)] * 8
    played = sampler.collect(policy, world.questions("train")[:8], torch.Generator(), forced=babble)
    assert (played.trajectories.layout.turn_lengths == world.max_turn_tokens).all()
    assert (played.trajectories.n_turns == turns).all()
    first = [episode.turns[0] for episode in played.episodes]
    assert all(turn.action.kind == "invalid" for turn in first)
    assert all(turn.observation == world.environment.protocol.correction for turn in first)


def test_no_room_for_a_prompt_is_an_error_that_names_the_key(setting):
    world, policy, _ = setting
    sampler = TorchRollout(world.environment, world.tokenizer, RolloutConfig(max_tokens=16))
    with pytest.raises(ValueError, match="rollout.max_tokens=16"):
        sampler.collect(policy, world.questions("train")[:2], torch.Generator())


def test_out_of_room_ends_unanswered_within_the_limit(setting):
    world, policy, _ = setting
    limit = 45
    sampler = TorchRollout(world.environment, world.tokenizer, RolloutConfig(max_tokens=limit))
    played = sampler.collect(policy, world.questions("train")[:24], torch.Generator().manual_seed(1))
    assert played.trajectories.lengths.max() <= limit
    stopped = [e for e in played.episodes if not e.done]
    assert stopped and all(e.reward == 0 for e in stopped)


def test_closing_tag_split_into_characters_ends_a_turn():
    characters = sorted(set("</search>answr xyz"))
    bare = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="x"))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare)
    end = TurnEnd(DialogueEncoder(Protocol(), tokenizer))
    ids = torch.tensor(tokenizer("x </search>y <answer>")["input_ids"])
    closed = [bool(end(ids[None, i], ids[None, : i + 1], torch.tensor([True]))[0]) for i in range(len(ids))]
    assert closed.index(True) == len("x </search>") - 1
    assert not closed[-1], "an opening tag ends nothing"


def test_retrieved_text_changes_states_only(setting, rollout):
    """Another document at the same places: other log-probs, but the same tokens are in the loss."""
    _, policy, _ = setting
    batch = rollout.trajectories
    state = batch.state_dict()
    inside = torch.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
    state["tokens"] = torch.where(
        ~batch.agent_mask & inside, (batch.tokens + 1) % policy.config.vocab_size, batch.tokens
    )
    other = Trajectories.from_state_dict(state)
    with torch.no_grad():
        before, after = score(policy, batch).logprobs, score(policy, other).logprobs
    assert torch.equal(before != 0, after != 0)
    assert (before - after).abs().max() > 1e-3


def test_explained_variance():
    mask = torch.ones(1, 4, dtype=torch.bool)
    returns = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.zeros(1, 4), returns, mask) == 0
    assert torch.isnan(torch.tensor(explained_variance(torch.zeros(1, 4), torch.ones(1, 4), mask)))
