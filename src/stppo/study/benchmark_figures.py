"""The benchmark's pictures: what a method reaches with a tuning budget, how far it can be pushed, and where
it fails."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from scipy import stats

from stppo.config.algorithms import in_order
from stppo.figures.curves import INK, SOFT, name_rows, page, source_of
from stppo.figures.style import GRANULARITY_COLORS, Plot, style
from stppo.figures.words import capital, signed
from stppo.record.runs import Metrics
from stppo.record.tidy import BASELINE, Runs
from stppo.study.beginnings import EARLY
from stppo.study.benchmark import (
    BEST_OF,
    CONFIRMATION,
    REGIME,
    best_point,
    difference,
    intensity,
    points,
)

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
    ("TOPR in place of REINFORCE", "topr", "reinforce"),  # the mean differs too
    ("no push at failures grown unlikely, to GRPO", "sequence_mask", "grpo"),
)
MARKS = dict(zip(BEST_OF, ("|", "o", "D"), strict=True))
PUSH = "negative_advantage_gradient_share"
PART = 4  # a quarter of the methods: those that push least, those that end highest
COLORS = {f"{name} ratio": color for name, color in GRANULARITY_COLORS.items()}
COLORS |= {"sentence ratio": "#999999", "no clip": "#009E73"}  # of `tidy.family`
OTHER = "#CC79A7"


def pictures(metrics: Metrics, board: pd.DataFrame) -> list[Plot]:
    """All of them, in the order in which they are shown, those that need several methods or a confirmation
    where these were run. board: of `leaderboard`."""
    runs = metrics.all
    drawn = (draw(runs.of([REGIME]), board) for draw in (leaderboard_figure, failures_figure))
    more = (
        ingredients_figure(metrics, board),
        signals_figure(runs.of([REGIME]), board),
        confirmation_figure(runs, board),
    )
    return [plot for plot in (*drawn, *more) if plot is not None]


def leaderboard_figure(runs: Runs, board: pd.DataFrame) -> Plot:
    """Expected best of 1, 5 and 20 random settings, and how often a method ends above token PPO, and above
    the best plain remedy, at the same point."""
    best, base = board.iloc[0], board[board["method"] == BASELINE]
    title = f"A random setting of {best['label']} ends at {best['best_of_1']:.2f}"
    five = f"{best['best_of_5']:.2f}"
    if len(base) and best["method"] != BASELINE:
        title += f", token PPO's at {base['best_of_1'].iloc[0]:.2f}"
        five += f" and {base['best_of_5'].iloc[0]:.2f}"
    title += f"; the best of five at {five}"
    question = (
        "What does a method reach when 1, 5 or 20 settings may be tried? Final sampled success; 95 % "
        "intervals over worlds."
    )
    nulls = board[board["null"]].sort_values(["points", "best_of_5"])
    shares = {"above_token_ppo": "settings above\ntoken PPO"}
    shares["above_null"] = f"settings above\n{nulls['label'].iloc[-1] if len(nulls) else ''}"
    shares = {column: text for column, text in shares.items() if column in board}
    families = runs.looks["family"]
    handles = [
        Line2D([], [], color="#444444", marker=MARKS[k], linestyle="none", markersize=7, label=f"best of {k}")
        for k in BEST_OF
    ]
    handles += _family_handles(families)
    with style():
        fig = page(title, question, source_of(runs), 0.26 * len(board) + 0.7, handles)
        widths = (2, *[1] * len(shares))
        axes = fig.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
        for y, row in board.iterrows():
            color = COLORS.get(families[row["method"]], OTHER)
            for k in BEST_OF:
                axes[0].plot(
                    row[f"best_of_{k}"], y, marker=MARKS[k], color=color, markersize=7, linestyle="none"
                )
            for k in BEST_OF[:-1]:
                _interval(axes[0], row, f"best_of_{k}", y, color, alpha=0.6)
            for ax, column in zip(axes[1:], shares, strict=True):
                ax.plot(row[column], y, "o", color=color, markersize=6)
                _interval(ax, row, column, y, color)
        axes[0].set(xlim=(0, 1), xlabel="final success, sampled")
        for ax, name in zip(axes[1:], shares.values(), strict=True):
            ax.axvline(0.5, color=SOFT, linewidth=1, linestyle=(0, (1, 2)))
            ax.set(xlim=(0, 1), xticks=(0, 0.5, 1))
            ax.set_xlabel(name, fontsize=8.5)
        name_rows(axes[0], _labels(board), 8.5)
        for ax in axes:
            ax.tick_params(axis="y", length=0)
            ax.grid(axis="y", visible=False)
    caption = (
        f"{question} Every method was run at the same {len(points())} settings, its own knob drawn from its "
        "declared prior. Right: the share of these settings at which a method ends above another, ties half, "
        "with an interval that has a width at 0 and 1 too. Plain: a remedy without a theory, which every "
        "method must beat. Colours: what the clip's ratio is of."
    )
    return Plot("leaderboard", fig, board, caption, title=title)


def _interval(ax: Axes, row: pd.Series, column: str, y: float, color: str, **look: float) -> None:
    ax.plot(
        [row[f"{column}_low"], row[f"{column}_high"]], [y, y], color=color, linewidth=1.6, zorder=1, **look
    )


def _family_handles(families: pd.Series) -> list[Line2D]:
    known = [name for name in COLORS if name in set(families)]
    dots = {name: COLORS[name] for name in known} | ({"other": OTHER} if set(families) - set(COLORS) else {})
    return [
        Line2D([], [], color=color, marker="s", linestyle="none", label=name) for name, color in dots.items()
    ]


def _labels(board: pd.DataFrame) -> list[str]:
    """Names of the methods, with what is plain and what is not whole."""
    return [
        row.label + " (plain)" * row.null + f" ({row.points} of {len(points())})" * (not row.complete)
        for row in board.itertuples()
    ]


def _whole(board: pd.DataFrame) -> list[str]:
    """The methods that titles compare: those that were run at every point or, without any, all."""
    return list(board.loc[board["complete"], "method"]) or list(board["method"])


def failures_figure(runs: Runs, board: pd.DataFrame) -> Plot:
    """Final success of every method at every point, points by intensity; a cross where it ends below where it
    began."""
    strength = intensity().sort_values(kind="stable")
    data = runs.runs.assign(lost=runs.runs["final"] < runs.runs["start"])
    data = data[["algorithm", "seed", "start", "final", "lost"]]
    wide, lost = (
        data.pivot(index="algorithm", columns="seed", values=name).reindex(
            index=board["method"], columns=strength.index
        )
        for name in ("final", "lost")
    )
    counts = data.groupby("algorithm")["lost"].sum()[_whole(board)]
    safest = counts.idxmin()
    title = (
        f"{capital(runs.looks.loc[safest, 'label'])} ends below its start at {counts[safest]} of "
        f"{len(strength)} settings"
    )
    if BASELINE in counts and safest != BASELINE:
        title += f", token PPO at {counts[BASELINE]}"
    question = (
        "Where does each method fail? Final sampled success at each setting, from gentle to strong; × ends "
        "below its start."
    )
    with style():
        fig = page(title, question, source_of(runs), 0.24 * len(board) + 1.5)
        ax = fig.subplots()
        bar = {"label": "final success, sampled", "shrink": 0.8, "pad": 0.01}
        sns.heatmap(wide.astype(float), vmin=0, vmax=1, cmap="YlGnBu", cbar_kws=bar, ax=ax)
        names = runs.looks.loc[board["method"], "label"]
        ax.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=8.5, rotation=0)
        ax.set(ylabel="")
        ax.tick_params(length=0)
        y, x = np.nonzero(lost.eq(True).to_numpy())
        ax.plot(x + 0.5, y + 0.5, "x", color="#C0392B", markersize=4, markeredgewidth=1.1, linestyle="none")
        shown = np.arange(0, len(strength), 3)
        ax.set_xticks(shown + 0.5, [f"{1e3 * strength.iloc[i]:.2g}" for i in shown], fontsize=8, rotation=0)
        ax.set_xlabel("learning rate × epochs, in thousandths")
    caption = f"{question} Methods in the order of the leaderboard; empty cells are not run yet."
    return Plot("benchmark_failures", fig, data.rename(columns={"seed": "point"}), caption, title=title)


def ingredients_figure(metrics: Metrics, board: pd.DataFrame) -> Plot | None:
    """What each ingredient adds at the same settings: mean difference in final success, with its interval
    alone, and with the one that holds for all of them at once, by which the title counts. None where of no
    ingredient both methods are whole."""
    whole = set(board.loc[board["complete"], "method"])
    shown = [row for row in INGREDIENTS if {row[1], row[2]} <= whole]
    if not shown:
        return None
    rows = [
        {"ingredient": text, "with": one, "without": other} | difference(metrics, one, other, len(shown))
        for text, one, other in shown
    ]
    data = pd.DataFrame(rows).sort_values("mean", ascending=False, kind="stable", ignore_index=True)
    told = data[(data["joint_low"] > 0) | (data["joint_high"] < 0)]
    title = f"{len(told)} of {len(data)} ingredients change the result by more than chance"
    if (most := data["mean"].idxmax()) in told.index:
        title += f"; most: {data.loc[most, 'ingredient']}, {signed(data.loc[most, 'mean'])}"
    question = (
        "What does each ingredient add at the same settings? Difference in final sampled success, with "
        "intervals over worlds."
    )
    handles = [
        Line2D([], [], color="#444444", linewidth=width, label=label)
        for width, label in ((2.4, "95 %, of one alone"), (1, f"95 %, of all {len(data)} at once"))
    ]
    runs = metrics.all.of([REGIME], in_order({*data["with"], *data["without"]}))
    with style():
        fig = page(title, question, source_of(runs), 0.34 * len(data) + 0.7, handles)
        ax = fig.subplots()
        color = "#0061A8"
        ax.hlines(data.index, data["joint_low"], data["joint_high"], color=color, linewidth=1)
        ax.hlines(data.index, data["mean_low"], data["mean_high"], color=color, linewidth=2.4)
        ax.plot(data["mean"], data.index, "o", color=color, markersize=7, linestyle="none")
        ax.axvline(0, color=SOFT, linewidth=1, linestyle=(0, (1, 2)))
        ax.set_xlabel("higher final success, sampled")
        name_rows(ax, data["ingredient"])
        ax.grid(axis="y", visible=False)
    caption = (
        f"{question} Two methods at each of the {len(points())} settings, in the same world and from the "
        "same warm start; each has its own knob drawn. The title counts by the thin lines, which hold for "
        f"all {len(data)} at once (Bonferroni)."
    )
    return Plot("benchmark_ingredients", fig, data, caption, title=title)


def signals_of_methods(runs: Runs, board: pd.DataFrame) -> pd.DataFrame:
    """One row per method that was run at every point, the highest first: method, label, final (sampled
    success, mean over points), push (share of the gradient, by |d loss / d log-prob|, on tokens with A < 0;
    mean over points and over the first `EARLY` iterations) and entropy_change (nats; the tenth iteration's
    less the first's, mean over points)."""
    rows = runs.rows.reindex(columns=["algorithm", "iteration", PUSH, "entropy"])
    rows = rows[rows["iteration"].between(1, EARLY)]
    push = rows.groupby("algorithm")[PUSH].mean()
    entropy = rows.pivot_table(index="algorithm", columns="iteration", values="entropy").reindex(
        columns=[1, EARLY]
    )
    whole = board.loc[board["complete"], ["method", "label", "best_of_1"]].rename(
        columns={"best_of_1": "final"}
    )
    return whole.assign(
        push=push.reindex(whole["method"]).to_numpy(),
        entropy_change=(entropy[EARLY] - entropy[1]).reindex(whole["method"]).to_numpy(),
    ).reset_index(drop=True)


def signals_figure(runs: Runs, board: pd.DataFrame) -> Plot | None:
    """Where methods end, beside how much of their gradient pushes failures down, and how their entropy moves;
    None where fewer than `PART` methods were run at every point or the signals were not recorded."""
    table = signals_of_methods(runs, board).dropna().reset_index(drop=True)
    if len(table) < PART:
        return None
    few = -(-len(table) // PART)
    both = len(set(table.nsmallest(few, "push")["method"]) & set(table.head(few)["method"]))
    title = (
        f"Of the {few} method{'s' if few > 1 else ''} that push least at failures, {both} "
        f"{'is' if both == 1 else 'are'} among the "
        f"{few} that end highest (by chance {few * few / len(table):.1f})"
    )
    question = (
        "What do methods that tolerate old data have in common? Means over the settings; signals of the "
        f"first {EARLY} iterations."
    )
    panels = {
        "final": "final success, sampled",
        "push": "share of the gradient\nfrom failures (A < 0)",
        "entropy_change": f"entropy after {EARLY} iterations,\nless the first's (nats)",
    }
    families = runs.looks["family"]
    colors = [COLORS.get(families[name], OTHER) for name in table["method"]]
    with style():
        fig = page(
            title,
            question,
            source_of(runs),
            0.2 * len(table) + 0.9,
            _family_handles(families[table["method"]]),
        )
        for ax, (name, label) in zip(fig.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
            ax.hlines(table.index, 0, table[name], color="#D5D5D5", linewidth=1, zorder=1)
            ax.scatter(table[name], table.index, c=colors, s=34, zorder=3)
            ax.set_xlabel(label, fontsize=8.5)
            if name != "final":
                rank = stats.spearmanr(table[name], table["final"]).statistic
                ax.set_title(f"rank correlation {signed(rank)}", fontsize=9.5, color="#333333")
            ax.axvline(0, color="#BBBBBB", linewidth=0.8)
            ax.tick_params(axis="y", length=0)
            ax.grid(axis="y", visible=False)
        name_rows(fig.axes[0], table["label"], 8.5)
    caption = (
        f"{question} Middle: of the sum of |d loss / d log-prob| over tokens, the part on tokens with a "
        "negative advantage. Rank "
        "correlations are with final success. This says what goes along with tolerance, not what causes it."
    )
    return Plot("benchmark_signals", fig, table, caption, title=title)


def confirmation_figure(runs: Runs, board: pd.DataFrame) -> Plot | None:
    """Every method's best setting again in worlds that no setting used: what it ended at there, and where it
    was chosen. None where no method has been run there."""
    fresh, tried = (runs.of([regime]).runs for regime in (CONFIRMATION, REGIME))
    if fresh.empty:
        return None
    parts = []
    for name in board.loc[board["method"].isin(fresh["algorithm"]), "method"]:
        mine = tried[tried["algorithm"] == name]
        chosen = mine.set_index("seed")["final"][best_point(mine)]
        its = fresh[fresh["algorithm"] == name]
        part = {"algorithm": name, "world": its["world_seed"], "final": its["final"], "chosen": chosen}
        parts.append(pd.DataFrame(part))
    data = pd.concat(parts, ignore_index=True)
    means = data.groupby("algorithm", sort=False)[["final", "chosen"]].mean()
    means = means.sort_values("final", ascending=False, kind="stable")
    first, last = means["final"].iloc[[0, -1]]
    near = (means["final"] >= first - 0.05).sum()
    title = (
        f"At its best setting, {near} of {len(means)} methods end within 0.05 of the first in fresh worlds"
    )
    question = "Does each method's best setting hold in worlds that no setting used? Final sampled success."
    handles = [
        Line2D([], [], color="#444444", marker=mark, linestyle="none", markersize=size, label=label)
        for mark, size, label in (("o", 4, "a fresh world"), ("|", 9, "their mean"), ("x", 5, "where chosen"))
    ]
    with style():
        fig = page(title, question, source_of(runs.of([CONFIRMATION])), 0.26 * len(means) + 0.7, handles)
        ax = fig.subplots()
        places = {name: y for y, name in enumerate(means.index)}
        ax.plot(
            data["final"],
            data["algorithm"].map(places),
            "o",
            color="#0061A8",
            markersize=4,
            alpha=0.6,
            linestyle="none",
        )
        rows = range(len(means))
        ax.plot(means["final"], rows, "|", color=INK, markersize=11, markeredgewidth=2, linestyle="none")
        ax.plot(means["chosen"], rows, "x", color="#444444", markersize=5, linestyle="none")
        ax.set(xlim=(0, 1), xlabel="final success, sampled")
        name_rows(ax, runs.looks.loc[means.index, "label"], 8.5)
        ax.grid(axis="y", visible=False)
    caption = (
        f"{question} The best of {len(points())} settings was chosen by its final success, so the cross is "
        f"too high on average: {means['chosen'].mean():.2f} where chosen, {means['final'].mean():.2f} in "
        f"fresh worlds. First and last method differ by {first - last:.2f} there."
    )
    return Plot("benchmark_confirmation", fig, data, caption, title=title)
