"""A BM25 index on disk for millions of passages: built in bounded memory, memory-mapped when searched.

The arrays are in bm25s's own files and hold bm25s's own numbers; bm25s itself would build them in memory,
about 80 bytes for each word of the corpus. Beside them lie the vocabulary in sorted order and each document's
place in the corpus, so that nothing of the corpus's size is read at start."""

import json
import mmap
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import bm25s
import numpy as np
from bm25s.scoring import _select_idf_scorer, _select_tfc_scorer
from tqdm import tqdm

from stppo.retrieval.bm25 import BM25Retriever, words
from stppo.retrieval.bm25_search import Postings
from stppo.retrieval.documents import scan_corpus
from stppo.retrieval.index_files import new_folder, open_corpus, read_manifest, write_manifest

_DATA, _INDICES, _INDPTR = (f"{name}.csc.index.npy" for name in ("data", "indices", "indptr"))
_PARAMETERS, _MAXIMA = "params.index.json", "maxima.npy"
_WORDS, _WORD_ENDS, _WORD_IDS = "words.txt", "word_ends.npy", "word_ids.npy"
_LOOKED_AT = 1000  # documents from which the size of an index is told


class Vocabulary:
    """Word to term number by bisection in a memory-mapped sorted list."""

    def __init__(self, folder: Path) -> None:
        with open(folder / _WORDS, "rb") as file:
            self._words = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._ends = memoryview(np.asarray(np.load(folder / _WORD_ENDS, mmap_mode="r")))
        self._ids = memoryview(np.asarray(np.load(folder / _WORD_IDS, mmap_mode="r")))

    def __len__(self) -> int:
        return len(self._ids)

    def get(self, word: str) -> int | None:
        wanted = word.encode()
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            found = self._words[self._ends[middle - 1] if middle else 0 : self._ends[middle]]
            if found == wanted:
                return self._ids[middle]
            low, high = (middle + 1, high) if found < wanted else (low, middle)
        return None

    @staticmethod
    def write(folder: Path, ids: dict[str, int]) -> None:
        ordered = sorted(ids)  # by code point, which is the order of UTF-8 bytes too
        ends, position = np.empty(len(ids), np.int64), 0
        with open(folder / _WORDS, "wb") as file:
            for i, word in enumerate(ordered):
                position += file.write(word.encode())
                ends[i] = position
        np.save(folder / _WORD_ENDS, ends)
        np.save(folder / _WORD_IDS, np.fromiter((ids[word] for word in ordered), np.int32, len(ids)))


def open_bm25(folder: str | Path, corpus: str | Path | None = None) -> BM25Retriever:
    """A retriever over an index of `build_bm25`: arrays, vocabulary and documents stay on disk until they are
    used.

    corpus: where the corpus is now, if it moved. Errors as in `read_manifest` and `open_corpus`.
    """
    folder = Path(folder)
    documents = open_corpus(folder, read_manifest(folder), corpus)
    index = bm25s.BM25.load(folder, mmap=True, load_vocab=False)
    maxima = np.asarray(np.load(folder / _MAXIMA, mmap_mode="r"))
    return BM25Retriever.over(documents, Vocabulary(folder), Postings.of(index, maxima))


def build_bm25(
    corpus: str | Path,
    out: str | Path,
    untitled: str = "error",
    progress: bool = False,
    words_per_block: int = 4_000_000,
    postings_per_range: int = 16_000_000,
) -> dict[str, Any]:
    """Index a Search-R1 corpus into the folder `out`; returns its manifest.

    In memory at once: the vocabulary (about 150 bytes a word form), 12 bytes a document, and one block of
    words or range of postings (about 40 bytes each). On disk beside `out` while it works: 8 bytes a posting
    (a word of a document, counted once); in `out` at the end as much again.

    Errors as in `read_corpus` and `new_folder`, and OSError where there is no room for all this, before the
    work begins; nothing is left of a failed build."""
    model = bm25s.BM25(method="lucene")
    with new_folder(out) as folder, tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _check_room(corpus, untitled, folder)
        blocks = _Blocks(Path(scratch))
        for offset, document in _with_progress(corpus, untitled, progress):
            blocks.add(offset, words(f"{document.title} {document.text}"))
            if len(blocks.ids) >= words_per_block:
                blocks.flush()
        blocks.flush()
        if not blocks.vocabulary:
            raise ValueError(f"{corpus}: corpus has no words: every document is blank")
        Vocabulary.write(folder, blocks.vocabulary)
        n_words = len(blocks.vocabulary)
        blocks.vocabulary.clear()  # the largest thing in memory is no longer needed
        n_postings = _write_postings(model, blocks, n_words, folder, postings_per_range, progress)
        parameters = {
            name: getattr(model, name)
            for name in ("k1", "b", "delta", "method", "idf_method", "dtype", "int_dtype", "backend")
        }
        parameters |= {"num_docs": len(blocks.lengths), "version": bm25s.__version__}
        (folder / _PARAMETERS).write_text(json.dumps(parameters, indent=1))
        offsets = np.append(np.frombuffer(blocks.offsets, np.int64), Path(corpus).stat().st_size)
        return write_manifest(
            folder, corpus, offsets, kind="bm25", untitled=untitled, words=n_words, postings=n_postings
        )


def _with_progress(corpus: str | Path, untitled: str, progress: bool) -> Iterator:
    """`scan_corpus` with a bar that counts bytes, since the number of documents is not known before."""
    size, last = Path(corpus).stat().st_size, 0
    with tqdm(total=size, desc="read corpus", unit="B", unit_scale=True, disable=not progress) as bar:
        for offset, document in scan_corpus(corpus, untitled):
            yield offset, document
            bar.update(offset - last)
            last = offset
        bar.update(size - last)


class _Numbers(dict[str, int]):
    """Numbers words in the order in which they are first asked for."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


class _Blocks:
    """Word counts of consecutive documents, each block sorted by term and then document, on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.vocabulary = _Numbers()
        self.ids, self.lengths, self.offsets = array("I"), array("I"), array("q")
        self._flushed = self._count = 0

    def add(self, offset: int, found: list[str]) -> None:
        self.ids.extend(map(self.vocabulary.__getitem__, found))
        self.lengths.append(len(found))
        self.offsets.append(offset)

    def flush(self) -> None:
        lengths = np.frombuffer(self.lengths, np.uint32)[self._flushed :]
        documents = np.repeat(
            np.arange(self._flushed, self._flushed + len(lengths), dtype=np.uint64), lengths
        )
        keys = np.frombuffer(self.ids, np.uint32).astype(np.uint64) << np.uint64(32) | documents
        keys, counts = np.unique(keys, return_counts=True)
        terms, starts = np.unique((keys >> np.uint64(32)).astype(np.uint32), return_index=True)
        parts = {
            "terms": terms,
            "starts": np.append(starts, len(keys)),
            "documents": keys.astype(np.uint32).astype(np.int32),  # the lower half
            "counts": counts.astype(np.uint32),
        }
        for name, values in parts.items():
            np.save(self._folder / f"{self._count}.{name}.npy", values)
        self._count += 1
        self._flushed = len(self.lengths)
        self.ids = array("I")

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        """(terms, starts, documents, counts) of each block: term i's postings are starts[i]:starts[i+1]."""
        for block in range(self._count):
            yield tuple(
                np.load(self._folder / f"{block}.{name}.npy", mmap_mode="r")
                for name in ("terms", "starts", "documents", "counts")
            )


def _write_postings(
    model: bm25s.BM25, blocks: _Blocks, n_words: int, folder: Path, postings_per_range: int, progress: bool
) -> int:
    """Merge the blocks term range by term range into bm25s's arrays of scores; returns the number of
    postings."""
    frequencies = np.zeros(n_words, np.int64)
    for (
        terms,
        starts,
        *_,
    ) in blocks:  # each opened when its turn comes: there may be more than a process may open
        frequencies[terms] += np.diff(starts)
    indptr = np.append(0, np.cumsum(frequencies))
    np.save(folder / _INDPTR, indptr)
    lengths = np.frombuffer(blocks.lengths, np.uint32)
    average = lengths.mean()
    distinct, inverse = np.unique(frequencies, return_inverse=True)
    idf_of, tfc_of = _select_idf_scorer(model.idf_method), _select_tfc_scorer(model.method)
    idf = np.array([idf_of(int(df), N=len(lengths)) for df in distinct], np.float32)[inverse]

    maxima = np.empty(n_words, np.float32)
    total = int(indptr[-1])
    low = 0
    with (  # written, not mapped: where the disk is full a mapped file kills the process
        _vector(folder / _DATA, np.float32, total) as data,
        _vector(folder / _INDICES, np.int32, total) as indices,
        tqdm(total=total, desc="write index", unit="posting", unit_scale=True, disable=not progress) as bar,
    ):
        while low < n_words:
            high = int(np.searchsorted(indptr, indptr[low] + postings_per_range, side="right")) - 1
            high = max(high, low + 1)
            begin, end = int(indptr[low]), int(indptr[high])
            free = indptr[low:high] - begin  # where each term's next posting goes
            scores, holders = np.empty(end - begin, np.float32), np.empty(end - begin, np.int32)
            for terms, starts, documents, counts in blocks:
                first, last = np.searchsorted(terms, (low, high))
                if first == last:
                    continue
                present, run = terms[first:last], np.diff(starts[first : last + 1])
                part = slice(int(starts[first]), int(starts[last]))
                shift = free[present - low] - (starts[first:last] - part.start)
                at = np.repeat(shift, run) + np.arange(part.stop - part.start)
                tfc = tfc_of(
                    counts[part].astype(np.float32),
                    l_d=lengths[documents[part]],
                    l_avg=average,
                    k1=model.k1,
                    b=model.b,
                    delta=model.delta,
                )
                scores[at] = np.repeat(idf[present], run) * tfc
                holders[at] = documents[part]
                free[present - low] += run
            scores.tofile(data)
            holders.tofile(indices)
            maxima[low:high] = np.maximum.reduceat(scores, indptr[low:high] - begin)
            bar.update(end - begin)
            low = high
    np.save(folder / _MAXIMA, maxima)
    return total


@contextmanager
def _vector(path: Path, dtype: type, length: int) -> Iterator[BinaryIO]:
    """A file of NumPy's format to which the values of a vector are to be written in turn."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header | {"shape": (length,)})
        yield file


def _check_room(corpus: str | Path, untitled: str, folder: Path) -> None:
    """OSError where the disk of `folder` cannot hold index and work, by what the first documents need."""
    size, read, documents, postings = Path(corpus).stat().st_size, 0, 0, 0
    for read, document in islice(scan_corpus(corpus, untitled), _LOOKED_AT):  # noqa: B007 (the last counts)
        documents += 1
        postings += len(set(words(f"{document.title} {document.text}")))
    share = size / read if documents == _LOOKED_AT else 1
    index = share * (8 * postings + 8 * documents)
    needed, free = 1.1 * index + 9 * share * postings, shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder.parent.parent}: the index of {corpus} needs about {needed / 2**30:.2g} GiB there while "
            f"it is made and {index / 2**30:.2g} in the end, {free / 2**30:.2g} are free; make room or "
            "choose another disk (--out)"
        )
