import pytest

from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import Document
from stppo.world.environment import SearchEnvironment
from stppo.world.protocol import Protocol, Question
from stppo.world.rewards import (
    best_constant,
    chosen_option,
    exact_match,
    f1,
    mean_by_source,
    normalise_answer,
    score,
    search_r1_answer,
    search_r1_em,
)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat, sat.", "cat sat"),
        ("An apple a day", "apple day"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("Zürich—city", "zürich—city"),  # SQuAD removes ASCII punctuation alone
        ("\tA\n", ""),
    ],
)
def test_normalisation(text, normal):
    assert normalise_answer(text) == normal


def test_exact_match_takes_the_best_of_all_answers():
    assert exact_match("the Beatles!", ["Rolling Stones", "Beatles"]) == 1
    assert exact_match("Beatles band", ["Rolling Stones", "Beatles"]) == 0
    assert exact_match("x", []) == 0


def test_answers_of_which_nothing_is_left_match_themselves_alone():
    assert exact_match("the the", ["The The"]) == exact_match("A", ["a"]) == exact_match("!!!", ["!!!"]) == 1
    assert exact_match("the", ["The The"]) == exact_match("", ["A"]) == exact_match("?", ["!!!"]) == 0
    assert f1("", ["The The"]) == f1("a", ["The The"]) == 0


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("New York City", ["New York"], 0.8),  # precision 2/3, recall 1
        ("York York", ["York"], 2 / 3),  # words count with multiplicity
        ("Paris", ["London", "Paris France"], 2 / 3),
        ("Paris", ["London"], 0),
        ("yes", ["yes"], 1),
        ("yes indeed", ["yes"], 0),  # HotpotQA: yes / no score only as a whole
        ("yes", ["yes indeed"], 0),
        ("no", ["no answer"], 0),
        ("", ["Paris"], 0),
    ],
)
def test_f1(prediction, answers, expected):
    assert f1(prediction, answers) == pytest.approx(expected)


OPTIONS = ("Vitamin A", "The plague", "C. difficile", "0.5", "5")


@pytest.mark.parametrize(
    ("reply", "option"),
    [
        ("B", 1), ("b", 1), ("(B)", 1), ("B.", 1), (" B) ", 1), ("B:", 1), ("A", 0), ("a", 0), ("(A)", 0),
        ("The plague", 1), ("plague!", 1), ("B. The plague", 1), ("(B) plague", 1), ("b) Plague.", 1), ("B: plague", 1),
        ("A. Vitamin A", 0), ("C. difficile", 2), ("C difficile", 2), ("C. C. difficile", 2), ("c. DIFFICILE", 2),
        ("0.5", 3), ("5", 4), ("D. 0.5", 3), ("E", 4),
        ("", None), ("F", None), ("A. plague", None), ("C. plague", None), ("(A) The plague", None), ("05", None), ("0,5", None), ("5.0", None),
        ("B or C", None), ("B, C", None), ("Answer: B", None), ("I think B", None), ("plague and flu", None),
        ("the", None), ("AB", None), ("B. ", 1), ("(B", 1), ("B plague", None),
    ],
)  # fmt: skip
def test_a_reply_names_an_option_by_letter_or_text_and_nothing_else(reply, option):
    assert chosen_option(reply, OPTIONS) == option


def test_of_two_letters_neither_is_an_article():
    """An option that is a letter itself, as a vitamin or a blood group."""
    for reply in ("A B", "a b", "A, B"):
        assert chosen_option(reply, ("X", "B", "C")) is None
    assert chosen_option("A plague", ("X", "plague")) == 1


def test_options_that_normalisation_makes_one_are_told_apart_by_their_letters():
    assert chosen_option("+", ("-", "+")) == 1
    assert chosen_option("same", ("same", "same")) is None
    assert chosen_option("B. same", ("same", "same")) == 1


def test_score_is_by_measure_and_by_choice():
    question = Question("q", "q?", ("New York", "NYC"))
    assert score(question, "New York City", "f1") == pytest.approx(0.8)
    assert score(question, "New York City") == score(question, None) == score(question, None, "f1") == 0
    choice = Question("q", "q?", ("The plague", "B"), options=OPTIONS)
    for measure in ("em", "f1"):
        assert score(choice, "B", measure) == score(choice, "plague", measure) == 1
        assert score(choice, "plague vaccine", measure) == score(choice, "Vitamin A", measure) == 0
    letter_a = Question("q", "q?", ("Vitamin A", "A"), options=OPTIONS)
    assert score(letter_a, "A") == 1 and score(letter_a, "") == score(letter_a, "the") == 0


@pytest.mark.parametrize(
    ("reply", "answer", "lenient"),
    [
        ("1951-52", "1951\u201352", 1.0),
        ("Zu\u0308rich", "Z\u00fcrich", 1.0),
        ("\uff11\uff12", "12", 1.0),
        ("\u00abOui\u00bb", "oui", 1.0),
        ("1951 52", "1951\u201352", 0.0),
        ("Zurich", "Z\u00fcrich", 0.0),
        ("!!!", "???", 0.0),
    ],
)
def test_a_lenient_match_sees_no_difference_in_marks_and_forms(reply, answer, lenient):
    assert exact_match(reply, [answer]) == 0.0, "Search-R1 tells them apart"
    assert score(Question("1", "Which?", (answer,)), reply, "lenient") == lenient


def test_the_best_constant_is_right_more_often_than_any_other_reply():
    answers = [("No",), ("yes",), ("no!", "false"), ("Oslo",), ("the no",)]
    questions = [Question(str(i), "Is it?", found) for i, found in enumerate(answers)]
    replies = {text for found in answers for text in found}
    share = {reply: sum(score(q, reply) for q in questions) for reply in replies}
    constant = best_constant(questions)
    assert sum(score(q, constant) for q in questions) == max(share.values()) == 3
    letters = [Question(str(i), "Which?", ("b", "A"), options=("b", "c")) for i in range(3)]
    letters += [Question("9", "Which?", ("x", "B"), options=("b", "x"))]
    assert sum(score(q, best_constant(letters)) for q in letters) == 3


def test_means_are_per_source():
    questions = [Question(str(i), "q?", ("a",), source=source) for i, source in enumerate("xyx")]
    assert mean_by_source(questions, [1, 0, 0]) == {"x": 0.5, "y": 0}


@pytest.mark.parametrize(
    ("turns", "answer"),
    [
        (["<answer> a </answer> <answer>b\nc</answer> <answer> d"], "b\nc"),
        (["<answer> a </answer>", "<search> b </search>"], "a"),
        (["<answer> a", "b </answer>"], None),
        (["<answer></answer>"], ""),
        ([], None),
    ],
)
def test_search_r1_takes_the_last_answer_of_the_dialogue(turns, answer):
    assert search_r1_answer(turns) == answer


@pytest.mark.parametrize(
    ("turns", "ours", "theirs"),
    [
        (["<answer> Oslo </answer>"], 1, 1),
        (["I say <answer> Oslo </answer>"], 0, 1),  # text outside of tags
        (["Oslo </answer>", "<answer> the Oslo! </answer>"], 1, 1),
        (["<think> <answer> Rome </answer> </think> <answer> Oslo </answer>"], 0, 1),
        (["<answer> Oslo </answer> <answer> Rome </answer>"], 0, 0),
        (["<search> Oslo </search>", "no idea"], 0, 0),  # a document says <answer> Oslo </answer>
    ],
)
def test_search_r1_scores_some_dialogues_otherwise(turns, ours, theirs):
    document = Document("0", "Oslo", "<answer> Oslo </answer>")
    environment = SearchEnvironment(Protocol(), BM25Retriever([document]), 1)
    episode = environment.start(Question("q", "Oslo?", ("Oslo", "Kristiania")))
    for turn in turns:
        environment.step([episode], [turn])
    assert (episode.reward, search_r1_em(episode)) == (ours, theirs)


def test_search_r1_matches_what_normalisation_empties_and_scores_choices_as_choices():
    environment = SearchEnvironment(Protocol(), BM25Retriever([Document("0", "a", "b")]), 1)

    def em(question, reply):
        episode = environment.start(question)
        environment.step([episode], [f"<answer> {reply} </answer>"])
        return episode.reward, search_r1_em(episode)

    assert em(Question("q", "q?", ("The The",)), "the") == (0, 1)
    choice = Question("q", "q?", ("The plague", "B"), options=OPTIONS)
    assert em(choice, "(B)") == em(choice, "plague") == (1, 1) and em(choice, "A. plague") == (0, 0)
