#!/usr/bin/env bash
# Guessed: a GRPOTrainer that resumes from a checkpoint goes on with the questions, and the updates of each, that it would have had without
# the interruption, since Trainer skips what was seen.
# So is: only from a checkpoint of the first epoch, between two batches of roll-outs. In a later epoch the order is that of the first again,
# from the place that was reached: questions seen in this epoch come a second time, and others not at all. Inside a batch of roll-outs
# (num_iterations or steps_per_generation above 1) its questions are answered anew and get all their updates once more. trl 1.16.0.
# transformers' own Trainer does as guessed, in later epochs too.
# Why it matters: runs that were preempted train on other data than those that were not, and less off-policy; nothing in the log says so.
# Save at multiples of steps_per_generation * num_iterations; let an epoch be as long as the training, or shuffle and repeat the dataset before.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet trl==1.16.0 transformers==5.10.4 torch==2.13.0 datasets==5.2.0 accelerate==1.15.0
fi
cd "$(mktemp -d)"
cat > script.py <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging
from trl import GRPOConfig, GRPOTrainer

logging.set_verbosity_error()
logging.disable_progress_bar()
letters = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="!", pad_token="!")
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
questions = Dataset.from_list([{"prompt": letter} for letter in "abcdefgh"])


def asked(folder, resumed=None, **options):
    """Step by step the questions that were answered, and the trained weights. Two questions a step, two answers each."""
    found = {}

    def reward(prompts, completions, **_):
        found[trainer.state.global_step + 1] = "".join(sorted({*prompts}))
        return [float(len({*completion})) for completion in completions]

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0, **sizes))
    args = GRPOConfig(
        folder, per_device_train_batch_size=4, num_generations=2, max_completion_length=4, save_steps=1, max_steps=8,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no", **options,
    )
    trainer = GRPOTrainer(model, reward, args=args, train_dataset=questions, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=resumed and f"{folder}/checkpoint-{resumed}")
    return found, torch.cat([weights.detach().flatten() for weights in model.parameters()])


print("trl", version("trl"), "transformers", version("transformers"), "- four steps an epoch; the questions of each step")
cases = {
    "in the first epoch": (2, {}),
    "in the second epoch": (6, {}),
    "between roll-outs": (4, {"num_iterations": 2}),
    "inside roll-outs": (3, {"num_iterations": 2}),
}
equal = {}
for number, (name, (step, options)) in enumerate(cases.items()):
    whole, expected = asked(f"run{number}", **options)
    resumed, weights = asked(f"run{number}", step, **options)
    equal[name] = torch.equal(weights, expected)
    print(f"\n{name}\n  uninterrupted      {whole}\n  resumed at step {step}  {resumed}\n  equal weights at the end: {equal[name]}")
    if name == "in the second epoch":
        seen = [*"".join(whole[step] for step in (5, 6)), *"".join(resumed.values())]
        print(f"  questions of the second epoch, with the resumed steps: {len({*seen})} of 8")
        missed = len({*seen}) < 8
if [*equal.values()] != [True, False, True, False] or not missed:
    sys.exit("CHANGED: what a resumed trainer asks")
PYTHON
HF_HUB_OFFLINE=1 "$FINDINGS_VENV/bin/python" -W ignore script.py 2>errors.log | grep -v train_runtime || { cat errors.log; exit 1; }
