"""The benchmark's pictures: what a method reaches with a tuning budget, how far it can be pushed, and where it fails."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from stppo.config.algorithms import in_order
from stppo.figures.curves import GREY, page, plain, source_of
from stppo.figures.findings import sentence
from stppo.figures.style import Plot, style
from stppo.record.runs import Metrics
from stppo.study.benchmark import (
    BASELINE,
    BEST_OF,
    CONFIRMATION,
    REGIME,
    best_point,
    difference,
    leaderboard,
    points,
    tolerance_curve,
)
from stppo.study.benchmark_signals import signals_figure

# What is added, to what, and the two methods that differ by it (and by the knob that each has drawn).
INGREDIENTS = (
    ("turn ratio, to token PPO", "turn_ppo", "token_ppo"),
    ("divisor, to token PPO", "s_ppo", "token_ppo"),
    ("divisor, to Turn-PPO", "st_ppo", "turn_ppo"),
    ("turn ratio and divisor, to GRPO", "so_grpo", "grpo"),
    ("trajectory ratio, to GRPO", "gspo", "grpo"),
    ("weight 1 in place of the ratio, to token PPO", "weight_one", "token_ppo"),
    ("KL stop, to token PPO", "kl_stop", "token_ppo"),
    ("gradient clip, to token PPO", "grad_clip", "token_ppo"),
    ("dual clip, to token PPO", "dual_clip", "token_ppo"),
    ("wider upper clip, to GRPO", "dapo", "grpo"),
    ("no critic: GRPO for token PPO", "grpo", "token_ppo"),
    ("failures left out, to TOPR", "successes_only", "topr"),
    # These two also average differently: over tokens, over trajectories.
    ("TOPR's weight on failures, to REINFORCE", "topr", "reinforce"),
    ("no push at failures grown unlikely, to GRPO", "sequence_mask", "grpo"),
)
MARKS = dict(zip(BEST_OF, ("|", "o", "D"), strict=True))
COLUMNS = 4


def pictures(metrics: Metrics) -> list[Plot]:
    """All of them, in the order in which they are shown, those that need several methods or a confirmation where these were run."""
    plots = [leaderboard_figure(metrics), tolerance_figure(metrics), failures_figure(metrics)]
    if ingredients(metrics):
        plots.append(ingredients_figure(metrics))
    if (signals := signals_figure(metrics)) is not None:
        plots.append(signals)
    if (metrics.summary["regime"] == CONFIRMATION).any():
        plots.append(confirmation_figure(metrics))
    return plots


def leaderboard_figure(metrics: Metrics) -> Plot:
    """Expected best of 1, 5 and 20 random settings, and how often a method ends above token PPO, and above the best plain
    remedy, at the same point."""
    table = leaderboard(metrics)
    best, base = table.iloc[0], table[table["method"] == BASELINE]
    title = f"A random setting of {best['label']} ends at {best['best_of_1']:.2f}"
    five = f"{best['best_of_5']:.2f}"
    if len(base) and best["method"] != BASELINE:
        title += f", token PPO's at {base['best_of_1'].iloc[0]:.2f}"
        five += f" and {base['best_of_5'].iloc[0]:.2f}"
    title += f"; the best of five at {five}"
    question = "What does a method reach when 1, 5 or 20 settings may be tried? Final sampled success; 95 % intervals over worlds."
    handles = [
        Line2D([], [], color="#444444", marker=MARKS[k], linestyle="none", markersize=7, label=f"best of {k}")
        for k in BEST_OF
    ]
    shares = {
        column: f"settings above\n{name}"
        for column, name in (("above_token_ppo", "token PPO"), ("above_null", _best_null(table)))
        if column in table
    }
    with style():
        source = source_of(metrics, [REGIME], list(table["method"]))
        fig = page(title, question, source, 0.3 * len(table) + 0.7, handles)
        axes = fig.subplots(
            1, 1 + len(shares), sharey=True, squeeze=False, width_ratios=(2, *[1] * len(shares))
        )[0]
        for y, row in table.iterrows():
            color = metrics.look(row["method"]).color
            for k in BEST_OF:
                axes[0].plot(
                    row[f"best_of_{k}"], y, marker=MARKS[k], color=color, markersize=7, linestyle="none"
                )
                if k < max(BEST_OF):
                    ends = [row[f"best_of_{k}_low"], row[f"best_of_{k}_high"]]
                    axes[0].plot(ends, [y, y], color=color, linewidth=1.6, alpha=0.6, zorder=1)
            for ax, column in zip(axes[1:], shares, strict=True):
                if not np.isnan(row[column]):
                    ax.plot(row[column], y, "o", color=color, markersize=6)
                    ends = [row[f"{column}_low"], row[f"{column}_high"]]
                    ax.plot(ends, [y, y], color=color, linewidth=1.6, zorder=1)
        axes[0].set(xlim=(0, 1), xlabel="final success, sampled", ylim=(len(table) - 0.5, -0.5))
        for ax, name in zip(axes[1:], shares.values(), strict=True):
            ax.axvline(0.5, color="#777777", linewidth=1, linestyle=(0, (1, 2)))
            ax.set(xlim=(0, 1), xticks=(0, 0.5, 1))
            ax.set_xlabel(name, fontsize=8.5)
        axes[0].set_yticks(
            range(len(table)),
            [
                row["label"]
                + " (plain)" * row["null"]
                + f" ({row['points']} of {len(points())})" * (not row["complete"])
                for _, row in table.iterrows()
            ],
        )
        for ax in axes:
            ax.tick_params(axis="y", length=0, labelsize=8.5)
            ax.grid(axis="y", visible=False)
    caption = (
        f"{question} Every method was run at the same {len(points())} settings, its own knob drawn from its declared prior. "
        "Right: the share of these settings at which a method ends above another, ties half, with an interval that has a width at "
        "0 and 1 too. Plain: a remedy without a theory, which every method must beat."
    )
    return Plot("leaderboard", fig, table, caption, title=title)


def _best_null(table: pd.DataFrame) -> str:
    """Label of the plain remedy that the column above_null compares with."""
    nulls = table[table["null"]]
    return nulls.sort_values(["points", "best_of_5"])["label"].iloc[-1] if len(nulls) else ""


def tolerance_figure(metrics: Metrics) -> Plot:
    """Final success of every run against the intensity of its setting, with the smoothed curve; token PPO's in grey."""
    runs = metrics.summary[metrics.summary["regime"] == REGIME]
    methods = in_order(runs["algorithm"])
    table = points().set_index("point")
    intensity = table["learning_rate"] * table["epochs"]
    at = np.geomspace(intensity.min(), intensity.max(), 40)
    curves = {name: tolerance_curve(runs[runs["algorithm"] == name], at) for name in methods}
    counts = runs["algorithm"].value_counts()
    whole = [name for name in methods if counts[name] == len(table)] or methods
    strongest = {name: curves[name][-8:].mean() for name in whole}  # the last fifth, on the logarithm
    best = max(strongest, key=strongest.__getitem__)
    title = f"Over the last fifth of the axis {metrics.look(best).label}'s curve is highest, {strongest[best]:.2f} on average"
    if BASELINE in strongest and best != BASELINE:
        title += f"; token PPO's is at {strongest[BASELINE]:.2f}"
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
            seen = (at >= 0.999 * x.min()) & (at <= 1.001 * x.max())
            ax.plot(at[seen], curves[name][seen], color=its.color, linewidth=2)
            part = "" if name in whole else f" ({counts[name]} of {len(table)})"
            ax.set_title(its.label + part, fontsize=8.5, color=its.color, fontweight="bold")
            ax.set(xscale="log", ylim=(0, 1))
            ax.tick_params(labelsize=7.5)
            worlds = mine["world_seed"].to_numpy()
            rows.append(
                pd.DataFrame(
                    {"x": x, "value": mine["final"], "world": worlds, "kind": "run", "algorithm": name}
                )
            )
            curve = {"x": at[seen], "value": curves[name][seen], "kind": "curve", "algorithm": name}
            rows.append(pd.DataFrame(curve))
        for ax in axes[max(0, len(methods) - n_columns) : len(methods)]:  # the lowest of each column
            ax.tick_params(labelbottom=True)
            ax.set_xlabel("learning rate × epochs", fontsize=7.5)
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
    title = f"{sentence(metrics.look(safest).label)} ends below its start at {counts[safest]} of {len(order)} settings"
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


def ingredients(metrics: Metrics) -> list[tuple[str, str, str]]:
    """Those of `INGREDIENTS` of which both methods were run at every point."""
    table = leaderboard(metrics)
    whole = set(table.loc[table["complete"], "method"])
    return [row for row in INGREDIENTS if {row[1], row[2]} <= whole]


def ingredients_figure(metrics: Metrics) -> Plot:
    """What each ingredient adds at the same settings: mean difference in final success, with its interval alone, and with the
    one that holds for all of them at once, by which the title counts."""
    shown = ingredients(metrics)
    rows = [
        {"ingredient": text, "with": one, "without": other} | difference(metrics, one, other, len(shown))
        for text, one, other in shown
    ]
    data = pd.DataFrame(rows).sort_values("mean", ascending=False, kind="stable", ignore_index=True)
    told = data[(data["joint_low"] > 0) | (data["joint_high"] < 0)]
    title = f"{len(told)} of {len(data)} ingredients change the result by more than chance"
    if (most := data["mean"].idxmax()) in told.index:
        row = data.loc[most]
        title += f"; most: {row['ingredient']}, +{row['mean']:.2f}"
    question = "What does each ingredient add at the same settings? Difference in final sampled success, with intervals over worlds."
    handles = [
        Line2D([], [], color="#444444", linewidth=width, label=label)
        for width, label in ((2.4, "95 %, of one alone"), (1, f"95 %, of all {len(data)} at once"))
    ]
    with style():
        methods = in_order({*data["with"], *data["without"]})
        source = source_of(metrics, [REGIME], methods)
        fig = page(title, question, source, 0.34 * len(data) + 0.7, handles)
        ax = fig.subplots()
        for y, row in data.iterrows():
            color = metrics.look(row["with"]).color
            ax.plot([row["joint_low"], row["joint_high"]], [y, y], color=color, linewidth=1)
            ax.plot([row["mean_low"], row["mean_high"]], [y, y], color=color, linewidth=2.4)
            ax.plot(row["mean"], y, "o", color=color, markersize=7)
        ax.axvline(0, color="#777777", linewidth=1, linestyle=(0, (1, 2)))
        ax.set(ylim=(len(data) - 0.5, -0.5), xlabel="higher final success, sampled")
        ax.set_yticks(range(len(data)), data["ingredient"], fontsize=9)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
    caption = (
        f"{question} Two methods at each of the {len(points())} settings, in the same world and from the same warm start; "
        f"each has its own knob drawn. The title counts by the thin lines, which hold for all {len(data)} at once (Bonferroni)."
    )
    return Plot("benchmark_ingredients", fig, data, caption, title=title)


def confirmation_figure(metrics: Metrics) -> Plot:
    """Every method's best setting again in worlds that no setting used: what it ended at there, and where it was chosen."""
    summary, rows = metrics.summary, []
    for name in leaderboard(metrics)["method"]:
        fresh = summary[(summary["regime"] == CONFIRMATION) & (summary["algorithm"] == name)]
        if len(fresh):
            mine = metrics.arm(REGIME, name)
            chosen = mine.set_index("seed")["final"][best_point(mine)]
            rows += [
                {"algorithm": name, "world": w, "final": v, "chosen": chosen}
                for w, v in zip(fresh["world_seed"], fresh["final"], strict=True)
            ]
    data = pd.DataFrame(rows)
    means = data.groupby("algorithm", sort=False)[["final", "chosen"]].mean()
    means = means.sort_values("final", ascending=False, kind="stable")
    spread = means["final"].iloc[0] - means["final"].iloc[-1]
    near = (means["final"] >= means["final"].iloc[0] - 0.05).sum()
    title = (
        f"At its best setting, {near} of {len(means)} methods end within 0.05 of the first in fresh worlds"
    )
    question = "Does each method's best setting hold in worlds that no setting used? Final sampled success."
    handles = [
        Line2D([], [], color="#444444", marker="o", linestyle="none", markersize=4, label="a fresh world"),
        Line2D([], [], color="#444444", marker="|", linestyle="none", markersize=9, label="their mean"),
        Line2D([], [], color="#444444", marker="x", linestyle="none", markersize=5, label="where chosen"),
    ]
    with style():
        source = source_of(metrics, [CONFIRMATION], list(means.index))
        fig = page(title, question, source, 0.26 * len(means) + 0.7, handles)
        ax = fig.subplots()
        for y, (name, row) in enumerate(means.iterrows()):
            color = metrics.look(name).color
            worlds = data.loc[data["algorithm"] == name, "final"]
            ax.plot(worlds, np.full(len(worlds), y), "o", color=color, markersize=4, alpha=0.7)
            ax.plot(row["final"], y, "|", color=color, markersize=11, markeredgewidth=2)
            ax.plot(row["chosen"], y, "x", color="#444444", markersize=5)
        ax.set(xlim=(0, 1), ylim=(len(means) - 0.5, -0.5), xlabel="final success, sampled")
        ax.set_yticks(range(len(means)), [metrics.look(name).label for name in means.index], fontsize=8.5)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
    caption = (
        f"{question} The best of {len(points())} settings was chosen by its final success, so the cross is too high on "
        f"average: {means['chosen'].mean():.2f} where chosen, {means['final'].mean():.2f} in fresh worlds. First and last "
        f"method differ by {spread:.2f} there."
    )
    return Plot("benchmark_confirmation", fig, data, caption, title=title)
