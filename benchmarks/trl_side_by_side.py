"""An iteration of GRPO here and in TRL's GRPOTrainer, by turns on one core; run it with an environment that has TRL.

`.venv-engines/bin/python benchmarks/trl_side_by_side.py` prints a Markdown table; `make bench` does so where `make test-engines`
has made that environment. Each iteration plays the same number of trajectories in the same world, from the same warm start, and
makes the same number of updates on them; times are CPU seconds. The learning rate is so small that the policies stay alike. With
`policy=smollm2 policy.trainable_layers=10` both train the same layers, and TRL's other ways to play are left out.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from run import QUIET, Table, measure, ratios, spread
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar, set_verbosity_error
from trl import GRPOConfig, GRPOTrainer

from stppo.config.composition import compose
from stppo.config.loading import load
from stppo.plugins.trl import TurnGRPOConfig, TurnGRPOTrainer, search_dataset, search_reward, search_rollout
from stppo.policy.policy import load_policy
from stppo.training.checkpoint import trained
from stppo.training.trainer import Trainer
from stppo.world.scripted import World

RATE = 1e-6
SETTING = [
    "training=off_policy",
    "algorithm=grpo",
    "training.staleness_iterations=0",
    f"training.learning_rate={RATE}",
]
Iteration = Callable[[], tuple[float, float]]  # CPU seconds, mean agent tokens of a trajectory


def ours(overrides: list[str], start: Path, kernels: str) -> tuple[Iteration, Trainer]:
    config = compose([*overrides, *QUIET, *SETTING, f"training.kernels={kernels}"])
    trainer = Trainer(load(config), start)
    drawn = trainer.batches.sample
    agent_tokens: list[float] = []

    def sample(*made: int) -> Any:
        batch = drawn(*made)
        agent_tokens.append(float(batch.trajectories.n_agent_tokens.double().mean()))
        return batch

    trainer.batches.sample = sample
    trainer.fill_queue()  # `iterate` samples the next batch when it has trained on this one

    def iteration() -> tuple[float, float]:
        began = time.process_time()
        trainer.iterate()
        return time.process_time() - began, agent_tokens[-1]

    return iteration, trainer


class Clock(TrainerCallback):
    """CPU seconds from the beginning of the first step of a call of `train` to the end of its last."""

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 0:
            self.began = time.process_time()

    def on_step_end(self, args, state, control, **_):
        self.ended = time.process_time()


def theirs(
    kind: type, options: type, rollout: Callable, like: Trainer, start: Path, folder: Path, max_tokens: int
) -> Iteration:
    """TRL's trainer at the setting of ours: the batch once a call of `train`, then all epochs on it."""
    training, world, clock = like.settings.training, like.world, Clock()
    minibatch = training.trajectories_per_iteration // training.minibatches
    agent_tokens: list[float] = []

    def counted(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        found = rollout(prompts, trainer)
        agent_tokens.append(sum(map(sum, found["env_mask"])) / len(prompts))
        return found

    model, same = load_policy(start), trained(like.policy)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in same)
    trainer = kind(
        model=model,
        args=options(
            output_dir=str(folder),
            per_device_train_batch_size=minibatch,
            steps_per_generation=training.minibatches,
            num_generations=like.settings.algorithm.objective["credit"]["group_size"],
            num_iterations=training.epochs,
            max_steps=training.epochs * training.minibatches,
            max_completion_length=max_tokens,
            importance_sampling_level="token",
            loss_type="grpo",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            max_grad_norm=1e9,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=10**6,
        ),
        processing_class=world.tokenizer,
        train_dataset=search_dataset(world),
        reward_funcs=search_reward,
        rollout_func=counted,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)

    def iteration() -> tuple[float, float]:
        trainer.train()
        return clock.ended - clock.began, agent_tokens[-1]

    return iteration


def one_by_one(world: World) -> Callable:
    """As `search_rollout`, but an episode begins when the one before it has ended."""
    play = search_rollout(world)

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        found: dict[str, list] = {}
        for prompt in prompts:
            for name, values in play([prompt], trainer).items():
                found.setdefault(name, []).extend(values)
        return found

    return rollout


def tables(overrides: list[str], start: Path, folder: Path, quick: bool) -> Iterator[tuple[str, Table]]:
    warnings.simplefilter("ignore")
    disable_progress_bar()
    set_verbosity_error()
    first, trainer = ours(overrides, start, "auto")
    world = trainer.world
    room = trainer.policy.config.max_position_embeddings - max(
        len(world.tokenizer(row["prompt"])["input_ids"]) for row in search_dataset(world)
    )
    common = (trainer, start, folder, room)
    ways: dict[str, Iteration] = {
        f"here, {trainer.models.kernels}": first,
        "TRL, episodes together": theirs(GRPOTrainer, GRPOConfig, search_rollout(world), *common),
    }
    if trainer.models.kernels == "compiled":
        ways |= {
            "here, eager": ours(overrides, start, "eager")[0],
            "TRL, one episode at a time": theirs(GRPOTrainer, GRPOConfig, one_by_one(world), *common),
            "TRL with the plug-in": theirs(TurnGRPOTrainer, TurnGRPOConfig, search_rollout(world), *common),
        }
    times: dict[str, list[float]] = {way: [] for way in ways}
    tokens: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(2 if quick else 6):
        for way, iteration in ways.items():
            seconds, agent_tokens = iteration()
            if repeat:  # the first one warms up
                times[way].append(seconds)
                tokens[way].append(agent_tokens)
    training = trainer.settings.training
    title = (
        f"GRPO against TRL, {training.trajectories_per_iteration} trajectories, {training.epochs} epochs of "
        f"{training.minibatches} minibatches"
    )
    base = next(iter(times.values()))
    yield (
        title,
        [
            {
                "an iteration": way,
                "CPU seconds": spread(found, 2),
                "against the first": ratios(found, base),
                "agent tokens a trajectory": spread(tokens[way], 1),
            }
            for way, found in times.items()
        ],
    )


if __name__ == "__main__":
    measure(__doc__, tables, "training.epochs=8")
