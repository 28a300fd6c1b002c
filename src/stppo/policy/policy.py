"""The policy: any transformers causal LM, built tiny from scratch or loaded from weights, and how it scores
tokens."""

import copy
import logging
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from stppo.policy.compiled import MAX_VOCABULARY, is_compiled, scores_of, states_at
from stppo.policy.compute import body_of, computing, device_of, head_of, logits_of, recompute
from stppo.policy.frozen import is_divided, parts_of, states_above
from stppo.policy.known_models import KNOWN, is_hub_name, located
from stppo.policy.weights import named_weights, without_adapters
from stppo.trajectories import Trajectories

logging.getLogger("transformers").setLevel(logging.ERROR)
disable_progress_bar()  # "Loading weights" bars, in milliseconds, between ours


# What transformers raises for a folder whose files are missing, damaged or do not fit together.
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
LOGITS_AT_ONCE = 2**27  # 0.5 GiB in float32


@dataclass(config=ConfigDict(extra="forbid"), frozen=True)
class LoraSettings:
    """Low-rank adapters on every linear layer but the output layer. Without dropout: log-probs of two passes
    would differ by more than the policy changed."""

    rank: int = Field(16, gt=0)
    alpha: float = Field(32.0, gt=0, allow_inf_nan=False)


@dataclass(config=ConfigDict(extra="forbid"), frozen=True)
class PolicyConfig:
    """Architecture of a policy trained from scratch, or the place of pretrained weights.

    `pretrained` (a folder or hub name) overrides the sizes. Embeddings are untied by default: engines that
    reload weights between steps silently keep stale output weights when they are tied. `gpt2` has learned
    positions (no more than `max_positions`), no grouped keys (kv_heads equals heads), no dropout. attention:
    the kernel; roll-outs in PyTorch need sdpa. lora: train adapters, not the weights themselves.
    trainable_layers: of pretrained weights the top layers that are trained, with the norm behind them and an
    output layer that is not tied (see `stppo.policy.frozen`); with lora, the layers that adapters are put on.
    None: all, embeddings too."""

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
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    lora: LoraSettings | None = None
    trainable_layers: int | None = Field(None, gt=0)

    def __post_init__(self) -> None:
        if self.trainable_layers is not None and self.pretrained is None:
            raise ValueError(
                f"policy.trainable_layers={self.trainable_layers} would leave random layers as they are: set "
                "policy.pretrained, or trainable_layers to null"
            )
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
        return load_policy(config.pretrained, config.attention)
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
    return AutoModelForCausalLM.from_config(shape, attn_implementation=config.attention, dtype=torch.float32)


def load_policy(
    path: str | Path, attention: str = "sdpa", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Weights saved by `save_pretrained` (or a hub name): all of them, none besides, every number finite.

    Of a folder nothing is executed: no code of its own, no pickle, no kernel from the hub. Raises
    FileNotFoundError with the remedy where weights are missing, surplus, gated or damaged, ImportError for a
    kernel that is not installed."""
    path = located(path)
    try:
        policy, found = AutoModelForCausalLM.from_pretrained(
            path,
            config=load_shape(path),
            attn_implementation=attention,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, with all else that does not fit
        )
        _refuse_parts(policy, found)
        return policy
    except ImportError as error:
        raise ImportError(
            f"policy.attention={attention} cannot be used here ({str(error).splitlines()[0]}); install it "
            "(flash-attn for flash_attention_2) or use policy.attention=sdpa"
        ) from error
    except UNREADABLE as error:
        raise FileNotFoundError(f"policy weights at {path} cannot be loaded {why(path, error)}") from error


def load_shape(path: str | Path, **options: bool) -> PreTrainedConfig:
    """The `config.json` of a policy's folder (or hub name), without what would bring in foreign code.

    Such a file may name code of its own (`auto_map`) or a kernel of the hub (`_attn_implementation`); what
    attends is policy.attention. Raises OSError or ValueError as transformers does."""
    shape = AutoConfig.from_pretrained(located(path), trust_remote_code=False, **options)
    shape._attn_implementation = None
    return shape


def positions_of(policy: PolicyConfig) -> int | None:
    """How many tokens a policy has positions for; None where pretrained weights are not on this machine yet.
    No network is used."""
    if policy.pretrained is None:
        return policy.max_positions
    try:
        return getattr(load_shape(policy.pretrained, local_files_only=True), "max_position_embeddings", None)
    except UNREADABLE:
        return None  # whoever loads the weights says what is wrong with them


def check_positions(positions: int | None, max_tokens: int) -> None:
    """Raise ValueError where a trajectory of `max_tokens` is longer than a policy has positions (None: not
    known)."""
    if positions is not None and max_tokens > positions:
        raise ValueError(
            f"rollout.max_tokens={max_tokens} exceeds the policy's {positions} positions: lower it to "
            f"{positions}, or take "
            "a policy of more (policy.max_positions, of pretrained weights another policy.pretrained)"
        )


def _refuse_parts(policy: PreTrainedModel, found: dict[str, Any]) -> None:
    """Raise ValueError where some weights were not in the files, or the files hold others, or numbers are not
    finite."""
    problems = {
        "lacks": found["missing_keys"],
        "has shapes that do not fit:": [name for name, *_ in found["mismatched_keys"]],
        "also holds": found["unexpected_keys"],
    }
    for problem, names in problems.items():
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"it {problem} {min(names)}{more}: weights and config.json must be those of one model"
            )
    for name, weight in policy.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite")


def load_tokenizer(path: str | Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer that a policy's folder (or hub name) brings: exactly what its `tokenizer.json` says.

    Not by transformers' AutoTokenizer, which replaces the pre-tokenizer of any folder whose model is a Qwen2
    by Qwen2's own, and makes up an empty tokenizer where there is none.

    Raises FileNotFoundError as `load_policy` does, ValueError where there is no folder to take it from.
    """
    if path is None:
        raise ValueError(
            "this world has no tokenizer of its own: set policy.pretrained to a model, which brings one"
        )
    path = located(path)
    try:
        return PreTrainedTokenizerFast.from_pretrained(path)
    except UNREADABLE as error:
        raise FileNotFoundError(f"the tokenizer at {path} cannot be loaded {why(path, error)}") from error


def first_line(error: Exception) -> str:
    """The first line of a message, and the second where the first announces it."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(" ,")


def why(path: str | Path, error: Exception) -> str:
    """Why a model's folder (or hub name) could not be read, and what to do."""
    first = first_line(error)
    if Path(path).exists():
        return (
            f"({first}); rerun the warm start or set policy.pretrained to a folder written by save_pretrained"
        )
    if not is_hub_name(path):
        return f"({first}); there is no such folder, and the short names are {', '.join(KNOWN)}"
    return (
        f"({first}); there is no such folder: download the model with `hf download {path} --local-dir "
        "FOLDER` (a gated "
        "one after accepting its licence on its page and `hf auth login`) and set policy.pretrained=FOLDER"
    )


def save_policy(
    policy: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Weights that `load_policy` reads, and the tokenizer beside them; the policy keeps its own.

    With adapters these are merged and all weights written as float32, whatever the frozen ones are: in half
    precision small changes would be lost. OSError where they cannot be written, as on a full disk or where a
    file is in the way."""
    make_folder(folder)
    try:
        _save_weights(policy, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except Exception as error:  # safetensors and tokenizers raise kinds of their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(
            f"weights cannot be written to {folder} ({reason}); make room and run the same again"
        ) from error


def make_folder(folder: Path) -> None:
    """Make a folder for weights; FileExistsError where a file is in its place, which transformers would pass
    over."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise FileExistsError(
            f"{folder}: a file is in the way of this folder; move it, or choose another folder"
        ) from error


def _save_weights(policy: PreTrainedModel, folder: Path) -> None:
    model = without_adapters(policy)
    if model is policy:
        policy.save_pretrained(folder)
        return
    # One layer at a time leaves the GPU.
    weights = {name: weight.to("cpu", torch.float32) for name, weight in named_weights(policy)}
    model.save_pretrained(folder, state_dict=weights)
    shape = copy.deepcopy(model.config)
    shape.dtype = torch.float32
    shape.save_pretrained(folder)


def check_vocabulary(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError where the tokenizer has ids that the policy has no embedding for."""
    if len(tokenizer) > policy.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the policy {policy.config.vocab_size}: "
            "policy.pretrained and the world's tokenizer do not belong together"
        )


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
    """Row indices (B,) sorted by length and cut into about equal chunks, so that little padding is
    computed."""
    order = torch.argsort(lengths, stable=True)
    return list(order.chunk(max(1, min(n_chunks, len(order)))))


def rows_within(lengths: list[int], budget: int) -> list[list[int]]:
    """Rows sorted by length, in groups of at most `budget` padded tokens; a longer row has a group of its
    own."""
    groups: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups[-1] and (len(groups[-1]) + 1) * lengths[row] > budget:
            groups.append([])
        groups[-1].append(row)
    return groups


def agent_states(body: nn.Module, batch: Trajectories, n_chunks: int) -> tuple[Tensor, Tensor]:
    """Hidden state from which each agent token was emitted, i.e. at the position before it.

    Returns (states (N, H) on the body's device, flat positions (N,) into B·T on the batch's). Right padding
    needs no attention mask: causal attention never looks right."""
    if is_compiled(body):  # it packs rows, so there is no padding to avoid by chunks
        return states_at(body, batch.tokens, batch.agent_mask)
    width, device = batch.tokens.shape[1], device_of(body)
    frozen, trained = parts_of(body) if is_divided(body) else (None, body)
    states, positions = [], []
    for rows in length_sorted_chunks(batch.lengths, n_chunks):
        longest = int(batch.lengths[rows].max())
        tokens = batch.tokens[rows, : longest - 1].to(device)
        row, column = batch.agent_mask[rows, 1:longest].nonzero(as_tuple=True)
        place = row.to(device), column.to(device)
        with computing(trained):
            if frozen is None:
                states.append(trained(input_ids=tokens, use_cache=False).last_hidden_state[place])
            else:
                if batch.below is not None:
                    below = batch.below[rows, : longest - 1].to(device)
                else:
                    with torch.no_grad():
                        below = frozen(input_ids=tokens, use_cache=False).last_hidden_state
                states.append(states_above(trained, below, *place))
        positions.append(rows[row] * width + column + 1)
    return torch.cat(states), torch.cat(positions)


def scatter(values: Tensor, positions: Tensor, like: Tensor) -> Tensor:
    """Values (N,) put back at flat positions of a zero tensor shaped and placed as `like` (B, T)."""
    values = values.to(like.device)
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

    Scores are in float32 at least and live where the batch does, wherever the policy computes. `n_chunks`
    splits the rows by length: the result is the same, the padding less. Where the vocabulary is so large that
    the logits would be what fills memory, they are computed in pieces, and again on the way back."""
    states, positions = agent_states(body_of(policy), batch, n_chunks)
    ids = batch.tokens.reshape(-1)[positions].to(states.device)
    size = max(1, LOGITS_AT_ONCE // policy.config.vocab_size)
    again = torch.is_grad_enabled() and len(states) > size
    parts = []
    for state, chosen in zip(states.split(size), ids.split(size), strict=True):
        arguments = policy, state, chosen, temperature, entropy_gradient
        parts.append(recompute(_score_tokens, *arguments) if again else _score_tokens(*arguments))
    return Scores(
        *(scatter(torch.cat(values), positions, batch.tokens) for values in zip(*parts, strict=True))
    )


def _score_tokens(
    policy: PreTrainedModel, states: Tensor, ids: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of each id (N,), entropy and sum of squares of the distributions that states (N, H) lead
    to."""
    if is_compiled(body_of(policy)) and policy.config.vocab_size <= MAX_VOCABULARY:
        chosen, entropy, squares = scores_of(head_of(policy), states, ids, temperature)
        return chosen, entropy if entropy_gradient else entropy.detach(), squares
    logits = logits_of(policy, states)
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    chosen = log_probs.gather(1, ids[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        source = log_probs if entropy_gradient else log_probs.detach()
        probs = source.exp()
        entropy = -(probs * source).sum(-1)
    return chosen, entropy, probs.detach().square().sum(-1)
