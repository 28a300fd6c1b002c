import pytest

from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import Document
from stppo.world.environment import SearchEnvironment
from stppo.world.protocol import Protocol, Question

DOCUMENTS = [
    Document("0", "Norway", "The capital of Norway is Oslo."),
    Document("1", "France", "Paris is large."),
]
QUESTION = Question("q", "capital of Norway", ("Oslo", "Kristiania"))


class CountingRetriever(BM25Retriever):
    def __init__(self):
        super().__init__(DOCUMENTS)
        self.calls = []

    def search(self, queries, top_k):
        self.calls.append(list(queries))
        return super().search(queries, top_k)


def environment(turn_budget=2, **options):
    return SearchEnvironment(Protocol(turn_budget=turn_budget), CountingRetriever(), 1, **options)


def one_step(env, episode, text):
    (observation,) = env.step([episode], [text])
    return observation


def test_search_then_answer():
    env = environment()
    episode = env.start(QUESTION)
    assert episode.prompt.endswith("Question: capital of Norway?\n")
    observation = one_step(env, episode, "<think> t </think><search> Norway </search>")
    assert (
        observation
        == "\n\n<information>Doc 1(Title: Norway) The capital of Norway is Oslo.</information>\n\n"
    )
    assert not episode.done and episode.turns[0].documents == (DOCUMENTS[0],)
    assert one_step(env, episode, "<answer> oslo. </answer>") is None
    assert (episode.done, episode.reward, episode.answer) == (True, 1.0, "oslo.")
    assert (episode.n_searches, episode.n_invalid, len(episode.turns)) == (1, 0, 2)


@pytest.mark.parametrize(("reward", "expected"), [("em", 0.0), ("f1", 2 / 3)])
def test_reward_of_a_partly_right_answer(reward, expected):
    env = environment(reward=reward)
    episode = env.start(QUESTION)
    one_step(env, episode, "<answer> Oslo city </answer>")
    assert episode.reward == pytest.approx(expected)


@pytest.mark.parametrize(
    "text",
    ["Oslo", "<answer> Oslo", "<search> a <answer> Oslo </answer>", "<information> x </information>", ""],
)
def test_invalid_turn_gets_the_correction_and_costs_a_turn(text):
    env = environment(turn_budget=1)
    episode = env.start(QUESTION)
    assert one_step(env, episode, text) == env.protocol.correction
    assert not episode.done and episode.n_invalid == 1
    assert one_step(env, episode, text) is None  # the generation after the budget must answer
    assert (episode.done, episode.reward, episode.answer) == (True, 0.0, None)
    assert env.retriever.calls == []


def test_answering_is_allowed_after_the_budget_and_searching_is_not():
    env = environment(turn_budget=1)
    answering, searching = env.start(QUESTION), env.start(QUESTION)
    env.step([answering, searching], ["<search> Norway </search>"] * 2)
    observations = env.step([answering, searching], ["<answer> Oslo </answer>", "<search> Norway </search>"])
    assert observations == [None, None]
    assert (answering.reward, searching.reward) == (1.0, 0.0)
    assert searching.done and searching.answer is None and searching.n_searches == 1
    assert len(env.retriever.calls) == 1


def test_one_retriever_call_serves_all_episodes_in_order():
    env = environment()
    episodes = [env.start(QUESTION) for _ in range(4)]
    observations = env.step(
        episodes,
        ["<search> France </search>", "nonsense", "<answer> Oslo </answer>", "<search> Norway </search>"],
    )
    assert env.retriever.calls == [["France", "Norway"]]
    assert "Paris" in observations[0] and "Oslo" in observations[3]
    assert observations[1] == env.protocol.correction and observations[2] is None


@pytest.mark.parametrize("first", [False, True])
def test_without_search_the_dialogue_goes_on_and_nothing_is_found(first):
    env = environment(retrieve_first=first).without_search()
    episode = env.start(QUESTION)
    if not first:
        assert Protocol().no_result in one_step(env, episode, "<search> Norway </search>")
        assert episode.turns[0].documents == ()
    assert "Oslo" not in episode.prompt and (Protocol().no_result in episode.prompt) == first
    one_step(env, episode, "<answer> Oslo </answer>")
    assert episode.reward == 1.0


def test_misuse_is_refused():
    env = environment()
    episode = env.start(QUESTION)
    with pytest.raises(ValueError, match="1 episodes but 2 turns"):
        env.step([episode], ["a", "b"])
    one_step(env, episode, "<answer> Oslo </answer>")
    with pytest.raises(ValueError, match="done"):
        one_step(env, episode, "<answer> Oslo </answer>")


def test_wrong_settings_name_the_field():
    with pytest.raises(ValueError, match="^SearchEnvironment.reward='bleu': must be one of em, f1$"):
        environment(reward="bleu")
    with pytest.raises(ValueError, match="^top_k must be a whole number"):
        SearchEnvironment(Protocol(), CountingRetriever(), 0)
