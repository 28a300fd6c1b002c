"""`stppo retriever`: make an index, serve it, ask it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stppo.files import printable

app = typer.Typer(no_args_is_help=True, help="Indexes of a corpus, and the server of them.")

Corpus = Annotated[Path | None, typer.Option(help="Where the index's corpus is now, if it moved.")]
Device = Annotated[str, typer.Option(help="Of the encoder of a dense index: auto, cpu, cuda, ...")]


@app.command()
def index(
    corpus: Annotated[Path, typer.Option(help='Search-R1 JSONL: {"id", "contents"}, title first.')],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    kind: Annotated[str, typer.Option(help="bm25 | flat | hnsw (the last two are dense).")] = "bm25",
    untitled: Annotated[
        str, typer.Option(help="A passage without title: error | first_words (of the passage).")
    ] = "error",
    model: Annotated[
        str, typer.Option(help="Dense: encoder, a hub name or a folder.")
    ] = "intfloat/e5-base-v2",
    query_prefix: Annotated[
        str | None,
        typer.Option(help="Dense: what the encoder expects (default: its files' prompts or E5's)."),
    ] = None,
    passage_prefix: Annotated[str | None, typer.Option(help="Dense: as --query-prefix.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Dense: longer passages are cut.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Dense: passages encoded at once.")] = 64,
    device: Device = "auto",
) -> None:
    """Index a corpus once; BM25 in bounded memory, dense vectors resumably.

    Examples:

    * `stppo retriever index --corpus wiki-18.jsonl --out indexes/wiki-bm25`

    * `stppo retriever index --corpus wiki-18.jsonl --out indexes/wiki-e5 --kind hnsw`
    """
    from stppo.retrieval.bm25_index import build_bm25

    progress = sys.stderr.isatty()
    if not corpus.is_file():
        raise FileNotFoundError(f"--corpus: no file {corpus}")
    if kind == "bm25":
        made = build_bm25(corpus, out, untitled, progress)
    elif kind in ("flat", "hnsw"):
        from stppo.retrieval.dense import Encoder, build_dense

        encoder = Encoder(model, query_prefix, passage_prefix, max_tokens, batch_size, device)
        made = build_dense(corpus, out, encoder, kind, untitled, progress)
    else:
        raise ValueError(f"--kind {kind}: allowed are bm25, flat, hnsw")
    size = sum(path.stat().st_size for path in out.iterdir())
    typer.echo(f"{made['kind']} index of {made['documents']} documents, {size / 2**20:.1f} MiB, {out}")


@app.command()
def serve(
    folder: Annotated[Path, typer.Argument(help="Index folder.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine only if you name it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    topk: Annotated[int, typer.Option(min=1, help="For requests that name none.")] = 3,
    corpus: Corpus = None,
    device: Device = "cpu",
) -> None:
    """Serve an index with Search-R1's interface: POST /retrieve, GET /health. It has no authentication.

    Example: `stppo retriever serve indexes/wiki-bm25 --port 8000`
    """
    from stppo.retrieval.index_retriever import IndexRetriever
    from stppo.retrieval.server import LOCAL_NAMES, Limits, create_app
    from stppo.retrieval.server import serve as serve_app

    if topk > Limits.topk:
        raise ValueError(f"--topk {topk}: at most {Limits.topk}")
    retriever = IndexRetriever(folder, corpus, device)
    retriever.search(["ready"], 1)  # what is wrong with a model or file shows before the first client
    about = {name: retriever.manifest[name] for name in ("kind", "documents")}
    typer.echo(
        f"{about['kind']} index of {about['documents']} documents: http://{host}:{port}/retrieve", err=True
    )
    hosts = LOCAL_NAMES if host in LOCAL_NAMES else None
    serve_app(create_app(retriever, default_topk=topk, about=about, hosts=hosts), host, port)


@app.command()
def query(
    source: Annotated[str, typer.Argument(help="Index folder, or the http address of a server's /retrieve.")],
    questions: Annotated[list[str], typer.Argument(help="What to search for.")],
    topk: Annotated[int, typer.Option(min=1)] = 3,
    corpus: Corpus = None,
    device: Device = "auto",
) -> None:
    """Search an index or ask a server, to see what an agent would read.

    Examples:

    * `stppo retriever query indexes/wiki-bm25 "who wrote the odyssey"`

    * `stppo retriever query http://127.0.0.1:8000/retrieve "who wrote the odyssey" --topk 5`
    """
    if source.startswith(("http://", "https://")):
        from stppo.retrieval.client import RetrievalClient

        retriever = RetrievalClient(source)  # a server that was started a moment ago still reads its index
    else:
        from stppo.retrieval.index_retriever import IndexRetriever

        retriever = IndexRetriever(source, corpus, device)
    for question, ranking in zip(questions, retriever.search(questions, topk), strict=True):
        typer.echo(f"{question}: {'nothing found' if not ranking else ''}".rstrip())
        for rank, (document, score) in enumerate(ranking, start=1):
            text = printable(document.text)[:200]
            typer.echo(
                f"  {rank}. {score:.3f} [{printable(document.id)}] {printable(document.title)}: {text}"
            )
