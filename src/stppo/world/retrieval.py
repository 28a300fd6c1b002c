"""Retrieval over a fixed set of documents: BM25 (bm25s, Lucene variant), index cached on disk."""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import bm25s
import numpy as np

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for DEBUG and would print at every index

_WORD = re.compile(r"\w+")
_QUERY_CACHE = 65_536  # queries; roll-outs repeat the same few thousand
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Document:
    """One passage."""

    id: str
    title: str
    text: str


def words(text: str) -> list[str]:
    """Lower-cased words, as indexed and as searched. No stemming and no stop words: idf handles the latter."""
    return _WORD.findall(text.lower())


class BM25Retriever:
    """BM25 over title and text.

    documents: at least one, else ValueError.
    cache_dir: folder for indexes, one sub-folder per content hash; None keeps the index in memory alone.
        A damaged entry is rebuilt; several processes may share the folder.
    """

    def __init__(self, documents: Sequence[Document], cache_dir: str | Path | None = None) -> None:
        if not documents:
            raise ValueError("corpus is empty: BM25 needs at least one document")
        self.documents = tuple(documents)
        self._index = self._build() if cache_dir is None else self._cached(Path(cache_dir))
        self._ranked = lru_cache(maxsize=_QUERY_CACHE)(self._rank)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[Document, float]]]:
        """Best `top_k` documents with their scores per query, best first, ties in corpus order.

        Only documents that share a word with the query are returned, so a query of unknown words gets an empty list.
        """
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        return [list(self._ranked(query, top_k)) for query in queries]

    def _rank(self, query: str, top_k: int) -> tuple[tuple[Document, float], ...]:
        vocabulary = self._index.vocab_dict
        ids = [vocabulary[word] for word in words(query) if word in vocabulary]
        if not ids:
            return ()
        scores = self._index.get_scores_from_ids(ids)
        # bm25s's own top-k leaves the order of ties open, so select by threshold and sort stably.
        k = min(top_k, len(scores))
        threshold = np.partition(scores, -k)[-k]
        candidates = np.flatnonzero((scores >= threshold) & (scores > 0))
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
        return tuple((self.documents[i], float(scores[i])) for i in best)

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
        try:
            _save(index, folder)
        except OSError as error:
            warnings.warn(f"BM25 index not cached in {folder}: {error}", stacklevel=2)
        return index

    def _content_hash(self) -> str:
        digest = hashlib.sha256(f"{bm25s.__version__} {_WORD.pattern} lower lucene".encode())
        for document in self.documents:
            digest.update(json.dumps([document.title, document.text]).encode())
        return digest.hexdigest()[:24]


def _load(folder: Path) -> bm25s.BM25 | None:
    """The index in `folder`, or None where it is absent or not what `_save` wrote."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest != _checksums(folder):
            raise ValueError("checksum mismatch")
        return bm25s.BM25.load(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        warnings.warn(f"BM25 index in {folder} is damaged ({error}); rebuilding it", stacklevel=2)
        return None


def _save(index: bm25s.BM25, folder: Path) -> None:
    """Write beside the final place, then rename: a reader sees a whole index or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="writing-") as scratch:
        staged = Path(scratch, "index")
        index.save(staged, show_progress=False)
        (staged / _MANIFEST).write_text(json.dumps(_checksums(staged)))
        try:
            os.rename(staged, folder)
        except OSError:
            if _load(folder) is None:  # damaged leftovers; otherwise another process was faster
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(staged, folder)


def _checksums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != _MANIFEST
    }


def read_jsonl(path: str | Path) -> Iterable[tuple[int, dict]]:
    """(line number from 1, object) of each line that is not blank; ValueError names file and line."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path} line {number}: not valid JSON ({error.msg}, column {error.colno})"
                ) from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} line {number}: not UTF-8 text") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path} line {number}: expected a JSON object, got {type(record).__name__}")
            yield number, record


def read_corpus(path: str | Path) -> list[Document]:
    """Documents of a Search-R1 corpus: JSONL of {"id", "contents"}, contents = quoted title, newline, text.

    FileNotFoundError where there is no such file; ValueError names file and line of a malformed entry,
    or the file where it holds no document.
    """
    documents = []
    for number, record in read_jsonl(path):
        contents = record.get("contents")
        if "id" not in record or not isinstance(contents, str) or not contents.strip():
            raise ValueError(
                f'{path} line {number}: needs "id" and a text "contents" (quoted title, newline, text)'
            )
        title, _, text = contents.partition("\n")
        if len(title) >= 2 and title.startswith('"') and title.endswith('"'):
            title = title[1:-1]
        documents.append(Document(str(record["id"]), title, text))
    if not documents:
        raise ValueError(f"{path}: corpus is empty")
    return documents
