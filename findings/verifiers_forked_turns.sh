#!/usr/bin/env bash
# Guessed: the branches of a trace, each of which is one sample to train on, divide its sampled tokens among them: `sampled_mask` marks
# a turn that two branches share in one of them.
# So is: in both. Of a trace that asks twice after its first search, that search is marked twice, and so are its log-probs and credit.
# verifiers 0.4.0.
# Why it matters: who trains on branches as they come weighs shared turns by the number of answers that grew from them, and a sum over tokens
# or a mean over branches is another objective than that over trajectories. prime-rl trains a shared turn in its first branch alone.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet verifiers==0.4.0
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace
from verifiers.v1.types import AssistantMessage, UserMessage

trace = WireTrace.model_validate({"task": {"type": "Question", "data": {"idx": 0}}, "agent": {"config": {}}})


def say(parent, text, tokens, sampled):
    """Adds a message of that many tokens behind `parent`; returns its place."""
    kind = AssistantMessage if sampled else UserMessage
    node = MessageNode(parent=parent, message=kind(content=text), sampled=sampled, token_ids=[*range(tokens)], mask=[sampled] * tokens)
    trace.nodes.append(node)
    return len(trace.nodes) - 1


search = say(say(None, "Who wrote it?", 6, False), "search: it", 8, True)
for passage, answer in (("He wrote it.", "him"), ("She wrote it.", "her")):
    say(say(search, passage, 5, False), answer, 2, True)

marked = [sum(branch.sampled_mask) for branch in trace.branches]
sampled = sum(len(node.token_ids) for node in trace.nodes if node.sampled)
print("verifiers", version("verifiers"))
print(f"tokens that the policy wrote: {sampled}; marked in its {len(marked)} branches: {marked}, {sum(marked)} in all")
if (sampled, marked) != (12, [10, 10]):
    sys.exit("CHANGED: which tokens the branches of a trace mark")
PYTHON
