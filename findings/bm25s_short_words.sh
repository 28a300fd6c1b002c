#!/usr/bin/env bash
# Guessed: bm25s finds the passage on vitamin C for "What is C?", or finds nothing.
# So is: its tokenizer leaves out English stop words, and every word of one letter. What is left of the question is known to no
# passage, so all score 0, and the k passages that come back are those at the end of the corpus, as if they were found. bm25s 0.3.16.
# Why it matters: an agent that searches for a letter, a digit or stop words ("The Who") reads passages that have nothing to do
# with it, and a success or failure is laid at its door. Look at the scores.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet bm25s==0.3.16
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import bm25s

passages = ["Vitamin C is in oranges.", "Vitamin B is in grain.", "Oslo is a city in Norway.", "Red apples grow on trees."]
index = bm25s.BM25(corpus=passages)
index.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)


def found(question):
    tokens = bm25s.tokenize(question, show_progress=False)
    documents, scores = index.retrieve(tokens, k=2, show_progress=False)
    return documents[0].tolist(), scores[0].tolist()


print("bm25s", version("bm25s"))
results = {question: found(question) for question in ("vitamin", "What is C?", "C", "the")}
for question, (documents, scores) in results.items():
    print(f"{question!r}: {documents}, scores {[round(score, 2) for score in scores]}")
nothing = [results[question] for question in ("What is C?", "C", "the")]
if min(results["vitamin"][1]) <= 0 or any(max(scores) > 0 or len(documents) != 2 for documents, scores in nothing):
    print("CHANGED: letters are words, or what scores 0 does not come back")
    sys.exit(1)
PYTHON
