"""Finding documents: BM25 and dense indexes, in memory, on disk and over HTTP."""

from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import Document, Retriever, read_corpus

__all__ = ["BM25Retriever", "Document", "Retriever", "read_corpus"]
