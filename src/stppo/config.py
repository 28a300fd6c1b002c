"""The one composer of configs: Hydra groups in `configs/`, composed, resolved, validated, fingerprinted.

The command line, the notebooks and the Snakefile all come through here. Nothing heavy is imported at
module level, so that a Snakefile parses fast.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import logging
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stppo import config_files
from stppo.config_files import NO_KNOB, ConfigError, Presentation, Prior, options
from stppo.files import content_hash, repository_path
from stppo.provenance import code_hash, config_targets

if TYPE_CHECKING:
    from stppo.settings import RunConfig

Config = dict[str, Any]

logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # what goes wrong is raised, not printed as well


class UnknownKeyError(ConfigError):
    """Keys of a section that its class does not take."""

    def __init__(self, section: str, unknown: list[str], allowed: Iterable[str]) -> None:
        self.keys = [f"{section}.{name}" for name in unknown]
        keys = "key" if len(unknown) == 1 else "keys"
        super().__init__(f"{', '.join(self.keys)}: unknown {keys}; allowed: {', '.join(allowed)}")


def compose(overrides: list[str] | None = None) -> Config:
    """Compose `configs/config.yaml` with Hydra overrides into a plain, resolved dict.

    Groups also have the options of your own folder (`config_files.own_config_dir`). Raises ConfigError for an unknown
    group option, key or malformed override, and for a YAML file that cannot be read.
    """
    overrides, own = list(overrides or []), config_files.own_config_dir()
    for override in overrides:
        group, _, value = override.partition("=")
        if _is_group(group) and value and value not in options(group):
            raise ConfigError(f"{group}={value}: unknown {group}; allowed: {', '.join(options(group))}")
    try:
        with initialize_config_dir(version_base=None, config_dir=str(config_files.config_dir())):
            composed = hydra_compose("config", overrides=[*overrides, *_search_path(own)])
        plain = OmegaConf.to_container(composed, resolve=True)
        _refuse_foreign_name(plain, overrides, own)
        _forget_other_engines(plain, overrides)
        return _without_inherited_presentation(plain)
    except PermissionError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; make it readable") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(f"{mark.name if mark else own}: {config_files.problem(error)}") from error
    except (HydraException, OmegaConfBaseException) as error:
        if unknown := re.match(r"Could not override '([\w.]+)'", str(error)):
            _refuse_unknown_key(unknown[1], overrides)
        # Hydra's first line says what is wrong; the lines after it often name the key.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        lines = [line for line in lines if line != "Config search path:"]
        cause = [str(error.__cause__).splitlines()[0]] if error.__cause__ else []
        raise ConfigError(" | ".join(dict.fromkeys(lines[:2] + cause))) from error


def _refuse_foreign_name(config: Config, overrides: list[str], own: Path | None) -> None:
    """Raise ConfigError where an own algorithm's file would be recorded under a name that is not the file's."""
    given = dict(override.partition("=")[::2] for override in overrides)
    chosen, name = given.get("algorithm"), (config.get("algorithm") or {}).get("name")
    if own is None or not chosen or "algorithm.name" in given or name in (None, chosen):
        return
    if (file := own / "algorithm" / f"{chosen}.yaml").exists():
        raise ConfigError(f"{file}: its runs would be recorded as {name}; write `name: {chosen}` in it")


def _forget_other_engines(config: Config, overrides: list[str]) -> None:
    """Drop from the roll-out what a preset or a world sets for another engine than the one that was chosen; what was
    typed stays, and is refused by name later."""
    rollout = config.get("rollout")
    if not isinstance(rollout, dict):
        return
    files = [config_files.read(file) for file in config_files.option_files("rollout")]
    own = {key for file in files if file.get("engine") == rollout.get("engine") for key in file}
    others = {key for file in files for key in file} - own
    typed = {override.partition("=")[0].lstrip("+~") for override in overrides}
    if own:
        for key in [key for key in rollout if key in others and f"rollout.{key}" not in typed]:
            del rollout[key]


def _search_path(own: Path | None) -> list[str]:
    if own is None:
        return []
    path = str(own).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{path}']"]


def _without_inherited_presentation(config: Config) -> Config:
    """The config without label, colour and other names that are those of the algorithm it was made from."""
    algorithm = config.get("algorithm")
    if isinstance(algorithm, dict):
        of = config_files.lineage("algorithm", str(algorithm.get("name")))
        stated = of[0][1] if of else {}
        kept = {k: v for k, v in algorithm.items() if k not in Presentation.model_fields or k in stated}
        if "prior" in kept:  # whole: no part of it is completed by the one that it was made from
            kept["prior"] = stated["prior"]
        config["algorithm"] = kept
    return config


def _is_group(name: str) -> bool:
    return name in config_files.groups()


def _refuse_unknown_key(key: str, overrides: list[str]) -> None:
    """Raise ConfigError with the keys allowed in place of `key`; Hydra would advise to append it anyway."""
    node = compose([override for override in overrides if _is_group(override.partition("=")[0])])
    for part in key.split("."):
        if isinstance(node, dict) and part in node:
            node = node[part]
            continue
        if isinstance(node, dict) and node:
            if part in _known_keys(node, key):
                raise ConfigError(f"{key} is not set by what was chosen; write +{key}=... to set it")
            allowed = ", ".join(name for name in node if name != "_target_")
            raise ConfigError(f"{key}: unknown key; allowed: {allowed}")
        return  # an open mapping such as warm_start.noise: Hydra's advice is right


def _known_keys(node: Config, key: str) -> Iterable[str]:
    """The keys that a section may have beside those that it has."""
    from stppo.settings import RunConfig

    if "_target_" in node:
        return inspect.signature(_class(node["_target_"], key)).parameters
    return _fields(RunConfig, tuple(key.split(".")))


MOST_RUNS = 10_000  # of one sweep


def expand_sweep(overrides: list[str]) -> list[list[str]]:
    """Hydra's multirun syntax, `seed=0,1 algorithm=token_ppo,st_ppo`, as a list of override lists."""
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise ConfigError(f"{override}: an override has the form key=value, e.g. algorithm={override}")
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    choices, runs = [], 1
    for override in parsed:
        chosen = [override.input_line]
        if override.is_sweep_override():
            values = itertools.islice(override.sweep_string_iterator(), MOST_RUNS + 1)
            chosen = [f"{override.get_key_element()}={value}" for value in values]
        choices.append(chosen)
        runs *= len(chosen)
        if runs > MOST_RUNS:
            raise ConfigError(f"{override.input_line}: the sweep has more than {MOST_RUNS} runs")
    return [list(combination) for combination in itertools.product(*choices)]


def variant(overrides: Iterable[str]) -> str:
    """The overrides that tell a run from others of its algorithm and seed, as one text that `shlex.split` takes apart.

    Not among them: `loggers`, which see what is recorded and change nothing.
    """
    told = ("algorithm", "seed", "loggers")
    return shlex.join(o for o in overrides if o.partition("=")[0].lstrip("+") not in told)


def validate(config: Config) -> RunConfig:
    """Check types, ranges and combinations; raises ConfigError naming every offending key."""
    from pydantic import ValidationError

    from stppo.settings import RunConfig

    try:
        run = RunConfig.model_validate(
            run_section(config)
            | {"algorithm": config.get("algorithm"), "evaluation": config.get("evaluation")}
            | {"loggers": config.get("loggers", [])}
        )
    except ValidationError as error:
        raise ConfigError("; ".join(_problem(RunConfig, item) for item in error.errors())) from error
    try:
        objective = build(config["algorithm"]["objective"], "algorithm.objective")
    except UnknownKeyError as error:
        raise ConfigError(f"{error}{_origin(run.algorithm.name, error.keys)}") from error
    size, sampled = objective.credit.group_size, run.training.trajectories_per_iteration
    if sampled % size:
        raise ConfigError(
            f"algorithm.objective.credit.group_size={size} must divide training.trajectories_per_iteration={sampled}"
        )
    build(config["world"], "world")
    if run.algorithm.prior not in (None, NO_KNOB):
        _check_prior(config["algorithm"], Prior.of(run.algorithm.prior))
    return run


def _check_prior(algorithm: Config, prior: Prior) -> None:
    """ConfigError where a prior names no number of the objective, or one that its rules refuse at an end."""
    for key in prior.keys:
        path = key.split(".")
        stated = config_files.origin("algorithm", str(algorithm.get("name")), path)
        if stated and config_files.value(algorithm, path) is None:
            return  # the file has the key, overrides have put another rule in its place
    for end in (prior.low, prior.high):
        tried = copy.deepcopy(algorithm)
        for key in prior.keys:
            *path, last = key.split(".")
            section = config_files.value(tried, path)
            old = section.get(last) if isinstance(section, dict) else None
            if isinstance(old, bool) or not isinstance(old, int | float):
                found = "no such key" if old is None else f"no number, but {old!r}"
                raise ConfigError(f"algorithm.prior.key = {key}: {found}; name a number of the objective")
            section[last] = end
        try:
            build(tried["objective"], "algorithm.objective")
        except ConfigError as error:
            raise ConfigError(f"algorithm.prior reaches {end:g}, which is refused: {error}") from error


def _origin(algorithm: str, keys: list[str]) -> str:
    """Which file an unfitting key of an algorithm is inherited from, and how to be rid of it; "" where it is not."""
    chain = config_files.lineage("algorithm", algorithm)
    file = config_files.origin("algorithm", algorithm, keys[0].split(".")[1:])
    if file is None or file == chain[0][0]:
        return ""
    drop = " ".join(f"'~{key}'" for key in keys)
    them = "it" if len(keys) == 1 else "them"
    return (
        f"; inherited from {file.name} through the defaults of {chain[0][0].name}: write the section out there without "
        f"these defaults, or drop {them} with the {'override' if len(keys) == 1 else 'overrides'} {drop}"
    )


# Where pydantic puts the form of a section that has several: rollout's is its engine.
_FORMS = {(1, "torch"), (1, "vllm")}


def _problem(model: Any, item: Any) -> str:
    """One of pydantic's errors as `key = value: what is wrong`; of a whole section the key alone."""
    key = ".".join(str(part) for i, part in enumerate(item["loc"]) if (i, part) not in _FORMS)
    message = item["msg"].removeprefix("Value error, ")
    if key == "algorithm.prior":
        return f"algorithm.{message}"
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{key}: unknown key; allowed: {_allowed_keys(model, item['loc'])}"
    if isinstance(item["input"], dict):
        # A rule over several keys names them in its message.
        return message if item["type"] == "value_error" else f"{key}: {message}"
    return f"{key} = {item['input']!r}: {message}"


def _allowed_keys(model: Any, location: tuple) -> str:
    return ", ".join(_fields(model, location))


def _fields(model: Any, location: tuple) -> Config:
    """The fields of the section that holds `location`, by name; {} where it is none with fields."""
    for part in location[:-1]:
        field = getattr(model, "__pydantic_fields__", {}).get(part)
        model = field.annotation if field is not None else model
        forms = {getattr(form, "engine", "only"): form for form in get_args(model) if _has_fields(form)}
        model = forms.get(part, forms.get("only", model))
    return getattr(model, "__pydantic_fields__", {})


def _has_fields(form: Any) -> bool:
    return hasattr(form, "__pydantic_fields__")


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
    target = _class(node["_target_"], key)
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        raise ConfigError(
            f"{key}._target_ = {node['_target_']}: {target.__name__} must define {', '.join(missing)}"
        )
    given = {name: value for name, value in node.items() if not name.startswith("_")}
    parameters = inspect.signature(target).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and (
        unknown := set(given) - set(parameters)
    ):
        raise UnknownKeyError(key, [name for name in given if name in unknown], parameters)
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


def _class(target: str, key: str) -> type:
    """The class that a `_target_` names. ModuleNotFoundError where a library that its module imports is missing."""
    try:
        return get_class(target)
    except Exception as error:  # whatever importing it raised
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__
        missing = (getattr(cause, "name", None) or "") if isinstance(cause, ModuleNotFoundError) else ""
        if missing and missing.split(".")[0] != str(target).split(".")[0]:
            raise cause from error
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        raise ConfigError(f"{key}._target_ = {target}: no such class ({reason})") from error


def _how_to_write(kind: type) -> str:
    """What to subclass for a rule of one's own, and the method to write; "" for sections that are no rules."""
    bases = [base for base in (kind, *kind.__subclasses__()) if inspect.isabstract(base)]
    ways = [
        f"{base.__module__}.{base.__name__} and write its {', '.join(sorted(base.__abstractmethods__))}"
        for base in (bases[:1] if kind in bases else bases)
    ]
    return f"; for one of your own subclass {', or '.join(ways)}" if ways else ""


def run_section(config: Config) -> Config:
    """What one run depends on: the config without the pipeline's list of runs, the study's groups, the preset's name, the
    loggers, how many trajectories its page shows, and how figures show the algorithm."""
    section = {k: v for k, v in config.items() if k not in ("pipeline", "study", "preset", "loggers")}
    if isinstance(algorithm := section.get("algorithm"), dict):
        section["algorithm"] = {k: v for k, v in algorithm.items() if k not in Presentation.model_fields}
    if isinstance(evaluation := section.get("evaluation"), dict):
        section["evaluation"] = {k: v for k, v in evaluation.items() if k != "trajectories"}
    return section


# Settings that change no result but for rounding: a run goes on from its checkpoint under others.
MEMORY_SETTINGS = {
    "training": ("gradient_checkpointing", "micro_batch_tokens", "kernels"),
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
    """What a run's results depend on: `run_section` without `MEMORY_SETTINGS` and the place of its retriever, and the
    content of the files that it names."""
    section = run_section(config) | {"world": world_section(config)} | data_section(config)
    return section | {name: _lasting(config, name) for name in MEMORY_SETTINGS}


def world_section(config: Config) -> Config:
    """The world without where a retrieval server answers and how long it is waited for."""
    world, retriever = config["world"], config["world"].get("retriever")
    if not isinstance(retriever, dict) or retriever.get("_target_") != _CLIENT:
        return world
    return world | {"retriever": {k: value for k, value in retriever.items() if k not in _WHEREABOUTS}}


_FOLDERS = ("records", "index", "pretrained")  # keys that may name a folder of data
_NO_DATA = ("_target_", "cache_dir")


def data_section(config: Config) -> Config:
    """{"data": {path: hash}} of the local files that world and policy name, {} where they name none."""
    named = sorted({*_data_files(world_section(config)), *_data_files(config["policy"])})
    return {"data": {path: content_hash(path) for path in named}} if named else {}


def _data_files(node: Any, key: str = "") -> Iterator[str]:
    """Every text in a section that is the path of a file, or at a key for data that of a folder.

    `records` may be a mapping of benchmarks to paths.
    """
    if isinstance(node, dict):
        for name, value in node.items():
            if name not in _NO_DATA:
                yield from _data_files(value, key if key == "records" else name)
    elif isinstance(node, list):
        for value in node:
            yield from _data_files(value, key)
    elif isinstance(node, str) and (os.path.isfile(node) or (key in _FOLDERS and os.path.isdir(node))):
        yield node


def _lasting(config: Config, name: str) -> Config:
    return {key: value for key, value in config[name].items() if key not in MEMORY_SETTINGS[name]}


# Beside these, a warm start has of `training` only what changes no result but for rounding.
_PLAIN = {"device": "cpu", "precision": "float32"}


def warm_start_section(config: Config) -> Config:
    """What a warm start depends on; runs that share it share the cached warm start."""
    names = ("policy", "warm_start", "warm_start_seed")
    return {name: config[name] for name in names} | {
        "world": world_section(config),
        "rollout": _lasting(config, "rollout"),
        "questions": config["evaluation"]["questions"],
        **data_section(config),
        **_computed_otherwise(config),
    }


def _computed_otherwise(config: Config) -> Config:
    """What of `training` a warm start's numbers depend on, {} for float32 on a CPU."""
    found = {name: config["training"][name] for name in _PLAIN}
    return {} if found == _PLAIN else {"training": found}


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


def warm_start_overrides(run: PlannedRun) -> list[str]:
    """What makes a planned run's warm start: those of its overrides that it depends on (`seed` may set the world's), and where
    and how it computes, spelled out, so that regimes of other training name one warm start alike."""
    sections = ("world", "policy", "rollout", "warm_start")
    kept = ("preset", "seed", "warm_start_seed", "evaluation.questions")
    keys = [(override, override.partition("=")[0].lstrip("+~")) for override in run.overrides]
    own = [override for override, key in keys if key in kept or key.split(".")[0] in sections]
    training = run.config["training"]
    settings = {name: training[name] for name in (*_PLAIN, *MEMORY_SETTINGS["training"])}
    texts = {n: value if isinstance(value, str) else json.dumps(value) for n, value in settings.items()}
    return [*own, *(f"training.{name}={text}" for name, text in texts.items())]


@functools.cache
def code_of(*entries: str) -> str:
    """Hash of the syntax of every module that the entries import (`provenance.code_hash`)."""
    return code_hash(entries)


def fingerprint(section: Any) -> str:
    """Twelve hex digits of the content of a plain dict, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(section, sort_keys=True).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Arm:
    """An entry of `pipeline.arms`: a variant of an algorithm that answers a question of its own."""

    name: str
    label: str  # what figures and tables call it
    overrides: tuple[str, ...]  # what makes it, `algorithm=...` among them
    base: str  # the algorithm that it varies


def arms_of(config: Config) -> dict[str, Arm]:
    """The arms of a composed preset by name, `{NAME: {label: words, overrides: [...], base: algorithm}}` in its YAML;
    without `base` it is the algorithm that the overrides choose. ConfigError names the key that is wrong."""
    return {
        name: _arm(name, entry) for name, entry in ((config.get("pipeline") or {}).get("arms") or {}).items()
    }


def label_of(config: Config) -> str | None:
    """What figures call the algorithm of a composed run: its arm's label, or the algorithm's own; None where it has none."""
    algorithm = config["algorithm"]
    arm = arms_of(config).get(algorithm["name"])
    return arm.label if arm else algorithm.get("label")


def _arm(name: str, entry: Any) -> Arm:
    key = f"pipeline.arms.{name}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{key} = {entry!r}: must be {{label: ..., overrides: [...]}}")
    if unknown := sorted(set(entry) - {"label", "overrides", "base"}):
        raise ConfigError(f"{key}.{unknown[0]}: unknown key; allowed: label, overrides, base")
    label, overrides = entry.get("label"), entry.get("overrides")
    if not isinstance(label, str) or not label:
        raise ConfigError(f"{key}.label = {label!r}: what figures call the arm is needed")
    if not isinstance(overrides, list) or not all(isinstance(override, str) for override in overrides):
        raise ConfigError(f"{key}.overrides = {overrides!r}: a list of overrides is needed")
    chosen = [o.partition("=")[2] for o in overrides if o.partition("=")[0] == "algorithm"]
    if not chosen:
        raise ConfigError(f"{key}.overrides = {overrides!r}: algorithm=... must be among them")
    base = entry.get("base", chosen[-1])
    if base not in options("algorithm"):
        allowed = ", ".join(options("algorithm"))
        raise ConfigError(f"{key}.base = {base!r}: no algorithm; allowed: {allowed}")
    return Arm(name, label, tuple(overrides), base)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One training run of a preset's pipeline: the overrides that make it and, when asked, its composed config."""

    regime: str
    algorithm: str  # or the name of an arm
    seed: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.regime}/{self.algorithm}/seed{self.seed}"

    @functools.cached_property
    def config(self) -> Config:
        return compose(list(self.overrides))


def _regimes(pipeline: Config) -> Iterable[tuple[str, Config]]:
    """The entries of `pipeline.regimes`; ConfigError names a key of the wrong kind."""
    regimes = pipeline.get("regimes") if isinstance(pipeline, dict) else None
    if not isinstance(regimes, dict):
        raise ConfigError(
            f"pipeline.regimes = {regimes!r}: must be a mapping {{NAME: {{algorithms: [...], seeds: [...]}}}}"
        )
    regimes = {
        entry: plan for entry, plan in regimes.items() if plan is not None
    }  # null takes an inherited one out
    for entry, plan in regimes.items():
        key = f"pipeline.regimes.{entry}"
        if not isinstance(plan, dict):
            raise ConfigError(f"{key} = {plan!r}: must be {{algorithms: [...], seeds: [...]}}")
        for name, kind, of in (
            ("algorithms", str, "names"),
            ("seeds", int, "whole numbers"),
            ("overrides", str, "overrides"),
        ):
            values = plan.get(name) if name != "overrides" else plan.get(name) or []
            if not isinstance(values, list) or not all(type(value) is kind for value in values):
                raise ConfigError(f"{key}.{name} = {values!r}: must be a list of {of}")
    return regimes.items()


def planned_runs(preset: str, overrides: list[str] | None = None) -> list[PlannedRun]:
    """Every run that `snakemake all --config preset=...` trains, in a fixed order: all runs of a regime's first
    seed come before those of its second, so that an interrupted pipeline leaves whole replicates.

    A regime has `algorithms`, `seeds` and, optionally, `training`, `overrides` and the `regime` to record where
    several entries make up one. An algorithm is a file of `configs/algorithm` or an `Arm` of `pipeline.arms`.
    `pipeline.replicates` maps a seed to further overrides (its world, its warm start), so that one number tells
    a replicate. In overrides {seed} stands for the run's seed, {next_seed} for the one after it, cyclically, and {regime} for
    the regime that it is recorded in.
    Extra overrides apply to all runs. Raises ConfigError for an unknown preset, for an override of what tells
    the runs apart, for a run that is planned twice, and where there is none.
    """
    for override in overrides or []:
        if (key := override.partition("=")[0].lstrip("+~")) in ("preset", "training", "algorithm", "seed"):
            raise ConfigError(
                f"{override}: {key} cannot be the same for every run of a pipeline; choose the runs with "
                "pipeline.regimes.NAME.algorithms=[...], .seeds=[...] and .training=..."
            )
    base = compose([f"preset={preset}", *(overrides or [])])
    pipeline = base.get("pipeline")
    if not pipeline or (isinstance(pipeline, dict) and "regimes" not in pipeline):
        raise ConfigError(f"preset={preset} has no section `pipeline.regimes`, so there is nothing to train")
    # Which runs there are is no part of any of them.
    shared = [override for override in overrides or [] if not override.lstrip("+~").startswith("pipeline.")]
    arms, replicates = arms_of(base), pipeline.get("replicates") or {}
    runs: dict[str, PlannedRun] = {}
    for entry, plan in _regimes(pipeline):
        regime, seeds = plan.get("regime", entry), plan["seeds"]
        for (place, seed), algorithm in itertools.product(enumerate(seeds), plan["algorithms"]):
            arm = arms.get(algorithm)
            chosen = [
                f"preset={preset}",
                *([f"training={plan['training']}"] if "training" in plan else []),
                f"training.regime={regime}",
                *(
                    [f"algorithm={algorithm}"]
                    if arm is None
                    else [*arm.overrides, f"algorithm.name={algorithm}"]
                ),
                f"seed={seed}",
                *(plan.get("overrides") or []),
                *(replicates.get(seed) or replicates.get(str(seed)) or []),
                *shared,
            ]
            named = {"{seed}": str(seed), "{next_seed}": str(seeds[(place + 1) % len(seeds)])}
            named["{regime}"] = regime
            for name, value in named.items():
                chosen = [override.replace(name, value) for override in chosen]
            run = PlannedRun(regime, algorithm, seed, tuple(chosen))
            if run.name in runs:
                raise ConfigError(f"pipeline.regimes.{entry}: the run {run.name} is planned twice")
            runs[run.name] = run
    if not runs:
        raise ConfigError(f"preset={preset} plans no run: its regimes have no algorithms or no seeds")
    return list(runs.values())
