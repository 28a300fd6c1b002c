#!/usr/bin/env bash
# Guessed: eval_loss is a mean over the tokens of the evaluation set, so its perplexity does not depend on per_device_eval_batch_size.
# So is: Trainer averages the means of batches, each weighed by its number of texts. The tokens of a short text weigh the more, the fewer
# texts share its batch: the same model on the same texts, in the same order, has another eval_loss with every batch size.
# transformers 5.10.4.
# Why it matters: answers differ in length by far. Perplexities of two papers, or of one model on a small and a large machine, are not one
# measure, and the difference can be larger than that of two methods.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet transformers==5.10.4 accelerate==1.15.0 torch==2.13.0
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50, initializer_range=0.3)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
short = [torch.tensor([first, 1, 2]) for first in range(10, 22)]  # a name and two tokens that are hard for this model
long = [torch.full((40,), 3) for _ in range(4)]
texts = [text for group in range(4) for text in (*short[3 * group : 3 * group + 3], long[group])]
data = [{"input_ids": text, "labels": text} for text in texts]


def padded(rows):
    """A batch; what is padded has no label."""
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill)
        for name, fill in (("input_ids", 0), ("labels", -100))
    }


def eval_loss(size):
    """As Trainer has it, with this many texts in a batch."""
    args = TrainingArguments("out", per_device_eval_batch_size=size, report_to=[], disable_tqdm=True, use_cpu=True)
    trainer = Trainer(model, args, eval_dataset=data, data_collator=padded)
    trainer.log = lambda *_: None
    return trainer.evaluate()["eval_loss"]


with torch.no_grad():
    each = [(model(text[None], labels=text[None]).loss.item(), len(text) - 1) for text in texts]
over_tokens = sum(loss * tokens for loss, tokens in each) / sum(tokens for _, tokens in each)
found = {size: eval_loss(size) for size in (1, 2, 4, 16)}
print("transformers", version("transformers"))
for size, loss in found.items():
    print(f"batches of {size:2}: eval_loss {loss:.3f}, perplexity {torch.tensor(loss).exp():.0f}")
print(f"over all tokens: {over_tokens:.3f}")
if abs(found[16] - over_tokens) > 1e-3 or max(found.values()) - min(found.values()) < 0.1:
    sys.exit("CHANGED: eval_loss does not depend on the batch size")
PYTHON
