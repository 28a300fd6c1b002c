"""A retriever as an HTTP service with Search-R1's interface (see `retrieval_client`), and GET /health."""

import asyncio
import socket
from collections import deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from stppo.checks import whole_number
from stppo.foreign import parse_json
from stppo.retrieval.documents import Document, Retriever

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse
except ImportError as error:
    raise ImportError(
        "the retrieval server needs FastAPI and uvicorn: pip install 'stppo[retrieval]'"
    ) from error

Rankings = list[list[tuple[Document, float]]]


@dataclass(frozen=True)
class Limits:
    """What the server takes; more is refused with a message (HTTP 413 for the body, 422 for a field, 503 when busy).

    queries, query_characters, topk, body_bytes: of one request.
    batch_queries: searched at once, from as many requests as wait (one larger request alone).
    waiting_queries: over all requests, before new ones are sent away.
    seconds: for a request, from its arrival (HTTP 408 for a body that does not come, 503 for a search).
    """

    queries: int = 4096
    query_characters: int = 8192
    topk: int = 100
    body_bytes: int = 8 * 2**20
    batch_queries: int = 256
    waiting_queries: int = 8192
    seconds: int = 60

    def __post_init__(self) -> None:
        whole_number(self, *self.__dataclass_fields__)


class Batcher:
    """Searches for several requests at once: those that arrive during one search share the next."""

    def __init__(self, retriever: Retriever, limits: Limits) -> None:
        self._retriever, self._limits = retriever, limits
        self._waiting: deque[tuple[list[str], int, asyncio.Future[Rankings]]] = deque()
        self._arrived = asyncio.Event()
        self.batches = 0

    @property
    def waiting_queries(self) -> int:
        return sum(len(queries) for queries, _, _ in self._waiting)

    async def search(self, queries: list[str], top_k: int) -> Rankings:
        """asyncio.QueueFull where too many queries wait already."""
        if self.waiting_queries + len(queries) > self._limits.waiting_queries:
            raise asyncio.QueueFull
        future: asyncio.Future[Rankings] = asyncio.get_running_loop().create_future()
        self._waiting.append((queries, top_k, future))
        self._arrived.set()
        return await future

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

    def _next_batch(self) -> list[tuple[list[str], int, asyncio.Future[Rankings]]]:
        batch, size = [], 0
        while self._waiting and (not batch or size + len(self._waiting[0][0]) <= self._limits.batch_queries):
            request = self._waiting.popleft()
            if not request[2].done():  # its client may have gone
                batch.append(request)
                size += len(request[0])
        return batch

    async def _search_batch(self, batch: list[tuple[list[str], int, asyncio.Future[Rankings]]]) -> None:
        together = [query for queries, _, _ in batch for query in queries]
        try:
            found = iter(
                await asyncio.to_thread(self._retriever.search, together, max(k for _, k, _ in batch))
            )
            answers = [[next(found)[:top_k] for _ in queries] for queries, top_k, _ in batch]
        except Exception as error:
            if len(batch) > 1:  # one bad request shall not fail the others
                for request in batch:
                    await self._search_batch([request])
            elif not batch[0][2].done():
                batch[0][2].set_exception(error)
            return
        for (_, _, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)


def create_app(
    retriever: Retriever, limits: Limits | None = None, default_topk: int = 3, about: dict | None = None
) -> FastAPI:
    """The service. `about` is shown by GET /health (e.g. kind of index and number of documents)."""
    limits = limits or Limits()
    batcher = Batcher(retriever, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI):
        worker = asyncio.create_task(batcher.work())
        yield
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker

    app = FastAPI(title="stppo retriever", lifespan=lifespan)

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
        try:
            async with asyncio.timeout(limits.seconds):
                rankings = await batcher.search(queries, top_k) if queries else []
        except TimeoutError:
            raise HTTPException(503, f"the search took longer than {limits.seconds} s") from None
        except asyncio.QueueFull:
            raise HTTPException(503, f"busy: more than {limits.waiting_queries} queries would wait") from None
        except Exception as error:
            raise HTTPException(500, f"the search failed: {error}") from error
        return JSONResponse({"result": [[_wire(*pair, scored) for pair in ranking] for ranking in rankings]})

    return app


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until interrupted; OSError names an address that cannot be listened on."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f"{host}:{port} cannot be listened on ({error.strerror}); choose another --port or --host"
        ) from error
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
    with listening:
        uvicorn.Server(config).run(sockets=[listening])


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
    scored = asked.get("return_scores", False)
    if not isinstance(scored, bool):
        raise refuse("return_scores: must be true or false")
    return queries, top_k, scored


def _wire(document: Document, score: float, scored: bool) -> dict[str, Any]:
    plain = {"id": document.id, "contents": document.contents}
    return {"document": plain, "score": score} if scored else plain
