"""Does anything move before a crash? Signals of training on the way to it, and what an alarm on each would have been worth.

A *fall* is the first evaluation below the line of a run's first crash (`results.outcomes`). A signal is read against the
run's own recent past: its distance from the median of the 20 iterations before, in median absolute deviations. It rings
where that distance exceeds a threshold. Direction and threshold come from one half of the worlds, at most one false alarm
in 100 iterations there; what is reported is the other half, and the halves change places. A ring up to `AHEAD` iterations
before a fall announces it, an earlier one is false. Success on the training batches is among the signals: an alarm that is no
earlier than it warns of nothing that one does not see.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from stppo.results.curves import page, source_of
from stppo.results.outcomes import KEPT, LEARNED, WINDOW
from stppo.results.runs import Metrics
from stppo.results.style import Plot, style

SIGNALS = {  # column of the iterations: (name, whether its logarithm is read)
    "success_train": ("success on the batch", False),
    "valid_format_rate": ("valid format", False),
    "entropy": ("entropy", False),
    "agent_tokens_per_turn": ("tokens per turn", False),
    "kl_behaviour_k3": ("KL to behaviour", True),
    "ratio_max_token_max": ("largest token ratio", True),
    "ratio_max_turn_max": ("largest turn ratio", True),
    "effective_sample_size": ("effective sample size", False),
    "clip_fraction": ("clip fraction", False),
    "critic_explained_variance": ("critic, explained variance", False),
    "gradient_norm_max": ("largest gradient norm", True),
    "clipping_bias_norm_max": ("largest ‖C‖", True),
}
PAST, LEAST = 20, 6  # iterations that a value is compared with, and the fewest
AHEAD = 10  # iterations before a fall in which a ring announces it
BUDGET = 1.0  # false alarms per 100 iterations that a threshold may give on the worlds it is chosen in
THRESHOLDS = np.geomspace(1.5, 60, 60)  # median absolute deviations
FEWEST = 4  # crashes in each half of the worlds, below which nothing is said
NEVER = math.inf


@dataclass(frozen=True)
class Watched:
    """One run that learned: where it fell (NaN: nowhere), its iterations (n,), and distances (n,) of each signal."""

    world: int
    fall: float
    iterations: NDArray
    distances: dict[str, NDArray]


def fall_of(iterations: NDArray, success: NDArray, start: float, crash: float) -> float:
    """The first of the evaluations behind a crash that lies below its line.

    iterations, success: (n,) sampled evaluations in order; crash: the iteration at which their mean of three crossed the line.
    """
    last = int(np.searchsorted(iterations, crash, side="right"))
    smoothed = pd.Series(success[:last]).rolling(WINDOW).mean()
    line = start + KEPT * (max(float(smoothed.max()), start) - start)
    recent = np.arange(max(0, last - WINDOW), last)
    below = recent[success[recent] < line]
    return float(iterations[below[0]]) if len(below) else float(crash)


def distance(values: NDArray) -> NDArray:
    """(n,): how far each value lies from the median of the `PAST` before it, in their median absolute deviations; NaN where
    fewer than `LEAST` are known."""
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
        outcome = metrics.outcome(record)
        if not outcome.learned or outcome.non_finite:
            continue
        rows = metrics.select(metrics.iterations, record).sort_values("iteration")
        read = {}
        for name, (_, logarithm) in SIGNALS.items():
            if name in rows and rows[name].notna().any():
                values = rows[name].to_numpy(float)
                with np.errstate(divide="ignore", invalid="ignore"):
                    values = np.log(values) if logarithm else values
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
        found.append(Watched(int(record["world_seed"]), fall, rows["iteration"].to_numpy(), read))
    return found


@dataclass(frozen=True)
class Rings:
    """What an alarm did in some runs: leads of the crashes (iterations; `NEVER`: none rang), false alarms, iterations."""

    leads: tuple[float, ...]
    false: int
    iterations: int

    def __add__(self, other: Rings) -> Rings:
        return Rings(self.leads + other.leads, self.false + other.false, self.iterations + other.iterations)

    @property
    def announced(self) -> int:
        """Crashes before whose fall it rang."""
        return sum(0 < lead < NEVER for lead in self.leads)

    @property
    def at_the_fall(self) -> int:
        """Crashes at which it first rang in the very iteration of the fall."""
        return sum(lead == 0 for lead in self.leads)

    @property
    def lead(self) -> float:
        """Median over the crashes that were announced; NaN without any."""
        found = [lead for lead in self.leads if 0 < lead < NEVER]
        return float(np.median(found)) if found else math.nan

    @property
    def by_chance(self) -> float:
        """Crashes that alarms at the false ones' rate would have announced if they knew nothing."""
        return len(self.leads) * -math.expm1(-self.rate / 100 * AHEAD)

    @property
    def rate(self) -> float:
        """False alarms per 100 iterations."""
        return 100 * self.false / self.iterations if self.iterations else math.nan


def rings(runs: Sequence[Watched], signal: str, direction: int, threshold: float) -> Rings:
    """What an alarm on one signal would have done: it rings where direction x distance exceeds the threshold.

    After a ring it is silent for `AHEAD` iterations. A run counts up to its fall.
    """
    leads, false, iterations = [], 0, 0
    for run in runs:
        if signal not in run.distances:
            continue
        counted = ~(run.iterations > run.fall)
        read, times = direction * run.distances[signal][counted], run.iterations[counted]
        iterations += int(np.isfinite(read).sum())
        lead, silent = NEVER, -math.inf
        for iteration in times[read > threshold]:
            if iteration <= silent:
                continue
            silent = iteration + AHEAD
            if run.fall - iteration <= AHEAD:
                lead = min(lead, float(run.fall - iteration))
            else:
                false += 1
        if not math.isnan(run.fall):
            leads.append(lead)
    return Rings(tuple(leads), false, iterations)


def tuned(runs: Sequence[Watched], signal: str) -> tuple[int, float, Rings]:
    """Direction, threshold and what they do on these same runs: in either direction the lowest threshold within the `BUDGET`
    of false alarms, and of the two the direction that announces more crashes."""
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
    """One row per signal, and `best` for the one that did best in the half it was tuned in; numbers are of the other half.

    Columns: `signal`, `name`, `crashes`, `announced`, `at_the_fall`, `by_chance`, `lead` (iterations, median), `false_alarms` per 100
    iterations,
    `chosen` (for `best`: the signals that were taken, else directions). Empty where a half of the worlds has fewer than
    `FEWEST` crashes.
    """
    worlds = sorted({run.world for run in runs})
    halves = [[run for run in runs if run.world in worlds[i::2]] for i in (0, 1)]
    if any(sum(not math.isnan(run.fall) for run in half) < FEWEST for half in halves):
        return pd.DataFrame()
    signals = [name for name in SIGNALS if any(name in run.distances for run in runs)]
    results: dict[str, list[tuple[Rings, str]]] = {name: [] for name in (*signals, "best")}
    for tuning, testing in (halves, halves[::-1]):
        fitted = {name: tuned(tuning, name) for name in signals}
        tested = {}
        for name, (direction, threshold, _) in fitted.items():
            tested[name] = rings(testing, name, direction, threshold)
            results[name].append((tested[name], "rises" if direction > 0 else "falls"))
        best = max(signals, key=lambda name: fitted[name][2].announced)
        results["best"].append((tested[best], SIGNALS[best][0]))
    rows = []
    for name, parts in results.items():
        total = sum((part for part, _ in parts[1:]), parts[0][0])
        rows.append(
            {
                "signal": name,
                "name": SIGNALS[name][0] if name in SIGNALS else "chosen on the other half",
                "crashes": len(total.leads),
                "announced": total.announced,
                "at_the_fall": total.at_the_fall,
                "by_chance": total.by_chance,
                "lead": total.lead,
                "false_alarms": total.rate,
                "chosen": " or ".join(dict.fromkeys(word for _, word in parts)),
            }
        )
    return pd.DataFrame(rows)


def early_warning(metrics: Metrics) -> Plot | None:
    """What moves before a crash, beside what an alarm on each signal announced in worlds that it was not tuned in."""
    runs = watched(metrics)
    table = judged(runs)
    if table.empty:
        return None
    best = table.set_index("signal").loc["best"]
    title = (
        f"An alarm chosen on other worlds announces {best['announced']} of {best['crashes']} crashes, chance would announce "
        f"{best['by_chance']:.1f}"
    )
    if best["announced"]:
        title += (
            f"; it rings {best['lead']:g} iteration{'' if best['lead'] == 1 else 's'} ahead at the median"
        )
    question = (
        "Does anything announce a crash? Left: signals on the way to a fall of success, and in runs that never fell. Right: an "
        "alarm on each, tuned in one half of the worlds, tried in the other."
    )
    regimes, algorithms = metrics.regimes, metrics.algorithms()
    paths = _paths(runs)
    shown = [name for name in table.sort_values("announced", ascending=False)["signal"] if name in SIGNALS][
        :6
    ]
    colors = {"crash": "#D55E00", "no crash": "#8A8A8A"}
    words = {"crash": "runs that fall", "no crash": "runs that do not"}
    handles = [Line2D([], [], color=color, linewidth=2, label=words[kind]) for kind, color in colors.items()]
    bars = {"alarm rang before": 1.0, "rang in the fall's own iteration": 0.25}
    handles += [Patch(color="#0061A8", alpha=alpha, label=word) for word, alpha in bars.items()]
    with style():
        fig = page(title, question, source_of(metrics, regimes, algorithms), 4.3, handles)
        left, right = fig.subfigures(1, 2, width_ratios=[1.25, 1])
        axes = left.subplots(3, 2, sharex=True)
        for ax, signal in zip(axes.flat, shown, strict=False):
            for kind, color in colors.items():
                path = paths[(paths["signal"] == signal) & (paths["kind"] == kind)]
                ax.fill_between(path["time"], path["low"], path["high"], color=color, alpha=0.16, linewidth=0)
                ax.plot(path["time"], path["value"], color=color, linewidth=1.8)
            ax.axvline(0, color="#999999", linewidth=0.8)
            ax.set_title(SIGNALS[signal][0], fontsize=9, color="#333333")
        for ax in axes.flat[len(shown) :]:
            ax.set_visible(False)
        for ax in axes[-1]:
            ax.set_xlabel("iterations from the fall", fontsize=8.5)
        left.supylabel("distance from the last 20 iterations (MAD)", fontsize=8.5, color="#333333")
        ax = right.subplots()
        drawn = table.sort_values(["announced", "lead"], ascending=[True, True]).reset_index(drop=True)
        for y, row in drawn.iterrows():
            color = "#1D2530" if row["signal"] == "best" else "#0061A8"
            early, by_then = (row["announced"] / row["crashes"], row["at_the_fall"] / row["crashes"])
            ax.barh(y, early, color=color, height=0.62)
            ax.barh(y, by_then, left=early, color=color, alpha=0.25, height=0.62)
            words = f"{row['lead']:g} ahead, " if row["announced"] else ""
            words += f"{row['false_alarms']:.1f} false"
            ax.text(early + by_then + 0.02, y, words, va="center", fontsize=7.5, color="#555555")
        ax.set_yticks(range(len(drawn)), drawn["name"], fontsize=8.5)
        ax.set_xlim(0, 1.45)
        ax.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
        ax.spines["bottom"].set_bounds(0, 1)  # what is right of it holds words
        ax.set_xlabel("crashes announced")
        ax.grid(axis="y", visible=False)
    caption = (
        f"{question} A run counts once it has learned (rose by {LEARNED:.2f}); a fall is the first evaluation below half of its "
        f"gain. Lines: medians, bands: quartiles. An alarm announces a fall if it rings in the {AHEAD} iterations before; "
        f"thresholds allow {BUDGET:g} false alarm in 100 iterations where they are tuned. Ahead: median, in iterations; false: "
        "alarms in 100 iterations without a fall. Dark: the signal that did best in the half that it was tuned in."
    )
    return Plot("early_warning", fig, paths, caption, tables={"alarms": table}, title=title)


def _paths(runs: Sequence[Watched]) -> pd.DataFrame:
    """Quartiles of every signal's distance by the time from the fall; runs without one at every tenth iteration instead."""
    before = np.arange(-AHEAD - 4, 3)
    rows = []
    for signal in SIGNALS:
        for kind in ("crash", "no crash"):
            found = []
            for run in runs:
                if signal not in run.distances or math.isnan(run.fall) == (kind == "crash"):
                    continue
                read = pd.Series(run.distances[signal], index=run.iterations)
                falls = [run.fall] if kind == "crash" else run.iterations[AHEAD::10]
                found += [read.reindex(fall + before).to_numpy() for fall in falls]
            if not found:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # times before a run's first distance
                low, value, high = np.nanquantile(np.stack(found), [0.25, 0.5, 0.75], axis=0)
            keys = {"signal": signal, "kind": kind, "runs": len(found)}
            rows.append(
                pd.DataFrame({"time": before, "value": value, "low": low, "high": high}).assign(**keys)
            )
    return pd.concat(rows, ignore_index=True)
