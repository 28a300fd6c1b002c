"""Multi-turn roll-outs of our worlds as TRL's `rollout_func`; names for users are in `stppo.plugins.trl`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from stppo.plugins import require_host
from stppo.rollout.rollout import through_first
from stppo.world import DialogueEncoder, Episode, Question, SearchEnvironment
from stppo.world.scripted import World

require_host("trl")

from trl import GRPOTrainer  # noqa: E402
from trl.models.utils import unwrap_model_for_generation  # noqa: E402


def search_dataset(world: World, split: str = "train") -> Dataset:
    """The world's prompts as TRL wants them, one row a prompt."""
    return Dataset.from_list([{"prompt": prompt} for prompt in _questions(world, (split,))])


def search_reward(completions: list, episode_reward: list[float], **_: Any) -> list[float]:
    """Reward function: what the search environment gave to each of `search_rollout`'s episodes."""
    return episode_reward


def _questions(world: World, splits: tuple[str, ...]) -> dict[str, Question]:
    """Prompt -> question; of questions with the same prompt the first."""
    questions: dict[str, Question] = {}
    for split in splits:
        for question in world.questions(split):
            questions.setdefault(world.environment.protocol.prompt(question.text), question)
    return questions


def search_rollout(
    world: World, splits: tuple[str, ...] = ("train",)
) -> Callable[[list[str], GRPOTrainer], dict[str, list]]:
    """A `rollout_func` that plays the world's search environment with the policy being trained.

    Each round generates one turn for all unfinished episodes with transformers' `generate`, then lets the
    environment answer. Tokens stay as sampled, observations are tokenised on their own and carry env_mask 0.
    An episode that has no room left for an observation and a whole turn within max_completion_length ends
    without reward. `splits`: those that the trainer's datasets are made of. The trainer's tokenizer reads and
    writes as in our own roll-outs (`DialogueEncoder`): with its chat template where it has one, within the
    protocol's limits, control tokens of questions and documents as text.

    The returned function raises ValueError for prompts that are not the world's or exceed max_start_tokens,
    and for options under which the recorded log-probs would not be those of the sampling distribution."""
    questions = _questions(world, splits)
    environment = world.environment

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        _refuse_other_sampling(trainer, environment)
        unknown = [prompt for prompt in prompts if prompt not in questions]
        if unknown:
            raise ValueError(
                f"search_rollout: {unknown[0]!r} is no prompt of the world's {', '.join(splits)} questions; "
                "make the dataset with search_dataset(world)"
            )
        episodes = [environment.start(questions[prompt]) for prompt in prompts]
        encoder = DialogueEncoder(environment.protocol, trainer.processing_class)
        tokens = _Tokens(encoder, episodes)
        with (
            torch.no_grad(),
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as policy,
            _plain_sampling(policy, trainer.processing_class.pad_token_id, environment),
        ):
            running = list(range(len(episodes)))
            while running:
                turns = _generate_turns(policy, trainer, encoder, [tokens.context(i) for i in running])
                for i, (ids, logprobs) in zip(running, turns, strict=True):
                    tokens.add(i, ids, logprobs)
                stops = environment.protocol.stop_strings
                texts = [through_first(encoder.turn(ids), stops) for ids, _ in turns]
                observations = environment.step([episodes[i] for i in running], texts)
                room = trainer.max_completion_length - environment.protocol.max_turn_tokens
                running = [
                    i
                    for i, observation in zip(running, observations, strict=True)
                    if observation is not None and tokens.observe(i, observation, room)
                ]
        return {
            "prompt_ids": tokens.prompts,
            "completion_ids": tokens.completions,
            "logprobs": tokens.logprobs,
            "env_mask": tokens.mask,
            "episode_reward": [episode.reward for episode in episodes],
        }

    return rollout


@contextmanager
def _plain_sampling(policy, pad: int, environment: SearchEnvironment) -> Iterator[None]:
    """Nothing but softmax sampling: checkpoints bring defaults, such as a repetition penalty, that `generate`
    would put in wherever an option is not given."""
    before = policy.generation_config
    policy.generation_config = GenerationConfig(
        do_sample=True,
        top_k=0,  # the temperature is the recorder's
        max_new_tokens=environment.protocol.max_turn_tokens,
        pad_token_id=pad,
    )
    try:
        yield
    finally:
        policy.generation_config = before


def _refuse_other_sampling(trainer: GRPOTrainer, environment: SearchEnvironment) -> None:
    wanted = {
        "top_p": (1.0, None),
        "top_k": (0, None),
        "min_p": (0.0, None),
        "repetition_penalty": (1.0, None),
    }
    for name, allowed in wanted.items():
        if getattr(trainer, name) not in allowed:
            raise ValueError(
                f"search_rollout: {name}={getattr(trainer, name)!r} samples from another distribution than "
                f"the loss scores: set {name}={allowed[0]}"
            )
    if trainer.args.generation_kwargs:
        raise ValueError("search_rollout: samples without generation_kwargs: set generation_kwargs=None")
    if trainer.use_vllm:
        raise ValueError("search_rollout: generates with transformers, not with vLLM: set use_vllm=False")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "search_rollout: processes play different numbers of turns, which sharded weights do not allow: "
            "run with DDP or in one process"
        )
    if trainer.mask_truncated_completions:
        raise ValueError(
            "search_rollout: mask_truncated_completions=True would mask every episode, as they end with a "
            "closing tag instead of the end token: set it to False"
        )
    if environment.protocol.max_turn_tokens > trainer.max_completion_length:
        raise ValueError(
            f"search_rollout: max_completion_length={trainer.max_completion_length} is less than one turn "
            f"(max_turn_tokens={environment.protocol.max_turn_tokens}): raise it"
        )


class _Tokens:
    """The token ids of many episodes, per episode: prompt, completion, its log-probs and mask."""

    def __init__(self, encoder: DialogueEncoder, episodes: list[Episode]) -> None:
        self.encoder = encoder
        self.prompts = encoder.prompts([episode.prompt for episode in episodes])
        self.completions: list[list[int]] = [[] for _ in episodes]
        self.logprobs: list[list[float]] = [[] for _ in episodes]
        self.mask: list[list[int]] = [[] for _ in episodes]

    def context(self, i: int) -> list[int]:
        return self.prompts[i] + self.completions[i]

    def add(self, i: int, ids: list[int], logprobs: list[float]) -> None:
        self.completions[i] += ids
        self.logprobs[i] += logprobs
        self.mask[i] += [1] * len(ids)

    def observe(self, i: int, observation: str, room: int) -> bool:
        """Append an observation if the completion then has at most `room` tokens."""
        ids = self.encoder.observation(observation)
        fits = len(self.completions[i]) + len(ids) <= room
        if fits:
            self.completions[i] += ids
            self.logprobs[i] += [0.0] * len(ids)
            self.mask[i] += [0] * len(ids)
        return fits


def _generate_turns(
    policy, trainer: GRPOTrainer, encoder: DialogueEncoder, contexts: list[list[int]]
) -> list[tuple[list[int], list[float]]]:
    """One sampled turn, as (token ids, log-probs), after each context."""
    pad = trainer.processing_class.pad_token_id
    width = max(map(len, contexts))
    padded = [[pad] * (width - len(ids)) + ids for ids in contexts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in contexts]
    device = trainer.accelerator.device
    recorder = _Recorder(trainer.temperature)
    end = _TurnEnd(recorder, trainer, encoder, len(contexts), width)
    sequences = policy.generate(
        input_ids=torch.tensor(padded, device=device),
        attention_mask=torch.tensor(mask, device=device),
        logits_processor=[recorder],
        stopping_criteria=[end],
    )
    logprobs = torch.stack(end.logprobs, 1)
    return [
        (row[width : width + length].tolist(), logprob[:length].tolist())
        for row, logprob, length in zip(sequences, logprobs, end.lengths.tolist(), strict=True)
    ]


class _Recorder(LogitsProcessor):
    """Turns logits into log-probs at a temperature and keeps those of the latest step."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log_probs = torch.log_softmax(scores.float() / self.temperature, -1)
        return self.log_probs


class _TurnEnd(StoppingCriteria):
    """Ends a turn at a stop string or an end token; counts its tokens, the last one included.

    transformers' own criterion for stop strings cannot read tokenizers whose tokens are whole words.
    """

    def __init__(
        self, recorder: _Recorder, trainer: GRPOTrainer, encoder: DialogueEncoder, n: int, width: int
    ):
        self.recorder, self.strings, self.width = recorder, encoder.protocol.stop_strings, width
        self.tokenizer, self.eos = encoder.tokenizer, encoder.end_ids | set(trainer.eos_token_ids)
        device = trainer.accelerator.device
        self.done = torch.zeros(n, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(n, dtype=torch.long, device=device)
        self.logprobs: list[Tensor] = []  # (n,) each

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        newest = input_ids[:, -1]
        self.logprobs.append(self.recorder.log_probs.gather(1, newest[:, None]).squeeze(1))
        self.lengths += ~self.done
        for slot in (~self.done).nonzero().flatten().tolist():
            self.done[slot] = int(newest[slot]) in self.eos or self._closes(input_ids[slot, self.width :])
        return self.done

    def _closes(self, turn: Tensor) -> bool:
        if not any(string[-1] in self.tokenizer.decode(turn[-1:]) for string in self.strings):
            return False
        tail = self.tokenizer.decode(turn[-max(map(len, self.strings)) :])
        return any(string in tail for string in self.strings)
