"""One question being played: its turns, what they retrieved, and how it ended."""

from dataclasses import dataclass, field

from stppo.retrieval.documents import Document
from stppo.world.protocol import Action, Question


@dataclass(frozen=True)
class Turn:
    """One agent turn and what came of it; `observation` is None on the last one."""

    text: str
    action: Action
    observation: str | None
    documents: tuple[Document, ...] = ()


@dataclass(eq=False)
class Episode:
    """One question being played. `answer` is None until (unless) the agent answers; `reward` is terminal.

    `given` holds the documents shown in the prompt, if any.
    """

    question: Question
    prompt: str
    given: tuple[Document, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    done: bool = False
    reward: float = 0.0
    answer: str | None = None

    @property
    def latest_documents(self) -> tuple[Document, ...]:
        """What the latest turn retrieved; before the first turn, what the prompt shows."""
        return self.turns[-1].documents if self.turns else self.given

    @property
    def n_searches(self) -> int:
        """Searches of the agent that were carried out."""
        return sum(turn.action.kind == "search" and turn.observation is not None for turn in self.turns)

    @property
    def n_invalid(self) -> int:
        return sum(turn.action.kind == "invalid" for turn in self.turns)
