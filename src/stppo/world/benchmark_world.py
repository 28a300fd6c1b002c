"""Real questions over a real corpus: what the benchmarks ask, divided into train, validation and test."""

import hashlib
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stppo.checks import one_of, whole_number
from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import read_corpus
from stppo.world.datasets import Reading, Records, check_place, locate, read_questions
from stppo.world.environment import SearchEnvironment
from stppo.world.protocol import Protocol, Question
from stppo.world.records import BENCHMARKS, SCHEMAS
from stppo.world.rewards import MEASURES, normalise_answer
from stppo.world.scripted import DemonstrationNoise, GoldTitleSearcher

log = logging.getLogger(__name__)

Place = str | Path | None


@dataclass(frozen=True, eq=False)
class BenchmarkWorld:
    """Questions of the eight benchmarks; nothing is read or downloaded before it is asked for.

    benchmark: what "test" asks: one of `BENCHMARKS` or a list of them; `Question.source` tells them apart.
    train: what "train" and "validation" ask: a name, a list (all questions of each), or {name: share} with shares that
    sum to 1 (as many questions as these proportions allow). Besides `BENCHMARKS` there is nq_hotpotqa, Search-R1's mix
    in one file. None: the world is for evaluation alone.
    records: where they are, for all or per benchmark ({name: place}); see `datasets.locate`. None takes the hub's.
    held_out: share of the train records that is kept for validation, chosen by a hash of the normalised question, so it
    is the same in every process and shares no question with train. Where one file serves training and testing, as large
    a share again is its test. Train and validation never ask what test asks.
    train_limit, test_limit: most records per benchmark, a seeded sample.
    streaming, seed, unanswerable, no_answer: as in `datasets.Reading`; `seed` also shuffles train and validation.
    corpus: Search-R1 JSONL for a BM25 index, which is kept in `cache_dir` (None: in memory).
    retriever: in place of a corpus: an object with `search(queries, top_k)`, or a function (`_partial_: true`) that
    makes one at first use.
    turn_budget: turns that get an observation before the last generation.
    parsing, max_*: as in `Protocol`.

    ValueError names the field that is wrong; missing or malformed files as in `read_records` and `read_corpus`.
    """

    benchmark: str | Sequence[str] = "hotpotqa"
    train: str | Sequence[str] | Mapping[str, float] | None = None
    records: Place | Mapping[str, Place] = None
    held_out: float = 0.1
    train_limit: int | None = None
    test_limit: int | None = None
    streaming: bool = False
    seed: int = 0
    unanswerable: str = "skip"
    no_answer: str = "error"
    corpus: str | Path | None = None
    retriever: Any = None
    cache_dir: str | Path | None = None
    top_k: int = 3
    turn_budget: int = 4
    parsing: str = "search_r1"
    max_information_words: int = 350
    max_turn_tokens: int = 500
    max_observation_tokens: int = 500
    max_start_tokens: int = 2048
    reward: str = "em"

    tokenizer = None  # the language model brings its own: take it from the policy's pretrained folder

    def __post_init__(self) -> None:
        one_of(self, "reward", MEASURES)
        whole_number(self, "top_k")
        if not self._tested:
            raise ValueError("benchmark is empty: name what to evaluate on")
        for field, names, allowed in (
            ("benchmark", self._tested, BENCHMARKS),
            ("train", self._trained, SCHEMAS),
            ("records", self.records if isinstance(self.records, Mapping) else (), SCHEMAS),
        ):
            if unknown := [name for name in names if name not in allowed]:
                raise ValueError(f"{field} must be of {', '.join(allowed)}, got {unknown[0]!r}")
        shares = self._shares.values()
        if shares and (min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6):
            raise ValueError(f"train: shares must be positive and sum to 1, got {dict(self._shares)}")
        if not isinstance(self.held_out, int | float) or not 0 < self.held_out < 0.5:
            raise ValueError(f"held_out must be above 0 and below 0.5, got {self.held_out!r}")
        for name in dict.fromkeys([*self._tested, *self._trained]):
            check_place(name, self._place(name))
        if (self.corpus is None) == (self.retriever is None):
            raise ValueError(
                "exactly one of corpus and retriever is needed: set world.corpus=FILE (JSONL) or world.retriever; questions "
                "come from the hub, or from world.records=FILE"
            )
        if self.corpus is not None and not Path(self.corpus).is_file():
            raise FileNotFoundError(f"corpus: no file {self.corpus}")
        whole_number(self, *(f for f in ("train_limit", "test_limit") if getattr(self, f) is not None))
        _ = self._protocol, self._reading(None)  # validate their fields

    @property
    def _tested(self) -> list[str]:
        return [self.benchmark] if isinstance(self.benchmark, str) else list(self.benchmark)

    @property
    def _trained(self) -> list[str]:
        return [self.train] if isinstance(self.train, str) else list(self.train or ())

    @property
    def _shares(self) -> Mapping[str, float]:
        return self.train if isinstance(self.train, Mapping) else {}

    def _place(self, name: str) -> Place:
        return self.records.get(name) if isinstance(self.records, Mapping) else self.records

    def _reading(self, limit: int | None) -> Reading:
        return Reading(
            self.streaming, limit, self.seed, unanswerable=self.unanswerable, no_answer=self.no_answer
        )

    @cached_property
    def _protocol(self) -> Protocol:
        return Protocol(
            turn_budget=self.turn_budget,
            parsing=self.parsing,
            max_information_words=self.max_information_words,
            max_turn_tokens=self.max_turn_tokens,
            max_observation_tokens=self.max_observation_tokens,
            max_start_tokens=self.max_start_tokens,
        )

    @cached_property
    def environment(self) -> SearchEnvironment:
        retriever = self.retriever
        if retriever is None:
            retriever = BM25Retriever(read_corpus(self.corpus), self.cache_dir)
        elif not hasattr(retriever, "search"):
            retriever = retriever()
        return SearchEnvironment(self._protocol, retriever, self.top_k, self.reward)

    def questions(self, split: str) -> list[Question]:
        """The questions of "train", "validation" (both shuffled) or "test" (in order); the same list each time.

        ValueError for another split, and for train and validation where `train` is not set.
        """
        if split == "test":
            return list(self._test)
        if split not in ("train", "validation"):
            raise ValueError(f"split must be train, validation or test, got {split!r}")
        if not self._trained:
            raise ValueError(f"no {split} questions: set world.train, e.g. world.train=[nq,hotpotqa]")
        return list(self._divided[split])

    @cached_property
    def _located(self) -> dict[str, Records]:
        return {name: locate(name, self._place(name)) for name in {*self._tested, *self._trained}}

    @cached_property
    def _test(self) -> tuple[Question, ...]:
        questions: list[Question] = []
        for name in self._tested:
            records = self._located[name]
            asked = read_questions(records, "test", self._reading(self.test_limit))
            if records.is_pool and name in self._trained:
                asked = [q for q in asked if self.held_out <= _position(q) < 2 * self.held_out]
            questions += asked
        return tuple(questions)

    @cached_property
    def _divided(self) -> dict[str, tuple[Question, ...]]:
        tested = {_key(question) for question in self._test}
        divided: dict[str, dict[str, list[Question]]] = {"train": {}, "validation": {}}
        for name in self._trained:
            read = read_questions(self._located[name], "train", self._reading(self.train_limit))
            asked = [question for question in read if _key(question) not in tested]
            if len(asked) < len(read):
                log.info("%s: %d train questions are left to test", name, len(read) - len(asked))
            kept = [question for question in asked if _position(question) < self.held_out]
            divided["validation"][name] = kept
            divided["train"][name] = [question for question in asked if _position(question) >= self.held_out]
        mixed = {}
        for split, pools in divided.items():
            rng = random.Random(f"{split} {self.seed}")
            mixed[split] = tuple(_mixed(pools, self._shares, rng))
            if not mixed[split]:
                raise ValueError(f"no {split} question is left of {', '.join(pools)}: give more records")
        return mixed

    def scripted_agent(
        self, question: Question, rng: random.Random, noise: DemonstrationNoise | None = None
    ) -> GoldTitleSearcher:
        return GoldTitleSearcher(question, self.turn_budget, rng, noise)


def _key(question: Question) -> str:
    return normalise_answer(question.text)


def _position(question: Question) -> float:
    """A number in [0, 1) by which a question is held out or not: a hash of its normalised text."""
    return int.from_bytes(hashlib.sha256(_key(question).encode()).digest()[:8]) / 2**64


def _mixed(
    pools: Mapping[str, list[Question]], shares: Mapping[str, float], rng: random.Random
) -> list[Question]:
    """All questions shuffled; under shares, as many of each pool as the proportions allow."""
    chosen = [rng.sample(pool, len(pool)) for pool in pools.values()]
    if shares:
        total = min(len(pool) / shares[name] for name, pool in pools.items())
        chosen = [
            questions[: round(total * share)]
            for questions, share in zip(chosen, shares.values(), strict=True)
        ]
    questions = [question for part in chosen for question in part]
    rng.shuffle(questions)
    return questions
