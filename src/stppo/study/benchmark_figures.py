"""The benchmark's pictures: what a method reaches with a tuning budget, how far it can be pushed, and where it fails."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from stppo.algorithms import in_order
from stppo.results.curves import GREY, page, plain, source_of
from stppo.results.runs import Metrics
from stppo.results.style import Plot, style
from stppo.study.benchmark import BASELINE, BEST_OF, REGIME, leaderboard, points, tolerance_curve

MARKS = dict(zip(BEST_OF, ("|", "o", "D"), strict=True))
COLUMNS = 4


def pictures(metrics: Metrics) -> list[Plot]:
    """All of them, in the order in which they are shown."""
    return [leaderboard_figure(metrics), tolerance_figure(metrics), failures_figure(metrics)]


def leaderboard_figure(metrics: Metrics) -> Plot:
    """Expected best of 1, 5 and 20 random settings, and how often a method ends above token PPO at the same point."""
    table = leaderboard(metrics)
    best, base = table.iloc[0], table[table["method"] == BASELINE]
    beside = (
        f", token PPO's {base['best_of_5'].iloc[0]:.2f}" if len(base) and best["method"] != BASELINE else ""
    )
    title = f"The best of five random settings of {best['label']} reaches {best['best_of_5']:.2f}{beside}"
    question = "What does a method reach when 1, 5 or 20 settings may be tried? Final sampled success; 95 % intervals over worlds."
    handles = [
        Line2D([], [], color="#444444", marker=MARKS[k], linestyle="none", markersize=7, label=f"best of {k}")
        for k in BEST_OF
    ]
    with style():
        source = source_of(metrics, [REGIME], list(table["method"]))
        fig = page(title, question, source, 0.3 * len(table) + 0.7, handles)
        left, right = fig.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for y, row in table.iterrows():
            color = metrics.look(row["method"]).color
            for k in BEST_OF:
                left.plot(
                    row[f"best_of_{k}"], y, marker=MARKS[k], color=color, markersize=7, linestyle="none"
                )
            left.plot(
                [row["best_of_5_low"], row["best_of_5_high"]], [y, y], color=color, linewidth=1.6, zorder=1
            )
            if not np.isnan(row.get("above_token_ppo", np.nan)):
                right.plot(row["above_token_ppo"], y, "o", color=color, markersize=6)
                ends = [row["above_token_ppo_low"], row["above_token_ppo_high"]]
                right.plot(ends, [y, y], color=color, linewidth=1.6, zorder=1)
        right.axvline(0.5, color="#777777", linewidth=1, linestyle=(0, (1, 2)))
        left.set(xlim=(0, 1), xlabel="final success, sampled", ylim=(len(table) - 0.5, -0.5))
        right.set(xlim=(0, 1), xlabel="share of points above token PPO")
        left.set_yticks(
            range(len(table)),
            [row["label"] + (" (plain)" if row["null"] else "") for _, row in table.iterrows()],
        )
        for ax in (left, right):
            ax.tick_params(axis="y", length=0, labelsize=8.5)
            ax.grid(axis="y", visible=False)
    caption = (
        f"{question} Every method was run at the same {len(points())} settings, its own knob drawn from its declared prior. "
        "Plain: a remedy without a theory, which every method must beat."
    )
    return Plot("leaderboard", fig, table, caption, title=title)


def tolerance_figure(metrics: Metrics) -> Plot:
    """Final success of every run against the intensity of its setting, with the smoothed curve; token PPO's in grey."""
    runs = metrics.summary[metrics.summary["regime"] == REGIME]
    methods = in_order(runs["algorithm"])
    table = points().set_index("point")
    intensity = table["learning_rate"] * table["epochs"]
    at = np.geomspace(intensity.min(), intensity.max(), 40)
    curves = {name: tolerance_curve(runs[runs["algorithm"] == name], metrics, at) for name in methods}
    strongest = {
        name: curve[-8:].mean() for name, curve in curves.items()
    }  # the last fifth, on the logarithm
    best = max(strongest, key=strongest.__getitem__)
    title = f"At the strongest settings {metrics.look(best).label} ends highest, at {strongest[best]:.2f}"
    if BASELINE in curves and best != BASELINE:
        title += f"; token PPO at {strongest[BASELINE]:.2f}"
    question = "How far can each method be pushed? Final sampled success against learning rate × epochs."
    n_columns = min(COLUMNS, len(methods))
    n_rows = -(-len(methods) // n_columns)
    rows = []
    with style():
        fig = page(title, question, source_of(metrics, [REGIME], methods), 1.5 * n_rows + 0.3)
        axes = fig.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
        axes = list(axes.flat)
        for ax, name in zip(axes, methods, strict=False):
            its, mine = metrics.look(name), runs[runs["algorithm"] == name]
            if BASELINE in curves and name != BASELINE:
                ax.plot(at, curves[BASELINE], color=GREY, linewidth=1.5)
            x = intensity.loc[mine["seed"]].to_numpy()
            ax.plot(x, mine["final"], "o", color=its.color, markersize=3, alpha=0.6)
            ax.plot(at, curves[name], color=its.color, linewidth=2)
            ax.set_title(its.label, fontsize=8.5, color=its.color, fontweight="bold")
            ax.set(xscale="log", ylim=(0, 1))
            ax.tick_params(labelsize=7.5)
            worlds = mine["world_seed"].to_numpy()
            rows.append(
                pd.DataFrame(
                    {"x": x, "value": mine["final"], "world": worlds, "kind": "run", "algorithm": name}
                )
            )
            rows.append(pd.DataFrame({"x": at, "value": curves[name], "kind": "curve", "algorithm": name}))
        for ax in axes[len(methods) :]:
            ax.set_visible(False)
    caption = (
        f"{question} Intensities from {plain(at[0])} to {plain(at[-1])}. Dots: runs. Line: a Gaussian kernel's mean over the "
        "logarithm, of width 0.5. Grey: token PPO's."
    )
    return Plot("benchmark_tolerance", fig, pd.concat(rows, ignore_index=True), caption, title=title)


def failures_figure(metrics: Metrics) -> Plot:
    """Final success of every method at every point, points by intensity; a cross where it ends below where it began."""
    runs = metrics.summary[metrics.summary["regime"] == REGIME]
    methods = list(leaderboard(metrics)["method"])
    table = points().set_index("point")
    order = (table["learning_rate"] * table["epochs"]).sort_values(kind="stable").index
    lost = runs["final"] < runs["start"]
    data = runs.assign(lost=lost)[["algorithm", "seed", "start", "final", "lost"]]
    wide = data.pivot(index="algorithm", columns="seed", values="final").reindex(index=methods, columns=order)
    crosses = data.pivot(index="algorithm", columns="seed", values="lost").reindex(
        index=methods, columns=order
    )
    counts = data.groupby("algorithm")["lost"].sum()[
        [m for m in methods if wide.loc[m].notna().all()] or methods
    ]
    safest = counts.idxmin()
    title = f"{metrics.look(safest).label} ends below its start at {counts[safest]} of {len(order)} settings"
    if BASELINE in counts and safest != BASELINE:
        title += f", token PPO at {counts[BASELINE]}"
    question = "Where does each method fail? Final sampled success at each setting, from gentle to strong; × ends below its start."
    with style():
        fig = page(title, question, source_of(metrics, [REGIME], methods), 0.24 * len(methods) + 1.5)
        ax = fig.subplots()
        image = ax.imshow(wide.to_numpy(float), aspect="auto", cmap="YlGnBu", vmin=0, vmax=1)
        rows, columns = np.nonzero(crosses.to_numpy() == True)  # noqa: E712 (missing runs are NaN)
        ax.plot(columns, rows, "x", color="#C0392B", markersize=4, markeredgewidth=1.1, linestyle="none")
        ax.set_yticks(range(len(methods)), [metrics.look(name).label for name in methods], fontsize=8.5)
        shown = range(0, len(order), 3)
        intensity = (table["learning_rate"] * table["epochs"])[order]
        ax.set_xticks(shown, [f"{1e3 * intensity.iloc[i]:.2g}" for i in shown], fontsize=8)
        ax.set_xlabel("learning rate × epochs, in thousandths")
        ax.grid(visible=False)
        ax.tick_params(length=0)
        fig.colorbar(image, ax=ax, label="final success", shrink=0.8, pad=0.01)
    caption = f"{question} Methods in the order of the leaderboard; empty cells are not run yet."
    return Plot("benchmark_failures", fig, data.rename(columns={"seed": "point"}), caption, title=title)
