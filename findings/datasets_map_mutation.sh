#!/usr/bin/env bash
# Guessed: Dataset.map adds the columns that its function returns, and leaves the others as they are.
# So is: what the function does to the record that it was given is kept as well, if it returns anything: messages.pop() to get the answer
# takes the answer out of the messages. If it returns nothing, everything it did is dropped. Nothing is said either way. datasets 5.2.0.
# Why it matters: a prompt loses its last turn, or gold answers are sorted and lowered, by a function that was to compute a length or a
# label; and a function that was to change the record, and forgets to return it, changes nothing.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet datasets==5.2.0
fi
HF_DATASETS_DISABLE_PROGRESS_BARS=1 "$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys

import datasets
from datasets import Dataset

QUESTION, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Curie"}


def answer(record):
    """Returns a new column, and takes a message away to make it."""
    return {"answer": record["messages"].pop()["content"]}


def changed(record):
    """Changes the record, and returns nothing."""
    record["messages"].pop()
    record["answer"] = "Curie"


dataset = Dataset.from_list([{"messages": [QUESTION, ANSWER]}])
added, forgotten = dataset.map(answer)[0], dataset.map(changed)[0]
print("datasets", datasets.__version__)
print("before               ", dataset[0])
print("returns a column     ", added)
print("returns nothing      ", forgotten)
if added != {"messages": [QUESTION], "answer": "Curie"} or forgotten != dataset[0] or dataset[0] != {"messages": [QUESTION, ANSWER]}:
    sys.exit("CHANGED: map keeps other parts of a record")
PYTHON
