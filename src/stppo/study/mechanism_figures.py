"""What moves before a collapse: gradient spikes, and lead times of every signal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stppo.results.captions import describe_setting
from stppo.results.drawing import WIDTH, PlainLog, frame
from stppo.results.forest import INTERVALS
from stppo.results.statistics import CONFIDENCE
from stppo.results.style import Plot, look, style
from stppo.study import mechanism
from stppo.study.arms import FACTORIAL, MAIN
from stppo.study.comparisons import estimate
from stppo.study.outcomes import TABLE_DRAWS, Arm, Study
from stppo.study.words import capital

_CASE = {"markersize": 8, "alpha": 0.95, "markeredgecolor": "white", "markeredgewidth": 0.6}
_ALONE = {"markersize": 7, "markerfacecolor": "white", "markeredgewidth": 1.1, "linestyle": "none"}
_CONTROL = {"markersize": 4.5, "alpha": 0.4, "markeredgecolor": "white", "markeredgewidth": 0.6}


# --- spikes -----------------------------------------------------------------------------------
def spike_scores(study: Study, arms: Sequence[Arm]) -> pd.DataFrame:
    """One row per collapsed run, and per run of its arm scored at that time: algorithm, seed, kind, time, score."""
    rows = []
    for arm in arms:
        runs = study.runs(arm)
        ends = {run["seed"]: study.collapse_iteration(run) for run in runs.values()}
        window = math.ceil(study.horizon(arm.regime) / 10) if runs else 0
        frames = {run["seed"]: study.iterations(run) for run in runs.values()}
        for seed, end in ends.items():
            if not math.isfinite(end):
                continue
            for other, its_end in ends.items():
                if other == seed or its_end > end + 2 * window:
                    score = mechanism.spike_score(frames[other], end, window)
                    rows.append(
                        [arm.algorithm, other, "collapsed" if other == seed else "control", end, score]
                    )
    table = pd.DataFrame(rows, columns=["algorithm", "seed", "kind", "time", "score"])
    return table.dropna(subset="score").drop_duplicates(ignore_index=True)


def spikes_figure(study: Study) -> Plot | None:
    """Spike scores of collapsed runs beside those of runs of their arm that survive them, PPO without stabiliser."""
    arms = [Arm(MAIN, name) for name in FACTORIAL.values()]
    arms = [arm for arm in arms if study.runs(arm)]
    if not arms or "gradient_norm_max" not in study.metrics.iterations:
        return None
    scores = spike_scores(study, arms)
    if scores.empty:
        return None
    aucs, alone, rng = [], 0, np.random.default_rng(0)
    top = 2 * scores["score"].where(np.isfinite(scores["score"])).max()  # where an infinite norm is drawn
    with style():
        fig = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        ax = fig.subplots()
        ticks = []
        for x, arm in enumerate(arms):
            mine = scores[scores["algorithm"] == arm.algorithm]
            compared = mine["time"].isin(mine.loc[mine["kind"] == "control", "time"])
            alone += int((~compared).sum())
            color = look(arm.algorithm).color
            for chosen, shift, marker, look_ in (
                ((mine["kind"] == "collapsed") & compared, -0.14, "X", _CASE | {"color": color}),
                ((mine["kind"] == "collapsed") & ~compared, -0.14, "X", _ALONE | {"markeredgecolor": color}),
                (mine["kind"] == "control", 0.14, "o", _CONTROL | {"color": color}),
            ):
                values = mine.loc[chosen, "score"].to_numpy().clip(max=top)
                place = x + shift + rng.uniform(-0.07, 0.07, len(values))
                ax.plot(place, values, marker, **look_)
            found = estimate(lambda chosen: mechanism.spike_auc(study, [chosen], n_draws=TABLE_DRAWS), arm)
            words = "no controls"
            if found is not None:
                low, high = found.interval(CONFIDENCE)
                words = (
                    f"AUC {found.value:.2f} [{low:.2f}, {high:.2f}]"
                    if math.isfinite(low)
                    else f"AUC {found.value:.2f}"
                )
                words += "\n{} collapses, {} controls".format(*found.n_runs)
                aucs.append([arm.algorithm, found.value, low, high, *found.n_runs])
            ticks.append(f"{look(arm.algorithm).label.replace(', ', chr(10))}\n{words}")
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(PlainLog())
        ax.yaxis.set_minor_formatter(PlainLog(minor_thresholds=(1.2, 0.5)))
        ax.set_xticks(range(len(arms)), ticks)
        ax.set(
            xlim=(-0.5, len(arms) - 0.5),
            ylabel="largest gradient norm before the collapse\n/ median norm earlier in the run",
        )
        grey = {"color": "#777777", "linestyle": "none"}
        handles = [
            Line2D([], [], marker="X", markersize=8, label="run that collapses there", **grey),
            *[
                Line2D(
                    [],
                    [],
                    marker="X",
                    label="likewise, no run to compare with",
                    **_ALONE | {"markeredgecolor": "#777777"},
                )
            ]
            * bool(alone),
            Line2D(
                [],
                [],
                marker="o",
                markersize=5,
                alpha=0.6,
                label="run of the arm not collapsed two tenths later, same iterations",
                **grey,
            ),
        ]
        frame(fig, "Do gradient spikes go with collapse?", study.metrics, [MAIN], handles)
    what = (
        f"PPO without stabiliser, regime {MAIN}. Spike score: largest gradient norm of an update in the tenth of training up to "
        "the collapse, over the run's median before. Each collapsed run is compared with the runs of its arm that have not "
        "collapsed two tenths later, scored over the same iterations; the AUC is the chance that the collapsed run has the "
        "higher score (0.5: no relation)."
        + " An infinite norm is drawn at twice the highest finite score."
        * bool(np.isinf(scores["score"]).any())
        + f" Our own measurement: {describe_setting(study.metrics, [MAIN])}."
    )
    columns = ["algorithm", "auc", "low", "high", "collapsed", "controls"]
    return Plot("spikes", fig, scores, what, {"auc": pd.DataFrame(aucs, columns=columns)})


# --- lead times -------------------------------------------------------------------------------
def mechanism_figure(study: Study, regime: str = MAIN, algorithm: str = "token_ppo") -> Plot | None:
    """Lead of every signal over the collapse, run by run, beside how often survivors leave the same range."""
    arm = Arm(regime, algorithm)
    table = mechanism.departures(study, arm)
    leads = mechanism.lead_table(table) if len(table) else table
    if leads.empty:
        return None
    color, rng = look(algorithm).color, np.random.default_rng(0)
    with style():
        fig = Figure(figsize=(WIDTH, 1.9 + 0.36 * len(leads)), layout="constrained")
        left, right = fig.subplots(1, 2, sharey=True, width_ratios=[3, 1.4])
        for y, row in enumerate(leads.itertuples()):
            dots = table[(table["signal"] == row.signal) & table["collapse"].notna()]["lead"].to_numpy()
            left.plot(
                dots,
                y + rng.uniform(-0.2, 0.2, len(dots)),
                "o",
                color=color,
                markersize=4.5,
                alpha=0.4,
                markeredgewidth=0,
            )
            if math.isfinite(row.lead_high):
                left.plot([row.lead_low, row.lead_high], [y, y], color="#222222", linewidth=2.2, zorder=3)
            left.plot([row.lead_mean], [y], "D", color="#222222", markersize=6, zorder=4)
            for shift, value, total, face in (
                (-0.17, row.departed, row.collapsed, color),
                (0.17, row.survivors_departed, row.survivors, "white"),
            ):
                if total:
                    right.barh(y + shift, value / total, 0.3, facecolor=face, edgecolor=color, linewidth=1.1)
                    right.text(
                        value / total + 0.03,
                        y + shift,
                        f"{value}/{total}",
                        va="center",
                        fontsize=7.5,
                        color="#666666",
                    )
        left.set_yticks(range(len(leads)), leads["label"])
        left.set_ylim(len(leads) - 0.45, -0.55)
        left.set(xlabel="iterations from leaving its healthy range to the collapse (0: stays in range)")
        right.set(xlim=(0, 1.25), xlabel="share of runs that leave it", xticks=[0, 0.5, 1])
        for ax in (left, right):
            ax.tick_params(axis="y", length=0)
            ax.grid(axis="y", visible=False)
        handles = [
            Line2D([], [], marker="o", linestyle="none", color=color, alpha=0.5, label="a collapsed run"),
            Line2D([], [], marker="D", linestyle="-", color="#222222", label="mean, 95 % interval"),
            Line2D([], [], marker="s", linestyle="none", color=color, markersize=8, label="collapsed runs"),
            Line2D(
                [],
                [],
                marker="s",
                linestyle="none",
                color=color,
                markerfacecolor="white",
                markersize=8,
                label="survivors",
            ),
        ]
        frame(
            fig,
            f"What moves first: {look(algorithm).label}, regime {regime}",
            study.metrics,
            [regime],
            handles,
        )
    source = leads["reference"].iloc[0]
    n = int(leads["survivors"].max())
    few = (
        f"With {n} survivors their range is narrow and is left easily. "
        if source == "survivors" and n < 6
        else ""
    )
    what = (
        f"{capital(look(algorithm).label)}, regime {regime}. A signal's healthy range is that of "
        + (
            "the arm's survivors within two iterations of the same one (1st to 99th percentile; a survivor is held against the others)"
            if source == "survivors"
            else "the run's own first quarter"
        )
        + "; it leaves at the first of two consecutive iterations outside. "
        + "A signal that drifts from the first iteration on widens that range and may never leave it. "
        * (source != "survivors")
        + "What shows in the sampled batches counts at the "
        "iteration whose weights sampled them. Right: how often it leaves before a collapse, and how "
        f"often in survivors: a signal that leaves there as often warns of nothing. {few}{INTERVALS} "
        f"Our own measurement: {describe_setting(study.metrics, [regime])}."
    )
    return Plot("mechanism", fig, table, what, {"leads": leads})
