"""A synthetic world: a small knowledge base about made-up entities and multi-hop questions on it."""

import itertools
import math
import random
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stppo.checks import probability, whole_number
from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import Document
from stppo.world.environment import SearchEnvironment
from stppo.world.episodes import Episode, Turn
from stppo.world.protocol import TAGS, Action, Protocol, Question
from stppo.world.scripted import AMONG, OR, DemonstrationNoise, SyntheticReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
RELATIONS = (
    "mentor", "rival", "neighbour", "patron", "student", "ally",
    "cousin", "tutor", "guard", "friend", "heir", "client",
)  # fmt: skip
SPLITS = ("train", "validation", "test")
_PROTOCOL_TEXTS = {
    "prompt_template": "question {question}",
    "document_template": "{text}",
    "document_separator": " ",
    "information_template": "<information> {documents} </information>",
    "correction": "invalid turn : search or answer",
    "no_result": "no document found",
}
_GRAMMAR_WORDS = (
    "of",
    "?",
    *(word for text in _PROTOCOL_TEXTS.values() for word in text.split() if "{" not in word),
)
_DRAWS = 8
_LOOKUPS = 10
_NO_ACTION = Action("invalid", "", "a reading exercise")
_MOST_NAME_PARTS = 1000  # names would run out
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True, eq=False)
class SyntheticWorld:
    """Entities with two-token names, one document each, and questions such as `mentor of rival of dorn vale
    ?`.

    The same fields give the same world in every process. A document reads `dorn vale mentor alba moss rival
    …`: the entity's name, then its facts. Names combine shared first and last parts, so documents distract
    from one another. The answer to a question is the entity at the end of its chain of relations; no chain
    visits an entity twice, every (entity, relation) has one object, and no question is in two splits.

    What is asked cannot be learned by heart: the entities are divided, and a chain of a training question
    takes all its steps from documents of one part, a chain of validation or test from documents of the other.
    So no (entity, relation) that a training question uses is used by a question of validation or test. The
    entity at the end of a chain, whose document is not needed, may be of either part.

    seed: of names, the division, facts and questions.
    facts_seed: of the facts and questions alone (None: `seed`): another gives new facts behind the same
        names, to try whether a policy reads or remembers.
    n_name_parts: number of first parts, and of last parts; n_entities may not exceed its square.
    held_out: share of the entities whose documents validation and test ask for.
    neighbour_share: probability that a fact's object shares a name part with the document's entity.
    hop_shares: shares of 1-, 2-, … hop questions, summing to 1.
    turn_budget: searches before the last generation; at least the number of hops.
    retrieve_first: the environment makes the first of these searches itself, with the question as the query,
        and shows the result in the prompt (with turn_budget 1: episodes of one turn).
    think_probability: how often a scripted turn starts with a thought.
    options: entities that a question names as possible answers, one of them right, drawn for each question
        (0: none; from 2 on). A blind guess then succeeds once in so many times.
    misjudged: share of the answers to training questions whose reward is wrong; validation and test judge
    rightly.
    turn_rewards: what turns are paid beside the answer, a mapping of the fields of `TurnRewards`.
    hops_apart: questions of one, two, … hops are told apart in evaluations, as benchmarks are.
    cache_dir: where the retriever keeps its index (None: in memory; it is built in milliseconds).

    ValueError names the field that is out of range.
    """

    seed: int = 0
    facts_seed: int | None = None
    n_entities: int = 2000
    n_relations: int = 6
    facts_per_document: int = 4
    n_name_parts: int = 60
    neighbour_share: float = 0.2
    held_out: float = 0.2
    hop_shares: Sequence[float] = (0.4, 0.5, 0.1)
    n_train: int = 8000
    n_validation: int = 512
    n_test: int = 512
    turn_budget: int = 3
    top_k: int = 1
    max_information_words: int = 48
    max_turn_tokens: int = 16
    think_probability: float = 0.9
    reward: str = "em"
    retrieve_first: bool = False
    options: int = 0
    misjudged: float = 0.0
    turn_rewards: Mapping[str, Any] | None = None
    hops_apart: bool = False
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "hop_shares", tuple(float(share) for share in self.hop_shares))
        except (TypeError, ValueError):
            raise ValueError(f"hop_shares must be a list of numbers, got {self.hop_shares!r}") from None
        whole_number(self, *(f"n_{name}" for name in ("entities", "relations", "name_parts", *SPLITS)))
        whole_number(self, "facts_per_document", "turn_budget")
        whole_number(self, "seed", *(["facts_seed"] if self.facts_seed is not None else []), at_least=0)
        probability(self, "neighbour_share", "held_out", "think_probability", "misjudged")
        most = min(self.n_entities, len(string.ascii_uppercase))
        if self.options != 0 and (not isinstance(self.options, int) or not 2 <= self.options <= most):
            raise ValueError(
                f"options must be 0 (none) or a whole number from 2 to {most}, got {self.options!r}"
            )
        if self.n_name_parts > _MOST_NAME_PARTS:
            raise ValueError(f"n_name_parts must be at most {_MOST_NAME_PARTS}, got {self.n_name_parts}")
        if not self.facts_per_document <= self.n_relations <= len(RELATIONS):
            raise ValueError(
                f"n_relations must be from facts_per_document ({self.facts_per_document}) "
                f"to {len(RELATIONS)}, got {self.n_relations}"
            )
        if not self.facts_per_document < self.n_entities <= self.n_name_parts**2:
            raise ValueError(
                f"n_entities must be from {self.facts_per_document + 1} to n_name_parts squared "
                f"({self.n_name_parts**2}), got {self.n_entities}"
            )
        shares = self.hop_shares
        if not shares or min(shares) < 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise ValueError(f"hop_shares must be shares that sum to 1, got {list(shares)}")
        if self.turn_budget < len(self.hop_shares):
            raise ValueError(
                f"turn_budget must be at least the number of hops ({len(self.hop_shares)}), got "
                f"{self.turn_budget}"
            )
        _ = self.environment  # validates what it is given

    @cached_property
    def environment(self) -> SearchEnvironment:
        protocol = Protocol(
            **_PROTOCOL_TEXTS,
            turn_budget=self.turn_budget,
            max_information_words=self.max_information_words,
            max_turn_tokens=self.max_turn_tokens,
        )
        return SearchEnvironment(
            protocol,
            BM25Retriever(self.documents, self.cache_dir),
            self.top_k,
            self.reward,
            self.retrieve_first,
            self.turn_rewards,
        )

    @property
    def relations(self) -> tuple[str, ...]:
        return RELATIONS[: self.n_relations]

    @cached_property
    def name_parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """First parts and last parts, all different and different from every other word."""
        rng = random.Random(f"names {self.seed}")
        taken = set(RELATIONS) | set(_GRAMMAR_WORDS) | set(TAGS)
        syllables = 1 if self.n_name_parts <= 100 else 2
        parts: list[str] = []
        while len(parts) < 2 * self.n_name_parts:
            part = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables))
            part += rng.choice(_CONSONANTS)
            if part not in taken:
                taken.add(part)
                parts.append(part)
        return tuple(parts[: self.n_name_parts]), tuple(parts[self.n_name_parts :])

    @cached_property
    def entities(self) -> tuple[str, ...]:
        firsts, lasts = self.name_parts
        codes = random.Random(f"entities {self.seed}").sample(range(self.n_name_parts**2), self.n_entities)
        return tuple(
            f"{firsts[code // self.n_name_parts]} {lasts[code % self.n_name_parts]}" for code in codes
        )

    @cached_property
    def held_out_entities(self) -> frozenset[str]:
        """The entities whose documents validation and test ask for, and training never does."""
        rng = random.Random(f"held out {self.seed}")
        return frozenset(rng.sample(self.entities, round(self.held_out * self.n_entities)))

    @property
    def _facts_seed(self) -> int:
        return self.seed if self.facts_seed is None else self.facts_seed

    @cached_property
    def facts(self) -> dict[str, dict[str, str]]:
        """entity → relation → entity; the objects of one entity differ from each other and from it."""
        rng = random.Random(f"facts {self._facts_seed}")
        sharing: dict[str, list[str]] = {}
        for entity in self.entities:
            for part in entity.split():
                sharing.setdefault(part, []).append(entity)
        facts: dict[str, dict[str, str]] = {}
        for entity in self.entities:
            near = [other for part in entity.split() for other in sharing[part]]
            objects: dict[str, str] = {}
            for relation in rng.sample(self.relations, self.facts_per_document):
                pool = near if rng.random() < self.neighbour_share else self.entities
                objects[relation] = self._draw(rng, pool, [entity, *objects.values()])
            facts[entity] = objects
        return facts

    def _draw(self, rng: random.Random, pool: Sequence[str], used: list[str]) -> str:
        """An entity not in `used`, of a few from the pool the one that repeats the fewest name parts of
        `used`.

        Parts repeated within a document are what misleads BM25, so this keeps most questions answerable.
        """
        parts = Counter(part for entity in used for part in entity.split())
        candidates: list[str] = []
        while not candidates:
            candidates = [entity for entity in rng.choices(pool, k=_DRAWS) if entity not in used]
            pool = self.entities
        return min(candidates, key=lambda entity: sum(parts[part] for part in entity.split()))

    @cached_property
    def documents(self) -> tuple[Document, ...]:
        return tuple(
            Document(
                str(i),
                entity,
                " ".join([entity, *(f"{relation} {other}" for relation, other in objects.items())]),
            )
            for i, (entity, objects) in enumerate(self.facts.items())
        )

    def questions(self, split: str) -> list[Question]:
        """The questions of "train", "validation" or "test", hops shuffled; the same list each time."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        return list(self._questions[split])

    @cached_property
    def _questions(self) -> dict[str, list[Question]]:
        rng = random.Random(f"questions {self._facts_seed}")
        texts = {document.title: document.text for document in self.documents}
        trained = [entity for entity in self.entities if entity not in self.held_out_entities]
        splits: dict[str, list[Question]] = {}
        for names, entities in (
            (SPLITS[:1], trained),
            (SPLITS[1:], [entity for entity in self.entities if entity in self.held_out_entities]),
        ):
            sizes = {name: _apportion(getattr(self, f"n_{name}"), self.hop_shares) for name in names}
            splits |= {name: [] for name in names}
            for hops in range(1, len(self.hop_shares) + 1):
                chains = list(self._chains(hops, entities))
                needed = sum(size[hops - 1] for size in sizes.values())
                if needed > len(chains):
                    raise ValueError(self._too_few(names, hops, needed, len(chains)))
                drawn = iter(rng.sample(chains, needed))
                for name, size in sizes.items():
                    splits[name] += [
                        self._question(*chain, texts, hops, name)
                        for chain in itertools.islice(drawn, size[hops - 1])
                    ]
        for questions in splits.values():
            rng.shuffle(questions)
        return splits

    def _question(
        self,
        entities: tuple[str, ...],
        relations: tuple[str, ...],
        texts: dict[str, str],
        hops: int,
        split: str,
    ) -> Question:
        name, text = f"{entities[0]}.{'.'.join(relations)}", " of ".join([*reversed(relations), entities[0]])
        answers, options = (entities[-1],), ()
        if self.options:
            rng = random.Random(f"options {self._facts_seed} {name}")
            drawn = [entity for entity in rng.sample(self.entities, self.options) if entity != entities[-1]]
            options = tuple(rng.sample([entities[-1], *drawn[: self.options - 1]], self.options))
            answers = entities[-1], string.ascii_uppercase[options.index(entities[-1])]
            text = f"{text} {AMONG} {f' {OR} '.join(options)}"
        gold = tuple((entity, texts[entity]) for entity in entities[:-1])
        misjudged = self.misjudged if split == SPLITS[0] else 0.0
        source = f"{hops}_hops" if self.hops_apart else ""
        return Question(name, f"{text} ?", answers, gold, hops, source, options, misjudged)

    def _too_few(self, names: Sequence[str], hops: int, needed: int, found: int) -> str:
        asking = " + ".join(f"n_{name}" for name in names)
        change = "lower" if names == SPLITS[:1] else "raise"
        return (
            f"{asking} ask for {needed} {hops}-hop questions but the knowledge base has {found} for them: "
            f"raise n_entities or facts_per_document, {change} held_out={self.held_out}, or lower {asking}"
        )

    def _chains(
        self, hops: int, readable: Sequence[str]
    ) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """(entities, relations) of every walk of `hops` facts, each from the document of a readable entity,
        that visits no entity twice."""
        allowed = frozenset(readable)
        walks: Iterator = (((entity,), ()) for entity in readable)
        for _ in range(hops):
            walks = (
                ((*entities, other), (*relations, relation))
                for entities, relations in walks
                if entities[-1] in allowed
                for relation, other in self.facts[entities[-1]].items()
                if other not in entities
            )
        return walks

    def reading_examples(self, n: int, rng: random.Random) -> list[Episode]:
        """`n` exercises in reading: a made-up document, then ten look-ups in it, each a relation followed by
        a name.

        The documents are none of this world: their names combine name parts drawn anew each time, and so do
        their relations. A look-up's relation stands with the environment's words, its name is what the agent
        writes."""
        return [self._reading_example(rng) for _ in range(n)]

    def _reading_example(self, rng: random.Random) -> Episode:
        names = [
            " ".join(rng.choice(parts) for parts in self.name_parts)
            for _ in range(self.facts_per_document + 1)
        ]
        facts = dict(zip(rng.sample(self.relations, self.facts_per_document), names[1:], strict=True))
        text = " ".join([names[0], *itertools.chain(*facts.items())])
        asked = rng.choices([*facts], k=_LOOKUPS)
        prompt = f"{self.environment.protocol.information([Document('', names[0], text)])} <think> {asked[0]}"
        episode = Episode(Question("reading", text, (facts[asked[-1]],)), prompt, done=True)
        episode.turns = [
            Turn(facts[relation], _NO_ACTION, following)
            for relation, following in itertools.zip_longest(asked, asked[1:])
        ]
        return episode

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """Every word of the world, special tokens first; a word's place is its token id."""
        tags = [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")]
        firsts, lasts = self.name_parts
        choice = (AMONG, OR) if self.options else ()
        names = [*self.relations, *choice, *firsts, *lasts]
        return tuple(dict.fromkeys([PAD, EOS, UNKNOWN, *tags, *_GRAMMAR_WORDS, *names]))

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """One token a word; tags are ordinary words, so decoding keeps them. Unknown words become `<unk>`."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from transformers import PreTrainedTokenizerFast

        model = WordLevel({word: i for i, word in enumerate(self.vocabulary)}, unk_token=UNKNOWN)
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=PAD,
            eos_token=EOS,
            unk_token=UNKNOWN,
            clean_up_tokenization_spaces=False,
        )

    def scripted_agent(
        self, question: Question, rng: random.Random, noise: DemonstrationNoise | None = None
    ) -> SyntheticReader:
        searches = self.environment.turns_with_observation
        return SyntheticReader(question, rng, self.relations, searches, self.think_probability, noise)


def _apportion(total: int, shares: Sequence[float]) -> list[int]:
    """`total` split by `shares` into whole numbers that sum to it (largest remainders)."""
    counts = [int(total * share + 1e-9) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - total * shares[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
