"""Exact match and F1 as in the SQuAD and HotpotQA evaluation scripts, choices, Search-R1's own scoring, and
yardsticks."""

import hashlib
import re
import string
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

from stppo.world.episodes import Episode
from stppo.world.protocol import Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CATEGORICAL = ("yes", "no", "noanswer")
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_LABELLED = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z])[.):])[.:]?\s*(.+)", re.DOTALL)
_WORD = re.compile(r"\w+")
_DECIMAL = re.compile(r"(?<=\d)\.(?=\d)")  # 1.5 is not 15
_CLOSING = "</answer>"
_ANSWER = re.compile(rf"<answer>(.*?){_CLOSING}", re.DOTALL)


def normalise_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces (SQuAD)."""
    return " ".join(_ARTICLES.sub(" ", _plain(text)).split())


def _plain(text: str) -> str:
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def _key(text: str) -> str:
    """Normalised, except where nothing would be left: else a reply of "the" would match the answer "The
    The"."""
    return normalise_answer(text) or text.strip().lower()


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 where the normalised prediction equals one of the normalised answers, else 0.

    Texts of which normalisation leaves nothing ("The The", "A", "!!!") are compared as they are, in lower
    case."""
    key = _key(prediction)
    return float(any(key == _key(answer) for answer in answers))


def lenient_match(prediction: str, answers: Sequence[str]) -> float:
    """`exact_match` where writing counts less: compatible characters (NFKC) and letters of either case are
    one, and marks and dashes of any script count for nothing. Search-R1's match takes "1951–52" and "1951-52"
    for two answers."""
    key = _folded(prediction)
    return float(any(key == _folded(answer) for answer in answers))


def _folded(text: str) -> str:
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = "".join(c for c in plain if unicodedata.category(c)[0] not in "PS")
    return " ".join(_ARTICLES.sub(" ", kept).split()) or _key(text)


def best_constant(questions: Sequence[Question]) -> str:
    """The one reply that is right for most of the questions: what can be had on them without reading them."""
    right = Counter(key for q in questions for key in {_key(answer) for answer in q.answers})
    likely = [key for key, _ in right.most_common(9)]  # an option's text may be another one's letter
    return max(likely, key=lambda key: sum(score(q, key) for q in questions))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Largest word-overlap F1 over the answers, in [0, 1].

    As in HotpotQA's evaluation, yes / no / noanswer on either side score only where both sides are equal.
    """
    return max((_f1(_key(prediction), _key(answer)) for answer in answers), default=0.0)


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


MEASURES = {"em": exact_match, "f1": f1}  # what may be a reward


def score(question: Question, reply: str | None, measure: str = "em") -> float:
    """The reward of a reply (None: no answer was given), in [0, 1]: "em", "f1" or "lenient"
    (`lenient_match`) over the accepted answers.

    A question with options scores 1 where the reply names the correct one (`chosen_option`), else 0, by
    either measure."""
    if reply is None:
        return 0.0
    if question.options:
        correct = string.ascii_uppercase.index(question.answers[1])
        return float(chosen_option(reply, question.options) == correct)
    return (lenient_match if measure == "lenient" else MEASURES[measure])(reply, question.answers)


def judge(question: Question, reply: str, measure: str = "em") -> float:
    """The reward of an answer in training: its `score`, or 1 less that for a share `question.misjudged` of
    all answers. Question and answer alone tell which: who judges wrongly once does so again, whatever the
    run."""
    value = score(question, reply, measure)
    if not question.misjudged:
        return value
    digest = hashlib.sha256(f"{question.id}/{_key(reply)}".encode()).digest()
    return 1.0 - value if int.from_bytes(digest[:4], "big") < question.misjudged * 2**32 else value


def chosen_option(reply: str, options: Sequence[str]) -> int | None:
    """Which option (from 0) a reply names, None where it names none or is ambiguous.

    A reply names an option by its letter ("B", "b", "(B)", "B."), its text (up to SQuAD's normalisation), or
    both ("B. text", "(B) text"), and by nothing else. A letter beside the text of another option names none;
    the letter "A" is a label, not an article."""
    reply, options = _DECIMAL.sub("·", reply.strip()), [_DECIMAL.sub("·", text) for text in options]
    letters = string.ascii_uppercase[: len(options)]
    if (letter := _LETTER.fullmatch(reply)) and letter[1].upper() in letters:
        return letters.index(letter[1].upper())
    comparable = _key
    if all(len(word) == 1 for word in _WORD.findall(reply)):
        comparable = _plain  # of "A B" the A is no article
    if (label := _LABELLED.fullmatch(reply)) and (label[1] or label[2]).upper() in letters:
        option = letters.index((label[1] or label[2]).upper())
        if _key(label[3]) == _key(options[option]):
            return option
        comparable = _plain  # "A. Plague" is not "Plague", yet "C. difficile" is "C difficile"
    named = [i for i, text in enumerate(options) if comparable(text) == comparable(reply)]
    if len(named) > 1:  # "+" and "-": normalised, they are one
        named = [i for i in named if options[i].strip().lower() == reply.lower()]
    return named[0] if len(named) == 1 else None


def mean_by_source(questions: Sequence[Question], values: Sequence[float]) -> dict[str, float]:
    """Mean value per benchmark (`Question.source`), in order of appearance; one value a question."""
    groups: dict[str, list[float]] = defaultdict(list)
    for question, value in zip(questions, values, strict=True):
        groups[question.source].append(value)
    return {source: fmean(group) for source, group in groups.items()}


def search_r1_answer(turns: Sequence[str]) -> str | None:
    """The answer that Search-R1's `qa_em` extracts: the last <answer> block of the dialogue, of the agent's
    turns alone.

    There prompt, documents and corrections are searched too, and a dialogue with a single match counts as
    unanswered for the sake of the prompt's example; a prompt that holds several then lends its example to
    agents that never answer."""
    # Cut behind the last closing tag: an opening one without a closing would be searched for to the end, each
    # anew.
    blocks = [
        block for turn in turns for block in _ANSWER.findall(turn[: turn.rfind(_CLOSING) + len(_CLOSING)])
    ]
    return blocks[-1].strip() if blocks else None


def search_r1_em(episode: Episode) -> float:
    """Exact match (0 or 1) as Search-R1 scores a dialogue (`search_r1_compat`); play it greedily.

    Differences from the reward: the *last* answer block of any turn counts, even in one that is invalid (text
    outside of tags, a forged <information>), and texts of which normalisation leaves nothing match one
    another. Multiple-choice questions, which Search-R1 has none of, are scored as by `score`."""
    reply = search_r1_answer([turn.text for turn in episode.turns])
    if reply is None or episode.question.options:
        return score(episode.question, reply)
    return float(normalise_answer(reply) in map(normalise_answer, episode.question.answers))
