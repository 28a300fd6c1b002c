"""`benchmarks/retokenised.py`: turns as their text encodes, and how far their probabilities drift."""

import dataclasses
import importlib
import math
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stppo.trajectories import Trajectories

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, BENCHMARKS)
    yield importlib.import_module("retokenised")
    sys.path.remove(BENCHMARKS)


@pytest.fixture(scope="module")
def tokenizer():
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=letters | {"ab": len(letters)}, merges=[("a", "b")]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def batch(tokenizer, *rows):
    """Rows of (pieces, by the agent), rewards on the last token; the log-prob of each agent token is -1."""
    ids = [
        [(i, agent) for pieces, agent in row for i in tokenizer.convert_tokens_to_ids(pieces)] for row in rows
    ]
    width = max(map(len, ids))
    tokens = torch.tensor([[i for i, _ in row] + [0] * (width - len(row)) for row in ids])
    mask = torch.tensor([[agent for _, agent in row] + [False] * (width - len(row)) for row in ids])
    lengths = torch.tensor([len(row) for row in ids])
    rewards = torch.zeros(tokens.shape).scatter(1, lengths[:, None] - 1, 1.0)
    names = dict.fromkeys(("group_ids", "policy_updates"), torch.arange(len(rows)))
    return Trajectories(tokens, lengths, mask, -mask.float(), rewards, **names)


def test_turns_become_what_their_text_encodes_to_and_the_rest_stays(script, tokenizer):
    sampled = batch(
        tokenizer,
        [(["a", "b"], False), (["c", "a", "b"], True), (["a", "b"], False), (["ab"], True)],
        [(["c"], False), (["a", "c"], True)],
    )
    again = script.retokenised(sampled, tokenizer)
    texts = [
        tokenizer.convert_ids_to_tokens(row[:length].tolist())
        for row, length in zip(again.tokens, again.lengths, strict=True)
    ]
    assert texts == [["a", "b", "c", "ab", "a", "b", "ab"], ["c", "a", "c"]]
    assert again.agent_mask.tolist() == [
        [False, False, True, True, False, False, True],
        [False, True, True, False, False, False, False],
    ]
    assert again.rewards.nonzero().tolist() == [[0, 6], [1, 2]] and again.returns.tolist() == [1, 1]


def test_pieces_in_common_have_the_ratio_of_their_texts(script, tokenizer):
    sampled = batch(tokenizer, [(["c"], False), (["c", "a", "b", "c"], True), (["b"], False), (["c"], True)])
    again = script.retokenised(sampled, tokenizer)
    again = dataclasses.replace(again, behaviour_logprobs=-0.5 * again.agent_mask.float())
    pieces = script.spans(sampled, again, tokenizer)
    assert pieces.same.tolist() == [True, False, True, True]
    assert pieces.before.tolist() == [1, 2, 1, 1] and pieces.after.tolist() == [1, 1, 1, 1]
    assert pieces.log_ratio.tolist() == [0.5, 1.5, 0.5, 0.5]
    found = script.summary(pieces)
    assert found["turns_changed"] == 0.5 and found["trajectories_changed"] == 1
    assert found["tokens_changed"] == 0.4 and found["tokens_after"] == 0.8
    assert found["median_turn_product"] == 2.5 and found["log_ratio_of_changed_piece"] == 1.5
    assert math.exp(0.5) > script.BAND[1] and found["outside_token"] == found["outside_turn_mean"] == 1


def test_half_a_character_makes_the_turn_one_piece(script, tokenizer):
    half = tokenizer.tokenize("é")[0]
    sampled = batch(tokenizer, [(["c"], False), (["a", half, "c"], True)])
    again = script.retokenised(sampled, tokenizer)
    (piece,) = script.spans(sampled, again, tokenizer).to_dict("records")
    assert not piece["same"] and piece["before"] == 3 and piece["after"] == again.agent_mask.sum()


def test_the_same_tokens_have_no_drift(script, tokenizer):
    sampled = batch(tokenizer, [(["c"], False), (["ab", "c"], True)])
    found = script.summary(script.spans(sampled, sampled, tokenizer))
    assert found["turns_changed"] == found["outside_token"] == found["outside_trajectory_product"] == 0
