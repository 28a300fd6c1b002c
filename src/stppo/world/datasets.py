"""Benchmarks: real records of eight question-answering sets, played against a corpus in Search-R1's JSONL."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stppo.world.checks import one_of, whole_number
from stppo.world.environment import REWARDS, SearchEnvironment
from stppo.world.protocol import Protocol, Question
from stppo.world.retrieval import BM25Retriever, read_corpus, read_jsonl
from stppo.world.scripted import DemonstrationNoise, GoldTitleSearcher

Record = dict[str, Any]
Paragraphs = tuple[tuple[str, str], ...]
Parsed = tuple[str, list[str], Paragraphs]  # question, answers, gold paragraphs


def _strings(value: Any) -> list[str]:
    """A value, a list of values, or a list written inside a string (PopQA), as strings; None gives none."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(json.JSONDecodeError):  # an answer may merely start with a bracket
            value = json.loads(value)
    values = value if isinstance(value, list) else [value]
    return [str(v).strip() for v in values if v is not None and str(v).strip()]


def _nq(record: Record) -> Parsed:
    return record["question"], _strings(record["answer"]), ()


def _triviaqa(record: Record) -> Parsed:
    return record["question"], _strings(record["golden_answers"]), ()


def _popqa(record: Record) -> Parsed:
    return record["question"], _strings(record["possible_answers"]), ()


def _bamboogle(record: Record) -> Parsed:
    return record["Question"], _strings(record["Answer"]), ()


def _medqa(record: Record) -> Parsed:
    options = " ".join(f"({letter}) {text}" for letter, text in sorted(record["options"].items()))
    return f"Options: {options}. {record['question']}", _strings(record["answer"]), ()


def _hotpotqa(record: Record) -> Parsed:
    """HotpotQA and 2WikiMultiHopQA: `context` and `supporting_facts` refer to each other by title."""
    gold = {title for title, _ in record["supporting_facts"]}
    paragraphs = tuple(
        (title, " ".join(sentences)) for title, sentences in record["context"] if title in gold
    )
    return record["question"], _strings(record["answer"]), paragraphs


def _musique(record: Record) -> Parsed:
    paragraphs = tuple((p["title"], p["paragraph_text"]) for p in record["paragraphs"] if p["is_supporting"])
    return record["question"], _strings(record["answer"]) + _strings(record["answer_aliases"]), paragraphs


_READERS: dict[str, Callable[[Record], Parsed]] = {
    "nq": _nq,
    "triviaqa": _triviaqa,
    "popqa": _popqa,
    "hotpotqa": _hotpotqa,
    "2wikimultihopqa": _hotpotqa,
    "musique": _musique,
    "bamboogle": _bamboogle,
    "medqa": _medqa,
}
BENCHMARKS = tuple(_READERS)


def read_records(benchmark: str, path: str | Path) -> list[Question]:
    """The questions of a JSONL file in the benchmark's own schema (TriviaQA: FlashRAG's), read with `datasets`.

    FileNotFoundError where there is no such file; ValueError names file and line of a line that is not JSON,
    file and record (counted from 1) of one that lacks a field, its question or its answer.
    """
    if benchmark not in _READERS:
        raise ValueError(f"benchmark must be one of {', '.join(BENCHMARKS)}, got {benchmark!r}")
    lines = [record for _, record in read_jsonl(path)]
    if not lines:
        raise ValueError(f"{path}: no records")

    from datasets import Dataset

    # Not load_dataset("json"): it names no line of a broken file and turns dates such as "1999-01-01" into time stamps.
    records = Dataset.from_list(lines, on_mixed_types="use_json")
    questions = []
    for number, record in enumerate(records, start=1):
        try:
            text, answers, paragraphs = _READERS[benchmark](record)
            name = str(record.get("_id", record.get("id", f"{benchmark}-{number}")))
            unique = tuple(dict.fromkeys(answers))
            questions.append(Question(name, text or "", unique, paragraphs, max(1, len(paragraphs))))
        except KeyError as error:
            raise ValueError(
                f"{path} record {number}: not a {benchmark} record, it has no field {error}"
            ) from error
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{path} record {number}: not a {benchmark} record ({error})") from error
        except ValueError as error:
            raise ValueError(f"{path} record {number}: {error}") from error
    return questions


@dataclass(frozen=True, eq=False)
class BenchmarkWorld:
    """Real questions over a real corpus; the questions of `records` are all "test" questions.

    benchmark: one of `BENCHMARKS`.
    records: its JSONL file; corpus: Search-R1 JSONL.
    turn_budget: turns that get an observation before the last generation.
    max_information_words: retrieved text is cut to this many words.
    cache_dir: where the BM25 index is kept (None: in memory).

    ValueError names the field that is wrong; missing or malformed files as in `read_records` and `read_corpus`.
    """

    benchmark: str
    records: str | Path | None = None
    corpus: str | Path | None = None
    top_k: int = 3
    turn_budget: int = 4
    max_information_words: int = 350
    max_turn_tokens: int = 500
    reward: str = "em"
    cache_dir: str | Path | None = None

    tokenizer = None  # the language model brings its own

    def __post_init__(self) -> None:
        one_of(self, "benchmark", BENCHMARKS)
        one_of(self, "reward", REWARDS)
        whole_number(self, "top_k")
        for field in ("records", "corpus"):
            path = getattr(self, field)
            if not path:
                raise ValueError(f"{field} is not given: set world.{field}=FILE (JSONL)")
            if not Path(path).is_file():
                raise FileNotFoundError(f"{field}: no file {path}")
        _ = self._protocol  # validates its fields

    @cached_property
    def _protocol(self) -> Protocol:
        return Protocol(
            turn_budget=self.turn_budget,
            max_information_words=self.max_information_words,
            max_turn_tokens=self.max_turn_tokens,
        )

    @cached_property
    def environment(self) -> SearchEnvironment:
        retriever = BM25Retriever(read_corpus(self.corpus), self.cache_dir)
        return SearchEnvironment(self._protocol, retriever, self.top_k, self.reward)

    def questions(self, split: str) -> list[Question]:
        """All records for "test"; ValueError for any other split."""
        if split != "test":
            raise ValueError(f"a benchmark has only the split test, got {split!r}")
        return list(self._questions)

    @cached_property
    def _questions(self) -> tuple[Question, ...]:
        return tuple(read_records(self.benchmark, self.records))

    def scripted_agent(
        self, question: Question, rng: random.Random, noise: DemonstrationNoise | None = None
    ) -> GoldTitleSearcher:
        if noise is not None:
            raise ValueError(
                "noise is for demonstrations in the synthetic world; the gold-title searcher takes none"
            )
        return GoldTitleSearcher(question, self.turn_budget)
