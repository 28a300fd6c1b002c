"""What the study's tuning runs decide, by the rules of results/reference/study/PROTOCOL.md.

Nothing here looks at a run of the study itself; the chosen numbers stand in the configs, and a test holds
them against the committed tuning metrics.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stppo.analysis.runs import Metrics

TARGET_RISK = 0.8  # of token PPO in the main regime


def collapse_shares(metrics: Metrics, algorithm: str = "token_ppo") -> dict[str, float]:
    """Share of an algorithm's runs that collapsed, by regime."""
    verdicts: dict[str, list[bool]] = {}
    for (regime, name, _), verdict in metrics.collapses.items():
        if name == algorithm:
            verdicts.setdefault(regime, []).append(verdict.collapsed)
    return {regime: float(np.mean(collapsed)) for regime, collapsed in sorted(verdicts.items())}


def choose_main(shares: Mapping[str, float], rates: Mapping[str, float]) -> str:
    """The cell whose share of collapses is nearest to `TARGET_RISK`; of two equally near, the lower rate.

    shares, rates: by cell. ValueError where no cell reaches 0.6: the grid must go up.
    """
    if max(shares.values()) < 0.6:
        raise ValueError("no cell collapses in 6 of 10 runs: extend the grid upwards by a factor of 1.2")
    return min(shares, key=lambda cell: (round(abs(shares[cell] - TARGET_RISK), 9), rates[cell]))


def best_factor(metrics: Metrics, algorithm: str, factors: Mapping[str, float]) -> float:
    """The learning-rate factor with the highest mean final success, of equals the lowest.

    factors: regime -> factor. ValueError where a regime has no run of the algorithm.
    """
    summary = metrics.summary[metrics.summary["algorithm"] == algorithm]
    finals = summary.groupby("regime")["success_final"].mean()
    if missing := sorted(set(factors) - set(finals.index)):
        raise ValueError(f"{algorithm}: no tuning run in {', '.join(missing)}")
    return min(
        (factors[r] for r in factors), key=lambda f: (-max(finals[r] for r in factors if factors[r] == f), f)
    )


def early_mean(metrics: Metrics, regime: str, algorithm: str, column: str, iterations: int) -> float:
    """Mean of a column over the first iterations of every run of an arm; ValueError where there is none."""
    rows = metrics.iterations
    chosen = rows[
        (rows["regime"] == regime) & (rows["algorithm"] == algorithm) & (rows["iteration"] <= iterations)
    ]
    if chosen.empty:
        raise ValueError(f"{regime}/{algorithm}: no tuning run")
    return float(chosen.groupby("seed")[column].mean().mean())


def interpolate(x: list[float], y: list[float], target: float) -> float:
    """x at which y reaches the target: linear between neighbours with both axes logarithmic, the outermost two
    points beyond them. All values positive, y strictly increasing or decreasing in x, else ValueError."""
    order = np.argsort(x)
    log_x, log_y = np.log(np.asarray(x)[order]), np.log(np.asarray(y)[order])
    steps = np.diff(log_y)
    if not np.isfinite(log_y).all() or not ((steps > 0).all() or (steps < 0).all()):
        raise ValueError(f"cannot interpolate: {list(np.asarray(y)[order])} is not monotone in x")
    if steps[0] < 0:
        log_x, log_y = log_x[::-1], log_y[::-1]
    at = int(np.clip(np.searchsorted(log_y, np.log(target)) - 1, 0, len(log_x) - 2))
    slope = (log_x[at + 1] - log_x[at]) / (log_y[at + 1] - log_y[at])
    return float(np.exp(log_x[at] + slope * (np.log(target) - log_y[at])))
