"""One record of a benchmark, in its own schema or FlashRAG's, as a `Question`."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from stppo.files import parse_json
from stppo.world.protocol import Question

Record = Mapping[str, Any]
Paragraphs = tuple[tuple[str, str], ...]


class NoGoldAnswer(ValueError):
    """A record without gold answer, as the test splits of several benchmarks have them."""


class Unanswerable(ValueError):
    """A record whose question is marked as one without an answer (MuSiQue-Full)."""


def question_from(record: Record, benchmark: str, number: int) -> Question:
    """The question of a record, its schema recognised from its fields.

    number: of the record, from 1; it names records without an id. `benchmark` is one of `SCHEMAS`;
    "nq_hotpotqa" records say themselves which they come from (`data_source`). Unanswerable, NoGoldAnswer or
    another ValueError says what is wrong, with the record's id where it has one."""
    schema = next((s for s in SCHEMAS[benchmark] if all(field in record for field in s.fields)), None)
    if schema is None:
        wanted = " or ".join("{" + ", ".join(s.fields) + "}" for s in SCHEMAS[benchmark])
        raise ValueError(f"not a {benchmark} record: it has the fields {', '.join(record)}; wanted {wanted}")
    names = (record.get(field) for field in ("_id", "id", "question_id", "QuestionId"))
    name = next((str(value) for value in names if value is not None), f"{benchmark}-{number}")
    try:
        if not (record.get("answerable", True) and _metadata(record).get("answerable") is not False):
            raise Unanswerable(f"question {name}: marked as unanswerable")
        text, answers, paragraphs, options = schema.read(record)
        if not isinstance(text, str | None):
            raise TypeError(f"its question is a {type(text).__name__}, not a text")
        text = (text or "").strip()
    except Unanswerable:
        raise
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(
            f"question {name}: not a {benchmark} record ({type(error).__name__}: {error})"
        ) from error
    if not answers:
        raise NoGoldAnswer(f"question {name}: no answer")
    accepted = tuple(answers) if options else tuple(dict.fromkeys(answers))
    source = str(record.get("data_source") or benchmark)
    return Question(name, text, accepted, paragraphs, max(1, len(paragraphs)), source, options)


class _Parts(NamedTuple):
    text: str
    answers: Sequence[str]
    paragraphs: Paragraphs = ()
    options: tuple[str, ...] = ()


def _strings(value: Any) -> list[str]:
    """A value or a list of values as strings without white space around them; blank ones and None are left
    out."""
    values = value if isinstance(value, list | tuple) else [value]
    # `datasets` reads a JSON column that holds nothing but dates as time stamps.
    dates = (
        (v.isoformat() if v.time() != datetime.min.time() else v.date().isoformat())
        if isinstance(v, datetime)
        else v
        for v in values
    )
    return [str(v).strip() for v in dates if v is not None and str(v).strip()]


def pairs(value: Any, *keys: str) -> list[tuple]:
    """Pairs, a list of dicts, (as in Arrow) a dict of lists, or JSON of these, as (title, x) pairs; x is
    under the first key there is."""
    if isinstance(value, str):
        value = parse_json(value)
    if isinstance(value, Mapping):
        return list(zip(*_titled(value, keys), strict=True))
    return [_titled(item, keys) if isinstance(item, Mapping) else tuple(item) for item in value]


def _titled(value: Record, keys: Sequence[str]) -> tuple:
    return value["title"], next(value[key] for key in keys if value.get(key) is not None)


def _supporting(context: Any, facts: Any) -> Paragraphs:
    """The paragraphs of `context` whose title a supporting fact names."""
    if context is None or facts is None:
        return ()
    gold = {title for title, _ in pairs(facts, "sent_id")}
    return tuple((title, text) for title, text in joined(context) if title in gold)


def joined(context: Any) -> Paragraphs:
    """(title, text) of paragraphs that are kept as lists of sentences."""
    return tuple(
        paragraph(title, " ".join(sentences) if isinstance(sentences, list | tuple) else None)
        for title, sentences in pairs(context, "sentences", "content")
    )


def paragraph(title: Any, text: Any) -> tuple[str, str]:
    if not isinstance(title, str) or not isinstance(text, str):
        raise TypeError("a paragraph needs a title that is text, and text or a list of sentences")
    return title, text


def _metadata(record: Record) -> Record:
    found = record.get("metadata") or {}
    if not isinstance(found, Mapping):
        raise TypeError(f"metadata is a {type(found).__name__}")
    return found


def flashrag_or_own(record: Record, field: str, as_json: bool = False) -> Any:
    """A field of the record or, in FlashRAG's schema, of its metadata; as_json: parsed where it is a string.
    KeyError where neither has it."""
    value = record.get(field)
    value = _metadata(record)[field] if value is None else value
    return parse_json(value) if as_json and isinstance(value, str) else value


def context_of(record: Record) -> Paragraphs:
    """All paragraphs that come with a record, gold and others; () where it has none (FlashRAG's MuSiQue has
    the gold ones alone). Errors as the readers raise them for a record that is not what it seems."""
    if own := record.get("paragraphs"):
        return tuple(paragraph(p["title"], p["paragraph_text"]) for p in own)
    if (context := record.get("context") or _metadata(record).get("context")) is not None:
        return joined(context)
    return _supports(_metadata(record))


def _supports(metadata: Record) -> Paragraphs:
    """The supporting paragraphs of MuSiQue's steps, as FlashRAG keeps them."""
    found = (step.get("support_paragraph") for step in metadata.get("question_decomposition") or ())
    return tuple(dict.fromkeys(paragraph(p["title"], p["paragraph_text"]) for p in found if p))


def _flashrag(record: Record) -> _Parts:
    metadata = _metadata(record)
    paragraphs = _supporting(metadata.get("context"), metadata.get("supporting_facts"))
    paragraphs += _supports(metadata)
    return _Parts(_unquoted(record["question"]), _strings(record["golden_answers"]), paragraphs)


def _unquoted(text: str) -> str:
    """DPR's CSV quoting (`"... ""x"" ..."`), which TriviaQA's questions kept on their way to FlashRAG,
    undone."""
    inside = text[1:-1].replace('""', "")
    quoted = text.startswith('"') and text.endswith('"') and '""' in text[1:-1] and '"' not in inside
    return text[1:-1].replace('""', '"') if quoted else text


def _nq(record: Record) -> _Parts:
    return _Parts(record["question"], _strings(record["answer"]))


def _triviaqa(record: Record) -> _Parts:
    """On the hub with lower-case field names, in its own release with camel case."""
    answer = {
        key.lower(): value for key, value in (record.get("answer") or record.get("Answer") or {}).items()
    }
    answers = _strings([answer.get("value"), *(answer.get("aliases") or ())])
    text = record["question"] if "question" in record else record["Question"]
    return _Parts(text, [a for a in answers if a != "<unk>"])  # the hub's test split


def _popqa(record: Record) -> _Parts:
    answers = record["possible_answers"]
    if isinstance(answers, str):
        with suppress(json.JSONDecodeError):  # a JSON list inside a string
            answers = parse_json(answers)
    return _Parts(record["question"], _strings(answers))


def _hotpotqa(record: Record) -> _Parts:
    paragraphs = _supporting(record["context"], record["supporting_facts"])
    return _Parts(record["question"], _strings(record["answer"]), paragraphs)


def _musique(record: Record) -> _Parts:
    gold = (p for p in record["paragraphs"] if p["is_supporting"])
    paragraphs = tuple(paragraph(p["title"], p["paragraph_text"]) for p in gold)
    answers = _strings(record["answer"])  # an alias alone is no answer
    return _Parts(record["question"], answers and answers + _strings(record["answer_aliases"]), paragraphs)


def _bamboogle(record: Record) -> _Parts:
    return _Parts(record["Question"], _strings(record["Answer"]))


def _medqa(record: Record) -> _Parts:
    """Scored by letter or text; the options follow the question, which the prompt ends with a question of its
    own."""
    options = {letter: text.strip() for letter, text in sorted(record["options"].items()) if text}
    if "".join(options) != "ABCDE"[: len(options)] or len(options) < 2:
        raise ValueError(f"options must be A, B, C, ..., got {', '.join(options) or 'none'}")
    shown = "\n".join(f"({letter}) {text}" for letter, text in options.items())
    letter = record["answer_idx"]
    if letter and letter not in options:
        raise ValueError(
            f"its options {', '.join(options)} hold no right answer, answer_idx is {letter!r}; correct one "
            "of the two"
        )
    answers = (options[letter], letter) if letter else ()
    return _Parts(
        f"{record['question'].strip()}\n{shown}\nWhich option is correct?",
        answers,
        options=tuple(options.values()),
    )


@dataclass(frozen=True)
class Schema:
    """How records with these fields are read."""

    fields: tuple[str, ...]
    read: Callable[[Record], _Parts]


_FLASHRAG = Schema(("question", "golden_answers"), _flashrag)
_HOTPOTQA = Schema(("question", "answer", "context", "supporting_facts"), _hotpotqa)
SCHEMAS: dict[str, tuple[Schema, ...]] = {
    "nq": (_FLASHRAG, Schema(("question", "answer"), _nq)),
    "triviaqa": (
        _FLASHRAG,
        Schema(("question", "answer", "question_source"), _triviaqa),
        Schema(("Question", "Answer", "QuestionSource"), _triviaqa),
    ),
    "popqa": (_FLASHRAG, Schema(("question", "possible_answers"), _popqa)),
    "hotpotqa": (_FLASHRAG, _HOTPOTQA),
    "2wikimultihopqa": (_FLASHRAG, _HOTPOTQA),
    "musique": (_FLASHRAG, Schema(("question", "answer", "answer_aliases", "paragraphs"), _musique)),
    "bamboogle": (_FLASHRAG, Schema(("Question", "Answer"), _bamboogle)),
    "medqa": (Schema(("question", "options", "answer_idx"), _medqa),),
    "nq_hotpotqa": (Schema((*_FLASHRAG.fields, "data_source"), _flashrag),),
}
BENCHMARKS = tuple(name for name in SCHEMAS if name != "nq_hotpotqa")
