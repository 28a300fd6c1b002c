#!/usr/bin/env bash
# Guessed: Dataset.map is computed anew where the code that it runs has changed.
# So is: its cache knows a function of the script by its code, and one of an imported module by its name alone. After an edit of
# the module the old results come back, also where the script's own function only calls it. datasets 5.2.0.
# Why it matters: prompts, answers or rewards are prepared by functions of a package. Who mends one there, and starts the same
# script, trains on what it made before.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet datasets==5.2.0
fi
cd "$(mktemp -d)"
export PYTHONDONTWRITEBYTECODE=1 HF_DATASETS_CACHE="$PWD/cache"
printf '{"gold": %d}\n' 1 2 3 > records.jsonl
cat > script.py <<'PYTHON'
import sys
from importlib.metadata import version

import prompts
from datasets import disable_progress_bars, load_dataset

disable_progress_bars()


def here(record):
    return {"points": record["gold"] + OFFSET}


OFFSET = int(sys.argv[1])
rows = load_dataset("json", data_files="records.jsonl", split="train")
print("datasets", version("datasets"), "module:", rows.map(prompts.points)["points"][:],
      "called by the script:", rows.map(lambda record: prompts.points(record))["points"][:],
      "in the script:", rows.map(here)["points"][:])
PYTHON
go() {
  printf 'def points(record):\n    return {"points": record["gold"] + %d}\n' "$1" > prompts.py
  "$FINDINGS_VENV/bin/python" script.py "$1"
}
go 1
go 100 | tee after
grep -q "module: \[2, 3, 4\] called by the script: \[2, 3, 4\] in the script: \[101, 102, 103\]" after ||
  { echo "CHANGED: an edit of an imported module is seen"; exit 1; }
