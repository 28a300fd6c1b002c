"""Our losses in slime, which imports a loss by its path:

    --loss-type custom_loss --custom-loss-function-path stppo.plugins.slime.st_ppo

The average is slime's own (`sum_of_sample_mean`: of trajectories, or of tokens with
--calculate-per-token-loss); old log-probs are the engine's with --use-rollout-logprobs, else the trainer's.
Knobs: `stppo_knobs`, a mapping, in the file of --custom-config-path. The divisor, and rules that read a whole
batch, see one micro-batch. Not with context parallelism, where a rank has a part of each trajectory.
Signature: slime's `slime/backends/megatron_utils/loss.py` of 2026."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stppo.plugins.losses import by_name, loss_and_metrics, objective_of, weights_of


def loss(
    name: str,
    args: Any,
    batch: dict[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics as slime wants them.

    batch: lists of (T_i,) response tensors; logits (1, T, V); sum_of_sample_mean: of all responses' terms in
    one row to a number. ValueError with context parallelism."""
    if getattr(args, "context_parallel_size", 1) > 1:
        raise ValueError(
            f"{name}: a rank has part of each trajectory with --context-parallel-size above 1; set it to 1"
        )
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    scored = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=False,
        max_seq_lens=batch.get("max_seq_lens"),
    )
    logprobs = scored["log_probs"]
    old = batch["rollout_log_probs" if args.use_rollout_logprobs else "log_probs"]
    flat = weights_of(sum_of_sample_mean, torch.cat(logprobs).detach())
    weights = flat.split([len(row) for row in logprobs])
    columns = logprobs, old, batch["advantages"], batch["loss_masks"], weights
    padded = (pad_sequence(list(rows), batch_first=True) for rows in columns)
    found, metrics = loss_and_metrics(objective_of(name, getattr(args, "stppo_knobs", None)), *padded)
    found = found + 0.0 * logits.sum()  # the graph, where no token is trained
    count = sum_of_sample_mean(
        torch.ones_like(flat)
    )  # slime divides what is logged by it, as it does the loss
    return found, {"loss": found.detach()} | {key: count * value for key, value in metrics.items()}


__getattr__ = by_name(loss, __name__)
