"""A policy's weights under their names in a checkpoint, for an engine that samples with them."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel


def without_adapters(policy: PreTrainedModel) -> PreTrainedModel:
    """The transformers model itself, without the wrapper that peft puts around it."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


def weights_of(folder: Path | str, policy: PreTrainedModel) -> str:
    """What tells saved weights apart: twelve hex digits of a hash of a folder's files, the commit of a hub
    name."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        return f"{folder}@{getattr(policy.config, '_commit_hash', None)}"
    digest = hashlib.sha256()
    for file in files:  # large models have several
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]


def named_weights(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name in a checkpoint, the output layer's too where it is tied.

    LoRA is merged in float32, in copies made one layer at a time, so that the policy keeps its own to the
    last bit. Who stores them in half precision, as an engine with such a dtype does, rounds away what is
    smaller than half a unit in a weight's last place: about 0.2 % of it in bfloat16, more than early updates
    change.

    Raises ValueError for adapters that are no plain LoRA.
    """
    model = without_adapters(policy)
    if kinds := {str(c.peft_type.value) for c in getattr(policy, "peft_config", {}).values()} - {"LORA"}:
        raise ValueError(
            f"adapters of kind {min(kinds)} cannot be merged into weights; use LoRA, or rollout=torch"
        )
    for name, weight in model.state_dict().items():
        if "lora_" in name or ".original_module." in name:
            continue
        if ".base_layer." in name:
            path, _, kind = name.partition(".base_layer.")
            yield f"{path}.{kind}", _merged(model.get_submodule(path), kind, path)
        else:
            yield re.sub(r"\.modules_to_save\.[^.]+", "", name), weight


def _merged(layer: torch.nn.Module, kind: str, name: str) -> Tensor:
    """Weight or bias of a LoRA layer with its active adapters; a merged weight is a copy, in float32 at
    least."""
    own = getattr(layer.get_base_layer(), kind).detach()
    adapters = [adapter for adapter in layer.active_adapters if adapter in layer.scaling]
    if layer.merged or not adapters:
        return own
    if any(adapter in layer.lora_variant or layer.lora_bias[adapter] for adapter in adapters):
        raise ValueError(f"the adapters of {name} cannot be merged: use LoRA without variants and lora_bias")
    if kind != "weight":
        return own
    merged = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
    for adapter in adapters:
        merged += layer.get_delta_weight(adapter).detach()
    return merged
