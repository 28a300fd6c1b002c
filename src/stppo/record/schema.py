"""Names of everything a run records: files, columns and fields, each with a one-line definition.

Training writes these names and the analysis reads them; this file is all the two sides share.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

# --- files of one run folder -----------------------------------------------------------------
RUN_FILE = "run.json"
POLICY_DIR = "policy"  # weights and tokenizer at the end
CHECKPOINT_DIR = "checkpoint"  # the newest one, numbered
SET_ASIDE = "earlier-"  # begins the names of the sub-folders of what a run set aside
UPDATES_FILE = "updates.parquet"
EVALUATIONS_FILE = "evaluations.parquet"
TRAJECTORIES_FILE = "trajectories.json"
CONFIG_FILE = "config.yaml"
BY_BENCHMARK_FILE = "evaluations_by_benchmark.json"  # where questions of several benchmarks are asked

# --- files of an evaluation's folder; RESULT_FILE and TRAJECTORIES_FILE once per benchmark and decoding ---
BENCHMARKS_FILE, BENCHMARKS_TABLE_FILE = "benchmarks.json", "benchmarks.csv"
RESULT_FILE = "result.json"

# --- files of a metrics folder, made from many runs by `record.runs.collect` ---------------
RUNS_FILE = "runs.json"
ITERATIONS_FILE = "iterations.parquet"
COLLECTED_EVALUATIONS_FILE = "evaluations.parquet"
SUMMARY_FILE = "summary.csv"


def is_set_aside(file: Path, folder: Path) -> bool:
    """Whether a file below a folder belongs to what a run of that folder set aside."""
    return any(part.startswith(SET_ASIDE) for part in file.relative_to(folder).parts)


# --- values of RunRecord.status ---------------------------------------------------------------
COMPLETED, NON_FINITE, RUNNING = "completed", "non_finite", "running"

# What identifies a run; `collect` puts these columns before all others.
KEY_COLUMNS: dict[str, str] = {
    "regime": "off-policy setting (learning rate, epochs, staleness, iterations), e.g. OFF_POLICY",
    "algorithm": "name of the objective, e.g. st_ppo",
    "seed": "seed of roll-outs and minibatches; the warm start has its own seed",
}


class Recorded(BaseModel):
    """Part of a record: fields of another kind are errors, further ones stay as they are."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class WarmStart(Recorded):
    """What the supervised start scores, from at least 2,048 sampled trajectories on full presets."""

    success_sampled: float = Field(ge=0, le=1)
    success_greedy: float = Field(ge=0, le=1)
    n_sampled: int = 0


class NonFinite(Recorded):
    """Which quantity stopped being finite, and at which update."""

    what: str
    update: int


def _said(meaning: str, **options: Any) -> Any:
    return Field(description=meaning, **options)


class RunRecord(Recorded):
    """The content of `run.json`. A field with a default may be missing in records of earlier versions."""

    status: str = _said(f"{COMPLETED}, {NON_FINITE} (stopped by a non-finite loss or gradient) or {RUNNING}")
    regime: str = _said(KEY_COLUMNS["regime"])
    algorithm: str = _said(KEY_COLUMNS["algorithm"])
    seed: int = _said(KEY_COLUMNS["seed"], lt=2**63)
    label: str | None = _said(
        "what figures call the algorithm, where its config says so; else null", default=None
    )
    variant: str | None = _said(
        "overrides that it was started with but for algorithm and seed, as typed; empty for runs of a "
        "pipeline",
        default=None,
    )
    preset: str = _said("name of the preset, e.g. laptop")
    policy: str | None = _said("name of the policy config, e.g. tiny", default=None)
    policy_parameters: int | None = _said(
        "number of trainable parameters of the policy, critic not counted", default=None
    )
    world: str = _said("name of the world config, e.g. synthetic")
    warm_start_seed: int = _said("seed of the supervised start")
    warm_start_folder: str | None = _said(
        "name of the folder with the supervised start; another version of the code would name it differently",
        default=None,
    )
    warm_start_weights: str | None = _said(
        "hash of the weights in that folder, which every run that begins alike shares", default=None
    )
    world_seed: int = _said("seed of the synthetic knowledge base")
    config_fingerprint: str | None = _said("hash of the composed config", default=None)
    code_hash: str | None = _said(
        "hash of the syntax tree of every module that training imports", default=None
    )
    git_commit: str | None = _said("commit of the source tree; null outside git", default=None)
    git_dirty: bool | None = _said(
        "true if the source tree had uncommitted changes; null outside git", default=None
    )
    versions: dict[str, str] | None = _said("versions of Python and the main packages", default=None)
    hardware: dict[str, Any] | None = _said("processor, cores, memory, GPU", default=None)
    resumed_on: list[dict[str, Any]] | None = _said(
        "versions, hardware and commit of each later part that ran under others than the part before it; "
        "mostly empty",
        default=None,
    )
    kernels: list[str] | None = _said(
        "what computed policy and critic: compiled or eager; both where the run went on under the other",
        default=None,
    )
    started: str | None = _said("start time, ISO 8601, UTC", default=None)
    wall_seconds: float = _said("seconds of training in all, resumed parts added up")
    cpu_seconds: float | None = _said(
        "CPU seconds of the training process, all threads, resumed parts added up", default=None
    )
    peak_memory_mb: float | None = _said("largest resident memory of the process, MiB", default=None)
    gpu_peak_memory_mb: float | None = _said(
        "largest memory allocated on the GPU, MiB, as PyTorch counts it (torch.cuda.max_memory_allocated); "
        "null on a CPU",
        default=None,
    )
    iterations: int = _said("iterations done")
    updates: int = _said("optimiser updates done")
    warm_start: WarmStart = _said("success of the policy before training: sampled, greedy, number sampled")
    non_finite: NonFinite | None = _said(
        "what became non-finite and at which update; null if nothing did", default=None
    )
    # of a metrics folder, from the run's config.yaml
    objective: dict[str, Any] | None = _said("the objective's section of the config", default=None)
    training: dict[str, Any] | None = _said("the training section of the config", default=None)


def check_record(record: Any, place: str, remedy: str) -> None:
    """ValueError of one line that names a field of `RunRecord` which is missing, or of another kind than a
    run writes."""
    if not isinstance(record, dict):
        raise ValueError(f"{place} lacks every field; make it anew with: {remedy}")
    try:
        RunRecord.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(f"{place} lacks {field}; make it anew with: {remedy}") from None
        raise ValueError(
            f"{place}: {field} = {first['input']!r} is not what a run writes; make it anew with: {remedy}"
        ) from None


# Of `run.json`: name -> meaning.
RUN_FIELDS = {
    name: field.description or ""
    for name, field in RunRecord.model_fields.items()
    if name not in ("objective", "training")
}


class Column(str):
    """A column of a table: its meaning in one line, with the module that writes it and its unit."""

    writer: str
    unit: str

    def __new__(cls, meaning: str, writer: str = "", unit: str = "") -> Column:
        self = super().__new__(cls, meaning)
        self.writer, self.unit = writer, unit
        return self


class Row(dict[str, Any]):
    """A row of a table while it is written: a name that is no column is a KeyError where it is written."""

    def __init__(self, table: Mapping[str, Column], values: Mapping[str, Any]) -> None:
        self.table = table
        super().__init__()
        self |= values

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        super().__setitem__(name, value)

    def __ior__(self, values: Mapping[str, Any]) -> Row:
        self._check(*values)
        self.update(values)
        return self

    def _check(self, *names: str) -> None:
        if unknown := sorted(set(names) - set(self.table)):
            raise KeyError(f"{unknown[0]} is no column of this table (stppo.record.schema)")


def _ratio_columns() -> dict[str, Column]:
    """Mean, max, 99th percentile and min of the importance ratio at each granularity.

    Each statistic is over the minibatch with one value per token, turn or trajectory.
    """
    statistics = {"mean": "mean", "max": "largest", "p99": "99th percentile of the", "min": "smallest"}
    segments = {
        "token": "token importance ratio in the minibatch, one value per agent token",
        "turn": "turn importance ratio (geometric) in the minibatch, one value per turn",
        "sequence": "sequence importance ratio (geometric) in the minibatch, one value per trajectory",
    }
    return {
        f"ratio_{statistic}_{segment}": Column(f"{adjective} {text}", "stppo.objectives.diagnostics", "ratio")
        for segment, text in segments.items()
        for statistic, adjective in statistics.items()
    }


def _table(name: str) -> dict[str, Column]:
    """Columns by name, as columns.yaml has them."""
    return {
        column: Column(meaning, f"stppo.{writer}", unit)
        for writer, written in _COLUMNS[name].items()
        for column, (unit, meaning) in written.items()
    }


_COLUMNS = yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text(encoding="utf-8"))
# One row per optimiser update; values that belong to an iteration repeat on each of its rows.
UPDATE_COLUMNS = _table("updates") | _ratio_columns()
# One row per evaluation on the fixed held-out questions.
EVALUATION_COLUMNS = _table("evaluations")

# One row per benchmark and decoding of `stppo evaluate`; each mean has its standard error over questions
# beside it.
BENCHMARK_MEANS: dict[str, str] = {
    "em": "share of questions whose answer scores 1: exact match, for multiple choice the right option",
    "search_r1_em": "the same as Search-R1 scores a dialogue: by its last answer block, in whatever turn",
    "lenient_em": "the same where marks, dashes and compatible characters of any script count as one",
    "em_constant": "the same of one reply to every question, the one that is right most often on these",
    "em_without_search": "the same of the same policy where every search finds nothing",
    "f1": "mean token F1 of the answers; for multiple choice the same as em",
    "turns": "mean number of agent turns",
    "searches": "mean number of valid searches",
    "valid_format_rate": "share of turns that parse as one well-formed search or answer",
}
BENCHMARK_COLUMNS: dict[str, str] = {
    "benchmark": "which questions were asked; synthetic for those of a synthetic world",
    "decoding": "greedy, or sampled at temperature 1",
    "n_questions": "number of questions",
    **BENCHMARK_MEANS,
    **{f"{name}_se": f"standard error of {name}" for name in BENCHMARK_MEANS},
    "seconds": "seconds the evaluation took",
}

# Update columns that only a sampling engine beside the trainer (vLLM) fills; `mismatch_...` also bfloat16 in
# PyTorch.
ENGINE_COLUMNS: tuple[str, ...] = (
    "seconds_sync",
    "prefix_cache_hit_rate",
    "mismatch_mean",
    "mismatch_max",
    "mismatch_kl",
    "mismatch_effective_sample_size",
)

# Columns that say how long something took: never the same twice, so left out of comparisons of two runs.
TIMING_COLUMNS: tuple[str, ...] = (
    "seconds_rollout",
    "seconds_sync",
    "seconds_scoring",
    "seconds_critic",
    "seconds_update",
    "tokens_per_second",
    "seconds",
)

# iterations.parquet holds the mean of every update column per iteration and, for these, also the
# largest value under the name `<column>_max`: a spike of one update vanishes in a mean.
PEAK_COLUMNS: tuple[str, ...] = (
    "gradient_norm",
    "ppo_gradient_norm",
    "clipping_bias_norm",
    "ratio_max_token",
    "ratio_max_turn",
    "ratio_max_sequence",
)

# One row per run, for people.
SUMMARY_COLUMNS: dict[str, str] = {
    **KEY_COLUMNS,
    "world_seed": RUN_FIELDS["world_seed"],
    "warm_start_seed": RUN_FIELDS["warm_start_seed"],
    "status": RUN_FIELDS["status"],
    "start": "S0: sampled success of the warm start",
    "peak": "P: largest trailing mean (of 3 evaluations) of sampled success, at least the start",
    "final": "F: mean sampled success of the last tenth of the evaluations; 0 after a non-finite stop",
    "area": "mean height of the curve of sampled success",
    **{
        f"after_{n}": f"trailing mean of sampled success after {n} iterations; empty in shorter runs"
        for n in (10, 20, 40, 60)
    },
    "greedy_start": "greedy success of the warm start",
    "greedy_final": "mean greedy success of the last tenth of the greedy evaluations; 0 after a non-finite "
    "stop",
    "greedy_area": "mean height of the curve of greedy success",
    "learned": "true if the peak lies at least 0.10 above the start",
    "gain_kept": "(final - start) / (peak - start) of a run that learned, else empty",
    "crash_iteration": "first evaluation at which more than half of the gain is lost, or the non-finite "
    "update's; empty if none",
    "rapid_crashes": "how often half of the gain was lost within 10 iterations, recovered or not",
    "collapsed": "true if a crash (more than half of the gain lost) was not made good by the end, or a loss "
    "or gradient stopped being finite",
    "outcome": "learned, crashed and recovered, collapsed, did not learn, or lost its start",
    "clip_fraction_mean": "mean sign-aware clip fraction over all iterations",
    "gradient_norm_max": "largest gradient norm of any update, before clipping",
    "updates": RUN_FIELDS["updates"],
    "wall_seconds": RUN_FIELDS["wall_seconds"],
}


class TrajectoryRecord(Recorded):
    """A record of trajectories.json."""

    question: str = _said("text of the question")
    answers: list[str] = _said("accepted answers")
    reward: float = _said("reward of the answer")
    turn_rewards: list[float] | None = Field(
        None, description="what each turn was paid, the answer's reward in the last; absent where that is all"
    )
    tokens: list[str] = _said("tokens as text, padding removed")
    agent_mask: list[int | bool] = _said("1 where the policy emitted the token, 0 where the environment did")
    turn_ids: list[int] = _said("turn of each agent token from 0, -1 elsewhere")
    logprobs: list[float] = _said(
        "log-probability of each token under the policy that sampled it, 0 off the mask"
    )


GLOSSARY: dict[str, dict[str, str]] = {
    "Per update (`updates.parquet`; means per iteration in `iterations.parquet`)": UPDATE_COLUMNS,
    "Per evaluation (`evaluations.parquet`)": EVALUATION_COLUMNS,
    "Per benchmark (`benchmarks.csv` of `stppo evaluate`)": BENCHMARK_COLUMNS,
    "Per run, summary (`summary.csv`)": SUMMARY_COLUMNS,
    "Per run, record (`run.json`)": RUN_FIELDS,
}
