#!/usr/bin/env bash
# Guessed: a JSON file that pandas or datasets wrote holds small numbers as well as large ones.
# So is: numbers are written with ten digits behind the point: a probability of 1.2e-12 is 0.0 there, and 1.23456789e-9 is 1.2e-9. Below
# 1e-15 they are written in full again. Dataset.to_json does as pandas does; to_csv and json.dumps keep all. pandas 2.3.3,
# datasets 5.2.0.
# Why it matters: the probability of a whole answer is of this size. Its logarithm is -inf after one save, an importance ratio to it
# infinite; p-values become 0. double_precision=15 moves the place and does not remove it.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet pandas==2.3.3 datasets==5.2.0
fi
cd "$(mktemp -d)"
HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 HF_DATASETS_CACHE=$PWD/cache "$FINDINGS_VENV/bin/python" - <<'PYTHON'
import json
import sys
from pathlib import Path

import datasets
import pandas as pd

numbers = [1.23456789e-9, 1.23456789e-12, 1.23456789e-16]
frame = pd.DataFrame({"p": numbers})
datasets.Dataset.from_dict({"p": numbers}).to_json("records.jsonl")
written = {
    "pandas": [json.loads(line)["p"] for line in frame.to_json(orient="records", lines=True).split()],
    "datasets": [json.loads(line)["p"] for line in Path("records.jsonl").read_text().split()],
    "pandas, 15 digits": list(json.loads(frame.to_json(double_precision=15))["p"].values()),
    "json.dumps": json.loads(json.dumps(numbers)),
}
print("pandas", pd.__version__, "datasets", datasets.__version__)
for name, found in written.items():
    print(f"{name:18}", found)
if written["pandas"][1] != 0 or written["datasets"][1] != 0 or written["pandas"][2] == 0:
    sys.exit("CHANGED: small numbers are kept")
PYTHON
