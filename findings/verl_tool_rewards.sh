#!/usr/bin/env bash
# Guessed: what a verl tool returns as `tool_reward_score` ("the step reward score of the tool") is a reward of its turn.
# So is: the agent loop keeps it as `tool_rewards` beside the tokens. The response has one score, on its last token, which the
# reward function gives; the built-in functions do not look at `tool_rewards`, and no trainer does.
# verl 0.9.1.
# Why it matters: a training with rewards per tool call runs, logs no error, and is one with the answer's reward alone.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet "verl[verl-core]==0.9.1"
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import asyncio
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import verl
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.experimental.agent_loop.tool_parser import FunctionCall


class Search(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="found"), 0.25, {}


schema = {"type": "function", "function": {"name": "search", "description": "", "parameters": {
    "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}
search = Search({"type": "native"}, OpenAIFunctionToolSchema.model_validate(schema))
loop = object.__new__(ToolAgentLoop)  # its own method for a call; the rest of it wants a server and a model
loop.tools, loop.max_tool_response_length, loop.tool_response_truncate_side = {"search": search}, 100, "left"
data = AgentData([], [], [], [], None, {}, "request", {})
call = FunctionCall(name="search", arguments='{"query": "q"}')
_, paid, _ = asyncio.run(loop._call_tool(call, {}, data))
# Two turns with an observation between them, as the loop hands them on: what the tool paid, and the score of the response.
output = AgentLoopOutput(
    prompt_ids=[1, 2], response_ids=[3, 4, 5, 6, 7], response_mask=[1, 1, 0, 1, 1], reward_score=1.0,
    metrics=AgentLoopMetrics(), extra_fields={"turn_scores": [], "tool_rewards": [paid]},
)
fields = output.as_dict()
root = Path(verl.__file__).parent
readers = sorted(str(f.relative_to(root)) for f in root.rglob("*.py") if "tool_rewards" in f.read_text(encoding="utf-8"))
print("verl", version("verl"))
print("the tool paid", paid, "-> rm_scores", fields["rm_scores"].tolist(), "tool_rewards", fields["extra_fields"]["tool_rewards"])
print("files that name tool_rewards:", ", ".join(readers))
unread = all(name.startswith("experimental/agent_loop/") for name in readers)
if paid != 0.25 or not torch.equal(fields["rm_scores"], torch.tensor([0.0, 0, 0, 0, 1])) or not unread:
    sys.exit("CHANGED: what a tool pays reaches the response's rewards, or a trainer reads it")
PYTHON
