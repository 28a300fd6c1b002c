#!/usr/bin/env bash
# Guessed: the log of a run that became NaN shows NaN.
# So is: the loss that transformers' Trainer logs is 0.0 from that step on, where each step is logged, and is held at the mean of what came
# before within a longer window. Infinite and missing losses are left out by default (logging_nan_inf_filter=True), and the mean of the
# whole run, train_loss, is a number too. transformers 5.10.4.
# Why it matters: the weights are lost, and the curve is that of a run which has learned all there is; in GRPO, whose loss is about 0 on
# fresh data, it is that of any run. TRL's trainers are such Trainers. grad_norm shows NaN; logging_nan_inf_filter=False shows both.
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
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
texts = torch.randint(1, 50, (64, 8), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": text, "labels": text} for text in texts]


class Collapse(TrainerCallback):
    """After four steps the weights are NaN, as a division of 0 by 0 makes them."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 4:
            model.lm_head.weight.data.fill_(torch.nan)


def logged(**options):
    """Loss and gradient norm as they are logged, the loss of the whole run, and whether the weights are NaN at its end."""
    torch.manual_seed(0)
    args = TrainingArguments(
        "out", max_steps=8, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1, **options
    )
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(**SIZES)), args, train_dataset=data, callbacks=[Collapse()])
    trainer.log = lambda logs, *_: trainer.state.log_history.append(logs)
    trainer.train()
    *steps, whole = trainer.state.log_history
    losses, norms = ([round(step[name], 2) for step in steps] for name in ("loss", "grad_norm"))
    return losses, norms, whole["train_loss"], bool(trainer.model.lm_head.weight.isnan().all())


print("transformers", version("transformers"), "torch", torch.__version__)
losses, norms, whole, lost = logged()
print("loss", losses)
print("grad_norm", norms)
print(f"loss of the whole run {whole:.2f}, weights are NaN: {lost}")
honest = logged(logging_nan_inf_filter=False)[0]
print("loss with logging_nan_inf_filter=False", honest)
if losses[4:] != [0.0] * 4 or not lost or whole != whole or honest[-1] == honest[-1]:
    sys.exit("CHANGED: a loss that is NaN is logged as such")
PYTHON
