#!/usr/bin/env bash
# Guessed: GRPO with an adapter and `beta` above 0 measures the KL from the model that was given, whatever `init_lora_weights` is, since every
# beginning leaves the model's log-probs as they were.
# So is: "pissa" and "olora" move the largest parts of the weights into the adapter, and the reference is what is left without it: before any
# step the KL is .4 nats a token, and the penalty pulls there. Where the model had its adapter before, TRL adds a second one that begins
# alike, which takes the largest parts once more: now it is the trained policy that differs from the model that was given, and the KL says 0.
# trl 1.16.0, peft 0.21.2.
# Why it matters: a KL penalty ruins what it should keep, or training starts from another model; nothing warns, and rewards show it alone.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet trl==1.16.0 peft==0.21.2 transformers==5.10.4 torch==2.13.0
fi
cd "$(mktemp -d)"
cat >script.py <<'PYTHON'
import copy
import sys
from importlib.metadata import version

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

disable_progress_bars()
WORDS = ["<pad>", "<end>", *"abcdefghijklmnopqrstuvwxyz"]
words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<pad>")
torch.manual_seed(0)
sizes = dict(vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
given = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=None)).eval()
text = torch.arange(2, 22)[None]


@torch.no_grad()
def logprobs(model):
    return model.eval()(text).logits.log_softmax(-1)


def before_any_step(begun, wrapped):
    """KL of the given model from the policy that is about to be trained, and the KL that TRL logs at a learning rate of 0."""
    torch.manual_seed(0)
    model = copy.deepcopy(given)
    adapter = LoraConfig(r=8, init_lora_weights=begun, target_modules="all-linear", task_type="CAUSAL_LM")
    if wrapped:
        model = get_peft_model(model, adapter)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(
            output_dir="run", beta=0.04, learning_rate=0.0, max_steps=1, num_generations=4, per_device_train_batch_size=8,
            max_completion_length=8, logging_steps=1, use_cpu=True, bf16=False, gradient_checkpointing=False,
            report_to=[], disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a b c"}] * 8),
        processing_class=tokenizer,
        peft_config=None if wrapped else adapter,
    )
    first, policy = logprobs(given), logprobs(trainer.model)
    apart = float((first.exp() * (first - policy)).sum(-1).mean())
    trainer.train()
    return round(apart, 2) + 0.0, round(next(row["kl"] for row in trainer.state.log_history if "kl" in row), 2)


print("trl", version("trl"), "peft", version("peft"))
changed = False
for wrapped in (False, True):
    for begun in (True, "pissa", "olora"):
        policy, logged = before_any_step(begun, wrapped)
        how = "a model with its adapter" if wrapped else "peft_config"
        print(f"{how:24} init_lora_weights={begun!s:6} KL from the given model {policy}, logged {logged}")
        large = [policy > 0.05, logged > 0.05]
        changed |= large != ([False, False] if begun is True else [wrapped, not wrapped])
if changed:
    print("CHANGED: what the reference under an adapter is")
    sys.exit(1)
PYTHON
"$FINDINGS_VENV/bin/python" script.py 2>errors | grep -v "^{" || { tail -n 5 errors; exit 1; }
