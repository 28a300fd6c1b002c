#!/usr/bin/env bash
# Guessed: Dataset.from_list makes a column of every key that some record has, with None where a record lacks it.
# So is: the columns are the first record's keys. What only later records have is gone, and nothing says so. The same records in
# another order, or in a JSON Lines file, keep it. datasets 5.2.0.
# Why it matters: questions from several benchmarks differ in their optional fields (gold titles, aliases, options). Whether these
# reach a trainer depends on which record happens to come first.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet datasets==5.2.0
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from datasets import Dataset, load_dataset

records = [{"question": "Who wrote it?"}, {"question": "Where was she born?", "gold_titles": ["Oslo"]}]
Path("records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
found = {
    "from_list": Dataset.from_list(records).column_names,
    "from_list, the other way round": Dataset.from_list(records[::-1]).column_names,
    "from a file": load_dataset("json", data_files="records.jsonl", split="train", cache_dir="cache").column_names,
}
print("datasets", version("datasets"))
print(*(f"{how}: {', '.join(names)}" for how, names in found.items()), sep="\n")
if [len(names) for names in found.values()] != [1, 2, 2]:
    sys.exit("CHANGED: from_list keeps what only later records have")
PYTHON
