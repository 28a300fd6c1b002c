"""What a world pays at the end of a turn, beside the reward of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stppo.checks import in_range, one_of
from stppo.world.episodes import Episode
from stppo.world.rewards import normalise_answer

FORMS = ("bonus", "potential")


@dataclass(frozen=True)
class TurnRewards:
    """Rewards of turns; all that an episode can earn stays below 1, the reward of a right answer.

    found: earned by a turn whose search retrieves a gold title that the episode has not been shown before.
    format: earned by a turn that can be read and does what is left to do: an answer, or a search that is
    carried out.
    form: "bonus" pays what is earned. "potential" pays gamma Phi(s') - Phi(s), with Phi(s) all that was
    earned up to the state s and Phi = 0 once the episode has ended: the last turn pays back. No policy gains
    or loses by it (Ng, Harada and Russell, ICML 1999).
    gamma: discount of a turn in the potential form; the credit's.

    ValueError names a field that is out of range."""

    found: float = 0.0
    format: float = 0.0
    form: str = "bonus"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        in_range(self, "found", 0.0, 1.0)
        in_range(self, "format", 0.0, 1.0)
        one_of(self, "form", FORMS)
        in_range(self, "gamma", 0.0, 1.0)

    @classmethod
    def of(cls, given: Any, searches: int) -> TurnRewards | None:
        """What a config's mapping says (None: nothing is paid), in a world whose episodes have `searches`
        turns that may search and one more, which must answer.

        ValueError names an unknown key, a reward for turns that do not exist, and a sum that is too large."""
        if given is None:
            return None
        if not isinstance(given, cls):
            known = [field.name for field in fields(cls)]
            if not isinstance(given, Mapping) or set(given) - set(known):
                raise ValueError(f"turn_rewards must be null or a mapping of {', '.join(known)}, got {given}")
            given = cls(**given)
        if given.found and not searches:
            raise ValueError(
                f"turn_rewards.found={given.found}: there is no turn that searches, as turn_budget leaves "
                "none to the agent; leave found out"
            )
        most = given.found * searches + given.format * (searches + 1)
        if most >= 1:
            raise ValueError(
                f"turn_rewards: found={given.found} in {searches} turns and format={given.format} in "
                f"{searches + 1} may sum to {most:g}, which must stay below 1, the reward of a right answer: "
                "lower them"
            )
        return given

    def earned(self, episode: Episode) -> list[float]:
        """What each turn so far has earned, whatever the form."""
        gold = {_key(title) for title, _ in episode.question.gold_paragraphs}
        shown = {_key(document.title) for document in episode.given}
        amounts = []
        for turn in episode.turns:
            new = {_key(document.title) for document in turn.documents} - shown
            shown |= new
            searched = turn.action.kind == "search" and turn.observation is not None
            amounts.append(
                self.found * bool(new & gold) + self.format * (searched or turn.action.kind == "answer")
            )
        return amounts

    def paid(self, episode: Episode) -> list[float]:
        """What each turn of an episode that goes no further is paid."""
        amounts, potential = self.earned(episode), 0.0
        if self.form == "bonus":
            return amounts
        paid = []
        for turn, amount in enumerate(amounts, start=1):
            after = potential + amount if turn < len(amounts) else 0.0
            paid.append(self.gamma * after - potential)
            potential = after
        return paid


def _key(title: str) -> str:
    return normalise_answer(title) or title
