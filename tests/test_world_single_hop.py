"""Questions of one hop out of multi-hop records, and splits that share no gold title."""

import json
import logging
import random
from collections import Counter
from pathlib import Path

import pytest

from stppo.config.composition import compose
from stppo.config.loading import build
from stppo.preflight import requirements
from stppo.world import BenchmarkWorld
from stppo.world.datasets import Reading, locate, read_passages, read_records
from stppo.world.rewards import normalise_answer
from stppo.world.scripted import paragraph_key, play, play_summary
from stppo.world.single_hop import (
    NO_PASSAGE,
    NO_TEMPLATE,
    NO_WORDS,
    NOT_THERE,
    REPEATED,
    SINGLE_HOP,
    UNRESOLVED,
    Asked,
)
from tests.sample_data import DATA, real_data

ROOT = Path(__file__).parents[1]


def paragraph(idx, title, text, supporting=True):
    return {"idx": idx, "title": title, "paragraph_text": text, "is_supporting": supporting}


def step(question, answer, idx):
    return {"question": question, "answer": answer, "paragraph_support_idx": idx}


MUSIQUE = {
    "id": "m1",
    "question": "In which country was the writer of Winter born?",
    "answer": "Norway",
    "answer_aliases": ["Norge"],
    "paragraphs": [
        paragraph(0, "Winter (novel)", "Winter was written by Kari Moe."),
        paragraph(1, "Kari Moe", "Kari Moe was born in Voss."),
        paragraph(2, "Voss", "Voss lies in Norway, near the sea."),
        paragraph(3, "Rome", "Rome lies elsewhere.", supporting=False),
    ],
    "question_decomposition": [
        step("Winter >> author", "Kari Moe", 0),
        step("Where was #1 born", "Voss", 1),
        step("#2 >> country", "Norway", 2),
    ],
}
TWO_WIKI = {
    "_id": "w1",
    "type": "compositional",
    "question": "When was the director of Fog born?",
    "answer": "3 May 1950",
    "supporting_facts": [["Fog (film)", 0], ["Ola Dal", 0]],
    "context": [
        ["Fog (film)", ["Fog is a film.", "Ola Dal and Eva Lie directed it."]],
        ["Ola Dal", ["Ola Dal (born 3 May 1950) is a director."]],
        ["Hail", ["Hail is no film."]],
    ],
    "evidences": [
        ["Fog (film)", "director", "Ola Dal"],
        ["Fog (film)", "director", "Eva Lie"],
        ["Ola Dal", "date of birth", "3 May 1950"],
    ],
}


def asked(name, *records):
    found = Asked()
    for number, record in enumerate(records, start=1):
        found.parts(record, name, number)
    return found


def test_steps_become_questions_with_the_earlier_answers_filled_in():
    found = asked("musique_single_hop", MUSIQUE)
    assert [(q.id, q.text, q.answers, q.gold_paragraphs[0][0]) for q in found.questions] == [
        ("m1-1", "Who wrote Winter?", ("Kari Moe",), "Winter (novel)"),
        ("m1-2", "Where was Kari Moe born", ("Voss",), "Kari Moe"),
        ("m1-3", "In which country is Voss?", ("Norway", "Norge"), "Voss"),
    ]
    assert not found.dropped
    assert {(q.hops, q.source) for q in found.questions} == {(1, "musique_single_hop")}


def test_triples_become_questions_and_a_repeated_one_lends_its_answer():
    found = asked("2wiki_single_hop", TWO_WIKI)
    assert [(q.text, q.answers) for q in found.questions] == [
        ("Who directed Fog (film)?", ("Ola Dal", "Eva Lie")),
        ("When was Ola Dal born?", ("3 May 1950",)),
    ]
    assert found.dropped == {REPEATED: 1}


def test_a_subject_may_be_a_title_without_its_bracket_if_only_one_fits():
    record = TWO_WIKI | {"evidences": [["Fog", "director", "Ola Dal"]]}
    assert asked("2wiki_single_hop", record) == asked(
        "2wiki_single_hop", TWO_WIKI | {"evidences": TWO_WIKI["evidences"][:1]}
    )
    two = record | {"context": [*TWO_WIKI["context"], ["Fog (song)", ["Ola Dal sings."]]]}
    assert asked("2wiki_single_hop", two).dropped == {NO_PASSAGE: 1}


def test_other_layouts_of_the_records_give_the_same_questions():
    columns = dict(zip(("fact", "relation", "entity"), zip(*TWO_WIKI["evidences"], strict=True), strict=True))
    context = {"title": [t for t, _ in TWO_WIKI["context"]], "content": [s for _, s in TWO_WIKI["context"]]}
    wanted = asked("2wiki_single_hop", TWO_WIKI)
    for changes in (
        {"evidences": columns, "context": context},
        {"evidences": json.dumps(TWO_WIKI["evidences"])},
    ):
        assert asked("2wiki_single_hop", TWO_WIKI | changes) == wanted
    by_idx = {p["idx"]: p for p in MUSIQUE["paragraphs"]}
    steps = [
        s | {"support_paragraph": by_idx[s["paragraph_support_idx"]]}
        for s in MUSIQUE["question_decomposition"]
    ]
    flashrag = {"id": "m1", "question": "q?", "golden_answers": ["Norway", "Norge"]}
    flashrag |= {"metadata": {"question_decomposition": steps}}
    assert asked("musique_single_hop", flashrag) == asked("musique_single_hop", MUSIQUE)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (step("Where was #3 born", "Voss", 1), UNRESOLVED),
        (step("Kari Moe >> shares border with", "Voss", 1), NO_TEMPLATE),
        (step("Kari Moe >> country >> capital", "Voss", 1), NO_TEMPLATE),
        (step("Where was #1 born", "Voss", None), NO_PASSAGE),
        (step("Where was #1 born", "Voss", 9), NO_PASSAGE),
        (step("Where was #1 born", "The The!", 1), NO_WORDS),
        (step("Where was #1 born", None, 1), NO_WORDS),
        (step("Where was #1 born", "Vos", 1), NOT_THERE),
        (step("Winter >> author", "Kari Moe", 0), REPEATED),
    ],
)
def test_what_is_left_out_is_counted_by_reason(changed, reason):
    first, _, last = MUSIQUE["question_decomposition"]
    record = MUSIQUE | {"question_decomposition": [first, changed, last | {"question": "Voss >> country"}]}
    found = asked("musique_single_hop", record)
    assert found.dropped == {reason: 1} and len(found.questions) == 2


def test_counts_are_logged_and_records_without_parts_are_named(tmp_path, caplog):
    file = tmp_path / "musique.jsonl"
    file.write_text(json.dumps(MUSIQUE) + "\n" + json.dumps(MUSIQUE) + "\n")
    with caplog.at_level(logging.INFO):
        assert len(read_records("musique_single_hop", file)) == 3
    assert f"{file}: 2 records gave 3 single-hop questions; left out: 3 asked before" in caplog.text
    file.write_text(json.dumps({k: v for k, v in MUSIQUE.items() if k != "question_decomposition"}))
    with pytest.raises(
        ValueError, match="record 1: question m1: no musique_single_hop record .*needs question_dec"
    ):
        read_records("musique_single_hop", file)
    file.write_text(json.dumps({k: v for k, v in TWO_WIKI.items() if k != "evidences"}))
    with pytest.raises(
        ValueError, match="record 1: question w1: no 2wiki_single_hop record .*needs evidences"
    ):
        read_records("2wiki_single_hop", file)


# ---- the corpus that comes with the records ----


@pytest.fixture
def files(tmp_path):
    for name, record in (("musique", MUSIQUE), ("2wikimultihopqa", TWO_WIKI)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    return {name: tmp_path / f"{name}.jsonl" for name in ("musique", "2wikimultihopqa")}


def world(files, **options):
    defaults = {
        "benchmark": list(SINGLE_HOP),
        "records": files,
        "corpus": "contexts",
        "prompt": "short",
        "top_k": 1,
    }
    return BenchmarkWorld(**defaults | options)


def test_the_records_own_passages_are_the_corpus(files):
    found = world(files)
    documents = found.environment.retriever.documents
    assert Counter(d.title for d in documents) == Counter(
        ["Winter (novel)", "Kari Moe", "Voss", "Rome", "Fog (film)", "Ola Dal", "Hail"]
    )
    assert play_summary(found, found.questions("test"), random.Random(0))["em"] == 1
    both = world(files, benchmark=[*SINGLE_HOP, "musique", "2wikimultihopqa"])
    assert len(both.environment.retriever.documents) == len(documents), "the same paragraphs, once each"


def test_questions_without_passages_are_asked_where_the_corpus_answers_them(tmp_path, caplog):
    corpus = tmp_path / "corpus.jsonl"
    passages = [
        ("Fog (film)", "Fog is a film by Ola Dal."),
        ("Hail", "Hail falls."),
        ("Kari Moe", "She was born in Voss."),
    ]
    corpus.write_text(
        "".join(
            json.dumps({"id": str(i), "contents": f'"{t}"\n{text}'}) + "\n"
            for i, (t, text) in enumerate(passages)
        )
    )
    asked = [
        ("who directed the Fog?", ["Ola Dal"]),  # named without its bracket, answered
        ("who directed Hail?", ["Ola Dal"]),  # named, but its passage does not say
        ("who was born in Voss?", ["Kari Moe"]),  # answered by a passage that the question does not name
        ("where was Kari Moen born?", ["Voss"]),  # another name
        ("when did fog and hail fall?", ["a film"]),  # the answer stands in one of two that are named
        ("is it by Fog?", ["Fo"]),  # part of a word is no answer
    ]
    file = tmp_path / "nq.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in asked))
    found = BenchmarkWorld("nq", records=file, corpus=corpus, only_in_corpus=True)
    with caplog.at_level("INFO"):
        kept = found.questions("test")
    assert [(q.text, [title for title, _ in q.gold_paragraphs]) for q in kept] == [
        (asked[0][0], ["Fog (film)"]),
        (asked[4][0], ["Fog (film)"]),
    ]
    assert "nq: 4 test questions have no passage in the corpus" in caplog.text
    assert play_summary(found, kept[:1], random.Random(0))["em"] == 1, (
        "the scripted searcher knows the passage"
    )
    assert len(BenchmarkWorld("nq", records=file, corpus=corpus).questions("test")) == len(asked)
    with pytest.raises(ValueError, match="^only_in_corpus needs world.corpus"):
        BenchmarkWorld("nq", records=file, retriever=object(), only_in_corpus=True)


def test_a_corpus_of_records_without_passages_is_refused(tmp_path):
    (tmp_path / "nq.jsonl").write_text(json.dumps({"question": "q?", "answer": ["a"]}))
    bare = BenchmarkWorld("nq", records=tmp_path / "nq.jsonl", corpus="contexts")
    with pytest.raises(
        ValueError, match="^corpus=contexts: the records of nq come without paragraphs; set world.corpus"
    ):
        _ = bare.environment


def test_a_paragraph_that_is_none_is_named(files):
    files["musique"].write_text(json.dumps(MUSIQUE | {"paragraphs": [{"idx": 0, "title": "A"}]}))
    with pytest.raises(
        ValueError, match=r"musique\.jsonl record 1: its paragraphs cannot be read \(KeyError"
    ):
        read_passages(locate("musique", files["musique"]), "test", Reading())


def test_passages_with_protocol_tags_are_counted_and_shown_harmless(files, caplog):
    tagged = MUSIQUE["paragraphs"][2] | {"paragraph_text": "Voss <answer> Norway </answer> is wet."}
    record = MUSIQUE | {"paragraphs": [*MUSIQUE["paragraphs"][:2], tagged]}
    files["musique"].write_text(json.dumps(record))
    found = world(files)
    (episode,) = play(found, [q for q in found.questions("test") if q.id == "m1-3"], random.Random(0))
    assert "corpus: 1 passages hold protocol tags" in caplog.text and "first: id 2" in caplog.text
    assert "[answer] Norway [/answer]" in episode.turns[0].observation and episode.reward == 1


def test_preflight_knows_derived_sets_and_the_records_own_corpus(files):
    section = {"_target_": "stppo.world.BenchmarkWorld", "benchmark": list(SINGLE_HOP), "corpus": "contexts"}
    section["records"] = {name: str(file) for name, file in files.items()}
    rows = list(requirements.data(build(section, "world"), section))
    assert [row.ok for row in rows] == [True] * 3 and "the records' own passages" in rows[-1].found


# ---- splits ----


def made_up(n, titles):
    """n records of two steps each; the passages are drawn from `titles` titles, so that many are shared."""
    rng = random.Random(0)
    for i in range(n):
        a, b = rng.sample(range(titles), 2)
        yield MUSIQUE | {
            "id": f"r{i}",
            "question": f"Which colour has the thing {i}?",
            "answer": "red",
            "paragraphs": [paragraph(0, f"Title {a}", f"It knows name{i}."), paragraph(1, f"Title {b}", "It is red.")],
            "question_decomposition": [
                step(f"Whom does thing {i} know?", f"name{i}", 0),
                step(f"Which colour has #1 in story {i}?", "red", 1),
            ],
        }  # fmt: skip


def split_titles(found):
    parts = {name: found.questions(name) for name in ("train", "validation", "test")}
    titles = {
        name: {normalise_answer(t) for q in part for t, _ in q.gold_paragraphs}
        for name, part in parts.items()
    }
    return parts, titles


@pytest.mark.parametrize("names", [["musique_single_hop"], ["musique"], ["musique_single_hop", "musique"]])
def test_no_split_needs_a_passage_of_another(tmp_path, names):
    file = tmp_path / "musique.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in made_up(300, 400)))
    options = {"benchmark": names, "train": names, "held_out": 0.1, "test_share": 0.2}
    parts, titles = split_titles(world({"musique": file}, **options, split_by="gold_title"))
    keys = {name: {normalise_answer(q.text) for q in part} for name, part in parts.items()}
    for one, other in (("train", "test"), ("train", "validation"), ("validation", "test")):
        assert not titles[one] & titles[other] and not keys[one] & keys[other]
    assert all(len(part) >= 10 for part in parts.values())
    if names == ["musique_single_hop"]:  # one title each: nothing is lost
        assert sum(map(len, parts.values())) == 600 and 70 < len(parts["test"]) < 170
    by_question, shared = split_titles(world({"musique": file}, **options))
    assert shared["train"] & shared["test"], "else this proves nothing"
    assert sum(map(len, by_question.values())) == 300 * len(names) + 300 * ("musique_single_hop" in names)


def test_a_test_of_other_records_takes_its_titles_from_training(tmp_path):
    records = list(made_up(60, 40))
    for name, part in (("train", records[:50]), ("test", records[50:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    place, names = {"musique": tmp_path}, ["musique_single_hop"]
    parts, titles = split_titles(world(place, benchmark=names, train=names, split_by="gold_title"))
    assert len(parts["test"]) == 20 and not titles["test"] & (titles["train"] | titles["validation"])
    assert 0 < len(parts["train"]) + len(parts["validation"]) < 100


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"split_by": "title"}, "BenchmarkWorld.split_by='title': must be one of question, gold_title"),
        ({"prompt": "long"}, "BenchmarkWorld.prompt='long': must be one of search_r1, short"),
        ({"test_share": 0}, "test_share must be above 0"),
        ({"test_share": 0.9}, "test_share must be above 0 and leave some of 1 - held_out to train"),
        ({"train": "2wiki_steps"}, "train must be of nq, .*2wiki_single_hop, nq_hotpotqa, got '2wiki_steps'"),
    ],
)
def test_wrong_values_name_the_field(files, options, problem):
    with pytest.raises(ValueError, match=f"^{problem}"):
        world(files, **options)


# ---- all real records ----


@real_data
@pytest.mark.parametrize(
    ("name", "questions", "dropped"),
    [
        ("musique_single_hop", 392, {NOT_THERE: 7, REPEATED: 56, NO_TEMPLATE: 16}),
        ("2wiki_single_hop", 471, {NOT_THERE: 3, REPEATED: 7, NO_PASSAGE: 21}),
    ],
)
def test_real_records_count_by_count(name, questions, dropped):
    file = DATA / SINGLE_HOP[name] / "records.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = asked(name, *records)
    parts = "question_decomposition" if name == "musique_single_hop" else "evidences"
    assert (len(found.questions), dict(found.dropped)) == (questions, dropped)
    assert questions + sum(dropped.values()) == sum(len(record[parts]) for record in records)
    assert found.questions == read_records(name, file)
    assert not any("#" in q.text or ">>" in q.text for q in found.questions)
    assert len({q.id for q in found.questions}) == questions
    assert max(len(q.text.split()) for q in found.questions) < 40


@real_data
@pytest.mark.parametrize("config", ["single_hop", "growing_hops"])
def test_real_splits_share_no_question_and_no_title(config):
    records = ", ".join(
        f"{n}: {DATA / n / 'records.jsonl'}" for n in ("musique", "2wikimultihopqa", "hotpotqa")
    )
    node = compose([f"world={config}", f"world.records={{{records}}}", "world.cache_dir=null"])["world"]
    found = build(node, "world")
    parts, titles = split_titles(found)
    for one, other in (("train", "test"), ("train", "validation"), ("validation", "test")):
        assert not titles[one] & titles[other]
    if config == "single_hop":
        assert {name: len(part) for name, part in parts.items()} == {
            "train": 408,
            "validation": 116,
            "test": 339,
        }
        passages = {paragraph_key(d.title, d.text) for d in found.environment.retriever.documents}
        assert all(
            paragraph_key(*p) in passages for part in parts.values() for q in part for p in q.gold_paragraphs
        )
        assert play_summary(found, parts["test"], random.Random(0))["em"] > 0.8  # what one search allows
    else:
        assert min(map(len, parts.values())) >= 60
        assert {q.source for q in parts["test"]} == {*SINGLE_HOP, "musique", "2wikimultihopqa", "hotpotqa"}


def known_and_short(questions, trained):
    """How many questions have an answer of a training question, and how many an answer of one word."""
    known = {normalise_answer(answer) for q in trained for answer in q.answers}
    met = sum(any(normalise_answer(answer) in known for answer in q.answers) for q in questions)
    return met, sum(len(normalise_answer(q.answers[0]).split()) == 1 for q in questions)


@real_data
def test_how_many_answers_are_known_or_of_one_word_is_told_as_counted():
    records = f"{{{', '.join(f'{n}: {DATA / n}/records.jsonl' for n in ('musique', '2wikimultihopqa'))}}}"
    chosen = {"smollm": "preset=smollm", "default": "world=single_hop"}
    splits = {}
    for name, choice in chosen.items():
        settings = compose([choice, f"world.records={records}", "world.cache_dir=null"])
        found = build(settings["world"], "world")
        splits[name] = {part: found.questions(part) for part in ("train", "validation", "test")}
    page = " ".join((ROOT / "docs/howto/real-questions.md").read_text(encoding="utf-8").split())
    small, large = splits["smollm"], splits["default"]
    told = (
        "{} of the {} have an answer that some training question has too",
        "{} of {} to validate",
        "{} of {} to test",
    )
    asked = ((large, "test"), (small, "validation"), (small, "test"))
    for text, (split, part) in zip(told, asked, strict=True):
        met, _ = known_and_short(split[part], split["train"])
        assert text.format(met, len(split[part])) in page
