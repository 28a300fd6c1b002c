#!/usr/bin/env bash
# Guessed: in BM25 a word weighs the less, the more passages have it.
# So is: BM25Okapi of rank_bm25 gives a word that more than half of the passages have a quarter of the average weight of all words. Most
# words of a corpus are rare, so that is a lot: "the", in 90 of 100 passages, weighs five times what "film" does, in 45.
# rank_bm25 0.2.2.
# Why it matters: in a corpus about one subject the words of the question decide less than its articles. An agent's search brings
# passages that say "the" often. BM25Plus of the same package, and bm25s, keep the order.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet rank_bm25==0.2.2
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from rank_bm25 import BM25Okapi, BM25Plus

share = {"the": 90, "film": 45, "river": 10}
passages = [[word for word, n in share.items() if i < n] + [f"name{i}", f"year{i}"] for i in range(100)]
passages[60] = ["the", "the", "the", "name60", "year60"]  # no film; passages 0 to 44 have one
found = {}
for kind in (BM25Okapi, BM25Plus):
    index = kind(passages)
    scores = index.get_scores(["the", "film"])
    found[kind.__name__] = {word: round(index.idf[word], 2) for word in share}
    print(f"{kind.__name__:10} weights {found[kind.__name__]}, best passage for 'the film': {passages[scores.argmax()]}")
print("rank_bm25", version("rank_bm25"))
if not found["BM25Okapi"]["the"] > 4 * found["BM25Okapi"]["film"] or found["BM25Plus"]["the"] > found["BM25Plus"]["film"]:
    sys.exit("CHANGED: a word of most passages weighs less than a rarer one")
PYTHON
