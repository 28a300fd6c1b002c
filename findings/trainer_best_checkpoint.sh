#!/usr/bin/env bash
# Guessed: metric_for_best_model="perplexity", or "kl", with load_best_model_at_end keeps the checkpoint where it is lowest.
# So is: where it is highest. Less is better to transformers' Trainer only where the name ends with "loss"; whatever else it is called, it
# keeps the largest, and EarlyStoppingCallback waits for it to rise. transformers 5.10.4.
# Why it matters: the model that is loaded at the end, and with save_total_limit=1 the only one that is left, is the worst of the run. The
# log shows a falling perplexity. Say greater_is_better=False.
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

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
text = torch.arange(1, 17)
data = [{"input_ids": text, "labels": text}] * 16


def perplexity(predicted):
    """Of the texts, from the logits."""
    log_probs = torch.tensor(predicted.predictions[:, :-1]).log_softmax(-1)
    return {"perplexity": (-log_probs.gather(-1, torch.tensor(predicted.label_ids[:, 1:, None])).mean()).exp().item()}


def kept(**options):
    """The perplexity after each epoch, and the one of the checkpoint that is taken for the best."""
    torch.manual_seed(0)
    args = TrainingArguments(
        "out", num_train_epochs=4, learning_rate=1e-3, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="perplexity", report_to=[], disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(**SIZES)), args, train_dataset=data, eval_dataset=data, compute_metrics=perplexity
    )
    trainer.log = lambda logs, *_: trainer.state.log_history.append(logs)
    trainer.train()
    course = [round(logs["eval_perplexity"], 1) for logs in trainer.state.log_history if "eval_perplexity" in logs]
    return course, round(trainer.state.best_metric, 1)


print("transformers", version("transformers"))
course, best = kept()
_, lowest = kept(greater_is_better=False)
print("perplexity after each epoch", course)
print("kept as the best:", best, " with greater_is_better=False:", lowest)
if course != sorted(course, reverse=True) or best != course[0] or lowest != course[-1]:
    sys.exit("CHANGED: the lowest perplexity is the best")
PYTHON
