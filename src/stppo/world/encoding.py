"""Dialogues as token ids, for one tokenizer: chat template, limits, and what ends a turn. No library is
imported."""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import accumulate
from typing import Any

from stppo.world.protocol import TAGS, Protocol

_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>")  # end a message where the vocabulary has them
_TAGS = {f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")}
# Some templates write today's date: other prompts each day. This one is Llama 3's fallback.
_TODAY = datetime(2024, 7, 26)
_REPLACEMENT = "\ufffd"  # what part of a character decodes to
_REMEMBERED = 4096  # of a kind: questions, observations and half of what a policy writes come up again


def render_prompt(tokenizer: Any, prompt: str) -> str:
    """The prompt as one user message in the tokenizer's chat template, else (it has none) the prompt itself.

    No system message is given; a template may still write its own (Qwen2.5's does), as under Search-R1. To a
    template that asks for the date it is always 26 July 2024.
    """
    if not tokenizer.chat_template:
        return prompt
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True, strftime_now=_TODAY.strftime
    )


class DialogueEncoder:
    """Prompts and observations to token ids, turns to text, within the protocol's limits.

    Each part is tokenised once and on its own; agent tokens are never tokenised. Control tokens in questions
    and documents stay text: the protocol neutralised those of the shape `<|im_end|>`; of others (`</s>`),
    prompts get a space inside and observations are tokenised with special tokens split. The protocol's tags
    are never control tokens, whatever the tokenizer says of them.

    tokenizer: a transformers tokenizer.
    ValueError where `max_observation_tokens` leaves no room for an observation's closing tag.
    """

    def __init__(self, protocol: Protocol, tokenizer: Any) -> None:
        self.protocol, self.tokenizer = protocol, tokenizer
        self._texts: dict[int, str] = {}  # of single tokens, as they come up
        self._prompts: dict[str, array] = {}
        self._observations: dict[str, array] = {}
        self._read = lru_cache(_REMEMBERED)(self._read_once)
        added = tokenizer.added_tokens_decoder.values()
        control = {str(token) for token in added if token.special}
        self._control = sorted({*tokenizer.all_special_tokens, *control} - _TAGS)
        self._hidden = frozenset(tokenizer.convert_tokens_to_ids(self._control))
        self._closing = self._encode(protocol.closing_text)
        if len(self._closing) >= protocol.max_observation_tokens:
            raise ValueError(
                f"max_observation_tokens={protocol.max_observation_tokens} leaves no room before the closing "
                f"tag ({len(self._closing)} tokens); raise it"
            )

    def prompt(self, text: str) -> list[int]:
        """Token ids of a prompt; ValueError where there are more than `max_start_tokens`."""
        return self.prompts([text])[0]

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """`prompt` of each text; one call of the tokenizer for all."""
        return _recall(self._prompts, texts, self._encode_prompts)

    def _encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        rendered = []
        for text in texts:
            for token in self._control:
                text = text.replace(token, f"{token[0]} {token[1:]}")
            rendered.append(render_prompt(self.tokenizer, text))
        found = self.tokenizer(rendered, add_special_tokens=False)["input_ids"] if rendered else []
        for text, ids in zip(texts, found, strict=True):
            if len(ids) > self.protocol.max_start_tokens:
                raise ValueError(
                    f"a prompt of {len(ids)} tokens exceeds "
                    f"max_start_tokens={self.protocol.max_start_tokens}: raise it, "
                    f"or leave that question out: {' '.join(text.split())[-80:]}"
                )
        return found

    def observation(self, text: str) -> list[int]:
        """Token ids of an observation, at most `max_observation_tokens`: cut before its closing tag, never in
        it."""
        return self._within_limit(text, self._encode(text))

    def observations(self, texts: Sequence[str]) -> list[list[int]]:
        """`observation` of each text; one call of the tokenizer for all, which is what is fast."""
        return _recall(self._observations, texts, self._encode_observations)

    def _encode_observations(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._within_limit(text, ids) for text, ids in zip(texts, self._encode(texts), strict=True)]

    def written(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of turns that something else than a policy wrote, such as a scripted agent."""
        return self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []

    def _within_limit(self, text: str, ids: list[int]) -> list[int]:
        limit = self.protocol.max_observation_tokens
        if len(ids) <= limit:
            return ids
        closing = self._closing if text.endswith(self.protocol.closing_text) else []
        kept = ids[: limit - len(closing)]
        while kept and self.tokenizer.decode(kept[-4:]).endswith(_REPLACEMENT):  # a character cut in two
            kept.pop()
        return kept + closing

    def turn(self, ids: Sequence[int]) -> str:
        """Text of an agent turn for the environment, without control tokens."""
        return self._read(tuple(map(int, ids)))[0]

    def sentence_ends(self, ids: Sequence[int]) -> list[bool]:
        """For each token of an agent turn, whether a sentence ends in it, by the protocol's rule. Tokens are
        read one by one, so that a character of several tokens is unreadable: the rule's marks are of one byte
        each."""
        return list(self._read(tuple(map(int, ids)))[1])

    def _read_once(self, ids: tuple[int, ...]) -> tuple[str, list[bool]]:
        for token in set(ids) - self._texts.keys():
            self._texts[token] = self.tokenizer.decode([token])
        texts = [self._texts[token] for token in ids]
        stops, ends = list(accumulate(map(len, texts))), [False] * len(ids)
        for place in self.protocol.sentence_ends("".join(texts)):
            ends[bisect_left(stops, place)] = True
        return self.tokenizer.decode([token for token in ids if token not in self._hidden]), ends

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end a turn besides the closing tags: the tokenizer's end token and a message's."""
        added = self.tokenizer.get_added_vocab()
        ids = {added[token] for token in _END_TOKENS if token in added}
        return frozenset(ids | ({self.tokenizer.eos_token_id} - {None}))

    def _encode(self, text: str | Sequence[str]) -> list:
        """Token ids of a text, or of each of several."""
        if not isinstance(text, str) and not text:
            return []
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def _recall(
    known: dict[str, array], texts: Sequence[str], encode: Callable[[Sequence[str]], list[list[int]]]
) -> list[list[int]]:
    """What `encode` gives for each text; asked only for those that `known` does not hold yet."""
    new = [text for text in dict.fromkeys(texts) if text not in known]
    found = {text: array("q", ids) for text, ids in zip(new, encode(new), strict=True)} if new else {}
    if len(known) + len(found) > _REMEMBERED:
        found |= {text: known[text] for text in texts if text in known}
        known.clear()
    known.update(found)
    return [known[text].tolist() for text in texts]
