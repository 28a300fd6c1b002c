import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import Document
from stppo.world.environment import SearchEnvironment
from stppo.world.knowledge import EOS, PAD, SPLITS, SyntheticWorld
from stppo.world.protocol import parse_turn
from stppo.world.scripted import DemonstrationNoise, SyntheticReader, parse_document, play, play_summary

SMALL = {"n_entities": 100, "n_name_parts": 12, "n_train": 100, "n_validation": 20, "n_test": 20}


@pytest.fixture(scope="module")
def world():
    return SyntheticWorld()


def all_questions(world):
    return [question for split in SPLITS for question in world.questions(split)]


def transcript(episode):
    parts = [part for turn in episode.turns for part in (turn.text, turn.observation)]
    return " ".join([episode.prompt, *filter(None, parts)])


def digest(world):
    demonstrations = play(world, world.questions("test"), random.Random(1), DemonstrationNoise())
    content = (
        world.documents,
        all_questions(world),
        world.vocabulary,
        [transcript(e) for e in demonstrations],
    )
    return hashlib.sha256(repr(content).encode()).hexdigest()


def test_same_seed_same_world_in_every_process():
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_world_knowledge as t; "
        "print(t.digest(t.SyntheticWorld(**t.SMALL)))"
    )
    digests = {digest(SyntheticWorld(**SMALL))}
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    folder = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=folder, capture_output=True, check=True
    )
    digests.add(run.stdout.decode().strip())
    assert len(digests) == 1
    assert digest(SyntheticWorld(seed=1, **SMALL)) not in digests


def test_each_document_states_its_facts_and_starts_with_its_name(world):
    assert [document.title for document in world.documents] == list(world.entities)
    for document in world.documents:
        assert document.text.startswith(document.title)
        subject, facts = parse_document(document.text, frozenset(world.relations))
        assert (subject, facts) == (document.title, world.facts[document.title])
        assert len(facts) == 4 and len({document.title, *facts.values()}) == 5


def test_answers_follow_from_the_facts_without_cycles(world):
    for question in all_questions(world):
        *chain, entity = question.text.removesuffix(" ?").split(" of ")
        path = [entity]
        for relation in reversed(chain):
            path.append(world.facts[path[-1]][relation])
        assert question.answers == (path[-1],)
        assert len(set(path)) == len(path) == question.hops + 1
        assert [title for title, _ in question.gold_paragraphs] == path[:-1]


def steps(questions):
    """Every (entity, relation) that the questions' chains use."""
    return {
        (title, relation)
        for question in questions
        for (title, _), relation in zip(question.gold_paragraphs, question.id.split(".")[1:], strict=True)
    }


@pytest.mark.parametrize("fields", [{}, {"seed": 3, "held_out": 0.3}, {"facts_seed": 7}])
def test_no_step_of_a_training_chain_is_in_a_held_out_one(fields):
    world = SyntheticWorld(**fields)
    trained, *held_out = (steps(world.questions(split)) for split in SPLITS)
    assert len(trained) > 5000 and all(len(found) > 500 for found in held_out)
    assert not trained & (held_out[0] | held_out[1])
    read = {entity for entity, _ in trained}
    assert not read & world.held_out_entities


def test_facts_are_redrawn_behind_the_same_names(world):
    other = SyntheticWorld(facts_seed=5)
    assert other.entities == world.entities and other.vocabulary == world.vocabulary
    assert other.held_out_entities == world.held_out_entities
    kept = sum(
        other.facts[entity][relation] == world.facts[entity].get(relation)
        for entity in world.entities
        for relation in other.facts[entity]
    )
    assert kept < 0.01 * 8000
    assert {q.text for q in world.questions("test")} != {q.text for q in other.questions("test")}
    assert SyntheticWorld(facts_seed=0).facts == world.facts


def test_splits_are_disjoint_and_mixed_as_asked(world):
    questions = all_questions(world)
    assert len({question.text for question in questions}) == len({q.id for q in questions}) == len(questions)
    for split, size in zip(SPLITS, (8000, 512, 512), strict=True):
        hops = Counter(question.hops for question in world.questions(split))
        assert sum(hops.values()) == size
        for n, share in zip((1, 2, 3), (0.4, 0.5, 0.1), strict=True):
            assert abs(hops[n] - share * size) < 1
        first_half = Counter(question.hops for question in world.questions(split)[: size // 2])
        assert all(first_half.values()) and len(first_half) == 3  # shuffled, not sorted by hops


def test_reading_examples_are_look_ups_in_documents_of_no_entity(world):
    examples = world.reading_examples(50, random.Random(0))
    shown = set()
    for example in examples:
        document, thought = example.prompt.removeprefix("<information> ").split(" </information> <think> ")
        name, facts = parse_document(document, frozenset(world.relations))
        assert len(facts) == 4 and document.split()[0] in world.name_parts[0]
        asked = [thought, *(turn.observation for turn in example.turns[:-1])]
        assert len(asked) == 10 and example.turns[-1].observation is None
        assert [facts[relation] for relation in asked] == [turn.text for turn in example.turns]
        shown.add(document)
    assert len(shown) == 50 and not shown & {document.text for document in world.documents}
    assert examples != world.reading_examples(50, random.Random(1))


def test_reader_knows_only_what_was_retrieved(world):
    """Where the documents contradict the knowledge base, the reader answers from the documents."""
    untrue = [
        Document(
            str(i), entity, " ".join([entity, *map(" ".join, zip(objects, rotated(objects), strict=True))])
        )
        for i, (entity, objects) in enumerate(world.facts.items())
    ]
    env = SearchEnvironment(world.environment.protocol, BM25Retriever(untrue), 1)
    for question in [q for q in world.questions("test") if q.hops == 1]:
        episode = env.start(question)
        agent = world.scripted_agent(question, random.Random(0))
        while not episode.done:
            env.step([episode], [agent.act(episode)])
        assert episode.reward == 0


def rotated(objects):
    values = list(objects.values())
    return values[1:] + values[:1]


def test_tokenizer_round_trip(world, tmp_path):
    from transformers import AutoTokenizer

    world.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    noisy = play(world, world.questions("train")[:300], random.Random(0), DemonstrationNoise(malformed=0.5))
    for episode in noisy:
        text = transcript(episode)
        ids = world.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert world.tokenizer.unk_token_id not in ids
        assert len(ids) == len(text.split())
        for tokenizer in (world.tokenizer, loaded):
            assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
        for turn in episode.turns:
            assert parse_turn(world.tokenizer.decode(world.tokenizer(turn.text)["input_ids"])) == turn.action
    assert loaded.get_vocab() == world.tokenizer.get_vocab()
    assert (loaded.pad_token, loaded.eos_token) == (PAD, EOS)
    assert loaded("zzz")["input_ids"] == [loaded.unk_token_id]
    assert 140 <= len(loaded) <= 160


def success(world, **noise):
    episodes = play(world, world.questions("train"), random.Random(0), DemonstrationNoise(**noise))
    return sum(episode.reward for episode in episodes) / len(episodes), episodes


def test_each_kind_of_noise_does_what_it_says(world):
    none = {"early_answer": 0, "wrong_entity": 0, "malformed": 0}
    clean = play_summary(world, world.questions("train"), random.Random(0))["em"]
    assert success(world, **none)[0] == pytest.approx(clean, abs=1e-4)

    _, early = success(world, **none | {"early_answer": 1})
    assert all(len(e.turns) == 2 for e in early if e.question.hops > 1)

    _, wrong = success(world, **none | {"wrong_entity": 1})
    one_hop = [e for e in wrong if e.question.hops == 1 and e.n_searches == 1]
    assert one_hop and not any(e.reward for e in one_hop)
    assert all(e.answer in e.turns[0].observation for e in one_hop)

    _, malformed = success(world, **none | {"malformed": 1})
    turns = [turn for e in malformed for turn in e.turns]
    assert all(turn.action.kind == "invalid" for turn in turns)
    assert all(turn.text.endswith(world.environment.protocol.stop_strings) for turn in turns)
    assert len({turn.action.reason for turn in turns}) >= 4


def test_reader_asks_again_with_the_relation_where_retrieval_misled(world):
    question = world.questions("train")[0]
    env = world.environment
    episode = env.start(question)
    agent = SyntheticReader(question, random.Random(0), world.relations, turn_budget=3)
    env.step([episode], [agent.act(episode)])
    *_, relation, start = question.text.removesuffix(" ?").split(" of ")
    (other,) = [document for document in world.documents[:1]]
    assert other.title != start
    object.__setattr__(episode.turns[0], "documents", (other,))
    assert agent.act(episode) == f"<search> {start} {relation} </search>"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("facts_seed", "new"),
        ("held_out", 1.2),
        ("n_entities", 0),
        ("n_entities", 4),
        ("n_entities", 40_000),
        ("n_entities", "many"),
        ("n_relations", 3),
        ("n_relations", 99),
        ("facts_per_document", 0),
        ("n_name_parts", 5000),
        ("neighbour_share", 1.5),
        ("hop_shares", [0.5, 0.4]),
        ("hop_shares", []),
        ("hop_shares", 3),
        ("turn_budget", 2),
        ("think_probability", -0.1),
        ("top_k", 0),
        ("max_information_words", 0),
        ("max_turn_tokens", 0),
        ("reward", "bleu"),
    ],
)
def test_wrong_values_name_the_field(field, value):
    with pytest.raises(ValueError, match=rf"^(\w+\.)?{field}(=.*:)? must ") as error:
        SyntheticWorld(**{field: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["early_answer", "wrong_entity", "malformed"])
def test_wrong_noise_names_the_field(field):
    with pytest.raises(ValueError, match=f"^{field} must be in \\[0, 1\\]"):
        DemonstrationNoise(**{field: 2})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"n_train": 2016},
            "n_train ask for 806 1-hop questions but the knowledge base has 320 for them: raise n_entities or "
            "facts_per_document, lower held_out=0.2, or lower n_train",
        ),
        (
            {"held_out": 0.01},
            "n_validation + n_test ask for 16 1-hop questions but the knowledge base has 4 for them: raise n_entities or "
            "facts_per_document, raise held_out=0.01, or lower n_validation + n_test",
        ),
        ({"held_out": 0}, "has 0 for them: .* raise held_out=0,"),
    ],
)
def test_more_questions_than_the_knowledge_base_has(fields, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        SyntheticWorld(**SMALL | fields).questions("train")


def test_nothing_to_play():
    with pytest.raises(ValueError, match="no question"):
        play_summary(SyntheticWorld(**SMALL), [], random.Random(0))
