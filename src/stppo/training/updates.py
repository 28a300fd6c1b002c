"""One optimiser step of the policy, with everything it records, and a pass of the critic."""

import bisect
import math
import time
from collections.abc import Iterable
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stppo.config.files import ConfigError
from stppo.config.settings import TrainingConfig
from stppo.objectives import Objective, Surrogate, estimated_bias_norms
from stppo.objectives.ratios import kl_to_reference
from stppo.policy.compute import last_block
from stppo.policy.critic import Critic
from stppo.policy.policy import Scores
from stppo.training.controls import ReplayedDivisors
from stppo.training.gradients import Passes, PolicyPass, WatchedNorm, global_norm, join
from stppo.trajectories import Trajectories

BIAS_NORM_COLUMNS = {
    "exact": "clipping_bias_norm",
    "last_block": "clipping_bias_norm_last_block",
    "logprob": "clipping_bias_norm_logprob",
    "logit": "clipping_bias_norm_logit",
}


class NonFinite(FloatingPointError):
    """A loss, gradient or parameter stopped being finite; ends the run, keeping what was measured."""


def require_finite(value: Tensor | float, what: str, update: int, iteration: int) -> None:
    if not torch.isfinite(torch.as_tensor(value)).all():
        raise NonFinite(f"non-finite {what} at update {update}, iteration {iteration}")


def interpolated(logprobs: Tensor, batch: Trajectories, begun: int, done: int) -> Tensor:
    """(B, T) log pi_prox = log pi_old + a (log pi - log pi_old) of A-3PO (arXiv 2512.06547), a the share of
    the updates since a trajectory was sampled that were made before this iteration; 0 where none was made
    since.

    logprobs (B, T) under the policy after `done` updates, `begun` of them before this iteration's."""
    since = done - batch.policy_updates
    share = (begun - batch.policy_updates) / since.clamp_min(1)
    return torch.lerp(batch.behaviour_logprobs, logprobs, share[:, None].to(logprobs))


class PolicyUpdates:
    """Steps of the policy's optimiser.

    temperature: that of the roll-outs. divisors: a placebo in the stabiliser's place, or None. past: the
    stabiliser's divisors of the run so far, in order of size, where it divides by them over their median."""

    def __init__(
        self,
        policy: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        training: TrainingConfig,
        passes: Passes,
        temperature: float,
        divisors: ReplayedDivisors | None,
    ) -> None:
        self.policy, self.optimizer, self.objective = policy, optimizer, objective
        self.training, self.passes, self.temperature = training, passes, temperature
        self.divisors = divisors
        self.past: list[float] = []
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        # Column -> parameters of a norm that takes a pass.
        self.norm_over = {BIAS_NORM_COLUMNS["exact"]: self.parameters}
        try:
            self.norm_over[BIAS_NORM_COLUMNS["last_block"]] = last_block(policy)
        except ValueError as error:
            if objective.stabilizer.estimator == "last_block":
                raise ConfigError(f"algorithm.objective.stabilizer.estimator=last_block: {error}") from None

    def step(
        self,
        row: dict[str, float],
        batch: Trajectories,
        advantages: Tensor,
        reference: Tensor | None,
        weights: Tensor | None,
        proximal: Tensor | None = None,
        begun: int = 0,
    ) -> None:
        """One step on a minibatch; advantages, log-probs of the reference (None: not scored), weights and
        log-probs of a scored proximal policy are (B, T) or wider. begun: updates before this iteration's.

        row: holds update, iteration, epoch and minibatch; it is filled on the way, so that a non-finite stop
        keeps what it measured. Raises NonFinite."""
        began = time.perf_counter()
        training, width = self.training, batch.tokens.shape[1]
        advantages = advantages[:, :width]
        reference = None if reference is None else reference[:, :width]
        weights = None if weights is None else weights[:, :width]
        proximal = None if proximal is None else proximal[:, :width]
        row |= {
            "learning_rate": training.learning_rate,
            "staleness_updates": float(row["update"] - 1 - batch.policy_updates.float().mean()),
        }
        scored = PolicyPass(
            self.policy, batch, self.passes, self.temperature, training.entropy_coefficient > 0
        )
        scores = scored.scores
        if self.objective.surrogate.proximal == "interpolated":
            proximal = interpolated(scores.logprobs.detach(), batch, begun, row["update"] - 1)
        surrogate = self.objective(scores.logprobs, batch, advantages, weights, scores.entropy, proximal)
        row |= surrogate.diagnostics
        loss = self._regularised(surrogate, scores, batch, reference, row)
        self._require_finite(loss, "loss", row)

        watched, norms = self._watched(surrogate, scores, loss, row)
        row |= norms | scored.backward(loss, watched)  # one that only watches may overflow: it stops no run
        del scored, scores
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        row["gradient_norm"] = global_norm(gradients)
        divisor = self._divisor(row)
        self._require_finite(divisor, "stabilizer divisor", row)
        if loss is surrogate.ppo_loss:
            row["ppo_gradient_norm"] = row["gradient_norm"]
        self._require_finite(row["gradient_norm"], "gradient norm", row)
        row["stabilizer_divisor"] = divisor
        row["update_norm"] = self._step(divisor, gradients)
        self.optimizer.zero_grad()  # now, not before the next pass: a roll-out may need their memory
        row["seconds_update"] = time.perf_counter() - began
        self._require_finite(row["update_norm"], "parameters", row)

    def _require_finite(self, value: Tensor | float, what: str, row: dict[str, float]) -> None:
        require_finite(value, what, row["update"], row["iteration"])

    def _regularised(
        self,
        surrogate: Surrogate,
        scores: Scores,
        batch: Trajectories,
        reference: Tensor | None,
        row: dict[str, float],
    ) -> Tensor:
        """The surrogate's loss plus KL to the reference and minus entropy, both means over agent tokens."""
        mask, training = batch.agent_mask, self.training
        kl_reference = torch.tensor(math.nan)
        if reference is not None:
            kl_reference = kl_to_reference(scores.logprobs[mask], reference[mask]).mean()
        entropy = scores.entropy[mask].mean()
        row |= {"kl_reference": float(kl_reference.detach()), "entropy": float(entropy.detach())}
        loss = surrogate.loss
        if training.kl_coefficient:
            if training.kl_weighted:
                kl_reference = kl_to_reference(
                    scores.logprobs[mask], reference[mask], batch.behaviour_logprobs[mask]
                ).mean()
            loss = loss + training.kl_coefficient * kl_reference
        if training.entropy_coefficient:
            loss = loss - training.entropy_coefficient * entropy
        return loss

    def _watched(
        self, surrogate: Surrogate, scores: Scores, loss: Tensor, row: dict[str, float]
    ) -> tuple[dict[str, WatchedNorm], dict[str, float]]:
        """Scalars whose gradients' norms cost a backward pass and are wanted now: ‖C‖ where the stabiliser
        needs it, and every few updates all that only watch. The iteration shifts their choice, so that it
        does not always fall on the same minibatch of an epoch. Also returns the norms that are known
        without."""
        watches = (row["update"] - 1 + row["iteration"]) % self.training.bias_norm_every == 0
        norms = estimated_bias_norms(surrogate, scores.logprobs, scores.squared_prob_sum)
        norms |= dict.fromkeys((*self.norm_over, "ppo_gradient_norm"), math.nan)
        own = BIAS_NORM_COLUMNS.get(self.objective.stabilizer.estimator)
        all_of_them = watches or own == BIAS_NORM_COLUMNS["exact"]  # whose one pass gives the others as well
        watched = {}
        for column, parameters in self.norm_over.items():
            if all_of_them or column == own:
                if surrogate.any_clipped:
                    watched[column] = WatchedNorm(surrogate.bias_surrogate, parameters)
                else:
                    norms[column] = 0.0
        if loss is not surrogate.ppo_loss and watches:
            watched["ppo_gradient_norm"] = WatchedNorm(surrogate.ppo_loss, self.parameters)
        return watched, norms

    def _divisor(self, row: dict[str, float]) -> float:
        if self.divisors is not None:
            return self.divisors(row["iteration"], row["epoch"], row["minibatch"])
        divisor = self._own_divisor(row)
        if not self.objective.stabilizer.over_median or not math.isfinite(divisor):
            return divisor  # one that is not finite ends the run
        bisect.insort(self.past, divisor)
        return divisor / median(self.past)

    def remember(self, rows: Iterable[dict[str, float]]) -> None:
        """Take up the divisors of a run that goes on, from its rows: they are functions of what these
        hold."""
        if self.objective.stabilizer.over_median:
            self.past = sorted(map(self._own_divisor, rows))

    def _own_divisor(self, row: dict[str, float]) -> float:
        stabilizer = self.objective.stabilizer
        if stabilizer.estimator is None:
            return 1.0
        column = BIAS_NORM_COLUMNS.get(stabilizer.estimator, stabilizer.estimator)
        if column not in row:
            raise ConfigError(
                "algorithm.objective.stabilizer: "
                f"{type(stabilizer).__name__}.estimator={stabilizer.estimator!r} must be "
                f"one of {', '.join(BIAS_NORM_COLUMNS)} or a diagnostic of the surrogate"
            )
        return stabilizer.divisor(row[column])

    def _step(self, divisor: float, gradients: list[Tensor]) -> float:
        """Clip, divide, step; returns the norm of the parameters' change. Dividing after a clip keeps the
        divisor; a clip that binds afterwards cancels it. A divisor of the step divides the learning rate of
        this update alone."""
        training = self.training
        of_step = (self.divisors or self.objective.stabilizer).divides == "step"
        before = [p.detach().clone() for p in self.parameters]

        def divide() -> None:
            if divisor != 1.0 and not of_step:
                torch._foreach_div_(gradients, divisor)

        if training.clip_order == "after_divisor":
            divide()
        if training.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, training.max_grad_norm)
        if training.clip_order == "before_divisor":
            divide()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate / divisor if of_step else rate
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for old, new in zip(before, self.parameters, strict=True):
            old -= new.detach()  # in place: no third copy of the parameters
        return global_norm(before)


class CriticUpdates:
    """Passes of the critic over a batch."""

    def __init__(
        self, critic: Critic, optimizer: torch.optim.Optimizer, training: TrainingConfig, passes: Passes
    ) -> None:
        self.critic, self.optimizer, self.training, self.passes = critic, optimizer, training, passes
        self.parameters = [p for p in critic.parameters() if p.requires_grad]

    def values(self, batch: Trajectories) -> Tensor:
        """(B, T) values without graph."""
        parts = self.passes.cut(batch)
        chunks = self.passes.chunks_of(parts)
        with torch.no_grad():
            return join([(rows, self.critic(part, chunks)) for rows, part in parts], batch.tokens)

    def regress(
        self,
        batch: Trajectories,
        returns: Tensor,
        mask: Tensor,
        old: Tensor,
        generator: torch.Generator,
        update: int,
        iteration: int,
        passes: int = 1,
    ) -> float:
        """Regress V on the value targets (B, T) where mask (B, T) holds; `old` (B, T) are the values before.

        passes: in place of each epoch. Returns the mean loss (half squared error); raises NonFinite.
        """
        training = self.training
        size = training.trajectories_per_iteration // training.minibatches
        losses = []
        for _ in range(training.critic_epochs * passes):
            for rows in torch.randperm(len(batch.lengths), generator=generator).split(size):
                minibatch = batch.select(rows)
                loss = self._backward(minibatch, returns[rows], mask[rows], old[rows])
                require_finite(loss, "critic loss", update, iteration)
                gradients = [p.grad for p in self.parameters if p.grad is not None]
                require_finite(global_norm(gradients), "critic gradient norm", update, iteration)
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss)
        return float(torch.stack(losses).mean())

    def _backward(self, minibatch: Trajectories, returns: Tensor, mask: Tensor, old: Tensor) -> Tensor:
        """The minibatch's loss, a mean over its masked tokens, micro-batch by micro-batch."""
        parts = self.passes.cut(minibatch)
        chunks, clip = self.passes.chunks_of(parts), self.training.value_clip
        count = int(mask.sum())
        losses = []
        for rows, part in parts:
            width = part.tokens.shape[1]
            target, anchor = returns[rows, :width], old[rows, :width]
            values = self.critic(part, chunks)
            error = (values - target).square()
            if clip is not None:
                limited = anchor + (values - anchor).clamp(-clip, clip)
                error = torch.maximum(error, (limited - target).square())
            loss = 0.5 * (error[mask[rows, :width]].sum() / count)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()
