"""How much off-policyness does a method tolerate? The same 40 settings for every method, and what it makes of
them.

A *point* is one setting of learning rate, epochs, staleness, minibatches and world, and a share in [0, 1)
that places the method's own knob in the prior which its YAML declares: an equal tuning budget by
construction. The points were drawn once (`draw_points`) and are committed. Two points share each of 20
worlds, so intervals resample worlds, and comparisons are paired by point.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from stppo.config.algorithms import in_order, look
from stppo.config.composition import compose
from stppo.config.files import NO_KNOB, ConfigError, Prior, lineage, options
from stppo.config.files import value as stated
from stppo.config.loading import load
from stppo.config.planned import PlannedRun
from stppo.config.provenance import torches
from stppo.files import parse_json, repository_path
from stppo.record.runs import Metrics, load_metrics
from stppo.record.schema import COMPLETED, NON_FINITE, RUN_FILE
from stppo.record.tidy import BASELINE
from stppo.stats import DRAWS as MANY
from stppo.stats import estimate, joint_level, shares_of

POINTS = "results/reference/benchmark/points.csv"
REGIME, CONFIRMATION = "BENCHMARK", "CONFIRMATION"
FIRST_WORLD, N_WORLDS = 200, 20
FRESH_WORLDS = tuple(range(300, 306))  # of the confirmation
LOWEST_RATE, RATES = 8.75e-5, 16  # learning rates from 8.75e-5 to 1.4e-3
PLAIN = "a plain null"  # the `source` of a method that is a remedy without a theory
BEST_OF = (1, 5, 20)
DRAWS, LEVEL = 2000, 0.95
Statistic = Callable[
    [NDArray[np.float64] | None], NDArray[np.float64] | float
]  # of runs' weights; None: alike


def draw_points() -> pd.DataFrame:
    """The first 40 points of a scrambled Sobol sequence (Owen 1998), as `scipy.stats.qmc` draws it.

    Columns: point, learning_rate (log-uniform over 16 x), epochs (1-16, log-uniform), staleness (0-8
    iterations), minibatches (1, 2, 4, 8), knob (share of the method's prior), world (its seed).
    """
    from scipy.stats import qmc

    n = 40
    drawn = qmc.Sobol(5, scramble=True, seed=2511).random_base2(math.ceil(math.log2(n)))[:n]
    rate, epochs, staleness, minibatches, knob = drawn.T
    return pd.DataFrame(
        {
            "point": range(n),
            "learning_rate": [float(f"{LOWEST_RATE * RATES**u:.3g}") for u in rate],
            "epochs": (17**epochs).astype(int),
            "staleness": (9 * staleness).astype(int),
            "minibatches": 2 ** (4 * minibatches).astype(int),
            "knob": knob.round(4),
            "world": FIRST_WORLD + np.arange(n) % N_WORLDS,
        }
    )


def points() -> pd.DataFrame:
    """The committed points. FileNotFoundError outside a checkout, which has them and the runs to compare
    with."""
    file = repository_path(POINTS)
    if not file.is_file():
        raise FileNotFoundError(
            f"{POINTS} is not below {Path.cwd()}: run the benchmark in a checkout of stppo"
        )
    return pd.read_csv(file)


def intensity() -> pd.Series:
    """Learning rate x epochs of each point, by its number."""
    table = points().set_index("point")
    return table["learning_rate"] * table["epochs"]


def prior_of(method: str) -> Prior | None:
    """The prior of a method's own knob, None of one that says it has none. ConfigError for an unknown method
    and for one whose YAML does not say."""
    if method not in (known := options("algorithm")):
        raise ConfigError(f"{method}: no algorithm; known: {', '.join(known)}")
    chain = lineage("algorithm", method)
    file, content = chain[0]
    if (name := content.get("name", method)) != method:  # one that inherits all may have none
        raise ConfigError(f"{file}: name is {name}; it must be the file's, {method}")
    prior = look(method).prior
    if prior is None:
        raise ConfigError(
            f"algorithm/{method}.yaml declares no prior for its knob, so it cannot have the same budget as "
            f"the others; add `prior: {{key: objective.clip.epsilon_low, low: 0.1, high: 0.4, scale: log}}`, "
            f"or `prior: {NO_KNOB}`"
        )
    if prior == NO_KNOB:
        return None
    for key in prior.keys:
        if all(stated(content, key.split(".")) is None for _, content in chain):
            raise ConfigError(
                f"{file}: prior.key is {key}, and the file has no {key}: correct the one or add the other"
            )
    return prior


def planned(method: str, numbers: Iterable[int] | None = None) -> list[PlannedRun]:
    """A method's runs at the points (all, or those of these numbers). ValueError for a number that is no
    point."""
    table, prior = points().set_index("point"), prior_of(method)
    wanted = list(dict.fromkeys(table.index if numbers is None else numbers))  # named twice it is one run
    if unknown := sorted(set(wanted) - set(table.index)):
        raise ValueError(f"no point {unknown[0]}: there are {table.index.min()} to {table.index.max()}")
    return [_run(method, REGIME, number, table.loc[number], prior) for number in wanted]


def confirmation(method: str, metrics: Metrics) -> list[PlannedRun]:
    """Its best point by final sampled success, on worlds that no point uses. ValueError where points are
    missing."""
    runs = metrics.arm(REGIME, method)
    if missing := sorted(set(points()["point"]) - set(runs["seed"])):
        raise ValueError(
            f"{method} has no run at {len(missing)} points, the first {missing[0]}; run these first"
        )
    setting, prior = points().set_index("point").loc[best_point(runs)], prior_of(method)
    return [_run(method, CONFIRMATION, w, {**setting, "world": w}, prior) for w in FRESH_WORLDS]


def best_point(runs: pd.DataFrame) -> int:
    """The point at which one method ended highest, sampled. runs: its rows of `Metrics.summary`."""
    return int(runs.loc[runs["final"].idxmax(), "seed"])


def _run(method: str, regime: str, seed: int, point: Mapping[str, float], prior: Prior | None) -> PlannedRun:
    world = int(point["world"])
    knob = [] if prior is None else prior.overrides(float(f"{prior.at(point['knob']):.4g}"))
    overrides = (
        *("preset=benchmark", f"algorithm={method}", f"training.regime={regime}", f"seed={seed}"),
        *(f"world.seed={world}", f"warm_start_seed={world}"),
        f"training.learning_rate={point['learning_rate']:g}",
        f"training.epochs={int(point['epochs'])}",
        f"training.staleness_iterations={int(point['staleness'])}",
        f"training.minibatches={int(point['minibatches'])}",
        *knob,
    )
    return PlannedRun(regime, method, seed, overrides)


# ---- what is measured ---------------------------------------------------------------------------
def check(metrics: Metrics) -> None:
    """Refuse runs that were not made at their point. ValueError names the run, what differs and the
    remedy."""
    table = points().set_index("point")
    keys = {"learning_rate": "learning_rate", "epochs": "epochs", "staleness": "staleness_iterations"}
    keys["minibatches"] = "minibatches"
    for record in metrics.runs:
        if record["regime"] != REGIME:
            continue
        name = f"{record['algorithm']}, run {record['seed']}"
        if record["seed"] not in table.index:
            raise ValueError(f"{name}: no such point; make it with `stppo bench {record['algorithm']}`")
        point, training = table.loc[record["seed"]], record.get("training") or {}
        made = {column: training.get(key) for column, key in keys.items()} | {"world": record["world_seed"]}
        for column, value in made.items():
            if value is None or not math.isclose(float(value), float(point[column]), rel_tol=1e-6):
                raise ValueError(
                    f"{name}: its {column} is {value}, that of the point {point[column]:g}; delete it and "
                    f"run `stppo bench {record['algorithm']}` again"
                )


def best_of(values: ArrayLike, k: int, weights: ArrayLike | None = None) -> NDArray[np.float64] | float:
    """Expected best of k settings drawn at random from those tried (Dodge et al. 2019, Eq. 8).

    values: (n,) results; weights: (n,) or (draws, n), how often each counts, rows of sum 1 (default: all
    alike).
    """
    return _by_rank(values, weights, lambda share: share**k)


def interquartile_mean(values: ArrayLike, weights: ArrayLike | None = None) -> NDArray[np.float64] | float:
    """Mean of the middle half (Agarwal et al. 2021); arguments as in `best_of`."""
    return _by_rank(values, weights, lambda share: 2 * np.clip(share, 0.25, 0.75))


def _by_rank(
    values: ArrayLike, weights: ArrayLike | None, upto: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> NDArray[np.float64] | float:
    """Weighted mean whose weights depend on rank alone: upto(share) of the weight lies on that lowest share
    of values."""
    values = np.asarray(values, dtype=np.float64)
    order = np.argsort(values)
    shares = np.full(len(values), 1 / len(values)) if weights is None else np.asarray(weights)
    below = np.cumsum(shares[..., order], axis=-1)
    before = (below - shares[..., order]).clip(0)
    found = ((upto(below) - upto(before)) * values[order]).sum(axis=-1)
    return float(found) if found.ndim == 0 else found


def leaderboard(metrics: Metrics) -> pd.DataFrame:
    """One row per method, those with all points first, then by the mean over points; every interval resamples
    worlds (`LEVEL`).

    Columns: method, label, points, complete (whether these are all), null (whether it is a plain remedy),
    knob (what it is drawn from, as its file says now; none for a method without one);
    `best_of_K` sampled for K in `BEST_OF` (of 1: the mean over points) with `_low` and `_high`; iqm
    (`interquartile_mean`, likewise); greedy_best_of_5; learned (share of runs), gain_kept (mean of those that
    learned); above_token_ppo (share of points at which it ends above token PPO, ties half, with an interval
    that has a width at 0 and 1 too), above_null (likewise, over the best null of those with most points);
    updates and core_minutes (means a run); versions (what its runs were made with).
    """
    check(metrics)
    runs = metrics.summary[metrics.summary["regime"] == REGIME]
    tables = {name: part.set_index("seed").sort_index() for name, part in runs.groupby("algorithm")}
    scores = {name: best_of(table["final"], 5) for name, table in tables.items()}
    nulls = [name for name in tables if is_null(name)]
    null = max(nulls, key=lambda name: (len(tables[name]), scores[name]), default=None)
    rows = []
    for name in in_order(tables):
        table = tables[name]
        row = {
            "method": name,
            "label": metrics.look(name).label,
            "points": len(table),
            "complete": len(table) == len(points()),
            "null": name in nulls,
            "knob": _knob(name),
        }
        for k in BEST_OF:
            best = partial(best_of, table["final"], k)
            row |= _with_interval(f"best_of_{k}", table["world_seed"], best)
        row |= _with_interval("iqm", table["world_seed"], partial(interquartile_mean, table["final"]))
        row |= {
            "greedy_best_of_5": best_of(table["greedy_final"], 5),
            "learned": table["learned"].mean(),
            "gain_kept": table["gain_kept"].mean(),
            "updates": table["updates"].mean(),
            "core_minutes": _cpu_seconds(metrics, name) / 60,
            "versions": _versions(metrics, name),
        }
        for column, other in (("above_token_ppo", BASELINE), ("above_null", null)):
            if other in tables and other != name:
                row |= _above(column, table, tables[other])
        rows.append(row)
    return pd.DataFrame(rows).sort_values(["complete", "best_of_1"], ascending=False, ignore_index=True)


def _knob(method: str) -> str:
    """Empty for a method whose YAML is not here."""
    return str(prior_of(method) or NO_KNOB) if method in options("algorithm") else ""


def is_null(method: str) -> bool:
    """Whether its YAML calls it a plain null; not so for a method whose YAML is not here."""
    return method in options("algorithm") and look(method).source == PLAIN


def _with_interval(
    name: str, worlds: pd.Series, statistic: Statistic, bounds: tuple[float, float] | None = None
) -> dict[str, float]:
    """A statistic of runs in these worlds, a function of the runs' weights (None: all alike), with its
    interval in [0, 1].

    bounds: (0, 1) of a share, which may have been 0 or 1 in every world.
    """
    value = float(statistic(None))
    draws = np.asarray(statistic(shares_of(worlds, DRAWS)))
    low, high = np.clip(estimate(value, draws, worlds.nunique(), bounds).interval(LEVEL), 0, 1)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _mean_of(values: ArrayLike) -> Statistic:
    values = np.asarray(values, dtype=np.float64)
    return lambda weights: values.mean() if weights is None else weights @ values


def _above(name: str, one: pd.DataFrame, other: pd.DataFrame) -> dict[str, float]:
    """Share of the common points at which one ends above the other."""
    both = one.join(other["final"], rsuffix="_other", how="inner")
    if both.empty:
        return {}
    won = (both["final"] > both["final_other"]) + (both["final"] == both["final_other"]) / 2
    return _with_interval(name, both["world_seed"], _mean_of(won), bounds=(0, 1))


def difference(metrics: Metrics, one: str, other: str, looks: int = 1) -> dict[str, float]:
    """How much higher `one` ends than `other` at the same points, sampled: mean, mean_low and mean_high
    (`LEVEL`, worlds resampled), joint_low and joint_high (of `looks` such differences, which hold at once
    with `LEVEL`), points.

    ValueError where they share no point.
    """
    tables = [metrics.arm(REGIME, name).set_index("seed") for name in (one, other)]
    both = tables[0].join(tables[1]["final"], rsuffix="_other", how="inner")
    if both.empty:
        raise ValueError(f"{one} and {other} have no point in common")
    apart = _mean_of(both["final"] - both["final_other"])
    draws = apart(shares_of(both["world_seed"], MANY))
    found = estimate(float(apart(None)), draws, both["world_seed"].nunique())
    ends = {"mean": LEVEL, "joint": joint_level(looks, 1 - LEVEL)}
    row = {"mean": found.value}
    for name, level in ends.items():
        row[f"{name}_low"], row[f"{name}_high"] = np.clip(found.interval(level), -1, 1)
    return row | {"points": len(both)}


def _cpu_seconds(metrics: Metrics, method: str) -> float:
    """Mean over its runs. A run that waited for a core used no CPU time, so what else the machine did counts
    little."""
    runs = [r for r in metrics.runs if (r["regime"], r["algorithm"]) == (REGIME, method)]
    return float(np.mean([record["cpu_seconds"] for record in runs]))


def _versions(metrics: Metrics, method: str) -> str:
    """Releases that its runs were made with; several where they differ."""
    runs = [r for r in metrics.runs if (r["regime"], r["algorithm"]) == (REGIME, method)]
    names = ("stppo", "torch", "transformers")
    found = {", ".join(f"{name} {r['versions'].get(name, '?')}" for name in names) for r in runs}
    return "; ".join(sorted(found))


def cheapest(metrics: Metrics, n: int, seed: int) -> list[PlannedRun]:
    """n runs to make again, drawn at random from the quarter of the recorded ones that made the fewest
    updates."""
    runs = metrics.summary[metrics.summary["regime"] == REGIME].sort_values("updates", kind="stable")
    few = runs.head(max(n, len(runs) // 4)).sample(min(n, len(runs)), random_state=seed)
    return [planned(row["algorithm"], [row["seed"]])[0] for _, row in few.iterrows()]


def differs(recorded: Metrics, again: Metrics) -> tuple[list[str], list[str]]:
    """What runs made again have other than the recorded ones, and why some were not compared; a line a run.

    On the same kind of processor, with one torch, every success and norm must be the recorded one. Else
    rounding differs, and training carries that as far apart as two seeds. A processor's name does not tell
    its kind (virtual machines share one), so the warm start, itself hundreds of updates, is asked too: where
    it came out otherwise, only the setting is compared (`check`).
    """
    lines, elsewhere = [], []
    for record in again.runs:
        key = tuple(record[name] for name in ("regime", "algorithm", "seed"))
        old = next(
            r for r in recorded.runs if tuple(r[name] for name in ("regime", "algorithm", "seed")) == key
        )
        name = f"{key[1]} at point {key[2]}"
        if old["hardware"]["cpu"] != record["hardware"]["cpu"]:
            elsewhere.append(f"{name}: recorded on another processor, {old['hardware']['cpu']}")
            continue
        if len(made_with := torches([old, record])) > 1:
            elsewhere.append(f"{name}: made with torch {' and '.join(made_with)}")
            continue
        if (began := record.get("warm_start")) != (then := old.get("warm_start")):
            elsewhere.append(f"{name}: its warm start came out as {began}, recorded is {then}")
            continue
        for table, columns in (
            ("evaluations", ["iteration", "temperature", "success"]),
            ("iterations", ["iteration", "gradient_norm", "clip_fraction"]),
        ):
            frames = [m.select(getattr(m, table), r)[columns] for m, r in ((recorded, old), (again, record))]
            one, other = (frame.sort_values(columns[:-1]).to_numpy(float) for frame in frames)
            if one.shape != other.shape or not np.allclose(one, other, rtol=1e-5, equal_nan=True):
                lines.append(f"{name}: its {table} are not those recorded")
    return lines, elsewhere


def metrics_folder() -> Path:
    """Where the committed runs of all methods lie."""
    return repository_path(POINTS).parent / "metrics"


def check_unchanged(committed: Path, method: str) -> None:
    """Refuse a method that cannot be built (ConfigError), and one whose objective is no longer that of its
    committed runs: they would count as its own (ValueError)."""
    prior_of(method)  # what it refuses, it says more plainly
    load(compose(["preset=benchmark", f"algorithm={method}"]))
    recorded = load_metrics(committed).runs if committed.is_dir() else []
    mine = [r for r in recorded if (r["regime"], r["algorithm"]) == (REGIME, method)]
    if (
        mine
        and planned(method, [mine[0]["seed"]])[0].config["algorithm"]["objective"] != mine[0]["objective"]
    ):
        raise ValueError(
            f"{method}: its objective is not the one of its runs in {committed}; give the changed one a "
            "name of its own"
        )


def not_in(committed: Path, folders: Iterable[Path]) -> list[Path]:
    """The run folders (REGIME/method/seedN) of whose runs the committed metrics have none."""
    known: set[tuple[str, str, str]] = set()
    if committed.is_dir():
        known = {(r["regime"], r["algorithm"], f"seed{r['seed']}") for r in load_metrics(committed).runs}
    return [folder for folder in folders if tuple(folder.parts[-3:]) not in known]


def of_one_code(folders: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Those of some ended run folders whose runs share the code of their method's latest run, and the others:
    two codes make no points of one method."""
    records = {folder: parse_json((folder / RUN_FILE).read_bytes()) for folder in folders}
    latest: dict[str, dict[str, Any]] = {}
    for record in sorted(records.values(), key=lambda record: record["started"]):
        latest[record["algorithm"]] = record
    parts: tuple[list[Path], list[Path]] = ([], [])
    for folder, record in records.items():
        parts[record["code_hash"] != latest[record["algorithm"]]["code_hash"]].append(folder)
    return parts


def ended(folders: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Those of some run folders whose runs have ended, also in a loss that is not finite, and those begun but
    not ended."""
    parts: tuple[list[Path], list[Path]] = ([], [])
    for folder in folders:
        if (file := folder / RUN_FILE).is_file():
            status = json.loads(file.read_text(encoding="utf-8")).get("status")
            parts[status not in (COMPLETED, NON_FINITE)].append(folder)
    return parts
