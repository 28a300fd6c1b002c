"""Keys and values of many trajectories (slots) that are decoded side by side by a transformers model.

A slot's tokens lie in the columns of their positions, without holes, and the slots that are fed lie in the
first rows. So a step computes no slot that has closed its turn, copies no cache to append to it, and in
decoding repeats no grouped key."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stppo.policy.compute import computing
from stppo.policy.frozen import is_divided, layers_of
from stppo.policy.policy import length_sorted_chunks

_FIRST_ROOM = 64
_MANY = 16  # slots, from which padding costs more than passes of fewer rows do
_ATTENTION = "stppo_kv_cache"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Attention of one new token (n, heads, 1, d) to keys and values (n, kv_heads, S, d), each group of heads
    at once; of several tokens as `sdpa` does it. attention_mask: (n, 1, m, S) bool."""
    n, heads, m, width = query.shape
    if m > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    grouped = query.view(n, key.shape[1], -1, width)
    scores = grouped @ key.transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
    shares = scores.masked_fill(~attention_mask, float("-inf")).softmax(-1)
    return (shares @ value).view(n, 1, heads, width), None


AttentionInterface.register(_ATTENTION, _attend)


class KVCache:
    """n slots of at most `limit` tokens, numbered from 0. below: (n, limit, H), filled with the states that a
    divided body's frozen layers give, or None.

    It is its own transformers cache: `update` is what an attention layer calls.
    """

    def __init__(self, body: nn.Module, n: int, limit: int, keeps_states: bool = False) -> None:
        self.body, self.limit = body, limit
        self.room = min(limit, _FIRST_ROOM)
        self.stores: dict[int, list[Tensor]] = {}  # by layer: keys and values, (rows, kv_heads, room, d)
        self.ids = torch.arange(n)  # which slot lies in a row
        self.past = torch.zeros(n, dtype=torch.long)  # tokens in it
        self.below: Tensor | None = None
        self.keeps_states = keeps_states and is_divided(body)

    def feed(self, ids: Tensor, chunk: Tensor, mask: Tensor) -> Tensor:
        """Append to each of the slots `ids` (a,) the tokens (a, m) that the mask (a, m) leaves, its first
        ones; returns the state (a, H) of each slot's last one, of slots without one a state without meaning.
        All on the CPU; the states stay where the body computes. Many chunks are fed a quarter at a time,
        those of like length together."""
        counts = mask.sum(1)
        if chunk.shape[1] == 1 or len(ids) < _MANY:
            return self._feed(ids, chunk, mask, counts)
        states = None
        for rows in length_sorted_chunks(counts, 4):
            longest = max(1, int(counts[rows].max()))
            found = self._feed(ids[rows], chunk[rows, :longest], mask[rows, :longest], counts[rows])
            states = found.new_empty(len(ids), found.shape[1]) if states is None else states
            states[rows.to(found.device)] = found
        return states

    def _feed(self, ids: Tensor, chunk: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
        """`feed`, all at once. counts: (a,) tokens of each."""
        device = next(self.body.parameters()).device
        rows = self._to_front(ids)
        order = torch.argsort(rows)
        chunk, mask, counts = chunk[order], mask[order], counts[order]
        a = len(ids)
        past = self.past[:a]
        longest = int((past + counts).max())
        if longest > self.limit:
            raise ValueError(f"a slot holds more than {self.limit} tokens")
        self._make_room(longest)
        positions = past[:, None] + (mask.long().cumsum(1) - 1).clamp(min=0)
        row, column = mask.nonzero(as_tuple=True)
        self.new = (row.to(device), column.to(device), positions[row, column].to(device))
        self.alone = not past.any()  # then the chunk is all there is, and causal
        self.width = longest
        visible = None
        if not self.alone:
            visible = (torch.arange(longest) <= positions[:, :, None])[:, None].to(device)
        with computing(self.body), self._attention(), self._listening(positions, mask):
            hidden = self.body(
                input_ids=chunk.to(device),
                attention_mask=visible,
                position_ids=positions.to(device),
                past_key_values=self,
                use_cache=True,
            ).last_hidden_state
        self.past[:a] = past + counts
        last = (counts - 1).clamp(min=0)
        states = hidden[torch.arange(a, device=device), last.to(device)]
        return states[rows.to(device)]

    def keep(self, ids: Tensor) -> None:
        """Forget all slots but these."""
        self._to_front(ids)
        a = len(ids)
        self.ids, self.past = self.ids[:a], self.past[:a].clone()
        for store in self.stores.values():
            if a <= len(store[0]) // 2:
                store[:] = [part[:a].clone() for part in store]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Called by the attention of a layer with what is new, (a, kv_heads, m, d); returns what it attends
        to."""
        row, column, position = self.new
        if layer not in self.stores:
            shape = (len(self.ids), keys.shape[1], self.room, keys.shape[3])
            self.stores[layer] = [torch.zeros(shape, dtype=x.dtype, device=x.device) for x in (keys, values)]
        store = self.stores[layer]
        for part, found in zip(store, (keys, values), strict=True):
            part[row, :, position] = found[row, :, column]
        if self.alone:
            return keys, values
        return tuple(part[: len(keys), :, : self.width] for part in store)

    def get_seq_length(self, *_) -> int:
        return int(self.past.max())

    # ---- rows -----------------------------------------------------------------------------------

    def _to_front(self, ids: Tensor) -> Tensor:
        """Exchange rows so that these slots lie in the first ones; returns the row (a,) of each."""
        a = len(ids)
        wanted = torch.isin(self.ids, ids)
        if not wanted[:a].all():
            leave = (~wanted[:a]).nonzero().squeeze(1)
            come = wanted[a:].nonzero().squeeze(1) + a
            to, source = torch.cat([leave, come]), torch.cat([come, leave])
            for mine in (self.ids, self.past):
                mine[to] = mine[source].clone()
            for store in self.stores.values():
                for part in store:
                    part[to.to(part.device)] = part[source.to(part.device)]
        place = torch.empty(int(self.ids.max()) + 1, dtype=torch.long)
        place[self.ids[:a]] = torch.arange(a)
        return place[ids]

    def _make_room(self, columns: int) -> None:
        if columns <= self.room:
            return
        self.room = min(self.limit, max(columns, 2 * self.room))
        for store in self.stores.values():
            for i, part in enumerate(store):
                rows, heads, _, width = part.shape
                store[i] = part.new_zeros(rows, heads, self.room, width)
                store[i][:, :, : part.shape[2]] = part

    # ---- while the body computes ----------------------------------------------------------------

    @contextmanager
    def _attention(self) -> Iterator[None]:
        before = self.body.config._attn_implementation
        self.body.config._attn_implementation = _ATTENTION
        try:
            yield
        finally:
            self.body.config._attn_implementation = before

    @contextmanager
    def _listening(self, positions: Tensor, mask: Tensor) -> Iterator[None]:
        """Keep the states that enter the first trained layer."""
        if not self.keeps_states:
            yield
            return

        def keep(_, given: tuple, named: dict) -> None:
            states = (given[0] if given else named["hidden_states"]).detach().cpu()
            if self.below is None:
                self.below = states.new_zeros(len(self.ids), self.limit, states.shape[-1])
            slots = self.ids[: len(mask), None].expand_as(mask)
            self.below[slots[mask], positions[mask]] = states[mask]

        first = layers_of(self.body)[self.body.frozen_layers]
        handle = first.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
