"""BM25 over documents in memory (bm25s, Lucene variant)."""

import hashlib
import json
import logging
import re
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import bm25s

from stppo.files import parse_json, write_folder
from stppo.retrieval.bm25_search import Postings, best_documents
from stppo.retrieval.documents import Document

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for DEBUG and would print at every index

_WORD = re.compile(r"\w+")
_QUERY_CACHE = 65_536  # queries; roll-outs repeat the same few thousand
_MANIFEST = "manifest.json"


def words(text: str) -> list[str]:
    """Lower-cased words, as indexed and as searched. No stemming and no stop words: idf handles the latter.

    Letters and their marks are composed (NFC) first: `\\w` ends at a mark that stands alone."""
    text = text.lower()
    return _WORD.findall(text if text.isascii() else unicodedata.normalize("NFC", text))


class BM25Retriever:
    """BM25 over title and text.

    documents: at least one, else ValueError.
    cache_dir: folder for indexes, one sub-folder per content hash; None keeps the index in memory alone.
        A damaged entry is rebuilt; several processes may share the folder.
    """

    def __init__(self, documents: Sequence[Document], cache_dir: str | Path | None = None) -> None:
        if not documents:
            raise ValueError("corpus is empty: BM25 needs at least one document")
        self.documents: Sequence[Document] = tuple(documents)
        index = self._build() if cache_dir is None else self._cached(Path(cache_dir))
        self._use(index.vocab_dict, Postings.of(index))

    @classmethod
    def over(
        cls, documents: Sequence[Document], vocabulary: Mapping[str, int], postings: Postings
    ) -> "BM25Retriever":
        """A retriever over an index that exists; the documents may be read from disk as they are asked
        for."""
        retriever = cls.__new__(cls)
        retriever.documents = documents
        retriever._use(vocabulary, postings)
        return retriever

    def _use(self, vocabulary: Mapping[str, int], postings: Postings) -> None:
        self._vocabulary, self._postings = vocabulary, postings
        self._ranked = lru_cache(maxsize=_QUERY_CACHE)(self._rank)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[Document, float]]]:
        """Best `top_k` documents with their scores per query, best first, ties in corpus order.

        Only documents that share a word with the query are returned, so a query of unknown words gets an
        empty list."""
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        return [[(self.documents[i], score) for i, score in self._ranked(query, top_k)] for query in queries]

    def _rank(self, query: str, top_k: int) -> tuple[tuple[int, float], ...]:
        found = [self._vocabulary.get(word) for word in words(query)]
        terms = [term for term in found if term is not None]
        if not terms:
            return ()
        documents, scores = best_documents(self._postings, terms, top_k)
        return tuple(zip(documents.tolist(), scores.tolist(), strict=True))

    def _build(self) -> bm25s.BM25:
        vocabulary: dict[str, int] = {}
        ids = [
            [
                vocabulary.setdefault(word, len(vocabulary))
                for word in words(f"{document.title} {document.text}")
            ]
            for document in self.documents
        ]
        if not vocabulary:
            raise ValueError("corpus has no words: every document is blank")
        index = bm25s.BM25(method="lucene")
        index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
        return index

    def _cached(self, cache_dir: Path) -> bm25s.BM25:
        folder = cache_dir / f"bm25-{self._content_hash()}"
        index = _load(folder)
        if index is not None:
            return index
        index = self._build()

        def save(part: Path) -> None:
            index.save(part, show_progress=False)
            (part / _MANIFEST).write_text(json.dumps(_checksums(part)))

        try:
            write_folder(folder, save, lambda found: _load(found) is not None)
        except OSError as error:
            warnings.warn(f"BM25 index not cached in {folder}: {error}", stacklevel=2)
        return index

    def _content_hash(self) -> str:
        digest = hashlib.sha256(f"{bm25s.__version__} {_WORD.pattern} lower nfc lucene".encode())
        for document in self.documents:
            digest.update(json.dumps([document.title, document.text]).encode())
        return digest.hexdigest()[:24]


def _load(folder: Path) -> bm25s.BM25 | None:
    """The index in `folder`, or None where it is absent or not what `_cached` wrote."""
    try:
        manifest = parse_json((folder / _MANIFEST).read_bytes())
        if manifest != _checksums(folder):
            raise ValueError("checksum mismatch")
        return bm25s.BM25.load(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        warnings.warn(f"BM25 index in {folder} is damaged ({error}); rebuilding it", stacklevel=2)
        return None


def _checksums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != _MANIFEST
    }
