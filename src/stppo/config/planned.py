"""The runs of a preset's pipeline: regimes x algorithms (or arms) x seeds, in a fixed order."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from stppo.checks import meant
from stppo.config.composition import compose
from stppo.config.files import Config, ConfigError, options
from stppo.config.identity import MEMORY_SETTINGS, PLAIN
from stppo.config.loading import problem_of

SECTIONS = (
    *("algorithm", "policy", "rollout", "world", "training", "warm_start", "evaluation", "seed"),
    *("warm_start_seed", "loggers", "preset", "pipeline", "study"),
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Arm(_Section):
    """A variant of an algorithm that answers a question of its own."""

    label: str = Field(min_length=1)  # what figures and tables call it
    overrides: list[str]  # what makes it

    @field_validator("overrides")
    @classmethod
    def _chooses_an_algorithm(cls, overrides: list[str]) -> list[str]:
        chosen = [o.partition("=")[2] for o in overrides if o.startswith("algorithm=")]
        if not chosen:
            raise ValueError("algorithm=... must be among them")
        if chosen[-1] not in (known := options("algorithm")):
            raise ValueError(f"no algorithm; allowed: {', '.join(known)}{meant(chosen[-1], known)}")
        return overrides


class Regime(_Section):
    """Runs of some algorithms, by their files or arms, with some seeds."""

    algorithms: list[str]
    seeds: list[int]
    training: str | None = None
    overrides: list[str] = []
    regime: str | None = None  # to record, where several entries make up one


class Pipeline(_Section):
    """The section `pipeline` of a preset."""

    regimes: dict[str, Regime]
    arms: dict[str, Arm] = {}
    replicates: dict[int | str, list[str]] = {}  # seed -> overrides, so that one number tells a replicate
    recorded: str | None = None  # folder of committed metrics
    fast: bool = False  # derivations in brief
    pages: list[str] = []  # beside those of every preset
    resources: dict[str, Any] = {}  # of one training run, for Snakemake
    core_seconds_per_iteration: float | None = None
    rates: Any = None  # what overrides may refer to

    @field_validator("regimes", mode="before")
    @classmethod
    def _without_those_taken_out(cls, regimes: Any) -> Any:
        """null takes an inherited one out."""
        return {k: v for k, v in regimes.items() if v is not None} if isinstance(regimes, dict) else regimes


def pipeline_of(config: Config) -> Pipeline:
    """The pipeline of a composed preset; ConfigError names every key that is wrong."""
    try:
        return Pipeline.model_validate(config.get("pipeline") or {"regimes": {}})
    except ValidationError as error:
        raise ConfigError("; ".join(problem_of(Pipeline, e, "pipeline.") for e in error.errors())) from None


def label_of(config: Config) -> str | None:
    """What figures call the algorithm of a composed run: its arm's label, or the algorithm's own; None where
    it has none."""
    algorithm = config["algorithm"]
    arm = ((config.get("pipeline") or {}).get("arms") or {}).get(algorithm["name"])
    return arm["label"] if arm else algorithm.get("label")


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


def planned_runs(preset: str, overrides: list[str] | None = None) -> list[PlannedRun]:
    """Every run that `snakemake all --config preset=...` trains, in a fixed order: all runs of a regime's
    first seed come before those of its second, so that an interrupted pipeline leaves whole replicates.

    In overrides {seed} stands for the run's seed, {next_seed} for the one after it, cyclically, and {regime}
    for the regime that it is recorded in. Extra overrides apply to all runs. ConfigError for an unknown
    preset or key, an override of what tells the runs apart, a run that is planned twice, and where there is
    none."""
    for override in overrides or []:
        if (key := override.partition("=")[0].lstrip("+~")) in ("preset", "training", "algorithm", "seed"):
            raise ConfigError(
                f"{override}: {key} cannot be the same for every run of a pipeline; choose the runs with "
                "pipeline.regimes.NAME.algorithms=[...], .seeds=[...] and .training=..."
            )
    base = compose([f"preset={preset}", *(overrides or [])])
    if not isinstance(base.get("preset"), str):
        raise ConfigError(f"preset={preset}: the first line of its file must be `# @package _global_`")
    if unknown := [key for key in base if key not in SECTIONS]:
        hint = meant(unknown[0], SECTIONS)
        raise ConfigError(f"{unknown[0]}: unknown key; allowed: {', '.join(SECTIONS)}{hint}")
    pipeline = pipeline_of(base)
    # Which runs there are is no part of any of them.
    shared = [override for override in overrides or [] if not override.lstrip("+~").startswith("pipeline.")]
    runs: dict[str, PlannedRun] = {}
    composed: dict[tuple[str, ...], Config] = {}
    names = [*pipeline.arms, *options("algorithm")]
    for entry, plan in pipeline.regimes.items():
        regime, seeds = plan.regime or entry, plan.seeds
        if unknown := [name for name in plan.algorithms if name not in names]:
            arms = ", ".join(pipeline.arms) or "there is none"
            raise ConfigError(
                f"pipeline.regimes.{entry}.algorithms: {unknown[0]} is no algorithm (`stppo list`) "
                f"nor arm ({arms}){meant(unknown[0], names)}"
            )
        for (place, seed), algorithm in itertools.product(enumerate(seeds), plan.algorithms):
            arm = pipeline.arms.get(algorithm)
            chosen = [
                f"preset={preset}",
                *([f"training={plan.training}"] if plan.training else []),
                f"training.regime={regime}",
                *([*arm.overrides, f"algorithm.name={algorithm}"] if arm else [f"algorithm={algorithm}"]),
                "seed={seed}",
                *plan.overrides,
                *(pipeline.replicates.get(seed) or pipeline.replicates.get(str(seed)) or []),
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
        raise ConfigError(f"preset={preset} plans no run: `pipeline.regimes` has no algorithms or no seeds")
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
