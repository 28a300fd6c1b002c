"""The study's other worlds: one turn an episode, and long chains; and the usual world from other seeds."""

import random
from statistics import fmean

import pytest

from stppo.config.composition import compose
from stppo.config.files import options
from stppo.config.loading import build
from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import Document
from stppo.world.environment import SearchEnvironment
from stppo.world.knowledge import SyntheticWorld
from stppo.world.protocol import Protocol, Question
from stppo.world.scripted import DemonstrationNoise, play, recall_at_k

NOISE = DemonstrationNoise()
SEEDS = (0, 11, 12, 13, 21)


def world_of(name, *overrides):
    return build(compose([f"world={name}", *overrides])["world"], "world")


@pytest.fixture(scope="module")
def single_turn():
    return world_of("single_turn")


@pytest.fixture(scope="module")
def long_horizon():
    return world_of("long_horizon")


def words(episode):
    spoken = [part for turn in episode.turns for part in (turn.text, turn.observation)]
    return " ".join([episode.prompt, *filter(None, spoken)]).split()


def score(episodes):
    return fmean(episode.reward for episode in episodes)


def test_single_turn_prompt_shows_what_the_question_finds(single_turn):
    environment = single_turn.environment
    for question in single_turn.questions("test")[:20]:
        episode = environment.start(question)
        ((*found,),) = environment.retriever.search([question.text], single_turn.top_k)
        assert episode.given == tuple(document for document, _ in found)
        assert len(episode.given) == 1
        expected = (
            f"question {question.text} <information> {' '.join(d.text for d in episode.given)} </information>"
        )
        assert " ".join(episode.prompt.split()) == expected
        assert single_turn.tokenizer.unk_token_id not in single_turn.tokenizer(episode.prompt)["input_ids"]


@pytest.mark.parametrize("text", ["<search> vam zap </search>", "<search>", "<think> vam </think>"])
def test_single_turn_ends_without_reward_unless_it_answers(single_turn, text):
    episode = single_turn.environment.start(single_turn.questions("test")[0])
    assert single_turn.environment.step([episode], [text]) == [None]
    assert episode.done and episode.reward == 0 and episode.answer is None
    assert episode.n_searches == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_single_turn_answers_stand_in_the_prompt_among_others(seed):
    world = world_of("single_turn", f"world.seed={seed}")
    questions = world.questions("train")[:500]
    assert {question.hops for question in questions} == {1}
    assert recall_at_k(world.environment, questions, world.top_k) > 0.95
    for question in questions[:50]:
        (document,) = world.environment.start(question).given
        facts = world.facts[document.title]
        assert len(facts) == 4 and all(
            f"{relation} {entity}" in document.text for relation, entity in facts.items()
        )


def test_single_turn_demonstrations_are_one_turn_of_fourteen_tokens(single_turn):
    clean, noisy = (
        play(single_turn, single_turn.questions("train"), random.Random(0), n) for n in (None, NOISE)
    )
    for episodes in (clean, noisy):
        assert {len(episode.turns) for episode in episodes} == {1}
        assert 12 < fmean(len(episode.turns[0].text.split()) for episode in episodes) < 16
        assert max(len(episode.turns[0].text.split()) for episode in episodes) <= single_turn.max_turn_tokens
    assert score(clean) > 0.97
    assert 0.7 < score(noisy) < 0.9
    assert all(episode.turns[0].action.kind == "answer" for episode in clean)


def test_a_thought_on_the_prompt_reads_aloud_up_to_the_fact(single_turn):
    rng, thoughts = random.Random(2), 0
    for question in single_turn.questions("test")[:50]:
        relation, entity = question.text.removesuffix(" ?").split(" of ")
        episode = single_turn.environment.start(question)
        turn = single_turn.scripted_agent(question, rng).act(episode)
        if turn.startswith("<think>") and episode.given[0].title == entity:
            read, said = turn.removeprefix("<think> ").split(" </think> ")
            assert episode.given[0].text.startswith(read)
            assert read.endswith(f"{relation} {single_turn.facts[entity][relation]}")
            assert said == f"<answer> {single_turn.facts[entity][relation]} </answer>"
            thoughts += 1
    assert thoughts > 20


def test_first_retrieval_is_one_of_the_budget_and_leaves_searches_for_the_rest():
    documents = [Document("0", "Norway", "The capital of Norway is Oslo.")]
    environment = SearchEnvironment(Protocol(turn_budget=2), BM25Retriever(documents), 1, retrieve_first=True)
    episode = environment.start(Question("q", "capital of Norway", ("Oslo",)))
    assert episode.given == tuple(documents) and "Oslo" in episode.prompt
    assert environment.step([episode], ["<search> Norway </search>"])[0] is not None
    assert environment.step([episode], ["<search> Norway </search>"]) == [None]
    assert episode.done and episode.n_searches == 1


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_retrieve_first_is_a_truth_value(value):
    with pytest.raises(ValueError, match="^retrieve_first must be true or false, got "):
        SyntheticWorld(retrieve_first=value)


def test_long_horizon_has_many_more_turns_and_tokens(long_horizon):
    usual = SyntheticWorld()
    averages = []
    for world in (usual, long_horizon):
        episodes = play(world, world.questions("train")[:500], random.Random(0))
        averages.append((fmean(len(e.turns) for e in episodes), fmean(len(words(e)) for e in episodes)))
    (turns, tokens), (more_turns, more_tokens) = averages
    assert more_turns > 1.4 * turns and more_tokens > 1.5 * tokens
    assert {question.hops for question in long_horizon.questions("train")} == {2, 3, 4, 5}


def test_long_horizon_fits_the_positions_of_every_policy(long_horizon):
    noisy = play(long_horizon, long_horizon.questions("train"), random.Random(0), NOISE)
    longest = max(len(words(episode)) for episode in noisy)
    for name in options("policy"):
        assert longest <= compose([f"policy={name}"])["policy"]["max_positions"]


@pytest.mark.parametrize("seed", SEEDS)
def test_long_chains_can_be_followed_to_their_end(seed):
    world = world_of("long_horizon", f"world.seed={seed}")
    episodes = play(world, world.questions("train")[:500], random.Random(0))
    assert score(episodes) >= 0.95
    assert score([episode for episode in episodes if episode.question.hops == 5]) >= 0.9


@pytest.mark.parametrize("seed", SEEDS)
def test_the_usual_world_of_any_seed_is_as_hard(seed):
    world = world_of("synthetic", f"world.seed={seed}")
    questions = world.questions("train")[:2000]
    assert score(play(world, questions, random.Random(0))) > 0.98
    noise = DemonstrationNoise(**compose([])["warm_start"]["noise"])
    assert score(play(world, questions, random.Random(0), noise)) == pytest.approx(0.33, abs=0.04)


# ---- where luck pays ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def multiple_choice():
    return world_of("multiple_choice")


@pytest.fixture(scope="module")
def noisy_reward():
    return world_of("noisy_reward")


def test_options_hold_the_answer_once_and_stand_in_the_question(multiple_choice):
    usual = {question.id: question for question in world_of("synthetic").questions("train")}
    places = []
    for question in multiple_choice.questions("train")[:500]:
        text, letter = question.answers
        assert len(set(question.options)) == 4 and question.options["ABCD".index(letter)] == text
        assert question.text.endswith(f"among {' or '.join(question.options)} ?")
        before = usual[question.id]
        assert before.answers == (text,) and question.text.startswith(before.text.removesuffix(" ?"))
        prompt = multiple_choice.environment.start(question).prompt
        assert multiple_choice.tokenizer.unk_token_id not in multiple_choice.tokenizer(prompt)["input_ids"]
        places.append(letter)
    assert min(places.count(letter) for letter in "ABCD") > 90


def test_a_blind_guess_among_four_options_succeeds_once_in_four_times(multiple_choice):
    rng, environment = random.Random(0), multiple_choice.environment
    episodes = [environment.start(question) for question in multiple_choice.questions("train")[:2000]]
    environment.step(episodes, [f"<answer> {rng.choice(e.question.options)} </answer>" for e in episodes])
    assert abs(score(episodes) - 0.25) < 0.04


def test_a_reader_without_noise_still_reads_and_an_early_answer_guesses(multiple_choice):
    questions = multiple_choice.questions("train")[:300]
    assert score(play(multiple_choice, questions, random.Random(0))) > 0.95
    early = play(multiple_choice, questions, random.Random(0), DemonstrationNoise(1, 0, 0))
    asked = [e for e in early if e.question.hops > 1]
    assert all(e.answer in e.question.options for e in asked)
    assert abs(score(asked) - 0.25) < 0.08


@pytest.mark.parametrize("options", [1, -2, 27, "four", 2.5])
def test_a_number_of_options_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match="options must be 0 .* or a whole number from 2 to 26, got"):
        SyntheticWorld(options=options)


def test_one_reward_in_ten_is_wrong_and_always_the_same_one(noisy_reward):
    environment, questions = noisy_reward.environment, noisy_reward.questions("train")[:3000]

    def rewards(answer):
        episodes = [environment.start(question) for question in questions]
        environment.step(episodes, [f"<answer> {answer(question)} </answer>" for question in questions])
        return [episode.reward for episode in episodes]

    right, wrong = rewards(lambda q: q.answers[0]), rewards(lambda q: q.gold_paragraphs[0][0])
    assert abs(fmean(right) - 0.9) < 0.02 and abs(fmean(wrong) - 0.1) < 0.02
    assert right == rewards(lambda q: q.answers[0].upper()), "the same answer, written otherwise"
    both = fmean(r == 0 and w == 1 for r, w in zip(right, wrong, strict=True))
    assert both < 0.02, "a question's answers err apart"


def test_evaluations_judge_rightly_and_an_episode_without_answer_gets_nothing(noisy_reward):
    environment = noisy_reward.environment
    for split in ("validation", "test"):
        assert all(question.misjudged == 0 for question in noisy_reward.questions(split))
    episodes = [environment.start(question) for question in noisy_reward.questions("train")[:200]]
    for _ in range(environment.turns_with_observation + 1):
        environment.step(episodes, ["<search> x </search>"] * len(episodes))
    assert all(episode.done and episode.reward == 0 for episode in episodes)
    with pytest.raises(ValueError, match="misjudged"):
        SyntheticWorld(misjudged=1.5)
