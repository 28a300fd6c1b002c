"""Whether what collapsed depends on where the collapse rule draws its line."""

from __future__ import annotations

import pandas as pd

from stppo.results.runs import Metrics

FRACTIONS = (0.4, 0.5, 0.6)  # of the success already reached; the rule's own is `collapse.FRACTION`


def collapse_counts(metrics: Metrics) -> pd.DataFrame:
    """One row per arm: regime, algorithm, runs, and collapsed runs by the rule with each of `FRACTIONS` in its place
    (columns "0.4", "0.5", "0.6"), the rest of it as `stppo.results.collapse` defines it."""
    rows = [
        [run["regime"], run["algorithm"], *(metrics.collapse(run, f).collapsed for f in FRACTIONS)]
        for run in metrics.runs
    ]
    names = [f"{fraction:g}" for fraction in FRACTIONS]
    table = pd.DataFrame(rows, columns=["regime", "algorithm", *names])
    arms = table.groupby(["regime", "algorithm"])
    return arms[names].sum().assign(runs=arms.size()).reset_index()[["regime", "algorithm", "runs", *names]]
