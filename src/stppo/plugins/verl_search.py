"""Search for verl's multi-turn roll-outs: a tool that asks a Search-R1-compatible retrieval server, and questions
in verl's format. verl 0.9.1 has no search tool of its own any more, but loads any `BaseTool` that a tool config names.

    actor_rollout_ref.rollout.multi_turn.tool_config_path=configs/cluster/search_tool.yaml
    stppo plugins verl-data nq nq/train.jsonl train.parquet

Server: POST {"queries": [...], "topk": k, "return_scores": true} gives {"result": [[{"document": {"id", "contents"},
"score"}, ...]]}, contents = title in quotes, newline, text.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pandas as pd

from stppo.plugins import require_host
from stppo.world.datasets import read_records
from stppo.world.protocol import Protocol, neutralise_tags
from stppo.world.retrieval import Document

require_host("verl")

from verl.tools.base_tool import BaseTool  # noqa: E402
from verl.tools.schemas import ToolResponse  # noqa: E402

PROMPT = (
    "Answer the question below. You may call the search tool as often as you need; reason about what it returns "
    "between <think> and </think> before you go on. As soon as you know enough, give only the final answer, as short "
    "as possible, between <answer> and </answer>, without any explanation.\nQuestion: {question}\n"
)


class SearchTool(BaseTool):
    """The tool `search(query)`; its config has url, topk, timeout (seconds), attempts, max_words.

    ValueError for a missing url and for numbers below 1. What goes wrong in a call reaches verl as RuntimeError,
    which it logs and tells the agent.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.url = config.get("url")
        if not isinstance(self.url, str) or not self.url.startswith(("http://", "https://")):
            raise ValueError(f"search tool: url={self.url!r}: must be the http address of a retrieval server")
        defaults = {"topk": 3, "timeout": 30, "attempts": 3, "max_words": 350}
        values = {name: config.get(name, default) for name, default in defaults.items()}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"search tool: {name}={value!r}: must be a whole number from 1 on")
        self.topk, self.timeout, self.attempts, max_words = values.values()
        self.protocol = Protocol(information_template="{documents}", max_information_words=max_words)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Retrieved passages as text; no reward of its own."""
        query = parameters.get("query")
        if not isinstance(query, str) or not query.strip():
            return ToolResponse(text="The search tool needs a query."), 0.0, {}
        documents = await asyncio.to_thread(self._search, query.strip())
        return ToolResponse(text=self.protocol.information(documents)), 0.0, {}

    def _search(self, query: str) -> list[Document]:
        body = json.dumps({"queries": [query], "topk": self.topk, "return_scores": True}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        for attempt in range(1, self.attempts + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return [_document(item["document"]) for item in json.load(reply)["result"][0]]
            except urllib.error.HTTPError as error:
                raise RuntimeError(f"retrieval server {self.url}: {error}") from error
            except OSError as error:  # not reachable, or too slow
                if attempt == self.attempts:
                    raise RuntimeError(f"retrieval server {self.url} does not answer: {error}") from error
            except (LookupError, TypeError, ValueError, AttributeError, HTTPException) as error:
                raise RuntimeError(
                    f"retrieval server {self.url}: not Search-R1's reply: {error!r}"
                ) from error
        raise AssertionError("attempts is at least 1")


def _document(found: dict[str, str]) -> Document:
    title, _, text = found["contents"].partition("\n")
    return Document(str(found.get("id", "")), title.strip().strip('"'), text)


def write_dataset(benchmark: str, records: Path, out: Path) -> int:
    """Questions of a benchmark's JSONL as verl's parquet; returns how many.

    `data_source` is searchR1_<benchmark>, by which verl scores by exact match of the last <answer>; it knows nq,
    triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique and bamboogle. ValueError for others and for bad records.
    """
    if benchmark == "medqa":
        raise ValueError(
            "medqa: verl has no reward for it; allowed are nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique, "
            "bamboogle"
        )
    questions = read_records(benchmark, records)
    rows = [
        {
            "data_source": f"searchR1_{benchmark}",
            "agent_name": "tool_agent",
            "prompt": [{"role": "user", "content": PROMPT.format(question=neutralise_tags(question.text))}],
            "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
            "extra_info": {"index": index, "id": question.id},
        }
        for index, question in enumerate(questions)
    ]
    pd.DataFrame(rows).to_parquet(out)
    return len(rows)
