"""A multi-turn token MDP and the tree of all its trajectories."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from stppo.trajectories import Layout


@dataclass(frozen=True)
class TokenMDP:
    """A search agent in miniature: it writes tokens, and the environment answers every turn.

    The agent's vocabulary is `n_words` words, SEARCH and ANSWER. A turn ends with SEARCH, ANSWER or its
    `max_turn_tokens`-th token, so turns hold 1 to max_turn_tokens tokens. After a turn without ANSWER the
    environment appends one of `n_observations` observation tokens, and the next turn begins; ANSWER, or the
    end of turn `max_turns`, ends the trajectory. Each trajectory opens with one of `n_prompts` prompt tokens.

    Prompt and observations are random, with probabilities that depend on the whole history through weights
    drawn once from `seed`. So is the terminal reward: 0 without ANSWER, and 0 or 1, for good, with it.

    ValueError if a size is below 1, or if there are more than `limit` trajectories.
    """

    n_words: int = 2
    max_turn_tokens: int = 3
    max_turns: int = 2
    n_observations: int = 2
    n_prompts: int = 2
    seed: int = 0
    limit: int = 20_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "seed" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"TokenMDP.{field.name}={value!r}: must be an integer of at least 1")
        if self.n_trajectories > self.limit:
            raise ValueError(
                f"TokenMDP: {self.n_trajectories:,} trajectories, the limit is {self.limit:,}; lower "
                "max_turns, max_turn_tokens, n_words or n_observations, or raise TokenMDP.limit if there is "
                "memory for it"
            )

    @property
    def search(self) -> int:
        """Token that ends a turn and asks for an observation."""
        return self.n_words

    @property
    def answer(self) -> int:
        """Token that ends the trajectory."""
        return self.n_words + 1

    @property
    def n_actions(self) -> int:
        return self.n_words + 2

    @property
    def n_tokens(self) -> int:
        """Whole vocabulary: actions, then observations, then prompts."""
        return self.n_actions + self.n_observations + self.n_prompts

    @property
    def width(self) -> int:
        """Tokens of the longest trajectory: the prompt, all turns, and the observations between them."""
        return self.max_turns * (self.max_turn_tokens + 1)

    @property
    def n_trajectories(self) -> int:
        """How many there are, counted without enumerating them."""
        ended = sum(self.n_words**i for i in range(self.max_turn_tokens))  # by a given one of the end tokens
        cut = self.n_words**self.max_turn_tokens
        go_on = (ended + cut) * self.n_observations
        early = sum(ended * go_on**k for k in range(self.max_turns - 1))
        return self.n_prompts * (early + (2 * ended + cut) * go_on ** (self.max_turns - 1))

    def token_name(self, token: int) -> str:
        """For people: a, b, ... SEARCH, ANSWER, o0, o1, ... q0, q1, ..."""
        if token < self.n_words:
            return chr(ord("a") + token)
        if token < self.n_actions:
            return "SEARCH" if token == self.search else "ANSWER"
        token -= self.n_actions
        return f"o{token}" if token < self.n_observations else f"q{token - self.n_observations}"

    def enumerate(self) -> Tree:
        """Every trajectory and every history, breadth first: all histories of one depth at a time."""
        random = torch.Generator().manual_seed(self.seed)
        shape = (self.width, self.n_tokens)
        answers = torch.randn(*shape, self.n_observations, generator=random, dtype=torch.float64)
        scores = torch.randn(*shape, generator=random, dtype=torch.float64)
        prompts = torch.randn(self.n_prompts, generator=random, dtype=torch.float64).softmax(0)

        n = self.n_prompts
        tokens = torch.full((n, self.width), -1)
        tokens[:, 0] = self.n_actions + self.n_observations + torch.arange(n)
        front = _Front(
            tokens=tokens,
            edges=torch.full((n, self.width), -1),
            length=torch.ones(n, dtype=torch.long),
            turn=torch.zeros(n, dtype=torch.long),
            position=torch.zeros(n, dtype=torch.long),
            edge=torch.full((n,), -1),
            probability=prompts,
            path_logprob=prompts.log(),
        )
        histories: list[_Front] = []
        finished: list[_Front] = []
        n_histories = 0
        while len(front.turn):
            histories.append(front)
            acted = self._act(front, n_histories)
            n_histories += len(front.turn)
            action = acted.edge % self.n_actions
            turn_ends = (action >= self.search) | (acted.position == self.max_turn_tokens)
            ends = (action == self.answer) | (turn_ends & (acted.turn == self.max_turns - 1))
            finished.append(acted.at(ends))
            observed = self._observe(acted.at(turn_ends & ~ends), answers)
            front = _Front.cat([acted.at(~turn_ends), observed])
        return self._tree(_Front.cat(histories), _Front.cat(finished), scores)

    def _act(self, front: _Front, first: int) -> _Front:
        """Each history followed by each action; edge = history * n_actions + action."""
        n = len(front.turn)
        action = torch.arange(self.n_actions).repeat(n)
        grown = front.at(torch.arange(n).repeat_interleave(self.n_actions))
        edge = first * self.n_actions + torch.arange(n * self.n_actions)
        return grown.append(action, edge)

    def _observe(self, front: _Front, answers: Tensor) -> _Front:
        """Each finished turn followed by each observation."""
        n, choices = len(front.turn), self.n_observations
        probability = _linear(answers, front.tokens).softmax(1).reshape(-1)
        grown = front.at(torch.arange(n).repeat_interleave(choices))
        grown = grown.append(self.n_actions + torch.arange(choices).repeat(n), None)
        return replace(
            grown,
            turn=grown.turn + 1,
            position=torch.zeros_like(grown.position),
            probability=probability,
            path_logprob=grown.path_logprob + probability.log(),
        )

    def _tree(self, histories: _Front, finished: _Front, scores: Tensor) -> Tree:
        answered = finished.edge % self.n_actions == self.answer
        good = _linear(scores[:, :, None], finished.tokens).squeeze(1) > 0
        agent_mask = finished.edges >= 0
        last = histories.tokens.gather(1, histories.length[:, None] - 1).squeeze(1)
        seen = torch.where(histories.tokens >= self.n_actions, histories.tokens, -1)
        place = torch.where(seen >= 0, torch.arange(self.width), 0).amax(1, keepdim=True)
        return Tree(
            mdp=self,
            tokens=finished.tokens.clamp_min(0),
            lengths=finished.length,
            agent_mask=agent_mask,
            rewards=(answered & good).double(),
            environment_logprobs=finished.path_logprob,
            edges=finished.edges[agent_mask],
            last_edges=finished.edge,
            history_tokens=histories.tokens,
            history_turns=histories.turn,
            history_positions=histories.position,
            history_last_tokens=last,
            history_observations=seen.gather(1, place).squeeze(1),
            history_edges=histories.edge,
            history_probabilities=histories.probability,
        )


@dataclass(frozen=True, eq=False)
class Tree:
    """All N trajectories, M agent tokens in them, and H histories at which the agent chooses a token.

    An edge is a choice: history * n_actions + action. Flat (M,) tensors go through the agent tokens row by
    row, as `Layout` does."""

    mdp: TokenMDP
    tokens: Tensor  # (N, T) int64, 0 in the padding
    lengths: Tensor  # (N,) int64
    agent_mask: Tensor  # (N, T) bool
    rewards: Tensor  # (N,) float64, terminal
    environment_logprobs: Tensor  # (N,) log-probability of the prompt and all observations, given the actions
    edges: Tensor  # (M,) choice made at each agent token
    last_edges: Tensor  # (N,) the final choice of each trajectory
    history_tokens: Tensor  # (H, T) tokens so far, -1 behind them
    history_turns: Tensor  # (H,) turn that the next token belongs to
    history_positions: Tensor  # (H,) tokens that this turn already has
    history_last_tokens: Tensor  # (H,)
    history_observations: Tensor  # (H,) latest observation, or the prompt
    history_edges: Tensor  # (H,) choice that led here, -1 at a prompt
    history_probabilities: Tensor  # (H,) of the environment's move after that choice; 1 within a turn

    @property
    def n_histories(self) -> int:
        return len(self.history_edges)

    @property
    def n_edges(self) -> int:
        return self.n_histories * self.mdp.n_actions

    @property
    def layout(self) -> Layout:
        return Layout.of(self.agent_mask)

    def __len__(self) -> int:
        return len(self.tokens)

    def with_rewards(self, rewards: Tensor) -> Tree:
        """The same tree under other terminal rewards (N,); ValueError unless one finite number each."""
        rewards = torch.as_tensor(rewards, dtype=torch.float64)
        if tuple(rewards.shape) != (len(self),):
            raise ValueError(f"rewards: expected shape ({len(self)},), got {tuple(rewards.shape)}")
        if not rewards.isfinite().all():
            row = int((~rewards.isfinite()).nonzero()[0])
            raise ValueError(f"rewards: must be finite, trajectory {row} has {rewards[row].item()}")
        return replace(self, rewards=rewards)

    def text(self, row: int) -> str:
        """Trajectory `row` in words; an observation or prompt stands in brackets."""
        names = [self.mdp.token_name(int(token)) for token in self.tokens[row, : self.lengths[row]]]
        agent = self.agent_mask[row].tolist()
        return " ".join(
            name if is_agent else f"[{name}]" for name, is_agent in zip(names, agent, strict=False)
        )


@dataclass(frozen=True, eq=False)
class _Front:
    """Histories of one depth while the tree grows; (n, T) or (n,) each."""

    tokens: Tensor
    edges: Tensor  # choice at each agent token so far, -1 elsewhere
    length: Tensor
    turn: Tensor
    position: Tensor
    edge: Tensor  # latest choice
    probability: Tensor  # of the environment's move since then
    path_logprob: Tensor  # of all its moves

    def at(self, index: Tensor) -> _Front:
        return _Front(*(getattr(self, field.name)[index] for field in fields(self)))

    @staticmethod
    def cat(fronts: list[_Front]) -> _Front:
        return _Front(
            *(torch.cat([getattr(front, field.name) for front in fronts]) for field in fields(_Front))
        )

    def append(self, token: Tensor, edge: Tensor | None) -> _Front:
        """One more token each, the agent's where `edge` is given."""
        place = self.length[:, None]
        grown = replace(self, tokens=self.tokens.scatter(1, place, token[:, None]), length=self.length + 1)
        if edge is None:
            return grown
        return replace(
            grown,
            edges=self.edges.scatter(1, place, edge[:, None]),
            edge=edge,
            position=self.position + 1,
            probability=torch.ones_like(self.probability),
        )


def _linear(weights: Tensor, tokens: Tensor) -> Tensor:
    """(T, V, K) weights, (n, T) tokens -> (n, K): each history's weights summed, scaled to unit variance."""
    real = tokens >= 0
    picked = weights[torch.arange(tokens.shape[1]), tokens.clamp_min(0)] * real[:, :, None]
    return picked.sum(1) / real.sum(1, keepdim=True).double().sqrt()
