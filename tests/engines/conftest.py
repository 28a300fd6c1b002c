"""A small pretrained model, out of a package of PyPI."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from stppo.agent.fetch import fetch


@pytest.fixture(scope="session")
def smollm2(request) -> Path:
    """A folder with SmolLM2-135M-Instruct (30 layers, tied embeddings) as float32 safetensors, and its tokenizer; converted
    once by what `stppo fetch smollm2` calls, and kept in pytest's cache."""
    if not find_spec("gguf"):
        pytest.skip("gguf is not installed; `make test-engines` installs it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STPPO_CACHE_DIR", str(request.config.cache.mkdir("stppo")))
        try:
            return fetch("smollm2").folder
        except FileNotFoundError as error:
            pytest.skip(f"no pretrained model: {error}")
