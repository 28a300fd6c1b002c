#!/usr/bin/env bash
# Guessed: best@4 of verl's validation, from four answers to each question, is the share of questions that one of the four solves
# (pass@4), and maj@4 the share where the commonest answer is right.
# So is: four are drawn from the four again and again with replacement, and what is averaged is the best, or the majority, of what was
# drawn. A question that one answer in four solves counts .68; one whose right answer leads by two to one to one counts .7 or less.
# verl 0.9.1.
# Why it matters: the numbers stand beside pass@k and maj@k of papers and are systematically lower, most so at the largest N and where
# success is rare; a gap between trainers may be that of two definitions.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet "verl[verl-core]==0.9.1"
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version
from math import comb

from verl.trainer.ppo.metric_utils import process_validation_metrics

QUESTIONS = 100


def validated(correct, answers):
    """verl's numbers for questions of which each has these four answers."""
    uids = [f"question {q}" for q in range(QUESTIONS) for _ in range(4)]
    infos = {"acc": list(correct) * QUESTIONS, "pred": list(answers) * QUESTIONS}
    return process_validation_metrics(["nq"] * len(uids), uids, infos)["nq"]["acc"]


rare, common = validated([1.0, 0.0, 0.0, 0.0], "abcd"), validated([1.0, 1.0, 0.0, 0.0], "aabc")
print("verl", version("verl"))
for k in (2, 4):
    unbiased = 1 - comb(3, k) / comb(4, k)
    print(f"one answer of four is right: best@{k} {rare[f'best@{k}/mean']:.3f}, pass@{k} of the same answers {unbiased:.3f}")
print(f"answers a, a, b, c where a is right: maj@4 {common['maj@4/mean']:.3f}, where a leads in every question")
if abs(rare["best@4/mean"] - (1 - 0.75**4)) > 0.02 or common["maj@4/mean"] > 0.8:
    sys.exit("CHANGED: best@4 is the best of the four answers")
PYTHON
