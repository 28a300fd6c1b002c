"""The one batch type that all layers speak: right-padded trajectories and where their agent tokens stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property

import torch
from torch import Tensor


def turn_ids(agent_mask: Tensor) -> Tensor:
    """Number the turns of each row, from the mask alone.

    A turn is a maximal run of agent tokens. `agent_mask` is (B, T) bool; the result is (B, T) int64 with
    0, 1, 2, ... on agent tokens and -1 elsewhere.
    """
    starts = agent_mask.clone()
    starts[:, 1:] &= ~agent_mask[:, :-1]
    return torch.where(agent_mask, starts.cumsum(1) - 1, -1)


SEGMENTS = ("token", "turn", "sentence", "sequence")


@dataclass(frozen=True, eq=False)
class Segments:
    """One way to cut the N agent tokens into S runs, each within one trajectory, in the tokens' order.

    index (N,): the segment of each token; lengths (S,): its number of agent tokens.
    """

    index: Tensor
    lengths: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """(N,) -> (S,)"""
        return values.new_zeros(len(self.lengths)).index_add(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """(N,) -> (S,)"""
        return self.sum(values) / self.lengths

    def share(self, values: Tensor) -> Tensor:
        """(S,) -> (N,): gives every token what its segment has"""
        return values[self.index]

    @cached_property
    def starts(self) -> Tensor:
        """(S,) index, among the N agent tokens, of each segment's first token"""
        return self.lengths.cumsum(0) - self.lengths


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the N agent tokens of a (B, T) batch stand, flattened in row-major order, with their K turns.

    Everything in `stppo.objectives` works on these N tokens: whatever stands at environment or padding
    positions is dropped before the first operation, so it cannot leak into a loss, ratio or normaliser.
    """

    shape: tuple[int, int]
    positions: Tensor  # (N,) index into the flattened batch
    rows: Tensor  # (N,) trajectory of each token
    turns: Tensor  # (N,) turn of each token, numbered through the batch
    row_lengths: Tensor  # (B,) agent tokens per trajectory
    turn_lengths: Tensor  # (K,) agent tokens per turn
    turn_rows: Tensor  # (K,) trajectory of each turn
    row_turns: Tensor  # (B,) turns per trajectory
    sentence_ends: Tensor | None = None  # (N,) bool, see `Trajectories`; None: each turn is one sentence

    @classmethod
    def of(cls, agent_mask: Tensor, sentence_ends: Tensor | None = None) -> Layout:
        """From (B, T) bool; `sentence_ends`, of the same shape, is read at agent tokens alone."""
        flat = agent_mask.reshape(-1)
        positions = flat.nonzero().squeeze(1)
        n_rows, width = agent_mask.shape
        rows = positions // width
        # A token starts a turn unless the token before it is an agent token of the same row.
        starts = torch.ones_like(rows)
        starts[1:] = ((positions[1:] - positions[:-1] > 1) | (rows[1:] != rows[:-1])).long()
        turns = starts.cumsum(0) - 1
        turn_rows = rows[starts.bool()]
        return cls(
            shape=(n_rows, width),
            positions=positions,
            rows=rows,
            turns=turns,
            row_lengths=torch.bincount(rows, minlength=n_rows),
            turn_lengths=torch.bincount(turns),
            turn_rows=turn_rows,
            row_turns=torch.bincount(turn_rows, minlength=n_rows),
            sentence_ends=None if sentence_ends is None else sentence_ends.reshape(-1)[positions],
        )

    def segments(self, name: str) -> Segments:
        """The segments of one kind of `SEGMENTS`: each token by itself, turns, sentences, whole
        trajectories."""
        if name not in SEGMENTS:
            raise ValueError(f"segments={name!r}: must be one of {', '.join(SEGMENTS)}")
        if name == "token":
            return Segments(torch.arange(len(self.rows), device=self.rows.device), torch.ones_like(self.rows))
        if name == "sequence":
            return Segments(self.rows, self.row_lengths)
        return Segments(self.turns, self.turn_lengths) if name == "turn" else self._sentences

    @cached_property
    def _sentences(self) -> Segments:
        """A sentence begins where a turn does and behind every marked end."""
        if self.sentence_ends is None:
            return self.segments("turn")
        begins = torch.zeros_like(self.sentence_ends)
        begins[1:] = self.sentence_ends[:-1]
        begins[self.turn_starts] = True
        index = begins.long().cumsum(0) - 1
        return Segments(index, torch.bincount(index))

    def gather(self, values: Tensor) -> Tensor:
        """(B, T) -> (N,): the entries at agent tokens; differentiable."""
        return values.reshape(-1)[self.positions]

    def scatter(self, values: Tensor) -> Tensor:
        """(N,) -> (B, T): zeros at environment and padding positions."""
        out = values.new_zeros(self.shape)
        out.view(-1)[self.positions] = values
        return out

    def row_sum(self, values: Tensor) -> Tensor:
        """(N,) -> (B,)"""
        return self.segments("sequence").sum(values)

    def row_mean(self, values: Tensor) -> Tensor:
        """(N,) -> (B,), mean over each trajectory's agent tokens"""
        return self.segments("sequence").mean(values)

    def turn_sum(self, values: Tensor) -> Tensor:
        """(N,) -> (K,)"""
        return self.segments("turn").sum(values)

    def turn_mean(self, values: Tensor) -> Tensor:
        """(N,) -> (K,)"""
        return self.segments("turn").mean(values)

    @cached_property
    def turn_starts(self) -> Tensor:
        """(K,) index, among the N agent tokens, of each turn's first token"""
        return self.segments("turn").starts


@dataclass(eq=False)
class Trajectories:
    """B right-padded trajectories of width T; entry t of every (B, T) tensor belongs to token t.

    tokens              (B, T) int64
    lengths             (B,)   int64, real tokens per row; later positions are padding
    agent_mask          (B, T) bool, True on tokens that the policy emitted
    behaviour_logprobs  (B, T) float, log pi_old(token t | tokens before t) in nats; 0 off the mask
    rewards             (B, T) float, reward received on emitting token t; 0 off the mask
    group_ids           (B,)   int64, shared by the trajectories of one question in one batch
    policy_updates      (B,)   int64, optimiser updates that the behaviour policy had seen
    sentence_ends       (B, T) bool, True on agent tokens that end a sentence; the last token of a turn ends
                        one in any case, and entries off the mask are not read. Left out: each turn is one
                        sentence
    below               (B, T, H) float, states at each token that a policy's frozen layers give
                        (`stppo.policy.frozen`); those of a row's last token and behind it are not read. None
                        where they were not kept

    Raises ValueError, naming field and row, for anything that contradicts this: a row without agent tokens
    has no turns, and a token at position 0 has no context to be sampled from.
    """

    tokens: Tensor
    lengths: Tensor
    agent_mask: Tensor
    behaviour_logprobs: Tensor
    rewards: Tensor
    group_ids: Tensor
    policy_updates: Tensor
    sentence_ends: Tensor | None = None
    below: Tensor | None = None

    def __post_init__(self) -> None:
        if self.sentence_ends is None:
            self.sentence_ends = torch.zeros_like(self.agent_mask, dtype=torch.bool)
        if self.tokens.ndim != 2 or 0 in self.tokens.shape:
            raise ValueError(f"tokens: expected a non-empty (B, T) tensor, got {tuple(self.tokens.shape)}")
        n_rows, width = self.tokens.shape
        for name, ndim, kind in _FIELDS:
            value = getattr(self, name)
            expected = (n_rows, width)[:ndim]
            if tuple(value.shape) != expected:
                raise ValueError(f"{name}: expected shape {expected}, got {tuple(value.shape)}")
            if not _KINDS[kind](value.dtype):
                raise ValueError(f"{name}: expected {kind} values, got {value.dtype}")
        if self.below is not None and tuple(self.below.shape[:-1]) != (n_rows, width):
            raise ValueError(
                f"below: expected shape {(n_rows, width)} and a width, got {tuple(self.below.shape)}"
            )
        column = torch.arange(width, device=self.tokens.device)
        self._refuse(self.lengths.lt(1) | self.lengths.gt(width), f"lengths: must lie in 1..{width}")
        outside = self.agent_mask & (column >= self.lengths[:, None])
        self._refuse(outside.any(1), "agent_mask: agent token in the padding, beyond lengths")
        self._refuse(self.agent_mask[:, 0], "agent_mask: agent token at position 0, which has no context")
        self._refuse(~self.agent_mask.any(1), "agent_mask: no agent token, hence no turn")
        bad = self.agent_mask & ~self.behaviour_logprobs.isfinite()
        self._refuse(bad.any(1), "behaviour_logprobs: not finite on an agent token")
        self._refuse((~self.rewards.isfinite()).any(1), "rewards: not finite")
        self._refuse(((self.rewards != 0) & ~self.agent_mask).any(1), "rewards: non-zero off the agent mask")

    def _refuse(self, rows: Tensor, message: str) -> None:
        if rows.any():
            raise ValueError(f"{message} (row {int(rows.nonzero()[0])})")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def turn_ids(self) -> Tensor:
        """(B, T) int64: 0, 1, ... on agent tokens, -1 elsewhere"""
        return turn_ids(self.agent_mask)

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.agent_mask, self.sentence_ends)

    @property
    def n_agent_tokens(self) -> Tensor:
        """(B,) int64"""
        return self.layout.row_lengths

    @property
    def n_turns(self) -> Tensor:
        """(B,) int64"""
        return self.layout.row_turns

    @property
    def returns(self) -> Tensor:
        """(B,) undiscounted sum of rewards"""
        return self.rewards.sum(1)

    @property
    def turn_rewards(self) -> Tensor:
        """(K,) what each turn was paid: the sum over its tokens"""
        return self.layout.turn_sum(self.layout.gather(self.rewards))

    def select(self, index: Tensor | Sequence[int]) -> Trajectories:
        """The rows `index` (integers or a (B,) bool mask), trimmed to the longest of them."""
        index = torch.as_tensor(index, device=self.tokens.device)
        chosen = int(index.sum()) if index.dtype == torch.bool else index.numel()
        if chosen == 0:
            raise ValueError("select: the index names no row")
        width = int(self.lengths[index].max())
        return Trajectories(**{f: _trim(v[index], width) for f, v in self.state_dict().items()})

    @staticmethod
    def cat(batches: Sequence[Trajectories]) -> Trajectories:
        """Stack batches, padding with zeros to the widest; group ids are kept, so make them distinct
        before."""
        if not batches:
            raise ValueError("cat: no batch given")
        width = max(batch.tokens.shape[1] for batch in batches)
        parts = [batch.state_dict() for batch in batches]
        return Trajectories(
            **{name: torch.cat([_pad(part[name], width) for part in parts]) for name in parts[0]}
        )

    def to(self, device: torch.device | str) -> Trajectories:
        return Trajectories(**{name: value.to(device) for name, value in self.state_dict().items()})

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by its name; `below` only where it was kept."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Trajectories:
        """Undo `state_dict`; what an older version did not save (`sentence_ends`) has its default."""
        known = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        if not needed <= set(state) <= known:
            raise ValueError(
                f"trajectories: missing fields {sorted(needed - set(state))}, "
                f"unknown fields {sorted(set(state) - known)}"
            )
        return cls(**state)


_FIELDS = (
    ("tokens", 2, "int64"),
    ("lengths", 1, "int64"),
    ("agent_mask", 2, "bool"),
    ("behaviour_logprobs", 2, "float"),
    ("rewards", 2, "float"),
    ("group_ids", 1, "int64"),
    ("policy_updates", 1, "int64"),
    ("sentence_ends", 2, "bool"),
)
_KINDS = {
    "int64": lambda dtype: dtype == torch.int64,
    "bool": lambda dtype: dtype == torch.bool,
    "float": lambda dtype: dtype.is_floating_point,
}


def _trim(value: Tensor, width: int) -> Tensor:
    return value[:, :width] if value.ndim > 1 else value


def _pad(value: Tensor, width: int) -> Tensor:
    if value.ndim == 1:
        return value
    return torch.nn.functional.pad(value, (*[0] * (2 * value.ndim - 4), 0, width - value.shape[1]))
