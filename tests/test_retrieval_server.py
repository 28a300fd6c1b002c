"""The HTTP server: a Search-R1-shaped client, our own, concurrent requests, limits, and a search that fails or hangs."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import requests

from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.client import RetrievalClient, RetrievalUnavailable
from stppo.retrieval.documents import Document

pytest.importorskip("fastapi", reason="the extra `retrieval` is not installed")
import uvicorn

from stppo.retrieval.server import LOCAL_NAMES, Limits, create_app, server_config

DOCUMENTS = [
    Document("0", "Oslo", "capital of Norway"),
    Document("1", "Bergen", "a town in Norway\nby the sea"),
    Document("2", 'The "Paris"', "capital of France"),
]


@contextmanager
def served(retriever, limits=None, **options):
    """The base URL of a real server in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(create_app(retriever, limits, **options), limits))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()


@pytest.fixture(scope="module")
def url():
    limits = Limits(queries=8, query_characters=100, topk=5, documents=30, body_bytes=2000)
    with served(BM25Retriever(DOCUMENTS), limits, about={"kind": "bm25", "documents": 3}) as base:
        yield base


def post(base, **body):
    return requests.post(f"{base}/retrieve", json=body, timeout=10)


def test_search_r1s_client_gets_its_passages(url):
    """As its roll-out asks and reads: title = first line of contents, text = the lines after it."""
    payload = {"queries": ["norway sea", "France"], "topk": 2, "return_scores": True}
    results = requests.post(f"{url}/retrieve", json=payload, timeout=10).json()["result"]
    rendered = []
    for result in results:
        text = ""
        for i, item in enumerate(result):
            lines = item["document"]["contents"].split("\n")
            text += f"Doc {i + 1}(Title: {lines[0]}) " + "\n".join(lines[1:]) + "\n"
        rendered.append(text)
    assert rendered == [
        'Doc 1(Title: "Bergen") a town in Norway\nby the sea\nDoc 2(Title: "Oslo") capital of Norway\n',
        'Doc 1(Title: "The "Paris"") capital of France\n',
    ]
    assert results[0][0]["score"] > results[0][1]["score"] > 0 and results[0][0]["document"]["id"] == "1"


def test_without_scores_documents_come_bare_and_topk_has_a_default(url):
    found = post(url, queries=["capital"]).json()
    assert found == {"result": [[{"id": d.id, "contents": d.contents} for d in (DOCUMENTS[0], DOCUMENTS[2])]]}
    assert len(post(url, queries=["capital norway"], topk=None).json()["result"][0]) == 3


def test_our_client_gets_what_the_retriever_finds(url):
    asked = ["norway sea", "France", "nothing known", 'The "Paris"']
    found = RetrievalClient(f"{url}/retrieve").search(asked, 3)
    assert found == BM25Retriever(DOCUMENTS).search(asked, 3)


def test_health(url):
    shown = requests.get(f"{url}/health", timeout=10).json()
    assert shown == {"status": "ok", "waiting_queries": 0, "kind": "bm25", "documents": 3}


# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field"),
    [
        *((body, "queries") for body in ({}, {"queries": "one"}, {"queries": ["a", 1]})),
        ({"queries": ["a"] * 9}, "queries: 9"),
        ({"queries": ["a" * 101]}, "queries: one has 101"),
        ({"queries": ["a"] * 8, "topk": 5}, "queries times topk"),
        *(({"queries": ["a"], "topk": topk}, "topk") for topk in (6, 0, True, "3")),
        ({"queries": ["a"], "return_scores": "yes"}, "return_scores"),
    ],
)
def test_a_wrong_field_is_refused_with_its_name(url, body, field):
    reply = post(url, **body)
    assert reply.status_code == 422 and reply.json()["detail"].startswith(field)


@pytest.mark.parametrize("body", [b"", b"nonsense", b"\xff", b"[1]", b"[" * 1500])
def test_a_body_that_is_no_request_is_refused(url, body):
    reply = requests.post(f"{url}/retrieve", data=body, timeout=10)
    assert reply.status_code == 422 and "queries" in reply.json()["detail"]


def test_a_body_that_is_too_long_is_refused_whether_or_not_it_says_so(url):
    body = json.dumps({"queries": ["a" * 90] * 8, "padding": " " * 2000}).encode()
    said = requests.post(f"{url}/retrieve", data=body, timeout=10)
    streamed = requests.post(f"{url}/retrieve", data=iter([body[:1500], body[1500:]]), timeout=10)
    for reply in (said, streamed):
        assert reply.status_code == 413 and "longer than 2000 bytes" in reply.json()["detail"]


def test_other_paths_and_methods_are_refused(url):
    assert requests.get(f"{url}/retrieve", timeout=10).status_code == 405
    with pytest.raises(RetrievalUnavailable, match="HTTP 404 Not Found; is the path of url right"):
        RetrievalClient(url).search(["a"], 1)


# ---- many at once, failures ---------------------------------------------------------------------


class Watched:
    """A retriever that notes its batches, waits for `gate` in each, and fails on the query "poison"."""

    def __init__(self):
        self.batches, self.gate, self.entered = [], threading.Event(), threading.Event()

    def search(self, queries, top_k):
        self.batches.append((list(queries), top_k))
        self.entered.set()
        assert self.gate.wait(timeout=10)
        if "poison" in queries:
            raise RuntimeError("bad query")
        return [[(Document(query, query, str(i)), 1.0) for i in range(top_k)] for query in queries]


def in_threads(n, work):
    results = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: work(i)}), daemon=True) for i in range(n)
    ]
    for thread in threads:
        thread.start()
    return threads, results


def finish(threads):
    for thread in threads:
        thread.join(timeout=20)


def wait_for_waiting(base, queries):
    until = time.monotonic() + 10
    while requests.get(f"{base}/health", timeout=10).json()["waiting_queries"] != queries:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_requests_that_arrive_during_a_search_share_the_next():
    watched = Watched()
    with served(watched, Limits(batch_queries=10)) as base:
        first, _ = in_threads(1, lambda i: post(base, queries=["first"], topk=1))
        assert watched.entered.wait(timeout=10)
        threads, results = in_threads(
            8, lambda i: post(base, queries=[f"a{i}", f"b{i}"], topk=1 + i % 3).json()["result"]
        )
        wait_for_waiting(base, 16)
        watched.gate.set()
        finish(first + threads)
    assert [len(queries) for queries, _ in watched.batches] == [1, 10, 6]  # no more than batch_queries
    for i in range(8):  # each its own answers, as many as it asked for
        assert [[d["contents"] for d in ranking] for ranking in results[i]] == [
            [f'"{name}{i}"\n{rank}' for rank in range(1 + i % 3)] for name in "ab"
        ]


def test_one_request_that_fails_leaves_the_others_in_its_batch_alone():
    watched = Watched()
    with served(watched) as base:
        first, _ = in_threads(1, lambda i: post(base, queries=["first"]))
        assert watched.entered.wait(timeout=10)
        threads, results = in_threads(3, lambda i: post(base, queries=["poison" if i == 1 else f"q{i}"]))
        wait_for_waiting(base, 3)
        watched.gate.set()
        finish(first + threads)
    assert [results[i].status_code for i in range(3)] == [200, 500, 200]
    assert results[1].json()["detail"] == "the search failed: bad query"


def test_a_retriever_that_answers_too_few_queries_ends_one_request_and_not_the_server():
    class Forgetful:
        def search(self, queries, top_k):
            return [[(Document("d", "t", "x"), 1.0)]] * (len(queries) - (len(queries) > 1))

    with served(Forgetful()) as base:
        answer = post(base, queries=["a", "b"])
        assert answer.json()["detail"] == "the search failed: the retriever answers 1 of 2 queries"
        assert post(base, queries=["a"]).status_code == 200


def test_a_search_that_takes_too_long_is_answered_and_the_client_says_so():
    watched = Watched()
    with served(watched, Limits(seconds=1)) as base:
        with pytest.raises(RetrievalUnavailable, match="HTTP 503 the search took longer than 1 s"):
            RetrievalClient(f"{base}/retrieve", attempts=2, first_pause=0.01).search(["a"], 1)
        watched.gate.set()
        assert post(base, queries=["b"]).status_code == 200
    assert [queries for queries, _ in watched.batches] == [
        ["a"],
        ["b"],
    ]  # the retry had gone, so nobody searched it


def test_too_many_waiting_queries_are_sent_away():
    watched = Watched()
    with served(watched, Limits(waiting_queries=3)) as base:
        first, _ = in_threads(1, lambda i: post(base, queries=["first"]))
        assert watched.entered.wait(timeout=10)
        waiting, results = in_threads(1, lambda i: post(base, queries=["a", "b"]))
        wait_for_waiting(base, 2)
        busy = post(base, queries=["c", "d"])
        assert busy.status_code == 503 and "busy" in busy.json()["detail"]
        watched.gate.set()
        finish(first + waiting)
        assert results[0].status_code == 200
        large = post(base, queries=[*"abcd"])  # nobody waits: sent away, it would be so for ever
        assert large.status_code == 200


def test_a_body_that_never_comes_does_not_hold_the_server():
    with served(BM25Retriever(DOCUMENTS), Limits(seconds=1)) as base:
        port = int(base.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
            slow.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert post(base, queries=["Oslo"]).status_code == 200
            assert b" 408 " in slow.recv(1000)


def raw(base, text):
    """An open connection on which this much of a request was sent."""
    connection = socket.create_connection(("127.0.0.1", int(base.rsplit(":", 1)[1])), timeout=10)
    connection.sendall(text)
    return connection


@pytest.mark.parametrize("sent", [b"", b"POST /retrieve HTTP/1.1\r\nHost: x\r\nX-", b"G"])
def test_a_connection_whose_headers_never_come_is_closed(sent):
    with served(BM25Retriever(DOCUMENTS), Limits(seconds=1)) as base, raw(base, sent) as slow:
        assert slow.recv(1000) == b""


def test_a_connection_that_asked_once_is_closed_amid_its_next_headers():
    with (
        served(BM25Retriever(DOCUMENTS), Limits(seconds=1)) as base,
        raw(base, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") as slow,
    ):
        assert b" 200 " in slow.recv(1000)
        slow.sendall(b"GET /health HTTP/1.1\r\nHo")
        while slow.recv(1000):  # the rest of the answer, then the end, else a time-out
            pass


def test_a_large_request_takes_turns_and_comes_back_whole():
    watched = Watched()
    with served(watched, Limits(batch_queries=4)) as base:
        large = [f"l{i}" for i in range(10)]
        first, found = in_threads(1, lambda i: post(base, queries=large, topk=1).json()["result"])
        assert watched.entered.wait(timeout=10)
        threads, results = in_threads(1, lambda i: post(base, queries=["small"], topk=1).json()["result"])
        wait_for_waiting(base, 1)
        watched.gate.set()
        finish(first + threads)
    assert [len(queries) for queries, _ in watched.batches] == [4, 1, 4, 2], (
        "the small one is not kept waiting"
    )
    assert [ranking[0]["contents"] for ranking in found[0]] == [f'"{name}"\n0' for name in large]
    assert results[0][0][0]["contents"] == '"small"\n0'


def test_a_search_stops_with_its_request():
    """Whether its time is over or its client has gone."""
    watched = Watched()
    with served(watched, Limits(batch_queries=1, seconds=1)) as base:
        assert post(base, queries=["a"] * 5, topk=1).status_code == 503
        body = b'{"queries": ["b", "b", "b"], "topk": 1}'
        sent = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection = raw(base, sent + body)
        wait_for_waiting(base, 3)
        connection.close()
        time.sleep(0.2)
        watched.gate.set()
        assert post(base, queries=["c"], topk=1).status_code == 200
    assert [queries[0] for queries, _ in watched.batches] == ["a", "c"]


def test_web_pages_may_not_ask():
    """Neither from another site, nor through a name of their own that leads to this machine."""
    with served(BM25Retriever(DOCUMENTS), hosts=LOCAL_NAMES) as base:
        asked = {"json": {"queries": ["Oslo"]}, "timeout": 10}
        for headers in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Host": "evil.example"},
            {"Host": ""},
        ):
            reply = requests.post(f"{base}/retrieve", headers=headers, **asked)
            assert reply.status_code == 403 and next(iter(headers)) in reply.json()["detail"]
        assert requests.post(f"{base}/retrieve", headers={"Host": "["}, **asked).status_code == 400
        for host in ("localhost:1", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
            assert requests.post(f"{base}/retrieve", headers={"Host": host}, **asked).status_code == 200
