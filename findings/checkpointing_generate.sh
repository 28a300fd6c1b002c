#!/usr/bin/env bash
# Guessed: generate() writes the same text in training mode as in eval mode, dropout being 0, gradient checkpointing or not.
# So is: in training mode with checkpointing the cache stays empty, yet each step is still given the last token alone. From the second
# token on, what is written follows from the one token before it: the prompt is forgotten. A warning says that caching is off, and
# not that the text is no longer the model's. With use_cache=False, or in eval mode, it is right. transformers 5.10.4.
# Why it matters: roll-outs that a training loop samples between two updates are then no samples of the policy, and the greedy accuracy
# measured there is that of another model.
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
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3, eos_token_id=None, pad_token_id=0))
model.gradient_checkpointing_enable()
prompt = torch.randint(1, 50, (1, 8))


def answer(**options):
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8, **options)
    return found[0, 8:].tolist()


model.eval()
right = answer()
model.train()
uncached, wrong = answer(use_cache=False), answer()
model.eval()
with torch.no_grad():  # each token follows from the one before it, read at its own position with nothing in front
    alone = [
        int(model(torch.tensor([[token]]), position_ids=torch.tensor([[8 + i]])).logits[0, -1].argmax()) for i, token in enumerate(wrong[:-1])
    ]
print("transformers", version("transformers"))
print("eval mode                      ", right)
print("training mode, use_cache=False ", uncached)
print("training mode                  ", wrong)
print("from the token before it alone ", wrong[:1] + alone)
if uncached != right or wrong == right or wrong[1:] != alone:
    sys.exit("CHANGED: training mode writes what eval mode does")
PYTHON
