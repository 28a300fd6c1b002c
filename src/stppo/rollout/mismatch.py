"""What sampled against the trainer: the same weights, other kernels or another rounding, other log-probs.

pi_trainer and pi_engine are the probabilities that both give to the tokens that the engine sampled.
"""

import dataclasses
import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stppo.policy.policy import rows_within, score
from stppo.rollout.rollout import Rollout
from stppo.trajectories import Trajectories

_ROWS_SCORED = 16  # at once, where no budget is given


def mismatch(trainer: Tensor, batch: Trajectories, engine: Tensor) -> dict[str, float]:
    """How far log-probs (B, T) in nats of trainer and engine lie apart; only agent tokens are read.

    mismatch_mean, mismatch_max: of the absolute difference over tokens. mismatch_kl: KL(engine || trainer) by
    the estimator k3 = r - 1 - log r with r = pi_trainer / pi_engine. mismatch_effective_sample_size: of the
    trajectories' product ratios, as share of the batch."""
    layout = batch.layout
    log_ratio = (layout.gather(trainer) - layout.gather(engine)).double()
    log_weights = layout.row_sum(log_ratio)
    size = (2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)).exp()
    return {
        "mismatch_mean": float(log_ratio.abs().mean()),
        "mismatch_max": float(log_ratio.abs().max()),
        "mismatch_kl": float((log_ratio.expm1() - log_ratio).mean()),
        "mismatch_effective_sample_size": float(size / len(batch)),
    }


def truncated_weights(trainer: Tensor, batch: Trajectories, engine: Tensor, cap: float) -> Tensor:
    """(B, T) min(pi_trainer / pi_engine, cap) on agent tokens, 0 elsewhere, without gradient.

    Truncated importance sampling of the engine's tokens; log-probs (B, T) in nats.
    """
    layout = batch.layout
    ratio = (layout.gather(trainer) - layout.gather(engine)).detach().exp()
    return layout.scatter(ratio.clamp(max=cap))


def trainer_logprobs(
    policy: PreTrainedModel, batch: Trajectories, temperature: float, budget: int | None = None
) -> Tensor:
    """(B, T) log-probs of the agent tokens by PyTorch, in a few rows at a time; on the CPU.

    budget: most padded tokens at once; None: a fixed number of rows. A longer row is scored on its own.
    """
    found = torch.zeros_like(batch.behaviour_logprobs)
    if budget is None:
        groups = torch.argsort(batch.lengths).split(_ROWS_SCORED)
    else:
        groups = [torch.tensor(rows) for rows in rows_within(batch.lengths.tolist(), budget)]
    for rows in groups:
        part = batch.select(rows)
        found[rows, : part.tokens.shape[1]] = score(policy, part, temperature).logprobs.to(found)
    return found


@torch.no_grad()
def scored_anew(policy: PreTrainedModel, rollout: Rollout, temperature: float, budget: int | None) -> Rollout:
    """The roll-out with the trainer's log-probs as the behaviour policy's; its metrics tell how far the
    sampled ones were from them, and how long scoring took. budget: as in `trainer_logprobs`."""
    began, batch = time.perf_counter(), rollout.trajectories
    trainer = trainer_logprobs(policy, batch, temperature, budget)
    found = mismatch(trainer, batch, batch.behaviour_logprobs)
    found["seconds_scoring"] = time.perf_counter() - began
    scored = dataclasses.replace(batch, behaviour_logprobs=trainer)
    return dataclasses.replace(rollout, trajectories=scored, metrics=rollout.metrics | found)
