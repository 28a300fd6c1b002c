#!/usr/bin/env bash
# Guessed: `disable_dropout=True` of TRL's trainers leaves no dropout in the model.
# So is: it sets every torch.nn.Dropout to 0, and no more. Llama, Qwen2 and their relatives hold the dropout of their attention
# as a number (`attention_dropout`), which stays: two passes over one text in training mode differ.
# trl 1.16.0, transformers 5.10.4.
# Why it matters: log-probabilities that serve as old ones are scored by such a model. Ratios are then not 1 before any update,
# tokens are clipped on fresh data, and nothing says so. Set attention_dropout=0 in the model's config.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet trl==1.16.0 transformers==5.10.4 torch==2.13.0
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import disable_dropout_in_model

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
text = torch.arange(2, 22)[None]


def spread(attention_dropout):
    """Largest ratio of a token's probabilities in two passes, once TRL has disabled dropout."""
    model = LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=attention_dropout, initializer_range=0.5))
    disable_dropout_in_model(model)
    model.train()
    with torch.no_grad():
        one, other = (model(text).logits[:, :-1].log_softmax(-1).gather(-1, text[:, 1:, None]) for _ in range(2))
    return float((one - other).abs().max().exp())


without, with_it = spread(0.0), spread(0.1)
print("trl", version("trl"), "transformers", version("transformers"))
print(f"largest ratio of two passes: {without:.3f} without attention_dropout, {with_it:.3f} with 0.1")
if without > 1.0001 or with_it < 1.01:
    sys.exit("CHANGED: attention's dropout is disabled too")
PYTHON
