"""The HTTP client against a server of Search-R1's shape, written from the interface's description alone."""

import asyncio
import json
import logging
import math
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stppo.retrieval.client import RetrievalClient, RetrievalUnavailable
from stppo.retrieval.documents import Document


def scored(query, k, form="scored"):
    """k passages that name the query."""
    documents = [{"id": f"{query}-{i}", "contents": f'"{query} {i}"\nText {i}.\nMore.'} for i in range(k)]
    if form == "bare":
        return documents
    return [{"document": document, "score": 1.0 / (i + 1)} for i, document in enumerate(documents)]


def expected(query, k):
    return [(Document(f"{query}-{i}", f"{query} {i}", f"Text {i}.\nMore."), 1.0 / (i + 1)) for i in range(k)]


class FakeServer(ThreadingHTTPServer):
    """Notes requests; `script` holds what to do with the next ones: None answers well, a function does as it likes."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.script, self.form = [], [], "scored"
        self.url = f"http://127.0.0.1:{self.server_port}/retrieve"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, asked))
        act = self.server.script.pop(0) if self.server.script else None
        if act is not None:
            return act(self, asked)
        found = [scored(query, asked["topk"], self.server.form) for query in asked["queries"]]
        return reply(self, {"result": found})

    def log_message(self, *arguments):
        pass


def reply(handler, content, status=200, headers=None):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def answer(content, status=200, headers=None):
    return lambda handler, asked: reply(handler, content, status, headers)


def hang_up(handler, asked):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def stay_silent(handler, asked):
    time.sleep(1.0)
    hang_up(handler, asked)


def trickle(handler, asked):
    """A byte now and then, each within any timeout of a single read."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(20):
        try:
            handler.wfile.write(b" ")
        except OSError:
            return
        time.sleep(0.1)
    handler.close_connection = True


def stop_halfway(handler, asked):
    body = json.dumps({"result": [scored("q", 2)]}).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])
    handler.wfile.flush()
    hang_up(handler, asked)


@pytest.fixture
def server():
    fake = FakeServer()
    threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield fake
    fake.shutdown()
    fake.server_close()


def client(server, **fields):
    return RetrievalClient(server.url, **{"first_pause": 0.001, "timeout": 5, "attempts": 3, **fields})


# ---- answers ------------------------------------------------------------------------------------


def test_request_and_reply_are_search_r1s(server):
    assert client(server).search(["a", "b ж", "a"], 2) == [expected(query, 2) for query in ("a", "b ж", "a")]
    assert server.asked == [("/retrieve", {"queries": ["a", "b ж"], "topk": 2, "return_scores": True})]


def test_bare_documents_are_read_and_have_no_score(server):
    server.form = "bare"
    ((first, score), second) = client(server).search(["a"], 2)[0]
    assert first == expected("a", 1)[0][0] and math.isnan(score) and second[0].id == "a-1"


def test_a_server_that_sends_more_than_asked_is_cut(server):
    server.script = [answer({"result": [scored("a", 9)]})]
    assert client(server).search(["a"], 2) == [expected("a", 2)]


def test_a_server_that_finds_nothing_at_all_is_said_once(server, caplog):
    nothing = answer({"result": [[], []]})
    server.script = [answer({"result": [[]]}), answer({"result": [[], scored("c", 1)]})]
    assert client(server).search(["a"], 1) == [[]] and client(server).search(["b", "c"], 1)[0] == []
    assert not caplog.messages
    server.script = [nothing, nothing]
    assert [client(server).search(asked, 1) for asked in ("de", "fg")] == [[[], []]] * 2
    (line,) = caplog.messages
    assert line.startswith(f"retrieval server {server.url}: found nothing for any query")


def test_no_query_asks_nobody(server):
    assert client(server).search([], 3) == [] and server.asked == []


def test_many_queries_go_in_several_requests_and_come_back_in_order(server):
    asked = [f"q{i}" for i in range(10)]
    assert client(server, queries_per_request=4).search(asked, 1) == [expected(query, 1) for query in asked]
    assert [len(body["queries"]) for _, body in server.asked] == [4, 4, 2]


def test_what_an_agent_may_write_can_be_sent(server):
    found = client(server, query_characters=5).search(["0123456789", "a\ud800b", "\x00"], 1)
    assert server.asked[0][1]["queries"] == ["01234", "a?b", "\x00"]
    assert [ranking[0][0].id for ranking in found] == ["01234-0", "a?b-0", "\x00-0"]


def test_lone_surrogates_of_a_server_go_no_further(server):
    """No tokenizer or file could hold them; pairs are characters."""
    contents = {"contents": '"T\ud800"\nx\udfffy \U0001f600'}
    server.script = [answer({"result": [[{"document": contents, "score": 1}]]})]
    ((found, _),) = client(server).search(["q"], 1)[0]
    assert (found.title, found.text) == ("T\ufffd", "x\ufffdy \U0001f600")


def test_a_reply_of_a_web_search_has_no_scores_and_may_hold_blank_pages(server):
    pages = [{"document": {"contents": text}} for text in ("first page", " ", "second page", "third")]
    server.script = [answer({"result": [pages]})]
    (found,) = client(server).search(["q"], 2)
    assert [document.text for document, _ in found] == ["first page", "second page"]
    assert all(math.isnan(score) for _, score in found)


# ---- what goes wrong for a while ----------------------------------------------------------------

BAD_REPLIES = {
    "error 500": (answer({"detail": "index on fire"}, 500), "HTTP 500 index on fire"),
    "error 503": (answer(b"<html>busy</html>", 503), "HTTP 503 '<html>busy</html>'"),
    "error 429": (answer({}, 429), "HTTP 429"),
    "hang up": (hang_up, "Connection|disconnected"),
    "half a reply": (stop_halfway, "peer closed connection"),
    "no JSON": (answer(b"<html>"), "not Search-R1's reply: no JSON in '<html>'"),
    "no text": (answer(b"\xff\xfe{}"), "not Search-R1's reply: no JSON"),
    "empty": (answer(b""), "no JSON in ''"),
    "list": (answer([]), 'no "result"'),
    "no result": (answer({"results": []}), 'no "result" in'),
    "null": (answer({"result": None}), '"result" is no list of lists'),
    "flat": (answer({"result": scored("q", 2)}), '"result" is no list of lists'),
    "too few": (answer({"result": []}), "0 results for 1 queries"),
    "too many": (answer({"result": [[], []]}), "2 results for 1 queries"),
    "strings": (answer({"result": [["text"]]}), "a document is a str"),
    "no contents": (answer({"result": [[{"document": {"id": "1"}, "score": 1}]]}), 'no text "contents"'),
    "null contents": (answer({"result": [[{"contents": None}]]}), 'no text "contents"'),
    "null document": (answer({"result": [[{"document": None, "score": 1}]]}), 'no text "contents"'),
    "deep": (answer(b"[" * 100_000), "no JSON"),
    "score beyond any float": (
        answer(b'{"result": [[{"document": {"contents": "a"}, "score": 1' + b"0" * 400 + b"}]]}"),
        "a score is too large",
    ),
    "number too long": (answer(b"1" * 5000), "no JSON"),
    "text score": (answer({"result": [[{"document": {"contents": "a"}, "score": "1"}]]}), "a score is '1'"),
}


@pytest.mark.parametrize("problem", BAD_REPLIES)
def test_a_bad_reply_is_asked_for_again_and_in_the_end_named(server, problem, caplog):
    act, message = BAD_REPLIES[problem]
    server.script = [act, act]
    with caplog.at_level(logging.WARNING):
        assert client(server).search(["q"], 2) == [expected("q", 2)]
    assert len(server.asked) == 3
    assert "attempt 2 of 3 follows" in caplog.text and "attempt 3 of 3 follows" in caplog.text
    server.script = [act] * 9
    with pytest.raises(RetrievalUnavailable, match=message) as error:
        client(server).search(["q"], 2)
    assert server.url in str(error.value) and "\n" not in str(error.value)
    assert len(server.asked) == 6 and isinstance(error.value, ConnectionError)


@pytest.mark.parametrize("slow", [stay_silent, trickle])
def test_a_slow_server_is_given_up_in_time(server, slow):
    server.script = [slow]
    began = time.monotonic()
    assert client(server, timeout=0.3).search(["q"], 1) == [expected("q", 1)]
    assert time.monotonic() - began < 1.9  # the trickle alone would take 2 s
    server.script = [slow] * 2
    with pytest.raises(RetrievalUnavailable, match=r"at last no (answer|whole reply) within 0.3 s"):
        client(server, timeout=0.3, attempts=2).search(["q"], 1)


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/retrieve"
        with pytest.raises(RetrievalUnavailable, match=rf"{url}: .* 2 attempts .*[Cc]onnection refused"):
            RetrievalClient(url, attempts=2, first_pause=0.001).search(["q"], 1)


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a_refused_request_is_not_repeated(server, status):
    server.script = [answer({"detail": "topk: too large"}, status)]
    with pytest.raises(RetrievalUnavailable, match=rf"refuses the request: HTTP {status} topk: too large"):
        client(server).search(["q"], 1)
    assert len(server.asked) == 1


def test_a_redirect_is_not_followed(server):
    """It would turn the POST into a GET."""
    server.script = [answer({}, 301, {"Location": "/elsewhere"})]
    with pytest.raises(RetrievalUnavailable, match="refuses the request: HTTP 301"):
        client(server).search(["q"], 1)
    assert len(server.asked) == 1


# ---- threads, proxies, fields -------------------------------------------------------------------


def test_a_notebook_whose_thread_has_a_loop_may_ask(server):
    async def cell():
        return client(server).search(["q"], 1)

    assert asyncio.run(cell()) == [expected("q", 1)]


def test_a_proxy_is_not_asked_for_this_machine(server, monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert client(server, attempts=1).search(["q"], 1) == [expected("q", 1)]
        local = RetrievalClient(server.url.replace("127.0.0.1", "localhost"), attempts=1)
        assert local.search(["q"], 1) == [expected("q", 1)]


def test_a_proxy_is_asked_for_other_machines(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/retrieve"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    RetrievalClient("http://retriever.invalid/retrieve", attempts=1).search(["q"], 1)
    assert server.asked[0][0] == "http://retriever.invalid/retrieve"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("url", value) for value in ("127.0.0.1:8000", "http://", "http://a:b/", None)),
        *(
            ("timeout", 0),
            ("timeout", "30"),
            ("first_pause", math.nan),
            ("attempts", 0),
        ),
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        RetrievalClient(**{field: value})


def test_top_k_below_one_is_refused(server):
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        client(server).search(["q"], 0)
