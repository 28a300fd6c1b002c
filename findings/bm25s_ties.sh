#!/usr/bin/env bash
# Guessed: one corpus, one question and one version of everything bring the same passages on every machine, of equal scores the first ones.
# So is: among equal scores it is chance which come, and in what order: numpy's argpartition decides, and it goes by the widest vector
# instructions that the processor has. Here one machine searches twice, the second time as one without AVX2 or AVX-512 would. In passages cut
# at 100 words many scores are equal: a third of the questions or more get another list. The top n of rank_bm25 goes by numpy's argsort, and
# changes as much. bm25s 0.3.16, rank_bm25 0.2.2, numpy 2.4.6, on x86-64.
# Why it matters: an agent reads other passages on another machine, so neither a roll-out nor recall at 3 can be made again. Take
# get_scores and sort it with numpy.argsort(-scores, kind="stable").
set -euo pipefail
if [ "$(uname -m)" != x86_64 ]; then
  echo "NOT RUN: what it hides are instructions of x86-64"
  exit 0
fi
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet bm25s==0.3.16 rank_bm25==0.2.2 numpy==2.4.6
fi
cd "$(mktemp -d)"
cat > script.py <<'PYTHON'
import json
import os
import subprocess
import sys
from importlib.metadata import version

import bm25s
import numpy as np
from rank_bm25 import BM25Okapi

WORDS, PASSAGES, LENGTH, QUESTIONS = 20_000, 5_000, 100, 300


def words(texts):
    return bm25s.tokenize(texts, stopwords=None, show_progress=False)


def lists(how):
    """The best three passages of each question, in a corpus whose words are as frequent as Zipf and Mandelbrot say."""
    rng = np.random.default_rng(0)
    shares = 1 / np.arange(2.7, WORDS + 2.7)
    passages = rng.choice(WORDS, size=(PASSAGES, LENGTH), p=shares / shares.sum())
    asked = [rng.choice(passages[n], 3) for n in rng.integers(0, PASSAGES, QUESTIONS)]
    questions = [[f"w{word}" for word in question] for question in asked]
    if how == "rank_bm25":
        other = BM25Okapi([[f"w{word}" for word in passage] for passage in passages])
        return [other.get_top_n(question, range(PASSAGES), n=3) for question in questions]
    index = bm25s.BM25()
    index.index(words([" ".join(f"w{word}" for word in passage) for passage in passages]), show_progress=False)
    if how == "stable":
        return [np.argsort(-index.get_scores(question), kind="stable")[:3].tolist() for question in questions]
    return index.retrieve(words([" ".join(question) for question in questions]), k=3, show_progress=False).documents.tolist()


if len(sys.argv) > 1:
    print(json.dumps(lists(sys.argv[1])))
    sys.exit()
print("bm25s", version("bm25s"), "rank_bm25", version("rank_bm25"), "numpy", version("numpy"))
others = {}
for how in ("retrieve", "rank_bm25", "stable"):
    found = []
    for hidden in ("", "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"):
        environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": hidden}
        told = subprocess.run([sys.executable, "-W", "ignore", __file__, how], env=environment, stdout=subprocess.PIPE, check=True, text=True)
        found.append(json.loads(told.stdout))
    others[how] = sum(one != other for one, other in zip(*found, strict=True))
    sets = sum({*one} != {*other} for one, other in zip(*found, strict=True))
    print(f"{how}: with narrower instructions {others[how]} of {QUESTIONS} questions get another list, {sets} other passages")
if min(others["retrieve"], others["rank_bm25"]) < QUESTIONS / 10 or others["stable"]:
    sys.exit("CHANGED: whether equal scores have an order")
PYTHON
"$FINDINGS_VENV/bin/python" script.py
