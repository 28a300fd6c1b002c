"""The search environment: plays many episodes in lockstep, one retriever call a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stppo.checks import one_of, whole_number
from stppo.retrieval.documents import Document, Retriever
from stppo.world.episodes import Episode, Turn
from stppo.world.protocol import Protocol, Question
from stppo.world.rewards import MEASURES, judge
from stppo.world.turn_rewards import TurnRewards


class NothingFound:
    """A retriever without documents."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[Document, float]]]:
        """No document for any query."""
        return [[] for _ in queries]


@dataclass(frozen=True)
class SearchEnvironment:
    """Answers agent turns.

    The first `turns_with_observation` turns get an observation: retrieved text after a search, the corrective
    message after an invalid turn. The generation after them must answer: a search or an invalid turn there
    ends the episode with reward 0. An answer always ends it.

    reward: "em" or "f1".
    retrieve_first: spend the first of the `turn_budget` searches on the question itself, before the agent's
    first turn, and show the result in the prompt. With a budget of 1 an episode is a single turn, which must
    answer.
    turn_rewards: what turns are paid beside the answer, as `TurnRewards` or a mapping of its fields; None:
    nothing."""

    protocol: Protocol
    retriever: Retriever
    top_k: int
    reward: str = "em"
    retrieve_first: bool = False
    turn_rewards: TurnRewards | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        whole_number(self, "top_k")
        one_of(self, "reward", MEASURES)
        if not isinstance(self.retrieve_first, bool):
            raise ValueError(f"retrieve_first must be true or false, got {self.retrieve_first!r}")
        paid = TurnRewards.of(self.turn_rewards, self.turns_with_observation)
        object.__setattr__(self, "turn_rewards", paid)

    @property
    def turns_with_observation(self) -> int:
        """Agent turns that get an observation; the one after them must answer."""
        return self.protocol.turn_budget - self.retrieve_first

    def without_search(self) -> "SearchEnvironment":
        """The same dialogue, in which every search finds nothing."""
        return replace(self, retriever=NothingFound())

    def rewards(self, episode: Episode) -> list[float]:
        """What each turn of an episode that goes no further is paid; the answer's reward is in the last
        one's."""
        turns = len(episode.turns)
        paid = [0.0] * turns if self.turn_rewards is None else self.turn_rewards.paid(episode)
        return [*paid[:-1], paid[-1] + float(episode.reward)]

    def start(self, question: Question) -> Episode:
        prompt = self.protocol.prompt(question.text)
        if not self.retrieve_first:
            return Episode(question, prompt)
        ((*found,),) = self.retriever.search([question.text], self.top_k)
        documents = tuple(document for document, _ in found)
        return Episode(question, f"{prompt} {self.protocol.information(documents)}", documents)

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[str | None]:
        """Give each episode its next agent turn; returns the observations, None where the episode is done.

        Whatever the agent wrote has a defined reaction; ValueError only for misuse by the caller
        (unequal lengths, an episode that was already done).
        """
        if len(episodes) != len(texts):
            raise ValueError(f"{len(episodes)} episodes but {len(texts)} turns")
        if any(episode.done for episode in episodes):
            raise ValueError("an episode that is done takes no further turn")
        actions = [self.protocol.parse(text) for text in texts]
        last = [len(episode.turns) >= self.turns_with_observation for episode in episodes]
        queries = [
            action.content
            for action, final in zip(actions, last, strict=True)
            if action.kind == "search" and not final
        ]
        found = iter(self.retriever.search(queries, self.top_k) if queries else ())

        observations: list[str | None] = []
        for episode, text, action, final in zip(episodes, texts, actions, last, strict=True):
            observation, documents = None, ()
            if action.kind == "answer":
                episode.answer = action.content
                episode.reward = judge(episode.question, action.content, self.reward)
            elif not final and action.kind == "search":
                documents = tuple(document for document, _ in next(found))
                observation = self.protocol.information(documents)
            elif not final:
                observation = self.protocol.correction
            episode.done = observation is None
            episode.turns.append(Turn(text, action, observation, documents))
            observations.append(observation)
        return observations
