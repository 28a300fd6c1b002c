"""Search for verl's multi-turn roll-outs: a tool that asks a Search-R1-compatible retrieval server, and
questions in verl's format. verl 0.9.1 has no search tool of its own any more, but loads any `BaseTool` that a
tool config names.

    actor_rollout_ref.rollout.multi_turn.tool_config_path=configs/cluster/search_tool.yaml
    stppo plugins verl-data nq nq/train.jsonl train.parquet

The server is ours (`stppo retriever serve`) or any other with Search-R1's interface; see
`stppo.retrieval.client`, which is what asks it.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pandas as pd

from stppo.files import write_atomically
from stppo.plugins import require_host
from stppo.retrieval.client import RetrievalClient
from stppo.world.datasets import read_records
from stppo.world.protocol import Protocol, neutralise_tags

require_host("verl")

from verl.tools.base_tool import BaseTool  # noqa: E402
from verl.tools.schemas import ToolResponse  # noqa: E402

PROMPT = (
    "Answer the question below. You may call the search tool as often as you need; reason about what it "
    "returns between <think> and </think> before you go on. As soon as you know enough, give only the final "
    "answer, as short "
    "as possible, between <answer> and </answer>, without any explanation.\nQuestion: {question}\n"
)
# verl tokenises texts together with its chat template, by a tokenizer that is not known here: whatever may be
# one of its control tokens (`</s>`, `<tool_response>`, `[INST]`; `<|im_end|>` is gone by then) gets a space
# inside.
_MAY_CONTROL = re.compile(r"<(?=/?\w+>)|\[(?=/?[A-Z_]+\])")


def _plain(text: str) -> str:
    return _MAY_CONTROL.sub(r"\g<0> ", text)


class SearchTool(BaseTool):
    """The tool `search(query)`; its config has topk, max_words and the fields of `RetrievalClient` (url,
    timeout, attempts, ...).

    ValueError names a field that is wrong or unknown. RetrievalUnavailable of a call reaches verl, which logs
    it and tells the agent."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        fields = {name: value for name, value in config.items() if name != "type"}  # "type" is verl's own
        self.topk, max_words = fields.pop("topk", 3), fields.pop("max_words", 350)
        try:
            for name, value in (("topk", self.topk), ("max_words", max_words)):
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
            self.client = RetrievalClient(**fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"search tool: {error}") from error
        self.protocol = Protocol(information_template="{documents}", max_information_words=max_words)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Retrieved passages as text; no reward of its own."""
        query = parameters.get("query")
        if not isinstance(query, str) or not query.strip():
            return ToolResponse(text="The search tool needs a query."), 0.0, {}
        (found,) = await asyncio.to_thread(self.client.search, [query.strip()], self.topk)
        text = self.protocol.information([document for document, _ in found])
        return ToolResponse(text=_plain(text)), 0.0, {}


def write_dataset(benchmark: str, records: Path, out: Path) -> int:
    """Questions of a benchmark's JSONL as verl's parquet; returns how many.

    `data_source` is searchR1_<benchmark>, by which verl scores by exact match of the last <answer>; it knows
    nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique and bamboogle. ValueError for others and for bad
    records."""
    if benchmark == "medqa":
        raise ValueError(
            "medqa: verl has no reward for it; allowed are nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, "
            "musique, bamboogle"
        )
    questions = read_records(benchmark, records)
    rows = [
        {
            "data_source": f"searchR1_{benchmark}",
            "agent_name": "tool_agent",
            "prompt": [
                {"role": "user", "content": PROMPT.format(question=_plain(neutralise_tags(question.text)))}
            ],
            "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
            "extra_info": {"index": index, "id": question.id},
        }
        for index, question in enumerate(questions)
    ]
    write_atomically(out, pd.DataFrame(rows).to_parquet)
    return len(rows)
