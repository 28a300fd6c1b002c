"""A retriever behind Search-R1's HTTP interface.

POST {"queries": [...], "topk": k, "return_scores": true} gives {"result": [[{"document": {"id", "contents"},
"score"}, ...], ...]}, one list a query; servers that return bare documents are understood too.
"""

import asyncio
import json
import logging
import math
import os
import ssl
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from stppo.checks import whole_number
from stppo.files import parse_json
from stppo.retrieval.documents import Document, parse_document

Ranking = tuple[tuple[Document, float], ...]
_TRANSIENT = (408, 425, 429)  # and 5xx: the server may do better next time
_MOST_REPLY_BYTES = 256 * 2**20
log = logging.getLogger(__name__)


class RetrievalUnavailable(ConnectionError):
    """The retrieval server gave no usable answer; the message names url, attempts, last error and remedy."""


class _Transient(Exception):
    """An attempt that failed and may be repeated."""


@dataclass(frozen=True, eq=False)
class RetrievalClient:
    """`search` over HTTP; threads may share one. Building it asks nothing.

    url: of the server's /retrieve. Proxies of the environment are not used for this machine's own addresses.
    timeout: seconds for one attempt, from the connection to the reply's last byte.
    attempts: before RetrievalUnavailable; between them pauses drawn uniformly from 0 to `first_pause`
        seconds, the upper end doubling up to `longest_pause`: with the defaults two minutes of waiting at
        most, one on average.
    queries_per_request, query_characters: more queries are sent in several requests, longer ones are cut,
        since a server refuses what is too large.

    ValueError names a field that is wrong.
    """

    url: str = "http://127.0.0.1:8000/retrieve"
    timeout: float = 30.0
    attempts: int = 10
    first_pause: float = 0.5
    longest_pause: float = 30.0
    queries_per_request: int = 64
    query_characters: int = 2000

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except (ValueError, TypeError, AttributeError):
            valid = False
        if not valid:
            raise ValueError(
                f"url={self.url!r}: must be the http address of a retrieval server, "
                "e.g. http://127.0.0.1:8000/retrieve"
            )
        for name in ("timeout", "first_pause", "longest_pause"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number of seconds above 0, got {value!r}")
        whole_number(self, "attempts", "queries_per_request", "query_characters")

    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[Document, float]]]:
        """Best `top_k` documents with their scores (NaN where the server gives none) per query, best first.

        RetrievalUnavailable after the last attempt, or at once where the server refuses the request itself.
        """
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        # A lone surrogate is no text that JSON could carry.
        sent = [query[: self.query_characters].encode("utf-8", "replace").decode() for query in queries]
        found: dict[str, Ranking] = {}
        each_once = list(dict.fromkeys(sent))
        for start in range(0, len(each_once), self.queries_per_request):
            asked = each_once[start : start + self.queries_per_request]
            rankings = self._retrieve(asked, top_k)
            if len(asked) > 1 and not any(rankings):
                _warn_of_nothing(self.url)
            found |= zip(asked, rankings, strict=True)
        return [list(found[query]) for query in sent]

    def _retrieve(self, queries: list[str], top_k: int) -> list[Ranking]:
        began = time.monotonic()
        retrying = Retrying(
            stop=stop_after_attempt(self.attempts),
            wait=wait_random_exponential(multiplier=self.first_pause, max=self.longest_pause),
            retry=retry_if_exception_type(_Transient),
            before_sleep=self._report,
            reraise=True,
        )
        try:
            return retrying(self._attempt, queries, top_k)
        except _Transient as error:
            raise RetrievalUnavailable(
                f"retrieval server {self.url}: no usable answer in {self.attempts} attempts and "
                f"{time.monotonic() - began:.0f} s, at last {error}; start it with `stppo retriever serve`, "
                "or set world.retriever.url to where it runs"
            ) from error

    def _report(self, state: RetryCallState) -> None:
        log.warning(
            "retrieval server %s: %s; attempt %d of %d follows in %.1f s",
            self.url,
            state.outcome.exception(),
            state.attempt_number + 1,
            self.attempts,
            state.next_action.sleep,
        )

    def _attempt(self, queries: list[str], top_k: int) -> list[Ranking]:
        body = {"queries": queries, "topk": top_k, "return_scores": True}
        try:
            status, content = _run(self._post(body))
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _Transient(f"no whole reply within {self.timeout:g} s") from error
        except (httpx.HTTPError, OSError) as error:
            raise _Transient(_cause(error)) from error
        if status >= 500 or status in _TRANSIENT:
            raise _Transient(f"HTTP {status} {_told(content)}")
        if status != 200:
            raise RetrievalUnavailable(
                f"retrieval server {self.url} refuses the request: HTTP {status} {_told(content)}; is the "
                f"path of url right, and does the server allow {len(queries)} queries and topk={top_k}?"
            )
        try:
            return parse_reply(parse_json(content), len(queries), top_k)
        except ValueError as error:
            problem = "no JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else error
            raise _Transient(f"not Search-R1's reply: {problem} in {_excerpt(content)}") from error

    async def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and whole body of one reply; OSError where it is longer than any may be. The time is that of
        all, where httpx's is one of each single read, which a byte now and then never reaches."""
        proxied = not _is_loopback(urlsplit(self.url).hostname)
        parts, size = [], 0
        async with (
            asyncio.timeout(self.timeout),
            httpx.AsyncClient(timeout=None, trust_env=proxied, verify=_certificates()) as http,
            http.stream("POST", self.url, json=body) as reply,
        ):
            async for part in reply.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > _MOST_REPLY_BYTES:
                    raise OSError(f"the reply is longer than {_MOST_REPLY_BYTES} bytes")
        return reply.status_code, b"".join(parts)


@cache
def _warn_of_nothing(url: str) -> None:
    """Once for each server."""
    log.warning(
        "retrieval server %s: found nothing for any query of a request; does it serve the right index?", url
    )


def _run(coroutine: Coroutine[Any, Any, tuple[int, bytes]]) -> tuple[int, bytes]:
    """Its result, in a thread of its own: this one may have a loop of events already, as in a notebook."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: they take longer than many a search."""
    return httpx.create_ssl_context()


def parse_reply(reply: Any, n_queries: int, top_k: int) -> list[Ranking]:
    """The rankings of a server's reply, cut to `top_k`; ValueError says what is wrong with its shape."""
    if not isinstance(reply, dict) or "result" not in reply:
        raise ValueError('no "result"')
    rankings = reply["result"]
    if not isinstance(rankings, list) or not all(isinstance(ranking, list) for ranking in rankings):
        raise ValueError('"result" is no list of lists')
    if len(rankings) != n_queries:
        raise ValueError(f"{len(rankings)} results for {n_queries} queries")
    return [
        tuple(found for item in ranking if (found := _scored_document(item)))[:top_k] for ranking in rankings
    ]


def _scored_document(item: Any) -> tuple[Document, float] | None:
    """Document and score, NaN where the server gives none (a web search has none); None for a blank
    document."""
    if not isinstance(item, dict):
        raise ValueError(f"a document is a {type(item).__name__}")
    document, score = (item["document"], item.get("score")) if "document" in item else (item, None)
    score = math.nan if score is None else score
    if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
        raise ValueError('a document has no text "contents"')
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(f"a score is {score!r}")
    try:
        score = float(score)
    except OverflowError:
        raise ValueError("a score is too large") from None
    if not document["contents"].strip():
        return None
    return parse_document({"id": "", **document}, "first_words"), score


def _is_loopback(host: str | None) -> bool:
    try:
        return ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def _cause(error: Exception) -> str:
    """The innermost reason of an error, which httpx wraps in its own."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    code = error.errno if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {os.strerror(code) if code and code > 0 else error}"


def _told(content: bytes) -> str:
    """What a server says about an error: FastAPI's detail, else the beginning of the body."""
    try:
        return str(parse_json(content)["detail"])[:500]
    except (ValueError, LookupError, TypeError):
        return _excerpt(content)


def _excerpt(content: bytes) -> str:
    return repr(" ".join(content[:200].decode("utf-8", "replace").split()))
