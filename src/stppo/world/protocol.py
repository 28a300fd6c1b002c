"""The dialogue between agent and environment: tags, prompt, parsing, rendering.

After Search-R1 (arXiv 2503.09516): the agent may think, then searches or answers; the environment
returns retrieved text between information tags. All texts are this project's own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING, Literal

from stppo.checks import one_of, whole_number
from stppo.files import clean

if TYPE_CHECKING:
    from stppo.retrieval.documents import Document

TAGS = ("think", "search", "information", "answer")
_TAG = re.compile(rf"<(/?)({'|'.join(TAGS)})>")
# Wider than what is parsed, so that nothing resembling a tag survives in retrieved text.
# Possessive, so that white space is never divided in another way.
_TAG_LIKE = re.compile(rf"<\s*+(/?)\s*+({'|'.join(TAGS)})\s*+>", re.IGNORECASE)
_CONTROL_TOKEN = re.compile(r"<([|｜])([^<>|｜]*)\1>")  # of chat models: <|im_end|>, <|eot_id|>, <｜User｜>
_INFORMATION = re.compile(r"</?information>")
_SENTENCE_END = re.compile(rf"[.?!]+|</(?:{'|'.join(TAGS)})>")
_ACTION_TAG = re.compile(r"<(search|answer)>")

SEARCH_R1_PROMPT = (
    "Answer the question below. Whenever you learn something new, first reason about it between <think> and "
    "</think>. If you lack a fact, write a query between <search> and </search>; a search engine then shows "
    "its best results between <information> and </information>. You may search several times. As soon as you "
    "know enough, give only the final answer, as short as possible, between <answer> and </answer>, without "
    "any "
    "explanation; for instance <answer> Mount Everest </answer>.\nQuestion: {question}\n"
)
SEARCH_R1_CORRECTION = (
    "\nThat turn could not be read. To search, write one query between <search> and </search>; "
    "to finish, write the final answer between <answer> and </answer>. Please try again.\n"
)
# For small models and contexts: what the tags do, in a quarter of the words.
SHORT_PROMPT = (
    "Look it up: <search> query </search>, then reply: <answer> short answer </answer>.\n"
    "Question: {question}\n"
)
SHORT_CORRECTION = "\nUse <search> query </search> or <answer> short answer </answer>.\n"
PROMPTS = {
    "search_r1": {"prompt_template": SEARCH_R1_PROMPT, "correction": SEARCH_R1_CORRECTION},
    "short": {"prompt_template": SHORT_PROMPT, "correction": SHORT_CORRECTION},
}


@dataclass(frozen=True)
class Question:
    """One question with every accepted answer.

    gold_paragraphs: (title, text) pairs where known.
    source: the benchmark it comes from, "" in the synthetic world unless it tells hops apart.
    options: texts of a multiple-choice question's options A, B, ...; `answers` then holds the correct one's
    text and its letter, in this order, and `rewards.score` says which replies name it.
    misjudged: share of the answers to it whose reward is wrong, see `rewards.judge`.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    gold_paragraphs: tuple[tuple[str, str], ...] = ()
    hops: int = 1
    source: str = ""
    options: tuple[str, ...] = ()
    misjudged: float = 0.0

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(f"question {self.id}: text is empty")
        if not any(answer.strip() for answer in self.answers):
            raise ValueError(f"question {self.id}: no answer")
        if self.options and self.answers not in zip(self.options, ascii_uppercase, strict=False):
            raise ValueError(
                f"question {self.id}: its options {self.options} hold no right answer, answers are "
                f"{self.answers}; give the right option's text and its letter, in this order"
            )


@dataclass(frozen=True)
class Action:
    """What a turn asks for; `reason` says why it is invalid and is empty otherwise."""

    kind: Literal["search", "answer", "invalid"]
    content: str = ""
    reason: str = ""


def parse_turn(text: str) -> Action:
    """Read one agent turn: at most one <think> block, then exactly one <search> or <answer> block, nothing
    else.

    Anything else (unclosed, nested, repeated, empty or foreign tags, text outside of tags) is an
    `invalid` action with a reason; this never raises. Tags are case-sensitive and hold no spaces.
    """
    blocks: list[tuple[str, str]] = []
    open_tag, position = "", 0
    for match in _TAG.finditer(text):
        closing, tag = match.groups()
        between, position = text[position : match.start()], match.end()
        if tag == "information":
            return _invalid("<information> is written by the environment alone")
        if not open_tag and between.strip():
            return _invalid("text outside of tags")
        if closing:
            if tag != open_tag:
                return _invalid(f"</{tag}> without <{tag}>")
            blocks.append((tag, between.strip()))
            open_tag = ""
        elif open_tag:
            return _invalid(f"<{tag}> inside <{open_tag}>")
        else:
            open_tag = tag
    if open_tag:
        return _invalid(f"<{open_tag}> is not closed")
    if text[position:].strip():
        return _invalid("text outside of tags")
    if blocks and blocks[0][0] == "think":
        blocks = blocks[1:]
    if not blocks:
        return _invalid("neither <search> nor <answer>")
    if len(blocks) > 1:
        return _invalid(f"<{blocks[1][0]}> after <{blocks[0][0]}>: one action a turn")
    kind, content = blocks[0]
    if kind == "think":
        return _invalid("more than one <think>")
    if not content:
        return _invalid(f"empty <{kind}>")
    return Action(kind, content)


def parse_search_r1(text: str) -> Action:
    """Read one turn as Search-R1 does: its first complete <search> or <answer> block, whatever stands around
    it.

    Stricter than Search-R1 in two things: an <information> tag of the agent's own and an empty block are
    `invalid` (there, the first passes and the second searches or answers the empty string). Never raises."""
    if _INFORMATION.search(text):
        return _invalid("<information> is written by the environment alone")
    last = {kind: text.rfind(f"</{kind}>") for kind in ("search", "answer")}
    for match in _ACTION_TAG.finditer(text):
        kind, start = match[1], match.end()
        if start <= last[kind]:  # so it is closed, and nothing is looked for in vain
            content = text[start : text.index(f"</{kind}>", start)].strip()
            return Action(kind, content) if content else _invalid(f"empty <{kind}>")
    return _invalid("no complete <search> or <answer>")


def _invalid(reason: str) -> Action:
    return Action("invalid", reason=reason)


PARSERS = {"strict": parse_turn, "search_r1": parse_search_r1}


def neutralise_tags(text: str) -> str:
    """Clean text in which every protocol tag and chat control token is bracketed (`<search>` → `[search]`,
    `<|im_end|>` → `[|im_end|]`), which no parser takes for an action and no tokenizer for the end of a
    message."""
    text = _TAG_LIKE.sub(lambda match: f"[{match[1]}{match[2]}]", clean(text))
    return _CONTROL_TOKEN.sub(lambda match: f"[{match[1]}{match[2]}{match[1]}]", text)


@dataclass(frozen=True)
class Protocol:
    """The texts and limits of one dialogue; the defaults follow Search-R1.

    Document texts and questions pass through `neutralise_tags`, so only the agent's own turns can hold tags.

    prompt_template: one `{question}`.
    document_template: may use `{index}` (from 1), `{title}`, `{text}`.
    information_template: one `{documents}`.
    correction: the observation after an invalid turn.
    no_result: stands in place of documents where the search found none.
    turn_budget: turns that get an observation; the generation after them must answer.
    parsing: "strict" (`parse_turn`) or "search_r1" (`parse_search_r1`, for pretrained models).
    max_information_words: retrieved text is cut to this many white-space separated words. max_turn_tokens,
    max_observation_tokens, max_start_tokens: most tokens of a turn, of an observation (which is cut) and of
    the prompt. Roll-outs enforce them, through `encoding.DialogueEncoder`: the environment sees no tokens.
    """

    prompt_template: str = SEARCH_R1_PROMPT
    document_template: str = "Doc {index}(Title: {title}) {text}"
    document_separator: str = "\n"
    information_template: str = "\n\n<information>{documents}</information>\n\n"
    correction: str = SEARCH_R1_CORRECTION
    no_result: str = "No document matches this query."
    turn_budget: int = 4
    parsing: str = "strict"
    max_information_words: int = 350
    max_turn_tokens: int = 500
    max_observation_tokens: int = 500
    max_start_tokens: int = 2048

    def __post_init__(self) -> None:
        limits = ("max_information_words", "max_turn_tokens", "max_observation_tokens", "max_start_tokens")
        whole_number(self, "turn_budget", *limits)
        one_of(self, "parsing", PARSERS)
        for name, field in (("prompt_template", "{question}"), ("information_template", "{documents}")):
            if field not in getattr(self, name):
                raise ValueError(f"{name} must contain {field}")

    def parse(self, text: str) -> Action:
        """What an agent turn (its text alone, without the prompt) asks for; never raises."""
        return PARSERS[self.parsing](text)

    @property
    def closing_text(self) -> str:
        """What stands after the documents of an observation; no cut may remove it."""
        return self.information_template.partition("{documents}")[2]

    @property
    def stop_strings(self) -> tuple[str, str]:
        """A turn ends at the first of these."""
        return "</search>", "</answer>"

    def sentence_ends(self, text: str) -> list[int]:
        """Where the sentences of an agent turn end: behind each run of `.?!` and behind each closing tag, as
        counts of characters. The end of the turn always ends one and need not be named. A decimal point or an
        abbreviation ends a sentence too: the rule is simple and the same for every text; a protocol of your
        own may know better."""
        return [match.end() for match in _SENTENCE_END.finditer(text)]

    def prompt(self, question: str) -> str:
        """The text before the first turn; a missing question mark is appended."""
        text = neutralise_tags(question.strip())
        return self.prompt_template.format(question=text if text.endswith("?") else text + "?")

    def information(self, documents: Sequence["Document"]) -> str:
        """The observation after a search: rendered documents, cut to `max_information_words`, without live
        tags."""
        rendered = self.document_separator.join(
            self.document_template.format(index=index, title=document.title, text=document.text)
            for index, document in enumerate(documents, start=1)
        )
        rendered = neutralise_tags(_first_words(rendered, self.max_information_words))
        return self.information_template.format(documents=rendered or self.no_result)


def _first_words(text: str, limit: int) -> str:
    """The text up to its `limit`-th word, white space kept."""
    for count, match in enumerate(re.finditer(r"\S+", text), start=1):
        if count == limit:
            return text[: match.end()]
    return text
