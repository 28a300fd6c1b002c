#!/usr/bin/env bash
# Guessed: `critic.model.override_config.attn_implementation=sdpa` makes verl's critic do without flash-attn, as the same line
# does for the actor.
# So is: a critic is loaded with flash_attention_2, whatever its config says. Without flash-attn the error asks for TRL:
# "is not a value head model, please install trl to make it valid".
# verl 0.9.1, transformers 5.10.4.
# Why it matters: PPO with a critic cannot start where flash-attn cannot be built, and who installs TRL as told gets another error.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet 'verl[verl-core]==0.9.1' transformers==5.10.4 torch==2.13.0
  "$FINDINGS_VENV/bin/pip" uninstall --quiet --yes torchcodec
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

sys.modules["trl"] = None  # not installed

import torch
from transformers import AutoModelForTokenClassification, LlamaConfig, LlamaForTokenClassification
from verl.utils.model import load_valuehead_model

sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
LlamaForTokenClassification(LlamaConfig(**sizes, num_labels=1)).save_pretrained("critic")
config = LlamaConfig.from_pretrained("critic", attn_implementation="sdpa")
print("verl", version("verl"), "transformers", version("transformers"))
plain = AutoModelForTokenClassification.from_pretrained("critic", config=config)
print("by transformers, with this config:", plain.config._attn_implementation)
try:
    found = load_valuehead_model("critic", torch.float32, config, False).config._attn_implementation
except RuntimeError as error:
    found = f"{error} <- {str(error.__cause__)[:90]}"
print("by verl, with this config:", found)
if "FlashAttention2" not in found and found != "flash_attention_2":
    sys.exit("CHANGED: the critic has the attention that its config asks for")
PYTHON
