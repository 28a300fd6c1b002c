#!/usr/bin/env bash
# Guessed: a Trainer whose compute_loss returns the mean of its batch takes the same step for 1 batch of 8 as for 8 accumulated
# batches of 1; so does label_smoothing_factor.
# So is: losses are summed over the accumulated batches, not averaged, wherever the model's forward takes keyword arguments, as Llama's,
# Qwen's and nearly all others do. Gradient and logged loss are 8 times too large; the built-in loss is right, as it divides itself.
# The documentation speaks of "slightly inaccurate". transformers 5.10.4.
# Why it matters: a policy-gradient loss of one's own is written just so. Adam hides the factor, but max_grad_norm (1.0 by default)
# then cuts every step, and a penalty on weights or a second loss beside it weighs an eighth. Set
# self.model_accepts_loss_kwargs = False in such a Trainer.
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

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
torch.manual_seed(1)
texts = torch.randint(1, 50, (8, 12)).tolist()
data = Dataset.from_list([{"input_ids": text, "labels": text} for text in texts])


class OwnLoss(Trainer):
    """The mean negative log-likelihood of a batch, as its user would write it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1]
        return -logits.log_softmax(-1).gather(-1, labels[:, 1:, None]).mean()


def first_step(trainer, accumulated, **options):
    """Logged loss and gradient norm of one update with the same eight texts."""
    torch.manual_seed(0)
    args = TrainingArguments(
        "out", per_device_train_batch_size=8 // accumulated, gradient_accumulation_steps=accumulated, max_steps=1,
        logging_steps=1, save_strategy="no", report_to=[], max_grad_norm=1e9, disable_tqdm=True, use_cpu=True, **options,
    )
    run = trainer(model=LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2)), args=args, train_dataset=data)
    run.log = lambda logs, *_: run.state.log_history.append(logs)
    run.train()
    return run.state.log_history[0]["loss"], run.state.log_history[0]["grad_norm"]


print("transformers", version("transformers"), "torch", torch.__version__)
factors = {}
for name, trainer, options in (
    ("the model's own loss", Trainer, {}),
    ("compute_loss with a mean", OwnLoss, {}),
    ("label_smoothing_factor=0.1", Trainer, {"label_smoothing_factor": 0.1}),
):
    (loss, norm), (loss_8, norm_8) = (first_step(trainer, accumulated, **options) for accumulated in (1, 8))
    factors[name] = norm_8 / norm
    print(f"{name}: loss {loss:.2f} and gradient norm {norm:.2f} at once, {loss_8:.2f} and {norm_8:.2f} in eight parts")
plain, own, smoothed = factors.values()
if abs(plain - 1) > 0.01 or abs(own - 8) > 0.1 or abs(smoothed - 8) > 0.1:
    sys.exit("CHANGED: the step does not depend on how its batch is cut")
PYTHON
