"""Where a model computes and how: its device, bfloat16 beside float32 weights, layers that are computed
twice.

What is set here travels with the model's body, so that whoever scores or samples with it computes alike.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from stppo.policy.weights import without_adapters

Precision = Literal["float32", "bfloat16"]
recompute = functools.partial(checkpoint, use_reentrant=False)  # reentrant ones refuse autograd.grad


def body_of(policy: PreTrainedModel) -> nn.Module:
    """The transformer without its output layer, adapters included."""
    return without_adapters(policy).base_model


def last_block(policy: PreTrainedModel) -> list[Tensor]:
    """The trainable parameters of the last transformer block: neither the norm after it nor the output layer.

    ValueError for an architecture whose blocks are not found.
    """
    body = body_of(policy)
    blocks = getattr(body, "layers", None) or getattr(body, "h", None)
    if not blocks:
        raise ValueError(
            f"{type(body).__name__} has neither `layers` nor `h`, so its last block is not found"
        )
    return [p for p in blocks[-1].parameters() if p.requires_grad]


def head_of(policy: PreTrainedModel) -> nn.Module:
    """The output layer: hidden states to logits."""
    return without_adapters(policy).get_output_embeddings()


def logits_of(policy: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits (N, V) of hidden states (N, H), in float32 at least.

    A policy that computes in bfloat16 leaves it here: logits rounded to it put a noise of some 0.01 nats on
    every log-prob, another one in each pass after an update, and ratios are made of such differences."""
    head = head_of(policy)
    if getattr(body_of(policy), "autocast_dtype", None) is None:
        logits = head(states)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
    weights = {name: weight.float() for name, weight in head.named_parameters()}
    with torch.autocast(states.device.type, enabled=False):
        return functional_call(head, weights, (states.float(),))


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of a GPU or of the host, as PyTorch, CUDA and Python say it."""
    text = str(error).lower()
    signs = ("out of memory", "cublas_status_alloc_failed", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in signs)
    )


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device a setting names; "auto" is the GPU where there is one. Raises ValueError where there is
    none."""
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ValueError("training.device=cuda: PyTorch sees no GPU here; use auto or cpu")
    return torch.device("cuda" if device != "cpu" and there else "cpu")


def float32_in_full() -> None:
    """Let float32 be float32 on a GPU, where it may be TF32, with ten bits of mantissa: cuDNN's default, and
    what a library or an environment variable may have chosen for products of matrices."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def place(
    policy: PreTrainedModel,
    device: torch.device,
    precision: Precision = "float32",
    checkpoint_layers: bool = False,
) -> None:
    """Move a policy to a device and say how its body computes from now on; copies of the body compute alike.

    precision: "bfloat16" computes under autocast; weights, their gradients and all that follows the logits
    keep their
    type. checkpoint_layers: where gradients are asked for, keep only each layer's input and compute the layer
    again on the way back."""
    policy.to(device)
    if device.type == "cuda":
        float32_in_full()
    body = body_of(policy)
    body.autocast_dtype = torch.bfloat16 if precision == "bfloat16" else None
    body.checkpoint_layers = checkpoint_layers


@contextlib.contextmanager
def computing(body: nn.Module) -> Iterator[None]:
    """Compute as `place` said; without it, as ever.

    No sub-module is put into training mode: a token's log-prob must not depend on the pass that computes it,
    and nothing may drop the KV cache of a roll-out."""
    dtype = getattr(body, "autocast_dtype", None)
    layers: dict[nn.Module, bool] = {}
    if getattr(body, "checkpoint_layers", False) and torch.is_grad_enabled():
        layers = {m: m.training for m in body.modules() if isinstance(m, GradientCheckpointingLayer)}
    for layer in layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, recompute
        layer.training = True  # its own flag, not that of the modules inside
    try:
        with torch.autocast(device_of(body).type, dtype, enabled=dtype is not None):
            yield
    finally:
        for layer, training in layers.items():
            layer.gradient_checkpointing, layer.training = False, training
