"""What one run of a study comes to in one number, per arm and replicate, and tables of arms.

An arm is an algorithm in a regime. A run that was stopped by a non-finite loss or gradient counts as
collapsed there, and as success 0 at the evaluations that it did not reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import pandas as pd

from stppo import schema
from stppo.results import resampling
from stppo.results.collapse import Collapse
from stppo.results.resampling import Estimate, Outcomes, Replicate
from stppo.results.runs import KEYS, Metrics
from stppo.results.statistics import CONFIDENCE, area_under_curve, final_mean, kaplan_meier
from stppo.results.style import in_order

TABLE_DRAWS = 4_000  # for intervals at 95 %, which need fewer draws than joint ones


class Arm(NamedTuple):
    """An algorithm in a regime."""

    regime: str
    algorithm: str

    def __str__(self) -> str:
        return f"{self.regime}/{self.algorithm}"


class Study:
    """Recorded runs by arm and replicate."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._iterations = {key: rows for key, rows in metrics.iterations.groupby(KEYS, sort=False)}
        sampled = metrics.evaluations[metrics.evaluations["temperature"] == 1.0]
        self._evaluations = {key: rows for key, rows in sampled.groupby(KEYS, sort=False)}
        self._grids = {
            regime: sorted(rows["iteration"].unique()) for regime, rows in sampled.groupby("regime")
        }

    @cached_property
    def arms(self) -> dict[Arm, dict[Replicate, schema.RunRecord]]:
        """Runs of every arm, in order of replicates."""
        arms: dict[Arm, dict[Replicate, schema.RunRecord]] = {}
        for record in self.metrics.runs:
            replicate = Replicate(record["world_seed"], record["warm_start_seed"], record["seed"])
            arms.setdefault(Arm(record["regime"], record["algorithm"]), {})[replicate] = record
        return {arm: dict(sorted(runs.items())) for arm, runs in arms.items()}

    def runs(self, arm: Arm) -> dict[Replicate, schema.RunRecord]:
        """Runs of an arm; empty if it has none."""
        return self.arms.get(arm, {})

    def iterations(self, record: schema.RunRecord) -> pd.DataFrame:
        """Per-iteration metrics of a run, in order."""
        empty = self.metrics.iterations.iloc[:0]
        return self._iterations.get(_key(record), empty).sort_values("iteration")

    def collapse_iteration(self, record: schema.RunRecord) -> float:
        """Iteration of the collapse, infinite if the run did not collapse."""
        at = self.verdict(record).iteration
        return math.inf if at is None else at

    def steady(self, record: schema.RunRecord) -> pd.DataFrame:
        """`iterations` from the first at the run's full staleness (before it, lag and clipping grow together) to the last
        before its collapse."""
        rows = self.iterations(record)
        age = rows.get("staleness_iterations", pd.Series(math.nan, rows.index))
        return rows[((age >= age.max()) | age.isna()) & (rows["iteration"] < self.collapse_iteration(record))]

    def horizon(self, regime: str) -> int:
        """Iterations of the longest run of a regime."""
        return max(run["iterations"] for run in self.metrics.runs if run["regime"] == regime)

    def success(self, record: schema.RunRecord) -> pd.Series:
        """Sampled success at every evaluation of the regime; 0 after a non-finite stop."""
        grid = self._grids.get(record["regime"], [])
        rows = self._evaluations.get(_key(record))
        curve = pd.Series(dtype=float) if rows is None else rows.set_index("iteration")["success"]
        curve = curve.reindex(grid).astype(float)
        return curve.fillna(0.0) if record.get("non_finite") else curve

    def outcomes(self, arm: Arm, of: Callable[[schema.RunRecord], float]) -> dict[Replicate, float]:
        """One number per run of an arm."""
        return {replicate: float(of(record)) for replicate, record in self.runs(arm).items()}

    # --- the numbers of one run ----------------------------------------------------------------
    def collapsed(self, record: schema.RunRecord) -> float:
        """1 if the run collapsed, else 0; NaN if it has too few evaluations for the rule to fire."""
        verdict = self.verdict(record)
        return float(verdict.collapsed) if verdict.collapsed or verdict.decidable else math.nan

    def survival_time(self, record: schema.RunRecord) -> float:
        """Iterations without collapse, at most the horizon; NaN if the collapse rule cannot fire."""
        if math.isnan(self.collapsed(record)):
            return math.nan
        return min(self.collapse_iteration(record), self.horizon(record["regime"]))

    def final_success(self, record: schema.RunRecord) -> float:
        """Mean sampled success of the last tenth of the regime's evaluations."""
        return final_mean(self.success(record))

    def final_greedy(self, record: schema.RunRecord) -> float:
        """Greedy success of the run's last evaluation at temperature 0, 0 after a non-finite stop; NaN if it has none."""
        if record.get("non_finite"):
            return 0.0
        rows = self.metrics.success(record, temperature=0.0)["success"]
        return float(rows.iloc[-1]) if len(rows) else math.nan

    def verdict(self, record: schema.RunRecord) -> Collapse:
        """What the collapse rule says of a run."""
        return self.metrics.collapses[_key(record)]

    def mean_success(self, record: schema.RunRecord) -> float:
        """Area under the success curve divided by its length."""
        curve = self.success(record)
        return area_under_curve(curve.index, curve)

    # --- estimates over the runs of arms -------------------------------------------------------
    def risk(self, arm: Arm, **options: int) -> Estimate:
        """Collapse risk."""
        return resampling.mean(self.outcomes(arm, self.collapsed), (0.0, 1.0), **options)

    def risk_difference(self, untreated: Arm, treated: Arm, **options: int) -> Estimate:
        """Collapse risk, untreated minus treated: positive where the treatment prevents collapse."""
        outcomes = [self.outcomes(arm, self.collapsed) for arm in (untreated, treated)]
        return resampling.difference(*outcomes, (0.0, 1.0), **options)

    def survival_contrast(
        self, arms: Sequence[Arm], coefficients: Sequence[float], **options: int
    ) -> Estimate:
        """Contrast of restricted mean survival times, as a share of the horizon (all arms of one regime)."""
        horizon = self.horizon(arms[0].regime)
        shares = [self.outcomes(arm, lambda run: self.survival_time(run) / horizon) for arm in arms]
        return resampling.contrast(shares, coefficients, (0.0, 1.0), **options)

    def table(
        self,
        regime: str,
        algorithms: Sequence[str] | None = None,
        baseline: str | None = None,
        level: float = CONFIDENCE,
    ) -> pd.DataFrame:
        """One row per arm, with intervals at `level` and no verdicts; differences to `baseline` if given.

        Columns <quantity>, <quantity>_low, <quantity>_high for collapse_risk, survival (restricted mean,
        iterations), mean_success, final_success, final_success_iqm and, against the baseline,
        risk_difference (baseline minus arm), final_difference (arm minus baseline) and improvement (the
        probability that a run ends above one of the baseline); an interval is NaN from a single warm start.
        """
        rows = []
        for name in algorithms or in_order(arm.algorithm for arm in self.arms if arm.regime == regime):
            arm, reference = Arm(regime, name), Arm(regime, baseline or name)
            runs = self.runs(arm)
            if not runs:
                continue
            verdicts = [self.verdict(record) for record in runs.values()]
            row: dict[str, object] = {
                "regime": regime,
                "algorithm": name,
                "runs": len(runs),
                "warm_starts": len({replicate.cluster for replicate in runs}),
                "collapsed": sum(verdict.collapsed for verdict in verdicts),
                "recovered": sum(verdict.transient for verdict in verdicts),
                "never_improved": sum(verdict.never_improved is True for verdict in verdicts),
            }
            times = self.outcomes(arm, self.survival_time)
            mean_success = self.outcomes(arm, self.mean_success)
            final = self.outcomes(arm, self.final_success)
            add = partial(_add, row, level)
            add("collapse_risk", self.risk, arm)
            add("survival", resampling.mean, times, (0.0, float(self.horizon(regime))))
            add("mean_success", resampling.mean, mean_success)
            add("final_success", resampling.mean, final)
            add("final_success_iqm", resampling.interquartile_mean, final)
            if baseline and name != baseline and self.runs(reference):
                other = self.outcomes(reference, self.final_success)
                add("risk_difference", self.risk_difference, reference, arm)
                add("final_difference", resampling.difference, final, other)
                add("improvement", resampling.probability_of_improvement, final, other)
            rows.append(row)
        return pd.DataFrame(rows)

    def survival_curves(self, regime: str, algorithms: Sequence[str]) -> pd.DataFrame:
        """Kaplan-Meier curves of arms: columns algorithm, time, survival, low, high, at_risk."""
        curves = []
        for name in algorithms:
            times = self.outcomes(Arm(regime, name), self.survival_time)
            known = {replicate: time for replicate, time in times.items() if math.isfinite(time)}
            if known:
                runs = self.runs(Arm(regime, name))
                observed = [self.collapsed(runs[replicate]) == 1 for replicate in known]
                curve = kaplan_meier(list(known.values()), observed)
                curves.append(curve.assign(algorithm=name))
        if not curves:
            return pd.DataFrame(columns=["algorithm", "time", "survival", "low", "high", "at_risk"])
        table = pd.concat(curves, ignore_index=True)
        return table[["algorithm", *table.columns.drop("algorithm")]]


def _key(record: schema.RunRecord) -> tuple[str, str, int]:
    return tuple(record[name] for name in KEYS)


def _add(row: dict[str, object], level: float, name: str, estimate: Callable[..., Estimate], *args) -> None:
    """Value and interval of an estimate as three cells of a row; NaN where no run has a value."""
    try:
        found = estimate(*args, n_draws=TABLE_DRAWS)
    except ValueError:
        found = Estimate(math.nan, np.array([]), (), 0)
    row[name] = found.value
    row[f"{name}_low"], row[f"{name}_high"] = found.interval(level)


def tenths(iterations: np.ndarray, horizon: int) -> np.ndarray:
    """Which tenth of training (0 to 9) each iteration, counted from 1, belongs to."""
    return (np.asarray(iterations, dtype=np.int64) - 1) * 10 // horizon


def differences_by_tenth(study: Study, one: Arm, other: Arm, column: str) -> list[Outcomes]:
    """Per tenth of training, mean of `column` in `one` minus `other` for every pair.

    A pair is two runs of one replicate; it counts in a tenth only if the whole tenth lies before the first
    collapse of either.
    """
    horizon = study.horizon(one.regime)
    by_tenth: list[dict[Replicate, float]] = [{} for _ in range(10)]
    others = study.runs(other)
    for replicate, record in study.runs(one).items():
        if replicate not in others:
            continue
        both = (record, others[replicate])
        limit = min(map(study.collapse_iteration, both))
        means = [_tenth_means(study.iterations(run), column, horizon) for run in both]
        for tenth in range(10):
            if math.ceil((tenth + 1) * horizon / 10) < limit:  # its last iteration
                by_tenth[tenth][replicate] = means[0].get(tenth, math.nan) - means[1].get(tenth, math.nan)
    return by_tenth


def _tenth_means(iterations: pd.DataFrame, column: str, horizon: int) -> dict[int, float]:
    return iterations.groupby(tenths(iterations["iteration"].to_numpy(), horizon))[column].mean().to_dict()
