"""The off-policy training loop: roll out, queue, score, several epochs of minibatch updates, evaluate.

Off-policy on purpose: a batch is reused for `epochs` passes, and a queue trains on batches that are
`staleness_iterations` old. Everything random comes from one generator that is part of `Trainer.state`, so a
run that goes on from it repeats an uninterrupted one bit for bit on the CPU. Folder, lock and record of a
run: `training.run`.

Batches, credit and objective live on the CPU; the models compute on `training.device`.
"""

import functools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stppo.config.loading import LoadedRun
from stppo.objectives.advantages import Credit
from stppo.policy.critic import explained_variance
from stppo.policy.policy import check_vocabulary, load_tokenizer
from stppo.record.schema import UPDATE_COLUMNS, Row
from stppo.rollout.engines import make_rollout
from stppo.rollout.rollout import Sampler
from stppo.training.asynchronous import AsynchronousBatches
from stppo.training.batches import Batches, QueuedBatch, check_values
from stppo.training.checkpoint import restore, restore_optimizer, trained
from stppo.training.controls import ReplayedDivisors
from stppo.training.gradients import Passes
from stppo.training.loggers import Loggers
from stppo.training.metrics import as_columns, as_rows, evaluate
from stppo.training.models import logprobs, make_models
from stppo.training.optimizers import make_optimizer
from stppo.training.updates import CriticUpdates, PolicyUpdates
from stppo.training.warm_start import evaluation_questions, load_warm_start, made_for
from stppo.trajectories import Trajectories
from stppo.waiting import saying


class Trainer:
    """The loop of one run: `iterations` trains it to the end, `state` and `take_up` carry it over an
    interruption.

    run: what `config.loading.load` gives. start: folder of the warm start. Raises ConfigError or ValueError
    for invalid input, before training."""

    def __init__(self, run: LoadedRun, start: Path) -> None:
        torch.set_num_threads(1)  # runs are parallel, not threads; and sums keep one order
        self.config, self.settings = run.config, run.settings
        self.objective, self.world = run.objective, run.world
        training, self.divisors = self.settings.training, None
        if training.divisors.from_run is not None:
            self.divisors = ReplayedDivisors(training, self.objective, self.settings.seed)
        check_values(self.settings, self.objective)
        with saying("reading the world's questions"):
            self.evaluation_questions = evaluation_questions(self.world, self.settings.evaluation.questions)

        torch.manual_seed(self.settings.seed)
        self.generator = torch.Generator().manual_seed(self.settings.seed)
        with saying(f"reading the weights of {start}"):
            policy, self.warm_start, self.start_weights = load_warm_start(
                start, self.settings.policy.attention
            )
        if self.warm_start.get("made_for") != made_for(self.config):
            raise ValueError(
                f"warm start {start} was made for another world or policy; make one for this config with "
                "`stppo warm-start`"
            )
        self.tokenizer = self.world.tokenizer
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(start)
        check_vocabulary(policy, self.tokenizer)
        learns_values = self.objective.credit.needs_critic and training.values == "critic"
        with saying("placing policy, reference and critic"):
            self.models = make_models(policy, start, self.settings, learns_values)
        self.policy, self.critic = self.models.policy, self.models.critic
        self.reference = self.models.reference
        self.passes = Passes(training.micro_batch_tokens, training.length_chunks)
        self.parameters = list(trained(self.policy).values())
        self.optimizer = make_optimizer(training.optimizer, self.parameters, training.learning_rate)
        self.policy_updates = PolicyUpdates(
            self.policy,
            self.optimizer,
            self.objective,
            training,
            self.passes,
            self.settings.rollout.temperature,
            self.divisors,
        )
        if self.critic is not None:
            kind = "adam8bit" if training.optimizer == "adam8bit" else "adam"
            self.critic_optimizer = make_optimizer(
                kind, list(trained(self.critic).values()), training.critic_learning_rate
            )
            self.critic_updates = CriticUpdates(self.critic, self.critic_optimizer, training, self.passes)

        self.iteration = self.update = 0
        self.is_whole = True  # between iterations, or after all updates of one
        kind = Batches if training.staleness is None else AsynchronousBatches
        self.batches = kind(run, self.policy, self.generator, lambda: self.sampler, self.critic is not None)
        self.queue = self.batches.queue
        self.update_rows: list[dict[str, float]] = []
        self.evaluation_rows: list[dict[str, float]] = []
        self.loggers = Loggers((), Path())  # until the run that this is part of has its own

    @functools.cached_property
    def sampler(self) -> Sampler:
        """Made at first use: vLLM takes minutes to start, which a checkpoint that does not fit need not
        cost."""
        training, rollout = self.settings.training, self.settings.rollout
        budget = training.micro_batch_tokens
        with saying(f"starting the engine that samples ({rollout.engine})"):
            return make_rollout(self.world.environment, self.tokenizer, rollout, self.policy, budget)

    @functools.cached_property
    def evaluator(self) -> Sampler:
        return self.sampler.for_evaluation()

    def close(self) -> None:
        """End the engine that samples, where one was started."""
        if "sampler" in self.__dict__:
            self.sampler.close()

    # ---- the loop -------------------------------------------------------------------------------

    def iterations(self) -> Iterator[bool]:
        """Train to the end; yields after each iteration whether it was evaluated. FloatingPointError where a
        number is not finite, which a roll-out raises too, on its logits."""
        if self._evaluation_is_due():
            with saying(f"evaluating the start on {len(self.evaluation_questions)} questions"):
                self._evaluate()
        with saying("sampling the first batches"):
            self.fill_queue()
        while self.iteration < self.settings.training.iterations:
            yield self.iterate()

    def iterate(self) -> bool:
        """Train on the oldest batch of the queue, evaluate where it is due, and sample the next batch;
        whether it was evaluated."""
        self._train_on(self.queue.popleft())
        if evaluated := self._evaluation_is_due():
            self._evaluate()
        self.fill_queue()
        return evaluated

    def _train_on(self, queued: QueuedBatch) -> None:
        """All updates of one batch, and the critic's before them."""
        training = self.settings.training
        self.is_whole = False
        began = time.perf_counter()
        batch = self.models.with_states(queued.trajectories)
        values = self._values(queued, batch)
        reference = self.models.reference_logprobs(batch, self.passes, self.settings.rollout.temperature)
        credit = self.objective.credit(batch, values)
        shared = {"discarded_groups": 0, **queued.metrics} | {
            "advantage_raw_std": float(credit.raw_std),
            "seconds_scoring": queued.metrics["seconds_scoring"] + time.perf_counter() - began,
            "staleness_iterations": self.iteration - queued.iteration,
            **self._train_critic(queued, batch, credit, values),
        }
        self.iteration += 1
        proximal, begun = None, self.update
        if self.objective.surrogate.proximal == "scored":
            proximal = logprobs(self.policy, batch, self.passes, self.settings.rollout.temperature)
        for epoch, minibatch, rows, turn in self._minibatches(batch, credit.kept):
            row = Row(UPDATE_COLUMNS, shared)
            row |= {"iteration": self.iteration, "epoch": epoch, "minibatch": minibatch}
            self.update_rows.append(row)
            weights = None if queued.weights is None else queued.weights[rows]
            if turn is not None:
                on = (batch.turn_ids[rows] == turn).float()
                weights = on if weights is None else weights * on
            self.update += 1
            row["update"] = self.update
            self.policy_updates.step(
                row,
                batch.select(rows),
                credit.advantages[rows],
                None if reference is None else reference[rows],
                weights,
                None if proximal is None else proximal[rows],
                begun,
            )
            self.loggers.update_row(row)
            if training.target_kl is not None and row["kl_behaviour_k3"] > training.target_kl:
                break
            if self.objective.stabilizer.ends_iteration(row):
                break
        self.is_whole = True

    def _train_critic(
        self, queued: QueuedBatch, batch: Trajectories, credit: Credit, values: Tensor | None
    ) -> dict[str, float]:
        """Regress the critic on the credit's returns; its columns of the metrics row, NaN without a
        critic."""
        names = ("critic_loss", "critic_explained_variance", "critic_value_rmse", "true_value_std")
        row = dict.fromkeys(names, math.nan) | {"seconds_critic": 0.0}
        if self.critic is None:
            return row
        began = time.perf_counter()
        if queued.truth is not None:
            row["critic_value_rmse"], row["true_value_std"] = queued.truth.error(values, batch.layout)
        row["critic_explained_variance"] = explained_variance(values, credit.returns, credit.value_mask)
        row["critic_loss"] = self.critic_updates.regress(
            *(batch, credit.returns, credit.value_mask, values, self.generator, self.update, self.iteration),
            passes=self.objective.credit.critic_passes,
        )
        return row | {"seconds_critic": time.perf_counter() - began}

    def _minibatches(
        self, batch: Trajectories, kept: Tensor | None
    ) -> Iterator[tuple[int, int, Tensor, int | None]]:
        """Epoch, minibatch, its rows, and the turn that it trains on (None: all); an epoch that is not
        reached draws no random numbers. kept (B,) bool: the rows to train on, None: all. Minibatches without
        that turn are left out."""
        training = self.settings.training
        rows = torch.arange(len(batch)) if kept is None else kept.nonzero().squeeze(1)
        size = -(-len(rows) // training.minibatches)
        turns: list[int | None] = [None]
        if self.objective.surrogate.one_turn_at_a_time:
            turns = list(reversed(range(int(batch.n_turns.max()))))
        for epoch in range(training.epochs):
            parts = (
                (part, turn)
                for turn in turns
                for part in rows[torch.randperm(len(rows), generator=self.generator)].split(size)
                if turn is None or (batch.n_turns[part] > turn).any()
            )
            for minibatch, (part, turn) in enumerate(parts):
                yield epoch, minibatch, part, turn

    def fill_queue(self) -> None:
        """Sample what is to wait in the queue, but nothing that would not be trained on."""
        left = self.settings.training.iterations - self.iteration
        self.batches.fill(self.iteration, self.update, left)

    def _values(self, queued: QueuedBatch, batch: Trajectories) -> Tensor | None:
        """(B, T) values that the credit reads, of the queued batch as it is trained on; None where it reads
        none."""
        if self.critic is not None:
            return self.critic_updates.values(batch)
        return None if queued.truth is None else queued.truth.per_token(queued.trajectories)

    # ---- evaluation -----------------------------------------------------------------------------

    def _evaluation_is_due(self) -> bool:
        done = bool(self.evaluation_rows) and self.evaluation_rows[-1]["iteration"] == self.iteration
        last = self.iteration == self.settings.training.iterations
        return not done and (last or self.iteration % self.settings.evaluation.every == 0)

    def _evaluate(self) -> None:
        """Sampled, and every `greedy_every` iterations greedy, on the fixed held-out questions."""
        settings = self.settings.evaluation
        kinds = [True] if self.iteration % settings.greedy_every == 0 else []
        if self.iteration == self.settings.training.iterations:
            kinds = [True]
        rows = []
        for greedy in [*kinds, False]:  # sampled last, so that the newest row is the primary metric
            seed = self.settings.seed * 1_000_003 + self.iteration
            row, _ = evaluate(self.evaluator, self.policy, self.evaluation_questions, greedy, seed)
            rows.append({"iteration": self.iteration, "update": self.update} | row)
        self.evaluation_rows += rows
        for row in rows:
            self.loggers.evaluation_row(row)

    # ---- what an interruption must not lose -----------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain values, containers and tensors, as `checkpoint.save_checkpoint` takes them."""
        return {
            "iteration": self.iteration,
            "update": self.update,
            "policy": trained(self.policy),
            "optimizer": self.optimizer.state_dict(),
            "critic": self.critic and trained(self.critic),
            "critic_optimizer": self.critic and self.critic_optimizer.state_dict(),
            "generator": self.generator.get_state(),
            **self.batches.state(),
            "update_rows": as_columns(self.update_rows),
            "evaluation_rows": self.evaluation_rows,
        }

    def take_up(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self.iteration, self.update = state["iteration"], state["update"]
        restore(self.policy, state["policy"])
        restore_optimizer(self.optimizer, state["optimizer"])
        if self.critic is not None:
            restore(self.critic, state["critic"])
            restore_optimizer(self.critic_optimizer, state["critic_optimizer"])
        self.generator.set_state(state["generator"])
        self.batches.take_up(state)
        self.update_rows, self.evaluation_rows = as_rows(state["update_rows"]), state["evaluation_rows"]
        self.policy_updates.remember(self.update_rows)
