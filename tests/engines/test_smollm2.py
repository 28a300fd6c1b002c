"""SmolLM2-135M-Instruct as `stppo fetch smollm2` leaves it."""

import pytest

from stppo.agent.fetch import answer
from stppo.agent.known_models import KNOWN
from stppo.agent.policy import load_policy, load_tokenizer

pytestmark = pytest.mark.engines


def test_it_answers_what_was_asked_when_it_was_fetched_and_stops(smollm2):
    policy, tokenizer = load_policy(smollm2), load_tokenizer(smollm2)
    assert policy.num_parameters() == 134_515_008 and tokenizer.eos_token == "<|im_end|>"
    for question, expected in KNOWN["smollm2"].answers.items():
        assert expected in answer(policy, tokenizer, question)
    assert (
        answer(policy, tokenizer, "What is the capital of France?", 60) == "The capital of France is Paris."
    )
