#!/usr/bin/env bash
# Guessed: a model that AutoModelForCausalLM.from_pretrained read, and one that TRL's GRPOTrainer reads by its folder's name,
# train alike.
# So is: transformers 5 reads what the file has, which is bfloat16 for most models; TRL reads a folder in float32. At TRL's own
# default learning rate, 1e-6, a step is smaller than half the distance between neighbouring bfloat16 numbers, so nearly no
# weight of the first model moves, and the log looks like any other. trl 1.16.0, transformers 5.10.4, torch 2.13.0.
# Why it matters: 1e-6 is the usual rate of RL with language models. Pass dtype=torch.float32, or the folder's name.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet trl==1.16.0 transformers==5.10.4 torch==2.13.0
fi
cd "$(mktemp -d)"
HF_HUB_OFFLINE=1 "$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

words = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(97))]
raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
tokenizer.save_pretrained("model")
torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=100)
LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, eos_token_id=1)).to(torch.bfloat16).save_pretrained("model")


def reward(completions, **_):
    return [float(text.count("1")) for text in completions]


def moved(model):
    """The data type it trains in, and the share of weights that differ after twenty steps."""
    small = dict(max_steps=20, per_device_train_batch_size=8, num_generations=8, max_completion_length=8)
    silent = dict(report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, logging_steps=100)
    args = GRPOConfig(output_dir="out", lr_scheduler_type="constant", **small, **silent)
    prompts = Dataset.from_list([{"prompt": f"w{i}"} for i in range(40)])
    trainer = GRPOTrainer(model, reward, args, train_dataset=prompts, processing_class=tokenizer)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    pairs = zip(before, trainer.model.parameters(), strict=True)
    return trainer.model.dtype, sum(int((old != new).sum()) for old, new in pairs) / sum(w.numel() for w in before)


print("trl", version("trl"), "transformers", version("transformers"), "learning rate", GRPOConfig("out", use_cpu=True).learning_rate)
read, named = moved(AutoModelForCausalLM.from_pretrained("model")), moved("model")
print(f"read by from_pretrained: {read[0]}, {read[1]:.1%} of the weights moved in twenty steps")
print(f"named by its folder: {named[0]}, {named[1]:.1%}")
if read[0] != torch.bfloat16 or read[1] > 0.1 or named[0] != torch.float32 or named[1] < 0.9:
    print("CHANGED: both train in one data type, or both move")
    sys.exit(1)
PYTHON
