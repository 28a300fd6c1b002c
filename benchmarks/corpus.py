"""A made-up corpus of any size with the statistics of a real sample, as Search-R1's JSONL.

    python benchmarks/corpus.py --data DIR --passages 21015324 --out FILE     (`retrieval.py --fit` says how well it fits)

DIR holds corpus.jsonl (the sample) and NAME/records.jsonl of the benchmarks in `QUESTIONS`.

What is fitted: word frequencies by rank (Zipf and Mandelbrot, with a steeper tail after Gerlach and Altmann 2013), the
growth of the vocabulary (Heaps), passage lengths and repetition inside a passage. The words of the sample take the
ranks of their own frequencies, so real questions meet posting lists of realistic length; made-up words take the rest.
What is not: words stand together by chance alone, so the best passages score less far above the others than in text.

Hidden in it, evenly spread: every passage of the sample (id `real-N`), and for each question of `SINGLE` a passage with
its four rarest words and its answer among made-up words (id `planted-QUESTION`).
"""

import argparse
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from scipy.optimize import least_squares

from stppo.retrieval.bm25 import words
from stppo.retrieval.documents import Document, read_corpus, read_jsonl
from stppo.world.datasets import read_records
from stppo.world.protocol import Question
from stppo.world.records import context_of
from stppo.world.scripted import paragraph_key

MULTI_HOP = ("hotpotqa", "2wikimultihopqa", "musique")  # the sample is these questions' contexts
SINGLE = ("nq", "triviaqa", "popqa", "bamboogle")  # their words are no part of why the sample was taken
QUESTIONS = (*SINGLE, *MULTI_HOP)
TABLE = 2**20  # ranks whose probability and spelling are tabulated; the endless rest is computed
LETTERS = np.frombuffer(b"bcdfghjklmnpqrst", np.uint8)  # a made-up word is its rank's digits to base 16
LAST_RANK = 2.0**52
WIDTH = 20  # bytes of the longest word and a blank
BLOCK = 20_000  # passages made at once
PASSAGE_WORDS = 100  # between blanks, of a passage of Search-R1's Wikipedia


def read_questions(data: Path, benchmarks: tuple[str, ...] = QUESTIONS) -> list[Question]:
    return [q for name in benchmarks for q in read_records(name, data / name / "records.jsonl")]


@dataclass(frozen=True)
class RankLaw:
    """Probability of the word of rank r: C / (r + shift)^head up to `bend`, from there on falling like r^-tail.

    The tail has no end, so the vocabulary grows for ever, like (words)^(1 / tail)."""

    shift: float
    head: float
    bend: float
    tail: float

    @cached_property
    def table(self) -> np.ndarray:
        """(TABLE,) probabilities of ranks 1, 2, ..."""
        weights = self._weights(np.arange(1, TABLE + 1))
        return weights / (weights.sum() + self._weights(TABLE) * TABLE / (self.tail - 1))

    def _weights(self, rank):
        r = np.asarray(rank, float)
        at_bend = (self.bend + self.shift) ** -self.head
        beyond = at_bend * (np.maximum(r, self.bend) / self.bend) ** -self.tail
        return np.where(r <= self.bend, (r + self.shift) ** -self.head, beyond)

    def vocabulary(self, n) -> np.ndarray:
        """Expected number of different words among n drawn."""
        edges = np.unique(np.geomspace(1, TABLE, 400).astype(int))
        p, width = self.table[edges - 1], np.gradient(edges.astype(float))
        last = self.table[-1]
        far = np.geomspace(TABLE, TABLE * 1e6, 400)
        far_p, far_width = last * (far / TABLE) ** -self.tail, np.gradient(far)
        p, width = np.append(p, far_p), np.append(width, far_width)
        return np.array([float(np.sum(width * -np.expm1(-size * p))) for size in np.atleast_1d(n)])

    @classmethod
    def fitted(cls, frequencies: np.ndarray, heaps: np.ndarray) -> "RankLaw":
        """To counts in descending order and to (words read, different words) pairs, by least squares of logarithms."""
        total = frequencies.sum()
        ranks = np.unique(np.geomspace(1, np.sum(frequencies >= 10), 60).astype(int))

        def off(x):
            law = cls(np.exp(x[0]), x[1], np.exp(x[2]), x[3])
            shares = np.log(law.table[ranks - 1]) - np.log(frequencies[ranks - 1] / total)
            growth = np.log(law.vocabulary(heaps[:, 0])) - np.log(heaps[:, 1])
            return np.concatenate([shares / np.sqrt(len(shares)), growth / np.sqrt(len(growth))])

        bounds = ([-3, 0.5, np.log(500), 1.2], [5, 1.5, np.log(100_000), 3.0])
        x = least_squares(off, [1.0, 1.0, np.log(8000), 1.6], bounds=bounds).x
        return cls(float(np.exp(x[0])), float(x[1]), float(np.exp(x[2])), float(x[3]))

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """n ranks, int64."""
        uniform = np.sort(rng.random(n))  # in order the search stays in the cache
        ranks = np.searchsorted(np.cumsum(self.table), uniform) + 1
        rest = ranks > TABLE
        share = (1 - uniform[rest]) / (1 - self.table.sum())
        ranks[rest] = np.minimum(TABLE * share ** (-1 / (self.tail - 1)), LAST_RANK).astype(np.int64) + 1
        return rng.permutation(ranks)


class Sample:
    """What is known of the real corpus: its words, its law of ranks, and the questions asked of it."""

    def __init__(self, data: Path) -> None:
        self.documents = read_corpus(data / "corpus.jsonl")
        self.questions = read_questions(data)
        self.texts = [words(f"{d.title} {d.text}") for d in self.documents]
        self.title_lengths = np.array([len(words(d.title)) for d in self.documents])
        self.lengths = np.array([len(text) for text in self.texts])
        self.distinct = np.array([len(set(text)) for text in self.texts])
        counts = Counter(word for text in self.texts for word in text)
        self.frequencies = np.array(sorted(counts.values(), reverse=True))
        self.heaps = growth(self.texts)
        self.law = RankLaw.fitted(self.frequencies, self.heaps)
        self.repeat = self._repeat()
        between_blanks = np.mean([len(d.text.split()) for d in self.documents])
        # Passages of Wikipedia are cut at 100 words between blanks; those of the sample are paragraphs.
        self.stretch = float(PASSAGE_WORDS / between_blanks)
        self.vocabulary = self._vocabulary(self._fair_counts(counts, data))

    def _fair_counts(self, counts: Counter, data: Path) -> dict[str, float]:
        """Counts over the passages that are in the sample for other questions than those with the word: a name that is
        asked for stands in the sample because it is asked for."""
        places, excluded = defaultdict(list), defaultdict(set)
        for i, text in enumerate(self.texts):
            for word in text:
                places[word].append(i)
        of = {paragraph_key(d.title, d.text): i for i, d in enumerate(self.documents)}
        for name in MULTI_HOP:
            for _, record in read_jsonl(data / name / "records.jsonl"):
                own = {of.get(paragraph_key(*pair)) for pair in context_of(record)}
                for word in set(words(record["question"])):
                    excluded[word] |= own
        fair, total = dict(counts), len(self.documents)
        for word, own in excluded.items():
            if word in fair and len(own) < total / 2:
                fair[word] = sum(i not in own for i in places[word]) * total / (total - len(own))
        return fair

    def _vocabulary(self, counts: dict[str, float]) -> dict[str, int]:
        """Word to rank: by count; a word of a question that has none gets a rank beyond, drawn by its logarithm."""
        seen = sorted((w for w, count in counts.items() if count), key=lambda w: (-counts[w], w))
        ranks = {word: rank for rank, word in enumerate(seen, start=1)}
        unseen = sorted({w for q in self.questions for w in words(q.text)} - ranks.keys())
        drawn = np.unique(
            np.geomspace(len(seen) + 1, TABLE, len(unseen)).astype(int)
        )  # evenly by logarithm, no rank twice
        order = np.random.default_rng(0).permutation(unseen)
        return ranks | {str(word): int(rank) for word, rank in zip(order, drawn, strict=False)}

    def _repeat(self) -> float:
        """Share of the words of a passage that repeat an earlier word of it, such that the number of different words
        is the sample's."""
        rng, low, high = np.random.default_rng(0), 0.0, 0.9
        for _ in range(12):
            middle = (low + high) / 2
            ranks = repeated(self.law.draw(rng, int(self.lengths.sum())), self.lengths, middle, rng)
            passage = np.repeat(np.arange(len(self.lengths)), self.lengths)
            more = len(np.unique(passage.astype(np.int64) << 52 | ranks)) > self.distinct.sum()
            low, high = (middle, high) if more else (low, middle)
        return (low + high) / 2

    @cached_property
    def spelling(self) -> np.ndarray:
        """(TABLE + 1, WIDTH) bytes of each rank's word and a blank, 0 after it."""
        rows = np.zeros((TABLE + 1, WIDTH), np.uint8)
        rows[:, :14] = spelled(np.arange(TABLE + 1))
        for word, rank in self.vocabulary.items():
            if len(written := word.encode() + b" ") <= WIDTH:  # one in a thousand is longer
                rows[rank] = np.frombuffer(written.ljust(WIDTH, b"\0"), np.uint8)
        return rows

    @cached_property
    def sizes(self) -> np.ndarray:
        return np.count_nonzero(self.spelling, axis=1)


def growth(texts: list[list[str]]) -> np.ndarray:
    """(16, 2): words read and different words among them, passages in a random order."""
    order = np.random.default_rng(0).permutation(len(texts))
    ends = set(np.geomspace(len(texts) / 64, len(texts), 16).astype(int).tolist())
    seen, read, found = set(), 0, []
    for number, i in enumerate(order, start=1):
        seen.update(texts[i])
        read += len(texts[i])
        if number in ends:
            found.append((read, len(seen)))
    return np.array(found)


def spelled(ranks: np.ndarray) -> np.ndarray:
    """(n, 14) bytes: the rank's digits to base 16 as consonants, a blank, zeros."""
    digits = (ranks[:, None] >> np.arange(48, -1, -4)) & 15
    shown = np.cumsum(digits, axis=1) > 0
    rows = np.zeros((len(ranks), 14), np.uint8)
    rows[:, :13] = np.where(shown, LETTERS[digits], 0)
    rows[:, 13] = 32
    return rows


def repeated(ranks: np.ndarray, lengths: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """The ranks of consecutive passages, where `share` of the words is that of an earlier place of the passage."""
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = np.arange(len(ranks)) - starts
    copies = np.flatnonzero((rng.random(len(ranks)) < share) & (place > 0))
    found = ranks.copy()
    found[copies] = ranks[starts[copies] + (rng.random(len(copies)) * place[copies]).astype(np.int64)]
    return found


def passages(
    sample: Sample, n: int, stretch: float = 1.0, seed: int = 0
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """(titles, texts) of n made-up passages, block by block, in UTF-8."""
    for block, start in enumerate(range(0, n, BLOCK)):
        rng = np.random.default_rng((seed, block))
        count = min(BLOCK, n - start)
        like = rng.integers(len(sample.documents), size=count)
        titles = sample.title_lengths[like]
        lengths = titles + np.maximum((sample.lengths[like] - titles) * stretch, 1).round().astype(np.int64)
        ranks = repeated(sample.law.draw(rng, int(lengths.sum())), lengths, sample.repeat, rng)
        far = np.flatnonzero(ranks > TABLE)
        near = ranks.copy()
        near[far] = 0
        rows, sizes = sample.spelling[near], sample.sizes[near]
        rows[far, :14] = spelled(ranks[far])
        sizes[far] = np.count_nonzero(rows[far], axis=1)
        joined = rows[rows != 0].tobytes()
        ends = np.cumsum(sizes)  # of each word
        last = np.cumsum(lengths)
        first = ends[last - lengths] - sizes[last - lengths]
        middle = np.where(titles > 0, ends[last - lengths + titles - 1], first)
        bounds = zip(first.tolist(), middle.tolist(), ends[last - 1].tolist(), strict=True)
        cut = [(joined[a : b - 1], joined[b : c - 1]) for a, b, c in bounds]
        yield [title or b"-" for title, _ in cut], [text for _, text in cut]


def hidden(sample: Sample, seed: int = 0) -> list[Document]:
    """The real passages, and a passage with the answer to each question of `SINGLE`, in a random order."""
    real = [Document(f"real-{d.id}", d.title, d.text) for d in sample.documents]
    asked = [q for q in sample.questions if q.source in SINGLE]
    rng = np.random.default_rng(seed)
    planted = []
    filler = zip(*next(passages(sample, len(asked), sample.stretch, seed + 1)), strict=True)
    for question, (_, text) in zip(asked, filler, strict=True):
        rare = rarest(sample, question, 4)
        around = text.decode().split()
        for item in (*rare, question.answers[0]):
            around.insert(int(rng.integers(len(around) + 1)), item)
        planted.append(Document(planted_id(question), " ".join(rare[:2]) or "-", " ".join(around)))
    both = [*real, *planted]
    return [both[i] for i in rng.permutation(len(both))]


def planted_id(question: Question) -> str:
    return f"planted-{question.source}-{question.id}"


def rarest(sample: Sample, question: Question, n: int) -> list[str]:
    found = dict.fromkeys(words(question.text))
    return sorted(found, key=lambda word: -sample.vocabulary[word])[:n]


def write_corpus(sample: Sample, path: Path, n: int, seed: int = 0) -> dict[str, int]:
    """n passages, the hidden ones (or as many as half of n) evenly among them; what was written."""
    kept = hidden(sample, seed)[: n // 2]
    places = {(2 * i + 1) * n // (2 * len(kept)): document for i, document in enumerate(kept)}
    number = 0
    with open(path, "wb") as file:
        for titles, texts in passages(sample, n, sample.stretch, seed):
            lines = [
                b'{"id": "%d", "contents": "\\"%b\\"\\n%b"}\n' % (i, title, text)
                for i, (title, text) in enumerate(zip(titles, texts, strict=True), start=number)
            ]
            for i in range(number, number + len(lines)):
                if (document := places.get(i)) is not None:
                    entry = {"id": document.id, "contents": document.contents}
                    lines[i - number] = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
            file.writelines(lines)
            number += len(lines)
    return {"passages": n, "hidden": len(kept), "bytes": path.stat().st_size}


def fit(sample: Sample) -> dict[str, Any]:
    """The sample beside a made-up corpus of its size, both read in the same way."""
    made = [
        words(f"{title.decode()} {text.decode()}")
        for block in passages(sample, len(sample.documents), seed=1)
        for title, text in zip(*block, strict=True)
    ]
    both = {"real": sample.texts, "made": made}
    asked = sorted({w for q in sample.questions if q.source in SINGLE for w in words(q.text)})
    columns: dict[str, dict[str, float]] = {}
    for name, texts in both.items():
        column = columns[name] = {}
        heaps, holders = growth(texts), Counter(w for t in texts for w in set(t))
        counts = np.array(sorted(Counter(w for t in texts for w in t).values(), reverse=True))
        lengths, distinct = (np.array([len(of(t)) for t in texts]) for of in (list, set))
        for i in (0, 4, 8, 12, 15):
            share = round(2.0 ** (i * 0.4 - 6) * 100, 1)
            column[f"different words among the first {share:g} % of passages"] = heaps[i, 1]
        for rank in (1, 10, 100, 1_000, 10_000, 30_000):
            column[f"words a million of rank {rank:,}"] = 1e6 * counts[rank - 1] / counts.sum()
        for q in (5, 25, 50, 75, 95, 99):
            column[f"words of a passage, {q} % quantile"] = np.percentile(lengths, q)
        for low, high in ((40, 60), (90, 110), (180, 220)):
            between = (low <= lengths) & (lengths <= high)
            column[f"different words of passages of {low} to {high}"] = distinct[between].mean()
        held = [holders[w] for w in asked]
        for q in (10, 25, 50, 75, 90, 99):
            what = f"passages with a word of a question of one hop, {q} % quantile of {len(asked):,} words"
            column[what] = np.percentile(held, q)
    rows = [
        {"what": what, **{name: float(of[what]) for name, of in columns.items()}} for what in columns["real"]
    ]
    return {
        "passages": len(sample.documents),
        "law": {name: getattr(sample.law, name) for name in ("shift", "head", "bend", "tail")},
        "repeat": sample.repeat,
        "stretch": sample.stretch,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--passages", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    print(json.dumps(write_corpus(Sample(options.data), options.out, options.passages)))


if __name__ == "__main__":
    main()
