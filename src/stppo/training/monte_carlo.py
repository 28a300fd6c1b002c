"""True values: Monte-Carlo estimates of V^pi at starts of turns, by letting the policy play on from there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stppo.rollout.rollout import Rollout, Sampler
from stppo.trajectories import Layout, Trajectories


@dataclass(frozen=True, eq=False)
class TrueValues:
    """turns (M,): turns of a batch, numbered through it as `Layout.turns` does; returns (M, n): undiscounted
    rewards of n independent continuations from the state before each of these turns on."""

    turns: Tensor
    returns: Tensor

    def per_token(self, batch: Trajectories) -> Tensor:
        """(B, T): the mean return from its turn's start at every agent token, 0 elsewhere; needs all turns.

        Within a turn the value stands still. With lambda = 1 that makes the advantage of every token of a
        turn the return minus the true value of the turn's start. With lambda < 1 temporal differences are
        zero but for each turn's last token, so a token is credited with the change of true value over its own
        turn and later ones, faded by lambda per token in between."""
        layout = batch.layout
        values = self.returns.new_zeros(len(layout.turn_lengths))
        values[self.turns] = self.returns.mean(1)
        return layout.scatter(values[layout.turns])

    def error(self, values: Tensor, layout: Layout) -> tuple[float, float]:
        """(RMSE of a critic's `values` (B, T), standard deviation of the true values), over these states.

        The mean sampling variance of a mean of n returns is subtracted from the mean squared error and from
        the variance of the means; both are then unbiased before the root. The RMSE is 0 where nothing is left
        of it, the standard deviation NaN.
        """
        estimated = layout.gather(values)[layout.turn_starts][self.turns].double()
        returns = self.returns.double()
        means = returns.mean(1)
        noise = float(returns.var(1).mean()) / returns.shape[1]
        squared_error = float((estimated - means).square().mean()) - noise
        variance = float(means.var()) - noise
        return math.sqrt(max(squared_error, 0.0)), math.sqrt(variance) if variance > 0 else math.nan


def true_values(
    sampler: Sampler,
    policy: PreTrainedModel,
    rollout: Rollout,
    n: int,
    generator: torch.Generator,
    n_turns: int | None = None,
) -> TrueValues:
    """Play n independent continuations from the start of every turn of a roll-out, or of `n_turns` drawn
    without replacement (all where it has fewer). The policy should be the one that made the roll-out."""
    layout = rollout.trajectories.layout
    total = len(layout.turn_lengths)
    turns = torch.arange(total)
    if n_turns is not None and n_turns < total:
        turns = torch.randperm(total, generator=generator)[:n_turns].sort().values
    tokens = layout.gather(rollout.trajectories.tokens).tolist()
    row_starts = (layout.row_lengths.cumsum(0) - layout.row_lengths)[layout.turn_rows]
    questions, taken = [], []
    for turn in turns.tolist():
        questions += [rollout.episodes[int(layout.turn_rows[turn])].question] * n
        taken += [tokens[int(row_starts[turn]) : int(layout.turn_starts[turn])]] * n
    played = sampler.collect(policy, questions, generator, forced=taken).trajectories
    # What the turns before paid is none of this state's value.
    ahead = played.agent_mask.cumsum(1) > torch.tensor([len(ids) for ids in taken])[:, None]
    return TrueValues(turns, (played.rewards * ahead).sum(1).view(-1, n))
