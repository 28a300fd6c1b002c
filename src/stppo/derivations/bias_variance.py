"""Bias and noise of every algorithm's gradient on the exact oracle: a table, and a picture of it."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from matplotlib.figure import Figure

from stppo.config import algorithms as registry
from stppo.config.composition import algorithm_section
from stppo.config.loading import build
from stppo.figures.style import Plot, style
from stppo.oracle import Oracle, TabularSoftmax, TokenMDP
from stppo.oracle.comparison import gradient_quality

FRESH, STALE = "fresh", "off-policy"
MOVED, BATCH, BATCHES = 0.4, 16, 150  # the off-policy distance; trajectories a batch; sampled batches
PANELS = {"efficiency": "efficiency", "bias": "bias (sine of the angle)", "noise": "noise of one batch"}


def bias_variance_table(
    algorithms: Iterable[str] | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Two rows per algorithm with a file (or of those given), in figures' order: its gradient on fresh data
    and off-policy.

    Columns: algorithm, label, data (`fresh`: theta is the behaviour policy; `off-policy`: theta is `MOVED`
    from it in a random direction), bias, scale, noise, efficiency, sampled (see
    `stppo.oracle.comparison.Quality`).
    World: 1,334 trajectories with turns of 1 to 3 tokens, a tabular policy, an exact critic; batches of
    `BATCH` trajectories, of which `BATCHES` are sampled for methods that look at a batch. About 15 CPU
    seconds for all shipped algorithms. One's own whose credit has no known limit is left out where none are
    named. Raises ConfigError for an unknown algorithm, ValueError for a credit whose limit is not known.
    """
    tree = TokenMDP(seed=seed).enumerate()
    policy = TabularSoftmax(tree)
    oracle = Oracle(tree, policy, policy.initial(seed + 1, 0.7))
    points = {FRESH: oracle.behaviour, STALE: oracle.behaviour + MOVED * policy.initial(seed + 9)}
    names = (
        [row.name for row in registry.algorithms()] if algorithms is None else registry.in_order(algorithms)
    )
    rows = []
    for name in names:
        composed = algorithm_section(name)
        objective = build(composed["objective"], "algorithm.objective")
        try:
            quality = {
                d: gradient_quality(oracle, objective, at, BATCH, BATCHES, seed) for d, at in points.items()
            }
        except ValueError:
            if algorithms is not None or name in registry.ORDER:
                raise
            continue  # one's own, of whose rules the oracle knows no limit
        label = registry.look(name).label
        rows += [{"algorithm": name, "label": label, "data": d} | vars(found) for d, found in quality.items()]
    return pd.DataFrame(rows)


def bias_variance_figure(table: pd.DataFrame) -> Plot:
    """`bias_variance`: bias, noise and efficiency of every algorithm of a `bias_variance_table`, on fresh
    data and off-policy, a row each."""
    wide = table.pivot(index="algorithm", columns="data", values=list(PANELS))
    wide = wide.sort_values(("efficiency", STALE), ascending=False, kind="stable")
    looks = [registry.look(name) for name in wide.index]
    rows = range(len(wide))
    stale = wide["efficiency", STALE]
    title = (
        f"Efficiency of one batch's gradient, off-policy: {stale.min():.2f} to {stale.max():.2f}, highest "
        f"{looks[0].label}"
    )
    with style():
        fig = Figure(figsize=(10.0, 0.19 * len(wide) + 1.4), layout="constrained")
        fig.get_layout_engine().set(w_pad=0.12)
        for ax, (what, label) in zip(fig.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
            fresh, old = wide[what, FRESH], wide[what, STALE]
            ax.hlines(rows, fresh, old, color="#C4C4C4", linewidth=1, zorder=1)
            ax.scatter(
                fresh, rows, s=24, facecolor="white", edgecolor=[look.color for look in looks], zorder=2
            )
            ax.scatter(old, rows, s=24, c=[look.color for look in looks], zorder=3)
            ax.set_title(label, fontsize=9)
            ax.tick_params(axis="y", length=0)
            ax.grid(axis="y", visible=False)
        fig.axes[0].set_yticks(rows, [look.label for look in looks], fontsize=7.5)
        fig.axes[0].set_ylim(len(wide) - 0.5, -0.5)
        fig.suptitle(title, x=0.012, ha="left")
    caption = (
        "Exact oracle: an enumerable world, exact critic, batches of 16 trajectories. Filled: off-policy; "
        "hollow: fresh data. Bias: sine of the angle between the expected gradient and the true one; noise: "
        "standard deviation over the length of the expectation; both free of the gradient's scale. "
        "Efficiency: expected cosine-like product of one batch's gradient with the true one, cos / sqrt(1 + "
        "noise^2). Methods that look at a whole batch are sampled, the others exact. This is one step's "
        "geometry, not who learns."
    )
    return Plot("bias_variance", fig, table, caption, title=title)
