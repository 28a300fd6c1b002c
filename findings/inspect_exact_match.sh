#!/usr/bin/env bash
# Guessed: `exact()` is SQuAD's exact match, whose F1 stands beside it in the same file, so a reply that is its target, letter by letter, is right.
# So is: a target that is an article is right for no reply. Of multiple-choice questions answered by a letter, all that ask for "A" are lost, by
# `f1()` too. Hyphens part words, where SQuAD drops them, and words that are numbers are compared as numbers: "Jay Z" is right for "Jay-Z",
# "7" for "007". inspect-ai 0.3.285.
# Why it matters: a perfect policy scores three quarters on four options, and exact match under this scorer is not the papers' number.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$folder/venv
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet inspect-ai==0.3.285 openai
fi
cd "$folder"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import re
import string
import sys
from importlib.metadata import version

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import exact, f1

PAIRS = [("A", "A"), ("B", "B"), ("C", "C"), ("D", "D"), ("Jay Z", "Jay-Z"), ("7", "007"), ("195152", "1951-52")]


def squad(text):
    """As SQuAD compares: without case, ASCII marks, articles and extra spaces."""
    kept = "".join(mark for mark in text.lower() if mark not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", kept).split())


replies = [ModelOutput.from_content("mockllm/model", reply) for reply, _ in PAIRS]
for reply in replies:  # else it is counted with a tokenizer from the net
    reply.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
samples = [Sample(id=i, input="?", target=target) for i, (_, target) in enumerate(PAIRS)]
(log,) = eval(
    Task(dataset=samples, scorer=[exact(), f1()]),
    model=get_model("mockllm/model", custom_outputs=replies),
    max_connections=1,
    display="none",
    log_dir="logs",
)
print("inspect-ai", version("inspect-ai"))
found = []
for sample, (reply, target) in zip(sorted(log.samples, key=lambda s: s.id), PAIRS):
    right, words = sample.scores["exact"].value == "C", sample.scores["f1"].value
    found.append((right, words))
    print(f"reply {reply!r:10} target {target!r:10} exact {right!s:6} f1 {words} SQuAD {squad(reply) == squad(target)}")
yes, no = (True, 1.0), (False, 0.0)
if found != [no, yes, yes, yes, yes, yes, no]:
    sys.exit("CHANGED: what exact() takes for equal")
PYTHON
