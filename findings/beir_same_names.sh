#!/usr/bin/env bash
# Guessed: names of questions and of passages are two worlds; question 1 may have passage 1 as its answer.
# So is: `EvaluateRetrieval.evaluate` takes a passage that is called as its question for the question itself, and removes it unless told
# otherwise, from the run that was handed over as well. A line in the log says so. beir 2.2.0.
# Why it matters: records numbered from 0 on both sides lose right passages that were found: below, a perfect retriever finds half.
# `ignore_identical_ids=False` counts them.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  # Without what only its models need, which is gigabytes.
  "$FINDINGS_VENV/bin/pip" install --quiet pytrec-eval-terrier==0.5.11 numpy==2.4.6 tqdm==4.67.1
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps beir==2.2.0
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import copy
import sys
from importlib.metadata import version

from beir.retrieval.evaluation import EvaluateRetrieval

truth = {"0": {"0": 1}, "1": {"7": 1}}
run = {"0": {"0": 9.0, "5": 1.0}, "1": {"7": 9.0, "5": 1.0}}
print("beir", version("beir"), "- the right passage comes first for both questions; for one of them it is called like the question")
recall = {}
for ignored in (True, False):
    given = copy.deepcopy(run)
    *_, found, _ = EvaluateRetrieval.evaluate(truth, given, [1], ignore_identical_ids=ignored)
    recall[ignored] = found["Recall@1"]
    if ignored:
        default = copy.deepcopy(run)
        if EvaluateRetrieval.evaluate(truth, default, [1])[2] != found:
            sys.exit("CHANGED: equal names are no longer ignored by default")
    print(f"ignore_identical_ids={ignored}: recall {recall[ignored]}; the run afterwards: {given}")
if recall != {True: 0.5, False: 1.0}:
    sys.exit("CHANGED: a passage called like its question counts")
PYTHON
