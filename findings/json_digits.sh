#!/usr/bin/env bash
# Guessed: pandas.read_json keeps what JSON says: "007" in quotation marks is a text, 7 is a number.
# So is: a column whose texts are all digits becomes numbers: "007" is 7, "1950.0" is 1950, and "1e5", an id, is 100000. So the type of a
# column depends on whether any text in it is no number. dtype=False leaves it, datasets.load_dataset and json.loads do as well.
# pandas 2.3.3.
# Why it matters: answers are years, jersey numbers, room numbers; ids have leading zeros. Gold answers of one benchmark are then
# numbers and of another texts, exact match with "007" fails, and ids no longer find their passages.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet pandas==2.3.3
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import io
import json
import sys

import pandas as pd

print("pandas", pd.__version__)
lines = "\n".join(json.dumps(record) for record in ({"id": "1e5", "answer": "007"}, {"id": "0042", "answer": "1950.0"}))
digits = pd.read_json(io.StringIO(lines), lines=True)
with_a_word = pd.read_json(io.StringIO(lines + '\n{"id": "x9", "answer": "Paris"}'), lines=True)
as_written = pd.read_json(io.StringIO(lines), lines=True, dtype=False)
for name, table in (("digits alone", digits), ("with one more record", with_a_word), ("dtype=False", as_written)):
    print(f"{name:20}", table.to_dict("list"))
if digits.answer.tolist() != [7, 1950] or digits.id.tolist() != [100000, 42]:
    sys.exit("CHANGED: read_json keeps texts of digits")
if as_written.answer.tolist() != ["007", "1950.0"] or with_a_word.answer.tolist() != ["007", "1950.0", "Paris"]:
    sys.exit("CHANGED: read_json converts other columns")
PYTHON
