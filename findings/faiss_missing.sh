#!/usr/bin/env bash
# Guessed: index.search(queries, k) gives k passages wherever the index holds more than k, or raises an error.
# So is: an IVF index looks into `nprobe` of its lists, one unless told otherwise, and fills up with the number -1 where these hold fewer
# than k. passages[-1] is Python for the last passage, so the end of the corpus is brought again and again, as if it were found.
# faiss-cpu 1.15.1.
# Why it matters: a search tool that looks numbers up in a list gives an agent one passage several times, unrelated to its question, and
# the run says nothing. Leave out numbers below 0, or raise nprobe.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet faiss-cpu==1.15.1 numpy==2.4.6
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import faiss
import numpy as np

passages, size, k = 4000, 64, 50
vectors = np.random.default_rng(0).normal(size=(passages, size)).astype(np.float32)
faiss.normalize_L2(vectors)
index = faiss.IndexIVFFlat(faiss.IndexFlatIP(size), size, 100, faiss.METRIC_INNER_PRODUCT)
index.train(vectors)
index.add(vectors)
queries = vectors[:200]

corpus = [f"passage {number}" for number in range(passages)]


def last_passage(nprobe):
    """How many of the searches bring the last passage several times, and the share of all that was brought that it makes up."""
    index.nprobe = nprobe
    brought = [[corpus[number] for number in numbers] for numbers in index.search(queries, k)[1]]
    times = np.array([found.count(corpus[-1]) for found in brought])
    return int((times > 1).sum()), times.sum() / (len(queries) * k)


default = faiss.IndexIVFFlat(faiss.IndexFlatIP(size), size, 100).nprobe
few, share = last_passage(default)
many, _ = last_passage(20)
print("faiss", version("faiss-cpu"), "nprobe unless told otherwise:", default)
print(f"of {len(queries)} searches for {k} of {passages} passages {few} bring the last passage several times; it is {share:.0%} of all")
print(f"with nprobe=20: {many}")
if default != 1 or few < 100 or many > 0:
    sys.exit("CHANGED: missing passages are not numbered -1")
PYTHON
