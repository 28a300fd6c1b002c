"""Agents without learning: they prove the environment and write the demonstrations of the warm start."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from tqdm import tqdm

from stppo.checks import probability
from stppo.retrieval.documents import Document
from stppo.world.environment import Episode, SearchEnvironment
from stppo.world.protocol import Question, neutralise_tags
from stppo.world.rewards import mean_by_source, normalise_answer, score


@dataclass(frozen=True)
class DemonstrationNoise:
    """Probabilities of mistakes, each in [0, 1]; the defaults give demonstrations that succeed about 0.6 of
    the time.

    early_answer: at each turn that has read a document but lacks the answer: answer some entity seen there.
    wrong_entity: at each name that is to be copied from a document: copy another of its entities.
    malformed: at each turn: break its tags (it still ends with a closing tag, which ends a turn).
    """

    early_answer: float = 0.3
    wrong_entity: float = 0.1
    malformed: float = 0.05

    def __post_init__(self) -> None:
        probability(self, "early_answer", "wrong_entity", "malformed")


class Agent(Protocol):
    def act(self, episode: Episode) -> str:
        """The full text of the next turn, tags included."""


class World(Protocol):
    environment: SearchEnvironment

    def questions(self, split: str) -> list[Question]: ...

    def scripted_agent(
        self, question: Question, rng: random.Random, noise: DemonstrationNoise | None = None
    ) -> Agent: ...


AMONG, OR = "among", "or"  # of the options in a question: `mentor of dorn vale among alba moss or dol ken ?`


class SyntheticReader:
    """Reads the chain of relations from the question and every entity from what was retrieved, nothing else.

    Where the retriever returns another entity's document, it asks once more with the relation added. An early
    answer to a question with options is one of them."""

    def __init__(
        self,
        question: Question,
        rng: random.Random,
        relations: Sequence[str],
        turn_budget: int,
        think_probability: float = 0.0,
        noise: DemonstrationNoise | None = None,
    ) -> None:
        asked = question.text.removesuffix("?").partition(f" {AMONG} ")[0]
        *chain, start = asked.strip().split(" of ")
        self._options = question.options
        self._wanted = chain[::-1]  # relations still to follow, next first
        self._entity = start
        self._rng, self._relations = rng, frozenset(relations)
        self._turn_budget, self._think_probability = turn_budget, think_probability
        self._noise = noise or DemonstrationNoise(0, 0, 0)
        self._missed = False

    def act(self, episode: Episode) -> str:
        seen = self._read(episode)
        early = bool(seen and self._wanted) and _happens(self._rng, self._noise.early_answer)
        if early or not self._wanted or len(episode.turns) >= self._turn_budget:
            answer = self._rng.choice(self._options or seen) if early else self._entity
            kind, content, thought = "answer", answer, f"answer {answer}"
        else:
            content = f"{self._entity} {self._wanted[0]}" if self._missed else self._entity
            kind, thought = "search", ""
        turn = f"<{kind}> {content} </{kind}>"
        if not early and self._fact:
            thought = self._fact
        if thought and _happens(self._rng, self._think_probability):
            turn = f"<think> {thought} </think> {turn}"
        return _broken(self._rng, kind, content) if _happens(self._rng, self._noise.malformed) else turn

    def _read(self, episode: Episode) -> list[str]:
        """Follow the chain through the latest document; returns the entities it names."""
        documents = episode.latest_documents
        seen: list[str] = []
        self._missed = bool(documents)
        self._fact = ""
        for document in documents:
            subject, facts = parse_document(document.text, self._relations)
            seen += [entity for entity in facts.values() if entity not in seen]
            if self._wanted and subject == self._entity and self._wanted[0] in facts:
                relation = self._wanted.pop(0)
                copied = facts[relation]
                others = [entity for entity in facts.values() if entity != copied]
                wrong = others and _happens(self._rng, self._noise.wrong_entity)
                self._entity = self._rng.choice(others) if wrong else copied
                self._missed = False
                self._fact = f"{relation} {self._entity}"
                if not episode.turns:  # read the prompt's document aloud, up to the fact that is wanted
                    last = [*facts.values()].index(self._entity) + 1
                    self._fact = " ".join([subject, *itertools.chain(*[*facts.items()][:last])])
        return seen


def _happens(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


def _broken(rng: random.Random, kind: str, content: str) -> str:
    """A turn with broken tags. One that opens its tag is still read under `parsing: search_r1`, as Search-R1
    would."""
    return rng.choice(
        (
            f"{content} </{kind}>",
            f"<{kind}> </{kind}>",
            f"<{kind}> <{kind}> {content} </{kind}>",
            f"<think> {content} <{kind}> {content} </{kind}>",
        )
    )


def parse_document(text: str, relations: frozenset[str]) -> tuple[str, dict[str, str]]:
    """(entity, relation → entity) of a document of the synthetic world."""
    subject: list[str] = []
    facts: dict[str, list[str]] = {}
    current = subject
    for word in text.split():
        if word in relations:
            current = facts.setdefault(word, [])
        else:
            current.append(word)
    return " ".join(subject), {relation: " ".join(words) for relation, words in facts.items()}


class GoldTitleSearcher:
    """Searches each gold title, then answers the gold answer where its string stands in what was retrieved.

    It knows the answer, so without noise it bounds what this retriever and turn budget allow. A yes / no
    answer has no string to look for and counts where every gold paragraph was retrieved. Without gold titles
    it searches the question. Entities of its noise are the titles that it has seen; a search that was lost to
    noise is made up for."""

    def __init__(
        self,
        question: Question,
        turn_budget: int,
        rng: random.Random | None = None,
        noise: DemonstrationNoise | None = None,
    ) -> None:
        titles = [title for title, _ in question.gold_paragraphs] or [question.text]
        queries = dict.fromkeys(neutralise_tags(title).strip() for title in titles)
        self._queries = list(queries)[:turn_budget]
        self._question, self._turn_budget = question, turn_budget
        self._rng, self._noise = rng or random.Random(0), noise or DemonstrationNoise(0, 0, 0)

    def act(self, episode: Episode) -> str:
        documents = [document for turn in episode.turns for document in turn.documents]
        searched = {turn.action.content for turn in episode.turns if turn.action.kind == "search"}
        missing = [query for query in self._queries if query not in searched]
        if len(episode.turns) >= self._turn_budget:
            missing = []
        if missing and documents and _happens(self._rng, self._noise.early_answer):
            kind, content = "answer", self._rng.choice(documents).title
        else:
            kind, content = (
                ("search", missing[0]) if missing else ("answer", self._supported_answer(documents))
            )
            others = [document.title for document in documents if document.title != content]
            if others and _happens(self._rng, self._noise.wrong_entity):
                content = self._rng.choice(others)
        content = neutralise_tags(content).strip()
        if _happens(self._rng, self._noise.malformed):
            return _broken(self._rng, kind, content)
        return f"<{kind}> {content} </{kind}>"

    def _supported_answer(self, documents: Sequence[Document]) -> str:
        texts = [f" {normalise_answer(f'{document.title} {document.text}')} " for document in documents]
        found = {paragraph_key(document.title, document.text) for document in documents}
        gold = {paragraph_key(*paragraph) for paragraph in self._question.gold_paragraphs}
        answers = self._question.answers
        for answer in answers[:1] if self._question.options else answers:  # a letter stands in every text
            normalised = normalise_answer(answer)
            if normalised in ("yes", "no"):
                supported = bool(gold) and gold <= found
            else:
                supported = bool(normalised) and any(f" {normalised} " in text for text in texts)
            if supported:
                return answer
        return "unknown"


def paragraph_key(title: str, text: str) -> tuple[str, str]:
    """Title and text without white space: what makes two paragraphs the same.

    Corpora differ in how they join a paragraph's sentences (with a space or nothing), so spaces cannot count.
    """
    return "".join(title.split()), "".join(text.split())


def recall_at_k(environment: SearchEnvironment, questions: Sequence[Question], k: int) -> float | None:
    """Mean share of a question's gold paragraphs among the top k for the question as query.

    Questions without gold paragraphs are left out; None where none has any.
    """
    judged = [question for question in questions if question.gold_paragraphs]
    found = environment.retriever.search([question.text for question in judged], k)
    shares = []
    for question, ranking in zip(judged, found, strict=True):
        gold = {paragraph_key(*paragraph) for paragraph in question.gold_paragraphs}
        top = {paragraph_key(document.title, document.text) for document, _ in ranking}
        shares.append(len(gold & top) / len(gold))
    return fmean(shares) if shares else None


def play(
    world: World,
    questions: Sequence[Question],
    rng: random.Random,
    noise: DemonstrationNoise | None = None,
    progress: bool = False,
) -> list[Episode]:
    """One finished episode of the world's scripted agent per question, all played in lockstep."""
    environment = world.environment
    episodes = [environment.start(question) for question in questions]
    agents = [world.scripted_agent(question, rng, noise) for question in questions]
    running = list(zip(agents, episodes, strict=True))
    with tqdm(total=len(episodes), desc="play", unit="question", disable=not progress) as bar:
        while running:
            environment.step(
                [episode for _, episode in running], [agent.act(episode) for agent, episode in running]
            )
            remaining = [pair for pair in running if not pair[1].done]
            bar.update(len(running) - len(remaining))
            running = remaining
    return episodes


def play_summary(
    world: World,
    questions: Sequence[Question],
    rng: random.Random,
    noise: DemonstrationNoise | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Play the questions; returns n, em, f1, recall_at_3 (None without gold paragraphs) and
    searches_per_question.

    Questions of several benchmarks add em_by_benchmark.
    """
    if not questions:
        raise ValueError("no question to play")
    episodes = play(world, questions, rng, noise, progress)
    recall = recall_at_k(world.environment, questions, 3)
    matches = [score(e.question, e.answer) for e in episodes]
    by_source = {name: round(em, 4) for name, em in mean_by_source(questions, matches).items()}
    return {
        "n": len(episodes),
        "em": round(fmean(matches), 4),
        "f1": round(fmean(score(e.question, e.answer, "f1") for e in episodes), 4),
        "recall_at_3": None if recall is None else round(recall, 4),
        "searches_per_question": round(fmean(e.n_searches for e in episodes), 4),
        **({"em_by_benchmark": by_source} if len(by_source) > 1 else {}),
    }
