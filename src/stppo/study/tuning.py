"""What the study's tuning runs decide, by the rules of results/reference/study/PROTOCOL.md.

Nothing here looks at a run of the study itself; the chosen numbers stand in the configs, and a test holds
them against the committed tuning metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stppo.results.runs import Metrics
from stppo.study.arms import NINE
from stppo.study.outcomes import Arm, Study

TARGET_RISK = 0.8  # of token PPO in the main regime
MAIN_RATE = 3.5e-4  # learning rate that stage 1 chose
# Stage 3: regime of the tuning runs -> factor of the main learning rate; of ten iterations, and of whole runs.
FACTORS = {"F0.35": 0.35, "F0.5": 0.5, "F0.71": 0.71, "F1": 1.0}
SEARCHED = {"F0.25": 0.25, "F0.35_FULL": 0.35, "F0.5": 0.5, "F0.71": 0.71, "F1": 1.0}
MATCHED = {"token_ppo": "s_ppo", "turn_ppo": "st_ppo", "turn_grpo": "so_grpo"}  # untreated -> stabilised
MATCHED_OVER = 10  # iterations from the first
EPSILON_OVER = 5  # likewise, for the epsilons and SGD
MATCHED_BY = {"kl": "kl_behaviour_k3", "step": "update_norm"}
EPSILONS = {
    "turn_ppo": (0.1, 0.2, 0.3, 0.45, 0.675, 1.01),
    "gspo": (0.03, 0.06, 0.12, 0.2, 0.333, 0.556, 0.926),
}
SGD_RATES = (0.03, 0.1, 0.3, 1.0)
TOLERANCE = 0.1  # of a matched arm, beyond which its learning rate is interpolated once more
CHECK = "CHECK"  # regime of the runs that try what was chosen


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

    factors: regime -> factor. A run that stopped early counts 0 where it did not come. ValueError where the regimes
    do not have the same replicates.
    """
    study = Study(metrics)
    runs = {regime: study.outcomes(Arm(regime, algorithm), study.final_success) for regime in factors}
    if len({frozenset(outcomes) for outcomes in runs.values()}) > 1 or not all(runs.values()):
        counts = ", ".join(f"{regime} {len(outcomes)}" for regime, outcomes in runs.items())
        raise ValueError(f"{algorithm}: the tuning runs of its learning rates differ ({counts})")
    means = {factors[regime]: np.mean(list(outcomes.values())) for regime, outcomes in runs.items()}
    return min(means, key=lambda factor: (-means[factor], factor))


def early_mean(metrics: Metrics, regime: str, algorithm: str, column: str, iterations: int) -> float:
    """Mean of a column over the first iterations of every run of an arm; ValueError where there is none."""
    rows = metrics.iterations
    chosen = rows[
        (rows["regime"] == regime) & (rows["algorithm"] == algorithm) & (rows["iteration"] <= iterations)
    ]
    if chosen.empty:
        raise ValueError(f"{regime}/{algorithm}: no tuning run")
    return float(chosen.groupby("seed")[column].mean().mean())


def interpolate(x: Sequence[float], y: Sequence[float], target: float) -> float:
    """x at which y reaches the target, both axes logarithmic: linear between neighbours where y is monotone in x, else
    on the least-squares line. Points with y = 0 have no place there and are left out.

    ValueError where the target lies outside the values of y: the grid must be extended.
    """
    points = sorted((math.log(a), math.log(b)) for a, b in zip(x, y, strict=True) if b > 0)
    log_x, log_y = np.array(points).reshape(-1, 2).T
    if len(points) < 2 or not log_y.min() <= math.log(target) <= log_y.max():
        raise ValueError(f"{target:.4g} lies outside {[float(f'{b:.4g}') for b in y]}: extend the grid")
    steps = np.diff(log_y)
    if (steps > 0).all() or (steps < 0).all():
        order = np.argsort(log_y)
        return math.exp(np.interp(math.log(target), log_y[order], log_x[order]))
    slope, intercept = np.polyfit(log_x, log_y, 1)
    return math.exp((math.log(target) - intercept) / slope)


@dataclass(frozen=True)
class Decision:
    """What stage 3 chose.

    best: learning-rate factor of each of the nine algorithms. factor: of each matched arm, by the arm's name.
    epsilon: of the algorithms with a matched one. sgd_rate: learning rate of the SGD arms.
    """

    best: dict[str, float]
    factor: dict[str, float]
    epsilon: dict[str, float]
    sgd_rate: float


def decide(metrics: Metrics) -> Decision:
    """Stage 3 by its rules, from the runs of `configs/preset/study_tuning_2.yaml`; ValueError where one is missing
    or a target lies outside its grid."""

    def early(regime: str, algorithm: str, column: str, iterations: int) -> float:
        return early_mean(metrics, regime, algorithm, column, iterations)

    factor = {
        name: interpolate(list(FACTORS.values()), *_reached(metrics, untreated, column))
        for name, (untreated, column) in _matched_arms().items()
    }
    outside = early("F1", "token_ppo", "out_of_range_fraction", EPSILON_OVER)
    epsilon = {
        algorithm: interpolate(
            list(tried),
            [
                early("EPSILON", f"{algorithm}_epsilon{e:g}", "out_of_range_fraction", EPSILON_OVER)
                for e in tried
            ],
            outside,
        )
        for algorithm, tried in EPSILONS.items()
    }
    steps = [early("SGD", f"turn_ppo_sgd{rate:g}", "update_norm", EPSILON_OVER) for rate in SGD_RATES]
    sgd_rate = interpolate(list(SGD_RATES), steps, early("F1", "turn_ppo", "update_norm", EPSILON_OVER))
    best = {algorithm: best_factor(metrics, algorithm, SEARCHED) for algorithm in NINE}
    return Decision(best, factor, epsilon, sgd_rate)


def settle(
    metrics: Metrics, checks: Metrics, decision: Decision
) -> tuple[dict[str, float], dict[str, float]]:
    """Each matched arm's learning-rate factor after its check, and by what share the check missed its target.

    metrics: of stage 3; checks: of ten iterations at the factors of `decide`, as arms of regime `CHECK`. A factor stands
    if its check misses by no more than `TOLERANCE`; else it is interpolated once more with the check as one more point.
    ValueError where a run is missing.
    """
    factors, errors = {}, {}
    for name, (untreated, column) in _matched_arms().items():
        reached, target = _reached(metrics, untreated, column)
        tried, got = decision.factor[name], early_mean(checks, CHECK, name, column, MATCHED_OVER)
        errors[name] = got / target - 1
        factors[name] = tried
        if abs(errors[name]) > TOLERANCE:
            factors[name] = interpolate([*FACTORS.values(), tried], [*reached, got], target)
    return factors, errors


def _matched_arms() -> dict[str, tuple[str, str]]:
    """Matched arm -> the untreated algorithm that it is, and the column that is matched."""
    return {
        f"{untreated}_{how}_matched": (untreated, column)
        for untreated in MATCHED
        for how, column in MATCHED_BY.items()
    }


def _reached(metrics: Metrics, untreated: str, column: str) -> tuple[list[float], float]:
    """What the untreated algorithm reaches at each of `FACTORS`, and the target: its stabilised one at the main rate."""
    reached = [early_mean(metrics, regime, untreated, column, MATCHED_OVER) for regime in FACTORS]
    return reached, early_mean(metrics, "F1", MATCHED[untreated], column, MATCHED_OVER)
