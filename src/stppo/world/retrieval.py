"""Documents, the corpus in Search-R1's JSONL, and BM25 over it (bm25s, Lucene variant)."""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import bm25s
import numpy as np

from stppo.world.bm25_search import Postings, best_documents

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for DEBUG and would print at every index

_WORD = re.compile(r"\w+")
_QUERY_CACHE = 65_536  # queries; roll-outs repeat the same few thousand
_MANIFEST = "manifest.json"
_TITLE_WORDS = 8  # of a passage without a title
UNTITLED = ("error", "first_words")


@dataclass(frozen=True)
class Document:
    """One passage."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Search-R1's form: title in quotes, newline, text."""
        return f'"{self.title}"\n{self.text}'


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
        self.documents: Sequence[Document] = tuple(documents)
        index = self._build() if cache_dir is None else self._cached(Path(cache_dir))
        self._use(index.vocab_dict, Postings.of(index))

    @classmethod
    def over(
        cls, documents: Sequence[Document], vocabulary: Mapping[str, int], postings: Postings
    ) -> "BM25Retriever":
        """A retriever over an index that exists; the documents may be read from disk as they are asked for."""
        retriever = cls.__new__(cls)
        retriever.documents = documents
        retriever._use(vocabulary, postings)
        return retriever

    def _use(self, vocabulary: Mapping[str, int], postings: Postings) -> None:
        self._vocabulary, self._postings = vocabulary, postings
        self._ranked = lru_cache(maxsize=_QUERY_CACHE)(self._rank)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[Document, float]]]:
        """Best `top_k` documents with their scores per query, best first, ties in corpus order.

        Only documents that share a word with the query are returned, so a query of unknown words gets an empty list.
        """
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


def _objects(path: str | Path) -> Iterator[tuple[int, int, dict]]:
    """(line number from 1, byte offset, object) of each line that is not blank; ValueError names file and line."""
    offset = 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            start, offset = offset, offset + len(line)
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
            yield number, start, record


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict]]:
    """(line number from 1, object) of each line that is not blank; ValueError names file and line."""
    return ((number, record) for number, _, record in _objects(path))


def parse_document(record: dict, untitled: str = "error") -> Document:
    """A corpus entry {"id", "contents"}, contents = title (quoted or not), newline, text.

    untitled: "error" refuses contents without a title; "first_words" takes the passage's first words as its title.
    ValueError says what is wrong.
    """
    contents = record.get("contents")
    if "id" not in record or not isinstance(contents, str) or not contents.strip():
        raise ValueError('needs "id" and a text "contents" (quoted title, newline, text)')
    title, newline, text = contents.partition("\n")
    if len(title) >= 2 and title.startswith('"') and title.endswith('"'):
        title = title[1:-1]
    if not newline or not title.strip():
        if untitled != "first_words":
            raise ValueError(
                'no title in "contents" (wanted: quoted title, newline, text); '
                "untitled=first_words takes the first words of such a passage"
            )
        text = contents if not newline else text
        title = " ".join(text.split()[:_TITLE_WORDS])
    return Document(str(record["id"]), title, text)


def scan_corpus(path: str | Path, untitled: str = "error") -> Iterator[tuple[int, Document]]:
    """(byte offset, document) of each entry of a Search-R1 corpus, one at a time; errors as `read_corpus`."""
    if untitled not in UNTITLED:
        raise ValueError(f"untitled must be one of {', '.join(UNTITLED)}, got {untitled!r}")
    number = 0
    for number, offset, record in _objects(path):
        try:
            yield offset, parse_document(record, untitled)
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    if not number:
        raise ValueError(f"{path}: corpus is empty")


def read_corpus(path: str | Path, untitled: str = "error") -> list[Document]:
    """Documents of a Search-R1 corpus: JSONL of {"id", "contents"}, contents = quoted title, newline, text.

    untitled: as in `parse_document`. FileNotFoundError where there is no such file; ValueError names file and line
    of a malformed entry, or the file where it holds no document.
    """
    return [document for _, document in scan_corpus(path, untitled)]


class CorpusFile(Sequence[Document]):
    """A corpus that stays on disk: each document is read when it is asked for, so it costs no memory.

    offsets: (documents + 1,) where each entry begins, then the file's size; of `scan_corpus`.
    """

    def __init__(self, path: str | Path, offsets: np.ndarray, untitled: str = "error") -> None:
        self.path, self._offsets, self._untitled = Path(path), offsets, untitled
        self._file = open(path, "rb")  # noqa: SIM115 (open as long as the corpus is)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, i: int) -> Document:
        """ValueError names the file where the entry is no longer what was indexed."""
        start, end = int(self._offsets[i]), int(self._offsets[i + 1])
        line = os.pread(
            self._file.fileno(), end - start, start
        )  # no shared position: threads may read at once
        try:
            return parse_document(json.loads(line), self._untitled)
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.path}: entry {i} changed since it was indexed; index it again"
            ) from error
