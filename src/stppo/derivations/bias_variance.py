"""Bias and noise of every algorithm's gradient on the exact oracle: a table, and a picture of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stppo.config import algorithms as registry
from stppo.config.composition import compose
from stppo.config.loading import build
from stppo.figures.style import Plot, style
from stppo.oracle import Oracle, TabularSoftmax, TokenMDP
from stppo.oracle.comparison import gradient_quality

FRESH, STALE = "fresh", "off-policy"


def bias_variance_table(
    algorithms: Iterable[str] | None = None,
    moved: float = 0.4,
    batch_size: int = 16,
    n_batches: int = 150,
    seed: int = 0,
) -> pd.DataFrame:
    """Two rows per algorithm with a file (or of those given), in figures' order: its gradient on fresh data
    and off-policy.

    Columns: algorithm, label, data (`fresh`: theta is the behaviour policy; `off-policy`: theta is `moved`
    from it in a random direction), bias, noise, efficiency, sampled (see `stppo.oracle.comparison.Quality`).
    World: 1,334 trajectories with turns of 1 to 3 tokens, a tabular policy, an exact critic; batches of
    `batch_size` trajectories, of which `n_batches` are sampled for methods that look at a batch. About 15 CPU
    seconds for all shipped algorithms. Raises ConfigError for an unknown algorithm, ValueError for a credit
    whose limit is not known.
    """
    tree = TokenMDP(seed=seed).enumerate()
    policy = TabularSoftmax(tree)
    oracle = Oracle(tree, policy, policy.initial(seed + 1, 0.7))
    points = {FRESH: oracle.behaviour, STALE: oracle.behaviour + moved * policy.initial(seed + 9)}
    names = (
        [row.name for row in registry.algorithms()] if algorithms is None else registry.in_order(algorithms)
    )
    rows = []
    for name in names:
        composed = compose([f"algorithm={name}"])["algorithm"]
        objective = build(composed["objective"], "algorithm.objective")
        for data, theta in points.items():
            found = gradient_quality(oracle, objective, theta, batch_size, n_batches, seed)
            rows.append({"algorithm": name, "label": registry.look(name).label, "data": data} | vars(found))
    return pd.DataFrame(rows)


def bias_variance_figure(table: pd.DataFrame | None = None) -> Plot:
    """`bias_variance`: every algorithm as a point of noise against bias, on fresh data and off-policy; the
    same as a table beside it. table: of `bias_variance_table`, default made anew."""
    table = bias_variance_table() if table is None else table
    order = table[table["data"] == STALE].sort_values("efficiency", ascending=False)["algorithm"].tolist()
    number = {name: i + 1 for i, name in enumerate(order)}
    height = max(6.0, 0.205 * len(order) + 1.2)
    with style():
        fig = Figure(figsize=(11.0, height), layout="constrained")
        grid = fig.add_gridspec(2, 2, width_ratios=(1.0, 0.92))
        for row, data in enumerate((FRESH, STALE)):
            _points(fig.add_subplot(grid[row, 0]), table[table["data"] == data], number, data)
        _list(fig.add_subplot(grid[:, 1]), table, order)
    stale = table[table["data"] == STALE].set_index("algorithm")["efficiency"]
    best = registry.look(stale.idxmax()).label
    title = (
        f"Efficiency of one batch's gradient, off-policy: {stale.min():.2f} to {stale.max():.2f}, highest "
        f"{best}"
    )
    fig.suptitle(title, x=0.012, ha="left")
    caption = (
        "Exact oracle: an enumerable world, exact critic, batches of 16 trajectories. Bias: sine of the "
        "angle between the "
        "expected gradient and the true one; noise: standard deviation over the length of the expectation; "
        "both free of "
        "the gradient's scale. Efficiency: expected cosine-like product of one batch's gradient with the "
        "true one, "
        "cos / sqrt(1 + noise^2); grey curves join points of equal efficiency. Numbers are places "
        "off-policy. Methods that "
        "look at a whole batch are sampled, the others exact. This is one step's geometry, not who learns."
    )
    return Plot("bias_variance", fig, table, caption, title=title)


def _points(ax: Axes, rows: pd.DataFrame, number: dict[str, int], data: str) -> None:
    x = np.linspace(0, 0.999, 200)
    for level in (0.2, 0.3, 0.4):
        noise = np.sqrt(np.clip((1 - x**2) / level**2 - 1, 0, None))
        ax.plot(x, np.where(noise > 0, noise, np.nan), color="#BBBBBB", linewidth=0.8, zorder=1)
        ax.annotate(f"{level:g}", (x[4], noise[4]), color="#888888", fontsize=7.5, va="bottom")
    for row in rows.itertuples():
        ax.plot(row.bias, row.noise, "o", color=registry.look(row.algorithm).color, markersize=5, zorder=2)
    ax.set(title=f"{data} data", xlabel="bias (sine of the angle)", ylabel="noise of one batch")
    ax.set_xlim(-0.03, max(0.75, rows["bias"].max() + 0.05))
    ax.set_ylim(rows["noise"].min() - 0.3, rows["noise"].max() + 0.4)
    for places, x, y in _clusters(rows, number, ax):
        ax.annotate(
            textwrap.fill(", ".join(map(str, sorted(places))), 16),
            (x, y),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=7,
        )


def _clusters(rows: pd.DataFrame, number: dict[str, int], ax: Axes) -> list[tuple[list[int], float, float]]:
    """Numbers of the points that stand too close for labels of their own, with the place of each label."""
    wide, high = np.ptp(ax.get_xlim()), np.ptp(ax.get_ylim())
    found: list[tuple[list[int], float, float]] = []
    for row in rows.sort_values(["noise", "bias"], ascending=False).itertuples():
        near = [
            c for c in found if abs(c[1] - row.bias) / wide < 0.035 and abs(c[2] - row.noise) / high < 0.03
        ]
        if near:
            near[0][0].append(number[row.algorithm])
        else:
            found.append(([number[row.algorithm]], row.bias, row.noise))
    return found


def _list(ax: Axes, table: pd.DataFrame, order: list[str]) -> None:
    """Number, label and the four numbers of each algorithm, off-policy efficiency descending."""
    wide = table.pivot(index="algorithm", columns="data", values=["bias", "noise", "efficiency"])
    columns = {
        0.60: ("bias", FRESH),
        0.70: ("bias", STALE),
        0.80: ("noise", FRESH),
        0.90: ("noise", STALE),
        1.0: ("efficiency", STALE),
    }
    ax.axis("off")
    ax.set(xlim=(0, 1.02), ylim=(len(order) + 0.5, -1.6))
    for at, (what, data) in columns.items():
        short = "fresh" if data == FRESH else "off-p."
        ax.text(
            at,
            -0.4,
            f"{'effic.' if what == 'efficiency' else what}\n{short}",
            ha="right",
            va="center",
            fontsize=7.5,
            color="#666666",
        )
    for i, name in enumerate(order):
        look = registry.look(name)
        ax.plot(0.06, i + 0.5, "o", color=look.color, markersize=5)
        ax.text(0.04, i + 0.5, str(i + 1), ha="right", va="center", fontsize=7.5)
        ax.text(0.09, i + 0.5, look.label, va="center", fontsize=8)
        for at, column in columns.items():
            ax.text(at, i + 0.5, f"{wide.loc[name, column]:.2f}", ha="right", va="center", fontsize=8)
