"""A retriever as an HTTP service with Search-R1's interface (see `retrieval_client`), and GET /health."""

import asyncio
import socket
from collections import deque
from collections.abc import Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from stppo.checks import install
from stppo.files import parse_json
from stppo.retrieval.documents import Document, Retriever

try:
    import uvicorn
    from fastapi import Depends, FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ImportError(f"the retrieval server needs FastAPI and uvicorn: {install('retrieval')}") from error

Rankings = list[list[tuple[Document, float]]]
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Limits:
    """What the server takes; more is refused with a message (HTTP 413 for the body, 422 for a field, 503 when
    busy).

    queries, query_characters, topk, body_bytes: of one request. documents: its queries times topk.
    batch_queries: searched at once, from as many requests as wait; a larger request takes several turns, and
    stops with the turn in which its time is over or its client has gone. waiting_queries: over all requests,
    before new ones are sent away; where none waits, a request of any size may. seconds: for a request, from
    its arrival (HTTP 408 for a body that does not come, 503 for a search); a connection whose request does
    not come is closed."""

    queries: int = 4096
    query_characters: int = 8192
    topk: int = 100
    documents: int = 32_768
    body_bytes: int = 8 * 2**20
    batch_queries: int = 256
    waiting_queries: int = 8192
    seconds: int = 60


@dataclass(eq=False)
class _Asked:
    """A request that waits, with what was found for its first queries."""

    queries: list[str]
    top_k: int
    future: asyncio.Future[Rankings]
    found: Rankings = field(default_factory=list)

    @property
    def left(self) -> list[str]:
        return self.queries[len(self.found) :]


class Batcher:
    """Searches for several requests at once: those that arrive during one search share the next."""

    def __init__(self, retriever: Retriever, limits: Limits) -> None:
        self._retriever, self._limits = retriever, limits
        self._waiting: deque[_Asked] = deque()
        self._arrived = asyncio.Event()
        self.batches = 0

    @property
    def waiting_queries(self) -> int:
        return sum(len(asked.left) for asked in self._waiting)

    async def search(self, queries: list[str], top_k: int) -> Rankings:
        """asyncio.QueueFull where too many queries wait already."""
        if self._waiting and self.waiting_queries + len(queries) > self._limits.waiting_queries:
            raise asyncio.QueueFull
        future: asyncio.Future[Rankings] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(queries, top_k, future))
        self._arrived.set()
        return await future  # whoever cancels this ends the search with its present turn

    async def work(self) -> None:
        """Search for ever; cancel it to end."""
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if batch:
                self.batches += 1
                await self._search_batch(batch)
            if not self._waiting:
                self._arrived.clear()

    def _next_batch(self) -> list[tuple[_Asked, list[str]]]:
        """Requests, each with as many of its queries as are searched now."""
        batch, size, most = [], 0, self._limits.batch_queries
        while self._waiting:
            asked = self._waiting[0]
            part = asked.left[:most]
            if batch and size + len(part) > most:
                break
            self._waiting.popleft()
            if not asked.future.done():  # its client may have gone, or its time be over
                batch.append((asked, part))
                size += len(part)
        return batch

    async def _search_batch(self, batch: list[tuple[_Asked, list[str]]]) -> None:
        together = [query for _, part in batch for query in part]
        top_k = max(asked.top_k for asked, _ in batch)
        try:
            found = await asyncio.to_thread(self._retriever.search, together, top_k)
            if len(found) != len(together):
                raise ValueError(f"the retriever answers {len(found)} of {len(together)} queries")
            rest = iter(found)
            answers = [[next(rest)[: asked.top_k] for _ in part] for asked, part in batch]
        except Exception as error:
            if len(batch) > 1:  # one bad request shall not fail the others
                for request in batch:
                    await self._search_batch([request])
            elif not batch[0][0].future.done():
                batch[0][0].future.set_exception(error)
            return
        for (asked, _), answer in zip(batch, answers, strict=True):
            asked.found += answer
            if asked.future.done():
                continue
            if asked.left:
                self._waiting.append(asked)  # behind those that wait
            else:
                asked.future.set_result(asked.found)


def create_app(
    retriever: Retriever,
    limits: Limits | None = None,
    default_topk: int = 3,
    about: dict | None = None,
    hosts: Collection[str] | None = None,
) -> FastAPI:
    """The service. `about` is shown by GET /health (e.g. kind of index and number of documents).

    hosts: the names by which it may be asked, None for any; `LOCAL_NAMES` for a service of this machine
    alone, which a web page could else reach through a name of its own that leads here. Requests of web pages
    are refused in any case."""
    limits = limits or Limits()
    batcher = Batcher(retriever, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI):
        worker = asyncio.create_task(batcher.work())
        yield
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker

    async def comes_from_no_page(request: Request) -> None:
        try:
            name = urlsplit(f"//{request.headers.get('host', '')}").hostname
        except ValueError as error:
            raise HTTPException(400, f"Host: {error}") from None
        if hosts is not None and name not in hosts:
            raise HTTPException(403, f"Host: asked as {name}, allowed are {', '.join(sorted(hosts))}")
        if "origin" in request.headers:
            raise HTTPException(403, "Origin: web pages may not ask")

    app = FastAPI(
        title="stppo retriever",
        lifespan=lifespan,
        dependencies=[Depends(comes_from_no_page)],
        openapi_url=None,
    )

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "waiting_queries": batcher.waiting_queries, **(about or {})}

    @app.post("/retrieve")
    async def retrieve(request: Request) -> JSONResponse:
        try:
            async with asyncio.timeout(limits.seconds):
                body = await _read(request, limits.body_bytes)
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {limits.seconds} s") from None
        queries, top_k, scored = _checked(body, limits, default_topk)
        search = asyncio.ensure_future(batcher.search(queries, top_k)) if queries else None
        try:
            rankings = await _unless_gone(search, request, limits.seconds) if search else []
        except TimeoutError:
            raise HTTPException(503, f"the search took longer than {limits.seconds} s") from None
        except asyncio.QueueFull:
            raise HTTPException(503, f"busy: more than {limits.waiting_queries} queries would wait") from None
        except Exception as error:
            raise HTTPException(500, f"the search failed: {error}") from error
        return await asyncio.to_thread(_reply, rankings, scored)  # a large one would hold up all others

    return app


async def _unless_gone(search: asyncio.Future[Rankings], request: Request, seconds: int) -> Rankings:
    """What is found; TimeoutError where it takes longer, or where nobody waits for it any more."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({search, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not search.done():
            raise TimeoutError
        return search.result()
    finally:
        search.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _reply(rankings: Rankings, scored: bool) -> JSONResponse:
    return JSONResponse({"result": [[_wire(*pair, scored) for pair in ranking] for ranking in rankings]})


def server_config(app: FastAPI, limits: Limits | None = None) -> uvicorn.Config:
    """How uvicorn serves: within `limits.seconds` a connection must bring a whole request."""
    seconds = (limits or Limits()).seconds

    class Protocol(_Impatient):
        patience = seconds

    return uvicorn.Config(app, http=Protocol, ws="none", log_level="warning", timeout_graceful_shutdown=5)


class _Impatient(H11Protocol):
    """Closes a connection whose request line and headers do not come."""

    patience: float

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._hurry = self.loop.call_later(self.patience, self._close_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hurry.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._hurry.cancel()
        self._hurry = self.loop.call_later(self.patience, self._close_idle)
        super().on_response_complete()

    def _close_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until interrupted; OSError names an address that cannot be listened on."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f"{host}:{port} cannot be listened on ({error.strerror}); choose another --port or --host"
        ) from error
    with listening:
        uvicorn.Server(server_config(app)).run(sockets=[listening])


async def _read(request: Request, most: int) -> bytes:
    """The body, refused as soon as it is known to be too long."""
    too_long = HTTPException(413, f"the body is longer than {most} bytes; send fewer queries at a time")
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said) > most:
        raise too_long
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise too_long
        parts.append(part)
    return b"".join(parts)


def _checked(body: bytes, limits: Limits, default_topk: int) -> tuple[list[str], int, bool]:
    """(queries, topk, return_scores) of a body; HTTP 422 says which field is wrong and what is allowed."""

    def refuse(problem: str) -> HTTPException:
        return HTTPException(422, problem)

    try:
        asked = parse_json(body)
    except ValueError:
        raise refuse(
            'the body is no JSON; send {"queries": [...], "topk": 3, "return_scores": true}'
        ) from None
    queries = asked.get("queries") if isinstance(asked, dict) else None
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise refuse("queries: must be a list of strings")
    if len(queries) > limits.queries:
        raise refuse(f"queries: {len(queries)} in one request, allowed are {limits.queries}")
    longest = max(map(len, queries), default=0)
    if longest > limits.query_characters:
        raise refuse(f"queries: one has {longest} characters, allowed are {limits.query_characters}")
    top_k = asked.get("topk")
    top_k = default_topk if top_k is None else top_k
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= limits.topk:
        raise refuse(f"topk: must be a whole number from 1 to {limits.topk}, got {str(top_k)[:50]}")
    if len(queries) * top_k > limits.documents:
        raise refuse(
            f"queries times topk: {len(queries) * top_k} documents in one request, allowed are "
            f"{limits.documents}"
        )
    scored = asked.get("return_scores", False)
    if not isinstance(scored, bool):
        raise refuse("return_scores: must be true or false")
    return queries, top_k, scored


def _wire(document: Document, score: float, scored: bool) -> dict[str, Any]:
    plain = {"id": document.id, "contents": document.contents}
    return {"document": plain, "score": score} if scored else plain
