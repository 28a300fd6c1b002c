#!/usr/bin/env bash
# Guessed: a sequence classifier of transformers, as it is used for a reward model or critic, reads its score at the last token that
# the attention mask shows.
# So is: the mask is not asked. It reads at the last token that is not the pad token. Where the pad token is the end-of-sequence
# token, as many set it, the score of a finished text is read before its end, and that of a cut-off text at its end.
# transformers 5.10.4.
# Why it matters: finished and unfinished answers are judged at different places; what a model learned at the end token is not used.
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
from transformers import LlamaConfig, LlamaForSequenceClassification

END = 2
text = torch.tensor([[5, 6, 7, END]])
sizes = dict(vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def read_at(pad):
    """The position whose score a model with this pad token gives for the text, all of which is attended to."""
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, pad_token_id=pad, eos_token_id=END, num_labels=1, initializer_range=0.5)
    model = LlamaForSequenceClassification(config).eval()
    with torch.no_grad():
        everywhere = model.score(model.model(text).last_hidden_state)[0, :, 0]
        score = model(text, attention_mask=torch.ones_like(text)).logits[0, 0]
    return int((everywhere - score).abs().argmin())


print("transformers", version("transformers"))
own, shared = read_at(pad=0), read_at(pad=END)
print(f"a text of 4 tokens, the last one its end: read at token {own + 1} with a pad token of its own, at {shared + 1} where the end pads")
if (own, shared) != (3, 2):
    sys.exit("CHANGED: the score is read at the last token of the mask")
PYTHON
