"""One record of a benchmark, in its own schema or FlashRAG's, as a `Question`."""

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime
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
    schemas = SCHEMAS[benchmark]
    read = next((read for fields, read in schemas if all(field in record for field in fields)), None)
    if read is None:
        wanted = " or ".join("{" + ", ".join(fields) + "}" for fields, _ in schemas)
        raise ValueError(f"not a {benchmark} record: it has the fields {', '.join(record)}; wanted {wanted}")
    names = (record.get(field) for field in ("_id", "id", "question_id", "QuestionId"))
    name = next((str(value) for value in names if value is not None), f"{benchmark}-{number}")
    try:
        if not all(_flag(of.get("answerable"), True) for of in (record, _metadata(record))):
            raise Unanswerable(f"question {name}: marked as unanswerable")
        text, answers, paragraphs, options = read(record)
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
    """A value or a list of values as strings without white space around them; blank ones, None and NaN are
    left out.

    A whole float is an integer (pandas makes floats of a column of integers with a blank). TypeError for what
    is no text, number or date, such as true or a list in a list."""
    return [
        text for item in (value if isinstance(value, list | tuple) else [value]) if (text := _string(item))
    ]


def _listed(value: Any) -> list[str]:
    """`_strings` of a field that holds a list, also where a text writes it down."""
    return _strings(_list_in(value) if isinstance(value, str) else value)


def _string(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(
        value, datetime
    ):  # `datasets` reads a JSON column that holds nothing but dates as time stamps
        return value.isoformat() if value.time() != datetime.min.time() else value.date().isoformat()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float | date):
        raise TypeError(f"an answer must be a text or a number, got {value!r}")
    return str(value).strip()


def _list_in(text: str) -> Any:
    """The list of texts and numbers that a text writes down, in JSON or as Python does; else the text."""
    if not (text.strip().startswith("[") and text.strip().endswith("]")):
        return text
    for read in (parse_json, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(text.strip())
            if isinstance(found, list) and all(type(item) in (str, int, float) for item in found):
                return found
    return text


def _flag(value: Any, default: bool) -> bool:
    """A switch of a record; TypeError for what says neither yes nor no."""
    if value is None or value != value:
        return default
    known = {"true": True, "false": False, "1": True, "0": False}
    found = known.get(str(value).strip().lower()) if isinstance(value, str | bool | int) else None
    if found is None:
        raise TypeError(f"a flag must be true or false, got {value!r}")
    return found


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
    return _Parts(_unquoted(record["question"]), _listed(record["golden_answers"]), paragraphs)


def _unquoted(text: str) -> str:
    """DPR's CSV quoting (`"... ""x"" ..."`), which TriviaQA's questions kept on their way to FlashRAG,
    undone."""
    inside = text[1:-1].replace('""', "")
    quoted = text.startswith('"') and text.endswith('"') and '""' in text[1:-1] and '"' not in inside
    return text[1:-1].replace('""', '"') if quoted else text


def _nq(record: Record) -> _Parts:
    return _Parts(record["question"], _listed(record["answer"]))


def _triviaqa(record: Record) -> _Parts:
    """On the hub with lower-case field names, in its own release with camel case."""
    answer = {
        key.lower(): value for key, value in (record.get("answer") or record.get("Answer") or {}).items()
    }
    answers = [*_strings(answer.get("value")), *_listed(answer.get("aliases"))]
    text = record["question"] if "question" in record else record["Question"]
    return _Parts(text, [a for a in answers if a != "<unk>"])  # the hub's test split


def _popqa(record: Record) -> _Parts:
    return _Parts(record["question"], _listed(record["possible_answers"]))


def _hotpotqa(record: Record) -> _Parts:
    paragraphs = _supporting(record["context"], record["supporting_facts"])
    return _Parts(record["question"], _strings(record["answer"]), paragraphs)


def _musique(record: Record) -> _Parts:
    gold = (p for p in record["paragraphs"] if _flag(p["is_supporting"], False))
    paragraphs = tuple(paragraph(p["title"], p["paragraph_text"]) for p in gold)
    answers = _strings(record["answer"])  # an alias alone is no answer
    return _Parts(record["question"], answers and answers + _listed(record["answer_aliases"]), paragraphs)


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


# Of each benchmark the fields by which a schema is recognised, and what reads it.
_Schema = tuple[tuple[str, ...], Callable[[Record], _Parts]]
_FLASHRAG: _Schema = ("question", "golden_answers"), _flashrag
_HOTPOTQA: _Schema = ("question", "answer", "context", "supporting_facts"), _hotpotqa
SCHEMAS: dict[str, tuple[_Schema, ...]] = {
    "nq": (_FLASHRAG, (("question", "answer"), _nq)),
    "triviaqa": (
        _FLASHRAG,
        (("question", "answer", "question_source"), _triviaqa),
        (("Question", "Answer", "QuestionSource"), _triviaqa),
    ),
    "popqa": (_FLASHRAG, (("question", "possible_answers"), _popqa)),
    "hotpotqa": (_FLASHRAG, _HOTPOTQA),
    "2wikimultihopqa": (_FLASHRAG, _HOTPOTQA),
    "musique": (_FLASHRAG, (("question", "answer", "answer_aliases", "paragraphs"), _musique)),
    "bamboogle": (_FLASHRAG, (("Question", "Answer"), _bamboogle)),
    "medqa": ((("question", "options", "answer_idx"), _medqa),),
    "nq_hotpotqa": ((("question", "golden_answers", "data_source"), _flashrag),),
}
BENCHMARKS = tuple(name for name in SCHEMAS if name != "nq_hotpotqa")
