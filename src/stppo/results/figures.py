"""The figures, each drawn from recorded metrics alone.

Each function takes `Metrics` and returns a `Plot`, or None where the runs it needs do not exist.
Columns of a figure are regimes. "Fig. n" refers to the figure of the paper's first version that
asks the same question; what is drawn is always our own measurement.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stppo.results.captions import caption
from stppo.results.drawing import (
    WIDTH,
    Panel,
    collapse_handle,
    curves_of,
    draw_panel,
    frame,
    from_zero,
    grid,
    line_handles,
    plotted_data,
    start_handle,
    with_curves,
)
from stppo.results.runs import Metrics
from stppo.results.statistics import REPETITIONS, log_linear_trend
from stppo.results.style import Plot, in_order, look, style
from stppo.study.arms import FACTORIAL, PPO_VARIANTS, variant

GRPO_VARIANTS = ("grpo", "so_grpo", "so_grpo_ctn", "gspo")
LADDERS = {  # without stabiliser, the ratio from token to turn to sequence
    "PPO": {"token": "token_ppo", "turn": "turn_ppo"},
    "GRPO": {"token": "grpo", "turn": "turn_grpo", "sequence": "gspo"},
}

SUCCESS = Panel("success", "sampled success")
GREEDY = Panel("success_greedy", "greedy success")
CLIP = Panel("clip_fraction", "clip fraction\n(sign-aware)")
OUT_OF_RANGE = Panel("out_of_range_fraction", "out-of-range\nfraction")
KL = Panel("kl_behaviour_k3", "KL to behaviour\n(nats per token)", log=True)
GRADIENT = Panel("gradient_norm", "gradient norm", log=True)
PPO_GRADIENT = Panel("ppo_gradient_norm", "PPO gradient norm", log=True)
BIAS = Panel("clipping_bias_norm", "clipping-bias norm ‖C‖", log=True)
VARIANCE = Panel("advantage_variance", "advantage variance\n(before whitening)")
ENTROPY = Panel("entropy", "entropy (nats)")
FORMAT = Panel("valid_format_rate", "valid-format rate")


def _others(metrics: Metrics, critic: bool) -> list[str]:
    """Algorithms that no list above names, such as a reader's own, with or without a trained critic."""
    names = set(metrics.algorithms()) - {*PPO_VARIANTS, *GRPO_VARIANTS, *FACTORIAL.values()}
    names = {name for name in names if not variant(name)}
    losses = metrics.iterations.reindex(columns=["algorithm", "critic_loss"]).dropna()
    return in_order(name for name in names if (name in set(losses["algorithm"])) == critic)


def ppo_variants(metrics: Metrics) -> list[str]:
    """Token PPO, its three stabilised variants, and any other algorithm with a critic."""
    return [*PPO_VARIANTS, *_others(metrics, critic=True)]


def grpo_variants(metrics: Metrics) -> list[str]:
    """GRPO, its variants, GSPO, and any other algorithm without a critic."""
    return [*GRPO_VARIANTS, *_others(metrics, critic=False)]


def collapse_figure(metrics: Metrics) -> Plot | None:
    """Fig. 2: token PPO seed by seed, success above the spread of its raw advantages."""
    return grid(
        metrics,
        "collapse",
        "Token-level PPO, seed by seed",
        "Token PPO: success on held-out questions, variance of the raw advantages, entropy and share of "
        "well-formed turns. Each line is one run.",
        ("token_ppo",),
        (SUCCESS, VARIANCE, ENTROPY, FORMAT),
        individual=True,
    )


def stability_figure(metrics: Metrics, repetitions: int = REPETITIONS) -> Plot | None:
    """Fig. 4 (and 3a): success of the PPO variants, and of any other algorithm with a critic."""
    return grid(
        metrics,
        "stability",
        "Success of the PPO variants",
        "Success on fixed held-out questions, sampled (temperature 1) and greedy.",
        ppo_variants(metrics),
        (SUCCESS, GREEDY),
        repetitions,
    )


def clip_ratio_figure(metrics: Metrics, repetitions: int = REPETITIONS) -> Plot | None:
    """Fig. 5: clip fraction, its unsigned relative, and KL."""
    return grid(
        metrics,
        "clip_ratio",
        "How much the PPO variants clip",
        "Share of agent tokens whose term is clipped (sign-aware), share whose ratio leaves the clip range "
        "whatever its advantage, and KL(behaviour || policy); means over each iteration's updates. A turn-level "
        "clip takes a whole turn, so compare the trend within an algorithm, not levels across granularities.",
        ppo_variants(metrics),
        (CLIP, OUT_OF_RANGE, KL),
        repetitions,
    )


def so_grpo_figure(metrics: Metrics, repetitions: int = REPETITIONS) -> Plot | None:
    """The same questions for the methods without a critic."""
    return grid(
        metrics,
        "so_grpo",
        "Group-based variants",
        "Sampled success, gradient norm and sign-aware clip fraction of GRPO, of SO-GRPO under both readings of "
        "the second version, of GSPO, whose clip range is narrower by design, and of any other algorithm without a "
        "critic.",
        grpo_variants(metrics),
        (SUCCESS, GRADIENT, CLIP),
        repetitions,
    )


def diagnostics_figure(metrics: Metrics, regime: str, repetitions: int = REPETITIONS) -> Plot | None:
    """Fig. 3 a-d for all four PPO variants in one regime, with log-linear trends and their R^2."""
    algorithms = in_order(set(PPO_VARIANTS) & set(metrics.algorithms(regime)))
    if not algorithms:
        return None
    rows: list[pd.DataFrame] = []
    trends: list[dict[str, object]] = []
    with style():
        fig = Figure(figsize=(WIDTH, 8.2), layout="constrained")
        axes = list(fig.subplots(2, 2).flat)
        for letter, ax, panel in zip("abcd", axes, (SUCCESS, GRADIENT, PPO_GRADIENT, BIAS), strict=True):
            drawn = draw_panel(ax, panel, metrics, regime, algorithms, repetitions)
            ax.set_title(f"{letter}  {panel.label}", fontweight="bold")
            ax.set(ylabel="", xlabel="iteration")
            if panel.log:
                trends += _draw_trends(ax, regime, panel.column, drawn)
            rows += drawn
        from_zero(axes)
        handles = line_handles(algorithms) + collapse_handle(metrics, [regime], algorithms) + start_handle()
        frame(fig, f"Diagnostics of the PPO variants, regime {regime}", metrics, [regime], handles)
    what = (
        f"Regime {regime}: (a) sampled success; (b) gradient norm before clipping; (c) gradient norm of the PPO "
        "surrogate alone, equal to (b) where nothing else enters the loss; (d) exact norm of the gradient that clipping removed. Norms are means over each iteration's "
        "updates. Under b-d: log-linear trend of the line (thin), as the factor per 10 iterations, with its R²."
    )
    return Plot(
        f"diagnostics_{regime}",
        fig,
        plotted_data(rows),
        caption(metrics, what, [regime], algorithms),
        {"trends": pd.DataFrame(trends)},
    )


def _draw_trends(ax: Axes, regime: str, metric: str, drawn: list[pd.DataFrame]) -> list[dict[str, object]]:
    """Thin trend lines through the mean curves, their numbers in a legend below the panel."""
    records, handles = [], []
    for part in drawn:
        if (part["kind"] != "iqm").any():
            continue
        algorithm = part["algorithm"].iloc[0]
        trend = log_linear_trend(part["iteration"], part["value"])
        records.append(
            {
                "regime": regime,
                "metric": metric,
                "algorithm": algorithm,
                "log_slope": trend.slope,
                "log_intercept": trend.intercept,
                "r_squared": trend.r_squared,
                "n": trend.n,
            }
        )
        if not np.isfinite(trend.slope):
            continue
        ends = part["iteration"].to_numpy()[[0, -1]]
        ax.plot(ends, trend.at(ends), color=look(algorithm).color, linewidth=0.9, alpha=0.9, zorder=3)
        text = f"×{np.exp(10 * trend.slope):.2f}, R² {trend.r_squared:.2f}"
        handles.append(Line2D([], [], color=look(algorithm).color, linewidth=3, label=text))
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
        ncols=len(handles) or 1,
        fontsize=8,
        handlelength=0.9,
        columnspacing=1.0,
        handletextpad=0.4,
    )
    return records


def overview_figure(metrics: Metrics, repetitions: int = REPETITIONS) -> Plot | None:
    """Every algorithm in a panel of its own, in the regime that has most, with token PPO behind."""
    names = {r: [name for name in metrics.algorithms(r) if not variant(name)] for r in with_curves(metrics)}
    regime = max(names, key=lambda r: len(names[r]), default=None)
    if regime is None or not names[regime]:
        return None
    algorithms = in_order(names[regime])
    n_columns = min(3, len(algorithms))
    n_rows = -(-len(algorithms) // n_columns)
    rows: list[pd.DataFrame] = []
    with style():
        fig = Figure(figsize=(WIDTH, 1.4 + 1.95 * n_rows), layout="constrained")
        axes = list(fig.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False).flat)
        baseline = curves_of(metrics, regime, "token_ppo", "success").mean(axis=1)
        for ax, algorithm in zip(axes, algorithms, strict=False):
            ax.plot(baseline.index, baseline, color="#BBBBBB", linewidth=1.4, zorder=1)
            rows += draw_panel(ax, SUCCESS, metrics, regime, [algorithm], repetitions)
            verdicts = [v for (r, a, _), v in metrics.collapses.items() if (r, a) == (regime, algorithm)]
            count = f"{sum(v.collapsed for v in verdicts)}/{len(verdicts)} collapsed"
            label, color = look(algorithm).label, look(algorithm).color
            # A long name would run into the count.
            ax.set_title(label, fontweight="bold", color=color, fontsize=8.5 if len(label) > 22 else None)
            ax.set_title(count, loc="right", color="#666666", fontsize=8.5)
            ax.set_ylabel("")
        for ax in axes[len(algorithms) :]:
            ax.set_visible(False)
        from_zero(axes)
        for i, ax in enumerate(axes[: len(algorithms)]):
            ax.tick_params(labelbottom=i + n_columns >= len(algorithms))
        behind = Line2D([], [], color="#BBBBBB", linewidth=1.4, label="token PPO, mean")
        handles = [behind, *start_handle(), *collapse_handle(metrics, [regime], algorithms)]
        frame(fig, f"Sampled success by iteration, regime {regime}", metrics, [regime], handles)
    what = f"Sampled success on held-out questions of every algorithm in regime {regime}."
    return Plot("overview", fig, plotted_data(rows), caption(metrics, what, [regime], algorithms))


def granularity_figure(metrics: Metrics) -> Plot | None:
    """Final success as the ratio goes from token to turn to sequence, everything else equal."""
    summary = metrics.summary
    found = {
        (regime, family): {g: a for g, a in ladder.items() if a in metrics.algorithms(regime)}
        for regime in with_curves(metrics)
        for family, ladder in LADDERS.items()
    }
    found = {key: ladder for key, ladder in found.items() if len(ladder) > 1}
    regimes = list(dict.fromkeys(regime for regime, _ in found))
    if not regimes:
        return None
    rungs = ["token", "turn", "sequence"]
    records: list[dict[str, object]] = []
    with style():
        fig = Figure(figsize=(3.0 + 2.9 * len(regimes), 4.2), layout="constrained")
        axes = fig.subplots(1, len(regimes), squeeze=False, sharey=True)[0]
        for ax, regime in zip(axes, regimes, strict=True):
            for shift, family in ((-0.12, "PPO"), (0.12, "GRPO")):
                means = {}
                for rung, algorithm in found.get((regime, family), {}).items():
                    runs = summary[(summary["regime"] == regime) & (summary["algorithm"] == algorithm)]
                    x = rungs.index(rung) + shift
                    means[x] = runs["success_final"].mean()
                    for i, run in enumerate(runs.itertuples()):
                        marker = "X" if run.collapsed else "o"
                        ax.plot(
                            x + min(0.03, 0.2 / len(runs)) * (i - (len(runs) - 1) / 2),
                            run.success_final,
                            marker=marker,
                            markersize=8,
                            color=look(algorithm).color,
                            markeredgecolor="white",
                            zorder=3,
                        )
                        records.append(
                            {
                                "regime": regime,
                                "family": family,
                                "granularity": rung,
                                "algorithm": algorithm,
                                "seed": run.seed,
                                "success_final": run.success_final,
                                "collapsed": run.collapsed,
                            }
                        )
                line = "-" if family == "PPO" else "--"
                ax.plot(list(means), list(means.values()), line, color="#999999", linewidth=1.3, zorder=1)
            ax.set_title(f"regime {regime}")
            ax.set_xticks(range(3), rungs)
            ax.set(xlim=(-0.4, 2.4), xlabel="granularity of the ratio")
        from_zero(axes)
        axes[0].set_ylabel("final sampled success")
        algorithms = in_order(a for ladder in found.values() for a in ladder.values())
        dots = [
            Line2D(
                [], [], marker="o", markersize=8, linestyle="none", color=look(a).color, label=look(a).label
            )
            for a in algorithms
        ]
        frame(
            fig,
            "From token to turn to sequence",
            metrics,
            regimes,
            [*dots, *collapse_handle(metrics, regimes, algorithms)],
        )
    what = (
        "Final success (mean of the last tenth of the evaluations), one mark per seed; lines "
        "join means, solid for PPO, dashed for GRPO. GSPO's clip range is narrower than GRPO's, so the last step "
        "changes more than the granularity."
    )
    return Plot("granularity", fig, pd.DataFrame(records), caption(metrics, what, regimes, algorithms, False))


def all_figures(metrics: Metrics, repetitions: int = REPETITIONS) -> list[Plot]:
    """Every figure that the runs support, in the order of the report."""
    plots = [
        overview_figure(metrics, repetitions),
        collapse_figure(metrics),
        *(diagnostics_figure(metrics, regime, repetitions) for regime in with_curves(metrics)),
        stability_figure(metrics, repetitions),
        clip_ratio_figure(metrics, repetitions),
        so_grpo_figure(metrics, repetitions),
        granularity_figure(metrics),
    ]
    return [plot for plot in plots if plot is not None]


def run_figure(updates: pd.DataFrame, evaluations: pd.DataFrame, title: str) -> Plot:
    """One run as it stands, from its two tables, finished or not: for the training notebook."""
    blue, orange, green = "#0061A8", "#D55E00", "#009E73"
    with style():
        fig = Figure(figsize=(WIDTH, 5.6), layout="constrained")
        axes = list(fig.subplots(2, 2).flat)
        at = updates.groupby("iteration").mean(numeric_only=True)
        axes[0].plot(at.index, at["success_train"], color="#BBBBBB", label="training questions")
        for temperature, name, color in ((1.0, "held out, sampled", blue), (0.0, "held out, greedy", orange)):
            rows = evaluations[evaluations["temperature"] == temperature]
            axes[0].plot(rows["iteration"], rows["success"], "o-", markersize=3, color=color, label=name)
        panels = [
            ("gradient norms", {"gradient_norm": "gradient", "clipping_bias_norm": "clipping bias"}),
            ("clipping", {"clip_fraction": "clip fraction", "out_of_range_fraction": "out of range"}),
            (
                "policy",
                {
                    "entropy": "entropy (nats)",
                    "valid_format_rate": "valid format",
                    "kl_behaviour_k3": "KL to behaviour",
                },
            ),
        ]
        for ax, (_, columns) in zip(axes[1:], panels, strict=True):
            for (column, label), color in zip(columns.items(), (blue, orange, green), strict=False):
                if column in at:
                    values = at[column].where(at[column] > 0) if ax is axes[1] else at[column]
                    ax.plot(at.index, values, color=color, label=label)
        axes[1].set_yscale("log")  # a norm of exactly 0 (nothing clipped yet) has no place on it
        for ax, name in zip(axes, ["success", *(name for name, _ in panels)], strict=True):
            ax.set_title(name, fontweight="bold")
            ax.set_xlabel("iteration")
            ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        fig.suptitle(title, x=0.012, ha="left")
    return Plot("run", fig, at.reset_index(), f"{title}. Means over each iteration's updates.")
