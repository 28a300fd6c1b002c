"""Does anything move before a crash? Signals of training on the way to it, and what an alarm on each would
have been worth.

A *fall* is the first evaluation below the line of a run's first crash (`record.outcomes`). A signal is read
against the run's own recent past: its distance from the median of the 20 iterations before, in median
absolute deviations. It rings where that distance exceeds a threshold. Direction and threshold come from one
half of the worlds, at most one false alarm in 100 iterations there; what is reported is the other half, and
the halves change places. A ring up to `AHEAD` iterations before a fall announces it, an earlier one is false.
Success on the training batches is among the signals: an alarm that is no earlier than it warns of nothing
that one does not see.

What chance would announce is matched by iteration, since falls come at certain iterations and alarms ring
more at some than at others: for each fall, the share of the runs that went on and did not fall then in which
the same alarm rings in the same `AHEAD` iterations. (Controls sampled from those at risk at the time of a
case; Prentice & Breslow 1978.) That a signal announces more than that is said where the interval of the
difference, over worlds, leaves out zero for all signals at once (Bonferroni).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from stppo.figures.words import NAMES
from stppo.record.outcomes import KEPT, WINDOW, trailing_mean
from stppo.record.runs import Metrics
from stppo.record.tidy import KEYS
from stppo.stats import estimate, fewest_worlds, joint_level, shares_of

SIGNALS = (
    "success_train",
    "valid_format_rate",
    "entropy",
    "agent_tokens_per_turn",
    "kl_behaviour_k3",
    "ratio_max_token_max",
    "ratio_max_turn_max",
    "effective_sample_size",
    "clip_fraction",
    "critic_explained_variance",
    "gradient_norm_max",
    "clipping_bias_norm_max",
)
ON_LOGARITHMS = ("kl_", "ratio_", "gradient_", "clipping_")  # how the names of those begin
PAST, LEAST = 20, 6  # iterations that a value is compared with, and the fewest
AHEAD = 10  # iterations before a fall in which a ring announces it
BUDGET = 1.0  # false alarms per 100 iterations that a threshold may give on the worlds it is chosen in
THRESHOLDS = np.geomspace(1.5, 60, 60)  # median absolute deviations
FEWEST = 4  # crashes in each half of the worlds, below which nothing is said
NEVER = math.inf


@dataclass(frozen=True)
class Watched:
    """One run that learned: where it fell (NaN: nowhere), its iterations (n,), and distances (n,) of each
    signal."""

    world: int
    fall: float
    iterations: NDArray
    distances: dict[str, NDArray]


def fall_of(iterations: NDArray, success: NDArray, start: float, crash: float) -> float:
    """The first of the evaluations behind a crash that lies below its line.

    iterations, success: (n,) sampled evaluations in order; crash: the iteration at which their mean of three
    crossed the line.
    """
    last = int(np.searchsorted(iterations, crash, side="right"))
    highest = float(np.nanmax(trailing_mean(success[:last])))
    line = start + KEPT * (max(highest, start) - start)
    recent = np.arange(max(0, last - WINDOW), last)
    below = recent[success[recent] < line]
    return float(iterations[below[0]]) if len(below) else float(crash)


def distance(values: NDArray) -> NDArray:
    """(n,): how far each value lies from the median of the `PAST` before it, in their median absolute
    deviations; NaN where fewer than `LEAST` are known."""
    padded = np.concatenate([np.full(PAST, np.nan), values])
    before = np.lib.stride_tricks.sliding_window_view(padded, PAST)[: len(values)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing is known of the first
        middle = np.nanmedian(before, axis=1)
        spread = np.nanmedian(np.abs(before - middle[:, None]), axis=1)
    read = (values - middle) / np.maximum(spread, 1e-3 * np.abs(middle) + 1e-9)
    return np.where(np.isfinite(before).sum(axis=1) >= LEAST, read, np.nan)


def watched(metrics: Metrics) -> list[Watched]:
    """Every run that learned, up to its first crash where it has one."""
    found = []
    for record in metrics.runs:
        outcome = metrics.outcomes[tuple(record[name] for name in KEYS)]
        if not outcome.learned or outcome.non_finite:
            continue
        rows = metrics.select(metrics.iterations, record).sort_values("iteration")
        read = {}
        for name in SIGNALS:
            if name in rows and rows[name].notna().any():
                values = rows[name].to_numpy(float)
                with np.errstate(divide="ignore", invalid="ignore"):
                    values = np.log(values) if name.startswith(ON_LOGARITHMS) else values
                read[name] = distance(np.where(np.isfinite(values), values, np.nan))
        fall = math.nan
        if outcome.crash_iteration is not None:
            sampled = metrics.success(record)
            fall = fall_of(
                sampled["iteration"].to_numpy(),
                sampled["success"].to_numpy(),
                outcome.start,
                outcome.crash_iteration,
            )
        found.append(Watched(record["world_seed"], fall, rows["iteration"].to_numpy(), read))
    return found


@dataclass(frozen=True)
class Rings:
    """What an alarm did in some runs: leads of the crashes (iterations; `NEVER`: none rang), false alarms,
    and iterations in which an alarm would have been false."""

    leads: tuple[float, ...]
    false: int
    iterations: int

    @property
    def announced(self) -> int:
        """Crashes before whose fall it rang."""
        return sum(0 < lead < NEVER for lead in self.leads)

    @property
    def rate(self) -> float:
        """False alarms per 100 iterations."""
        return 100 * self.false / self.iterations if self.iterations else math.nan


def rung(run: Watched, signal: str, direction: int, threshold: float) -> list[int]:
    """Iterations up to its fall at which an alarm on one signal rings: where direction x distance exceeds the
    threshold.

    After a ring it is silent for `AHEAD` iterations.
    """
    counted = ~(run.iterations > run.fall)
    read, times = direction * run.distances[signal][counted], run.iterations[counted]
    found: list[int] = []
    for iteration in times[read > threshold]:
        if not found or iteration > found[-1] + AHEAD:
            found.append(int(iteration))
    return found


def rings(runs: Sequence[Watched], signal: str, direction: int, threshold: float) -> Rings:
    """What an alarm on one signal would have done. A ring in the `AHEAD` iterations before a fall cannot be
    false, so these count for no false alarm's rate."""
    leads, false, iterations = [], 0, 0
    for run in runs:
        if signal not in run.distances:
            continue
        early = ~(run.iterations >= run.fall - AHEAD)
        iterations += int(np.isfinite(run.distances[signal][early]).sum())
        lead = NEVER
        for iteration in rung(run, signal, direction, threshold):
            if run.fall - iteration <= AHEAD:
                lead = min(lead, float(run.fall - iteration))
            else:
                false += 1
        if not math.isnan(run.fall):
            leads.append(lead)
    return Rings(tuple(leads), false, iterations)


def beside(run: Watched, fall: float) -> bool:
    """Whether a run went on at an iteration, and fell neither before nor within `AHEAD` iterations after
    it."""
    return bool(run.iterations[-1] >= fall) and not run.fall <= fall + AHEAD


def by_chance(runs: Sequence[Watched], signal: str, direction: int, threshold: float) -> list[float]:
    """For each crash, in the order of `Rings.leads`: the share of the runs `beside` it in which the alarm
    rings in the `AHEAD` iterations before its fall; NaN where no run is."""
    known = [run for run in runs if signal in run.distances]
    times = [np.asarray(rung(run, signal, direction, threshold)) for run in known]
    shares = []
    for fall in (run.fall for run in known if not math.isnan(run.fall)):
        rang = [
            ((at >= fall - AHEAD) & (at < fall)).any()
            for run, at in zip(known, times, strict=True)
            if beside(run, fall)
        ]
        shares.append(float(np.mean(rang)) if rang else math.nan)
    return shares


def tuned(runs: Sequence[Watched], signal: str) -> tuple[int, float, Rings]:
    """Direction, threshold and what they do on these same runs: in either direction the lowest threshold
    within the `BUDGET` of false alarms, and of the two the direction that announces more crashes."""
    best = (1, math.inf, rings(runs, signal, 1, math.inf))
    for direction in (1, -1):
        for threshold in THRESHOLDS:
            found = rings(runs, signal, direction, float(threshold))
            if found.rate <= BUDGET:
                if found.announced > best[2].announced or math.isinf(best[1]):
                    best = (direction, float(threshold), found)
                break
    return best


def judged(runs: Sequence[Watched]) -> pd.DataFrame:
    """One row per signal, and `best` for the one that did best in the half it was tuned in; numbers are of
    the other half.

    Columns: `signal`, `name`, `crashes`, `announced`, `at_the_fall`, `by_chance` (see `by_chance`; NaN where
    a crash has no run beside it), `more` (share announced less that by chance), `low` and `high` (its
    interval over worlds; those of all signals hold at once with 95 %; NaN from fewer worlds than that needs),
    `worlds` (with a crash), `lead` (iterations, median), `false_alarms` per 100 iterations, `chosen` (for
    `best`: the signals that were taken, else directions). Empty where a half of the worlds has fewer than
    `FEWEST` crashes.
    """
    worlds = sorted({run.world for run in runs})
    halves = [[run for run in runs if run.world in worlds[i::2]] for i in (0, 1)]
    if any(sum(not math.isnan(run.fall) for run in half) < FEWEST for half in halves):
        return pd.DataFrame()
    signals = [name for name in SIGNALS if any(name in run.distances for run in runs)]
    results: dict[str, list[tuple[Rings, pd.DataFrame, str]]] = {name: [] for name in (*signals, "best")}
    for tuning, testing in (halves, halves[::-1]):
        fitted = {name: tuned(tuning, name) for name in signals}
        for name, (direction, threshold, _) in fitted.items():
            found = rings(testing, name, direction, threshold)
            fell = [run for run in testing if name in run.distances and not math.isnan(run.fall)]
            shares = by_chance(testing, name, direction, threshold)
            each = {"world": [run.world for run in fell], "lead": found.leads, "by_chance": shares}
            results[name].append((found, pd.DataFrame(each), "rises" if direction > 0 else "falls"))
        best = max(signals, key=lambda name: fitted[name][2].announced)
        results["best"].append((*results[best][-1][:2], NAMES[best]))
    rows = []
    for name, parts in results.items():
        crashes = pd.concat([part for _, part, _ in parts])
        crashes["announced"] = (crashes["lead"] > 0) & (crashes["lead"] < NEVER)
        false, iterations = (sum(getattr(of, what) for of, *_ in parts) for what in ("false", "iterations"))
        rows.append(
            {
                "signal": name,
                "name": NAMES.get(name, "chosen on the other half"),
                "crashes": len(crashes),
                "announced": int(crashes["announced"].sum()),
                "at_the_fall": int((crashes["lead"] == 0).sum()),
                **_more_than_chance(crashes, joint_level(len(signals))),
                "lead": crashes.loc[crashes["announced"], "lead"].median(),
                "false_alarms": 100 * false / iterations if iterations else math.nan,
                "chosen": " or ".join(dict.fromkeys(word for *_, word in parts)),
            }
        )
    return pd.DataFrame(rows)


def _more_than_chance(crashes: pd.DataFrame, level: float) -> dict[str, float]:
    """Crashes that chance announces, and how much larger the share announced is, with its interval (worlds
    resampled)."""
    more = (crashes["announced"] - crashes["by_chance"]).to_numpy(float)
    n_worlds, low, high = crashes["world"].nunique(), math.nan, math.nan
    if n_worlds >= fewest_worlds(level) and np.isfinite(more).all():
        low, high = estimate(more.mean(), shares_of(crashes["world"]) @ more, n_worlds).interval(level)
    chance = float(crashes["by_chance"].sum(skipna=False))
    return {"by_chance": chance, "more": float(more.mean()), "low": low, "high": high, "worlds": n_worlds}
