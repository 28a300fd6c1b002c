"""Optimisers by name."""

import torch
from torch import Tensor

from stppo.checks import install
from stppo.config.settings import OptimizerName


def make_optimizer(
    name: OptimizerName, parameters: list[Tensor], learning_rate: float
) -> torch.optim.Optimizer:
    """`adam8bit` is bitsandbytes' Adam with moments of one byte each, on a GPU alone.

    Raises ValueError elsewhere, and ImportError where bitsandbytes is not installed.
    """
    on_gpu = parameters[0].device.type == "cuda"
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=learning_rate)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=learning_rate, fused=True)
    if not on_gpu:
        raise ValueError(
            "training.optimizer=adam8bit runs on a GPU alone (training.device=cuda); use adam here"
        )
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError(
            f"training.optimizer=adam8bit needs bitsandbytes: {install('adam8bit')}, or use adam ({error})"
        ) from error
    return bitsandbytes.optim.Adam8bit(parameters, lr=learning_rate)
