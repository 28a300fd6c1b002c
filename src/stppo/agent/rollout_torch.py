"""Multi-turn roll-out in PyTorch: one KV cache lives through all turns of a trajectory.

Each round prefills what the environment said (never regenerated) and decodes one turn for every
unfinished trajectory. Lanes have different lengths, so the cache holds padding that the attention mask
hides; position ids count real tokens only. That makes the recorded log-probs equal to a later scoring
pass. Trajectories that are done leave the batch.
"""

from dataclasses import dataclass as plain_dataclass
from dataclasses import replace

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from stppo.trajectories import Trajectories
from stppo.world.environment import Episode, SearchEnvironment
from stppo.world.protocol import Question


@plain_dataclass
class Rollout:
    """Sampled trajectories (B rows) and, row by row, the episodes they played."""

    trajectories: Trajectories
    episodes: list[Episode]


@dataclass(config=ConfigDict(extra="forbid"), frozen=True)
class RolloutConfig:
    """How trajectories are sampled; `temperature` also divides the logits when they are scored."""

    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    max_tokens: int = Field(256, gt=1)
    batch_size: int = Field(256, gt=0)


def at_temperature_one(config: RolloutConfig) -> RolloutConfig:
    """The same settings for evaluation, which is always at temperature 1 (or greedy)."""
    return replace(config, temperature=1.0)


class TurnEnd:
    """Tells which lanes have just closed a turn: a closing tag was completed, or the end token came.

    Works for any tokenizer: only tokens whose text holds the tags' last character are decoded.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, closing_tags: tuple[str, ...]) -> None:
        self.tokenizer, self.closing_tags = tokenizer, closing_tags
        last = {tag[-1] for tag in closing_tags}
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        self.candidate = torch.tensor([any(c in text for c in last) for text in texts])
        self.tail = max(len(tag) for tag in closing_tags)

    def __call__(self, tokens: Tensor, recent: Tensor, open_lanes: Tensor) -> Tensor:
        """tokens (n,) just sampled, recent (n, m) tokens of this turn so far; returns closed (n,) bool."""
        closed = tokens == (-1 if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id)
        for lane in (self.candidate[tokens] & open_lanes).nonzero().flatten().tolist():
            text = self.tokenizer.decode(recent[lane, -self.tail :])
            closed[lane] |= any(tag in text for tag in self.closing_tags)
        return closed


class TorchRollout:
    """Batched sampler: `collect` plays questions with a policy in an environment."""

    def __init__(
        self, environment: SearchEnvironment, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig
    ) -> None:
        self.environment, self.tokenizer, self.config = environment, tokenizer, config
        self.turn_end = TurnEnd(tokenizer, environment.protocol.stop_strings)

    def encode(self, text: str) -> list[int]:
        """Environment text to token ids; it is tokenised once and never merged with agent tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

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
        """Play each question once (repeat a question, with its group id, to sample a group).

        Behaviour log-probs are those of the distribution sampled from: at `temperature`, full vocabulary.
        Under `greedy` the argmax is taken and log-probs are those of temperature 1.
        forced: for each question the first agent tokens of its trajectory, turn after turn; they are taken
        instead of sampled ones while they last (and recorded like them), which continues a trajectory.
        """
        group_ids = list(range(len(questions))) if group_ids is None else group_ids
        forced = [[]] * len(questions) if forced is None else forced
        parts, episodes = [], []
        for start in range(0, len(questions), self.config.batch_size):
            stop = start + self.config.batch_size
            part, played = self._collect(
                policy,
                questions[start:stop],
                group_ids[start:stop],
                generator,
                greedy,
                policy_updates,
                forced[start:stop],
            )
            parts.append(part)
            episodes += played
        return Rollout(Trajectories.cat(parts), episodes)

    def _collect(
        self, policy, questions, group_ids, generator, greedy, policy_updates, forced
    ) -> tuple[Trajectories, list[Episode]]:
        n, limit = len(questions), self.config.max_tokens
        device = policy.device
        episodes = [self.environment.start(question) for question in questions]
        tokens = torch.full((n, limit), self.tokenizer.pad_token_id or 0)
        agent_mask = torch.zeros(n, limit, dtype=torch.bool)
        logprobs = torch.zeros(n, limit)
        lengths = torch.zeros(n, dtype=torch.long)
        # -1 where a lane has no forced token (left): always in the last column.
        forced = pad_sequence([torch.tensor([*ids, -1]) for ids in forced], True, -1)
        emitted = torch.zeros(n, dtype=torch.long)

        lanes = torch.arange(n)
        pending = [torch.tensor(self.encode(episode.prompt)) for episode in episodes]
        if max(map(len, pending)) + self.environment.protocol.max_turn_tokens > limit:
            raise ValueError(
                f"rollout.max_tokens={limit} leaves no room for a turn after the longest prompt "
                f"({max(map(len, pending))} tokens); raise it"
            )
        for lane, prompt in enumerate(pending):
            tokens[lane, : len(prompt)] = prompt
            lengths[lane] = len(prompt)
        cache = _LaneCache(policy)

        while len(lanes):
            chunk = pad_sequence(pending, batch_first=True)
            chunk_mask = torch.arange(chunk.shape[1]) < torch.tensor([len(p) for p in pending])[:, None]
            logits = cache.feed(chunk.to(device), chunk_mask.to(device))
            open_lanes = torch.ones(len(lanes), dtype=torch.bool)
            start = lengths[lanes].clone()
            turn = torch.zeros(len(lanes), 0, dtype=torch.long)
            for step in range(self.environment.protocol.max_turn_tokens):
                given = forced[lanes, emitted[lanes].clamp(max=forced.shape[1] - 1)]
                sampled, logprob = self._sample(logits, generator, greedy, given)
                turn = torch.cat([turn, sampled[:, None]], 1)
                rows, columns = lanes[open_lanes], lengths[lanes[open_lanes]]
                tokens[rows, columns] = sampled[open_lanes]
                logprobs[rows, columns] = logprob[open_lanes]
                agent_mask[rows, columns] = True
                lengths[rows] += 1
                emitted[rows] += 1
                # A closed lane keeps its newest token out of the cache: it leads the next prefill.
                open_lanes &= ~self.turn_end(sampled, turn, open_lanes)
                if step + 1 == self.environment.protocol.max_turn_tokens or not open_lanes.any():
                    break
                logits = cache.feed(sampled[:, None].to(device), open_lanes[:, None].to(device))
            lanes, pending, keep = self._environment_turn(episodes, lanes, start, tokens, lengths)
            cache.keep(keep.to(device))

        return self._finish(
            tokens, lengths, agent_mask, logprobs, group_ids, policy_updates, episodes
        ), episodes

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

    def _environment_turn(self, episodes, lanes, start, tokens, lengths):
        """Let the environment answer; returns the lanes that go on, what each must prefill, and their rows."""
        texts = [
            self.tokenizer.decode(tokens[lane, begin : lengths[lane]], skip_special_tokens=True)
            for lane, begin in zip(lanes.tolist(), start.tolist(), strict=True)
        ]
        observations = self.environment.step([episodes[lane] for lane in lanes.tolist()], texts)
        keep, pending = [], []
        for row, (lane, observation) in enumerate(zip(lanes.tolist(), observations, strict=True)):
            if observation is None:
                continue
            ids = torch.tensor(self.encode(observation))
            begin, end = int(lengths[lane]), int(lengths[lane]) + len(ids)
            if end + self.environment.protocol.max_turn_tokens > tokens.shape[1]:
                continue  # out of room: the trajectory ends unanswered, with no reward
            tokens[lane, begin:end] = ids
            lengths[lane] = end
            keep.append(row)
            pending.append(tokens[lane, begin - 1 : end].clone())
        keep = torch.tensor(keep, dtype=torch.long)
        return lanes[keep], pending, keep

    def _finish(
        self, tokens, lengths, agent_mask, logprobs, group_ids, policy_updates, episodes
    ) -> Trajectories:
        width = int(lengths.max())
        rewards = torch.zeros_like(logprobs)
        last = torch.where(agent_mask, torch.arange(agent_mask.shape[1]), 0).argmax(1)
        rewards[torch.arange(len(episodes)), last] = torch.tensor([float(e.reward) for e in episodes])
        return Trajectories(
            tokens=tokens[:, :width],
            lengths=lengths,
            agent_mask=agent_mask[:, :width],
            behaviour_logprobs=logprobs[:, :width],
            rewards=rewards[:, :width],
            group_ids=torch.tensor(group_ids),
            policy_updates=torch.full((len(episodes),), policy_updates),
        )


class _LaneCache:
    """A KV cache whose lanes (rows) have holes: `valid` (n, S) says which cached positions are real."""

    def __init__(self, policy: PreTrainedModel) -> None:
        self.policy = policy
        self.cache = DynamicCache(config=policy.config)
        self.valid: Tensor | None = None

    def feed(self, chunk: Tensor, mask: Tensor) -> Tensor:
        """Append tokens (n, m), real where mask (n, m) holds; returns the logits (n, V) after each lane's
        last real token of the chunk (rows without one return values to be ignored)."""
        n, m = chunk.shape
        past = torch.zeros(n, 0, dtype=torch.bool, device=chunk.device) if self.valid is None else self.valid
        position_ids = past.sum(1, keepdim=True) + (mask.long().cumsum(1) - 1).clamp(min=0)
        causal = torch.ones(m, m, dtype=torch.bool, device=chunk.device).tril()
        visible = torch.cat([past[:, None, :].expand(n, m, -1), causal[None] & mask[:, None, :]], 2)
        # A padded query with nothing to see would turn into NaN; let it see itself.
        visible[:, :, past.shape[1] :] |= torch.eye(m, dtype=torch.bool, device=chunk.device)
        hidden = self.policy.base_model(
            input_ids=chunk,
            attention_mask=visible[:, None],
            position_ids=position_ids,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        self.valid = torch.cat([past, mask], 1)
        last = (mask.long().cumsum(1) * mask).argmax(1)
        return self.policy.get_output_embeddings()(hidden[torch.arange(n, device=chunk.device), last])

    def keep(self, rows: Tensor) -> None:
        """Drop all lanes but these rows."""
        if len(rows) and len(rows) < self.valid.shape[0]:
            self.cache.batch_select_indices(rows)
        self.valid = self.valid[rows]
