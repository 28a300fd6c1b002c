#!/usr/bin/env bash
# Guessed: a trace that was written as JSON and read again trains as it did; pydantic writes every digit.
# So is: log-probs, credit, entropies and the reference's log-probs are written with four digits behind the point, by `model_dump_json` as
# by `to_record`. A credit below .00005 is 0.0: with a reward divided over a batch of 30,000 tokens all of it is gone. Log-probs of the
# surest tokens become 0. `to_record(float_decimals=None)` keeps every digit; so does a dump in Python's own types. verifiers 0.4.0.
# Why it matters: training that replays recorded traces, off-policy, learns nothing from credit that was averaged before it was written,
# and its code shows no reason.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet verifiers==0.4.0
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import json
import math
import sys
from importlib.metadata import version

from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace
from verifiers.v1.types import AssistantMessage

credit = [1 / 30_000, -1 / 30_000, 1.0 / 3]  # of a mean over a batch of tokens; the last is a token's own
logprobs = [math.log1p(-p) for p in (1e-5, 4e-5, 0.3)]
trace = WireTrace.model_validate({"task": {"type": "Question", "data": {"idx": 0}}, "agent": {"config": {}}})
trace.nodes.append(
    MessageNode(
        message=AssistantMessage(content="search: it"),
        sampled=True,
        token_ids=[0, 1, 2],
        mask=[True] * 3,
        logprobs=logprobs,
        advantages=credit,
    )
)
written = {
    "model_dump_json()": json.loads(trace.model_dump_json()),
    "to_record()": trace.to_record(),
    "to_record(float_decimals=None)": trace.to_record(float_decimals=None),
    "model_dump()": trace.model_dump(),
}
print("verifiers", version("verifiers"), "- credit", credit)
for how, record in written.items():
    (node,) = record["nodes"]
    print(f"{how:31} credit {node['advantages']} log-probs {node['logprobs']}")
found = [record["nodes"][0]["advantages"] == credit for record in written.values()]
rounded = WireTrace.model_validate(trace.to_record()).nodes[0]
if found != [False, False, True, True] or rounded.advantages != [0.0, 0.0, 0.3333] or rounded.logprobs[:2] != [0.0, 0.0]:
    sys.exit("CHANGED: how many digits a recorded trace keeps")
PYTHON
