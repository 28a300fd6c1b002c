#!/usr/bin/env bash
# Guessed: adapters that are put on a model in eval mode are in eval mode, and model.training says which mode it is.
# So is: the new layers' dropout is in training mode, whatever the model is in. After transformers' add_adapter, model.training is still
# False, and two passes over a text differ; get_peft_model and PeftModel.from_pretrained(is_trainable=True) do the same inside.
# Only a later call of eval() ends it. peft 0.21.2, transformers 5.10.4.
# Why it matters: from_pretrained gives a model in eval mode, and a trainer of RL leaves it there so that old and new log-probabilities
# are comparable. With lora_dropout, ratios are then noise before any update, and roll-outs come from a policy with holes.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet peft==0.21.2 transformers==5.10.4 torch==2.13.0
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1)).save_pretrained("policy")
adapter = LoraConfig(r=4, lora_dropout=0.1, init_lora_weights=False)  # an adapter as after some training
text = torch.arange(2, 22)[None]


def read():
    return AutoModelForCausalLM.from_pretrained("policy")


def added():
    model = read()
    model.add_adapter(adapter)
    return model


def spread(model):
    """Largest ratio of a token's probabilities in two passes over one text."""
    with torch.no_grad():
        one, other = (model(text).logits[:, :-1].log_softmax(-1).gather(-1, text[:, 1:, None]) for _ in range(2))
    return float((one - other).abs().max().exp())


print("peft", version("peft"), "transformers", version("transformers"))
get_peft_model(read(), adapter).save_pretrained("adapter")
ways = {
    "model.add_adapter": added(),
    "get_peft_model": get_peft_model(read(), adapter),
    "from_pretrained(is_trainable=True)": PeftModel.from_pretrained(read(), "adapter", is_trainable=True),
}
changed = False
for name, model in ways.items():
    base = getattr(model, "base_model", model) if isinstance(model, PeftModel) else model
    inner = base.model if isinstance(model, PeftModel) else model
    before, mode = spread(model), inner.training
    model.eval()
    print(f"{name}: the model's own training is {mode}; largest ratio of two passes {before:.3f}, after eval() {spread(model):.3f}")
    changed |= mode or before < 1.01 or spread(model) > 1.0001
if changed:
    sys.exit("CHANGED: adapters take the mode of their model")
PYTHON
