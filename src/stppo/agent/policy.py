"""The policy: any transformers causal LM, built tiny from scratch or loaded from weights, and how it scores tokens."""

import logging
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from stppo.trajectories import Trajectories

logging.getLogger("transformers").setLevel(logging.ERROR)
disable_progress_bar()  # "Loading weights" bars, in milliseconds, between ours


@dataclass(config=ConfigDict(extra="forbid"), frozen=True)
class PolicyConfig:
    """Architecture of a policy trained from scratch, or the place of pretrained weights.

    `pretrained` (a folder or hub name) overrides the sizes. Embeddings are untied by default: engines
    that reload weights between steps silently keep stale output weights when they are tied.
    `gpt2` has learned positions (no more than `max_positions`), no grouped keys (kv_heads equals heads), no dropout.
    """

    name: str
    family: Literal["qwen2", "llama", "gpt2"] = "qwen2"
    pretrained: str | None = None
    hidden_size: int = Field(64, gt=0)
    layers: int = Field(2, gt=0)
    heads: int = Field(4, gt=0)
    kv_heads: int = Field(4, gt=0)
    intermediate_size: int = Field(128, gt=0)
    max_positions: int = Field(256, gt=0)
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"policy.heads={self.heads} must divide hidden_size={self.hidden_size} and be a multiple of "
                f"kv_heads={self.kv_heads}"
            )
        if self.family == "gpt2" and self.kv_heads != self.heads:
            raise ValueError(
                f"policy.kv_heads={self.kv_heads} must equal heads={self.heads}: gpt2 groups no keys"
            )


def build_policy(config: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A causal LM in float32; random weights come from torch's global generator (seed it first).

    Raises FileNotFoundError when `config.pretrained` cannot be read.
    """
    if config.pretrained is not None:
        return load_policy(config.pretrained)
    if config.family == "gpt2":
        own = {
            "n_inner": config.intermediate_size,
            # A token's log-prob must not depend on the pass that computes it.
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    else:
        own = {"num_key_value_heads": config.kv_heads, "intermediate_size": config.intermediate_size}
    shape = AutoConfig.for_model(
        config.family,
        **own,
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tie_word_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa", dtype=torch.float32)


def load_policy(path: str | Path) -> PreTrainedModel:
    """Weights saved by `save_pretrained` (or a hub name); raises FileNotFoundError with the remedy."""
    try:
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
    except (OSError, ValueError, SafetensorError) as error:
        raise FileNotFoundError(
            f"policy weights at {path} cannot be loaded ({str(error).splitlines()[0]}); "
            "rerun the warm start or set policy.pretrained to a folder written by save_pretrained"
        ) from error


@plain_dataclass
class Scores:
    """Per-token quantities of one policy on a batch, all (B, T), zero off the agent mask.

    logprobs: log π(token t | tokens < t), nats, with gradient. entropy: of that distribution, nats.
    squared_prob_sum: Σ_v p_v², for the logit-space estimate of the clipping bias (no gradient).
    """

    logprobs: Tensor
    entropy: Tensor
    squared_prob_sum: Tensor


def length_sorted_chunks(lengths: Tensor, n_chunks: int) -> list[Tensor]:
    """Row indices (B,) sorted by length and cut into about equal chunks, so that little padding is computed."""
    order = torch.argsort(lengths, stable=True)
    return list(order.chunk(max(1, min(n_chunks, len(order)))))


def agent_states(body: nn.Module, batch: Trajectories, n_chunks: int) -> tuple[Tensor, Tensor]:
    """Hidden state from which each agent token was emitted, i.e. at the position before it.

    Returns (states (N, H), flat positions (N,) into B·T). Right padding needs no attention mask: causal
    attention never looks right.
    """
    width = batch.tokens.shape[1]
    states, positions = [], []
    for rows in length_sorted_chunks(batch.lengths, n_chunks):
        longest = int(batch.lengths[rows].max())
        tokens = batch.tokens[rows, : longest - 1]
        hidden = body(input_ids=tokens, use_cache=False).last_hidden_state
        mask = batch.agent_mask[rows, 1:longest]
        states.append(hidden[mask])
        row, column = mask.nonzero(as_tuple=True)
        positions.append(rows[row] * width + column + 1)
    return torch.cat(states), torch.cat(positions)


def scatter(values: Tensor, positions: Tensor, like: Tensor) -> Tensor:
    """Values (N,) put back at flat positions of a zero tensor shaped as `like` (B, T)."""
    flat = values.new_zeros(like.numel())
    return flat.index_put((positions,), values).view(like.shape)


def score(
    policy: PreTrainedModel,
    batch: Trajectories,
    temperature: float = 1.0,
    n_chunks: int = 1,
    entropy_gradient: bool = False,
) -> Scores:
    """Score the agent tokens of a batch; the output layer runs at agent positions only.

    `n_chunks` splits the rows by length: the result is the same, the padding less.
    """
    states, positions = agent_states(policy.base_model, batch, n_chunks)
    log_probs = torch.log_softmax(policy.get_output_embeddings()(states).float() / temperature, dim=-1)
    chosen = log_probs.gather(1, batch.tokens.reshape(-1)[positions, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        source = log_probs if entropy_gradient else log_probs.detach()
        probs = source.exp()
        entropy = -(probs * source).sum(-1)
    squares = probs.detach().square().sum(-1)
    like = batch.tokens
    return Scores(
        scatter(chosen, positions, like), scatter(entropy, positions, like), scatter(squares, positions, like)
    )
