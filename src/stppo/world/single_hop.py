"""Questions of one hop out of multi-hop records: MuSiQue's decompositions and 2WikiMultiHopQA's evidence
triples.

One search finds the passage and one span of it is the answer: what a language model of a hundred million
parameters can learn first. The rule, in the order in which it is applied; `Asked.dropped` counts what it
leaves out:

1. MuSiQue: every step of `question_decomposition` is a question, its answer the step's (of the last step also
   the record's aliases), its passage the step's supporting paragraph. `#1` in it is replaced by the answer of
   step 1. A step in the form `subject >> relation` is put into words by `TEMPLATES`.
   2Wiki: every triple (subject, relation, object) of `evidences` is a question by `TEMPLATES`, its answer the
   object, its passage the paragraph of the context whose title is the subject, or the only one whose title is
   the subject with a bracket behind it ("Fog (film)"), which then stands in the question.
2. Left out: a step that refers to no earlier one, a relation without a template, a passage that the record
   does not hold, an answer of which normalisation leaves nothing, and one whose words do not stand in its
   passage.
3. Over all records of one reading: a question that was asked before (up to SQuAD's normalisation) is left
   out, and its answers count for the first too, since a film may have two directors.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stppo.world.protocol import Question
from stppo.world.records import Record, flashrag_or_own, joined, paragraph, question_from
from stppo.world.rewards import normalise_answer

# Derived sets and the benchmarks whose records they are made from.
SINGLE_HOP = {"musique_single_hop": "musique", "2wiki_single_hop": "2wikimultihopqa"}

# 2Wiki's relations, and those of MuSiQue's steps; a relation that has many right answers ("shares border
# with") has none.
TEMPLATES = {
    "applies to jurisdiction": "To which jurisdiction does {} apply?",
    "author": "Who wrote {}?",
    "capital": "What is the capital of {}?",
    "capital of": "Of what is {} the capital?",
    "cause of death": "What did {} die of?",
    "child": "Who is a child of {}?",
    "composer": "Who composed the music of {}?",
    "conflict": "In which conflict did {} take part?",
    "continent": "On which continent is {}?",
    "country": "In which country is {}?",
    "country of citizenship": "What is the nationality of {}?",
    "country of origin": "From which country does {} come?",
    "creator": "Who created {}?",
    "date of birth": "When was {} born?",
    "date of death": "When did {} die?",
    "director": "Who directed {}?",
    "doctoral advisor": "Who was the doctoral advisor of {}?",
    "editor": "Who edited {}?",
    "educated at": "Where was {} educated?",
    "employer": "Who employed {}?",
    "father": "Who is the father of {}?",
    "founded by": "Who founded {}?",
    "has part": "What is a part of {}?",
    "inception": "When was {} founded?",
    "instance of": "What is {}?",
    "licensed to broadcast to": "To which place is {} licensed to broadcast?",
    "located in or next to body of water": "On which body of water is {}?",
    "located in the administrative territorial entity": "In which administrative region is {} located?",
    "location": "Where is {}?",
    "location of formation": "Where was {} formed?",
    "manufacturer": "Who manufactured {}?",
    "member of": "Of what is {} a member?",
    "member of political party": "To which political party does {} belong?",
    "member of sports team": "For which sports team did {} play?",
    "mother": "Who is the mother of {}?",
    "mouth of the watercourse": "Where does {} flow into?",
    "named after": "After whom or what is {} named?",
    "native language": "What is the native language of {}?",
    "occupation": "What is the occupation of {}?",
    "owned by": "Who owns {}?",
    "part of": "What is {} part of?",
    "performer": "Who performed {}?",
    "place of birth": "Where was {} born?",
    "place of burial": "Where was {} buried?",
    "place of death": "Where did {} die?",
    "position held": "Which position did {} hold?",
    "producer": "Who produced {}?",
    "publication date": "When was {} released?",
    "publisher": "Who published {}?",
    "religion": "What is the religion of {}?",
    "sibling": "Who is a sibling of {}?",
    "sport": "Which sport does {} belong to?",
    "spouse": "Who is the spouse of {}?",
}

UNRESOLVED = "refers to no earlier step"
NO_TEMPLATE = "relation without a template"
NO_PASSAGE = "passage not in the record"
NO_WORDS = "answer of which normalisation leaves nothing"
NOT_THERE = "answer not in its passage"
REPEATED = "asked before"

_ARROW = re.compile(r"\s*>>\s*")
_BRACKET = re.compile(r" \([^()]*\)$")
_EARLIER = re.compile(r"#(\d+)")


@dataclass
class Asked:
    """The questions of records, as they are read: one of each record (`whole`), or by the module's rule
    (`parts`).

    dropped: how many steps or triples were left out for what reason.
    """

    questions: list[Question] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    _places: dict[str, int] = field(default_factory=dict)

    def whole(self, record: Record, benchmark: str, number: int) -> None:
        """Errors as of `question_from`."""
        self.questions.append(question_from(record, benchmark, number))

    def parts(self, record: Record, name: str, number: int) -> None:
        """Errors as of `questions_of`."""
        for found in list(questions_of(record, name, number)):
            if isinstance(found, str):
                self.dropped[found] += 1
                continue
            place = self._places.setdefault(normalise_answer(found.text), len(self.questions))
            if place == len(self.questions):
                self.questions.append(found)
                continue
            self.dropped[REPEATED] += 1
            first = self.questions[place]
            answers = tuple(dict.fromkeys([*first.answers, *found.answers]))
            self.questions[place] = replace(first, answers=answers)


def questions_of(record: Record, name: str, number: int) -> Iterator[Question | str]:
    """For each step or triple of a record its question, or why it has none.

    name: one of `SINGLE_HOP`; it is the questions' source. Errors as `question_from` raises them for the
    records' own benchmark, and ValueError for a record without decomposition or evidences."""
    whole = question_from(record, SINGLE_HOP[name], number)
    parts = _steps if name == "musique_single_hop" else _triples
    try:
        found = list(parts(record))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"question {whole.id}: no {name} record ({type(error).__name__}: {error}); it needs "
            f"{'question_decomposition' if parts is _steps else 'evidences and context'}"
        ) from error
    for place, (text, answers, passage) in enumerate(found, start=1):
        if place == len(found) and parts is _steps and whole.answers[0] in answers:
            answers = whole.answers
        yield _question(f"{whole.id}-{place}", text, answers, passage, name)


def _question(
    id: str, text: str, answers: tuple[str, ...], passage: tuple[str, str] | None, source: str
) -> Question | str:
    """The question, or why it is none."""
    subject, *relation = _ARROW.split(text)
    if relation:
        template = TEMPLATES.get(relation[0].strip().lower()) if len(relation) == 1 else None
        if template is None:
            return NO_TEMPLATE
        text = template.format(subject.strip())
    if _EARLIER.search(text):
        return UNRESOLVED
    if passage is None:
        return NO_PASSAGE
    normalised = [word for answer in answers if (word := normalise_answer(answer))]
    if not normalised:
        return NO_WORDS
    there = f" {normalise_answer(' '.join(passage))} "
    if not any(f" {answer} " in there for answer in normalised):
        return NOT_THERE
    return Question(id, text.strip(), answers, (passage,), 1, source)


_Part = tuple[str, tuple[str, ...], tuple[str, str] | None]


def _steps(record: Record) -> Iterator[_Part]:
    """(text, answers, passage) of each step, the answers of earlier ones filled in."""
    paragraphs = {
        p["idx"]: paragraph(p["title"], p["paragraph_text"]) for p in record.get("paragraphs") or ()
    }
    earlier: dict[str, str] = {}
    for place, step in enumerate(flashrag_or_own(record, "question_decomposition"), start=1):
        text = _EARLIER.sub(lambda m, known=earlier: known.get(m[1], m[0]), step["question"])
        answer = earlier[str(place)] = str(step["answer"] or "").strip()
        support: Mapping[str, Any] | None = step.get("support_paragraph")  # FlashRAG's
        passage = paragraphs.get(step.get("paragraph_support_idx"))
        yield text, (answer,), (support["title"], support["paragraph_text"]) if support else passage


def _triples(record: Record) -> Iterator[_Part]:
    """(subject >> relation, answers, passage) of each triple: lists, or as in Arrow a dict of lists."""
    context = dict(joined(flashrag_or_own(record, "context")))
    triples = flashrag_or_own(record, "evidences", as_json=True)
    if isinstance(triples, Mapping):
        triples = zip(triples["fact"], triples["relation"], triples["entity"], strict=True)
    for subject, relation, entity in triples:
        titles = [t for t in context if t == subject] or [
            t for t in context if _BRACKET.sub("", t) == subject
        ]
        title = titles[0] if len(titles) == 1 else None
        passage = None if title is None else (title, context[title])
        yield f"{title or subject} >> {relation}", (str(entity or "").strip(),), passage
