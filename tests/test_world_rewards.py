import pytest

from stppo.world.rewards import exact_match, f1, normalise_answer


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
