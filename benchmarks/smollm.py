"""CPU seconds and memory of an iteration with SmolLM2-135M: python benchmarks/smollm.py [OVERRIDE...], after `stppo fetch smollm2`.

64 trajectories of about 132 tokens, 21 of them the agent's, in two turns. What the agent writes is given (`forced`) and the
passages are made up, so that an iteration costs the same whatever the policy knows.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from run import Table, keep, markdown

from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.policy.policy import load_policy, load_tokenizer
from stppo.retrieval.documents import Document
from stppo.rollout.rollout_torch import TorchRollout
from stppo.training.checkpoint import trained
from stppo.training.gradients import Passes
from stppo.training.metrics import peak_memory_mb
from stppo.training.models import make_models
from stppo.training.optimizers import make_optimizer
from stppo.training.updates import CriticUpdates, PolicyUpdates
from stppo.world.environment import SearchEnvironment
from stppo.world.protocol import Protocol, Question

TRAJECTORIES, STEPS_OF_THE_LONGEST = 64, 24
OVERRIDES = [
    "algorithm=token_ppo",
    "policy=smollm2",
    "rollout.max_tokens=200",
    f"training.trajectories_per_iteration={TRAJECTORIES}",
    "training.epochs=4",
    "training.minibatches=4",
    "training.bias_norm_every=15",
    "training.learning_rate=1e-5",
    "training.critic_learning_rate=1e-5",
]
WORDS = [
    "river",
    "city",
    "north",
    "was",
    "born",
    "king",
    "album",
    "film",
    "1987",
    "county",
    "football",
    "season",
    "award",
    "wrote",
    "company",
    "married",
]


class Library:
    """A retriever of made-up passages."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def search(self, queries, top_k):
        return [
            [(Document("0", self.words(3), self.words(self.rng.randrange(42, 60))), 1.0)] for _ in queries
        ]

    def words(self, n):
        return " ".join(self.rng.choice(WORDS) for _ in range(n))


def iteration(overrides: list[str]) -> tuple[str, Table]:
    """Title and rows: CPU seconds of each part, and the most memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = compose([*OVERRIDES, *overrides])
    run = load(config).settings
    objective = build(config["algorithm"]["objective"], "algorithm.objective")
    training = run.training
    policy, tokenizer = load_policy("smollm2"), load_tokenizer("smollm2")
    models = make_models(policy, "smollm2", run, objective.credit.needs_critic)
    passes = Passes(training.micro_batch_tokens, training.length_chunks)
    rng, library = random.Random(1), Library()
    protocol = Protocol(
        prompt_template="Question: {question}\n",
        document_template="{title}: {text}",
        max_information_words=60,
        max_turn_tokens=STEPS_OF_THE_LONGEST,
        turn_budget=1,
    )
    sampler = TorchRollout(SearchEnvironment(protocol, library, 1), tokenizer, run.rollout)
    sampler.keeps_states = True
    questions = [
        Question(str(i), library.words(rng.randrange(6, 14)), ("Paris",)) for i in range(TRAJECTORIES)
    ]
    turns = [
        f"<search> {library.words(rng.choice([2, 3, 4, 14 if i % 16 == 0 else 5]))} </search>"
        f"<answer> {library.words(rng.choice([1, 2, 3]))} </answer>"
        for i in range(TRAJECTORIES)
    ]
    forced = tokenizer(turns, add_special_tokens=False)["input_ids"]
    seconds = {}

    def timed(name, act):
        began = time.process_time()
        found = act()
        seconds[name] = time.process_time() - began
        return found

    generator = torch.Generator().manual_seed(0)
    rollout = timed(
        "roll-out", lambda: sampler.collect(models.policy, questions, generator, forced=forced)
    ).trajectories
    batch = timed("frozen layers", lambda: models.with_states(rollout))
    reference = timed("reference", lambda: models.reference_logprobs(batch, passes, 1.0))
    if models.critic is not None:
        adam = make_optimizer("adam", list(trained(models.critic).values()), training.critic_learning_rate)
        critic = CriticUpdates(models.critic, adam, training, passes)
        values = timed("values", lambda: critic.values(batch))
        returns = torch.where(batch.agent_mask, torch.rand(values.shape), 0.0)
        arguments = batch, returns, batch.agent_mask, values, generator, 0, 0
        timed("critic", lambda: critic.regress(*arguments))
    adam = make_optimizer("adam", list(trained(models.policy).values()), training.learning_rate)
    updates = PolicyUpdates(models.policy, adam, objective, training, passes, 1.0, None)
    advantages = torch.where(batch.agent_mask, torch.randn(batch.tokens.shape), 0.0)

    def epochs():
        update = 0
        for epoch in range(training.epochs):
            size = TRAJECTORIES // training.minibatches
            for minibatch, rows in enumerate(torch.randperm(TRAJECTORIES).split(size)):
                update += 1
                row = {"update": update, "iteration": 1, "epoch": epoch, "minibatch": minibatch}
                old = None if reference is None else reference[rows]
                updates.step(row, batch.select(rows), advantages[rows], old, None)

    timed("updates", epochs)
    tokens, own = (float(n.float().mean()) for n in (batch.lengths, batch.n_agent_tokens))
    title = f"SmolLM2, {TRAJECTORIES} trajectories of {tokens:.0f} tokens, {own:.0f} of them the agent's"
    seconds["together"] = sum(seconds.values())
    rows = [{"part": part, "measured": f"{value:.1f} CPU s"} for part, value in seconds.items()]
    return title, [*rows, {"part": "most memory", "measured": f"{peak_memory_mb() / 1024:.2f} GiB"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the table, hardware and versions here")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. policy.trainable_layers=10")
    arguments = parser.parse_args()
    title, rows = iteration(arguments.overrides)
    title = ", ".join([title, *arguments.overrides])
    print(markdown(title, rows))
    keep(arguments.json, {title: rows})


if __name__ == "__main__":
    main()
