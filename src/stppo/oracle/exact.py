"""Exact values, advantages, return and policy gradient, by recursion and summation over the whole tree."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from stppo.objectives import CreditRule
from stppo.oracle.mdp import Tree
from stppo.oracle.policies import Policy
from stppo.trajectories import Layout, Trajectories


class Oracle:
    """A tree, a parameterised policy on it, and the behaviour policy `behaviour` (P,) that samples.

    Notation: N trajectories, M agent tokens in all of them (flat tensors, row by row), H histories, A
    actions, P parameters. Expectations are over trajectories of the behaviour policy. Everything is float64,
    in nats."""

    def __init__(self, tree: Tree, policy: Policy, behaviour: Tensor) -> None:
        if policy.tree is not tree and not (
            policy.tree.mdp == tree.mdp and policy.tree.n_histories == tree.n_histories
        ):
            raise ValueError("policy: was made for another tree; give the tree to both")
        self.tree = tree
        self.policy = policy
        self.behaviour = behaviour.detach()
        self.behaviour_log_probs = policy.log_probs(self.behaviour)  # (H, A)

    @cached_property
    def layout(self) -> Layout:
        return self.tree.layout

    @cached_property
    def histories(self) -> Tensor:
        """(M,) history at which each agent token was chosen"""
        return self.tree.edges // self.tree.mdp.n_actions

    @cached_property
    def trajectories(self) -> Trajectories:
        """All N trajectories as the rest of the package knows them; one group for each prompt."""
        tree, layout = self.tree, self.layout
        rewards = torch.zeros(layout.shape, dtype=torch.float64)
        rewards[torch.arange(len(tree)), tree.lengths - 1] = tree.rewards
        return Trajectories(
            tokens=tree.tokens,
            lengths=tree.lengths,
            agent_mask=tree.agent_mask,
            # A trajectory ends with an agent token, so the last position is on the mask.
            behaviour_logprobs=layout.scatter(self.behaviour_log_probs.reshape(-1)[tree.edges]),
            rewards=rewards,
            group_ids=tree.tokens[:, 0],
            policy_updates=torch.zeros(len(tree), dtype=torch.long),
        )

    # --- probabilities -------------------------------------------------------------------------
    def token_logprobs(self, theta: Tensor) -> Tensor:
        """(M,) log pi_theta of every agent token given its history; differentiable."""
        return self.policy.log_probs(theta).reshape(-1)[self.tree.edges]

    def log_ratio(self, theta: Tensor) -> Tensor:
        """(M,) log pi_theta - log pi_old; differentiable."""
        return self.token_logprobs(theta) - self.behaviour_log_probs.reshape(-1)[self.tree.edges]

    def token_entropy(self, theta: Tensor) -> Tensor:
        """(M,) entropy of the distribution that each agent token is drawn from under pi_theta, nats; no
        gradient."""
        log_probs = self.policy.log_probs(theta.detach())
        return -(log_probs.exp() * log_probs).sum(1)[self.histories]

    def trajectory_probabilities(self, theta: Tensor) -> Tensor:
        """(N,) probability of each trajectory under pi_theta and the environment; differentiable."""
        return (self.layout.row_sum(self.token_logprobs(theta)) + self.tree.environment_logprobs).exp()

    @cached_property
    def probabilities(self) -> Tensor:
        """(N,) of the trajectories under the behaviour policy; they sum to 1."""
        return self.trajectory_probabilities(self.behaviour)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """(n,) rows of the tree, sampled token by token from the behaviour policy and the environment.

        It follows the choices, not `probabilities`, so that each checks the other.
        """
        roots = (self.tree.history_edges < 0).nonzero().squeeze(1)
        prompts = self.tree.history_probabilities[roots]
        history = roots[torch.multinomial(prompts, n, replacement=True, generator=generator)]
        rows = torch.full((n,), -1)
        open_ = torch.arange(n)
        n_actions = self.tree.mdp.n_actions
        while len(open_):
            action = _choose(self.behaviour_log_probs[history].exp(), generator)
            edge = history * n_actions + action
            rows[open_] = self._ends[edge]
            goes_on = rows[open_] < 0
            open_, edge = open_[goes_on], edge[goes_on]
            children = self._children[edge]  # (n, most observations), -1 where there are fewer
            chance = self.tree.history_probabilities[children] * (children >= 0)
            if len(open_):
                history = children.gather(1, _choose(chance, generator)[:, None]).squeeze(1)
        return rows

    @cached_property
    def _ends(self) -> Tensor:
        """(H * A,) the trajectory that a choice ends, or -1"""
        ends = torch.full((self.tree.n_edges,), -1)
        ends[self.tree.last_edges] = torch.arange(len(self.tree))
        return ends

    @cached_property
    def _children(self) -> Tensor:
        """(H * A, n_observations) the histories that may follow a choice, -1 for none"""
        tree = self.tree
        children = torch.full((tree.n_edges, tree.mdp.n_observations), -1)
        after = (tree.history_edges >= 0).nonzero().squeeze(1)
        edges = tree.history_edges[after]
        # The histories that follow one choice were made next to each other.
        first = torch.ones_like(edges, dtype=torch.bool)
        first[1:] = edges[1:] != edges[:-1]
        start = torch.where(first, torch.arange(len(edges)), 0).cummax(0).values
        children[edges, torch.arange(len(edges)) - start] = after
        return children

    # --- values and advantages -----------------------------------------------------------------
    def action_values(self) -> Tensor:
        """(H, A) Q of every choice under the behaviour policy, by backward recursion."""
        return self._solved[1]

    def values(self) -> Tensor:
        """(H,) V of every history under the behaviour policy."""
        return self._solved[0]

    def token_advantages(self) -> Tensor:
        """(M,) A_t = Q(h_t, y_t) - V(h_t)."""
        values, action_values = self._solved
        return action_values.reshape(-1)[self.tree.edges] - values[self.histories]

    def turn_advantages(self) -> Tensor:
        """(M,) A^k = Q(turn k) - V(state before it), the same for all tokens of a turn.

        A turn is one choice here: Q(turn k) is the expected return once its last token is written.
        """
        values, action_values = self._solved
        starts = self.layout.turn_starts
        ends = starts + self.layout.turn_lengths - 1
        advantages = action_values.reshape(-1)[self.tree.edges[ends]] - values[self.histories[starts]]
        return advantages[self.layout.turns]

    def group_advantages(self, normalise: bool = True) -> Tensor:
        """(M,) R - mean over the prompt's trajectories, divided by their standard deviation if `normalise`:
        what GRPO's (arXiv 2402.03300) and Dr. GRPO's advantages become as the group grows without bound."""
        prompts = self.tree.tokens[:, 0]
        weight = self.probabilities
        total = torch.zeros(self.tree.mdp.n_tokens, dtype=torch.float64).index_add(0, prompts, weight)
        mean = torch.zeros_like(total).index_add(0, prompts, weight * self.tree.rewards) / total
        centred = self.tree.rewards - mean[prompts]
        # A prompt whose outcomes all agree carries no signal; without this, rounding would invent some.
        high, low = (
            torch.zeros_like(total).scatter_reduce(0, prompts, self.tree.rewards, extreme, include_self=False)
            for extreme in ("amax", "amin")
        )
        centred = torch.where((high > low)[prompts], centred, 0.0)
        if normalise:
            variance = torch.zeros_like(total).index_add(0, prompts, weight * centred.square()) / total
            centred = torch.where(variance[prompts] > 0, centred / variance[prompts].sqrt(), 0.0)
        return centred[self.layout.rows]

    def credit(self, rule: CreditRule, values: Tensor | None = None) -> Tensor:
        """(M,) advantages that a credit rule gives each trajectory, from a critic's values (H,), default
        exact.

        ValueError for a rule that compares the trajectories of a batch: the tree is no batch. Use
        `group_advantages` and `whiten`.
        """
        if rule.whiten or rule.group_size > 1 or not rule.needs_critic:
            raise ValueError(
                f"credit: {type(rule).__name__} (whiten={rule.whiten}) compares the trajectories of a batch, "
                "which the tree is not; use whiten=False, Oracle.whiten or Oracle.group_advantages"
            )
        values = self.values() if values is None else values
        if tuple(values.shape) != (self.tree.n_histories,):
            raise ValueError(f"values: expected shape ({self.tree.n_histories},), got {tuple(values.shape)}")
        on_tokens = self.layout.scatter(values[self.histories])
        return self.layout.gather(rule(self.trajectories, on_tokens).advantages)

    def whiten(self, advantages: Tensor) -> Tensor:
        """(M,) -> (M,): mean 0 and variance 1 over agent tokens, as whitening does on an infinite batch."""
        if advantages.max() == advantages.min():  # without this, rounding would be scaled up to variance 1
            return torch.zeros_like(advantages)
        weight = self.probabilities[self.layout.rows]
        weight = weight / weight.sum()
        centred = advantages - (weight * advantages).sum()
        return centred / (weight * centred.square()).sum().sqrt()

    @cached_property
    def _solved(self) -> tuple[Tensor, Tensor]:
        tree, log_probs = self.tree, self.behaviour_log_probs
        action_values = torch.zeros(tree.n_edges, dtype=torch.float64)
        action_values[tree.last_edges] = tree.rewards
        values = torch.zeros(tree.n_histories, dtype=torch.float64)
        rows = action_values.view(-1, tree.mdp.n_actions)
        # Histories were made depth by depth, so whatever follows a history stands behind it.
        for start, stop in reversed(self._depths):
            values[start:stop] = (log_probs[start:stop].exp() * rows[start:stop]).sum(1)
            edges = tree.history_edges[start:stop]
            if start > 0:
                action_values.index_add_(
                    0, edges, tree.history_probabilities[start:stop] * values[start:stop]
                )
        return values, rows

    @cached_property
    def _depths(self) -> list[tuple[int, int]]:
        """Ranges of histories with equally many agent tokens before them."""
        before = (self.tree.history_tokens >= 0) & (self.tree.history_tokens < self.tree.mdp.n_actions)
        bounds = [0, *before.sum(1).bincount().cumsum(0).tolist()]
        return list(zip(bounds[:-1], bounds[1:], strict=True))

    # --- the true objective --------------------------------------------------------------------
    def expected_return(self, theta: Tensor) -> Tensor:
        """J(theta) = E[R] under pi_theta, a scalar; differentiable."""
        return (self.trajectory_probabilities(theta) * self.tree.rewards).sum()

    def policy_gradient(self, theta: Tensor) -> Tensor:
        """(P,) the true gradient of J at theta, by autograd through the sum over all trajectories."""
        theta = theta.detach().requires_grad_()
        return torch.autograd.grad(self.expected_return(theta), theta)[0]


def _choose(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """(n, K) non-negative rows -> (n,) an index of each, in proportion."""
    if len(probabilities) == 0:
        return torch.zeros(0, dtype=torch.long)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
