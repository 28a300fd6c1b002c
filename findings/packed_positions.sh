#!/usr/bin/env bash
# Guessed: position_ids turn the rotary embeddings and nothing else; use_cache and a mask of ones change no log-probability.
# So is: wherever no attention_mask is given and nothing is cached, position ids that do not rise by one at each token are read as
# several texts in one row, and tokens no longer see what stands before the jump. With use_cache=True, the default, or with
# a mask of ones, they see all of it. transformers 5.10.4.
# Why it matters: who packs episodes into a row gets them kept apart or mixed by an option that seems to be about memory:
# gradient checkpointing switches the cache off, so the ratio of training to scoring is wrong before any update. Who leaves a gap
# for tokens that were cut out of a turn loses all that was before it.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet transformers==5.10.4 torch==2.13.0
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).eval()
row = torch.randint(1, 50, (1, 8))
ones = torch.ones_like(row)


@torch.no_grad()
def logprobs(tokens=row, **options):
    return model(tokens, **options).logits.log_softmax(-1)


def distance(one, other):
    return float((one - other).abs().max())


print("transformers", version("transformers"))
alone = logprobs(row[:, 4:])
changed = False
for name, positions in (("two texts of four", [0, 1, 2, 3, 0, 1, 2, 3]), ("a gap of six", [0, 1, 2, 3, 10, 11, 12, 13])):
    at = torch.tensor([positions])
    cached, bare, masked = (
        logprobs(position_ids=at, use_cache=True),
        logprobs(position_ids=at, use_cache=False),
        logprobs(position_ids=at, use_cache=False, attention_mask=ones),
    )
    to_all, to_alone = distance(bare, cached), distance(bare[:, 4:], alone)
    print(f"{name}: use_cache=False is {to_all:.2f} nats from use_cache=True, {distance(masked, cached):.2f} once a mask of ones is given;")
    print(f"  the last four tokens are {to_alone:.5f} nats from being read alone")
    changed |= to_all < 0.5 or to_alone > 1e-3 or distance(masked, cached) > 1e-4
if changed:
    sys.exit("CHANGED: log-probabilities do not depend on use_cache or a mask of ones")
PYTHON
