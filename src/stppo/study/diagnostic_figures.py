"""What the reviewers asked to see of every variant: the critic's error, and trends of the norms run by run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from stppo.results import resampling
from stppo.results.captions import caption, describe_setting
from stppo.results.drawing import (
    WIDTH,
    Panel,
    collapse_handle,
    draw_panel,
    frame,
    from_zero,
    line_handles,
    with_curves,
)
from stppo.results.forest import INTERVALS
from stppo.results.resampling import Replicate
from stppo.results.runs import Metrics
from stppo.results.statistics import CONFIDENCE, REPETITIONS, log_linear_trend
from stppo.results.style import Plot, in_order, look, style
from stppo.study import mechanism
from stppo.study.arms import FACTORIAL, MAIN, ON_POLICY, PPO_VARIANTS
from stppo.study.outcomes import TABLE_DRAWS, Arm, Study

NORMS = {
    "gradient_norm": "gradient norm",
    "ppo_gradient_norm": "PPO gradient norm",
    "clipping_bias_norm": "clipping-bias norm ‖C‖",
}
_TICKS = (
    0.1,
    0.2,
    0.3,
    0.5,
    0.7,
    0.8,
    0.9,
    1,
    1.1,
    1.2,
    1.4,
    1.7,
    2,
    3,
    5,
    10,
    20,
    50,
    100,
)  # where ticks may be
CRITIC_ERROR = Panel("critic_relative_error", "error of the critic's values\n(share of their spread)")


# --- the critic -------------------------------------------------------------------------------
def with_critic_error(metrics: Metrics) -> Metrics:
    """The metrics with the critic's error over the spread of the true values as a column more."""
    rows = metrics.iterations.reindex(
        columns=[*metrics.iterations, *({"critic_value_rmse", "true_value_std"} - {*metrics.iterations})]
    )
    ratio = rows["critic_value_rmse"] / rows["true_value_std"].where(rows["true_value_std"] > 0)
    return Metrics(
        metrics.runs, metrics.iterations.assign(**{CRITIC_ERROR.column: ratio}), metrics.evaluations
    )


def critic_errors(study: Study) -> pd.DataFrame:
    """Mean relative error of V per run before its collapse: regime, algorithm, warm start, seed, error."""
    rows = []
    for arm, runs in study.arms.items():
        for replicate, run in runs.items():
            frame = (
                study.iterations(run)
                .reindex(columns=["iteration", "critic_value_rmse", "true_value_std"])
                .dropna()
            )
            frame = frame[frame["iteration"] < study.collapse_iteration(run)]
            if len(frame):
                error = frame["critic_value_rmse"].mean() / frame["true_value_std"].mean()
                rows.append([*arm, *replicate, error])
    return pd.DataFrame(rows, columns=["regime", "algorithm", *Replicate._fields, "error"])


def critic_figure(study: Study, repetitions: int = REPETITIONS) -> Plot | None:
    """Error of V against Monte-Carlo values, off-policy and nearly on-policy."""
    errors = critic_errors(study)
    if errors.empty:
        return None
    metrics = with_critic_error(study.metrics)
    regimes = [r for r in with_curves(metrics) if r in set(errors["regime"])]
    names = in_order(
        set(errors.loc[errors["regime"].isin(regimes), "algorithm"]) & {*PPO_VARIANTS, *FACTORIAL.values()}
    )
    if not names:
        return None
    drawn: list[pd.DataFrame] = []
    with style():
        fig = Figure(figsize=(WIDTH, 4.1), layout="constrained")
        axes = list(fig.subplots(1, len(regimes) + 1, width_ratios=[*[2] * len(regimes), 1.5]))
        for ax, regime in zip(axes, regimes, strict=False):
            drawn += draw_panel(ax, CRITIC_ERROR, metrics, regime, names, repetitions)
            ax.set(title=f"regime {regime}", xlabel="iteration")
            if ax is not axes[0]:
                ax.set(ylabel="")
        top = max(ax.get_ylim()[1] for ax in axes[:-1])
        from_zero(axes[:-1])
        _pairs(axes[-1], errors, names)
        for ax in axes:  # one scale, and no point of the right panel above it
            ax.set_ylim(0, max(top, 1.05 * errors["error"].max()))
        handles = line_handles(names) + collapse_handle(metrics, regimes, names)
        frame(fig, "Is the critic further from the truth off-policy?", study.metrics, regimes, handles)
    what = (
        "Root mean squared error of the critic's values against Monte-Carlo values of the policy that sampled, over the spread of "
        "the true values (1: as bad as a constant). Right: mean over a run's own iterations before its collapse, a dot per run, a "
        "line per pair of one replicate (claim C7 compares the iterations that both of a pair have)."
    )
    what = caption(metrics, what, regimes, names)
    data = pd.concat(drawn, ignore_index=True) if drawn else errors
    return Plot("critic", fig, data, what, {"errors": errors})


def _pairs(ax: Axes, errors: pd.DataFrame, names: Sequence[str]) -> None:
    """Off-policy and nearly on-policy errors of each replicate, joined."""
    keys = list(Replicate._fields)
    for shift, name in enumerate(names):
        mine = errors[errors["algorithm"] == name]
        wide = mine.pivot_table(index=keys, columns="regime", values="error").reindex(
            columns=[ON_POLICY, MAIN]
        )
        x = np.array([0, 1]) + 0.07 * (shift - (len(names) - 1) / 2)
        for values in wide.to_numpy():
            ax.plot(x, values, "o-", color=look(name).color, markersize=4.5, linewidth=0.8, alpha=0.6)
    ax.set_xticks([0, 1], ["nearly\non-policy", "main"])
    ax.set(xlim=(-0.4, 1.4), title="before the collapse")


# --- trends -----------------------------------------------------------------------------------
def run_trends(study: Study, regime: str, algorithms: Sequence[str] = PPO_VARIANTS) -> pd.DataFrame:
    """Log-linear trend of every norm in every run up to its collapse: algorithm, replicate, metric, factor (per ten
    iterations), r_squared, points, collapsed. From the first iteration at full staleness."""
    rows = []
    for name in algorithms:
        for replicate, run in study.runs(Arm(regime, name)).items():
            frame = study.steady(run)
            for metric in NORMS:
                if metric not in frame:
                    continue
                trend = log_linear_trend(frame["iteration"], frame[metric])
                if trend.n >= mechanism.MIN_POINTS:
                    factor = math.exp(10 * trend.slope)
                    rows.append(
                        [
                            regime,
                            name,
                            *replicate,
                            metric,
                            factor,
                            trend.r_squared,
                            trend.n,
                            bool(study.collapsed(run) == 1),
                        ]
                    )
    columns = [
        "regime",
        "algorithm",
        *Replicate._fields,
        "metric",
        "factor",
        "r_squared",
        "points",
        "collapsed",
    ]
    return pd.DataFrame(rows, columns=columns)


def trend_table(trends: pd.DataFrame) -> pd.DataFrame:
    """Per algorithm and norm: runs, mean growth per ten iterations (geometric) with its interval, R² (median, range)."""
    rows = []
    for (name, metric), part in trends.groupby(["algorithm", "metric"], sort=False):
        keys = part[list(Replicate._fields)].itertuples(index=False, name=None)
        logs = dict(zip((Replicate(*map(int, key)) for key in keys), np.log(part["factor"]), strict=True))
        found = resampling.mean(logs, n_draws=TABLE_DRAWS)
        low, high = np.exp(found.interval(CONFIDENCE))
        r = part["r_squared"]
        rows.append([name, metric, len(part), math.exp(found.value), low, high, r.median(), r.min(), r.max()])
    columns = [
        "algorithm",
        "metric",
        "runs",
        "factor",
        "factor_low",
        "factor_high",
        "r_squared",
        "r_squared_min",
        "r_squared_max",
    ]
    return pd.DataFrame(rows, columns=columns)


def trends_figure(study: Study, regime: str = MAIN) -> Plot | None:
    """Q4: fig. 3 c-d for all variants: trend of the norms in every run, and how well it fits."""
    trends = run_trends(study, regime)
    if trends.empty:
        return None
    table = trend_table(trends)
    names = in_order(trends["algorithm"])
    metrics = [metric for metric in NORMS if metric in set(trends["metric"])]
    rng = np.random.default_rng(0)
    with style():
        fig = Figure(figsize=(WIDTH, 5.6), layout="constrained")
        axes = fig.subplots(2, len(metrics), squeeze=False, sharex=True, sharey="row")
        for j, metric in enumerate(metrics):
            for x, name in enumerate(names):
                part = trends[(trends["metric"] == metric) & (trends["algorithm"] == name)]
                place = x + rng.uniform(-0.15, 0.15, len(part))
                for i, column in enumerate(("factor", "r_squared")):
                    for collapsed, marker, size in ((False, "o", 4.5), (True, "X", 7)):
                        chosen = (part["collapsed"] == collapsed).to_numpy()
                        axes[i, j].plot(
                            place[chosen],
                            part[column][chosen],
                            marker,
                            color=look(name).color,
                            markersize=size,
                            alpha=0.55,
                            markeredgecolor="white",
                            markeredgewidth=0.5,
                        )
                row = table[(table["metric"] == metric) & (table["algorithm"] == name)]
                if len(row):
                    low, high = row[["factor_low", "factor_high"]].iloc[0]
                    if math.isfinite(low):
                        axes[0, j].plot([x + 0.28] * 2, [low, high], color="#222222", linewidth=1.8)
                    axes[0, j].plot([x + 0.28], row["factor"], "D", color="#222222", markersize=4.5)
            axes[0, j].axhline(1, color="#999999", linewidth=0.9, zorder=0)
            axes[0, j].set_title(NORMS[metric])
            axes[1, j].set_xticks(
                range(len(names)), [look(name).label.replace(" (", "\n(") for name in names], fontsize=7.5
            )
            axes[1, j].set_ylim(0, 1)
        axes[0, 0].set_yscale("log")
        low, high = axes[0, 0].get_ylim()
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axes[0, 0].set_yticks(ticks[:: math.ceil(len(ticks) / 8)], minor=False)
        axes[0, 0].yaxis.set_major_formatter("{x:g}")
        axes[0, 0].yaxis.set_minor_locator(NullLocator())
        axes[0, 0].set_ylabel("growth per ten iterations\n(factor)")
        axes[1, 0].set_ylabel("R² of the trend")
        grey = {"color": "#777777", "linestyle": "none"}
        handles = [
            Line2D([], [], marker="o", markersize=5, label="run that survives", **grey),
            Line2D([], [], marker="X", markersize=8, label="run that collapses", **grey),
            Line2D([], [], marker="D", color="#222222", linestyle="-", label="mean, 95 % interval"),
        ]
        frame(fig, f"Trends of the norms, run by run, regime {regime}", study.metrics, [regime], handles)
    what = (
        f"Log-linear trend of each run's norms from full staleness to its collapse or end, regime {regime}: growth per ten "
        "iterations and its goodness of fit. A trend with a low R² describes little, whatever its slope; points of a curve are "
        f"correlated, so R² is no test. {INTERVALS} Our own measurement: {describe_setting(study.metrics, [regime])}."
    )
    return Plot("trends", fig, trends, what, {"summary": table})
