#!/usr/bin/env bash
# Guessed: generate(do_sample=True, temperature=1.0) draws from the model's distribution where its generation config says
# top_k=None, and GenerationConfig(top_k=None) asks for that.
# So is: in both cases every token but the fifty most likely has probability 0. The config shows None, and 50 is filled in as
# generation begins; only top_k=0 switches it off. compute_transition_scores(normalize_logits=True) then gives
# log-probabilities of the shortened distribution. transformers 5.10.4.
# Why it matters: roll-outs come from another policy than the one that is trained. Ratios to the recorded scores are off
# before any update, and tokens outside the fifty are never tried.
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
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, eos_token_id=None)).eval()
prompts = torch.ones(3000, 1, dtype=torch.long)


def drawn(**options):
    return model.generate(prompts, max_new_tokens=1, do_sample=True, temperature=1.0, **options)


print("transformers", version("transformers"))
print("the model's generation config says top_k =", model.generation_config.top_k)
config = GenerationConfig(do_sample=True, temperature=1.0, top_k=None, max_new_tokens=1)
found = {
    "nothing said": len(set(drawn()[:, 1].tolist())),
    "GenerationConfig(top_k=None)": len(set(model.generate(prompts, generation_config=config)[:, 1].tolist())),
    "top_k=0": len(set(drawn(top_k=0)[:, 1].tolist())),
}
print("different tokens of 300 among 3000 draws:", found)
out = drawn(return_dict_in_generate=True, output_scores=True)
with torch.no_grad():
    own = model(prompts[:1]).logits[0, -1].log_softmax(-1)[out.sequences[:, 1]]
scores = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)[:, 0]
print(f"transition scores less the model's log-probabilities: {float((scores - own).mean()):.2f} on average")
if model.generation_config.top_k is not None or [*found.values()][:2] != [50, 50] or found["top_k=0"] < 290:
    sys.exit("CHANGED: what is drawn by default is no longer cut to fifty tokens, or the config says so")
PYTHON
