"""Losses of a batch and their gradients: ours, verl's, TRL's, and AgileRL's as it publishes them.

verl and TRL run their own code. AgileRL cannot live in one environment with verl, so its definition is
written out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace

import torch
from torch import Tensor

from stppo.objectives import Clip, NoStabilizer, Objective, Ratio, TokenGAE
from stppo.trajectories import Layout
from tests.differential.cases import Case

VERL_AGGREGATIONS = {"trajectory_mean": "seq-mean-token-mean", "token_mean": "token-mean"}
TRL_LOSS_TYPES = {"trajectory_mean": "grpo", "token_mean": "bnpo"}
NO_DUAL_CLIP = 1e30  # verl's clip_ratio_c, off
UNCLIPPED = math.inf


def value_and_gradient(loss: Callable[[Tensor], Tensor], logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Scalar loss and its gradient with respect to logprobs (B, T)."""
    logprobs = logprobs.detach().clone().requires_grad_()
    value = loss(logprobs)
    return value.detach(), torch.autograd.grad(value, logprobs)[0]


def pairs(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """What `Referees.compare` takes, from two results of `value_and_gradient`."""
    return {"value": (ours[0], theirs[0]), "gradient": (ours[1], theirs[1])}


def objective(
    ratio: Ratio, low: float, high: float, loss_aggregation: str = "trajectory_mean", clip_on: str = "token"
) -> Objective:
    return Objective(TokenGAE(), ratio, Clip(low, high, clip_on), NoStabilizer(), loss_aggregation)


def our_loss(rule: Objective, case: Case) -> Callable[[Tensor], Tensor]:
    return lambda logprobs: rule(logprobs, case.batch, case.advantages).loss


def verl_loss(
    name: str,
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    mode: str = "token-mean",
    metrics: dict | None = None,
    **options,
) -> Tensor:
    """The loss registered in verl under `name`; its metrics go into `metrics`."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    loss, reported = get_policy_loss_fn(name)(
        old_log_prob=behaviour,
        log_prob=logprobs,
        advantages=advantages,
        response_mask=mask.to(logprobs.dtype),
        loss_agg_mode=mode,
        config=_actor_config(low, high, **options),
        rollout_is_weights=None,
    )
    if metrics is not None:
        metrics.update(reported)
    return loss


def verl_case(name: str, case: Case, low: float, high: float, mode: str, metrics=None, **options):
    return value_and_gradient(
        lambda logprobs: verl_loss(
            name,
            logprobs,
            case.batch.behaviour_logprobs,
            case.advantages,
            case.mask,
            low,
            high,
            mode,
            metrics,
            **options,
        ),
        case.logprobs,
    )


@lru_cache
def _actor_config(low: float, high: float, **options):
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        **options,
    )


def trl_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    level: str,
    loss_type: str = "grpo",
    metrics: dict | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = False,
    off_policy_mask_threshold: float | None = None,
    **arguments,
) -> Tensor:
    """TRL's own `_compute_loss`, on a stand-in for the trainer that hands it our log-probs.

    advantages (B,), or (B, T) as TRL allows its subclasses. With beta the reference policy is the behaviour
    policy. `metrics` gets what it logs. arguments: further ones of its config, such as sapo_temperature_pos.
    """
    from trl import GRPOTrainer

    logged = _Logged()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=off_policy_mask_threshold,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        args=SimpleNamespace(
            delta=None, use_bias_correction_kl=use_bias_correction_kl, steps_per_generation=1, **arguments
        ),
        use_vllm=False,
        model=SimpleNamespace(training=True),
        max_completion_length=mask.shape[1],
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(
            reduce=lambda x, reduction: x, gather=lambda x: x, num_processes=1, sync_gradients=True
        ),
        _metrics={"train": logged},
    )
    tokens = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": tokens,
        "completion_mask": torch.ones(mask.shape),
        "tool_mask": mask.to(logprobs.dtype),
        "advantages": advantages,
        "old_per_token_logps": behaviour,
        "ref_per_token_logps": behaviour,
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    if metrics is not None:
        metrics.update({key: values[0] for key, values in logged.items()})
    return loss


class _Logged(dict):
    def __missing__(self, key):
        return self.setdefault(key, [])


def trl_case(case: Case, low: float, high: float, level: str, loss_type: str, metrics=None, **options):
    return value_and_gradient(
        lambda logprobs: trl_loss(
            logprobs,
            case.batch.behaviour_logprobs,
            case.advantages,
            case.mask,
            low,
            high,
            level,
            loss_type,
            metrics,
            **options,
        ),
        case.logprobs,
    )


def agilerl_turn_ppo(
    log_ratio: Tensor, advantages: Tensor, turn_ids: Tensor, epsilon: float, pooling: str
) -> Tensor:
    """PPO with importance_sampling_level="turn" as AgileRL 2.58 documents it; (B, T) inputs, scalar loss.

    A turn's log-ratio is the sum (turn_ratio_pooling="sum", the product ratio) or the mean ("mean", the
    geometric mean) of its tokens' log-ratios, its advantage the mean of its tokens'; one clipped term per
    turn, averaged over all turns of the batch that have tokens. turn_ids is -1 off the agent's tokens.
    """
    terms = []
    for row in range(len(turn_ids)):
        for turn in range(int(turn_ids.max()) + 1):
            inside = turn_ids[row] == turn
            if inside.any():
                pooled = log_ratio[row, inside].sum()
                if pooling == "mean":
                    pooled = pooled / inside.sum()
                terms.append(_clipped(pooled.exp(), advantages[row, inside].mean(), epsilon, epsilon))
    return -torch.stack(terms).mean()


def agilerl_turn_grpo(
    log_ratio: Tensor, advantages: Tensor, turn_ids: Tensor, low: float, high: float
) -> Tensor:
    """GRPO with importance_sampling_level="turn" as AgileRL 2.58 documents it: each token carries its turn's
    geometric-mean ratio into the clipped term; mean over a completion's tokens, then over completions."""
    completions = []
    for row in range(len(turn_ids)):
        terms = []
        for token in (turn_ids[row] >= 0).nonzero().squeeze(1).tolist():
            ratio = log_ratio[row, turn_ids[row] == turn_ids[row, token]].mean().exp()
            terms.append(_clipped(ratio, advantages[row, token], low, high))
        completions.append(torch.stack(terms).mean())
    return -torch.stack(completions).mean()


def _clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def turns_as_rows(layout: Layout, values: Tensor) -> Tensor:
    """(B, T) -> (K, longest turn): every turn becomes a row of its own, right-padded with 0; differentiable.
    So a peer that knows sequences only can judge turns."""
    tokens = layout.gather(values).split(layout.turn_lengths.tolist())
    return torch.nn.utils.rnn.pad_sequence(list(tokens), batch_first=True)


def turns_as_tokens(layout: Layout, values: Tensor) -> tuple[Tensor, Tensor]:
    """(K,) -> (B, most turns) and its mask: every turn becomes one token, for peers that know tokens only."""
    rows = values.split(layout.row_turns.tolist())
    mask = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(list(rows), batch_first=True), pad(mask, batch_first=True)
