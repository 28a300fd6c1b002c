"""Records of every benchmark as questions: their schemas, then all real records, field by field."""

import json
import math
import os
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stppo.world.datasets import read_records
from stppo.world.protocol import Question
from stppo.world.records import BENCHMARKS, NoGoldAnswer, Unanswerable, context_of, question_from
from stppo.world.rewards import score
from tests.sample_data import DATA, real_data

HOTPOT = {
    "_id": "h1",
    "question": "Is Oslo larger than Bergen?",
    "answer": "yes",
    "supporting_facts": [["Oslo", 0], ["Bergen", 1], ["Oslo", 1]],
    "context": [
        ["Oslo", ["Oslo is a city.", "It is large."]],
        ["Rome", ["Rome."]],
        ["Bergen", ["A town.", "Rain."]],
    ],
}
MUSIQUE = {
    "id": "m1",
    "question": "q?",
    "answer": "NRK",
    "answer_aliases": ["Norwegian Broadcasting", "NRK"],
    "paragraphs": [
        {"idx": 0, "title": "A", "paragraph_text": "a", "is_supporting": False},
        {"idx": 1, "title": "B", "paragraph_text": "b", "is_supporting": True},
    ],
}
MEDQA = {
    "question": "Which one? ",
    "answer": "Plague",
    "options": {"B": "Plague", "A": "Flu"},
    "answer_idx": "B",
}
MEDQA_TEXT = "Which one?\n(A) Flu\n(B) Plague\nWhich option is correct?"
TRIVIA = {
    "question": "q?",
    "question_id": "tc_1",
    "question_source": "web",
    "answer": {
        "aliases": ["Sunset Blvd", "Sunset"],
        "normalized_aliases": ["sunset blvd"],
        "value": "Sunset",
    },
}
OSLO_AND_BERGEN = (("Oslo", "Oslo is a city. It is large."), ("Bergen", "A town. Rain."))


def question(source, id, text, answers, paragraphs=(), options=()):
    return Question(id, text, answers, paragraphs, max(1, len(paragraphs)), source, options)


@pytest.mark.parametrize(
    ("benchmark", "record", "expected"),
    [
        ("nq", {"question": "q", "answer": ["a", "b", "a"]}, ("nq-7", "q", ("a", "b"))),
        ("nq", {"id": "t_0", "question": "q", "golden_answers": ["a"], "metadata": {}}, ("t_0", "q", ("a",))),
        ("triviaqa", {"id": "t", "question": "q?", "golden_answers": ["1999-01-01"]}, ("t", "q?", ("1999-01-01",))),
        ("triviaqa", TRIVIA, ("tc_1", "q?", ("Sunset", "Sunset Blvd"))),
        ("popqa", {"id": 0, "question": "q?", "possible_answers": '["a", "b"]'}, ("0", "q?", ("a", "b"))),
        ("popqa", {"id": 1, "question": "q?", "possible_answers": "[a] b"}, ("1", "q?", ("[a] b",))),
        ("popqa", {"id": 1, "question": "q?", "possible_answers": ["a"]}, ("1", "q?", ("a",))),
        ("bamboogle", {"Question": "q?", "Answer": "George VI\n"}, ("bamboogle-7", "q?", ("George VI",))),
        ("bamboogle", {"Question": "q?", "Answer": "[1]"}, ("bamboogle-7", "q?", ("[1]",))),
        ("medqa", MEDQA, ("medqa-7", MEDQA_TEXT, ("Plague", "B"), (), ("Flu", "Plague"))),
        ("musique", MUSIQUE, ("m1", "q?", ("NRK", "Norwegian Broadcasting"), (("B", "b"),))),
    ],
)  # fmt: skip
def test_each_schema_becomes_a_question(benchmark, record, expected):
    assert question_from(record, benchmark, 7) == question(benchmark, *expected)


def columns(pairs, *names):
    return {name: [pair[i] for pair in pairs] for i, name in enumerate(names)}


@pytest.mark.parametrize("benchmark", ["hotpotqa", "2wikimultihopqa"])
@pytest.mark.parametrize("sentences", ["sentences", "content"])
def test_gold_paragraphs_are_those_of_the_supporting_facts_in_every_layout(benchmark, sentences):
    columnar = {
        "context": columns(HOTPOT["context"], "title", sentences),
        "supporting_facts": columns(HOTPOT["supporting_facts"], "title", "sent_id"),
    }
    rows = {
        "context": [{"title": t, sentences: s} for t, s in HOTPOT["context"]],
        "supporting_facts": [{"title": t, "sent_id": i} for t, i in HOTPOT["supporting_facts"]],
    }
    in_strings = {name: json.dumps(value) for name, value in columnar.items()}
    flashrag = {"id": "h1", "question": HOTPOT["question"], "golden_answers": ["yes"], "metadata": columnar}
    wanted = question(benchmark, "h1", HOTPOT["question"], ("yes",), OSLO_AND_BERGEN)
    for record in (HOTPOT, HOTPOT | columnar, HOTPOT | rows, HOTPOT | in_strings, flashrag):
        assert question_from(record, benchmark, 1) == wanted


def test_flashrag_gives_the_gold_paragraphs_of_musique_and_the_source_of_the_mix():
    support = {"title": "B", "paragraph_text": "b"}
    steps = [{"support_paragraph": support}, {"support_paragraph": None}, {"support_paragraph": support}]
    record = {
        "id": "m1",
        "question": "q?",
        "golden_answers": ["NRK"],
        "metadata": {"question_decomposition": steps},
    }
    assert question_from(record, "musique", 1) == question("musique", "m1", "q?", ("NRK",), (("B", "b"),))
    # In the mix's Parquet every record has all the fields of both sets, empty ones as None.
    metadata = {"context": None, "supporting_facts": None, "question_decomposition": None}
    record = {"id": "train_0", "question": "q?", "golden_answers": ["a"], "data_source": "nq"}
    for mixed in (record, record | {"metadata": metadata}, record | {"metadata": None}):
        assert question_from(mixed, "nq_hotpotqa", 1) == question("nq", "train_0", "q?", ("a",))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('"What is ""ET""?"', 'What is "ET"?'),
        ('"""ET"" is what?"', '"ET" is what?'),
        ('"To be or not to be"', '"To be or not to be"'),
        ('"ET" and "AI"', '"ET" and "AI"'),
        ('"", say what?', '"", say what?'),
    ],
)
def test_csv_quoting_of_trivia_questions_is_undone(text, read):
    assert question_from({"question": text, "golden_answers": ["a"]}, "triviaqa", 1).text == read


@pytest.mark.parametrize(
    ("kind", "benchmark", "record", "problem"),
    [
        (NoGoldAnswer, "nq", {"question": "q?", "answer": []}, "question nq-3: no answer"),
        (NoGoldAnswer, "nq", {"question": "q?", "answer": [" ", None]}, "question nq-3: no answer"),
        (NoGoldAnswer, "triviaqa", TRIVIA | {"answer": {"value": "<unk>", "aliases": []}}, "question tc_1: no answer"),
        (NoGoldAnswer, "triviaqa", TRIVIA | {"answer": None}, "question tc_1: no answer"),
        (NoGoldAnswer, "hotpotqa", HOTPOT | {"answer": None}, "question h1: no answer"),
        (NoGoldAnswer, "musique", MUSIQUE | {"answer": None}, "question m1: no answer"),
        (NoGoldAnswer, "medqa", MEDQA | {"answer_idx": None}, "question medqa-3: no answer"),
        (Unanswerable, "musique", MUSIQUE | {"answerable": False}, "question m1: marked as unanswerable"),
        (Unanswerable, "musique", {"id": "m1", "question": "q?", "golden_answers": ["x"], "metadata": {"answerable": False}}, "question m1: marked"),
        (ValueError, "nq", {"question": " ", "answer": ["a"]}, "question nq-3: text is empty"),
        (ValueError, "nq", {"question": 3, "answer": ["a"]}, "question nq-3: not a nq record .TypeError: its question is a int, not a text"),
        (ValueError, "hotpotqa", HOTPOT | {"context": [["Oslo", "One city."]]}, "question h1: not a hotpotqa record .TypeError: a paragraph needs"),
        (ValueError, "hotpotqa", HOTPOT | {"context": [[7, ["One city."]]]}, "question h1: not a hotpotqa record .TypeError: a paragraph needs"),
        (ValueError, "musique", MUSIQUE | {"paragraphs": [MUSIQUE["paragraphs"][1] | {"paragraph_text": 5}]}, "question m1: not a musique record .TypeError: a paragraph needs"),
        (ValueError, "nq", {"question": "q?", "golden_answers": ["a"], "metadata": "z"}, "question nq-3: not a nq record .TypeError: metadata is a str"),
        (ValueError, "nq", {"question": "q?"}, "not a nq record: it has the fields question; wanted {question, golden_answers} or {question, answer}"),
        (ValueError, "hotpotqa", {"question": "q?", "answer": ["a"]}, "not a hotpotqa record: it has the fields question, answer; wanted"),
        (ValueError, "nq_hotpotqa", {"question": "q?", "golden_answers": ["a"]}, "not a nq_hotpotqa record: .*data_source"),
        (ValueError, "medqa", MEDQA | {"options": {"B": "Plague", "C": "Flu"}}, "question medqa-3: not a medqa record .ValueError: options must be A, B, C, ..., got B, C"),
        (ValueError, "medqa", MEDQA | {"answer_idx": "E"}, "question medqa-3: not a medqa record .ValueError: its options A, B hold no right answer, answer_idx is .E."),
    ],
)  # fmt: skip
def test_what_a_record_lacks_is_said(kind, benchmark, record, problem):
    with pytest.raises(ValueError, match=f"^{problem}") as error:
        question_from(record, benchmark, 3)
    assert type(error.value) is kind and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "record", [HOTPOT | {"context": [[7, ["x"]]]}, MUSIQUE | {"paragraphs": [MUSIQUE["paragraphs"][0] | {"title": 7}]}]
)  # fmt: skip
def test_no_paragraph_becomes_a_passage_unless_it_is_text(record):
    with pytest.raises(TypeError, match="a title that is text"):
        context_of(record)


# ---- all real records ----


def real(benchmark):
    path = DATA / benchmark / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return records, read_records(benchmark, path)


GOLD = {
    "nq": lambda r: r["answer"],
    "triviaqa": lambda r: r["golden_answers"],
    "popqa": lambda r: json.loads(r["possible_answers"]),
    "hotpotqa": lambda r: [r["answer"]],
    "2wikimultihopqa": lambda r: [r["answer"]],
    "musique": lambda r: [r["answer"], *r["answer_aliases"]],
    "bamboogle": lambda r: [r["Answer"]],
    "medqa": lambda r: [r["answer"], r["answer_idx"]],
}


@real_data
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_real_record_is_a_question_and_its_answers_alone_are_right(benchmark):
    records, questions = real(benchmark)
    assert len(questions) == len(records) == (125 if benchmark == "bamboogle" else 200)
    assert len({q.id for q in questions}) == len(questions)
    assert {q.source for q in questions} == {benchmark}
    for record, q in zip(records, questions, strict=True):
        own = str(record.get("_id", record.get("id", q.id)))
        assert q.id == own and q.hops == max(1, len(q.gold_paragraphs))
        gold = [answer.strip() for answer in GOLD[benchmark](record)]
        assert set(q.answers) == set(gold) and q.answers[0] == gold[0]
        assert all(score(q, answer) == score(q, answer, "f1") == 1 for answer in q.answers)
        assert score(q, None) == score(q, "") == score(q, "no such answer") == 0


@real_data
@pytest.mark.parametrize("benchmark", [name for name in BENCHMARKS if name != "medqa"])
def test_every_real_question_keeps_its_words(benchmark):
    changed = 0
    for record, q in zip(*real(benchmark), strict=True):
        text = record.get("question", record.get("Question")).strip()
        assert sorted(q.text.replace('"', "")) == sorted(text.replace('"', ""))
        changed += q.text != text
    assert changed == (10 if benchmark == "triviaqa" else 0)


@real_data
@pytest.mark.parametrize(
    ("benchmark", "yes_or_no", "paragraphs"),
    [("hotpotqa", 20, {2: 200}), ("2wikimultihopqa", 48, None), ("musique", 0, None)],
)
def test_every_real_gold_paragraph_is_whole(benchmark, yes_or_no, paragraphs):
    records, questions = real(benchmark)
    for record, q in zip(records, questions, strict=True):
        if benchmark == "musique":
            wanted = {p["title"]: p["paragraph_text"] for p in record["paragraphs"] if p["is_supporting"]}
            assert len(q.gold_paragraphs) == len(record["question_decomposition"])
        else:
            gold = {title for title, _ in record["supporting_facts"]}
            wanted = {title: " ".join(s) for title, s in record["context"] if title in gold}
            assert {title for title, _ in q.gold_paragraphs} == gold
        assert all(text == wanted[title] or benchmark == "musique" for title, text in q.gold_paragraphs)
    assert sum(q.answers[0].lower() in ("yes", "no") for q in questions) == yes_or_no
    if paragraphs:
        assert Counter(q.hops for q in questions) == paragraphs


@real_data
def test_every_real_medqa_question_shows_its_options_and_accepts_one():
    records, questions = real("medqa")
    assert Counter(q.answers[1] for q in questions) == {"C": 58, "B": 56, "A": 47, "D": 39}
    for record, q in zip(records, questions, strict=True):
        assert q.text.startswith(record["question"].strip()) and q.text.endswith("?")
        assert q.options == tuple(record["options"][letter] for letter in "ABCD")
        for letter, text in record["options"].items():
            correct = float(letter == record["answer_idx"])
            wrong = "ABCD"["ABCD".index(letter) - 1]
            for reply in (letter, letter.lower(), f"({letter})", f"{letter}.", text, f"{letter}. {text}"):
                assert score(q, reply) == correct, reply
            assert score(q, f"{wrong}. {text}") == score(q, f"({wrong}) {text}") == 0
            assert score(q, f"I think {letter}") == score(q, f"{letter} or {wrong}") == 0


@real_data
def test_trivia_in_its_native_schema_is_read(tmp_path):
    _, _, rest = (DATA / "README.md").read_text().partition("```json\n")
    path = tmp_path / "triviaqa_sample.json"
    path.write_text(rest.partition("```")[0])  # one indented object whose field Data is a list
    (q,) = read_records("triviaqa", path)
    record = json.loads(path.read_text())["Data"][0]
    assert (q.id, q.text, q.source) == ("tc_33", record["Question"], "triviaqa")
    assert q.answers == ("Sunset Boulevard", *(a for a in record["Answer"]["Aliases"] if a != q.answers[0]))
    assert len(q.answers) == 5


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ([1932.0], ("1932",)),  # as pandas writes an integer column with a blank
        ([1932.5], ("1932.5",)),
        (1932, ("1932",)),
        (["a", float("nan"), None, " "], ("a",)),
        ("['1932', 'MCMXXXII']", ("1932", "MCMXXXII")),
        ('["1932", 1933]', ("1932", "1933")),
        ("[REC]", ("[REC]",)),  # a film
    ],
)
def test_answers_of_another_type_are_read(given, accepted):
    record = {"id": "q7", "question": "in what year did the mill at Tarn close?", "golden_answers": given}
    question = question_from(record, "nq", 1)
    assert question.answers == accepted
    assert all(score(question, answer) == 1 for answer in accepted)


@pytest.mark.parametrize("given", [[True], True, [["a"]], [{"a": 1}], {"a": 1}, [b"a"]])
def test_answers_that_are_no_text_are_refused_by_record(given):
    with pytest.raises(
        ValueError, match="question q7: not a nq record .*an answer must be a text or a number"
    ):
        question_from({"id": "q7", "question": "q?", "golden_answers": given}, "nq", 1)


def test_aliases_in_a_text_are_no_letters():
    answer = {"value": "1932", "aliases": "['1932', 'MCMXXXII']"}
    record = {"question": "q?", "answer": answer, "question_source": "x"}
    assert question_from(record, "triviaqa", 1).answers == ("1932", "MCMXXXII")


def test_flags_in_a_text_are_read():
    with pytest.raises(Unanswerable):
        question_from(MUSIQUE | {"answerable": "False"}, "musique", 1)
    assert question_from(MUSIQUE | {"answerable": "true"}, "musique", 1).answers[0] == "NRK"
    written = [p | {"is_supporting": str(p["is_supporting"])} for p in MUSIQUE["paragraphs"]]
    assert question_from(MUSIQUE | {"paragraphs": written}, "musique", 1).gold_paragraphs == (("B", "b"),)
    with pytest.raises(ValueError, match="question m1: .*a flag must be true or false, got 'perhaps'"):
        question_from(MUSIQUE | {"answerable": "perhaps"}, "musique", 1)


# ---- any JSON in any field ------------------------------------------------------------------------
FUZZ = int(os.environ.get("STPPO_FUZZ", 0))  # so many of each kind, other ones at each run
FLASHRAG = {"id": "f1", "question": "q?", "golden_answers": ["a"], "metadata": {}}
RECORDS = [
    *(("nq", record) for record in (FLASHRAG, {"question": "q", "answer": ["a"]})),
    ("triviaqa", TRIVIA),
    ("popqa", {"id": 0, "question": "q?", "possible_answers": '["a", "b"]'}),
    ("hotpotqa", HOTPOT),
    ("musique", MUSIQUE),
    ("bamboogle", {"Question": "q?", "Answer": "George VI"}),
    ("medqa", MEDQA),
    ("nq_hotpotqa", FLASHRAG | {"data_source": "nq"}),
]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=8)
)
WRITTEN = st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=3).map(json.dumps)
JSON = st.recursive(
    SCALARS | WRITTEN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value, path=()):
    """The path of each part of a record."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def with_value(record, path, value):
    if not path:
        return value
    copied = record.copy()
    copied[path[0]] = with_value(record[path[0]], path[1:], value)
    return copied


def leaves(value):
    """Each text or number of a record as an answer may write it, also of lists that a text writes down."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    elif isinstance(value, str):
        yield value.strip()
        with suppress(ValueError):
            yield from leaves(inner) if isinstance(inner := json.loads(value), list) else ()
    elif not isinstance(value, bool) and value is not None:
        yield (
            str(int(value))
            if value == value and abs(value) < math.inf and value == int(value)
            else str(value)
        )


@pytest.mark.parametrize(
    ("benchmark", "record"), RECORDS, ids=lambda value: value if type(value) is str else ""
)
@settings(max_examples=FUZZ or 150, derandomize=not FUZZ, deadline=None, database=None)
@given(data=st.data())
def test_any_json_gives_a_question_or_an_error_that_names_the_record(benchmark, record, data):
    path = data.draw(st.sampled_from([path for path in places(record) if path]))
    changed = with_value(record, path, data.draw(JSON))
    try:
        found = question_from(changed, benchmark, 7)
    except ValueError as error:
        text = str(error)
        assert text.startswith("question ") or text.startswith(f"not a {benchmark} record: it has the fields")
        return
    known = {*leaves(changed), *(changed.get("options") or ())} if isinstance(changed, dict) else set()
    assert found.answers and all(answer in known for answer in found.answers)
    assert all(type(text) is str for text in (found.id, found.text, *found.answers, *found.options))
