#!/usr/bin/env bash
# Guessed: model.to(torch.bfloat16) is the model that from_pretrained(..., dtype=torch.bfloat16) reads.
# So is: weights are the same, but .to() also rounds the frequencies of the rotary embeddings, which are a buffer that from_pretrained
# keeps in float32. A frequency that is off by .2 % turns tokens by the wrong angle, and more so the farther they stand: beside
# float32, log-probabilities late in a context are off several times as far. Saved and read again, the model is another one.
# transformers 5.10.4, torch 2.13.0.
# Why it matters: agents' contexts are long, and an engine or a second process that reads the folder does not share the error: ratios
# are off where the turns that count are. Read with dtype=, do not cast.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet transformers==5.10.4 torch==2.13.0 numpy
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2, vocab_size=200)
policy = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.08, rope_theta=1e6, max_position_embeddings=8192)).eval()
policy.save_pretrained("policy")
text = torch.randint(0, 200, (1, 3000))


@torch.no_grad()
def logprobs(model):
    return model(text).logits.float().log_softmax(-1)[0]


exact = logprobs(policy)
read = AutoModelForCausalLM.from_pretrained("policy", dtype=torch.bfloat16)
cast = policy.to(torch.bfloat16)
same = all(torch.equal(a, b) for a, b in zip(read.state_dict().values(), cast.state_dict().values(), strict=True))
print("transformers", version("transformers"), "torch", torch.__version__)
print("equal weights:", same, "- frequencies:", read.model.rotary_emb.inv_freq.dtype, "read,", cast.model.rotary_emb.inv_freq.dtype, "cast")
late = {}
for name, model in (("read in bfloat16", read), ("cast to bfloat16", cast)):
    error = (logprobs(model) - exact).abs().mean(-1)
    late[name] = float(error[-100:].mean())
    print(f"{name}: mean error of a log-prob {float(error[:100].mean()):.4f} in the first hundred tokens, {late[name]:.4f} in the last of 3000")
if not same or late["cast to bfloat16"] < 2 * late["read in bfloat16"]:
    sys.exit("CHANGED: casting is as good as reading")
PYTHON
