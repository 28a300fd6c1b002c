#!/usr/bin/env bash
# Guessed: generate_batch, transformers' own continuous batching, ends an answer where generate ends it, and an option given by name counts, or is an error.
# So is: stop strings, stopping criteria and every option by name are passed over, do_sample and temperature too; max_new_tokens alone is
# read. Only end tokens end an answer. transformers 5.24.0.
# Why it matters: an agent that is to stop at </search> writes on to its limit and makes up the passages itself.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 psutil==7.2.2
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation import ContinuousBatchingConfig

torch.manual_seed(0)
letters = {letter: i + 2 for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
raw = Tokenizer(models.BPE({"<pad>": 0, "</s>": 1, **letters}, []))
raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>")
sizes = dict(vocab_size=len(raw.get_vocab()), hidden_size=64, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, eos_token_id=1)).eval()
with torch.no_grad():  # the likeliest letter after any other is the next one of the alphabet
    model.model.embed_tokens.weight.copy_(torch.nn.functional.normalize(torch.randn(sizes["vocab_size"], 64)))
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].mlp.down_proj.weight.zero_()
    model.lm_head.weight.copy_(20 * model.model.embed_tokens.weight.roll(1, 0))
prompt = tokenizer.encode("a")
blocks = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=64)


def config(**options):
    return GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=1, pad_token_id=0, **options)


def batched(answers=1, options=None, **named):
    settings = dict(generation_config=config(**(options or {})), continuous_batching_config=blocks, progress_bar=False)
    found = model.generate_batch([prompt] * answers, **settings, **named)
    return [tokenizer.decode(one.generated_tokens) for one in found.values()]


stops = dict(stop_strings=["de"])
one_by_one = tokenizer.decode(model.generate(torch.tensor([prompt]), generation_config=config(**stops), tokenizer=tokenizer)[0, len(prompt) :])
print("transformers", version("transformers"))
print("generate, stop_strings=['de']:", one_by_one)
found = {
    "stop strings in the config": batched(options=stops),
    "stop strings by name": batched(**stops, tokenizer=tokenizer),
    "stopping criteria by name": batched(stopping_criteria=[lambda ids, scores, **rest: torch.ones(len(ids), dtype=torch.bool)]),
    "do_sample=True, temperature=9.0 by name": sorted(set(batched(answers=8, do_sample=True, temperature=9.0))),
}
for name, answers in found.items():
    print(f"generate_batch, {name}: {answers}")
if one_by_one != "bcde" or any(answers != ["bcdefghi"] for answers in found.values()):
    sys.exit("CHANGED: generate_batch now stops at strings or heeds options given by name, or refuses them")
PYTHON
