#!/usr/bin/env bash
# Guessed: RetrievalRecall of torchmetrics, given the passages that a search brought and which of them are relevant, is the share of the
# relevant ones that were found.
# So is: it knows of no others. One of four relevant passages among three that were found is a recall of 1; nDCG and average precision
# are 1 as well where it stands first. Only whoever passes a score for every passage of the corpus gets recall. torchmetrics 1.9.0.
# Why it matters: a search engine returns its best k. Recall of these is 1 or 0 for each question, and its mean is the share of questions
# with any hit, under the name of recall. trec_eval takes the relevant passages apart from the ranking.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.13.0 pytrec-eval-terrier==0.5.11
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import pytrec_eval
import torch
from torchmetrics.functional import retrieval

found, relevant = {"a": 3.0, "x": 2.0, "y": 1.0}, {"a": 1, "b": 1, "c": 1, "d": 1}
scores, hits = torch.tensor(list(found.values())), torch.tensor([name in relevant for name in found])
ours = {
    "recall": retrieval.retrieval_recall(scores, hits),
    "average precision": retrieval.retrieval_average_precision(scores, hits),
    "nDCG": retrieval.retrieval_normalized_dcg(scores, hits),
}
names = {"recall": "recall_5", "average precision": "map", "nDCG": "ndcg"}
judge = pytrec_eval.RelevanceEvaluator({"q": relevant}, {"recall.5", "map", "ndcg"})
theirs = judge.evaluate({"q": found})["q"]
print("torchmetrics", version("torchmetrics"), "- found a, x, y; relevant a, b, c, d")
for name, value in ours.items():
    print(f"{name:17} torchmetrics {float(value):.3f}, trec_eval {theirs[names[name]]:.3f}")
if any(float(value) != 1 for value in ours.values()) or theirs["recall_5"] != 0.25:
    sys.exit("CHANGED: passages that were not found count")
PYTHON
