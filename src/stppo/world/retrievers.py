"""Retrievers as configs name them: building one reads nothing, the first search opens its files."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stppo.world.bm25_index import open_bm25
from stppo.world.checks import one_of, whole_number
from stppo.world.environment import Retriever
from stppo.world.index_files import read_manifest
from stppo.world.retrieval import UNTITLED, BM25Retriever, Document, read_corpus


@dataclass(frozen=True, eq=False)
class BM25Files:
    """BM25 over an index on disk, or over a corpus small enough for memory.

    index: a folder of `stppo retriever index`.
    corpus: Search-R1 JSONL; alone, it is read into memory and indexed there; with `index`, where that index's corpus
        is now, if it moved.
    cache_dir: where the index of a corpus in memory is kept (None: nowhere).
    untitled: what to do with a passage without a title, as in `parse_document` (an index has decided that already).

    ValueError names the field that is wrong; the files' own errors come with the first search.
    """

    index: str | Path | None = None
    corpus: str | Path | None = None
    cache_dir: str | Path | None = None
    untitled: str = "error"

    def __post_init__(self) -> None:
        one_of(self, "untitled", UNTITLED)
        if not self.index and not self.corpus:
            raise ValueError(
                "index and corpus are not given: set index=FOLDER (made by `stppo retriever index`) or "
                "corpus=FILE (JSONL)"
            )
        _must_exist(self, "index", "corpus")

    @cached_property
    def _opened(self) -> Retriever:
        if self.index:
            return open_bm25(self.index, self.corpus)
        return BM25Retriever(read_corpus(self.corpus, self.untitled), self.cache_dir)

    def search(self, queries: list[str], top_k: int) -> list[list[tuple[Document, float]]]:
        """As `BM25Retriever.search`."""
        return self._opened.search(queries, top_k)


@dataclass(frozen=True, eq=False)
class DenseFiles:
    """Dense retrieval over an index folder of `stppo retriever index --kind flat` (or hnsw).

    corpus: where the corpus is now, if it moved. device, batch_size: of the query encoder, as in `Encoder`.
    """

    index: str | Path | None = None
    corpus: str | Path | None = None
    device: str = "auto"
    batch_size: int = 64

    def __post_init__(self) -> None:
        whole_number(self, "batch_size")
        if not self.index:
            raise ValueError("index is not given: set index=FOLDER (made by `stppo retriever index`)")
        _must_exist(self, "index", "corpus")

    @cached_property
    def _opened(self) -> Retriever:
        from stppo.world.dense import open_dense

        return open_dense(self.index, self.corpus, self.device, self.batch_size)

    def search(self, queries: list[str], top_k: int) -> list[list[tuple[Document, float]]]:
        """As `DenseRetriever.search`."""
        return self._opened.search(queries, top_k)


def open_index(
    folder: str | Path, corpus: str | Path | None = None, device: str = "auto"
) -> tuple[Retriever, dict[str, Any]]:
    """The retriever over an index folder of any kind, and its manifest. Errors as in `open_bm25` and `open_dense`."""
    manifest = read_manifest(folder)
    if manifest["kind"] == "bm25":
        return open_bm25(folder, corpus), manifest
    from stppo.world.dense import open_dense

    return open_dense(folder, corpus, device), manifest


def _must_exist(config: Any, *fields: str) -> None:
    for field in fields:
        path = getattr(config, field)
        if path and not Path(path).exists():
            raise FileNotFoundError(f"{field}: no file or folder {path}")
