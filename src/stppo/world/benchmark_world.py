"""Real questions over a real corpus: what the benchmarks ask, divided into train, validation and test."""

import hashlib
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stppo.checks import one_of, whole_number
from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import Document, read_corpus
from stppo.world.datasets import Reading, Records, check_place, locate, read_passages, read_questions
from stppo.world.environment import SearchEnvironment
from stppo.world.passages import PassagesByTitle
from stppo.world.protocol import PROMPTS, Protocol, Question, neutralise_tags
from stppo.world.records import BENCHMARKS, SCHEMAS
from stppo.world.rewards import MEASURES, normalise_answer
from stppo.world.scripted import DemonstrationNoise, GoldTitleSearcher, paragraph_key
from stppo.world.single_hop import SINGLE_HOP
from stppo.world.turn_rewards import TurnRewards

log = logging.getLogger(__name__)

Place = str | Path | None
CONTEXTS = "contexts"  # the corpus that comes with the records
SPLITS_BY = ("question", "gold_title")


@dataclass(frozen=True, eq=False)
class BenchmarkWorld:
    """Questions of the eight benchmarks; nothing is read or downloaded before it is asked for.

    benchmark: what "test" asks: one of `BENCHMARKS`, of `single_hop.SINGLE_HOP`, or a list of them;
    `Question.source` tells them apart.
    train: what "train" and "validation" ask: a name or a list (all questions of each). Besides `BENCHMARKS`
    there is nq_hotpotqa, Search-R1's mix in one file. None: the world is for evaluation alone.
    records: where they are, for all or per benchmark ({name: place}); see `datasets.locate`. None takes the
    hub's. What is derived from a benchmark's records takes that benchmark's place where it has none of its
    own.
    held_out: share of the train records that is kept for validation, chosen by a hash of the normalised
    question, so it is the same in every process and shares no question with train. Where one file serves
    training and testing, as large a share again is its test, or `test_share`. Train and validation never ask
    what test asks.
    split_by: "gold_title": that hash is of a question's gold titles, and none of train's or validation's
    questions needs a passage whose title one of test's needs, nor train's one of validation's; what would is
    left out. A question of several passages is held out where any of them is. Questions without gold titles
    are divided as by "question".
    train_limit, test_limit: most records per benchmark, a seeded sample.
    streaming, seed, unanswerable, no_answer: as in `datasets.Reading`; `seed` also shuffles train and
    validation.
    corpus: Search-R1 JSONL for a BM25 index, which is kept in `cache_dir` (None: in memory); or "contexts":
    all paragraphs that come with the records read for any split, each once.
    only_in_corpus: questions that come without gold paragraphs (NQ, TriviaQA, PopQA, ...) are asked only if
    the corpus has a passage whose title stands in the question and whose text holds an accepted answer; such
    passages become their gold paragraphs. For a small corpus, which holds few of the passages that such sets
    need.
    retriever: in place of a corpus: an object with `search(queries, top_k)`, or a function (`_partial_:
    true`) that makes one at first use.
    turn_budget: turns that get an observation before the last generation.
    prompt: one of `PROMPTS`: Search-R1's, or a short one for small contexts.
    parsing, max_*: as in `Protocol`.
    turn_rewards: what turns are paid beside the answer, a mapping of the fields of `TurnRewards`; `found` is
    for questions whose records say which titles are gold.

    ValueError names the field that is wrong; missing or malformed files as in `read_records` and
    `read_corpus`."""

    benchmark: str | Sequence[str] = "hotpotqa"
    train: str | Sequence[str] | None = None
    records: Place | Mapping[str, Place] = None
    held_out: float = 0.1
    test_share: float | None = None
    split_by: str = "question"
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
    prompt: str = "search_r1"
    parsing: str = "search_r1"
    max_information_words: int = 350
    max_turn_tokens: int = 500
    max_observation_tokens: int = 500
    max_start_tokens: int = 2048
    only_in_corpus: bool = False
    reward: str = "em"
    turn_rewards: Mapping[str, Any] | None = None

    tokenizer = None  # the language model brings its own: take it from the policy's pretrained folder

    def __post_init__(self) -> None:
        one_of(self, "reward", MEASURES)
        one_of(self, "split_by", SPLITS_BY)
        one_of(self, "prompt", PROMPTS)
        whole_number(self, "top_k")
        for field in ("benchmark", "train"):
            value = getattr(self, field)
            if not isinstance(value, str | Sequence) and (value, field) != (None, "train"):
                raise ValueError(f"{field} must be a name or a list of names, got {value!r}")
        if not self._tested:
            raise ValueError("benchmark is empty: name what to evaluate on")
        for field, names, allowed in (
            ("benchmark", self._tested, (*BENCHMARKS, *SINGLE_HOP)),
            ("train", self._trained, known := tuple(dict.fromkeys([*BENCHMARKS, *SINGLE_HOP, *SCHEMAS]))),
            ("records", self.records if isinstance(self.records, Mapping) else (), known),
        ):
            if unknown := [name for name in names if name not in allowed]:
                raise ValueError(f"{field} must be of {', '.join(allowed)}, got {unknown[0]!r}")
        if not isinstance(self.held_out, int | float) or not 0 < self.held_out < 0.5:
            raise ValueError(f"held_out must be above 0 and below 0.5, got {self.held_out!r}")
        share = self._test_share
        if not isinstance(share, int | float) or share <= 0 or self.held_out + share >= 1:
            raise ValueError(
                f"test_share must be above 0 and leave some of 1 - held_out to train, got {share!r}"
            )
        for name in dict.fromkeys([*self._tested, *self._trained]):
            check_place(name, self.place(name))
        if (self.corpus is None) == (self.retriever is None):
            raise ValueError(
                "exactly one of corpus and retriever is needed: set world.corpus=FILE (JSONL), "
                "world.corpus=contexts (the records' own passages) or world.retriever; questions come from "
                "the hub, or from world.records=FILE"
            )
        if self.corpus not in (None, CONTEXTS) and not Path(self.corpus).is_file():
            raise FileNotFoundError(f"corpus: no file {self.corpus}")
        if self.only_in_corpus and self.corpus is None:
            raise ValueError("only_in_corpus needs world.corpus: a retriever does not say what it holds")
        whole_number(self, *(f for f in ("train_limit", "test_limit") if getattr(self, f) is not None))
        _ = self._protocol, self._reading(None)  # validate their fields
        object.__setattr__(self, "turn_rewards", TurnRewards.of(self.turn_rewards, self.turn_budget))

    @property
    def _tested(self) -> list[str]:
        return [self.benchmark] if isinstance(self.benchmark, str) else list(self.benchmark)

    @property
    def _trained(self) -> list[str]:
        return [self.train] if isinstance(self.train, str) else list(self.train or ())

    @property
    def _test_share(self) -> float:
        return self.held_out if self.test_share is None else self.test_share

    def place(self, name: str) -> Place:
        """Where the records of a benchmark, or those it is derived from, are said to be; None: the hub's."""
        if not isinstance(self.records, Mapping):
            return self.records
        return self.records.get(name, self.records.get(SINGLE_HOP.get(name, name)))

    def _reading(self, limit: int | None) -> Reading:
        return Reading(
            self.streaming, limit, self.seed, unanswerable=self.unanswerable, no_answer=self.no_answer
        )

    @cached_property
    def _protocol(self) -> Protocol:
        return Protocol(
            **PROMPTS[self.prompt],
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
            retriever = BM25Retriever(self._documents, self.cache_dir)
        elif not hasattr(retriever, "search"):
            retriever = retriever()
        return SearchEnvironment(
            self._protocol, retriever, self.top_k, self.reward, turn_rewards=self.turn_rewards
        )

    @cached_property
    def _documents(self) -> list[Document]:
        """The passages of the corpus; a warning counts those that hold protocol tags, which are shown in
        brackets."""
        documents = self._contexts() if self.corpus == CONTEXTS else read_corpus(self.corpus)
        tagged = [d.id for d in documents if "<" in d.contents and neutralise_tags(d.contents) != d.contents]
        if tagged:
            log.warning(
                "corpus: %d passages hold protocol tags or control tokens, shown as [search]; first: id %s",
                len(tagged),
                tagged[0],
            )
        return documents

    def _contexts(self) -> list[Document]:
        """The paragraphs that come with the records, each once (white space aside), in their order."""
        found: dict[tuple[str, str], tuple[str, str]] = {}
        for names, split, limit in (
            (self._tested, "test", self.test_limit),
            (self._trained, "train", self.train_limit),
        ):
            for name in names:
                for passage in read_passages(self._located[name], split, self._reading(limit)):
                    found.setdefault(paragraph_key(*passage), passage)
        if not found:
            raise ValueError(
                f"corpus=contexts: the records of {', '.join({*self._tested, *self._trained})} come without "
                "paragraphs; set world.corpus=FILE or world.retriever"
            )
        return [Document(str(i), title, text) for i, (title, text) in enumerate(found.values())]

    def questions(self, split: str) -> list[Question]:
        """The questions of "train", "validation" (both shuffled) or "test" (in order); the same list each
        time.

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
        return {name: locate(name, self.place(name)) for name in {*self._tested, *self._trained}}

    @cached_property
    def _test(self) -> tuple[Question, ...]:
        questions: list[Question] = []
        for name in self._tested:
            records = self._located[name]
            asked = self._read(name, "test", self.test_limit)
            if records.is_pool and name in self._trained:
                end = self.held_out + self._test_share
                asked = [q for q in asked if self.held_out <= self._position(q) < end]
            questions += asked
        return tuple(questions)

    def _read(self, name: str, split: str, limit: int | None) -> list[Question]:
        asked = read_questions(self._located[name], split, self._reading(limit))
        if not self.only_in_corpus:
            return asked
        kept = [question for question in map(self._placed, asked) if question]
        if len(kept) < len(asked):
            log.info("%s: %d %s questions have no passage in the corpus", name, len(asked) - len(kept), split)
        return kept

    def _placed(self, question: Question) -> Question | None:
        """The question with gold paragraphs, of the corpus where it comes without; None where
        `only_in_corpus` leaves it out."""
        if question.gold_paragraphs or not self.only_in_corpus:
            return question
        return self._by_passage.placed(question)

    @cached_property
    def _by_passage(self) -> PassagesByTitle:
        return PassagesByTitle(self._documents)

    def unseen(self, questions: Iterable[Question]) -> list[Question]:
        """Those that "train" does not ask, nor, under `split_by` "gold_title", needs a passage of."""
        taken = self._shared(self._divided["train"])
        return [q for q in questions if not taken & self._shared([self._placed(q) or q])]

    def _position(self, question: Question) -> float:
        """A number in [0, 1) by which a question is held out or not: a hash of its normalised text, or the
        smallest of those of its gold titles."""
        return (
            min(map(_position, _titles(question))) if self._by_title(question) else _position(_key(question))
        )

    def _by_title(self, question: Question) -> bool:
        return self.split_by == "gold_title" and bool(question.gold_paragraphs)

    def _shared(self, questions: Iterable[Question]) -> set[str]:
        """What another split may not ask: the questions, and the titles that they need."""
        found = set()
        for question in questions:
            found.add(_key(question))
            if self._by_title(question):
                found |= {f"title: {title}" for title in _titles(question)}
        return found

    def _check_gold(self, pools: Mapping[str, Sequence[Question]]) -> None:
        """ValueError where `turn_rewards.found` can never be paid; a line of the log where it is not for
        some."""
        without = [name for name, pool in pools.items() if not any(q.gold_paragraphs for q in pool)]
        if self.turn_rewards is None or not self.turn_rewards.found or not without:
            return
        said = f"turn_rewards.found: the records of {', '.join(without)} do not say which titles are gold"
        if len(without) == len(pools):
            raise ValueError(
                f"{said}, so it is never paid; leave it out, or train on hotpotqa, 2wikimultihopqa or musique"
            )
        log.warning("%s; it is paid on the other questions alone", said)

    @cached_property
    def _divided(self) -> dict[str, tuple[Question, ...]]:
        taken = self._shared(self._test)
        divided: dict[str, dict[str, list[Question]]] = {"train": {}, "validation": {}}
        read = {name: self._read(name, "train", self.train_limit) for name in self._trained}
        for split in ("validation", "train"):
            for name, asked in read.items():
                ours = [q for q in asked if (self._position(q) < self.held_out) == (split == "validation")]
                kept = [q for q in ours if not taken & self._shared([q])]
                if len(kept) < len(ours):
                    log.info("%s: %d %s questions are left to others", name, len(ours) - len(kept), split)
                divided[split][name] = kept
            taken |= self._shared(q for pool in divided[split].values() for q in pool)
        self._check_gold(divided["train"])
        mixed = {}
        for split, pools in divided.items():
            rng = random.Random(f"{split} {self.seed}")
            mixed[split] = tuple(_mixed(pools.values(), rng))
            if not mixed[split]:
                raise ValueError(
                    f"no {split} question is left of {', '.join(pools)}: give more records, or others to "
                    "world.benchmark; what test asks, or by gold title needs, is not trained on"
                )
        return mixed

    def scripted_agent(
        self, question: Question, rng: random.Random, noise: DemonstrationNoise | None = None
    ) -> GoldTitleSearcher:
        return GoldTitleSearcher(question, self.turn_budget, rng, noise)


def _key(question: Question) -> str:
    return normalise_answer(question.text)


def _titles(question: Question) -> list[str]:
    return [normalise_answer(title) or title for title, _ in question.gold_paragraphs]


def _position(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def _mixed(pools: Iterable[list[Question]], rng: random.Random) -> list[Question]:
    questions = [question for pool in pools for question in rng.sample(pool, len(pool))]
    rng.shuffle(questions)
    return questions
