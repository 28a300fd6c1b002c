"""LoRA adapters (peft): a frozen model with a few trainable matrices beside its linear layers."""

import re

from torch import nn
from transformers.pytorch_utils import Conv1D

from stppo.checks import install
from stppo.policy.compute import body_of
from stppo.policy.frozen import is_divided, layers_of
from stppo.policy.policy import LoraSettings

try:
    from peft import LoraConfig, PeftModel, get_peft_model
except ImportError as error:
    raise ImportError(
        f"policy.lora needs peft: {install('lora')}, or set policy.lora=null ({error})"
    ) from error


def with_lora(model: nn.Module, settings: LoraSettings) -> PeftModel:
    """Wrap a model, or a critic's body; its own weights are frozen, the adapters (float32) start without
    effect. Of a divided model (`stppo.policy.frozen`) the upper part alone gets adapters, and a critic's body
    those that the policy gets.

    Raises ValueError where `target_modules` names no layer of the model.
    """
    wanted = targets = settings.target_modules
    body = body_of(model)
    if is_divided(body) or (body is model and wanted != "all-linear"):
        targets = _meant(model, wanted)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,  # a token's log-prob must not depend on the pass that computes it
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    try:
        if not targets:
            raise ValueError("no layer that is trained has such a name")
        return get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"policy.lora.target_modules={wanted!r}: {str(error).splitlines()[0]}") from error


def _meant(model: nn.Module, wanted: str | list[str]) -> list[str]:
    """Full names of the linear layers of a model, or a critic's body, that `target_modules` means, which
    speaks of names in the policy; of a divided one those of its upper part."""
    body, layers, shift = body_of(model), [model], 0
    if hasattr(body, "shared_trunk"):
        shift = body.frozen_layers  # it has the upper layers alone, numbered from 0
    elif is_divided(body):
        layers = layers_of(body)[body.frozen_layers :]
    trained = {id(module) for layer in layers for module in layer.modules()}

    def is_meant(name: str) -> bool:
        if body is model:
            name = re.sub(r"^(layers|h)\.(\d+)", lambda m: f"{m[1]}.{int(m[2]) + shift}", name)
            name = f"{model.base_model_prefix}.{name}"
        if isinstance(wanted, str):
            return wanted == "all-linear" or re.fullmatch(wanted, name) is not None
        return any(name == w or name.endswith(f".{w}") for w in wanted)

    return [
        name
        for name, module in model.named_modules()
        if id(module) in trained and isinstance(module, nn.Linear | Conv1D) and is_meant(name)
    ]
