"""From a composed config to what a run needs: typed settings, objective and world, each checked and built
once."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
from collections.abc import Iterable
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate

from stppo.checks import meant
from stppo.config import files as config_files
from stppo.config.files import Config, ConfigError, Prior
from stppo.config.identity import fingerprint, run_section
from stppo.waiting import saying

if TYPE_CHECKING:
    from stppo.config.settings import RunConfig
    from stppo.objectives import Objective
    from stppo.world.scripted import World


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """One composed config and what it describes, each built once.

    config: the plain dict, for fingerprints and records; settings: its typed sections; objective: credit,
    ratio, clip, stabiliser and loss aggregation; world: questions, environment and, where it has one of its
    own, the tokenizer."""

    config: Config
    settings: RunConfig
    objective: Objective
    world: World


def load(config: Config) -> LoadedRun:
    """Check types, ranges and combinations, and build what the config names; ConfigError names every
    offending key."""
    return load_all([config])[0]


def load_all(configs: Iterable[Config]) -> list[LoadedRun]:
    """`load` of several configs, worlds of one section built once for all of them.

    A line of the log says so where a world takes long: its questions and passages are read.
    """
    worlds: dict[str, World] = {}
    runs = []
    for config in configs:
        settings = settings_of(config)
        objective = _objective(config, settings)
        _check_potential(config, objective)
        section = fingerprint(config["world"])
        if section not in worlds:
            with saying("building the world: its questions and passages are read"):
                worlds[section] = build(config["world"], "world")
        runs.append(LoadedRun(config, settings, objective, worlds[section]))
    return runs


def settings_of(config: Config) -> RunConfig:
    """The typed sections of a config, nothing built; ConfigError names every offending key."""
    from pydantic import ValidationError

    from stppo.config.settings import RunConfig

    try:
        settings = RunConfig.model_validate(
            run_section(config)
            | {"algorithm": config.get("algorithm"), "evaluation": config.get("evaluation")}
            | {"loggers": config.get("loggers", [])}
        )
    except ValidationError as error:
        raise ConfigError("; ".join(problem_of(RunConfig, item) for item in error.errors())) from error
    for name in ("policy", "rollout"):  # dataclasses, which pydantic converts
        _check_values(config[name], type(getattr(settings, name)), name)
    return settings


def _objective(config: Config, settings: RunConfig) -> Objective:
    objective = build(config["algorithm"]["objective"], "algorithm.objective")
    size, sampled = objective.credit.group_size, settings.training.trajectories_per_iteration
    if sampled % size:
        raise ConfigError(
            f"algorithm.objective.credit.group_size={size} must divide "
            f"training.trajectories_per_iteration={sampled}"
        )
    if isinstance(settings.algorithm.prior, Prior):
        _check_prior(config["algorithm"], settings.algorithm.prior)
    return objective


def _check_potential(config: Config, objective: Objective) -> None:
    """ConfigError where potential-based turn rewards would change which policy is best."""
    from stppo.objectives import TurnGAE, TurnReturnMinusValue

    paid, credit = config["world"].get("turn_rewards"), objective.credit
    if not isinstance(paid, dict) or paid.get("form") != "potential":
        return
    mine, theirs = paid.get("gamma", 1.0), getattr(credit, "gamma", 1.0)
    if mine != theirs or (theirs < 1 and not isinstance(credit, TurnGAE | TurnReturnMinusValue)):
        raise ConfigError(
            f"world.turn_rewards.form=potential: world.turn_rewards.gamma={mine}, but the credit "
            f"{type(credit).__name__} discounts by {theirs} (turns, if TurnGAE or TurnReturnMinusValue); set "
            "both to 1"
        )


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


# Where pydantic puts the form of a section that has several: rollout's is its engine.
_FORMS = {(1, "torch"), (1, "vllm")}


def problem_of(model: Any, item: Any, above: str = "") -> str:
    """One of pydantic's errors as `key = value: what is wrong`; of a whole section the key alone.

    above: what stands before the model's own keys."""
    key = above + ".".join(str(part) for i, part in enumerate(item["loc"]) if (i, part) not in _FORMS)
    message = item["msg"].removeprefix("Value error, ")
    if key == "algorithm.prior":
        return f"algorithm.{message}"
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        names = fields_of(model, item["loc"])
        return f"{key}: unknown key; allowed: {', '.join(names)}{meant(str(item['loc'][-1]), names)}"
    if isinstance(item["input"], dict):
        # A rule over several keys names them in its message.
        return message if item["type"] == "value_error" else f"{key}: {message}"
    return f"{key} = {item['input']!r}: {message}"


def fields_of(model: Any, location: tuple) -> Config:
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
    """`hydra.utils.instantiate` a `_target_` section; raises ConfigError that names the key and what is
    allowed."""
    _check_target(node, key)
    try:
        return instantiate(node, _convert_="object")
    except InstantiationException as error:
        inner = re.search(r"full_key: (\S+)", str(error))
        place = f"{key}.{inner[1]}" if inner else key
        raise ConfigError(f"{place}: {' '.join(str(error.__cause__ or error).split())}") from error


def _check_target(node: Config, key: str) -> None:
    """Raise ConfigError for a missing or unknown `_target_`, an unknown key, or a section of the wrong
    class."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{key}: a mapping with _target_ is needed, got {node!r}")
    target = class_of(node["_target_"], key)
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        raise ConfigError(
            f"{key}._target_ = {node['_target_']}: {target.__name__} must define {', '.join(missing)}"
        )
    given = {name: value for name, value in node.items() if not name.startswith("_")}
    parameters = inspect.signature(target).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and (
        unknown := set(given) - set(parameters)
    ):
        names = [f"{key}.{name}" for name in given if name in unknown]
        raise ConfigError(
            f"{', '.join(names)}: unknown {'key' if len(names) == 1 else 'keys'}; allowed: "
            f"{', '.join(parameters)}; what a file inherits is dropped by '~{names[0]}'"
        )
    _check_values(given, target, key)
    kinds = _annotations(target)
    for name, value in given.items():
        kind = kinds.get(name)
        nested = isinstance(value, dict) and "_target_" in value
        if nested:
            _check_target(value, f"{key}.{name}")
        rule = dataclasses.is_dataclass(kind) or inspect.isabstract(kind)
        if rule and not (nested and issubclass(get_class(value["_target_"]), kind)):
            given_class = value["_target_"] if nested else repr(value)
            raise ConfigError(
                f"{key}.{name} = {given_class}: the _target_ of a {kind.__name__} is "
                f"needed{_how_to_write(kind)}"
            )


_PLAIN = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
}


def _annotations(target: type) -> dict[str, Any]:
    """What a class's parameters are annotated with; {} where it says nothing that can be read."""
    found = {}
    for of in (target, target.__init__):
        with contextlib.suppress(NameError, TypeError, AttributeError):
            found |= get_type_hints(of)
    return found


def _check_values(given: Config, target: type, key: str) -> None:
    """Raise ConfigError for a value of another plain type than its parameter is annotated with."""
    kinds = _annotations(target)
    for name, value in given.items():
        if said := _misfit(value, kinds.get(name)):
            raise ConfigError(f"{key}.{name} = {value!r}: {said}")


def _misfit(value: Any, kind: Any) -> str:
    """What a parameter must be that is annotated with plain types alone, where the value is not of them; ""
    where it is.

    A text that YAML does not take for a switch or a number (`off`, `None`, `08`) is true, or fails later,
    elsewhere."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if not all(isinstance(one, type) and one in _PLAIN for one in kinds):
        return ""
    if type(value) in kinds or (type(value) is int and float in kinds):
        return ""
    return f"must be {' or '.join(_PLAIN[one] for one in kinds)}"


def class_of(target: str, key: str) -> type:
    """The class that a `_target_` names. ModuleNotFoundError where a library that its module imports is
    missing."""
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
    """What to subclass for a rule of one's own, and the method to write; "" for sections that are no
    rules."""
    bases = [base for base in (kind, *kind.__subclasses__()) if inspect.isabstract(base)]
    ways = [
        f"{base.__module__}.{base.__name__} and write its {', '.join(sorted(base.__abstractmethods__))}"
        for base in (bases[:1] if kind in bases else bases)
    ]
    return f"; for one of your own subclass {', or '.join(ways)}" if ways else ""
