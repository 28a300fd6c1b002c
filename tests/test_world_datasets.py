import json
import random

import pytest

from stppo.world.datasets import BENCHMARKS, BenchmarkWorld, read_records
from stppo.world.environment import SearchEnvironment
from stppo.world.protocol import Protocol, Question
from stppo.world.retrieval import BM25Retriever, Document
from stppo.world.scripted import (
    DemonstrationNoise,
    GoldTitleSearcher,
    paragraph_key,
    play_summary,
    recall_at_k,
)
from tests.sample_data import DATA, real_data

HOTPOT = {
    "_id": "h1",
    "question": "Is Oslo larger than Bergen?",
    "answer": "yes",
    "supporting_facts": [["Oslo", 0], ["Bergen", 1], ["Oslo", 1]],
    "context": [
        ["Oslo", ["Oslo is a city.", " It is large."]],
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
    "question": "Which one?",
    "answer": "Plague",
    "options": {"B": "Plague", "A": "Flu"},
    "answer_idx": "B",
}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("benchmark", "record", "expected"),
    [
        ("nq", {"question": "q?", "answer": ["a", "b", "a"]}, Question("nq-1", "q?", ("a", "b"))),
        ("triviaqa", {"id": "t", "question": "q?", "golden_answers": ["1999-01-01"]}, Question("t", "q?", ("1999-01-01",))),
        ("popqa", {"id": 0, "question": "q?", "possible_answers": '["a", "b"]'}, Question("0", "q?", ("a", "b"))),
        ("popqa", {"id": 1, "question": "q?", "possible_answers": "[a] b"}, Question("1", "q?", ("[a] b",))),
        ("bamboogle", {"Question": "q?", "Answer": "George VI\n"}, Question("bamboogle-1", "q?", ("George VI",))),
        ("medqa", MEDQA, Question("medqa-1", "Options: (A) Flu (B) Plague. Which one?", ("Plague",))),
        ("musique", MUSIQUE, Question("m1", "q?", ("NRK", "Norwegian Broadcasting"), (("B", "b"),), 1)),
    ],
)  # fmt: skip
def test_each_schema_becomes_a_question(tmp_path, benchmark, record, expected):
    assert read_records(benchmark, write(tmp_path / "records.jsonl", record)) == [expected]


@pytest.mark.parametrize("benchmark", ["hotpotqa", "2wikimultihopqa"])
def test_gold_paragraphs_are_those_of_the_supporting_facts(tmp_path, benchmark):
    (question,) = read_records(benchmark, write(tmp_path / "records.jsonl", HOTPOT))
    assert question.answers == ("yes",) and question.hops == 2
    assert [(title, " ".join(text.split())) for title, text in question.gold_paragraphs] == [
        ("Oslo", "Oslo is a city. It is large."),
        ("Bergen", "A town. Rain."),
    ]


def test_paragraphs_are_the_same_whatever_their_white_space():
    assert paragraph_key("Oslo ", "A city. In\nNorway.") == paragraph_key("Oslo", "A  city.In Norway.")
    assert paragraph_key("Oslo", "a") != paragraph_key("Oslo", "b") != paragraph_key("Bergen", "b")


@pytest.mark.parametrize(
    ("benchmark", "record", "problem"),
    [
        ("nq", {"question": "q?", "answer": []}, "record 2: question nq-2: no answer"),
        ("nq", {"question": "q?", "answer": [" "]}, "record 2: question nq-2: no answer"),
        ("nq", {"question": "q?"}, "record 2: question nq-2: no answer"),
        ("nq", {"question": " ", "answer": ["a"]}, "record 2: question nq-2: text is empty"),
        ("nq", {"question": 3, "answer": ["a"]}, "record 2: not a nq record"),
        ("triviaqa", {"question": "q?", "answer": ["a"]}, "record 1: not a triviaqa record, it has no field 'golden_ans"),
    ],
)  # fmt: skip
def test_a_bad_record_is_named(tmp_path, benchmark, record, problem):
    path = write(tmp_path / "records.jsonl", {"question": "q?", "answer": ["a"]}, record)
    with pytest.raises(ValueError) as error:
        read_records(benchmark, path)
    assert str(error.value).startswith(f"{path} {problem}") and "\n" not in str(error.value)


def test_a_malformed_line_is_named_with_its_number(tmp_path):
    path = write(tmp_path / "records.jsonl", {"question": "q?", "answer": ["a"]})
    path.write_text(path.read_text() + '\n{"question": "q?", "answer": ["a"]\n')
    with pytest.raises(ValueError, match="records.jsonl line 3: not valid JSON") as error:
        read_records("nq", path)
    assert "\n" not in str(error.value)


def test_a_file_without_records_and_an_unknown_benchmark_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no records"):
        read_records("nq", write(tmp_path / "records.jsonl"))
    with pytest.raises(ValueError, match="benchmark must be one of nq, .*medqa, got 'squad'"):
        read_records("squad", tmp_path / "records.jsonl")


@pytest.fixture
def files(tmp_path):
    corpus = [
        {"id": str(i), "contents": f'"{title}"\n{" ".join(sentences)}'}
        for i, (title, sentences) in enumerate(HOTPOT["context"])
    ]
    return {
        "benchmark": "hotpotqa",
        "records": write(tmp_path / "records.jsonl", HOTPOT),
        "corpus": write(tmp_path / "corpus.jsonl", *corpus),
    }


def test_benchmark_world_plays_its_records(files, tmp_path):
    world = BenchmarkWorld(**files, cache_dir=tmp_path / "cache")
    assert world.tokenizer is None
    assert play_summary(world, world.questions("test"), random.Random(0)) == {
        "n": 1, "em": 1.0, "f1": 1.0, "recall_at_3": 1.0, "searches_per_question": 2.0,
    }  # fmt: skip
    assert any((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"benchmark": "squad"}, "benchmark must be one of nq, .*, got 'squad'"),
        ({"records": None}, "records is not given: set world.records=FILE"),
        ({"corpus": None}, "corpus is not given: set world.corpus=FILE"),
        ({"top_k": 0}, "top_k must"),
        ({"turn_budget": 0}, "turn_budget must"),
        ({"max_information_words": 0}, "max_information_words must"),
        ({"reward": "bleu"}, "reward must be one of em, f1"),
    ],
)
def test_wrong_values_name_the_field(files, options, problem):
    with pytest.raises(ValueError, match=f"^{problem}"):
        BenchmarkWorld(**files | options)


@pytest.mark.parametrize("field", ["records", "corpus"])
def test_missing_files_are_named(files, field):
    with pytest.raises(FileNotFoundError, match=f"^{field}: no file nowhere.jsonl"):
        BenchmarkWorld(**files | {field: "nowhere.jsonl"})


def test_benchmark_has_one_split_and_no_demonstrations(files):
    world = BenchmarkWorld(**files)
    with pytest.raises(ValueError, match="only the split test, got 'train'"):
        world.questions("train")
    with pytest.raises(ValueError, match="noise"):
        world.scripted_agent(world.questions("test")[0], random.Random(0), DemonstrationNoise())


CITIES = [
    Document("0", "Oslo", "city of  kings"),
    Document("1", "Bergen", "rainy city"),
    Document("2", "Oslo", "other"),
]


def searched(question, top_k=1, turn_budget=4):
    environment = SearchEnvironment(Protocol(turn_budget=turn_budget), BM25Retriever(CITIES), top_k)
    episode = environment.start(question)
    agent = GoldTitleSearcher(question, turn_budget)
    while not episode.done:
        environment.step([episode], [agent.act(episode)])
    return episode


@pytest.mark.parametrize(
    ("answers", "gold", "top_k", "expected"),
    [
        (("absent", "The rainy!"), (("Bergen", "rainy city"),), 1, "The rainy!"),
        (("rain",), (("Bergen", "rainy city"),), 1, "unknown"),  # whole words only
        (("kings",), (("Bergen", "rainy city"),), 1, "unknown"),  # not retrieved
        (("yes",), (("Oslo", "city of kings"), ("Bergen", "rainy city")), 2, "yes"),
        (("no",), (("Oslo", "other"), ("Bergen", "sunny city")), 3, "unknown"),  # same title, other text
        (("yes",), (), 3, "unknown"),  # no gold paragraph proves nothing
    ],
)
def test_searcher_answers_only_what_retrieval_supports(answers, gold, top_k, expected):
    assert searched(Question("q", "Bergen?", answers, gold), top_k).answer == expected


def test_searcher_keeps_to_the_turn_budget_and_searches_each_title_once():
    gold = (("Oslo", "city of kings"), ("Oslo", "other"), ("Bergen", "rainy city"))
    question = Question("q", "q?", ("rainy",), gold)
    assert [turn.action.content for turn in searched(question).turns] == ["Oslo", "Bergen", "rainy"]
    assert [turn.action.content for turn in searched(question, turn_budget=1).turns] == ["Oslo", "unknown"]


def test_recall_is_the_mean_share_of_gold_paragraphs():
    environment = SearchEnvironment(Protocol(), BM25Retriever(CITIES), 1)
    half = Question("a", "Bergen", ("x",), (("Bergen", "rainy  city"), ("Oslo", "other")))
    none = Question("b", "zzz", ("x",), (("Oslo", "city of kings"),))
    unjudged = Question("c", "Oslo", ("x",))
    assert recall_at_k(environment, [half, none, unjudged], 3) == pytest.approx(0.25)
    assert recall_at_k(environment, [unjudged], 3) is None


@real_data
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_real_records_are_read(benchmark):
    questions = read_records(benchmark, DATA / benchmark / "records.jsonl")
    assert len(questions) == (125 if benchmark == "bamboogle" else 200)
    assert len({question.id for question in questions}) == len(questions)


@real_data
@pytest.mark.parametrize(("benchmark", "em", "recall"), [
    ("hotpotqa", 0.95, 0.6), ("2wikimultihopqa", 0.9, 0.6), ("musique", 0.8, 0.35),
])  # fmt: skip
def test_real_records_are_played(benchmark, em, recall):
    world = BenchmarkWorld(benchmark, DATA / benchmark / "records.jsonl", DATA / "corpus.jsonl")
    questions = world.questions("test")
    corpus = {paragraph_key(d.title, d.text) for d in world.environment.retriever.documents}
    assert all(paragraph_key(*paragraph) in corpus for q in questions for paragraph in q.gold_paragraphs)
    summary = play_summary(world, questions, random.Random(0))
    assert summary["n"] == 200 and summary["em"] >= em and summary["recall_at_3"] >= recall
    assert summary["f1"] >= summary["em"] and 2 <= summary["searches_per_question"] <= 4
