"""What every roll-out engine shares: its settings, where a turn ends, and the buffer trajectories are played
on.

An engine (PyTorch, vLLM) only has to emit the tokens of one turn; prompts, observations, limits and rewards
are handled here, once.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from typing import Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stppo.trajectories import Trajectories
from stppo.world.encoding import DialogueEncoder
from stppo.world.environment import Episode, SearchEnvironment
from stppo.world.protocol import Question


class EngineOutOfMemory(RuntimeError):
    """Memory ran out in an engine that samples, not in the trainer; the message says "out of memory"."""


@plain_dataclass
class Rollout:
    """Sampled trajectories (B rows) and, row by row, the episodes they played.

    weights: (B, T) importance weights of the surrogate's terms, where a correction asks for them. metrics:
    what the engine has to say about itself, columns of the metrics row.
    """

    trajectories: Trajectories
    episodes: list[Episode]
    weights: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(config=ConfigDict(extra="forbid"), frozen=True)
class RolloutConfig:
    """How trajectories are sampled in PyTorch; `temperature` also divides the logits when they are scored.

    max_tokens: of a whole trajectory; one that would exceed it ends unanswered.
    batch_size: trajectories that are sampled at once.
    """

    engine: Literal["torch"] = "torch"
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    max_tokens: int = Field(256, gt=1)
    batch_size: int = Field(256, gt=0)


@dataclass(config=ConfigDict(extra="forbid"), frozen=True)
class VLLMRolloutConfig:
    """How trajectories are sampled by vLLM.

    temperature, max_tokens: as in PyTorch.
    max_num_seqs: trajectories that are decoded at once; the others wait.
    dtype: the engine computes in; "policy" takes what the policy computes in. In half precision an engine
    rounds the weights that it is handed, and small changes by adapters away.
    gpu_memory_utilization: share of the GPU's memory for the engine (weights and KV cache). On a CPU the KV
    cache holds `max_num_seqs` whole trajectories instead.
    sleep_level: what the engine hands back between roll-outs: 0 nothing, 1 the KV cache (weights move to host
    memory), 2 both. Without effect on a CPU.
    enforce_eager: no CUDA graphs: slower decoding, quicker start, less memory.
    sync_tolerance: largest mean |log-prob difference| (nats) to the trainer after a hand-over of weights;
    null takes `vllm_engine.SYNC_TOLERANCE` of the coarser of both dtypes.
    behaviour_logprobs: whose log-probs are recorded as the behaviour policy's: "trainer" scores the
    trajectories again, so that ratios start at 1; "engine" takes what vLLM sampled from.
    importance_correction: "truncated" multiplies each token's term by min(pi_trainer / pi_engine,
    importance_cap)."""

    engine: Literal["vllm"] = "vllm"
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    max_tokens: int = Field(256, gt=1)
    max_num_seqs: int = Field(256, gt=0)
    dtype: Literal["policy", "float32", "bfloat16", "float16"] = "policy"
    gpu_memory_utilization: float = Field(0.4, gt=0, lt=1)
    sleep_level: Literal[0, 1, 2] = 2
    enforce_eager: bool = False
    sync_tolerance: float | None = Field(None, gt=0)
    behaviour_logprobs: Literal["trainer", "engine"] = "trainer"
    importance_correction: Literal["none", "truncated"] = "none"
    importance_cap: float = Field(2.0, ge=1, allow_inf_nan=False)

    def __post_init__(self) -> None:
        if self.importance_correction == "truncated" and self.behaviour_logprobs == "engine":
            raise ValueError(
                "rollout.importance_correction=truncated needs behaviour_logprobs=trainer: with the engine's "
                "log-probs the ratio itself holds the difference"
            )


def at_temperature_one(config: RolloutConfig | VLLMRolloutConfig) -> RolloutConfig | VLLMRolloutConfig:
    """The same settings for evaluation, which is always at temperature 1 (or greedy) and trains on
    nothing."""
    changes: dict = {"temperature": 1.0}
    if config.engine == "vllm":
        changes |= {"behaviour_logprobs": "engine", "importance_correction": "none"}
    return replace(config, **changes)


class TurnEnd:
    """Tells which slots have just closed a turn: a closing tag was completed, or an end token came.

    Works for any tokenizer: only where a token's text could end a tag that began before it are several
    decoded."""

    def __init__(self, encoder: DialogueEncoder) -> None:
        self.tokenizer, self.closing_tags = encoder.tokenizer, encoder.protocol.stop_strings
        self.end_ids = encoder.end_ids
        texts = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])
        # The last entry stands for ids beyond the tokenizer, which padded output layers can emit.
        self.ends = torch.tensor([*(any(tag in text for tag in self.closing_tags) for text in texts), False])
        self.candidate = torch.tensor([*map(self._may_end_tag, texts), False]) & ~self.ends
        self.ends[list(self.end_ids)] = True
        self.tail = max(len(tag) for tag in self.closing_tags)

    def __call__(self, tokens: Tensor, recent: Tensor, open_slots: Tensor) -> Tensor:
        """tokens (n,) just sampled, recent (n, m) tokens of this turn so far; returns closed (n,) bool."""
        closed = self._of(tokens, self.ends)
        for slot in (self._of(tokens, self.candidate) & open_slots).nonzero().flatten().tolist():
            closed[slot] |= self._has_tag(recent[slot])
        return closed

    def first(self, turn: list[int]) -> int | None:
        """How many tokens lead up to the first end in a turn, that one included; None while it is open."""
        ids = torch.tensor(turn, dtype=torch.long)
        for i in self._of(ids, self.candidate | self.ends).nonzero().flatten().tolist():
            if turn[i] in self.end_ids or self._has_tag(ids[: i + 1]):
                return i + 1
        return None

    def _may_end_tag(self, text: str) -> bool:
        beginnings = [text[:i] for i in range(1, len(text) + 1)]
        return any(tag.endswith(part) for tag in self.closing_tags for part in beginnings)

    def _of(self, tokens: Tensor, flags: Tensor) -> Tensor:
        return flags[tokens.clamp(max=len(flags) - 1)]

    def _has_tag(self, recent: Tensor) -> bool:
        text = self.tokenizer.decode(recent[-self.tail :])
        return any(tag in text for tag in self.closing_tags)


class Sampler(ABC):
    """Plays questions with a policy in an environment: `collect`.

    keeps_states: whether `collect` also gives the states of the policy's frozen layers
    (`Trajectories.below`), where it has some and the engine computes them; who trains on a roll-out asks for
    them."""

    keeps_states = False

    def __init__(
        self,
        environment: SearchEnvironment,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig | VLLMRolloutConfig,
        policy: PreTrainedModel | None = None,
        score_tokens: int | None = None,
    ) -> None:
        """policy, score_tokens: for an engine with weights of its own; see `engines.make_rollout`."""
        self.environment, self.tokenizer, self.config = environment, tokenizer, config
        self.encoder = DialogueEncoder(environment.protocol, tokenizer)
        self.turn_end = TurnEnd(self.encoder)

    def limits(self, prompts: Tensor) -> Tensor:
        """Most tokens (n,) of trajectories whose prompts have so many (n,)."""
        return torch.full_like(prompts, self.config.max_tokens)

    def encode(self, text: str) -> list[int]:
        """What the environment says as token ids; it is tokenised once and never merged with agent tokens."""
        return self.encoder.observation(text)

    @abstractmethod
    def collect(
        self,
        policy: PreTrainedModel,
        questions: list[Question],
        generator: torch.Generator,
        group_ids: list[int] | None = None,
        greedy: bool = False,
        policy_updates: int = 0,
        forced: list[list[int]] | None = None,
    ) -> Rollout:
        """Play each question once (repeat a question, with its group id, to sample a group).

        Behaviour log-probs are those of the distribution sampled from: at `temperature`, full vocabulary.
        Under `greedy` the argmax is taken and log-probs are those of temperature 1.
        forced: for each question the first agent tokens of its trajectory, turn after turn; they are taken
        instead of sampled ones while they last (and recorded like them), which continues a trajectory.
        """

    def for_evaluation(self) -> "Sampler":
        """The same sampler with the settings of `at_temperature_one`; an engine is shared."""
        other = copy.copy(self)
        other.config = at_temperature_one(self.config)
        return other

    def without_search(self) -> "Sampler":
        """The same sampler in an environment whose searches find nothing; an engine is shared."""
        other = copy.copy(self)
        other.environment = self.environment.without_search()
        return other

    def close(self) -> None:  # noqa: B027 (PyTorch holds nothing)
        """Give back what an engine holds; the sampler cannot be used afterwards."""


class RolloutBuffer:
    """Trajectories while they are played, one slot (row) each, on the CPU.

    tokens, agent_mask, sentence_ends, logprobs: (n, max_tokens); lengths, limits: (n,) tokens that a slot has
    and may have; episodes: n; turn_ends: of each slot, where the last tokens of its turns stand; below: (n,
    max_tokens, H) states of frozen layers, or None. Raises ValueError where the room is too small for the
    longest prompt and a turn."""

    def __init__(self, sampler: Sampler, questions: list[Question]) -> None:
        self.sampler, n = sampler, len(questions)
        self.max_turn = sampler.environment.protocol.max_turn_tokens
        self.episodes = [sampler.environment.start(question) for question in questions]
        prompts = sampler.encoder.prompts([episode.prompt for episode in self.episodes])
        self.lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.limits = sampler.limits(self.lengths)
        if (self.lengths + self.max_turn > self.limits).any():
            raise ValueError(
                f"rollout.max_tokens={sampler.config.max_tokens} leaves no room for a turn after the longest "
                f"prompt ({int(self.lengths.max())} tokens); raise it"
            )
        limit = int(self.limits.max())
        self.tokens = torch.full((n, limit), sampler.tokenizer.pad_token_id or 0)
        self.agent_mask = torch.zeros(n, limit, dtype=torch.bool)
        self.sentence_ends = torch.zeros_like(self.agent_mask)
        self.logprobs = torch.zeros(n, limit)
        self.turn_ends: list[list[int]] = [[] for _ in questions]
        self.below: Tensor | None = None
        self._write(range(n), [0] * n, prompts)

    def _write(self, slots: Sequence[int], begins: Sequence[int], parts: Sequence[Sequence[int]]) -> None:
        """Token ids into each of the slots, from its column on."""
        written = [
            (slot, begin + i, token)
            for slot, begin, part in zip(slots, begins, parts, strict=True)
            for i, token in enumerate(part)
        ]
        if written:
            rows, columns, tokens = torch.tensor(written).T
            self.tokens[rows, columns] = tokens

    def emit(self, slots: Tensor, turns: Tensor, logprobs: Tensor, counts: Tensor) -> None:
        """Append to each of the slots (n,) the first `counts` (n,) agent tokens of its row of `turns` (n, m)
        and their log-probs."""
        place = torch.arange(turns.shape[1])
        row, column = (place < counts[:, None]).nonzero(as_tuple=True)
        at = slots[row], self.lengths[slots][row] + place[column]
        self.tokens[at], self.logprobs[at] = turns[row, column], logprobs[row, column]
        self.agent_mask[at] = True
        self.lengths[slots] += counts

    def emit_turn(self, slot: int, tokens: Tensor, logprobs: Tensor) -> None:
        """Append a whole turn (m,) to one slot."""
        begin, end = int(self.lengths[slot]), int(self.lengths[slot]) + len(tokens)
        self.tokens[slot, begin:end], self.logprobs[slot, begin:end] = tokens, logprobs
        self.agent_mask[slot, begin:end] = True
        self.lengths[slot] = end

    def environment_turn(self, slots: Tensor, start: Tensor) -> Tensor:
        """Let the environment answer the turns that began at `start` (n,) in `slots` (n,).

        Returns which of `slots` go on, as indices into it.
        """
        environment, encoder = self.sampler.environment, self.sampler.encoder
        stops = environment.protocol.stop_strings
        ids, begins, ends = slots.tolist(), start.tolist(), self.lengths[slots].tolist()
        written = self.tokens[slots, : max(ends)].tolist()
        turns = [tuple(row[begin:end]) for row, begin, end in zip(written, begins, ends, strict=True)]
        marks = []
        for slot, begin, end, turn in zip(ids, begins, ends, turns, strict=True):
            marks += [(slot, begin + i) for i, mark in enumerate(encoder.sentence_ends(turn)) if mark]
            self.turn_ends[slot].append(end - 1)
        if marks:
            self.sentence_ends[tuple(torch.tensor(marks).T)] = True
        texts = [through_first(encoder.turn(turn), stops) for turn in turns]
        observations = environment.step([self.episodes[slot] for slot in ids], texts)
        encoded = iter(encoder.observations([text for text in observations if text is not None]))
        limits = self.limits[slots].tolist()
        keep, observed = [], []
        for row, observation in enumerate(observations):
            if observation is None:
                continue
            part = next(encoded)
            if ends[row] + len(part) + self.max_turn > limits[row]:
                continue  # out of room: the trajectory ends unanswered, with no reward
            keep.append(row)
            observed.append(part)
        self._write([ids[row] for row in keep], [ends[row] for row in keep], observed)
        kept = torch.tensor(keep, dtype=torch.long)
        self.lengths[slots[kept]] += torch.tensor([len(part) for part in observed], dtype=torch.long)
        return kept

    def finish(self, group_ids: list[int], policy_updates: int) -> Trajectories:
        """The trajectories, with what the environment pays on the last token of each turn. ValueError where
        it pays for another number of turns than an episode has."""
        n, width = len(self.episodes), int(self.lengths.max())
        found: list[tuple[int, int, float]] = []
        for row, (episode, ends) in enumerate(zip(self.episodes, self.turn_ends, strict=True)):
            paid = self.sampler.environment.rewards(episode)
            if len(paid) != len(ends):
                raise ValueError(
                    f"{type(self.sampler.environment).__name__}.rewards: {len(paid)} numbers for the "
                    f"{len(ends)} turns of question {episode.question.id}; give one a turn, 0 for nothing"
                )
            found += [(row, end, reward) for end, reward in zip(ends, paid, strict=True)]
        rows, columns, amounts = zip(*found, strict=True)
        rewards = torch.zeros_like(self.logprobs)
        rewards[list(rows), list(columns)] = torch.tensor(amounts, dtype=rewards.dtype)
        return Trajectories(
            tokens=self.tokens[:, :width],
            lengths=self.lengths,
            agent_mask=self.agent_mask[:, :width],
            behaviour_logprobs=self.logprobs[:, :width],
            rewards=rewards[:, :width],
            group_ids=torch.tensor(group_ids),
            policy_updates=torch.full((n,), policy_updates),
            sentence_ends=self.sentence_ends[:, :width],
            below=None if self.below is None else self.below[:, :width],
        )


def through_first(text: str, stops: tuple[str, ...]) -> str:
    """The text up to the end of the first stop string: what shares a token with a closing tag and follows it
    was sampled, and stays in the token ids, but is no part of the action."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text
