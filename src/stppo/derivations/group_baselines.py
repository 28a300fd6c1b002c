"""Group baselines and loss aggregations on a tree that can be enumerated: whose expected on-policy gradient
is the true one, and what changes where the policy itself decides how many turns there are.

Every group of `GROUP` trajectories of one prompt is gone through, with its probability. Nothing is
sampled."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from stppo.derivations.bias_variance import bias_variance_table
from stppo.files import repository_path
from stppo.oracle import Oracle, TabularSoftmax, TokenMDP

GROUP = 3
MDP = TokenMDP(n_words=1, max_turn_tokens=2, max_turns=3, n_observations=1, n_prompts=1)
# How a token of turn k is credited: R_k are the rewards from turn k on, R_1 those of all turns.
BASELINES = {
    "none": "R_k alone",
    "trajectory, the others": "less the others' mean R_1",
    "trajectory, all": "R_1 less the group's mean R_1",
    "trajectory, all, divided": "the same over the standard deviation (GRPO)",
    "turn, the others": "less the mean R_k of the others that have a turn k",
    "turn, all": "less the mean R_k of all that have a turn k",
    "turn, all, absent as 0": "less the group's mean R_k, 0 where there is no turn k",
    "turn, all, divided": "less the mean R_k of all that have a turn k, over their standard deviation",
    "token, the others": "less the mean of the others that have a token at this place",
    "token, all": "less the mean of all that have a token at this place",
}
# How a batch's tokens are added up.
AGGREGATIONS = {
    "sum": "sum over a trajectory's tokens, mean over trajectories",
    "constant": "the same over one length for all",
    "token mean": "mean over all tokens of the batch",
    "sequence mean": "mean over a trajectory's tokens, then over trajectories",
}
TREES = (0, 1, 2)  # seeds of what is recorded
CONSTANT, NOTHING = 10.0, 1e-12


class Units(NamedTuple):
    """What has a baseline of its own: turns or token places. U of them, n trajectories, M tokens of the
    tree."""

    place: Tensor  # (M,) which unit each token belongs to
    to_go: Tensor  # (n, U) rewards from that unit's turn on, 0 where there is none
    has: Tensor  # (n, U) whether the trajectory has it


class Groups:
    """A tree with a reward at the end of each turn, and all groups that its n possible trajectories form.

    fixed: the policy never answers before its last turn, so every trajectory has all turns. seed: of
    dynamics, rewards and policy."""

    def __init__(self, fixed: bool, seed: int = 0) -> None:
        mdp = TokenMDP(**{**vars(MDP), "seed": seed})
        tree = mdp.enumerate()
        policy = TabularSoftmax(tree)
        theta = policy.initial(seed + 1, 0.7)
        if fixed:
            early = tree.history_turns < mdp.max_turns - 1
            theta.view(-1, mdp.n_actions)[policy.contexts[early], mdp.answer] = -60.0
        self.oracle = Oracle(tree, policy, theta)
        layout = self.oracle.layout
        turn = tree.history_turns[self.oracle.histories]
        last = torch.cat([layout.turns[1:] != layout.turns[:-1], torch.tensor([True])])
        paid = torch.randn(tree.n_edges, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        rewards = torch.zeros(len(tree), mdp.max_turns, dtype=torch.float64)
        rewards[layout.rows[last], turn[last]] = paid[tree.edges[last]]
        to_go = rewards.flip(1).cumsum(1).flip(1)
        self.total = rewards.sum(1)  # of all trajectories, also those that never come up
        possible = self.oracle.probabilities > NOTHING
        self.rows, self.p = possible.nonzero().squeeze(1), self.oracle.probabilities[possible]
        first = torch.cat([torch.tensor([0]), (layout.rows[1:] != layout.rows[:-1]).nonzero().squeeze(1) + 1])
        token = torch.arange(len(layout.rows)) - first[layout.rows]
        self.units = {}
        for name, place in (("turn", turn), ("token", token)):
            has = torch.zeros(len(tree), int(place.max()) + 1, dtype=torch.bool)
            has[layout.rows, place] = True
            gains = torch.zeros(has.shape, dtype=torch.float64)
            gains[layout.rows, place] = to_go[layout.rows, turn]
            self.units[name] = Units(place, gains[possible], has[possible])
        self.lengths = self.units["token"].has.sum(1).double()
        choices = itertools.product(range(len(self.rows)), repeat=GROUP - 1)
        self.others = torch.tensor(list(choices))  # (groups, GROUP - 1), of the n
        self.weight = self.p[self.others].prod(1)

    def truth(self) -> Tensor:
        """(P,) the true gradient of the expected sum of rewards."""
        theta = self.oracle.behaviour.clone().requires_grad_()
        value = (self.oracle.trajectory_probabilities(theta) * self.total).sum()
        return torch.autograd.grad(value, theta)[0]

    def gradient(self, baseline: str, aggregation: str = "sum") -> Tensor:
        """(P,) expected on-policy gradient with one of `BASELINES` and one of `AGGREGATIONS`."""
        units = self.units["token" if baseline.startswith("token") else "turn"]
        average = torch.zeros(len(self.oracle.tree), units.has.shape[1], dtype=torch.float64)
        for i, row in enumerate(self.rows):  # its coefficients, averaged over the groups that it may be in
            terms = self._scale(i, aggregation) * _advantage(units, i, self.others, baseline)
            average[row] = self.p[i] * (self.weight @ terms.expand(len(self.weight), -1))
        theta = self.oracle.behaviour.clone().requires_grad_()
        tokens = average[self.oracle.layout.rows, units.place]
        return torch.autograd.grad((tokens * self.oracle.token_logprobs(theta)).sum(), theta)[0]

    def _scale(self, i: int, aggregation: str) -> Tensor:
        """(groups or 1, 1) what multiplies the terms of trajectory i; a mean over trajectories is 1."""
        if aggregation == "token mean":
            return GROUP / (self.lengths[i] + self.lengths[self.others].sum(1))[:, None]
        factors = {"sum": 1.0, "constant": 1 / CONSTANT, "sequence mean": 1 / float(self.lengths[i])}
        return torch.full((1, 1), factors[aggregation], dtype=torch.float64)


def _advantage(units: Units, i: int, others: Tensor, baseline: str) -> Tensor:
    """(groups or 1, U) advantages of trajectory i in the groups that it forms with others (groups,
    members)."""
    unit, whose, special = [*baseline.split(", "), "", ""][:3]
    own, values, has, present = units.to_go[i], units.to_go[others], units.has[i], units.has[others]
    if unit == "none":
        return own[None]
    if unit == "trajectory":
        values = values[..., :1].expand_as(values)
        own = own if whose == "the others" else own[:1].expand_as(own)
    if unit == "trajectory" or special == "absent as 0":
        has, present = torch.ones_like(has), torch.ones_like(present)
    if whose == "all":
        values = torch.cat([values, own.expand(len(values), 1, -1)], 1)
        present = torch.cat([present, has.expand(len(values), 1, -1)], 1)
    count = present.sum(1).clamp_min(1)
    mean = (values * present).sum(1) / count
    if special != "divided":
        return own - mean
    spread = (((values - mean[:, None]) * present).square().sum(1) / count).sqrt()
    return torch.where(spread > NOTHING, (own - mean) / spread.clamp_min(NOTHING), 0.0)


def group_baseline_table(seed: int = 0) -> pd.DataFrame:
    """A row for each of `BASELINES` (summed over tokens) and each of `AGGREGATIONS` (with the baselines
    "trajectory, the others" and "none"), with turns that the policy chooses and with a fixed number of them.

    Columns: baseline, aggregation, turns (`chosen`, `fixed`), cosine to the true gradient, scale (length
    along it over its length)."""
    cases = [(baseline, "sum") for baseline in BASELINES]
    cases += [(b, a) for a in AGGREGATIONS if a != "sum" for b in ("trajectory, the others", "none")]
    rows = []
    for turns in ("chosen", "fixed"):
        groups = Groups(turns == "fixed", seed)
        truth = groups.truth()
        for baseline, aggregation in cases:
            found = groups.gradient(baseline, aggregation)
            rows.append(
                {
                    "baseline": baseline,
                    "aggregation": aggregation,
                    "turns": turns,
                    "cosine": float(cosine_similarity(found, truth, dim=0)),
                    "scale": float(found @ truth / truth.square().sum()),
                }
            )
    return pd.DataFrame(rows)


def record(folder: Path) -> None:
    """Write the numbers of the page on unbiased gradients: this table for three trees, and of every algorithm
    what `stppo.derivations.bias_variance` says. About 30 CPU seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = pd.concat([group_baseline_table(seed).assign(tree=seed) for seed in TREES], ignore_index=True)
    for name, table in (("group_baselines", tables), ("algorithms", bias_variance_table())):
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    record(repository_path("results/reference/oracle"))
