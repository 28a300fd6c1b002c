#!/usr/bin/env bash
# Guessed: of two passages that have the word once, BM25 puts the shorter first.
# So is: a passage's length is kept in one byte, as in Lucene. From 40 words on lengths share a byte: 88 to 95 words are one length, as are 104
# to 111. Passages of a corpus cut at 100 words have equal scores, and the one that was written first comes first. tantivy 0.27.0.
# Why it matters: an exact BM25 (bm25s, rank_bm25, ours) ranks such passages by length, an index of tantivy or Lucene by their place in the
# file, so recall at 3 differs between servers of one corpus with one k1 and b.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet tantivy==0.27.0
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version
from itertools import groupby

import tantivy


def found(lengths):
    """(length, score) of passages that have "paris" once, as they are ranked."""
    fields = tantivy.SchemaBuilder()
    fields.add_text_field("text", stored=False)
    fields.add_integer_field("words", stored=True)
    index = tantivy.Index(fields.build())
    writer = index.writer(num_threads=1)
    for words in lengths:
        writer.add_document(tantivy.Document(text="paris" + " film" * (words - 1), words=words))
    writer.commit()
    index.reload()
    searcher = index.searcher()
    hits = searcher.search(index.parse_query("paris", ["text"]), len(lengths)).hits
    return [(searcher.doc(place)["words"][0], score) for score, place in hits]


print("tantivy", version("tantivy"), "- lengths with one score:")
ranked = found(range(36, 120))
groups = [[words for words, _ in group] for _, group in groupby(ranked, key=lambda hit: hit[1])]
for group in groups:
    print(f"{group[0]} to {group[-1]}" if len(group) > 1 else group[0], end=", ")
longest_first = [words for words, _ in found(range(95, 87, -1))]
print("\nwritten from the longest to the shortest they are ranked", longest_first)
if list(range(88, 96)) not in groups or [36] not in groups or longest_first != list(range(95, 87, -1)):
    sys.exit("CHANGED: which lengths count as one")
PYTHON
