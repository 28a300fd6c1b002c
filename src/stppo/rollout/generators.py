"""Global random generators, which other libraries seed without asking."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards the global generators of Python, NumPy and PyTorch, a GPU's too, stand where they stood
    before."""
    python, numpy = random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
