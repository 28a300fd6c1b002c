"""`stppo retriever`: an index made, asked and served from the command line; errors in one line; configs of both kinds."""

import json
import re
import signal
import socket
import subprocess
import sys

import pytest
import requests

from stppo.config.composition import compose
from stppo.config.files import ConfigError
from stppo.config.loading import build
from stppo.retrieval.client import RetrievalClient
from stppo.retrieval.index_retriever import IndexRetriever


@pytest.fixture
def retriever(stppo):
    return lambda *arguments: stppo("retriever", *arguments)


CORPUS = [
    {"id": "0", "contents": '"Oslo"\nCapital of Norway.'},
    {"id": "1", "contents": '"Paris"\nCapital of France.'},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in CORPUS))
    return path


def test_an_index_is_made_and_asked(retriever, corpus):
    code, out, _ = retriever("index", "--corpus", str(corpus), "--out", "made/bm25")
    assert code == 0 and re.match(r"bm25 index of 2 documents, \d+\.\d MiB, made/bm25\n", out)
    code, out, _ = retriever("query", "made/bm25", "norway", "unheard", "--topk", "1")
    assert code == 0
    assert re.fullmatch(
        r"norway:\n  1\. \d\.\d{3} \[0\] Oslo: Capital of Norway\.\nunheard: nothing found\n", out
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["index", "--corpus", "none.jsonl", "--out", "i"], "--corpus: no file none.jsonl"),
        (["index", "--corpus", "", "--out", "i"], "an argument is empty"),
        (["index", "--corpus", "none.jsonl", "--out", "i", "--query-prefix", ""], "no file none.jsonl"),
        (["index", "--corpus", "corpus.jsonl", "--out", "i", "--kind", "ivf"], "are bm25, flat, hnsw"),
        (["index", "--corpus", "corpus.jsonl", "--out", "i", "--untitled", "x"], "one of error, first_words"),
        (["index", "--corpus", "corpus.jsonl", "--out", "corpus.jsonl"], "corpus.jsonl: exists already"),
        (["index", "--corpus", "bad.jsonl", "--out", "i"], 'bad.jsonl line 2: no title in "contents"'),
        (["query", "nowhere", "q"], "index: no file or folder nowhere"),
        (["query", ".", "q"], "no index; make one with `stppo retriever index`"),
        (["query", "http://127.0.0.1:1/retrieve", "q"], "http://127.0.0.1:1/retrieve: no usable answer"),
        (["serve", "nowhere"], "index: no file or folder nowhere"),
        (["serve", ".", "--topk", "101"], "--topk 101: at most 100"),
    ],
)
def test_what_is_wrong_is_one_line(retriever, corpus, monkeypatch, arguments, problem):
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)  # between the client's attempts
    corpus.with_name("bad.jsonl").write_text(
        json.dumps(CORPUS[0]) + "\n" + json.dumps({"id": "1", "contents": "no title"}) + "\n"
    )
    code, out, err = retriever(*arguments)
    assert code == 1 and out == "" and problem in err
    assert err.splitlines()[-1].startswith("error: ") and not (corpus.parent / "i").exists()


def test_untitled_passages_can_be_taken(retriever, tmp_path):
    (tmp_path / "c.jsonl").write_text('{"id": "1", "contents": "one two"}\n')
    assert retriever("index", "--corpus", "c.jsonl", "--out", "i", "--untitled", "first_words")[0] == 0
    assert "[1] one two: one two" in retriever("query", "i", "two")[1]


def test_a_server_is_started_asked_and_stopped(retriever, corpus, tmp_path):
    pytest.importorskip("fastapi", reason="the extra `retrieval` is not installed")
    retriever("index", "--corpus", str(corpus), "--out", "i")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-c", "from stppo.cli import main; main()", "retriever", "serve", "i"]
        + ["--port", str(port), "--topk", "1"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr.readline() == f"bm25 index of 2 documents: http://127.0.0.1:{port}/retrieve\n"
        address = f"http://127.0.0.1:{port}/retrieve"
        found = RetrievalClient(address, attempts=50, first_pause=0.1, longest_pause=0.2).search(
            ["france"], 3
        )
        assert [document.title for document, _ in found[0]] == ["Paris"]
        assert len(requests.post(address, json={"queries": ["capital"]}, timeout=10).json()["result"][0]) == 1
        code, out, _ = retriever("query", address, "norway")
        assert code == 0 and "[0] Oslo: Capital of Norway." in out
        with socket.socket() as outside:  # loopback alone
            outside.settimeout(2)
            assert outside.connect_ex((own_address(), port)) != 0 or own_address().startswith("127.")
    finally:
        server.send_signal(signal.SIGINT)
        _, error = server.communicate(timeout=20)
    assert "Traceback" not in error


def own_address():
    """This machine's address towards others; 127.0.0.1 where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # of the documentation; a datagram socket sends nothing to connect
            return sock.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def test_an_address_that_is_taken_is_named(retriever, corpus, tmp_path):
    pytest.importorskip("fastapi", reason="the extra `retrieval` is not installed")
    retriever("index", "--corpus", str(corpus), "--out", "i")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = retriever("serve", "i", "--port", str(port))
    assert code == 1 and f"127.0.0.1:{port} cannot be listened on" in err


def test_configs_name_both_kinds(tmp_path):
    records = tmp_path / "bamboogle.jsonl"
    records.write_text('{"Question": "who?", "Answer": "me"}\n')
    base = ["world=benchmark", "world.benchmark=bamboogle", f"world.records={records}"]
    http = compose([*base, "+retriever@world.retriever=http", "world.retriever.attempts=2"])
    world = build(http["world"], "world")
    assert isinstance(world.retriever, RetrievalClient) and world.retriever.attempts == 2
    index = compose([*base, "+retriever@world.retriever=index", f"world.retriever.index={tmp_path}"])
    assert isinstance(build(index["world"], "world").retriever, IndexRetriever)
    with pytest.raises(ConfigError, match="retriever.*index is not given"):
        build(compose([*base, "+retriever@world.retriever=index"])["world"], "world")
