#!/usr/bin/env bash
# Guessed: merge_adapter() followed by unmerge_adapter() leaves the base weights as they were.
# So is: in bfloat16 the sum is rounded, and what is taken off again leaves another number. A single round changes a share of the base
# weights; with an adapter that moves a little between rounds, as in training, they walk away as a random walk does. peft 0.21.2.
# Why it matters: trainers that hand merged weights to an engine do this in every iteration (TRL 1.16 for vLLM). The base is the
# reference of the KL, and what the saved adapter will be loaded on; neither is any longer the model that was read.
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

sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


def walk(dtype):
    """After 1, 100 and 1000 rounds: share of base weights that differ, and length of the difference by that of the weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    adapter = [w for name, w in model.named_parameters() if "lora_" in name]
    base = {name: w for name, w in model.named_parameters() if "base_layer" in name}
    before, found = {name: w.detach().clone() for name, w in base.items()}, []
    for w in adapter:
        torch.nn.init.normal_(w, std=0.03)
    for n in range(1, 1001):
        model.merge_adapter()
        model.unmerge_adapter()
        if n in (1, 100, 1000):
            off = [(w - before[name]).float() for name, w in base.items()]
            length = sum(d.square().sum() for d in off) / sum(w.float().square().sum() for w in before.values())
            share = sum(int((d != 0).sum()) for d in off) / sum(d.numel() for d in off)
            found.append((share, float(length) ** 0.5))
        with torch.no_grad():
            for w in adapter:  # as large as before, in another direction by and by
                w.mul_(0.99).add_(torch.randn_like(w), alpha=0.03 * (1 - 0.99**2) ** 0.5)
    return found


print("peft", version("peft"), "transformers", version("transformers"))
found = {str(dtype): walk(dtype) for dtype in (torch.bfloat16, torch.float32)}
for dtype, rounds in found.items():
    print(dtype, "; ".join(f"after {n} rounds {s:.0%} differ, by {d:.1e}" for n, (s, d) in zip((1, 100, 1000), rounds)))
half = found["torch.bfloat16"]
if half[0][0] < 0.02 or half[2][1] < 3 * half[0][1] or found["torch.float32"][2][1] > 1e-4:
    print("CHANGED: the base weights come back")
    sys.exit(1)
PYTHON
