"""LoRA adapters (peft): a frozen model with a few trainable matrices beside its linear layers."""

from torch import nn

from stppo.agent.policy import LoraSettings

try:
    from peft import LoraConfig, PeftModel, get_peft_model
except ImportError as error:
    raise ImportError(
        f"policy.lora needs peft: pip install 'stppo[lora]', or set policy.lora=null ({error})"
    ) from error


def with_lora(model: nn.Module, settings: LoraSettings) -> PeftModel:
    """Wrap a model, or a critic's body; its own weights are frozen, the adapters (float32) start without effect.

    Raises ValueError where `target_modules` names no layer of the model.
    """
    targets = settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,  # a token's log-prob must not depend on the pass that computes it
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"policy.lora.target_modules={targets!r}: {str(error).splitlines()[0]}") from error
