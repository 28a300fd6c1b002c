"""From finished run folders to one metrics folder, and back into memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from stppo.config.algorithms import Algorithm, in_order, look
from stppo.files import PART, parse_json, read_yaml, repository_path
from stppo.record import schema
from stppo.record.outcomes import AFTER, Outcome, judge, with_zeros
from stppo.record.tidy import KEYS, Runs, main_regime, stopped_at, tidy
from stppo.stats import area_under_curve, final_mean

_OF = b"stppo_runs"  # of a table: of which runs it is
CROWD = 12  # algorithms beyond which a picture shows those with a file of their own alone
INTEGERS = ("seed", "iteration", "n_questions")
_MEASURED, _EVALUATED = ("gradient_norm", "clip_fraction"), ("temperature", "success")  # read of every run
# Columns of `Metrics.summary` whose means stand in `Metrics.table`.
TABLE_MEANS = ("start", "peak", "final", "greedy_start", "greedy_final", "gain_kept", "area")


def make_command(file: Path) -> str:
    """The command that makes a run's or a metrics folder's file anew."""
    below = file.parts[file.parts.index("results") + 1 :] if "results" in file.parts else ()
    if len(below) > 2 and below[0] != "reference" and below[1] != "manual":
        return f"snakemake {file} --config preset={below[0]}"
    if file.name == schema.RUN_FILE:
        return f"stppo train OVERRIDES --out {file.parent}"
    return f"stppo collect {file.parent} RUN_FOLDERS"


def _read_json(path: Path, remedy: str) -> Any:
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        where = "" if path.parent.is_dir() else f" (no folder {path.parent})"
        raise FileNotFoundError(f"{path} is missing{where}; make it with: {remedy}") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is unreadable ({error}); delete it and make it anew with: {remedy}"
        ) from None


def _read_parquet(path: Path, columns: Iterable[str], remedy: str) -> pd.DataFrame:
    try:
        frame = pq.ParquetFile(path).read().to_pandas()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; make it with: {remedy}") from None
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path} is unreadable ({reason}); delete it and make it anew with: {remedy}"
        ) from None
    if missing := [column for column in columns if column not in frame]:
        raise ValueError(f"{path} lacks column {missing[0]}; make it anew with: {remedy}")
    return frame.astype({c: "float64" for c in frame.select_dtypes("float32").columns})


def read_run(run_dir: str | Path) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
    """Record, updates and evaluations of one finished run.

    FileNotFoundError or ValueError names the run and the command that makes it, if a part is missing,
    unreadable or unfinished.
    """
    run_dir = Path(run_dir)
    remedy = make_command(run_dir / schema.RUN_FILE)
    record = _read_json(run_dir / schema.RUN_FILE, remedy)
    schema.check_record(record, str(run_dir / schema.RUN_FILE), remedy)
    if record["status"] not in (schema.COMPLETED, schema.NON_FINITE):
        raise ValueError(f"run {run_dir} is unfinished (status {record['status']}); finish it with: {remedy}")
    updates = _read_parquet(run_dir / schema.UPDATES_FILE, ("update", "iteration", *_MEASURED), remedy)
    evaluations = _read_parquet(run_dir / schema.EVALUATIONS_FILE, ("iteration", *_EVALUATED), remedy)
    return record, updates, evaluations


def per_iteration(updates: pd.DataFrame) -> pd.DataFrame:
    """Mean of every update column per iteration, and `<column>_max` of the peak columns; NaN skipped."""
    columns = [column for column in schema.UPDATE_COLUMNS if column in updates]
    groups = updates[columns].astype("float64").groupby("iteration")
    means = groups.mean()
    peaks = groups[[column for column in schema.PEAK_COLUMNS if column in updates]].max()
    return means.join(peaks.add_suffix("_max")).reset_index()


def _write_table(frame: pd.DataFrame, path: Path, of: str) -> None:
    """Compact and reproducible: float32, dictionary strings, zstd, no index. of: what `_which_runs` says."""
    frame = frame.astype({c: "float32" for c in frame.select_dtypes("float").columns})
    frame = frame.astype({c: "int64" for c in INTEGERS if c in frame})
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata({_OF: of})
    pq.write_table(table, path, compression="zstd", compression_level=9)


def _which_runs(runs: list[dict[str, Any]]) -> str:
    """What tells runs from others of the same names: hash of their keys, updates and seconds."""
    told = [[run[name] for name in (*KEYS, "updates", "wall_seconds")] for run in runs]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _refuse_mixture(metrics_dir: Path, runs: list[dict[str, Any]], remedy: str) -> None:
    """ValueError where a table was collected from other runs than its neighbours; old ones do not say."""
    for name in (schema.ITERATIONS_FILE, schema.COLLECTED_EVALUATIONS_FILE):
        said = (pq.read_schema(metrics_dir / name).metadata or {}).get(_OF)
        if said not in (None, _which_runs(runs).encode()):
            raise ValueError(
                f"{metrics_dir / name} is of other runs than {schema.RUNS_FILE}; make both with: {remedy}"
            )


def _keyed(frame: pd.DataFrame, record: dict[str, Any]) -> pd.DataFrame:
    keys = pd.DataFrame({name: [record[name]] * len(frame) for name in KEYS}, index=frame.index)
    return pd.concat([keys, frame.drop(columns=KEYS, errors="ignore")], axis=1)


def collect(sources: Sequence[str | Path], out_dir: str | Path) -> Metrics:
    """Gather finished runs into a metrics folder; the same runs give the same bytes, in any order.

    Writes iterations.parquet, evaluations.parquet, runs.json and summary.csv into `out_dir`, where they
    appear when all of them are whole; a broken run leaves an earlier collection untouched. sources: as in
    `together`.
    """
    metrics, out_dir = together(sources), Path(out_dir).resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir, prefix=PART) as scratch:
        staged = Path(scratch)
        text = json.dumps(metrics.runs, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        (staged / schema.RUNS_FILE).write_text(text, encoding="utf-8")
        of = _which_runs(metrics.runs)
        _write_table(metrics.iterations, staged / schema.ITERATIONS_FILE, of)
        _write_table(metrics.evaluations, staged / schema.COLLECTED_EVALUATIONS_FILE, of)
        metrics = load_metrics(staged)  # the summary is that of the rounded numbers, whoever computes it
        summary = metrics.summary.to_csv(index=False, float_format="%.5g", lineterminator="\n")
        (staged / schema.SUMMARY_FILE).write_text(summary, encoding="utf-8")
        for file in sorted(staged.iterdir()):
            os.replace(file, out_dir / file.name)
    return metrics


def uncollected(metrics_dir: Path, run_dirs: Iterable[Path]) -> list[Path]:
    """The run.json of run folders that say something else than was collected of them, whatever their time
    stamps; none where nothing was collected."""
    try:
        collected = parse_json((metrics_dir / schema.RUNS_FILE).read_bytes())
        known = {(r["regime"], r["algorithm"].partition(" (")[0], r["seed"]): r for r in collected}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    found = []
    for file in (folder / schema.RUN_FILE for folder in run_dirs):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            record = parse_json(file.read_bytes())
            entry = known.get(tuple(record[name] for name in KEYS), {})
            if any(entry.get(name) != value for name, value in record.items() if name != "algorithm"):
                found.append(file)
    return found


def together(sources: Sequence[str | Path]) -> Metrics:
    """Finished runs in memory.

    sources: run folders, and metrics folders that `collect` made before. Runs of one algorithm in other
    settings are told apart by `told_apart`. A record is that of run.json and, where the run's config.yaml
    lies beside it, the config's `objective` and `training`. ValueError for no run, and for one that is given
    twice.
    """
    if not sources:
        raise ValueError("no runs to collect: give at least one run folder")
    read = [(source, *run) for source in sources for run in recorded(Path(source))]
    names = told_apart([record for _, record, _, _ in read])
    runs = []
    for (source, record, iterations, evaluations), (algorithm, variant) in zip(read, names, strict=True):
        if variant:
            record = record | {"algorithm": f"{algorithm} ({variant})"}
        runs.append((tuple(record[name] for name in KEYS), str(source), record, iterations, evaluations))
    runs.sort(key=lambda run: run[:2])
    for (key, one, *_), (other_key, other, *_) in zip(runs, runs[1:], strict=False):
        if key == other_key:
            raise ValueError(f"{one} and {other} are the same run {key}; give only one of them")
    return Metrics(
        runs=[record for _, _, record, _, _ in runs],
        iterations=pd.concat([_keyed(rows, record) for _, _, record, rows, _ in runs], ignore_index=True),
        evaluations=pd.concat([_keyed(rows, record) for _, _, record, _, rows in runs], ignore_index=True),
    )


def told_apart(records: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(algorithm, variant) of each run: of its recorded overrides those that not all runs of its regime
    share."""
    given = [_overrides(record) for record in records]
    shared: dict[str, set[str]] = {}
    for record, overrides in zip(records, given, strict=True):
        shared[record["regime"]] = shared.get(record["regime"], set(overrides)) & set(overrides)
    return [
        # a metrics folder's name may have the variant behind it already
        (
            record["algorithm"].partition(" (")[0],
            shlex.join(override for override in overrides if override not in shared[record["regime"]]),
        )
        for record, overrides in zip(records, given, strict=True)
    ]


def _overrides(record: dict[str, Any]) -> list[str]:
    try:
        return shlex.split(record.get("variant") or "")
    except ValueError as error:
        name = "/".join(str(record[key]) for key in KEYS)
        raise ValueError(f"run {name}: variant is no list of overrides ({error}); train it again") from None


def recorded(source: Path) -> Iterator[tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]]:
    """Record, iterations and evaluations of a run folder's run, or of each run of a metrics folder."""
    if not (source / schema.RUNS_FILE).exists():
        record, updates, evaluations = read_run(source)
        yield {**record, **_config_of(source)}, per_iteration(updates), evaluations
        return
    metrics = load_metrics(source.resolve())
    for record in metrics.runs:
        yield record, metrics.select(metrics.iterations, record), metrics.select(metrics.evaluations, record)


def _config_of(run_dir: Path) -> dict[str, Any]:
    """What was trained, as the run's config.yaml says it: `objective` and `training`; nothing where there is
    no file."""
    file = run_dir / schema.CONFIG_FILE
    if not file.is_file():
        return {}
    try:
        config = read_yaml(file)
        return {"objective": config["algorithm"]["objective"], "training": config["training"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        remedy = make_command(run_dir / schema.RUN_FILE)
        raise ValueError(
            f"{file} is unreadable ({reason}); delete the run and make it anew with: {remedy}"
        ) from None


def missing_runs(
    metrics_dir: str | Path, planned: Iterable[tuple[str, str, int]]
) -> list[tuple[str, str, int]]:
    """Planned runs (regime, algorithm, seed) of which a metrics folder lacks the record or any row."""
    metrics = load_metrics(metrics_dir)
    recorded = {tuple(record[name] for name in KEYS) for record in metrics.runs}
    for frame in (metrics.iterations, metrics.evaluations):
        recorded &= set(frame[KEYS].drop_duplicates().itertuples(index=False, name=None))
    return [run for run in planned if run not in recorded]


def load_metrics(metrics_dir: str | Path) -> Metrics:
    """Read what `collect` wrote. FileNotFoundError or ValueError names the file, what is wrong with it and
    the command that makes it."""
    metrics_dir = repository_path(metrics_dir)
    file = metrics_dir / schema.RUNS_FILE
    remedy = make_command(file)
    runs = _read_json(file, remedy)
    if not isinstance(runs, list) or not runs:
        what = "holds no runs" if runs == [] else "is no list of runs"
        raise ValueError(f"{file} {what}; make it anew with: {remedy}")
    for number, record in enumerate(runs, start=1):
        schema.check_record(record, f"{file}, run {number}", remedy)
    rows = [*KEYS, "iteration"]
    found = Metrics(
        runs=runs,
        iterations=_read_parquet(metrics_dir / schema.ITERATIONS_FILE, [*rows, *_MEASURED], remedy),
        evaluations=_read_parquet(
            metrics_dir / schema.COLLECTED_EVALUATIONS_FILE, [*rows, *_EVALUATED], remedy
        ),
    )
    _refuse_mixture(metrics_dir, runs, remedy)
    return found


@dataclass(frozen=True)
class Metrics:
    """All recorded metrics of a set of runs."""

    runs: list[dict[str, Any]]
    iterations: pd.DataFrame  # one row per run and iteration
    evaluations: pd.DataFrame  # one row per run and evaluation

    def look(self, algorithm: str) -> Algorithm:
        """How figures and tables show an algorithm; its label is the one that its runs recorded, if they
        did."""
        found = look(algorithm)
        label = next((r["label"] for r in self.runs if r["algorithm"] == algorithm and r.get("label")), None)
        return replace(found, label=label) if label else found

    @property
    def regimes(self) -> list[str]:
        """Regimes present, sorted."""
        return sorted({run["regime"] for run in self.runs})

    def algorithms(self, regime: str | None = None) -> list[str]:
        """Algorithms present (in a regime), sorted."""
        return sorted({run["algorithm"] for run in self.runs if regime in (None, run["regime"])})

    def methods(self, regime: str) -> list[str]:
        """The algorithms of a regime that one picture shows: of more than `CROWD` those with a file of their
        own. A study's other arms, methods with one thing changed, are in the picture of its questions
        (`stppo.study.questions`)."""
        present = self.algorithms(regime)
        own = [name for name in present if look(name).file is not None]
        return own if len(present) > CROWD and len(own) > 1 else present

    @cached_property
    def all(self) -> Runs:
        """All runs as tidy tables."""
        settings = pd.DataFrame([self.settings(record) for record in self.runs])
        return tidy(self.runs, self.iterations, self.evaluations, self.summary, settings, self.look)

    @cached_property
    def main(self) -> Runs:
        """The runs that most figures show: of the regime with most algorithms, its `methods`."""
        regime = main_regime(self.all.runs)
        return self.all.of([regime], self.methods(regime))

    def select(self, frame: pd.DataFrame, record: dict[str, Any]) -> pd.DataFrame:
        """Rows of one run in `iterations` or `evaluations`."""
        by_run = self._iterations_by_run if frame is self.iterations else self._evaluations_by_run
        return by_run.get(tuple(record[name] for name in KEYS), frame.iloc[:0])

    @cached_property
    def _iterations_by_run(self) -> dict[tuple, pd.DataFrame]:
        return dict(iter(self.iterations.groupby(KEYS, sort=False)))

    @cached_property
    def _evaluations_by_run(self) -> dict[tuple, pd.DataFrame]:
        return dict(iter(self.evaluations.groupby(KEYS, sort=False)))

    def rows_of(self, regime: str, algorithm: str, evaluations: bool = False) -> pd.DataFrame:
        """Rows of all runs of an algorithm in a regime, in `iterations` or in `evaluations`."""
        frame = self.evaluations if evaluations else self.iterations
        return frame[(frame["regime"] == regime) & (frame["algorithm"] == algorithm)]

    def success(self, record: dict[str, Any], temperature: float = 1.0) -> pd.DataFrame:
        """Evaluations of one run at a temperature, in order of iteration."""
        rows = self.select(self.evaluations, record)
        return rows[rows["temperature"] == temperature].sort_values("iteration")

    def settings(self, record: dict[str, Any]) -> dict[str, float]:
        """learning_rate, epochs and staleness (iterations) of a run: as configured or, where the record lacks
        the config, as its rows have them; NaN where unknown (epochs of a run that ended some of its
        iterations early)."""
        if training := record.get("training"):
            keys = {"learning_rate": "learning_rate", "epochs": "epochs", "staleness": "staleness_iterations"}
            return {name: float(training[key]) for name, key in keys.items()}
        names = ["learning_rate", "epoch", "staleness_iterations"]
        rows = self.select(self.iterations, record).reindex(columns=names)
        epochs = 2 * rows["epoch"] + 1  # the mean of 0 to E - 1 is (E - 1) / 2
        return {
            "learning_rate": float(f"{rows['learning_rate'].max():.4g}"),  # float32 has seven digits
            "epochs": float(epochs.iloc[0]) if epochs.nunique() == 1 else math.nan,
            "staleness": float(rows["staleness_iterations"].max()),
        }

    def outcome(self, record: dict[str, Any]) -> Outcome:
        """The rules of `record.outcomes` applied to one run."""
        rows = self.success(record)
        start = record["warm_start"]["success_sampled"]
        stopped, horizon = self._stopped(record)
        return judge(rows["iteration"], rows["success"], start, stopped, horizon)

    def _stopped(self, record: dict[str, Any]) -> tuple[float | None, int]:
        """Where a number that is not finite ended a run, None for any other; iterations of its regime."""
        return stopped_at(record, self.select(self.iterations, record)), self.horizons[record["regime"]]

    @cached_property
    def horizons(self) -> dict[str, int]:
        """Iterations of the longest run of each regime."""
        return {name: max(r["iterations"] for r in self.runs if r["regime"] == name) for name in self.regimes}

    @cached_property
    def outcomes(self) -> dict[tuple[str, str, int], Outcome]:
        """(regime, algorithm, seed) -> outcome."""
        return {(r["regime"], r["algorithm"], r["seed"]): self.outcome(r) for r in self.runs}

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per run with the columns `schema.SUMMARY_COLUMNS`."""
        rows = []
        for record in self.runs:
            outcome = self.outcomes[tuple(record[name] for name in KEYS)]
            iterations = self.select(self.iterations, record)
            curve = self.success(record, temperature=0.0)
            greedy = (curve["iteration"].to_numpy(), curve["success"].to_numpy())
            stopped, horizon = self._stopped(record)
            if stopped is not None:
                greedy = with_zeros(*greedy, stopped, horizon)
            gradient = "gradient_norm_max" if "gradient_norm_max" in iterations else "gradient_norm"
            values = {
                **{name: record[name] for name in [*KEYS, "world_seed", "warm_start_seed", "status"]},
                "start": outcome.start,
                "peak": outcome.peak,
                "final": outcome.final,
                "area": outcome.area,
                **{f"after_{n}": outcome.after[n] for n in AFTER},
                "greedy_start": record["warm_start"]["success_greedy"],
                "greedy_final": 0.0 if outcome.non_finite else final_mean(greedy[1]),
                "greedy_area": area_under_curve(*greedy),
                "learned": outcome.learned,
                "gain_kept": outcome.gain_kept,
                "crash_iteration": math.nan if outcome.crash_iteration is None else outcome.crash_iteration,
                "rapid_crashes": outcome.rapid_crashes,
                "collapsed": outcome.collapsed,
                "outcome": outcome.label,
                "clip_fraction_mean": iterations["clip_fraction"].mean(),
                "gradient_norm_max": iterations[gradient].max(),
                "updates": record["updates"],
                "wall_seconds": record["wall_seconds"],
            }
            rows.append({name: values[name] for name in schema.SUMMARY_COLUMNS})
        return self._with_variants(pd.DataFrame(rows, columns=list(schema.SUMMARY_COLUMNS)))

    def _with_variants(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The frame with a column `variant` behind `algorithm`, where runs are told apart by one."""
        names = told_apart(self.runs)
        variants = {(r["regime"], r["algorithm"]): v for r, (_, v) in zip(self.runs, names, strict=True) if v}
        if variants:
            keys = zip(frame["regime"], frame["algorithm"], strict=True)
            frame.insert(
                frame.columns.get_loc("algorithm") + 1, "variant", [variants.get(k, "") for k in keys]
            )
        return frame

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per regime and algorithm, in figures' order.

        Columns regime, algorithm, label, runs, worlds, learned, crashed, collapsed (numbers of runs; a
        collapsed run has crashed too) and `TABLE_MEANS`: means over worlds of the means of a world's runs,
        gain_kept of those that learned.
        """
        rows = []
        for regime in self.regimes:
            for algorithm in in_order(self.algorithms(regime)):
                runs = self.arm(regime, algorithm)
                means = runs.groupby("world_seed")[list(TABLE_MEANS)].mean()
                counts = {
                    "runs": len(runs),
                    "worlds": len(means),
                    "learned": int(runs["learned"].sum()),
                    "crashed": int(runs["crash_iteration"].notna().sum()),
                    "collapsed": int(runs["collapsed"].sum()),
                }
                label = self.look(algorithm).label
                key = {"regime": regime, "algorithm": algorithm, "label": label}
                rows.append({**key, **counts, **means.mean().to_dict()})
        return self._with_variants(pd.DataFrame(rows))

    def arm(self, regime: str, algorithm: str) -> pd.DataFrame:
        """Rows of `summary` of one algorithm in one regime."""
        return self._summary_by_arm.get((regime, algorithm), self.summary.iloc[:0])

    @cached_property
    def _summary_by_arm(self) -> dict[tuple, pd.DataFrame]:
        return dict(iter(self.summary.groupby(["regime", "algorithm"], sort=False)))
