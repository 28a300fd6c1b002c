#!/usr/bin/env bash
# Guessed: add_weighted_adapter(["first", "second"], [0.5, 0.5], "mean") makes the adapter whose change of the weights is the mean of theirs.
# So is: its default, "svd", cuts that mean down to the rank of one of them, which loses about half of it for two adapters that have little
# in common. combination_type="linear" averages both factors and multiplies them: half of what comes out are products of one adapter's
# factor with the other's. Only "cat" is the mean. peft 0.21.2.
# Why it matters: adapters of seeds are averaged, or of late checkpoints of one run. The model that comes out was in no
# average, and nothing says so.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet peft==0.21.2 transformers==5.10.4 torch==2.13.0
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
torch.manual_seed(0)
lora = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), lora, adapter_name="first")
model.add_adapter("second", lora)
layer = model.base_model.model.model.layers[0].self_attn.q_proj
mean = (layer.get_delta_weight("first") + layer.get_delta_weight("second")) / 2
print("peft", version("peft"))
errors = {}
for name, options in (("default", {}), ("linear", {"combination_type": "linear"}), ("cat", {"combination_type": "cat"})):
    model.add_weighted_adapter(["first", "second"], [0.5, 0.5], name, **options)
    made = layer.get_delta_weight(name)
    errors[name] = ((made - mean).norm() / mean.norm()).item()
    print(f"{name:8} rank {torch.linalg.matrix_rank(made).item():2}, off the mean by {errors[name]:.0%} of its size")
if errors["default"] < 0.3 or errors["linear"] < 0.5 or errors["cat"] > 1e-5:
    sys.exit("CHANGED: the weighted adapter is the mean")
PYTHON
