"""Multi-turn roll-outs of our worlds as TRL's `rollout_func`; names for users are in `stppo.plugins.trl`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from stppo.plugins import require_host
from stppo.rollout.rollout import RolloutConfig
from stppo.rollout.rollout_torch import TorchRollout
from stppo.world import Question, SearchEnvironment
from stppo.world.scripted import World

require_host("trl")

from trl import GRPOTrainer  # noqa: E402
from trl.models.utils import unwrap_model_for_generation  # noqa: E402


def search_dataset(world: World, split: str = "train") -> Dataset:
    """The world's prompts as TRL wants them, one row a prompt."""
    return Dataset.from_list([{"prompt": prompt} for prompt in _questions(world, (split,))])


def search_reward(completions: list, episode_reward: list[float], **_: Any) -> list[float]:
    """Reward function: what the search environment gave to each of `search_rollout`'s episodes, that of its
    turns added up: TRL credits a completion with one number."""
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

    The roll-out is our own (`stppo.rollout`): one turn for all unfinished episodes, then the environment
    answers. Tokens stay as sampled, observations are tokenised on their own and carry env_mask 0. An episode
    that has no room left for an observation and a whole turn within max_completion_length ends without
    reward. `splits`: those that the trainer's datasets are made of. The trainer's tokenizer reads and writes
    with its chat template where it has one, within the protocol's limits, control tokens of questions and
    documents as text. Reward functions also get `turn_rewards`, of each episode what each turn was paid.

    ValueError for a world with turn_rewards of form=potential, whose sum is the answer's reward. The returned
    function raises ValueError for prompts that are not the world's or exceed max_start_tokens, for options
    under which the recorded log-probs would not be those of the sampling distribution, and for a model with a
    sliding window."""
    questions = _questions(world, splits)
    environment = world.environment
    if environment.turn_rewards is not None and environment.turn_rewards.form == "potential":
        raise ValueError(
            "search_rollout: TRL credits a completion with one number, in which turn_rewards of "
            "form=potential sum to nothing: set form=bonus, or leave turn_rewards out"
        )
    made: list[tuple[GRPOTrainer, _Rooms]] = []  # the last one: it reads the whole vocabulary once

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        _refuse_other_sampling(trainer, environment)
        unknown = [prompt for prompt in prompts if prompt not in questions]
        if unknown:
            raise ValueError(
                f"search_rollout: {unknown[0]!r} is no prompt of the world's {', '.join(splits)} questions; "
                "make the dataset with search_dataset(world)"
            )
        if not made or made[0][0] is not trainer:
            made[:] = [(trainer, _Rooms(environment, trainer))]
        seed = int(torch.randint(2**62, ()))  # of TRL's own stream
        with unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as policy:
            _refuse_windows(policy)
            asked = [questions[prompt] for prompt in prompts]
            played = made[0][1].collect(policy, asked, torch.Generator().manual_seed(seed))
        batch = played.trajectories
        starts, ends = batch.agent_mask.int().argmax(1).tolist(), batch.lengths.tolist()

        turn_rewards = [environment.rewards(episode) for episode in played.episodes]

        def completions(values: Tensor) -> list[list]:
            return [row[s:e].tolist() for row, s, e in zip(values, starts, ends, strict=True)]

        return {
            "prompt_ids": [row[:s].tolist() for row, s in zip(batch.tokens, starts, strict=True)],
            "completion_ids": completions(batch.tokens),
            "logprobs": completions(batch.behaviour_logprobs),
            "env_mask": completions(batch.agent_mask.int()),
            "episode_reward": [*map(sum, turn_rewards)],
            "turn_rewards": turn_rewards,
        }

    return rollout


class _Rooms(TorchRollout):
    """Our roll-out in TRL's terms: room for the completion, whatever the prompt's length."""

    def __init__(self, environment: SearchEnvironment, trainer: GRPOTrainer) -> None:
        config = RolloutConfig(temperature=trainer.temperature, batch_size=trainer.args.generation_batch_size)
        super().__init__(environment, trainer.processing_class, config)
        self.room = trainer.max_completion_length

    def limits(self, prompts: Tensor) -> Tensor:
        return prompts + self.room


def _refuse_windows(policy: PreTrainedModel) -> None:
    kinds = getattr(policy.config, "layer_types", None) or ()
    if "sliding_attention" in kinds:
        raise ValueError(
            f"search_rollout: {policy.config.model_type} attends to a window alone in some layers, which "
            "these roll-outs do not: take a model without, such as Qwen2.5 or Llama"
        )


def _refuse_other_sampling(trainer: GRPOTrainer, environment: SearchEnvironment) -> None:
    args, turn = trainer.args, environment.protocol.max_turn_tokens
    other = "samples from another distribution than the loss scores"
    refused = {  # option -> (whether it is refused, why, what to set instead)
        "top_p": (trainer.top_p not in (1.0, None), other, 1.0),
        "top_k": (trainer.top_k not in (0, None), other, 0),
        "min_p": (trainer.min_p not in (0.0, None), other, 0.0),
        "repetition_penalty": (trainer.repetition_penalty not in (1.0, None), other, 1.0),
        "generation_kwargs": (bool(args.generation_kwargs), "is not read by these roll-outs", None),
        "use_vllm": (
            trainer.use_vllm,
            "is another engine: these roll-outs take transformers",
            False,
        ),
        "mask_truncated_completions": (
            trainer.mask_truncated_completions,
            "would mask every episode, as they end with a closing tag instead of the end token",
            False,
        ),
        "max_completion_length": (trainer.max_completion_length < turn, "is less than one turn", turn),
    }
    for name, (wrong, why, instead) in refused.items():
        if wrong:
            raise ValueError(f"search_rollout: {name}={getattr(args, name)!r} {why}: set {name}={instead}")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "search_rollout: processes play different numbers of turns, which sharded weights do not allow: "
            "run with DDP or in one process"
        )
