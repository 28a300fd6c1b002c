"""The one definition of collapse, fixed before any run was read.

Evaluations are made at temperature 1 on fixed held-out questions, every second iteration on the
full presets (cheaper presets evaluate less often; `Collapse.spacing` records it). Over those:

- S is the trailing mean of three evaluations, defined from the third evaluation on;
- S0 is the sampled success of the warm start, from a larger sample than one evaluation;
- P = max(S0, running maximum of S): success already reached.

A run collapses at the first evaluation that opens three consecutive ones with S <= P/2 and
P - S >= 0.10, or where a loss or gradient stops being finite. A collapse after which S stays above
P/2 for three consecutive evaluations is labelled transient. A run whose S never reaches S0 + 0.05
never improved; that is reported apart, for a run can do either without the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

WINDOW = 3
CONSECUTIVE = 3
FRACTION = 0.5
MIN_DROP = 0.10
IMPROVEMENT = 0.05


@dataclass(frozen=True)
class Collapse:
    """Verdict on one run."""

    collapsed: bool
    iteration: float | None  # of the evaluation that opens the collapse, or of the non-finite update
    cause: str | None  # "success" | "non_finite"
    transient: bool
    never_improved: bool | None  # None: too few evaluations to say
    start: float  # S0
    peak: float  # largest S, NaN if there are too few evaluations
    n_evaluations: int
    spacing: float  # median iterations between evaluations, NaN for fewer than two
    smoothed: NDArray[np.float64] = field(repr=False, compare=False)  # S; NaN before the third

    @property
    def decidable(self) -> bool:
        """Whether there are enough evaluations for the rule to fire at all."""
        return self.n_evaluations >= WINDOW + CONSECUTIVE - 1

    @property
    def label(self) -> str:
        """One or two words for a table."""
        if self.cause == "non_finite":
            return "non-finite"
        if self.collapsed:
            return "collapsed, recovered" if self.transient else "collapsed"
        if not self.decidable:
            return "too short"
        return "never improved" if self.never_improved else "learned"


def trailing_mean(values: ArrayLike, window: int = WINDOW) -> NDArray[np.float64]:
    """Mean of each value and the window - 1 before it; NaN where there are fewer."""
    values = np.asarray(values, dtype=np.float64)
    out = np.full(len(values), np.nan)
    if len(values) >= window:
        out[window - 1 :] = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
    return out


def _first_run(flags: NDArray[np.bool_], length: int, after: int = 0) -> int | None:
    """Index, at or behind `after`, where `length` consecutive true flags start."""
    for i in range(after, len(flags) - length + 1):
        if flags[i : i + length].all():
            return i
    return None


def detect_collapse(
    iterations: ArrayLike,
    success: ArrayLike,
    start: float,
    non_finite_iteration: float | None = None,
    fraction: float = FRACTION,
) -> Collapse:
    """Apply the rule to one run.

    iterations, success: (n,) evaluations at temperature 1, in order, success in [0, 1]; start: S0; fraction: of P at or
    below which S must fall, where another than the rule's is of interest.
    ValueError for unordered iterations, different lengths or success outside [0, 1].
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

    smoothed = trailing_mean(success)
    known = np.isfinite(smoothed)
    reached = np.fmax(np.fmax.accumulate(smoothed), start) if len(smoothed) else smoothed
    low = known & (smoothed <= fraction * reached) & (reached - smoothed >= MIN_DROP)
    onset = _first_run(low, CONSECUTIVE)
    iteration, cause, transient = None, None, False
    if onset is not None:
        iteration, cause = float(iterations[onset]), "success"
        back = known & (smoothed > fraction * reached)
        transient = _first_run(back, CONSECUTIVE, onset + CONSECUTIVE) is not None
    if non_finite_iteration is not None:
        transient = False
        if iteration is None or non_finite_iteration < iteration:
            iteration, cause = float(non_finite_iteration), "non_finite"
    peak = float(smoothed[known].max()) if known.any() else float("nan")
    return Collapse(
        collapsed=cause is not None,
        iteration=iteration,
        cause=cause,
        transient=transient,
        never_improved=bool(peak < start + IMPROVEMENT) if known.any() else None,
        start=float(start),
        peak=peak,
        n_evaluations=len(success),
        spacing=float(np.median(np.diff(iterations))) if len(iterations) > 1 else float("nan"),
        smoothed=smoothed,
    )
