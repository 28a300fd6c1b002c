"""The one composer of configs: Hydra groups in `configs/`, composed, resolved, validated, fingerprinted.

The command line, the notebooks and the Snakefile all come through here. Nothing heavy is imported at
module level, so that a Snakefile parses fast.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stppo.files import repository_path
from stppo.provenance import code_hash, config_targets

if TYPE_CHECKING:
    from stppo.settings import RunConfig

Config = dict[str, Any]

logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # what goes wrong is raised, not printed as well


class ConfigError(ValueError):
    """A config that cannot be composed or is invalid; the message names the key and the allowed values."""


def config_dir() -> Path:
    """The folder of YAML files: beside the package in a wheel, at the repository root in a checkout."""
    packaged = Path(__file__).parent / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "configs"


def options(group: str) -> list[str]:
    """Names that a config group offers, e.g. options("algorithm")."""
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def compose(overrides: list[str] | None = None) -> Config:
    """Compose `configs/config.yaml` with Hydra overrides into a plain, resolved dict.

    Raises ConfigError for an unknown group option, key or malformed override.
    """
    overrides = list(overrides or [])
    for override in overrides:
        group, _, value = override.partition("=")
        if _is_group(group) and value and value not in options(group):
            raise ConfigError(f"{group}={value}: unknown {group}; allowed: {', '.join(options(group))}")
    try:
        with initialize_config_dir(version_base=None, config_dir=str(config_dir())):
            composed = hydra_compose("config", overrides=overrides)
        return OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        if unknown := re.match(r"Could not override '([\w.]+)'", str(error)):
            _refuse_unknown_key(unknown[1], overrides)
        # Hydra's first line says what is wrong; the lines after it often name the key.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = [str(error.__cause__).splitlines()[0]] if error.__cause__ else []
        raise ConfigError(" | ".join(dict.fromkeys(lines[:2] + cause))) from error


def _is_group(name: str) -> bool:
    # configs/cluster holds verl's configs, not a group of ours.
    return name.isidentifier() and name != "cluster" and (config_dir() / name).is_dir()


def _refuse_unknown_key(key: str, overrides: list[str]) -> None:
    """Raise ConfigError with the keys allowed in place of `key`; Hydra would advise to append it anyway."""
    node = compose([override for override in overrides if _is_group(override.partition("=")[0])])
    for part in key.split("."):
        if isinstance(node, dict) and part in node:
            node = node[part]
            continue
        if isinstance(node, dict) and node:
            allowed = ", ".join(name for name in node if name != "_target_")
            raise ConfigError(f"{key}: unknown key; allowed: {allowed}")
        return  # an open mapping such as warm_start.noise: Hydra's advice is right


def expand_sweep(overrides: list[str]) -> list[list[str]]:
    """Hydra's multirun syntax, `seed=0,1 algorithm=token_ppo,st_ppo`, as a list of override lists."""
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise ConfigError(f"{override}: an override has the form key=value, e.g. algorithm={override}")
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    choices = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [override.input_line]
        for override in parsed
    ]
    return [list(combination) for combination in itertools.product(*choices)]


def validate(config: Config) -> RunConfig:
    """Check types, ranges and combinations; raises ConfigError naming every offending key."""
    from pydantic import ValidationError

    from stppo.settings import RunConfig

    try:
        run = RunConfig.model_validate(run_section(config))
    except ValidationError as error:
        raise ConfigError("; ".join(_problem(RunConfig, item) for item in error.errors())) from error
    build(config["algorithm"]["objective"], "algorithm.objective")
    build(config["world"], "world")
    return run


# Where pydantic puts the form of a section that has several: rollout's is its engine.
_FORMS = {(1, "torch"), (1, "vllm")}


def _problem(model: Any, item: Any) -> str:
    """One of pydantic's errors as `key = value: what is wrong`; of a whole section the key alone."""
    key = ".".join(str(part) for i, part in enumerate(item["loc"]) if (i, part) not in _FORMS)
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{key}: unknown key; allowed: {_allowed_keys(model, item['loc'])}"
    if isinstance(item["input"], dict):
        # A rule over several keys names them in its message.
        return message if item["type"] == "value_error" else f"{key}: {message}"
    return f"{key} = {item['input']!r}: {message}"


def _allowed_keys(model: Any, location: tuple) -> str:
    for part in location[:-1]:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        model = field.annotation if field is not None else model
        forms = {form.engine: form for form in get_args(model) if hasattr(form, "engine")}
        model = forms.get(part, model)
    names = getattr(model, "model_fields", None) or getattr(model, "__pydantic_fields__", {})
    return ", ".join(names)


def build(node: Config, key: str) -> Any:
    """`hydra.utils.instantiate` a `_target_` section; raises ConfigError that names the key and what is allowed."""
    _check_target(node, key)
    try:
        return instantiate(node, _convert_="object")
    except InstantiationException as error:
        inner = re.search(r"full_key: (\S+)", str(error))
        place = f"{key}.{inner[1]}" if inner else key
        raise ConfigError(f"{place}: {' '.join(str(error.__cause__ or error).split())}") from error


def _check_target(node: Config, key: str) -> None:
    """Raise ConfigError for a missing or unknown `_target_`, an unknown key, or a section of the wrong class."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{key}: a mapping with _target_ is needed, got {node!r}")
    try:
        target = get_class(node["_target_"])
    except Exception as error:  # whatever importing it raised
        raise ConfigError(f"{key}._target_ = {node['_target_']}: no such class") from error
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        raise ConfigError(
            f"{key}._target_ = {node['_target_']}: {target.__name__} must define {', '.join(missing)}"
        )
    given = {name: value for name, value in node.items() if not name.startswith("_")}
    if dataclasses.is_dataclass(target):
        allowed = [field.name for field in dataclasses.fields(target) if field.init]
        if unknown := sorted(set(given) - set(allowed)):
            raise ConfigError(f"{key}.{unknown[0]}: unknown key; allowed: {', '.join(allowed)}")
    kinds = get_type_hints(target)
    for name, value in given.items():
        kind = kinds.get(name)
        nested = isinstance(value, dict) and "_target_" in value
        if nested:
            _check_target(value, f"{key}.{name}")
        rule = dataclasses.is_dataclass(kind) or inspect.isabstract(kind)
        if rule and not (nested and issubclass(get_class(value["_target_"]), kind)):
            given_class = value["_target_"] if nested else repr(value)
            raise ConfigError(
                f"{key}.{name} = {given_class}: the _target_ of a {kind.__name__} is needed{_how_to_write(kind)}"
            )


def _how_to_write(kind: type) -> str:
    """What to subclass for a rule of one's own, and the method to write; "" for sections that are no rules."""
    bases = [base for base in (kind, *kind.__subclasses__()) if inspect.isabstract(base)]
    ways = [
        f"{base.__module__}.{base.__name__} and write its {', '.join(sorted(base.__abstractmethods__))}"
        for base in (bases[:1] if kind in bases else bases)
    ]
    return f"; for one of your own subclass {', or '.join(ways)}" if ways else ""


def run_section(config: Config) -> Config:
    """What one run depends on: the config without the pipeline's list of runs and the preset's name."""
    return {name: value for name, value in config.items() if name not in ("pipeline", "preset")}


# Settings that change no result but for rounding: a run goes on from its checkpoint under others.
MEMORY_SETTINGS = {
    "training": ("gradient_checkpointing", "micro_batch_tokens"),
    "rollout": (
        "gpu_memory_utilization",
        "max_num_seqs",
        "enforce_eager",
        "sleep_level",
        "sync_tolerance",
    ),
}
_CLIENT = "stppo.retrieval.client.RetrievalClient"
# Of that client: where it asks and how patiently. What is left, `query_characters`, changes what it asks.
_WHEREABOUTS = (
    "url",
    "timeout",
    "attempts",
    "first_pause",
    "longest_pause",
    "queries_per_request",
    "cached_queries",
)


def identity_section(config: Config) -> Config:
    """What a run's results depend on: `run_section` without `MEMORY_SETTINGS` and the place of its retriever."""
    section = run_section(config) | {"world": world_section(config)}
    return section | {name: _lasting(config, name) for name in MEMORY_SETTINGS}


def world_section(config: Config) -> Config:
    """The world without where a retrieval server answers and how long it is waited for."""
    world, retriever = config["world"], config["world"].get("retriever")
    if not isinstance(retriever, dict) or retriever.get("_target_") != _CLIENT:
        return world
    return world | {"retriever": {k: value for k, value in retriever.items() if k not in _WHEREABOUTS}}


def _lasting(config: Config, name: str) -> Config:
    return {key: value for key, value in config[name].items() if key not in MEMORY_SETTINGS[name]}


def warm_start_section(config: Config) -> Config:
    """What a warm start depends on; runs that share it share the cached warm start."""
    names = ("policy", "warm_start", "warm_start_seed")
    return {name: config[name] for name in names} | {
        "world": world_section(config),
        "rollout": _lasting(config, "rollout"),
        "questions": config["evaluation"]["questions"],
    }


def warm_start_dir(config: Config) -> Path:
    """Where the warm start that a config needs is cached; the name changes exactly when its config or code does."""
    section = warm_start_section(config)
    content = fingerprint([section, code_of("stppo.training.warm_start", *config_targets(section))])
    return (
        repository_path("results")
        / config["preset"]
        / "warm_start"
        / f"seed{config['warm_start_seed']}-{content}"
    )


def warm_start_overrides(overrides: Iterable[str]) -> list[str]:
    """Those of a run's overrides that its warm start depends on."""
    sections = ("world", "policy", "rollout", "warm_start")
    kept = ("preset", "warm_start_seed", "evaluation.questions")
    keys = [(override, override.partition("=")[0].lstrip("+~")) for override in overrides]
    return [override for override, key in keys if key in kept or key.split(".")[0] in sections]


@functools.cache
def code_of(*entries: str) -> str:
    """Hash of the syntax of every module that the entries import (`analysis.provenance.code_hash`)."""
    return code_hash(entries)


def fingerprint(section: Any) -> str:
    """Twelve hex digits of the content of a plain dict, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(section, sort_keys=True).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One training run of a preset's pipeline: the overrides that make it and, when asked, its composed config."""

    regime: str
    algorithm: str  # or the name of an arm of `pipeline.arms`
    seed: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.regime}/{self.algorithm}/seed{self.seed}"

    @functools.cached_property
    def config(self) -> Config:
        return compose(list(self.overrides))


def planned_runs(preset: str, overrides: list[str] | None = None) -> list[PlannedRun]:
    """Every run that `snakemake all --config preset=...` trains, in a fixed order: all runs of a regime's first
    seed come before those of its second, so that an interrupted pipeline leaves whole replicates.

    A regime has `training`, `algorithms`, `seeds` and, optionally, `overrides` and the `regime` to record where
    several entries make up one. An algorithm is a file of `configs/algorithm` or an arm: a name in
    `pipeline.arms` with the overrides that make it, which is then also the recorded `algorithm.name`.
    `pipeline.replicates` maps a seed to further overrides (its world, its warm start), so that one number tells
    a replicate. In overrides {seed} stands for the run's seed and {next_seed} for the one after it, cyclically.
    Extra overrides apply to all runs. Raises ConfigError for an unknown preset, for an override of what tells
    the runs apart, and for a run that is planned twice.
    """
    for override in overrides or []:
        if (key := override.partition("=")[0].lstrip("+~")) in ("preset", "training", "algorithm", "seed"):
            raise ConfigError(
                f"{override}: {key} cannot be the same for every run of a pipeline; choose the runs with "
                "pipeline.regimes.NAME.algorithms=[...], .seeds=[...] and .training=..."
            )
    base = compose([f"preset={preset}", *(overrides or [])])
    pipeline = base.get("pipeline")
    if not pipeline:
        raise ConfigError(f"preset={preset} has no section `pipeline.regimes`, so there is nothing to train")
    # Which runs there are is no part of any of them.
    shared = [override for override in overrides or [] if not override.lstrip("+~").startswith("pipeline.")]
    arms, replicates = pipeline.get("arms") or {}, pipeline.get("replicates") or {}
    runs: dict[str, PlannedRun] = {}
    for entry, plan in pipeline["regimes"].items():
        regime, seeds = plan.get("regime", entry), plan["seeds"]
        for (place, seed), algorithm in itertools.product(enumerate(seeds), plan["algorithms"]):
            arm = arms.get(algorithm)
            chosen = [
                f"preset={preset}",
                f"training={plan['training']}",
                f"training.regime={regime}",
                *([f"algorithm={algorithm}"] if arm is None else [*arm, f"algorithm.name={algorithm}"]),
                f"seed={seed}",
                *(plan.get("overrides") or []),
                *(replicates.get(seed) or replicates.get(str(seed)) or []),
                *shared,
            ]
            named = {"{seed}": str(seed), "{next_seed}": str(seeds[(place + 1) % len(seeds)])}
            for name, value in named.items():
                chosen = [override.replace(name, value) for override in chosen]
            run = PlannedRun(regime, algorithm, seed, tuple(chosen))
            if run.name in runs:
                raise ConfigError(f"pipeline.regimes.{entry}: the run {run.name} is planned twice")
            runs[run.name] = run
    return list(runs.values())
