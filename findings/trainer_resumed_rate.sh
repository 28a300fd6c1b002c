#!/usr/bin/env bash
# Guessed: a Trainer that resumes from a checkpoint with another learning_rate goes on at that rate.
# So is: rates come from the checkpoint, with the optimizer and the scheduler. The new one is in trainer.args, in the saved
# training_args.bin and in no update. transformers 5.10.4.
# Why it matters: a run that becomes unstable is resumed from the last good checkpoint with a smaller rate. It is the same run again, and
# its collapse looks as if the rate did not matter. A new Trainer on the checkpoint's model, without resuming, takes the new rate.
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
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(1)
texts = torch.randint(1, 50, (16, 12)).tolist()
data = Dataset.from_list([{"input_ids": text, "labels": text} for text in texts])


def rates(learning_rate, steps, checkpoint=None):
    """The learning rate of each update that was logged, and the model's weights at the end."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    args = TrainingArguments(
        "out", learning_rate=learning_rate, max_steps=steps, lr_scheduler_type="constant", logging_steps=1, save_steps=4,
        report_to=[], disable_tqdm=True, use_cpu=True,
    )
    trainer = Trainer(model=LlamaForCausalLM(LlamaConfig(**sizes)), args=args, train_dataset=data)
    trainer.log = lambda logs, *_: trainer.state.log_history.append({**logs, "step": trainer.state.global_step})
    trainer.train(resume_from_checkpoint=checkpoint)
    weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
    return [logs["learning_rate"] for logs in trainer.state.log_history if "learning_rate" in logs], weights


rates(1e-3, 4)
again, weights = rates(1e-3, 8, "out/checkpoint-4")
lower, weights_lower = rates(1e-6, 8, "out/checkpoint-4")
print("transformers", version("transformers"))
print("resumed at step 4 with learning_rate=0.001:", again)
print("resumed at step 4 with learning_rate=1e-06:", lower)
print("weights of the two at the end are equal:", torch.equal(weights, weights_lower))
if lower[-1] != 1e-3 or not torch.equal(weights, weights_lower):
    sys.exit("CHANGED: the new rate is taken")
PYTHON
