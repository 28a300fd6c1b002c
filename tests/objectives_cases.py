"""Random float64 batches and a tabular softmax policy, shared by the tests of trajectories and objectives."""

from __future__ import annotations

import torch
from torch import Tensor

from stppo.trajectories import Trajectories

VOCABULARY = 5


def batch_from_turns(
    turns: list[list[int]], *, gap: int = 2, extra: int = 3, group_size: int = 1, seed: int = 0
) -> Trajectories:
    """One trajectory per list of turn lengths, `gap` environment tokens before each turn and after the last,
    `extra` columns of padding on the longest row, rewards on every turn's last token, some tokens ending sentences."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([sum(row) + gap * (len(row) + 1) for row in turns])
    width = int(lengths.max()) + extra
    mask = torch.zeros(len(turns), width, dtype=torch.bool)
    rewards = torch.zeros(len(turns), width, dtype=torch.float64)
    for i, row in enumerate(turns):
        at = 0
        for length in row:
            mask[i, at + gap : at + gap + length] = True
            at += gap + length
            rewards[i, at - 1] = torch.randn((), generator=generator, dtype=torch.float64)
    logprobs = -torch.rand(mask.shape, generator=generator, dtype=torch.float64) - 0.1
    tokens = torch.randint(VOCABULARY, mask.shape, generator=generator)
    return Trajectories(
        tokens=tokens,
        lengths=lengths,
        agent_mask=mask,
        behaviour_logprobs=logprobs * mask,
        rewards=rewards,
        group_ids=torch.arange(len(turns)) // group_size,
        policy_updates=torch.zeros(len(turns), dtype=torch.int64),
        sentence_ends=(torch.rand(mask.shape, generator=generator) < 0.4) & mask,
    )


def sentences_of(batch: Trajectories, row: int) -> list[list[int]]:
    """The positions of each sentence of a row, from its turn ids and marks."""
    found, ids = [], batch.turn_ids[row].tolist()
    for t, turn in enumerate(ids):
        if turn >= 0 and found and ids[t - 1] == turn and not batch.sentence_ends[row, t - 1]:
            found[-1].append(t)
        elif turn >= 0:
            found.append([t])
    return found


def mixed_batch(**kwargs) -> Trajectories:
    return batch_from_turns([[3, 1, 4], [2], [1, 1], [5, 2], [1, 3, 2, 1], [4, 4]], **kwargs)


def normal(like: Tensor, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TabularPolicy:
    """log pi(token | previous token) from one row of logits per previous token: parameters are shared by
    positions, as in a real policy."""

    def __init__(self, seed: int = 1):
        shape = torch.empty(VOCABULARY, VOCABULARY)
        self.logits = normal(shape, seed).requires_grad_()

    def logprobs(self, tokens: Tensor) -> Tensor:
        """(B, T); position 0, which has no context, gets 0"""
        table = self.logits.log_softmax(-1)
        following = table[tokens[:, :-1]].gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(following, (1, 0))

    def gradient(self, scalar: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(scalar, self.logits, retain_graph=True)
        return gradient


def off_policy(batch: Trajectories, policy: TabularPolicy, spread: float, seed: int = 7) -> Trajectories:
    """The batch with behaviour log-probs = the policy's plus noise of that spread."""
    noise = normal(batch.rewards, seed, spread)
    with torch.no_grad():
        logprobs = (policy.logprobs(batch.tokens) + noise) * batch.agent_mask
    return Trajectories(**{**batch.state_dict(), "behaviour_logprobs": logprobs})
