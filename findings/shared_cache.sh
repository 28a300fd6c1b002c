#!/usr/bin/env bash
# Guessed: the past_key_values of a question can be handed to the model with one answer after another; each answer is read after the question.
# So is: the cache is an object that grows in place. The second answer is read after the question and the first, the third after all of
# them, and no length is checked against anything. copy.deepcopy of the cache, one for each answer, is right. transformers 5.10.4.
# Why it matters: reading a prompt once for all answers of its group is the obvious saving. The log-probabilities of all but the first are
# then of another text, by several nats, and ratios, KL and rewards that are made of them look like training. (As long as caches were
# tuples, handing them over twice was right.)
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet transformers==5.10.4 torch==2.13.0
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import copy
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=50, initializer_range=0.3)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
question, *answers = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]])


@torch.no_grad()
def read(tokens, cache=None):
    """The model's output for one text."""
    return model(tokens[None], past_key_values=cache, use_cache=True)


def scores(logits, answer):
    """Log-probabilities of all but the first token of the answer."""
    return logits[0, -len(answer) : -1].log_softmax(-1).gather(-1, answer[1:, None])[:, 0]


whole = [scores(read(torch.cat([question, answer])).logits, answer) for answer in answers]
cache = read(question).past_key_values
shared, lengths = [], []
for answer in answers:
    shared.append(scores(read(answer, cache).logits, answer))
    lengths.append(cache.get_seq_length())
once = read(question).past_key_values
copied = [scores(read(answer, copy.deepcopy(once)).logits, answer) for answer in answers]
print("transformers", transformers.__version__)
print("log-probabilities of an answer, against those of question and answer read at once:")
errors = {name: [(a - b).abs().max().item() for a, b in zip(found, whole)] for name, found in (("shared", shared), ("copied", copied))}
for name, error in errors.items():
    print(f"  {name} cache: off by", " ".join(f"{one:.4f}" for one in error))
print("tokens in the shared cache after each answer:", lengths)
if errors["shared"][0] > 1e-3 or min(errors["shared"][1:]) < 0.1 or max(errors["copied"]) > 1e-3:
    sys.exit("CHANGED: a cache is not changed by what is read after it")
PYTHON
