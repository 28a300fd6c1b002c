#!/usr/bin/env bash
# Guessed: once gradient_checkpointing_enable() was called, activations are computed again in the backward pass.
# So is: in eval mode they are kept, all of them, without a word. transformers 5.10.4.
# Why it matters: a trainer that keeps the policy in eval mode, so that no dropout stands between old and new log-probabilities, needs the
# whole memory that checkpointing was to save. Set dropout to 0 and stay in training mode.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet transformers==5.10.4 torch==2.13.0
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes))
model.gradient_checkpointing_enable()
passes = []
model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: passes.append(1))
text = torch.arange(8)[None]


def forward_passes(training):
    """How often the first layer computes in one forward and backward pass."""
    model.train(training)
    passes.clear()
    model(text, labels=text).loss.backward()
    return len(passes)


trains, evaluates = forward_passes(True), forward_passes(False)
print("transformers", version("transformers"), "checkpointing is on:", model.is_gradient_checkpointing)
print(f"the first layer computes {trains} times in training mode, {evaluates} in eval mode")
if (trains, evaluates) != (2, 1):
    sys.exit("CHANGED: it computes again in eval mode, too")
PYTHON
