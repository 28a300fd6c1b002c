#!/usr/bin/env bash
# Guessed: trec_eval's measures, by pytrec_eval, judge a ranking as it is given, and a question without an answer counts as 0.
# So is: passages are sorted anew by score, and those with equal scores by their names, last name first; the order that was given is not
# looked at. A question that the run lacks is left out of the result. ranx 0.3.21 keeps the order that is given.
# pytrec-eval-terrier 0.5.11.
# Why it matters: equal scores are common (short passages, copies, a reranker's yes and no): the same ranking has a reciprocal rank of 1 or
# 1/3 by what passages are called. An agent that never searches on hard questions has the better mean.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet pytrec-eval-terrier==0.5.11 ranx==0.3.21
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import pytrec_eval
from ranx import Qrels, Run, evaluate

run = {"q1": {"p1": 1.0, "p2": 1.0, "p3": 1.0}}
print("pytrec-eval-terrier", version("pytrec-eval-terrier"), "ranx", version("ranx"), "- equal scores, given as p1, p2, p3")
ranks = {}
for relevant in ("p1", "p3"):
    truth = {"q1": {relevant: 1}, "q2": {"p1": 1}}
    judged = pytrec_eval.RelevanceEvaluator(truth, {"recip_rank"}).evaluate(run)
    ranks[relevant] = judged["q1"]["recip_rank"]
    kept = evaluate(Qrels(truth), Run(run), "mrr", make_comparable=True)
    print(f"{relevant} is relevant: reciprocal rank {ranks[relevant]:.3f}; questions judged of two: {list(judged)};", end=" ")
    print(f"ranx, mean over both: {kept:.3f}")
if not ranks["p1"] < ranks["p3"] or "q2" in judged:
    sys.exit("CHANGED: ties keep their order, or a missing question counts")
PYTHON
