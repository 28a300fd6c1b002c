"""The benchmark world: who is asked what, and the gold-title searcher."""

import json
import random
from collections import Counter
from functools import partial

import pytest

from stppo.config.composition import compose
from stppo.config.loading import build
from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import Document
from stppo.world import BenchmarkWorld
from stppo.world.environment import SearchEnvironment
from stppo.world.protocol import Protocol, Question
from stppo.world.rewards import normalise_answer
from stppo.world.scripted import (
    GoldTitleSearcher,
    paragraph_key,
    play_summary,
    recall_at_k,
)
from tests.sample_data import DATA, real_data
from tests.test_world_records import HOTPOT


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def nq(*numbers):
    return [{"question": f"Who is number {i}?", "answer": [str(i)]} for i in numbers]


def texts(questions):
    return [question.text for question in questions]


@pytest.fixture
def corpus(tmp_path):
    entries = [
        {"id": str(i), "contents": f'"{title}"\n{" ".join(sentences)}'}
        for i, (title, sentences) in enumerate(HOTPOT["context"])
    ]
    return write(tmp_path / "corpus.jsonl", *entries)


@pytest.fixture
def files(tmp_path, corpus):
    return {"records": write(tmp_path / "records.jsonl", HOTPOT), "corpus": corpus}


def test_an_evaluation_world_tests_all_records(files, tmp_path):
    world = BenchmarkWorld(**files, cache_dir=tmp_path / "cache")
    assert world.tokenizer is None
    assert play_summary(world, world.questions("test"), random.Random(0)) == {
        "n": 1, "em": 1.0, "f1": 1.0, "recall_at_3": 1.0, "searches_per_question": 2.0,
    }  # fmt: skip
    assert any((tmp_path / "cache").iterdir())
    for split in ("train", "validation"):
        with pytest.raises(ValueError, match=f"^no {split} questions: set world.train"):
            world.questions(split)
    with pytest.raises(ValueError, match="^split must be train, validation or test, got 'dev'"):
        world.questions("dev")


@pytest.fixture
def divided(tmp_path, corpus):
    """A world over files of questions: {name: numbers or (train numbers, test numbers)}."""

    def make(places, **options):
        found = {}
        for name, numbers in places.items():
            if isinstance(numbers, tuple):
                for split, some in zip(("train", "test"), numbers, strict=True):
                    write(tmp_path / name / f"{split}.jsonl", *nq(*some))
                found[name] = tmp_path / name
            else:
                found[name] = write(tmp_path / f"{name}.jsonl", *nq(*numbers))
        return BenchmarkWorld(
            **{"benchmark": "nq", "train": "nq", "records": found, "corpus": corpus} | options
        )

    return make


def test_one_file_is_divided_into_three_splits(divided):
    world = divided({"nq": range(1000)}, held_out=0.2)
    parts = {split: world.questions(split) for split in ("train", "validation", "test")}
    assert sum(map(len, parts.values())) == len({q for part in parts.values() for q in texts(part)}) == 1000
    assert all(abs(len(parts[split]) - 200) < 50 for split in ("validation", "test"))
    assert world.questions("train") == parts["train"]
    again = divided({"nq": range(1000)}, held_out=0.2, seed=1)  # other order, same division
    assert texts(again.questions("train")) != texts(parts["train"])
    assert all(set(texts(again.questions(split))) == set(texts(part)) for split, part in parts.items())
    smaller = divided({"nq": range(500)}, held_out=0.2).questions("validation")
    assert set(texts(smaller)) < set(texts(parts["validation"]))  # a question's place is its own


def test_validation_and_train_share_no_question_however_it_is_written(divided, tmp_path):
    world = divided({"nq": (range(50), [99])})
    variants = [{"question": f"who is the NUMBER {i}", "answer": ["x"]} for i in range(50)]
    write(tmp_path / "nq" / "train.jsonl", *nq(*range(50)), *variants)
    keys = {
        split: {normalise_answer(q.text) for q in world.questions(split)} for split in ("train", "validation")
    }
    assert len(world.questions("train")) + len(world.questions("validation")) == 100
    assert not keys["train"] & keys["validation"] and len(keys["train"] | keys["validation"]) == 50


def test_train_and_validation_never_ask_what_test_asks(divided):
    world = divided({"nq": (range(100), range(50, 200))})
    assert texts(world.questions("test")) == [f"Who is number {i}?" for i in range(50, 200)]
    learnt = texts(world.questions("train")) + texts(world.questions("validation"))
    assert sorted(learnt) == sorted(f"Who is number {i}?" for i in range(50))
    with pytest.raises(
        ValueError, match="^no train question is left of nq: give .* or others to world.benchmark"
    ):
        divided({"nq": (range(10), range(10))}).questions("train")


def hotpot(*numbers):
    return [HOTPOT | {"_id": str(i), "question": f"Is it {i}?"} for i in numbers]


def test_a_mix_is_all_questions(tmp_path, corpus):
    records = {name: tmp_path / f"{name}.jsonl" for name in ("nq", "hotpotqa", "bamboogle")}
    write(records["nq"], *nq(*range(400)))
    write(records["hotpotqa"], *hotpot(*range(100)))
    write(records["bamboogle"], {"Question": "q?", "Answer": "a"})

    def sources(train):
        world = BenchmarkWorld("bamboogle", train, records, corpus=corpus)
        return world, Counter(q.source for q in world.questions("train"))

    world, whole = sources(["nq", "hotpotqa"])
    held = Counter(q.source for q in world.questions("validation"))
    assert whole + held == {"nq": 400, "hotpotqa": 100} and held["hotpotqa"]
    assert {q.source for q in world.questions("train")[:20]} == {"nq", "hotpotqa"}  # shuffled together


def test_limits_hold_for_training_and_testing(divided):
    world = divided({"nq": (range(100), range(500, 600))}, train_limit=30, test_limit=7)
    assert len(world.questions("train")) + len(world.questions("validation")) == 30
    assert len(world.questions("test")) == 7


class OneDocument:
    def search(self, queries, top_k):
        return [[(Document("7", "Oslo", query), 1.0)] * top_k for query in queries]


@pytest.mark.parametrize("given", [OneDocument(), partial(OneDocument)])
def test_a_retriever_takes_the_place_of_the_corpus(files, given):
    environment = BenchmarkWorld(records=files["records"], retriever=given, top_k=2).environment
    episode = environment.start(Question("q", "q?", ("a",)))
    environment.step([episode], ["<search> x </search>"])
    assert [document.text for document in episode.turns[0].documents] == ["x", "x"]


def test_the_protocol_is_search_r1s_by_default(files):
    world = BenchmarkWorld(**files, max_observation_tokens=99, max_start_tokens=999)
    protocol = world.environment.protocol
    assert protocol.parse("well: <answer> Oslo </answer>").content == "Oslo"
    assert (protocol.max_observation_tokens, protocol.max_start_tokens) == (99, 999)
    strict = BenchmarkWorld(**files, parsing="strict").environment.protocol
    assert strict.parse("well: <answer> Oslo </answer>").kind == "invalid"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"benchmark": "squad"}, "benchmark must be of nq, .*, got 'squad'"),
        ({"benchmark": ["nq", "nq_hotpotqa"]}, "benchmark must be of nq, .*, got 'nq_hotpotqa'"),
        ({"benchmark": []}, "benchmark is empty"),
        ({"train": ["squad"]}, "train must be of nq, .*nq_hotpotqa, got 'squad'"),
        ({"train": {"nq": 0.5}}, "train must be a name or a list of names"),
        ({"records": {"squad": "x.jsonl"}}, "records must be of nq, .*, got 'squad'"),
        ({"held_out": 0}, "held_out must be above 0 and below 0.5"),
        ({"held_out": 0.5}, "held_out must be above 0 and below 0.5"),
        ({"train_limit": 0}, "train_limit must"),
        ({"test_limit": "all"}, "test_limit must"),
        ({"unanswerable": "keep"}, "Reading.unanswerable='keep': must be one of skip, error"),
        ({"corpus": None}, "exactly one of corpus and retriever is needed: set world.corpus=FILE"),
        ({"retriever": OneDocument()}, "exactly one of corpus and retriever is needed"),
        ({"top_k": 0}, "top_k must"),
        ({"turn_budget": 0}, "turn_budget must"),
        ({"max_information_words": 0}, "max_information_words must"),
        ({"max_observation_tokens": 0}, "max_observation_tokens must"),
        ({"parsing": "loose"}, "Protocol.parsing='loose': must be one of strict, search_r1"),
        ({"reward": "bleu"}, "BenchmarkWorld.reward='bleu': must be one of em, f1"),
    ],
)
def test_wrong_values_name_the_field(files, options, problem):
    with pytest.raises(ValueError, match=f"^{problem}"):
        BenchmarkWorld(**files | options)


@pytest.mark.parametrize("field", ["records", "corpus"])
def test_missing_files_are_named(files, field):
    with pytest.raises(FileNotFoundError, match=f"^{field}: no file nowhere.jsonl"):
        BenchmarkWorld(**files | {field: "nowhere.jsonl"})
    with pytest.raises(FileNotFoundError, match="^records: no file nowhere.jsonl"):
        BenchmarkWorld(**files | {"train": "nq", "records": {"nq": "nowhere.jsonl"}})


def test_the_config_builds_a_world(files):
    write(files["records"], *hotpot(*range(60)))
    overrides = [
        "world=benchmark",
        f"world.corpus={files['corpus']}",
        f"world.records={{hotpotqa: {files['records']}}}",
    ]
    node = compose([*overrides, "world.train=[hotpotqa]"])["world"]
    world = build(node, "world")
    assert sum(len(world.questions(split)) for split in ("train", "validation", "test")) == 60


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


def test_searcher_finds_the_text_of_an_option_not_its_letter():
    question = Question("q", "Bergen?", ("Plague", "B"), options=("Flu", "Plague"))
    documents = [Document("0", "Bergen", "b is a letter"), Document("1", "Bergen", "plague came")]
    for n, answer in ((1, "unknown"), (2, "Plague")):
        environment = SearchEnvironment(Protocol(), BM25Retriever(documents[:n]), 2)
        episode = environment.start(question)
        agent = GoldTitleSearcher(question, 4)
        while not episode.done:
            environment.step([episode], [agent.act(episode)])
        assert episode.answer == answer


@real_data
@pytest.mark.parametrize(("benchmark", "em", "recall"), [
    ("hotpotqa", 0.95, 0.6), ("2wikimultihopqa", 0.9, 0.6), ("musique", 0.8, 0.35),
])  # fmt: skip
def test_real_records_are_played(benchmark, em, recall):
    world = BenchmarkWorld(
        benchmark, records=DATA / benchmark / "records.jsonl", corpus=DATA / "corpus.jsonl"
    )
    questions = world.questions("test")
    corpus = {paragraph_key(d.title, d.text) for d in world.environment.retriever.documents}
    assert all(paragraph_key(*paragraph) in corpus for q in questions for paragraph in q.gold_paragraphs)
    summary = play_summary(world, questions, random.Random(0))
    assert summary["n"] == 200 and summary["em"] >= em and summary["recall_at_3"] >= recall
    assert summary["f1"] >= summary["em"] and 2 <= summary["searches_per_question"] <= 4
