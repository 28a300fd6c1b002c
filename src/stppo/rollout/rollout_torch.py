"""Multi-turn roll-out in PyTorch: one KV cache lives through all turns of a trajectory.

Each round prefills what the environment said (never regenerated) and decodes one turn for every unfinished
trajectory. Position ids count real tokens only. That makes the recorded log-probs equal to a later scoring
pass. A trajectory whose turn is closed is not computed until the next round, one that is done leaves for
good; random numbers are drawn for every trajectory of a round until its last turn is closed, so a sample does
not hang on what else is computed."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from stppo.policy.compiled import CompiledKVCache, is_compiled
from stppo.policy.compute import body_of, computing, logits_of
from stppo.rollout.kv_cache import KVCache
from stppo.rollout.rollout import Rollout, RolloutBuffer, Sampler
from stppo.trajectories import Trajectories
from stppo.world.protocol import Question

_SMALL_VOCABULARY = 4096  # up to which `draw` takes a random number for each token


class TorchRollout(Sampler):
    """Batched sampler, `config.batch_size` trajectories at a time."""

    @torch.no_grad()
    def collect(
        self,
        policy: PreTrainedModel,
        questions: list[Question],
        generator: torch.Generator,
        group_ids: list[int] | None = None,
        greedy: bool = False,
        policy_updates: int = 0,
        forced: list[list[int]] | None = None,
    ) -> Rollout:
        """See `Sampler.collect`."""
        group_ids = list(range(len(questions))) if group_ids is None else group_ids
        forced = [[]] * len(questions) if forced is None else forced
        parts, episodes = [], []
        for start in range(0, len(questions), self.config.batch_size):
            some = slice(start, start + self.config.batch_size)
            buffer = RolloutBuffer(self, questions[some])
            with computing(body_of(policy)):  # around all steps: weights are rounded to bfloat16 once
                self._play(buffer, policy, generator, greedy, forced[some])
            parts.append(buffer.finish(group_ids[some], policy_updates))
            episodes += buffer.episodes
        return Rollout(Trajectories.cat(parts), episodes)

    def _play(
        self,
        buffer: RolloutBuffer,
        policy: PreTrainedModel,
        generator: torch.Generator,
        greedy: bool,
        forced: list[list[int]],
    ) -> None:
        # -1 where a slot has no forced token (left): always in the last column.
        forced = pad_sequence([torch.tensor([*ids, -1]) for ids in forced], True, -1)
        emitted = torch.zeros(len(forced), dtype=torch.long)
        slots = torch.arange(len(forced))
        fed = torch.zeros(len(forced), dtype=torch.long)  # tokens of each slot that the cache holds
        cache = _KVCache(policy, *buffer.tokens.shape, self.keeps_states)
        while len(slots):
            pending = (buffer.lengths - fed)[slots, None]
            chunk_mask = torch.arange(int(pending.max())) < pending
            columns = (fed[slots, None] + torch.arange(chunk_mask.shape[1])).where(chunk_mask, 0)
            chunk = buffer.tokens[slots[:, None], columns].where(chunk_mask, 0)
            fed_rows = torch.arange(len(slots))  # of the slots that are computed
            states = cache.feed(slots, chunk, chunk_mask)
            open_slots = torch.ones(len(slots), dtype=torch.bool)
            start = buffer.lengths[slots]
            turn = torch.zeros(len(slots), buffer.max_turn, dtype=torch.long)
            logprobs = torch.zeros(turn.shape)
            n_tokens = torch.zeros(len(slots), dtype=torch.long)
            given = forced[slots, -1]
            for step in range(buffer.max_turn):
                if forced.shape[1] > 1:
                    given = forced[slots, (emitted[slots] + step).clamp(max=forced.shape[1] - 1)]
                sampled, logprobs[:, step] = self._sample(policy, states, fed_rows, generator, greedy, given)
                turn[:, step] = sampled
                n_tokens += open_slots
                # A closed slot keeps its newest token out of the cache: it leads the next prefill.
                open_slots &= ~self.turn_end(sampled, turn[:, : step + 1], open_slots)
                if step + 1 == buffer.max_turn or not open_slots.any():
                    break
                if cache.drops_closed:
                    fed_rows = open_slots.nonzero().squeeze(1)
                    states = cache.feed(slots[fed_rows], sampled[fed_rows, None], open_slots[fed_rows, None])
                else:
                    states = cache.feed(slots, sampled[:, None], open_slots[:, None])
            buffer.emit(slots, turn, logprobs, n_tokens)
            emitted[slots] += n_tokens
            fed[slots] = buffer.lengths[slots] - 1
            keep = buffer.environment_turn(slots, start)
            slots = slots[keep]
            cache.keep(keep, slots)
        buffer.below = cache.below

    def _sample(
        self,
        policy: PreTrainedModel,
        states: Tensor,
        rows: Tensor,
        generator: torch.Generator,
        greedy: bool,
        given: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Next tokens (n,) and their log-probs, of states (a, H) for `rows` (a,) of these n, 0 elsewhere;
        `given` (n,) overrides what is drawn where it is not -1."""
        temperature = 1.0 if greedy else self.config.temperature
        logits = logits_of(policy, states)
        log_probs = torch.log_softmax(logits.float().cpu() / temperature, -1)
        if log_probs[:, 0].isnan().any():  # one number that is not finite makes a row NaN, -inf alone aside
            raise FloatingPointError("non-finite logits in a roll-out")
        found = log_probs.argmax(-1) if greedy else draw(log_probs.exp(), rows, len(given), generator)
        found = torch.where(given[rows] < 0, found, given[rows])
        chosen = log_probs.gather(1, found[:, None]).squeeze(1)
        sampled, logprobs = torch.zeros_like(given), chosen.new_zeros(len(given))
        sampled[rows], logprobs[rows] = found, chosen
        return sampled, logprobs


def draw(probs: Tensor, rows: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """A token (a,) from each distribution (a, V), those of the `rows` (a,) of n. The random numbers are those
    of n rows, so a draw does not hang on which of them are computed.

    `torch.multinomial` takes a random number for each row and token. With a large vocabulary that costs as
    much as a small model's layers; there the inverse of the distribution function takes one number for each
    row."""
    if probs.shape[1] > _SMALL_VOCABULARY:
        uniform = torch.rand(n, 1, dtype=torch.float64, generator=generator)[rows]
        below = probs.double().cumsum(-1)
        # Strictly below the last sum, so that a token of probability 0 at the end is never found.
        at = (uniform * below[:, -1:]).clamp(max=torch.nextafter(below[:, -1:], below.new_zeros(())))
        return torch.searchsorted(below, at, right=True).squeeze(1)
    if len(rows) < n:
        probs = probs.new_ones(n, probs.shape[1]).index_copy_(0, rows, probs)
    found = torch.multinomial(probs, 1, generator=generator).squeeze(1)
    return found if len(found) == len(rows) else found[rows]


class _KVCache:
    """The slots of a buffer, n of at most `room` tokens, in compiled code or in PyTorch."""

    def __init__(self, policy: PreTrainedModel, n: int, room: int, keeps_states: bool) -> None:
        body = body_of(policy)
        self.compiled = is_compiled(body)
        self.drops_closed = not self.compiled  # compiled code skips them itself
        self.slots = CompiledKVCache(body, n, room) if self.compiled else KVCache(body, n, room, keeps_states)

    @property
    def below(self) -> Tensor | None:
        """(n, room, H) states of a divided policy's frozen layers, where they are kept."""
        return getattr(self.slots, "below", None)

    def feed(self, ids: Tensor, chunk: Tensor, mask: Tensor) -> Tensor:
        """Append tokens (a, m), real where mask (a, m) holds, to the slots `ids` (a,), in compiled code all;
        returns the states (a, H) of each slot's last real token of the chunk (rows without one are to be
        ignored)."""
        return self.slots.feed(chunk, mask) if self.compiled else self.slots.feed(ids, chunk, mask)

    def keep(self, rows: Tensor, ids: Tensor) -> None:
        """Drop all slots but `ids`, which are these rows of the present ones."""
        self.slots.keep(rows if self.compiled else ids)
