"""The retriever over an index folder, whatever its kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stppo.checks import whole_number
from stppo.retrieval.bm25_index import open_bm25
from stppo.retrieval.documents import Document, Retriever
from stppo.retrieval.index_files import read_manifest


@dataclass(frozen=True, eq=False)
class IndexRetriever:
    """Search in an index on disk, as a config names it: building it reads nothing, the first search opens the
    files.

    index: folder of `stppo retriever index`, BM25 or dense.
    corpus: where its corpus is now, if it moved.
    device, batch_size: of the query encoder of a dense index, as in `stppo.retrieval.dense.Encoder`.

    ValueError names the field that is wrong; the first search raises as `read_manifest` and `open_corpus` do.
    """

    index: str | Path | None = None
    corpus: str | Path | None = None
    device: str = "auto"
    batch_size: int = 64

    def __post_init__(self) -> None:
        whole_number(self, "batch_size")
        if not self.index:
            raise ValueError("index is not given: set index=FOLDER, made by `stppo retriever index`")
        for field in ("index", "corpus"):
            path = getattr(self, field)
            if path and not Path(path).exists():
                raise FileNotFoundError(f"{field}: no file or folder {path}")

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What the index is: kind, documents, corpus, ..."""
        return read_manifest(self.index)

    @cached_property
    def _opened(self) -> Retriever:
        if self.manifest["kind"] == "bm25":
            return open_bm25(self.index, self.corpus)
        from stppo.retrieval.dense import open_dense

        return open_dense(self.index, self.corpus, self.device, self.batch_size)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[Document, float]]]:
        """Best `top_k` documents with their scores per query, best first."""
        return self._opened.search(queries, top_k)
