"""The runs of a preset's pipeline: regimes x algorithms (or arms) x seeds, in a fixed order."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable
from typing import Any

from stppo.checks import meant
from stppo.config.composition import compose
from stppo.config.files import Config, ConfigError, options
from stppo.config.identity import MEMORY_SETTINGS, PLAIN

SECTIONS = (
    *("algorithm", "policy", "rollout", "world", "training", "warm_start", "evaluation", "seed"),
    *("warm_start_seed", "loggers", "preset", "pipeline", "study"),
)
PIPELINE_KEYS = (
    *("regimes", "arms", "replicates", "recorded", "fast", "pages", "resources"),
    "core_seconds_per_iteration",
    "rates",  # what overrides may refer to
)
REGIME_KEYS = ("training", "algorithms", "seeds", "overrides", "regime")


@dataclasses.dataclass(frozen=True)
class Arm:
    """An entry of `pipeline.arms`: a variant of an algorithm that answers a question of its own."""

    name: str
    label: str  # what figures and tables call it
    overrides: tuple[str, ...]  # what makes it, `algorithm=...` among them
    base: str  # the algorithm that it varies


def arms_of(config: Config) -> dict[str, Arm]:
    """The arms of a composed preset by name, `{NAME: {label: words, overrides: [...], base: algorithm}}` in
    its YAML; without `base` it is the algorithm that the overrides choose. ConfigError names the key that is
    wrong."""
    return {
        name: _arm(name, entry) for name, entry in ((config.get("pipeline") or {}).get("arms") or {}).items()
    }


def label_of(config: Config) -> str | None:
    """What figures call the algorithm of a composed run: its arm's label, or the algorithm's own; None where
    it has none."""
    algorithm = config["algorithm"]
    arm = arms_of(config).get(algorithm["name"])
    return arm.label if arm else algorithm.get("label")


def _arm(name: str, entry: Any) -> Arm:
    key = f"pipeline.arms.{name}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{key} = {entry!r}: must be {{label: ..., overrides: [...]}}")
    _refuse_unknown(f"{key}.", entry, ("label", "overrides", "base"))
    label, overrides = entry.get("label"), entry.get("overrides")
    if not isinstance(label, str) or not label:
        raise ConfigError(f"{key}.label = {label!r}: what figures call the arm is needed")
    if not isinstance(overrides, list) or not all(isinstance(override, str) for override in overrides):
        raise ConfigError(f"{key}.overrides = {overrides!r}: a list of overrides is needed")
    chosen = [o.partition("=")[2] for o in overrides if o.partition("=")[0] == "algorithm"]
    if not chosen:
        raise ConfigError(f"{key}.overrides = {overrides!r}: algorithm=... must be among them")
    base = entry.get("base", chosen[-1])
    if base not in (known := options("algorithm")):
        where = f"{key}.base = {base!r}" if "base" in entry else f"{key}.overrides: algorithm={base}"
        hint = meant(str(base), known)
        raise ConfigError(f"{where}: no algorithm; allowed: {', '.join(known)}{hint}")
    return Arm(name, label, tuple(overrides), base)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One training run of a preset's pipeline: the overrides that make it and, when asked, its composed
    config."""

    regime: str
    algorithm: str  # or the name of an arm
    seed: int
    overrides: tuple[str, ...]
    next_seed: int = 0
    pattern: tuple[str, ...] = ()  # the overrides with `SEEDS` in place of its seeds; (): of this run alone
    composed: dict[tuple[str, ...], Config] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )  # by pattern, shared by the runs that are planned together

    @property
    def name(self) -> str:
        return f"{self.regime}/{self.algorithm}/seed{self.seed}"

    @functools.cached_property
    def config(self) -> Config:
        if (made := self.pattern or self.overrides) not in self.composed:
            self.composed[made] = compose(list(made))
        return _with_seeds(self.composed[made], dict(zip(SEEDS, (self.seed, self.next_seed), strict=True)))


# Composing takes a quarter of a second, so an arm is composed once, with these in place of a run's seed and
# the next.
SEEDS = (2_718_281_828, 3_141_592_653)


def _with_seeds(node: Any, seeds: dict[int, int]) -> Any:
    """A copy of a composed config, or of a part of it, with a run's own seeds."""
    if isinstance(node, dict):
        return {key: _with_seeds(value, seeds) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_seeds(value, seeds) for value in node]
    if isinstance(node, str):
        for stands, seed in seeds.items():
            node = node.replace(str(stands), str(seed))
        return node
    return seeds.get(node, node) if type(node) is int else node


def _refuse_unknown(where: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """ConfigError for the first key that is not among the allowed."""
    allowed = list(allowed)
    for key in given:
        if key not in allowed:
            hint = meant(str(key), allowed)
            raise ConfigError(f"{where}{key}: unknown key; allowed: {', '.join(allowed)}{hint}")


def _check_keys(preset: str, base: Config) -> None:
    """ConfigError where a composed preset has a section that nothing reads, which would pass in silence."""
    if not isinstance(base.get("preset"), str):
        raise ConfigError(f"preset={preset}: the first line of its file must be `# @package _global_`")
    _refuse_unknown("", base, SECTIONS)
    if isinstance(pipeline := base.get("pipeline"), dict):
        _refuse_unknown("pipeline.", pipeline, PIPELINE_KEYS)


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
        _refuse_unknown(f"{key}.", plan, REGIME_KEYS)
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
    """Every run that `snakemake all --config preset=...` trains, in a fixed order: all runs of a regime's
    first seed come before those of its second, so that an interrupted pipeline leaves whole replicates.

    A regime has `algorithms`, `seeds` and, optionally, `training`, `overrides` and the `regime` to record
    where several entries make up one. An algorithm is a file of `configs/algorithm` or an `Arm` of
    `pipeline.arms`. `pipeline.replicates` maps a seed to further overrides (its world, its warm start), so
    that one number tells a replicate. In overrides {seed} stands for the run's seed, {next_seed} for the one
    after it, cyclically, and {regime} for the regime that it is recorded in. Extra overrides apply to all
    runs. Raises ConfigError for an unknown preset, for an override of what tells the runs apart, for a run
    that is planned twice, and where there is none."""
    for override in overrides or []:
        if (key := override.partition("=")[0].lstrip("+~")) in ("preset", "training", "algorithm", "seed"):
            raise ConfigError(
                f"{override}: {key} cannot be the same for every run of a pipeline; choose the runs with "
                "pipeline.regimes.NAME.algorithms=[...], .seeds=[...] and .training=..."
            )
    base = compose([f"preset={preset}", *(overrides or [])])
    _check_keys(preset, base)
    pipeline = base.get("pipeline")
    if not pipeline or (isinstance(pipeline, dict) and "regimes" not in pipeline):
        raise ConfigError(f"preset={preset} has no section `pipeline.regimes`, so there is nothing to train")
    # Which runs there are is no part of any of them.
    shared = [override for override in overrides or [] if not override.lstrip("+~").startswith("pipeline.")]
    arms, replicates = arms_of(base), pipeline.get("replicates") or {}
    runs: dict[str, PlannedRun] = {}
    composed: dict[tuple[str, ...], Config] = {}
    names = [*arms, *options("algorithm")]
    for entry, plan in _regimes(pipeline):
        regime, seeds = plan.get("regime", entry), plan["seeds"]
        if unknown := [name for name in plan["algorithms"] if name not in names]:
            raise ConfigError(
                f"pipeline.regimes.{entry}.algorithms: {unknown[0]} is no algorithm (`stppo list "
                f"algorithms`) and no arm ({', '.join(arms) or 'there is none'}){meant(unknown[0], names)}"
            )
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
                "seed={seed}",
                *(plan.get("overrides") or []),
                *(replicates.get(seed) or replicates.get(str(seed)) or []),
                *shared,
            ]
            chosen = [override.replace("{regime}", regime) for override in chosen]
            following = seeds[(place + 1) % len(seeds)]
            own, pattern = (
                tuple(o.replace("{seed}", str(of[0])).replace("{next_seed}", str(of[1])) for o in chosen)
                for of in ((seed, following), SEEDS)
            )
            run = PlannedRun(regime, algorithm, seed, own, following, pattern, composed)
            if run.name in runs:
                raise ConfigError(f"pipeline.regimes.{entry}: the run {run.name} is planned twice")
            runs[run.name] = run
    if not runs:
        raise ConfigError(f"preset={preset} plans no run: its regimes have no algorithms or no seeds")
    return list(runs.values())


def warm_start_overrides(run: PlannedRun) -> list[str]:
    """What makes a planned run's warm start: those of its overrides that it depends on (`seed` may set the
    world's), and where and how it computes, spelled out, so that regimes of other training name one warm
    start alike."""
    sections = ("world", "policy", "rollout", "warm_start")
    kept = ("preset", "seed", "warm_start_seed", "evaluation.questions")
    keys = [(override, override.partition("=")[0].lstrip("+~")) for override in run.overrides]
    own = [override for override, key in keys if key in kept or key.split(".")[0] in sections]
    training = run.config["training"]
    settings = {name: training[name] for name in (*PLAIN, *MEMORY_SETTINGS["training"])}
    texts = {n: value if isinstance(value, str) else json.dumps(value) for n, value in settings.items()}
    return [*own, *(f"training.{name}={text}" for name, text in texts.items())]
