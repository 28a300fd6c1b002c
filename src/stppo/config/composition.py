"""The one composer of configs: Hydra groups in `configs/`, composed and resolved.

The command line, the notebooks and the Snakefile all come through here. Nothing heavy is imported at module
level, so that a Snakefile parses fast."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stppo.checks import meant
from stppo.config import files as config_files
from stppo.config.files import Config, ConfigError, Presentation, options
from stppo.config.loading import build, class_of, fields_of

log = logging.getLogger(__name__)
logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # what goes wrong is raised, not printed as well


def compose(overrides: list[str] | None = None) -> Config:
    """Compose `configs/config.yaml` with Hydra overrides into a plain, resolved dict.

    Groups also have the options of your own folder (`config_files.own_config_dir`). The same overrides are
    composed once while no file changes. Raises ConfigError for an unknown group option, key or malformed
    override, and for a YAML file that cannot be read."""
    files = [file for group in config_files.groups() for file in config_files.option_files(group)]
    stamps = config_files.stamps([config_files.config_dir() / "config.yaml", *files])
    return copy.deepcopy(_composed(tuple(overrides or ()), stamps))


@functools.lru_cache(maxsize=256)
def _composed(given: tuple[str, ...], stamps: tuple[tuple[Path, int], ...]) -> Config:
    overrides, own = list(given), config_files.own_config_dir()
    _refuse_bare(overrides)
    if own is not None:
        _refuse_other_bases(own)
    for override in overrides:
        group, _, value = override.partition("=")
        if _is_group(group) and value and value not in options(group):
            names = options(group)
            raise ConfigError(
                f"{group}={value}: unknown {group}; allowed: {', '.join(names)}{meant(value, names)}"
            )
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
        if missing := re.match(r"In '(\S+)': Could not (?:load|find) '(\w+)/([\w.]+)'", str(error)):
            names = options(missing[2])
            hint = meant(missing[3], names) or f"; allowed: {', '.join(names)}"
            raise ConfigError(
                f"{missing[1]}: its defaults name {missing[3]}, which is no {missing[2]}{hint}"
            ) from error
        if unknown := re.match(r"Could not override '([\w.]+)'", str(error)):
            _refuse_unknown_key(unknown[1], overrides)
        # Hydra's first line says what is wrong; the lines after it often name the key.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        lines = [line for line in lines if line != "Config search path:"]
        cause = [str(error.__cause__).splitlines()[0]] if error.__cause__ else []
        raise ConfigError(" | ".join(dict.fromkeys(lines[:2] + cause))) from error


def _refuse_bare(overrides: list[str]) -> None:
    """Raise ConfigError for an override without a key."""
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            of = [group for group in config_files.groups() if override in options(group)]
            example = f"{override}=VALUE" if "." in override else f"{of[0] if of else 'algorithm'}={override}"
            raise ConfigError(f"{override}: an override has the form key=value, e.g. {example}")


_OTHER_BASE = re.compile(
    r"(?::\s+|[,\[{]\s*|^\s*-\s+)([-+]?(?:0[0-7]*[1-7][0-7]*|[1-9]\d*(?::[0-5]?\d)+))\s*(?:[,\]}#]|$)"
)


def _refuse_other_bases(own: Path) -> None:
    """Raise ConfigError for a number in one's own files that YAML 1.1 reads in base 8 (010 is 8) or 60 (1:30
    is 90)."""
    for file in (file for group in config_files.groups() for file in sorted((own / group).glob("*.yaml"))):
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if found := _OTHER_BASE.search(line):
                meant = yaml.safe_load(found[1])
                raise ConfigError(
                    f"{file}, line {number}: {found[1]} is {meant} in YAML; write what you mean, or quotes"
                )


def _refuse_foreign_name(config: Config, overrides: list[str], own: Path | None) -> None:
    """Raise ConfigError where an own algorithm's file would be recorded under a name that is not the
    file's."""
    given = dict(override.partition("=")[::2] for override in overrides)
    chosen, name = given.get("algorithm"), (config.get("algorithm") or {}).get("name")
    if own is None or not chosen or "algorithm.name" in given or name in (None, chosen):
        return
    if (file := own / "algorithm" / f"{chosen}.yaml").exists():
        raise ConfigError(f"{file}: its runs would be recorded as {name}; write `name: {chosen}` in it")


def _forget_other_engines(config: Config, overrides: list[str]) -> None:
    """Drop from the roll-out what a preset or a world sets for another engine than the one that was chosen;
    what was typed stays, and is refused by name later."""
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
    whole = node = compose([override for override in overrides if _is_group(override.partition("=")[0])])
    for part in key.split("."):
        if isinstance(node, dict) and part in node:
            node = node[part]
            continue
        if isinstance(node, dict) and node:
            if part in _known_keys(node, key):
                raise ConfigError(f"{key} is not set by what was chosen; write +{key}=... to set it")
            names = [name for name in node if name != "_target_"]
            places = {k: k.rpartition(".")[2] for k, _ in config_files.dotted(whole)}
            # Its very name elsewhere, or its first letters (lr), what is trained with first.
            initials = {leaf: "".join(word[:1] for word in leaf.split("_")) for leaf in places.values()}
            same = [k for k, leaf in places.items() if part in (leaf, initials[leaf])]
            same.sort(key=lambda k: not k.startswith("training."))
            hint = f"; did you mean {' or '.join(same)}?" if same else meant(part, names)
            hint = hint or meant(part, places.values(), {leaf: k for k, leaf in reversed(places.items())})
            raise ConfigError(f"{key}: unknown key; allowed: {', '.join(names)}{hint}")
        return  # an open mapping such as warm_start.noise: Hydra's advice is right


def _known_keys(node: Config, key: str) -> Iterable[str]:
    """The keys that a section may have beside those that it has."""
    from stppo.config.settings import RunConfig

    if "_target_" in node:
        return inspect.signature(class_of(node["_target_"], key)).parameters
    return fields_of(RunConfig, tuple(key.split(".")))


def algorithm_section(name: str) -> Config:
    """The section `algorithm` of a composed config."""
    return compose([f"algorithm={name}"])["algorithm"]


def objective_of(algorithm: str | Path) -> Any:
    """See `stppo.load`."""
    from stppo.objectives import Stabilizer  # brings torch
    from stppo.objectives.rivals import LeaveOneOutKept, VarianceFiltered

    name = config_files.algorithm_name(algorithm)
    objective = build(algorithm_section(name)["objective"], "algorithm.objective")
    if objective.surrogate.one_turn_at_a_time:
        log.warning(
            "%s: in your own loop, make one update for each turn of a minibatch, the last first", name
        )
    if isinstance(objective.credit, LeaveOneOutKept | VarianceFiltered):
        log.warning("%s: in your own loop, leave out the trajectories that its credit leaves out", name)
    if type(objective.stabilizer).ends_iteration is not Stabilizer.ends_iteration:
        log.warning("%s: in your own loop, ask stabilizer.ends_iteration after each update", name)
    return objective


MOST_RUNS = 10_000  # of one sweep


def expand_sweep(overrides: list[str]) -> list[list[str]]:
    """Hydra's multirun syntax, `seed=0,1 algorithm=token_ppo,st_ppo`, as a list of override lists."""
    _refuse_bare(overrides)
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
    """The overrides that tell a run from others of its algorithm and seed, as one text that `shlex.split`
    takes apart.

    Not among them: `loggers`, which see what is recorded and change nothing.
    """
    told = ("algorithm", "seed", "loggers")
    return shlex.join(o for o in overrides if o.partition("=")[0].lstrip("+") not in told)
