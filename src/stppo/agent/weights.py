"""A policy's weights under their names in a checkpoint, for an engine that samples with them."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel


def without_adapters(policy: PreTrainedModel) -> PreTrainedModel:
    """The transformers model itself, without the wrapper that peft puts around it."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


def named_weights(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name in a checkpoint, the output layer's too where it is tied; LoRA merged in copies, so
    that the policy keeps its own to the last bit.

    Raises ValueError for adapters that are no LoRA.
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
            yield f"{path}.{kind}", _merged(model.get_submodule(path), kind)
        else:
            yield re.sub(r"\.modules_to_save\.[^.]+", "", name), weight


def _merged(layer: torch.nn.Module, kind: str) -> Tensor:
    """Weight or bias of a LoRA layer with its active adapters, as a copy."""
    own = layer.get_base_layer()
    if layer.merged:
        return getattr(own, kind)
    kept = {name: tensor.data for name, tensor in own.named_parameters(recurse=False)}
    layer.merge(safe_merge=True)  # into new tensors
    merged = getattr(own, kind).data.clone()
    layer.unmerge()
    for name, tensor in kept.items():  # unmerging subtracts, and rounds
        getattr(own, name).data = tensor
    return merged
