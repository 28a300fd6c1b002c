"""The folders of YAML files: the shipped one and, where one is named, your own. Needs neither Hydra nor
torch."""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

Config = dict[str, Any]
VARIABLE = "STPPO_CONFIG_DIR"
_REMEDY = f"(--config-dir or {VARIABLE})"


class ConfigError(ValueError):
    """A config that cannot be composed or is invalid; the message names the key and the allowed values."""


NO_KNOB = "none"


class Prior(BaseModel):
    """Where a benchmark draws an algorithm's one own knob from: `{key: ..., low: ..., high: ..., scale: log |
    linear}`.

    keys: of the algorithm's YAML, such as objective.clip.epsilon_low; several take the same value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    keys: tuple[str, ...] = Field(alias="key", min_length=1)
    low: float
    high: float
    scale: Literal["log", "linear"]

    @classmethod
    def of(cls, content: Any) -> Prior:
        """From its mapping in YAML; ValueError with one line that names what is wrong."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            item = error.errors()[0]
            key, message = (
                ".".join(("prior", *map(str, item["loc"]))),
                item["msg"].removeprefix("Value error, "),
            )
            given = "" if isinstance(item["input"], dict) else f" = {item['input']!r}"
            raise ValueError(f"{key}{given}: {message}") from None

    @field_validator("keys", mode="before")
    @classmethod
    def _are_of_the_objective(cls, keys: Any) -> Any:
        keys = tuple(keys) if isinstance(keys, list) else (keys,)
        if not all(str(key).startswith("objective.") for key in keys):
            raise ValueError("must name a key below `objective`, such as objective.clip.epsilon_low")
        return keys

    @field_validator("high")
    @classmethod
    def _is_above_low(cls, high: float, given: ValidationInfo) -> float:
        if high <= given.data.get("low", -math.inf):
            raise ValueError(f"must be above prior.low = {given.data['low']:g}")
        return high

    @field_validator("scale")
    @classmethod
    def _has_a_logarithm(cls, scale: str, given: ValidationInfo) -> str:
        if scale == "log" and given.data.get("low", 1) <= 0:
            raise ValueError(f"needs a prior.low above 0, not {given.data['low']:g}")
        return scale

    def __str__(self) -> str:
        names = " and ".join(key.removeprefix("objective.") for key in self.keys)
        return f"{names} {self.low:g} to {self.high:g}, {self.scale}"

    def at(self, share: float) -> float:
        """The value with this share, 0 to 1, of the prior below it."""
        if self.scale == "linear":
            return self.low + share * (self.high - self.low)
        return self.low * (self.high / self.low) ** share

    def overrides(self, value: float) -> list[str]:
        """What sets the knob in a composed config."""
        return [f"algorithm.{key}={value!r}" for key in self.keys]


class Presentation(BaseModel):
    """How figures, tables and the benchmark take an algorithm: optional keys of its YAML that change no run.

    They are not inherited through `defaults`: who varies an algorithm does not take its name and colour
    along."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str | None = Field(default=None, min_length=1)
    v1: str = ""  # what the paper's two versions call it
    v2: str = ""
    source: str = ""  # where its definition here comes from
    color: str | None = Field(default=None, pattern="^#[0-9A-Fa-f]{6}$")
    prior: Any = None  # of its own knob, see `Prior`; "none": it has no knob; None: not said

    @field_validator("prior")
    @classmethod
    def _prior_is_one(cls, prior: Any) -> Any:
        return prior if prior in (None, NO_KNOB) else Prior.of(prior)


def config_dir() -> Path:
    """The shipped folder: beside the package in a wheel, at the repository root in a checkout."""
    packaged = Path(__file__).parents[1] / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "configs"


def groups() -> list[str]:
    """Names of the config groups; configs/cluster holds verl's configs and is none."""
    return sorted(p.name for p in config_dir().iterdir() if p.is_dir() and p.name != "cluster")


def use_config_dir(folder: str | Path) -> None:
    """Search `folder` beside the shipped configs, in this process and in those it starts; see
    `own_config_dir`."""
    os.environ[VARIABLE] = str(Path(folder).expanduser().resolve())
    own_config_dir()


def algorithm_name(given: str | Path) -> str:
    """The name of an algorithm; of one's own file FOLDER/algorithm/NAME.yaml, FOLDER is searched from now on.

    ConfigError for another file."""
    if not str(given).endswith(".yaml"):
        return str(given)
    file = Path(given).resolve()
    if file.parent.name != "algorithm" or not file.is_file():
        raise ConfigError(f"{given}: must be a file FOLDER/algorithm/NAME.yaml")
    use_config_dir(file.parent.parent)
    return file.stem


def own_config_dir() -> Path | None:
    """Your own folder of configs, which `STPPO_CONFIG_DIR` names, or None.

    It has folders of the shipped ones' names (`algorithm/my_ppo.yaml`). It comes first on Python's path, as a
    script's folder does, so that `_target_: my_module.MyRatio` finds my_module.py in it. Raises ConfigError
    for a folder that is missing, unreadable or without any group, and for a file that a shipped one is named
    like."""
    value = os.environ.get(VARIABLE)
    folder = Path(value).expanduser().resolve() if value else config_dir()
    if folder == config_dir().resolve():
        return None
    try:
        found = [folder / group for group in groups() if (folder / group).is_dir()]
        list(os.scandir(folder))
        # `glob` passes over what it may not read.
        files = [f for group in found for f in sorted(map(Path, os.scandir(group))) if f.suffix == ".yaml"]
    except OSError as error:
        raise ConfigError(f"config folder {error.filename or folder} {_REMEDY}: {error.strerror}") from None
    if not found:
        raise ConfigError(
            f"config folder {folder} {_REMEDY} has none of the folders {', '.join(groups())}; an algorithm "
            f"belongs in {folder / 'algorithm'}"
        )
    for file in files:
        shipped = config_dir() / file.parent.name / file.name
        if shipped.exists():
            raise ConfigError(f"{file} has the name of the shipped {shipped}; rename yours")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return folder


def own_line(error: Exception) -> str:
    """FILE, line N of one's own folder of configs, where an error was raised below it; "" elsewhere."""
    own = own_config_dir()
    frames = traceback.extract_tb(error.__traceback__) if own else []
    mine = [f"{f.filename}, line {f.lineno}" for f in frames if Path(f.filename).is_relative_to(own)]
    return mine[-1] if mine else ""


def options(group: str) -> list[str]:
    """Names that a config group offers, shipped and your own, e.g. options("algorithm")."""
    return sorted(file.stem for file in option_files(group))


def option_files(group: str) -> list[Path]:
    """The YAML files of a config group, shipped ones first."""
    folders = [folder for folder in (config_dir(), own_config_dir()) if folder]
    return [file for folder in folders for file in sorted((folder / group).glob("*.yaml"))]


def stamps(files: Iterable[Path]) -> tuple[tuple[Path, int], ...]:
    """Files with their time stamps: what was read of them is read again after an edit."""
    return tuple((file, file.stat().st_mtime_ns) for file in files)


def read(file: Path) -> dict[str, Any]:
    """The content of one file, nothing inherited. ConfigError names a file that is no mapping in YAML."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {problem(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: must hold keys with values, got {content!r}")
    return content


def problem(error: Exception) -> str:
    """What is wrong with a YAML file, and where in it, in one line."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: {what}" if mark else " ".join(what.split())


def lineage(group: str, name: str) -> list[tuple[Path, dict[str, Any]]]:
    """An option's file and those that it inherits from through `defaults`, nearest first; [] for an unknown
    name."""
    files = {file.stem: file for file in option_files(group)}
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    pending = [name]
    while pending:
        this = pending.pop(0)
        if this in files and this not in found:
            content = read(files[this])
            found[this] = (files[this], content)
            bases = content.get("defaults") or []
            pending += [base for base in reversed(bases) if isinstance(base, str)]
    return list(found.values())


def origin(group: str, name: str, keys: list[str]) -> Path | None:
    """The file that gives an option a nested key: its own, or the nearest one that it inherits from."""
    return next((file for file, content in lineage(group, name) if value(content, keys) is not None), None)


def value(content: Any, keys: list[str]) -> Any:
    """A nested value, None where there is none."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def dotted(content: Config, above: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values of a config and of its sections, as overrides name them: training, training.epochs,
    ..."""
    for key, inner in content.items():
        yield above + str(key), inner
        if isinstance(inner, dict):
            yield from dotted(inner, f"{above}{key}.")


def about(group: str, name: str) -> str:
    """The first sentence of the comment that an option's file begins with; "" where it has none."""
    file = {file.stem: file for file in option_files(group)}[name]
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.lstrip("# ") for line in comment if "@package" not in line)
    return re.split(r"(?<=[.?])\s", text, maxsplit=1)[0].rstrip(".")
