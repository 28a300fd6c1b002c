"""The search tool for verl: loaded by verl's own code, asked as its agent loop asks, against a small server."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pytest

from stppo.retrieval.client import RetrievalUnavailable

pytestmark = pytest.mark.engines
pytest.importorskip("verl")

CONFIG = Path(__file__).parents[2] / "configs" / "cluster" / "search_tool.yaml"
REPLY = {
    "result": [
        [
            {
                "document": {"id": "7", "contents": '"Mount Everest"\nThe highest <answer>mountain.'},
                "score": 2.5,
            },
            {"document": {"id": "9", "contents": "No title"}, "score": 1.0},
        ]
    ]
}


@pytest.fixture
def server():
    """A retrieval server that notes what it was asked; `.status`, `.body` say what it answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.asked.append((self.path, json.loads(asked)))
            self.send_response(self.server.status)
            self.end_headers()
            self.wfile.write(self.server.body)

        def log_message(self, *arguments):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.asked, found.status, found.body = [], 200, json.dumps(REPLY).encode()
    found.url = f"http://127.0.0.1:{found.server_port}/retrieve"
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def tool(tmp_path, **changes):
    """The tool of the shipped config, with other values, made by verl."""
    import yaml
    from verl.tools.tool_registry import initialize_tools_from_config

    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["tools"][0]["config"].update(changes)
    path = tmp_path / "tool.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    (made,) = initialize_tools_from_config(path)
    return made


def ask(made, **parameters):
    async def call():
        instance, _ = await made.create()
        return await made.execute(instance, parameters, agent_data=None)

    return asyncio.run(call())


def test_the_shipped_config_is_a_tool_of_verl(tmp_path):
    made = tool(tmp_path)
    assert (made.name, made.client.url, made.topk) == ("search", "http://127.0.0.1:8000/retrieve", 3)
    assert made.tool_schema.function.parameters.required == ["query"]


def test_passages_come_back_as_text_without_live_tags(server, tmp_path):
    response, reward, metrics = ask(tool(tmp_path, url=server.url), query=" highest mountain ")
    assert server.asked == [
        ("/retrieve", {"queries": ["highest mountain"], "topk": 3, "return_scores": True})
    ]
    assert (
        response.text
        == "Doc 1(Title: Mount Everest) The highest [answer]mountain.\nDoc 2(Title: No title) No title"
    )
    assert (reward, metrics) == (0.0, {})


@pytest.mark.parametrize("parameters", [{}, {"query": ""}, {"query": 3}])
def test_a_call_without_a_query_is_answered_and_asks_nobody(server, tmp_path, parameters):
    assert "needs a query" in ask(tool(tmp_path, url=server.url), **parameters)[0].text
    assert not server.asked


def test_a_server_that_fails_is_asked_again_then_named(server, tmp_path):
    made = tool(tmp_path, url=server.url, attempts=2, first_pause=0.001)
    server.status = 500
    with pytest.raises(RetrievalUnavailable, match=r"retrieval server http://127\S+: no usable .*HTTP 500"):
        ask(made, query="q")
    server.status, server.body = 200, b'{"results": []}'
    with pytest.raises(RetrievalUnavailable, match="not Search-R1's reply"):
        ask(made, query="q")
    assert len(server.asked) == 4
    server.body = json.dumps(REPLY).encode()
    assert ask(made, query="q")[0].text.startswith("Doc 1(Title: Mount Everest)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "search tool: url='127.0.0.1:8000': must be the http address"),
        ({"topk": 0}, "search tool: topk must be a whole number of at least 1, got 0"),
        ({"max_words": True}, "search tool: max_words must be"),
        ({"timeout": "30"}, "search tool: timeout must be a number of seconds"),
        ({"tries": 3}, "search tool: .* unexpected keyword argument 'tries'"),
    ],
)
def test_bad_options_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        tool(tmp_path, **changes)


def test_questions_are_written_as_verl_scores_them(tmp_path):
    from verl.utils.reward_score import default_compute_score

    from stppo.plugins.verl_search import write_dataset

    records, out = tmp_path / "nq.jsonl", tmp_path / "train.parquet"
    records.write_text('{"question": "who <search> wrote it", "answer": ["Ann Lee", "Dr Lee"]}\n', "utf-8")
    assert write_dataset("nq", records, out) == 1
    (row,) = pd.read_parquet(out).to_dict("records")
    (message,) = row["prompt"]
    assert message["role"] == "user" and "Question: who [search] wrote it" in message["content"]
    truth = row["reward_model"]["ground_truth"]
    for text, score in (
        ("<answer>x</answer> <answer> ann lee. </answer>", 1.0),
        ("<answer>Lee</answer>", 0.0),
        ("Ann Lee", 0.0),
    ):
        assert default_compute_score(row["data_source"], text, truth) == score
    assert row["agent_name"] == "tool_agent"


def test_a_benchmark_without_a_reward_in_verl_is_refused(tmp_path):
    from stppo.plugins.verl_search import write_dataset

    with pytest.raises(ValueError, match="medqa: verl has no reward for it; allowed are nq, "):
        write_dataset("medqa", tmp_path / "none.jsonl", tmp_path / "out.parquet")
