"""Advantage estimators that verl lacks, registered by `stppo.plugins.verl`: `grpo_turn_return` and
`batch_mean`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stppo.objectives import BatchBaseline, GroupNormalised
from stppo.plugins import require_host
from stppo.trajectories import Trajectories

require_host("verl")

from verl.trainer.ppo.core_algos import register_adv_est  # noqa: E402


def refuse_token_rejection(rollout_correction: Any) -> None:
    """ValueError if verl's `algorithm.rollout_correction` rejects single tokens, which would split turns."""
    modes = str((rollout_correction or {}).get("rollout_rs") or "")
    if any(mode.strip().startswith("token") for mode in modes.split(",")):
        raise ValueError(
            f"algorithm.rollout_correction.rollout_rs={modes!r}: token-level rejection punches holes into "
            "response_mask and so splits turns; use a seq_* mode, e.g. seq_mean_k1"
        )


@register_adv_est("grpo_turn_return")
def grpo_turn_return(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    index: np.ndarray | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Group-normalised turn returns (reading B's SO-GRPO): `GroupNormalised(returns="turn")` for verl.

    The undiscounted rewards from each turn on, minus their mean and over their standard deviation in the
    group; with a terminal reward only, verl's `grpo`. Groups are the equal entries of `index`
    (verl's uid). Rewards on environment tokens belong to the turn before. A response that is alone in its
    group, as filtering may leave it, gets 0. Returns (advantages, advantages), (B, T) and 0 off the mask.
    ValueError without `index`, if no group has two responses, for `norm_adv_by_std_in_grpo=false` and for
    token-level rejection."""
    options = config if config is not None else {}
    refuse_token_rejection(options.get("rollout_correction"))
    if not options.get("norm_adv_by_std_in_grpo", True):
        raise ValueError(
            "algorithm.norm_adv_by_std_in_grpo=false: grpo_turn_return divides by the std; use grpo"
        )
    if index is None:
        raise ValueError("grpo_turn_return: the batch has no uid, so its groups are unknown")
    trajectories = _trajectories(token_level_rewards, response_mask.bool(), index)
    sizes = torch.bincount(trajectories.group_ids)[trajectories.group_ids]
    if int(sizes.max()) < 2:
        raise ValueError(
            "grpo_turn_return: a group needs at least 2 responses; set actor_rollout_ref.rollout.n >= 2"
        )
    advantages = torch.zeros_like(trajectories.rewards)
    for size in sizes.unique().tolist():
        if size > 1:
            rows = (sizes == size).nonzero().squeeze(1)
            rule = GroupNormalised(group_size=size, returns="turn")
            advantages[rows] = rule(trajectories.select(rows)).advantages
    advantages = advantages[:, 2:] * response_mask
    return advantages, advantages


@register_adv_est("batch_mean")
def batch_mean(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """R - the batch's mean return, for topr: `BatchBaseline(whiten=False)` for verl; (B, T) and 0 off the
    mask, twice."""
    mask = response_mask.bool()
    trajectories = _trajectories(token_level_rewards, mask, np.zeros(len(mask)))
    advantages = BatchBaseline()(trajectories).advantages[:, 2:] * response_mask
    return advantages, advantages


def _trajectories(rewards: Tensor, mask: Tensor, index: np.ndarray) -> Trajectories:
    """verl's batch in our terms, with two columns in front: a context, which verl keeps apart as the prompt,
    and an agent token that stands in for those of a row without any, so that its return still counts in its
    group."""
    n_rows, width = mask.shape
    columns = torch.arange(width, device=mask.device).expand(n_rows, width)
    last = columns.where(mask, columns.new_full((), -1)).cummax(1).values
    last = last.where(last >= 0, mask.int().argmax(1, keepdim=True))  # before the first turn: its first token
    empty = ~mask.any(1, keepdim=True)
    on_mask = torch.zeros_like(rewards).scatter_add(1, last, rewards)
    total = rewards.sum(1, keepdim=True)
    groups = np.unique(np.asarray(index, dtype=str), return_inverse=True)[1]
    agent = torch.cat([torch.zeros_like(empty), empty, mask], 1)
    return Trajectories(
        tokens=torch.zeros_like(agent, dtype=torch.int64),
        lengths=torch.full((n_rows,), width + 2, device=mask.device),
        agent_mask=agent,
        behaviour_logprobs=torch.zeros_like(agent, dtype=rewards.dtype),
        rewards=torch.cat([torch.zeros_like(total), total * empty, on_mask * ~empty], 1),
        group_ids=torch.as_tensor(groups, device=mask.device),
        policy_updates=torch.zeros(n_rows, dtype=torch.int64, device=mask.device),
    )
