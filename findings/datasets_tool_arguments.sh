#!/usr/bin/env bash
# Guessed: Dataset.from_list keeps a message's tool call as it was written, as load_dataset does with the same records in a file.
# So is: from_list gives each call the arguments of every other one, as None: search(query="x") beside open(page=3) has a page too, and
# the chat template writes "page": null into its text. load_dataset of the JSON Lines file with the same records keeps calls apart.
# datasets 5.2.0, transformers 5.10.4.
# Why it matters: demonstrations of tool use are the warm start of an agent. It learns to write arguments that its tool does not have,
# and each tool that joins the data changes the texts of all others. (trl.trainer.utils.remove_none_values takes them out; no trainer does.)
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet datasets==5.2.0 transformers==5.10.4 jinja2
fi
cd "$(mktemp -d)"
HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 "$FINDINGS_VENV/bin/python" - <<'PYTHON'
import json
import sys
from importlib.metadata import version

from datasets import Dataset, load_dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

TEMPLATE = """{%- for message in messages %}{%- for call in message.tool_calls -%}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}{%- endfor %}"""
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"?": 0}, unk_token="?")), chat_template=TEMPLATE)


def record(name, **arguments):
    """One message of an agent that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}


records = [record("search", query="x"), record("open", page=3), record("weather", city="Paris")]
with open("calls.jsonl", "w") as file:
    file.write("\n".join(map(json.dumps, records)))


def texts(dataset):
    """What a model is shown of each record."""
    return [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in dataset]


listed, read = texts(Dataset.from_list(records)), texts(load_dataset("json", data_files="calls.jsonl", split="train", cache_dir="."))
print("datasets", version("datasets"), "transformers", version("transformers"))
print("from_list   ", *listed)
print("load_dataset", *read)
if not all(text.count("null") == 2 for text in listed) or any("null" in text for text in read):
    sys.exit("CHANGED: from_list and load_dataset keep tool calls alike")
PYTHON
