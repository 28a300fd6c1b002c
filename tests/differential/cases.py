"""Random float64 batches for the referees, made by hypothesis: masks with gaps, turns, log-ratios, advantages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis.extra.numpy import arrays
from torch import Tensor

from stppo.trajectories import Layout, Trajectories

referee_settings = settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

EPSILONS = st.sampled_from([3e-3, 0.2, 0.28, 0.9, 10.0])


@dataclass(eq=False)
class Case:
    """A batch, and log pi_theta and advantages (B, T) for it; finite garbage off the mask."""

    batch: Trajectories
    logprobs: Tensor
    advantages: Tensor

    @property
    def layout(self) -> Layout:
        return self.batch.layout

    @property
    def mask(self) -> Tensor:
        return self.batch.agent_mask

    @property
    def log_ratio(self) -> Tensor:
        """(N,)"""
        return self.layout.gather(self.logprobs - self.batch.behaviour_logprobs)

    def off_the_mask(self, value: float) -> Case:
        """The same with `value` wherever no agent token stands (rewards have to stay 0 there)."""

        def fill(x: Tensor) -> Tensor:
            return x.where(self.mask, torch.full_like(x, value))

        behaviour = fill(self.batch.behaviour_logprobs)
        batch = Trajectories(**{**self.batch.state_dict(), "behaviour_logprobs": behaviour})
        return Case(batch, fill(self.logprobs), fill(self.advantages))

    def with_advantages(self, advantages: Tensor) -> Case:
        return replace(self, advantages=advantages)


def case_of(turns: list[list[int]], log_ratio, advantages) -> Case:
    """A written-out case: turn lengths per row, then one number per agent token, row by row."""
    batch = _batch([[(1, n) for n in row] for row in turns])
    layout = batch.layout
    log_ratio, advantages = (torch.tensor(x, dtype=torch.float64) for x in (log_ratio, advantages))
    return Case(batch, layout.scatter(log_ratio), layout.scatter(advantages))


@st.composite
def cases(
    draw,
    log_ratios: tuple[float, float] = (-30.0, 30.0),
    advantages_per: str = "token",
    equal_turns: bool = False,
) -> Case:
    """One to four trajectories of one to four turns of one to five tokens.

    Log-ratios stay in the range given and often sit at its ends, at 0 or close to 0; some batches are nearly
    on-policy as a whole. Advantages differ per
    token, turn or row; their signs are mixed, all positive, all negative or all zero. Now and then every
    term is clipped, for any epsilon up to 0.9.
    """
    n_turns = draw(st.integers(1, 4)) if equal_turns else None
    turn = st.tuples(st.integers(1, 3), st.integers(1, 5))
    row = st.lists(turn, min_size=n_turns or 1, max_size=n_turns or 4)
    batch = _batch(draw(st.lists(row, min_size=1, max_size=4)), extra=draw(st.integers(0, 2)))
    layout, shape = batch.layout, tuple(batch.agent_mask.shape)

    low, high = log_ratios
    near = st.floats(max(low, -0.5), min(high, 0.5))
    edges = st.sampled_from([0.0, 1e-9, -1e-9, low, high, low / 2, high / 2])
    log_ratio = torch.from_numpy(draw(_array(shape, st.one_of(near, edges, st.floats(low, high)))))
    log_ratio = log_ratio * draw(st.sampled_from([1.0, 1.0, 0.1, 0.01, 1e-3]))
    # Times a ratio, two different subnormal numbers can round to one: no question to a loss.
    advantages = torch.from_numpy(draw(_array(shape, st.floats(-3, 3, allow_subnormal=False))))
    if advantages_per == "turn":
        advantages = layout.scatter(layout.gather(advantages)[layout.turn_starts][layout.turns])
    elif advantages_per == "row":
        advantages = advantages[:, :1].expand(shape).clone()
    sign = draw(st.sampled_from(["mixed"] * 4 + ["positive", "negative", "zero"] + ["all clipped"] * 2))
    if sign == "positive":
        advantages = advantages.abs()
    elif sign == "negative":
        advantages = -advantages.abs()
    elif sign == "zero":
        advantages = torch.zeros_like(advantages)
    elif sign == "all clipped":
        # One sign per row, so that turn and sequence ratios are beyond the clip as well.
        advantages = torch.copysign(torch.where(advantages == 0, 1.0, advantages), advantages[:, :1])
        beyond = log_ratio.abs().clamp(2.4, min(high, -low))  # exp(2.4) > 1 + 10
        log_ratio = torch.copysign(beyond, advantages)

    behaviour = -torch.from_numpy(draw(_array(shape, st.floats(0, 5))))
    garbage = torch.from_numpy(draw(_array(shape, st.sampled_from([0.0, 1.0, -17.0, 40.0]))))
    batch = Trajectories(**{**batch.state_dict(), "behaviour_logprobs": behaviour})
    mask = batch.agent_mask
    return Case(batch, behaviour + log_ratio.where(mask, garbage), advantages.where(mask, garbage))


@st.composite
def credited(draw, group_size: int = 1, rewards=None) -> tuple[Trajectories, Tensor]:
    """A batch of one to three groups with rewards on any agent token, and values (B, T) for it."""
    rows = group_size * draw(st.integers(1, 3))
    row = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=4)
    batch = _batch(draw(st.lists(row, min_size=rows, max_size=rows)), extra=draw(st.integers(0, 2)))
    shape = tuple(batch.agent_mask.shape)
    rewards = st.one_of(st.just(0.0), st.just(1.0), st.floats(-2, 2)) if rewards is None else rewards
    given = torch.from_numpy(draw(_array(shape, rewards))) * batch.agent_mask
    # Groups need not stand together.
    order = draw(st.permutations(range(rows)))
    changed = {"rewards": given, "group_ids": torch.tensor(order) // group_size}
    values = torch.from_numpy(draw(_array(shape, st.floats(-3, 3))))
    return Trajectories(**{**batch.state_dict(), **changed}), values


def _array(shape: tuple[int, ...], elements) -> st.SearchStrategy:
    # fill=nothing: otherwise most entries of an array are one and the same number.
    return arrays(np.float64, shape, elements=elements, fill=st.nothing())


def _batch(rows: list[list[tuple[int, int]]], extra: int = 0) -> Trajectories:
    """(environment tokens, agent tokens) of each turn, row by row; `extra` columns of padding."""
    pieces = [torch.cat([torch.tensor([False] * gap + [True] * n) for gap, n in row]) for row in rows]
    mask = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
    mask = torch.nn.functional.pad(mask, (0, extra))
    return Trajectories(
        tokens=torch.zeros(mask.shape, dtype=torch.int64),
        lengths=torch.tensor([len(piece) for piece in pieces]),
        agent_mask=mask,
        behaviour_logprobs=torch.zeros(mask.shape, dtype=torch.float64),
        rewards=torch.zeros(mask.shape, dtype=torch.float64),
        group_ids=torch.arange(len(mask)),
        policy_updates=torch.zeros(len(mask), dtype=torch.int64),
    )
