#!/usr/bin/env bash
# Guessed: with_format("numpy") gives the numbers that a dataset holds, as numpy has them: float64 columns as float64.
# So is: one record's numbers are float64, a column's or a batch's are float32: dataset[0]["x"] and dataset[:1]["x"][0] are two numbers.
# with_format("torch") gives float32 in both. with_format("numpy", dtype="float64") gives what is there. datasets 5.2.0.
# Why it matters: summed log-probabilities of long answers, rewards or time stamps that were kept in double precision lose half of their
# digits: a log-probability of -3000 is off by 1e-4, and two time stamps of this year that are a minute apart are equal.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys

import datasets
from datasets import Dataset

values = {"log_prob": [-3000.0123456789, -0.1], "time": [1764300000.0, 1764300060.0]}
dataset = Dataset.from_dict(values)
numpy = dataset.with_format("numpy")
record, batch, doubled = numpy[0], numpy[:], dataset.with_format("numpy", dtype="float64")[:]
print("datasets", datasets.__version__, "the dataset's own types", {name: column.dtype for name, column in dataset.features.items()})
print("one record:", record["log_prob"].dtype, record["log_prob"], " a batch:", batch["log_prob"].dtype, batch["log_prob"][0])
print("two times a minute apart, in a batch:", *map(int, batch["time"]), " with dtype='float64':", *map(int, doubled["time"]))
if record["log_prob"].dtype != "float64" or batch["log_prob"].dtype != "float32" or doubled["time"].tolist() != values["time"]:
    sys.exit("CHANGED: numbers have one precision")
if batch["time"][0] != batch["time"][1] or record["log_prob"] == batch["log_prob"][0]:
    sys.exit("CHANGED: a batch keeps all digits")
PYTHON
