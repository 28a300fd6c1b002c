"""Multi-turn roll-out in PyTorch: one KV cache lives through all turns of a trajectory.

Each round prefills what the environment said (never regenerated) and decodes one turn for every
unfinished trajectory. Lanes have different lengths, so the cache holds padding that the attention mask
hides; position ids count real tokens only. That makes the recorded log-probs equal to a later scoring
pass. Trajectories that are done leave the batch.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from stppo.agent.compiled import CompiledLanes, is_compiled
from stppo.agent.compute import body_of, computing, logits_of
from stppo.agent.rollout import Board, Rollout, Sampler
from stppo.trajectories import Trajectories
from stppo.world.protocol import Question


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
            board = Board(self, questions[some])
            self._play(board, policy, generator, greedy, forced[some])
            parts.append(board.finish(group_ids[some], policy_updates))
            episodes += board.episodes
        return Rollout(Trajectories.cat(parts), episodes)

    def _play(
        self,
        board: Board,
        policy: PreTrainedModel,
        generator: torch.Generator,
        greedy: bool,
        forced: list[list[int]],
    ) -> None:
        device = policy.device
        # -1 where a lane has no forced token (left): always in the last column.
        forced = pad_sequence([torch.tensor([*ids, -1]) for ids in forced], True, -1)
        emitted = torch.zeros(len(forced), dtype=torch.long)
        lanes = torch.arange(len(forced))
        fed = torch.zeros(len(forced), dtype=torch.long)  # tokens of each lane that the cache holds
        cache = _LaneCache(policy, *board.tokens.shape)
        while len(lanes):
            pending = [board.tokens[lane, fed[lane] : board.lengths[lane]] for lane in lanes.tolist()]
            chunk = pad_sequence(pending, batch_first=True)
            chunk_mask = torch.arange(chunk.shape[1]) < torch.tensor([len(p) for p in pending])[:, None]
            logits = cache.feed(chunk.to(device), chunk_mask.to(device))
            open_lanes = torch.ones(len(lanes), dtype=torch.bool)
            start = board.lengths[lanes]
            turn = torch.zeros(len(lanes), 0, dtype=torch.long)
            for step in range(board.max_turn):
                given = forced[lanes, emitted[lanes].clamp(max=forced.shape[1] - 1)]
                sampled, logprob = self._sample(logits, generator, greedy, given)
                turn = torch.cat([turn, sampled[:, None]], 1)
                rows = lanes[open_lanes]
                board.emit(rows, sampled[open_lanes], logprob[open_lanes])
                emitted[rows] += 1
                # A closed lane keeps its newest token out of the cache: it leads the next prefill.
                open_lanes &= ~self.turn_end(sampled, turn, open_lanes)
                if step + 1 == board.max_turn or not open_lanes.any():
                    break
                logits = cache.feed(sampled[:, None].to(device), open_lanes[:, None].to(device))
            fed[lanes] = board.lengths[lanes] - 1
            keep = board.environment_turn(lanes, start)
            lanes = lanes[keep]
            cache.keep(keep.to(device))

    def _sample(
        self, logits: Tensor, generator: torch.Generator, greedy: bool, given: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Next tokens (n,) and their log-probs; `given` (n,) overrides what is drawn where it is not -1."""
        log_probs = torch.log_softmax(logits.float().cpu() / (1.0 if greedy else self.config.temperature), -1)
        if not torch.isfinite(log_probs).any(1).all():
            raise FloatingPointError("non-finite logits in a roll-out")
        if greedy:
            sampled = log_probs.argmax(-1)
        else:
            sampled = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
        sampled = torch.where(given < 0, sampled, given)
        return sampled, log_probs.gather(1, sampled[:, None]).squeeze(1)


class _LaneCache:
    """A KV cache whose lanes (rows) have holes: `valid` (n, S) says which cached positions are real. Compiled code has one
    without holes, for n lanes of at most `room` tokens."""

    def __init__(self, policy: PreTrainedModel, n: int, room: int) -> None:
        self.policy = policy
        self.compiled = CompiledLanes(body_of(policy), n, room) if is_compiled(body_of(policy)) else None
        self.cache = DynamicCache(config=policy.config)
        self.valid: Tensor | None = None

    def feed(self, chunk: Tensor, mask: Tensor) -> Tensor:
        """Append tokens (n, m), real where mask (n, m) holds; returns the logits (n, V) after each lane's
        last real token of the chunk (rows without one return values to be ignored)."""
        if self.compiled is not None:
            return logits_of(self.policy, self.compiled.feed(chunk, mask))
        n, m = chunk.shape
        past = torch.zeros(n, 0, dtype=torch.bool, device=chunk.device) if self.valid is None else self.valid
        position_ids = past.sum(1, keepdim=True) + (mask.long().cumsum(1) - 1).clamp(min=0)
        causal = torch.ones(m, m, dtype=torch.bool, device=chunk.device).tril()
        visible = torch.cat([past[:, None, :].expand(n, m, -1), causal[None] & mask[:, None, :]], 2)
        # A padded query with nothing to see would turn into NaN; let it see itself.
        visible[:, :, past.shape[1] :] |= torch.eye(m, dtype=torch.bool, device=chunk.device)
        body = body_of(self.policy)
        self.valid = torch.cat([past, mask], 1)
        last = (mask.long().cumsum(1) * mask).argmax(1)
        with computing(body):
            hidden = body(
                input_ids=chunk,
                attention_mask=visible[:, None],
                position_ids=position_ids,
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state
            return logits_of(self.policy, hidden[torch.arange(n, device=chunk.device), last])

    def keep(self, rows: Tensor) -> None:
        """Drop all lanes but these rows."""
        if self.compiled is not None:
            self.compiled.keep(rows)
            return
        if len(rows) and len(rows) < self.valid.shape[0]:
            self.cache.batch_select_indices(rows)
        self.valid = self.valid[rows]
