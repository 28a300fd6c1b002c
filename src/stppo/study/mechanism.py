"""What moves first in a run that collapses: spikes against survivors, growth of the clipping bias, lead times.

Every comparison is within an arm and at the same iterations, because levels differ between objectives
and drift with training. The rules below were fixed before any run was read.

- **Spike** (`spike_auc`). A run's score at iteration T is its largest gradient norm of any update in the
  last tenth of the horizon up to T, divided by the median of its mean norms before that window: its own
  jump, not its level. Each collapsed run, at its collapse T, is set against the runs of its arm that have
  not collapsed two further tenths later; cases of several arms are pooled.
- **Departure** (`departure`). A signal leaves its healthy range at the first of two consecutive measured
  iterations outside it. With at least `MIN_SURVIVORS` runs of the arm that never collapse, the range at
  iteration t is their 1st to 99th percentile within two iterations of t, the run itself left out; with
  fewer it is the run's own median of the first quarter of training +- 5 robust standard deviations
  (1.4826 x median absolute deviation), and departures inside that quarter cannot be seen.
- **Clock.** A roll-out column (`ROLLOUT`: format, training success) is recorded at the iteration that trains on
  the batch, though the batch shows weights that are `staleness_iterations` older; norms, ratios and entropy show
  the weights of the iteration itself. So roll-out columns are moved back by the staleness of their row, and
  batches sampled by the same weights are averaged.
- **Lead**: iterations from the departure to the collapse; 0 where the signal stays in range until then.
  How often the rule fires in survivors is reported beside it: leads of a signal that is often out of range
  anyway say little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stppo import schema
from stppo.results import resampling
from stppo.results.resampling import Estimate, Replicate
from stppo.results.statistics import CONFIDENCE, log_linear_trend
from stppo.study.outcomes import TABLE_DRAWS, Arm, Study

ABOVE, BELOW, EITHER = "above", "below", "either side"
# Column of iterations.parquet -> (words, side on which it leaves). The last is what collapse is made of.
SIGNALS: dict[str, tuple[str, str]] = {
    "critic_value_rmse": ("critic error against true values", ABOVE),
    "critic_explained_variance": ("critic's explained variance", BELOW),
    "clipping_bias_norm": ("clipping-bias norm", ABOVE),
    "ratio_p99_token": ("99th percentile of the token ratio", ABOVE),
    "ratio_max_token_max": ("largest token ratio", ABOVE),
    "negative_advantage_gradient_share": ("gradient share of negative advantages", ABOVE),
    "gradient_norm_max": ("largest gradient norm", ABOVE),
    "clip_fraction": ("clip fraction", ABOVE),
    "entropy": ("entropy", EITHER),
    "valid_format_rate": ("valid-format rate", BELOW),
    "success_train": ("sampled training success", BELOW),
}
# Columns that describe the sampled batch, and so the weights that sampled it.
ROLLOUT = {
    "success_train",
    "reward_train",
    "valid_format_rate",
    "turns_per_trajectory",
    "searches_per_trajectory",
    "agent_tokens_per_turn",
    "trajectory_tokens",
}
MIN_SURVIVORS = 3
PERCENTILES = (1, 99)
NEIGHBOURS = 2  # iterations to either side whose values of survivors make up the range
CONSECUTIVE = 2
ROBUST_DEVIATIONS = 5.0
MIN_POINTS = 5  # measured iterations for an own range or for a trend


def spike_score(iterations: pd.DataFrame, end: float, window: int) -> float:
    """Largest gradient norm in the `window` iterations up to `end` over the median of the means before them.

    Infinite if a norm inside is; NaN where fewer than two iterations come before the window or no norm is known inside.
    """
    at = iterations["iteration"]
    before = iterations.loc[at <= end - window, "gradient_norm"].dropna()
    inside = iterations.loc[(at > end - window) & (at <= end), ["gradient_norm_max", "gradient_norm"]].max(
        axis=1
    )  # the mean of an iteration says that a norm was infinite even where its maximum is missing
    return float(inside.max() / before.median()) if len(before) > 1 and before.median() > 0 else math.nan


def spike_auc(study: Study, arms: Sequence[Arm], **options: int) -> Estimate:
    """AUC of the spike score of collapsed runs against survivors of their arm and time.

    `n_runs` of the estimate: cases, controls. ValueError if no run collapsed late enough to be scored, or
    none survived it.
    """
    runs = [(arm, replicate, record) for arm in arms for replicate, record in study.runs(arm).items()]
    ends = np.array([study.collapse_iteration(record) for _, _, record in runs])
    frames = [study.iterations(record) for _, _, record in runs]
    at_risk = np.zeros((len(runs), len(runs)), dtype=bool)
    won = np.zeros(at_risk.shape)
    for i in np.flatnonzero(np.isfinite(ends)):
        arm, end = runs[i][0], ends[i]
        window = math.ceil(study.horizon(arm.regime) / 10)
        mine = np.array([run[0] == arm for run in runs])
        scores = np.full(len(runs), math.nan)
        scores[mine] = [spike_score(frames[j], end, window) for j in np.flatnonzero(mine)]
        if not math.isnan(scores[i]):
            at_risk[i] = (ends > end + 2 * window) & ~np.isnan(scores)
            won[i] = resampling.wins(scores[[i]], scores)[0]
    return resampling.matched_auc([replicate for _, replicate, _ in runs], won, at_risk, **options)


def bias_norm_slope(study: Study, record: schema.RunRecord) -> float:
    """Slope of log ‖C‖ per iteration before the run's collapse; NaN for a run that does not collapse.

    Over the iterations from the first at full staleness (before it, ‖C‖ grows because the lag does) to the
    last before the collapse; NaN for fewer than five of them.
    """
    if not math.isfinite(study.collapse_iteration(record)):
        return math.nan
    rows = study.steady(record)
    trend = log_linear_trend(rows["iteration"], rows["clipping_bias_norm"])
    return trend.slope if trend.n >= MIN_POINTS else math.nan


@dataclass(frozen=True)
class Range:
    """Healthy range of a signal at the iterations of one run."""

    low: np.ndarray
    high: np.ndarray


def _own_range(values: pd.Series, quarter: float) -> Range | None:
    early = values[values.index <= quarter]
    if len(early) < MIN_POINTS:
        return None
    middle = early.median()
    spread = ROBUST_DEVIATIONS * 1.4826 * (early - middle).abs().median()
    inside = values.index <= quarter
    low = np.where(inside, -np.inf, middle - spread)
    return Range(low, np.where(inside, np.inf, middle + spread))


def _survivor_range(values: pd.Series, survivors: pd.DataFrame) -> Range | None:
    """survivors: (iterations, runs) of one signal."""
    if survivors.shape[1] == 0:
        return None
    at, level = survivors.index.to_numpy(), survivors.to_numpy()
    limits = []
    for t in values.index:
        near = level[np.abs(at - t) <= NEIGHBOURS]
        near = near[np.isfinite(near)]
        limits.append(np.percentile(near, PERCENTILES) if len(near) else (-np.inf, np.inf))
    low, high = np.array(limits).reshape(-1, 2).T
    return Range(low, high)


def departure(values: pd.Series, healthy: Range, side: str, end: float) -> float:
    """First of two consecutive measured iterations outside the range, at most `end`; NaN if there is none.

    values: one signal by iteration, measured iterations only.
    """
    outside = np.zeros(len(values), dtype=bool)
    if side in (ABOVE, EITHER):
        outside |= values.to_numpy() > healthy.high
    if side in (BELOW, EITHER):
        outside |= values.to_numpy() < healthy.low
    outside &= values.index.to_numpy() <= end
    for i in range(len(outside) - CONSECUTIVE + 1):
        if outside[i : i + CONSECUTIVE].all():
            return float(values.index[i])
    return math.nan


def by_weights(iterations: pd.DataFrame, signal: str) -> pd.Series:
    """One signal of a run by the iteration whose weights showed it, measured iterations only.

    iterations: rows of one run in order, with columns iteration, the signal and, if recorded, staleness_iterations.
    """
    values = iterations.set_index("iteration")[signal].dropna()
    if signal not in ROLLOUT or "staleness_iterations" not in iterations:
        return values
    age = iterations.set_index("iteration")["staleness_iterations"].fillna(0)
    return values.groupby(values.index - age[values.index].astype(int)).mean()


def departures(study: Study, arm: Arm, signals: Mapping[str, tuple[str, str]] = SIGNALS) -> pd.DataFrame:
    """One row per run of the arm and signal: world_seed, warm_start_seed, seed, signal, collapse (NaN for a
    survivor), departure (NaN if none before the collapse or the end), lead, reference (what the range is from).
    Iterations are those of `by_weights`.

    A signal that a run did not record, or too rarely for a range, has no row.
    """
    runs = study.runs(arm)
    frames = {replicate: study.iterations(record) for replicate, record in runs.items()}
    ends = {replicate: study.collapse_iteration(record) for replicate, record in runs.items()}
    survivors = [replicate for replicate, end in ends.items() if math.isinf(end)]
    enough = len(survivors) >= MIN_SURVIVORS
    reference = "survivors" if enough else "own first quarter"
    quarter = study.horizon(arm.regime) / 4 if runs else 0.0
    rows = []
    for signal, (_, side) in signals.items():
        known = {r: by_weights(frame, signal) for r, frame in frames.items() if signal in frame}
        healthy = pd.DataFrame({r: known[r] for r in survivors if r in known})
        healthy.columns = range(healthy.shape[1])  # replicates are tuples: no MultiIndex
        position = {r: i for i, r in enumerate(r for r in survivors if r in known)}
        for replicate, values in known.items():
            others = healthy.drop(columns=position.get(replicate, []))
            limits = _survivor_range(values, others) if enough else _own_range(values, quarter)
            if limits is None or values.empty:
                continue
            end = ends[replicate]
            at = departure(values, limits, side, end)
            collapse = end if math.isfinite(end) else math.nan
            lead = math.nan if math.isnan(collapse) else 0.0 if math.isnan(at) else collapse - at
            rows.append([*replicate, signal, collapse, at, lead, reference])
    columns = [*Replicate._fields, "signal", "collapse", "departure", "lead", "reference"]
    return pd.DataFrame(rows, columns=columns)


def leads(table: pd.DataFrame, signal: str) -> dict[Replicate, float]:
    """Lead of one signal per collapsed run, from the table of `departures`."""
    rows = table[(table["signal"] == signal) & table["collapse"].notna()]
    fields = rows[[*Replicate._fields, "lead"]].itertuples(index=False, name=None)
    return {Replicate(*map(int, key)): lead for *key, lead in fields}


def lead_difference(study: Study, arm: Arm, signal: str, other: str, **options: int) -> Estimate:
    """Mean over collapsed runs of lead(signal) - lead(other), iterations: positive where `signal` moves first.

    ValueError if no collapsed run recorded both.
    """
    table = departures(study, arm, {name: SIGNALS[name] for name in (signal, other)})
    return resampling.mean(resampling.pairs(leads(table, signal), leads(table, other)), **options)


def lead_table(table: pd.DataFrame, level: float = CONFIDENCE) -> pd.DataFrame:
    """One row per signal, longest mean lead first, from the table of `departures`.

    Columns: signal, label, side, collapsed (collapsed runs measured), departed (of those, before the
    collapse), first (of those, no other signal left earlier), lead_mean with lead_low and lead_high (over
    all collapsed runs, 0 where it stayed; NaN interval from one warm start), lead_median, survivors,
    survivors_departed (false alarms), reference.
    """
    rows = []
    collapsed = table[table["collapse"].notna()]
    earliest = collapsed.groupby(list(Replicate._fields))["departure"].min()
    for signal in dict.fromkeys(table["signal"]):
        ill = collapsed[collapsed["signal"] == signal]
        well = table[(table["signal"] == signal) & table["collapse"].isna()]
        if ill.empty:
            continue
        mean = resampling.mean(leads(table, signal), n_draws=TABLE_DRAWS)
        low, high = mean.interval(level)
        when_first = earliest.loc[ill.set_index(list(Replicate._fields)).index].to_numpy()
        label, side = SIGNALS[signal]
        rows.append(
            {
                "signal": signal,
                "label": label,
                "side": side,
                "collapsed": len(ill),
                "departed": int(ill["departure"].notna().sum()),
                "first": int((ill["departure"].to_numpy() == when_first).sum()),
                "lead_mean": mean.value,
                "lead_low": max(low, 0.0),  # no lead is negative
                "lead_high": high,
                "lead_median": float(ill["lead"].median()),
                "survivors": len(well),
                "survivors_departed": int(well["departure"].notna().sum()),
                "reference": ill["reference"].iloc[0],
            }
        )
    frame = pd.DataFrame(rows)
    return frame.sort_values("lead_mean", ascending=False, ignore_index=True) if rows else frame
