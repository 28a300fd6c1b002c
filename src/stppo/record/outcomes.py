"""What one run comes to in a few numbers, by rules fixed before any run was read.

Success is exact match on fixed held-out questions, sampled at temperature 1 and greedy. Over the sampled
evaluations:

- S is the trailing mean of three evaluations, defined from the third on;
- S0 is the sampled success of the warm start, from a larger sample than one evaluation;
- P is the running maximum of S (never below S0), F the mean of the last tenth of the evaluations.

A run *learned* once S >= S0 + 0.10. After that it *crashes* where S falls below S0 + (P - S0) / 2: half of
what it had gained is lost. A crash that is not made good by the end, F <= S0 + (P - S0) / 2, is a *collapse*;
so is a loss or gradient that stops being finite, after which success counts as 0. A run that never learned
and ends at F <= S0 / 2 *lost its start*. The share of the gain that is kept is (F - S0) / (P - S0), of runs
that learned.

Continuous outcomes (F, area under the curve, success after 10, 20, 40, 60 iterations) come first; labels
describe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stppo.stats import area_under_curve, final_mean

WINDOW = 3  # evaluations in a trailing mean
LEARNED = 0.10  # rise above the start that counts as learning
KEPT = 0.5  # share of the gain below which S has crashed
FAST = 10  # iterations within which `rapid_crashes` counts a fall
AFTER = (10, 20, 40, 60)  # iterations after which success is tabulated
LABELS = ("learned", "crashed and recovered", "collapsed", "did not learn", "lost its start")


@dataclass(frozen=True)
class Outcome:
    """The rules above applied to one run; successes lie in [0, 1], NaN where there are too few
    evaluations."""

    start: float  # S0
    peak: float  # P at the end
    final: float  # F
    area: float  # mean height of the curve of sampled success, from the start
    after: dict[int, float]  # S at the last evaluation not after n iterations
    learned: bool
    gain_kept: float  # NaN where nothing was learned
    crash_iteration: float | None  # first crash, or the non-finite update's iteration
    rapid_crashes: int  # falls of S by half of the gain within FAST iterations, recovered or not
    collapsed: bool
    lost_start: bool
    non_finite: bool
    smoothed: NDArray[np.float64] = field(repr=False, compare=False)  # S; NaN before the third evaluation

    @property
    def crashed(self) -> bool:
        return self.crash_iteration is not None

    @property
    def label(self) -> str:
        """One of LABELS."""
        if self.collapsed:
            return "collapsed"
        if self.learned:
            return "crashed and recovered" if self.crashed else "learned"
        return "lost its start" if self.lost_start else "did not learn"


def trailing_mean(values: ArrayLike) -> NDArray[np.float64]:
    """Mean of each value and the `WINDOW` - 1 before it; NaN where there are fewer."""
    values = np.asarray(values, dtype=np.float64)
    out = np.full(len(values), np.nan)
    if len(values) >= WINDOW:
        out[WINDOW - 1 :] = np.lib.stride_tricks.sliding_window_view(values, WINDOW).mean(axis=1)
    return out


def judge(
    iterations: ArrayLike,
    success: ArrayLike,
    start: float,
    non_finite_iteration: float | None = None,
    horizon: float | None = None,
) -> Outcome:
    """Apply the rules to one run.

    iterations, success: (n,) evaluations at temperature 1, in order, success in [0, 1]; start: S0;
    non_finite_iteration: where training stopped for a non-finite loss or gradient; horizon: iterations that
    were planned, so that such a run counts as 0 from there to the end. ValueError for unordered iterations,
    different lengths or success outside [0, 1].
    """
    iterations = np.asarray(iterations, dtype=np.float64)
    success = np.asarray(success, dtype=np.float64)
    if iterations.shape != success.shape or iterations.ndim != 1:
        raise ValueError(
            f"iterations {iterations.shape} and success {success.shape} must be vectors of one length"
        )
    if (np.diff(iterations) <= 0).any():
        raise ValueError("evaluations must be in increasing order of iteration, each iteration once")
    if not ((success >= 0) & (success <= 1)).all() or not 0 <= start <= 1:
        raise ValueError("success must lie in [0, 1] and be finite")
    if non_finite_iteration is not None:
        iterations, success = with_zeros(iterations, success, non_finite_iteration, horizon)

    smoothed = trailing_mean(success)
    best = np.fmax(np.fmax.accumulate(smoothed), start) if len(smoothed) else smoothed
    gain = best - start
    with np.errstate(invalid="ignore"):
        low = (gain >= LEARNED) & (smoothed < start + KEPT * gain)
    crash = float(iterations[low.argmax()]) if low.any() else None
    if non_finite_iteration is not None:
        crash = non_finite_iteration if crash is None else min(crash, non_finite_iteration)
    peak = float(best[-1]) if len(best) else start
    final = 0.0 if non_finite_iteration is not None else final_mean(success)
    learned = peak >= start + LEARNED
    return Outcome(
        start=float(start),
        peak=peak,
        final=final,
        area=area_under_curve(iterations, success),
        after={n: _after(iterations, smoothed, n) for n in AFTER},
        learned=learned,
        gain_kept=(final - start) / (peak - start) if learned else math.nan,
        crash_iteration=crash,
        rapid_crashes=_rapid(iterations, smoothed, start),
        collapsed=non_finite_iteration is not None
        or (crash is not None and final <= start + KEPT * (peak - start)),
        lost_start=not learned and final <= start / 2,
        non_finite=non_finite_iteration is not None,
        smoothed=smoothed,
    )


def with_zeros(
    iterations: NDArray, success: NDArray, stopped: float, horizon: float | None
) -> tuple[NDArray, NDArray]:
    """The curve of a run that stopped at an iteration, with 0 at the evaluations up to the horizon that it
    did not reach.

    They lie on the grid of those that it reached (one alone has no spacing: 1), the last at the horizon
    itself.
    """
    spacing = np.median(np.diff(iterations)) if len(iterations) > 1 else 1.0
    first = iterations[-1] + spacing if len(iterations) else 0.0
    missing = np.arange(first, horizon or 0, spacing)
    missing = missing[missing >= stopped]
    if horizon and (not len(iterations) or horizon > iterations[-1]):
        missing = np.append(missing, horizon)
    return np.append(iterations, missing), np.append(success, np.zeros(len(missing)))


def _after(iterations: NDArray, smoothed: NDArray, n: int) -> float:
    """S at the last evaluation not after n iterations; NaN where the run was shorter or too rarely
    evaluated."""
    if not len(iterations) or not iterations[0] <= n <= iterations[-1]:
        return math.nan
    return float(smoothed[np.searchsorted(iterations, n, side="right") - 1])


def _rapid(iterations: NDArray, smoothed: NDArray, start: float) -> int:
    """Falls of S, within FAST iterations, by half of what had been gained; a new one needs a new rise above
    the line."""
    count, armed, best = 0, True, start
    for i, value in enumerate(smoothed):
        if math.isnan(value):
            continue
        best = max(best, value)
        if best - start < LEARNED:
            continue
        line = start + KEPT * (best - start)
        recent = smoothed[(iterations >= iterations[i] - FAST) & (np.arange(len(smoothed)) < i)]
        if armed and value < line and (recent - value >= KEPT * (best - start)).any():
            count, armed = count + 1, False
        elif value >= line:
            armed = True
    return count
