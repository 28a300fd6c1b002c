"""LoRA adapters (peft): a frozen model with a few trainable matrices beside its linear layers."""

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
    effect. Every linear layer but the output layer gets one, of a divided model (`stppo.policy.frozen`) those
    of the upper part alone."""
    body = body_of(model)
    targets: str | list[str] = "all-linear"
    if is_divided(body):
        upper = layers_of(body)[0 if hasattr(body, "shared_trunk") else body.frozen_layers :]
        trained = {id(module) for layer in upper for module in layer.modules()}
        named = model.named_modules()
        targets = [n for n, m in named if id(m) in trained and isinstance(m, nn.Linear | Conv1D)]
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,  # a token's log-prob must not depend on the pass that computes it
        target_modules=targets,
    )
    return get_peft_model(model, config)
