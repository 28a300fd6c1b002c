#!/usr/bin/env bash
# Guessed: what a tokenizer saves does not depend on how it was last called.
# So is: a call with truncation=True, max_length=512 stays in the tokenizer below, and save_pretrained writes it, padding too, into
# tokenizer.json. transformers sets both anew in each call and shows nothing; who reads the file with tokenizers
# (Tokenizer.from_file, as engines and servers in Rust do), or calls backend_tokenizer, gets texts cut to 512 tokens and short
# ones padded. transformers 5.10.4, tokenizers 0.22.2.
# Why it matters: trainers tokenize with a limit and save the tokenizer beside each checkpoint. The same folder then gives other
# lengths, prompts without their ends, and pad tokens that count as text, wherever something else than transformers reads it.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet transformers==5.10.4
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
raw.train_from_iterator(["a search agent reads what it found"], trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>"], show_progress=False))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>")
long, short = "a search agent reads what it found", "a search"

tokenizer.save_pretrained("before")
tokenizer([long, short], truncation=True, padding="max_length", max_length=4)  # as a trainer prepares its data
tokenizer.save_pretrained("after")
print("transformers", version("transformers"), "tokenizers", version("tokenizers"))
lengths = {}
for folder in ("before", "after"):
    plain = Tokenizer.from_file(f"{folder}/tokenizer.json")
    lengths[folder] = [len(plain.encode(text).ids) for text in (long, short)]
    read = AutoTokenizer.from_pretrained(folder)
    print(f"saved {folder} the call: texts of 7 and 2 tokens have {lengths[folder]} for tokenizers,", end=" ")
    print([len(read(text).input_ids) for text in (long, short)], "for transformers")
print("and in the same process, by backend_tokenizer:", [len(tokenizer.backend_tokenizer.encode(text).ids) for text in (long, short)])
if lengths != {"before": [7, 2], "after": [4, 4]}:
    sys.exit("CHANGED: a saved tokenizer does not depend on earlier calls")
PYTHON
