"""Documents, the corpus in Search-R1's JSONL, and what every retriever offers."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from stppo.files import parse_json

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


class Retriever(Protocol):
    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[Document, float]]]:
        """Best `top_k` documents with their scores per query, best first."""


def _objects(path: str | Path) -> Iterator[tuple[int, int, dict]]:
    """(line number from 1, byte offset, object) of each line that is not blank; ValueError names file and
    line."""
    offset = 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            start, offset = offset, offset + len(line)
            if not line.strip():
                continue
            try:
                record = parse_json(line)
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
    """A corpus entry {"id", "contents"}, contents = title (quoted or not), newline, text; or {"id", "title",
    "contents"}, contents = text, with or without the title's line.

    untitled: "error" refuses contents without a title; "first_words" takes the passage's first words as its
    title. ValueError says what is wrong."""
    contents = record.get("contents")
    if "id" not in record or not isinstance(contents, str) or not contents.strip():
        raise ValueError('needs "id" and a text "contents" (quoted title, newline, text)')
    title, newline, text = contents.partition("\n")
    title = title.removesuffix("\r")
    if len(title) >= 2 and title.startswith('"') and title.endswith('"'):
        title = title[1:-1]
    given = record.get("title")
    if isinstance(given, str) and given.strip():
        return Document(str(record["id"]), given, text if newline and title == given else contents)
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

    untitled: as in `parse_document`. FileNotFoundError where there is no such file; ValueError names file and
    line of a malformed entry, or the file where it holds no document."""
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
            return parse_document(parse_json(line), self._untitled)
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.path}: entry {i} changed since it was indexed; index it again"
            ) from error
