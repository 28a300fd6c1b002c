#!/usr/bin/env bash
# Guessed: an index given float32 vectors keeps them, and its exact search finds the passage that numpy finds.
# So is: without `dtype` the width goes by the processor: bfloat16 where it computes with that, then float16, else float32. Vectors of the
# length 1 keep two to three digits, so passages that lie close together change places, in `exact=True` too. usearch 2.26.6.
# Why it matters: what an agent is shown then depends on the machine that built the index. With `dtype="f32"` it does not.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet usearch==2.26.6 numpy==2.4.6
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
from usearch.index import Index

PASSAGES, QUESTIONS, WIDTH, TOPICS, APART = 5000, 500, 256, 50, 0.1
rng = np.random.default_rng(0)
topics = rng.normal(size=(TOPICS, WIDTH))


def about(n):
    vectors = topics[rng.integers(0, TOPICS, n)] + APART * rng.normal(size=(n, WIDTH))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


passages, questions = about(PASSAGES), about(QUESTIONS)
best = (questions.astype(float) @ passages.astype(float).T).argmax(axis=1)
print("usearch", version("usearch"), "- float32 vectors, exact search")
others = {}
for asked in (None, "f32"):
    index = Index(ndim=WIDTH, metric="cos", dtype=asked)
    index.add(np.arange(PASSAGES), passages, threads=1)
    found = index.search(questions, 1, exact=True, threads=1).keys[:, 0]
    others[asked] = int((found != best).sum())
    print(f"dtype={asked}: kept as {index.dtype}; another best passage than numpy's for {others[asked]} of {QUESTIONS} questions")
if others[None] < 5 or others["f32"]:
    sys.exit("CHANGED: vectors are kept as they are given")
PYTHON
