"""Exact match and F1 as in the SQuAD and HotpotQA evaluation scripts."""

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CATEGORICAL = ("yes", "no", "noanswer")


def normalise_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces (SQuAD)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 where the normalised prediction equals one of the normalised answers, else 0."""
    normalised = normalise_answer(prediction)
    return float(any(normalised == normalise_answer(answer) for answer in answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Largest word-overlap F1 over the answers, in [0, 1].

    As in HotpotQA's evaluation, yes / no / noanswer on either side score only where both sides are equal.
    """
    return max(
        (_f1(normalise_answer(prediction), normalise_answer(answer)) for answer in answers), default=0.0
    )


def _f1(prediction: str, answer: str) -> float:
    if prediction == answer:
        return 1.0
    if prediction in _CATEGORICAL or answer in _CATEGORICAL:
        return 0.0
    predicted, gold = prediction.split(), answer.split()
    shared = sum((Counter(predicted) & Counter(gold)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(gold)
    return 2 * precision * recall / (precision + recall)
