"""LoRA adapters (peft): a frozen model with a few trainable matrices beside its linear layers."""

import re

from torch import nn
from transformers.pytorch_utils import Conv1D

from stppo.agent.compute import body_of
from stppo.agent.frozen import is_divided, layers_of
from stppo.agent.policy import LoraSettings

try:
    from peft import LoraConfig, PeftModel, get_peft_model
except ImportError as error:
    raise ImportError(
        f"policy.lora needs peft: pip install 'stppo[lora]', or set policy.lora=null ({error})"
    ) from error


def with_lora(model: nn.Module, settings: LoraSettings) -> PeftModel:
    """Wrap a model, or a critic's body; its own weights are frozen, the adapters (float32) start without effect. Of a
    divided model (`stppo.agent.frozen`) the upper part alone gets adapters.

    Raises ValueError where `target_modules` names no layer of the model.
    """
    wanted = targets = settings.target_modules
    if is_divided(body_of(model)):
        targets = _of_upper_part(model, wanted)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,  # a token's log-prob must not depend on the pass that computes it
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    try:
        if not targets:
            raise ValueError("no layer of the upper part has such a name")
        return get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"policy.lora.target_modules={wanted!r}: {str(error).splitlines()[0]}") from error


def _of_upper_part(model: nn.Module, wanted: str | list[str]) -> list[str]:
    """Full names of the linear layers of a divided model's upper part that `target_modules` means."""
    body = body_of(model)
    below = 0 if hasattr(body, "shared_trunk") else body.frozen_layers
    upper = {id(module) for layer in layers_of(body)[below:] for module in layer.modules()}
    names = [
        name
        for name, module in model.named_modules()
        if id(module) in upper and isinstance(module, nn.Linear | Conv1D)
    ]
    if wanted == "all-linear":
        return names
    if isinstance(wanted, str):
        return [name for name in names if re.fullmatch(wanted, name)]
    return [name for name in names if any(name == w or name.endswith(f".{w}") for w in wanted)]
