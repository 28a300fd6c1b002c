"""Which passages of a corpus answer a question that comes without any."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from stppo.retrieval.documents import Document
from stppo.world.protocol import Question
from stppo.world.rewards import normalise_answer


class PassagesByTitle:
    """The passages of a corpus by their titles, without a bracket at the end ("Fog (film)" is found as
    "Fog")."""

    def __init__(self, documents: Iterable[Document]):
        self._of: dict[str, list[Document]] = defaultdict(list)
        for document in documents:
            if title := normalise_answer(document.title.partition(" (")[0]):
                self._of[title].append(document)
        self._longest = max((len(title.split()) for title in self._of), default=0)

    def placed(self, question: Question) -> Question | None:
        """The question with its gold paragraphs: passages whose title stands in it, word by word, and whose
        text holds an accepted answer, both up to SQuAD's normalisation; None where there is none."""
        words = normalise_answer(question.text).split()
        named = [
            " ".join(words[start : start + length])
            for start in range(len(words))
            for length in range(1, min(self._longest, len(words) - start) + 1)
        ]
        answers = [f" {answer} " for answer in map(normalise_answer, question.answers) if answer]
        found = [
            (document.title, document.text)
            for title in dict.fromkeys(named)
            for document in self._of.get(title, ())
            if any(answer in f" {normalise_answer(document.text)} " for answer in answers)
        ]
        return replace(question, gold_paragraphs=tuple(found)) if found else None
