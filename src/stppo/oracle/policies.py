"""Policies for the enumerable MDP: functions of a flat float64 parameter vector."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from stppo.oracle.mdp import Tree

SHARING = ("none", "recent")


class Policy(ABC):
    """log pi_theta(action | history) for all H histories of a tree at once."""

    n_parameters: int

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def log_probs(self, theta: Tensor) -> Tensor:
        """(P,) parameters -> (H, A) log-probabilities in nats, differentiable.

        ValueError, naming theta, unless it is a finite float64 vector of the right length.
        """
        if not isinstance(theta, Tensor) or theta.dtype != torch.float64:
            raise ValueError(f"theta: expected a float64 tensor, got {getattr(theta, 'dtype', type(theta))}")
        if tuple(theta.shape) != (self.n_parameters,):
            raise ValueError(f"theta: expected shape ({self.n_parameters},), got {tuple(theta.shape)}")
        if not theta.detach().isfinite().all():
            raise ValueError("theta: must be finite")
        return self._logits(theta).log_softmax(1)

    @abstractmethod
    def _logits(self, theta: Tensor) -> Tensor: ...

    def initial(self, seed: int = 0, scale: float = 1.0) -> Tensor:
        """(P,) normal parameters with standard deviation `scale`."""
        random = torch.Generator().manual_seed(seed)
        return scale * torch.randn(self.n_parameters, generator=random, dtype=torch.float64)

    @abstractmethod
    def _logit_jacobian(self, theta: Tensor) -> Tensor:
        """(H, A, P), in closed form: torch.func.jacfwd gives the same, with warnings from inside torch"""

    def jacobian(self, theta: Tensor) -> Tensor:
        """(H * A, P): the score d log pi / d theta of every choice. ValueError as in `log_probs`."""
        theta = theta.detach() if isinstance(theta, Tensor) else theta
        p = self.log_probs(theta).exp()
        logits = self._logit_jacobian(theta)
        mean = torch.einsum("ha,hap->hp", p, logits)
        return (logits - mean[:, None]).reshape(self.tree.n_edges, self.n_parameters)


class TabularSoftmax(Policy):
    """One row of logits per context.

    sharing="none": each history is its own context. sharing="recent": histories share a row if turn, place in
    the turn, previous token and latest observation agree, so the policy forgets and generalises.
    """

    def __init__(self, tree: Tree, sharing: str = "recent") -> None:
        super().__init__(tree)
        if sharing not in SHARING:
            raise ValueError(f"TabularSoftmax.sharing={sharing!r}: must be one of {', '.join(SHARING)}")
        if sharing == "none":
            self.contexts = torch.arange(tree.n_histories)
        else:
            seen = (
                tree.history_turns,
                tree.history_positions,
                tree.history_last_tokens,
                tree.history_observations,
            )
            self.contexts = torch.stack(seen, 1).unique(dim=0, return_inverse=True)[1]
        self.n_parameters = (int(self.contexts.max()) + 1) * tree.mdp.n_actions

    def _logits(self, theta: Tensor) -> Tensor:
        return theta.view(-1, self.tree.mdp.n_actions)[self.contexts]

    def _logit_jacobian(self, theta: Tensor) -> Tensor:
        n_actions = self.tree.mdp.n_actions
        own = self.contexts[:, None] * n_actions + torch.arange(n_actions)
        return one_hot(own, self.n_parameters).double()


class NeuralSoftmax(Policy):
    """A tanh network with one hidden layer over previous token, latest observation, turn, place in the turn
    and the number of each token so far; all its parameters are shared by all histories."""

    def __init__(self, tree: Tree, hidden: int = 4) -> None:
        super().__init__(tree)
        if hidden < 1:
            raise ValueError(f"NeuralSoftmax.hidden={hidden}: must be at least 1")
        mdp = tree.mdp
        counts = one_hot(tree.history_tokens + 1, mdp.n_tokens + 1).sum(1)[:, 1:]
        self.features = torch.cat(
            [
                one_hot(tree.history_last_tokens, mdp.n_tokens),
                one_hot(tree.history_observations, mdp.n_tokens),
                counts / mdp.width,
                tree.history_turns[:, None] / mdp.max_turns,
                tree.history_positions[:, None] / mdp.max_turn_tokens,
                torch.ones(tree.n_histories, 1),
            ],
            1,
        ).double()
        # A feature that is the same everywhere, or nowhere seen, would only add dead parameters.
        varies = (self.features != self.features[0]).any(0)
        varies[-1] = True
        self.features = self.features[:, varies]
        self.sizes = (self.features.shape[1] * hidden, hidden * mdp.n_actions)
        self.hidden = hidden
        self.n_parameters = sum(self.sizes)

    def _logits(self, theta: Tensor) -> Tensor:
        first, second = theta.split(self.sizes)
        hidden = (self.features @ first.view(-1, self.hidden)).tanh()
        return hidden @ second.view(self.hidden, -1)

    def _logit_jacobian(self, theta: Tensor) -> Tensor:
        n, n_actions = self.tree.n_histories, self.tree.mdp.n_actions
        first, second = theta.split(self.sizes)
        hidden = (self.features @ first.view(-1, self.hidden)).tanh()
        out = second.view(self.hidden, n_actions)
        to_first = torch.einsum("hf,hk,ka->hafk", self.features, 1 - hidden.square(), out)
        to_second = torch.einsum("hk,ab->hakb", hidden, torch.eye(n_actions, dtype=theta.dtype))
        return torch.cat([to_first.reshape(n, n_actions, -1), to_second.reshape(n, n_actions, -1)], 2)
