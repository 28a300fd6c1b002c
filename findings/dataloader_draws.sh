#!/usr/bin/env bash
# Guessed: how often a training is evaluated, in eval mode on questions in a fixed order, does not change the training.
# So is: each pass over a DataLoader draws a number from torch's global generator, shuffled or not, with and without workers, and
# everything that is drawn afterwards is another draw. A loader with a generator of its own leaves the global one alone. With
# transformers' Trainer, eval_steps=2 and no evaluation end in other weights where the model has dropout.
# torch 2.13.0, transformers 5.10.4.
# Why it matters: roll-outs that are sampled after an evaluation are others. Two arms with one seed that are evaluated at different
# steps are no pair, and a run that collapsed cannot be replayed with more evaluations to see where.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet transformers==5.10.4 accelerate==1.15.0 datasets==5.2.0 torch==2.13.0
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def next_draw(**options):
    """What the global generator gives after a pass over an unshuffled loader."""
    torch.manual_seed(0)
    for _ in DataLoader(range(4), shuffle=False, **options):
        pass
    return float(torch.rand(()))


torch.manual_seed(0)
untouched = float(torch.rand(()))
passed, own = next_draw(), next_draw(generator=torch.Generator())
print("torch", torch.__version__, "transformers", version("transformers"))
print(f"the next draw: {untouched:.4f}; after a pass over an unshuffled loader {passed:.4f}, over one with its own generator {own:.4f}")

torch.manual_seed(1)
texts = torch.randint(1, 50, (32, 10)).tolist()
data = Dataset.from_list([{"input_ids": text, "labels": text} for text in texts])


def trained(dropout, **options):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    args = TrainingArguments(
        "out", max_steps=8, learning_rate=1e-2, seed=0, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, **options
    )
    model = LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=dropout))
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data)
    trainer.log = lambda *_: None
    trainer.train()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


moved = {}
for dropout in (0.0, 0.1):
    alone, repeated = trained(dropout), trained(dropout)
    watched = trained(dropout, eval_strategy="steps", eval_steps=2)
    moved[dropout] = float((alone - watched).abs().max())
    print(f"dropout {dropout}: largest distance of a weight to the same run again {float((alone - repeated).abs().max()):.4f}", end=", ")
    print(f"to the one evaluated every two steps {moved[dropout]:.4f}")
if own != untouched or passed == untouched or moved[0.0] != 0 or moved[0.1] == 0:
    sys.exit("CHANGED: evaluating leaves the generator alone")
PYTHON
