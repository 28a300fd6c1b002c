"""How large a policy is, from its config alone: no weights are loaded or allocated."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen2Config
from transformers.pytorch_utils import Conv1D

from stppo.config.files import ConfigError
from stppo.policy.frozen import layers_of
from stppo.policy.known_models import KNOWN
from stppo.policy.policy import UNREADABLE, LoraSettings, PolicyConfig, load_shape, why

# The published configs of Qwen2.5, base and Instruct: hidden size, layers, heads, key-value heads, intermediate size,
# vocabulary, output layer tied to the embeddings.
QWEN25 = {
    "0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "3B": (2048, 36, 16, 2, 11_008, 151_936, True),
    "7B": (3584, 28, 28, 4, 18_944, 152_064, False),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a causal LM; parameters are counts.

    body: all but an output layer of its own. linear: weights of the linear layers inside the body. lora_inputs: sum of
    (inputs + outputs) over the layers that adapters are put on, so that a rank r trains r times as many. layer, norm: of
    one layer, and of the norm behind the last one.
    """

    hidden: int
    layers: int
    heads: int
    key_width: int  # of all key-value heads together
    intermediate: int
    vocabulary: int
    tied: bool
    positions: int
    parameters: int
    body: int
    linear: int
    lora_inputs: int
    layer: int
    norm: int

    def kv_values(self) -> int:
        """Numbers that the KV cache holds for one token."""
        return 2 * self.layers * self.key_width


def known_config(name: str) -> PreTrainedConfig | None:
    """The config of a public Qwen2.5 by its hub name, without network; None for any other."""
    match = re.search(r"Qwen2\.5-(\d+(?:\.\d+)?B)(-Instruct)?$", name)
    if match is None or match[1] not in QWEN25:
        return None
    hidden, layers, heads, kv_heads, intermediate, vocabulary, tied = QWEN25[match[1]]
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
    )


def smaller(name: str) -> str | None:
    """The hub name of the next smaller Qwen2.5; None where there is none."""
    match = re.search(r"Qwen2\.5-(\d+(?:\.\d+)?B)", name)
    sizes = list(QWEN25)
    if match is None or match[1] not in sizes[1:]:
        return None
    return name.replace(match[1], sizes[sizes.index(match[1]) - 1])


def policy_config(policy: PolicyConfig, vocabulary: int | None) -> PreTrainedConfig:
    """The transformers config that a policy has: from its folder, from the table above, or from scratch with the
    world's vocabulary. No network is used.

    Raises FileNotFoundError where a pretrained one is neither local nor in the table.
    """
    name = policy.pretrained
    if name is None:
        sizes = {"num_key_value_heads": policy.kv_heads, "intermediate_size": policy.intermediate_size}
        if policy.family == "gpt2":
            sizes = {"n_inner": policy.intermediate_size}
        return AutoConfig.for_model(
            policy.family,
            **sizes,
            vocab_size=vocabulary or 1,
            hidden_size=policy.hidden_size,
            num_hidden_layers=policy.layers,
            num_attention_heads=policy.heads,
            max_position_embeddings=policy.max_positions,
            tie_word_embeddings=policy.tie_word_embeddings,
        )
    if name in KNOWN:
        return load_shape(name)
    if not Path(name).is_dir() and (known := known_config(name)) is not None:
        return known
    try:
        return load_shape(name, local_files_only=True)
    except UNREADABLE as error:
        raise FileNotFoundError(f"the sizes of {name} are not known here {why(name, error)}") from error


def shape_of(config: PreTrainedConfig, lora: LoraSettings | None = None) -> Shape:
    """Sizes of the model that a config describes, counted on a model without storage (torch's meta device)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    body = model.base_model
    head = model.get_output_embeddings()
    linear = {  # by their names in the policy, which are what peft compares
        n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head
    }
    targets = lora.target_modules if lora is not None else "all-linear"
    adapted = [m for n, m in linear.items() if _is_target(n, targets)]
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        key_width=head_size * (getattr(config, "num_key_value_heads", None) or heads),
        intermediate=getattr(config, "intermediate_size", None) or config.n_inner or 4 * config.hidden_size,
        vocabulary=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        positions=config.max_position_embeddings,
        parameters=_count(model),
        body=_count(body),
        linear=sum(m.weight.numel() for m in linear.values()),
        lora_inputs=sum(sum(m.weight.shape) for m in adapted),
        layer=_count(layers_of(body)[0]),
        norm=_count(body.ln_f if hasattr(body, "ln_f") else body.norm),
    )


def check_trained_part(policy: PolicyConfig, shape: Shape, critic: bool) -> None:
    """Raise ConfigError where `trainable_layers` or `lora.target_modules` mean layers that the model lacks.

    Training says the same, but after the warm start. shape: made by `shape_of` with `policy.lora`. critic: whether one is
    trained; it has no output layer, so adapters of that alone would leave it none.
    """
    if policy.trainable_layers is not None and policy.trainable_layers >= shape.layers:
        raise ConfigError(
            f"policy.trainable_layers={policy.trainable_layers}: the policy has {shape.layers} layers; give fewer, or null "
            "to train all"
        )
    if policy.lora is None:
        return
    targets = policy.lora.target_modules
    if shape.lora_inputs == 0 and (critic or not _is_target("lm_head", targets)):
        lacking = "critic" if _is_target("lm_head", targets) else "model"
        raise ConfigError(
            f"policy.lora.target_modules={targets!r}: the {lacking} has no linear layer of such a name; "
            "give all-linear, or names such as q_proj"
        )


def _is_target(name: str, targets: str | list[str]) -> bool:
    """Whether peft would adapt the layer: "all-linear", names of layers, or one regular expression."""
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
