"""The figures that compare arms of the study; each is None where the runs it needs do not exist.

Curves over iterations are in `figures`, what moves before a collapse in `mechanism_figures`.
"""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import beta

from stppo.results.captions import caption, short
from stppo.results.drawing import WIDTH, frame, grid, line_handles, with_curves
from stppo.results.figures import GRPO_VARIANTS, SUCCESS
from stppo.results.forest import INTERVALS, forest
from stppo.results.resampling import Estimate
from stppo.results.statistics import CONFIDENCE, REPETITIONS
from stppo.results.style import Plot, look, style
from stppo.study.arms import (
    ABLATIONS,
    BEST,
    CONTROLS,
    DRIVERS,
    FACTORIAL,
    MAIN,
    NINE,
    PPO_VARIANTS,
    SETTINGS,
)
from stppo.study.claims import Plan
from stppo.study.comparisons import compare, estimate, final_success, risk, run_groups
from stppo.study.outcomes import TABLE_DRAWS, Arm, Study
from stppo.study.tuning import MAIN_RATE, SEARCHED
from stppo.study.words import listed

FAMILIES = {"PPO": (*PPO_VARIANTS, "so_ppo_ctn"), "GRPO": (*GRPO_VARIANTS, "turn_grpo", "s_grpo")}
LOWEST = "†"  # marks a best learning rate that is the lowest tried
STEP = 0.006  # by which curves are set apart, so that equal ones are all seen


def survival_figure(study: Study) -> Plot | None:
    """Kaplan-Meier curves of time to collapse, PPO above GRPO, a column per regime."""
    regimes = with_curves(study.metrics)
    parts = []
    for regime in regimes:
        for family, names in FAMILIES.items():
            curves = study.survival_curves(regime, [n for n in names if study.runs(Arm(regime, n))])
            if len(curves):
                parts.append(curves.assign(regime=regime, family=family, horizon=study.horizon(regime)))
    if not parts:
        return None
    data = pd.concat(parts, ignore_index=True)
    regimes = [regime for regime in regimes if regime in set(data["regime"])]
    families = [family for family in FAMILIES if family in set(data["family"])]
    algorithms = [n for names in FAMILIES.values() for n in names if n in set(data["algorithm"])]
    with style():
        fig = Figure(
            figsize=(WIDTH if len(regimes) > 1 else 7.5, 1.6 + 2.7 * len(families)), layout="constrained"
        )
        axes = fig.subplots(len(families), len(regimes), squeeze=False, sharex="col", sharey=True)
        for i, family in enumerate(families):
            for j, regime in enumerate(regimes):
                ax = axes[i, j]
                here = data[(data["family"] == family) & (data["regime"] == regime)]
                for k, (name, curve) in enumerate(here.groupby("algorithm", sort=False)):
                    _steps(ax, name, curve, -k * STEP)
                ax.set_ylim(-0.06, 1.04)
                ax.set_xlim(left=0)
                if i == 0:
                    ax.set_title(f"regime {regime}")
                if i == len(families) - 1:
                    ax.set_xlabel("iteration")
            axes[i, 0].set_ylabel(f"{family} variants\nshare not collapsed")
        frame(fig, "Time to collapse", study.metrics, regimes, line_handles(algorithms))
    what = (
        "Kaplan-Meier estimate of the share of runs that have not collapsed; a run that never does is watched to its last "
        "iteration. Shaded: pointwise 95 % intervals (log-log), which take runs as independent. Curves are set "
        f"apart by {STEP:g} so that equal ones are all seen.{_without_collapse(data)}"
    )
    return Plot("survival", fig, data, caption(study.metrics, what, regimes, algorithms, False, False))


def _without_collapse(data: pd.DataFrame) -> str:
    """What an arm's curve without a step, and so without a band, leaves open."""
    arms = data.groupby(["regime", "algorithm"])
    counts = sorted(set(arms["at_risk"].max()[arms["survival"].min() == 1]))
    limits = [
        f"{beta.ppf((1 + CONFIDENCE) / 2, 0.5, n + 0.5):.2f} for {n} run{'s' * (n > 1)}" for n in counts
    ]
    return (
        f" An arm without a collapse has no band, but its risk may still be as high as {listed(limits)} (Jeffreys, 95 %)."
        if limits
        else ""
    )


def _steps(ax: Axes, algorithm: str, curve: pd.DataFrame, shift: float) -> None:
    its = look(algorithm)
    time = [*curve["time"], curve["horizon"].iloc[0]]
    survival, low, high = ([*curve[name], curve[name].iloc[-1]] for name in ("survival", "low", "high"))
    ax.step(
        time, [s + shift for s in survival], where="post", color=its.color, linestyle=its.line, linewidth=1.9
    )
    ax.fill_between(time, low, high, step="post", color=its.color, alpha=0.09, linewidth=0)


def controls_figure(study: Study, planned: Plan | None = None) -> Plot | None:
    """Collapse risk and final success of the stabilised arms beside the controls that could refute the cure."""
    tables = run_groups(study, CONTROLS, planned)
    return forest(
        study.metrics,
        "controls",
        "Is it the clipping bias, or only smaller steps?",
        "Each stabilised arm (diamond) beside the untreated arm and the controls: learning rate matched to the stabilised "
        "arm's KL or step length, placebo divisors, KL early stopping. If the cure is specific, the controls collapse more "
        "often (middle column right of 0).",
        {group.title: table for group, table in _titled(CONTROLS, tables)},
        ("collapse_risk", "extra_risk", "final_success"),
        {"extra_risk": "collapse risk,\nminus the stabilised arm's"},
        "stabilised arm",
    )


def drivers_figure(study: Study, planned: Plan | None = None) -> Plot | None:
    """Whether the critic drives collapse: trained longer, or replaced by the truth."""
    return forest(
        study.metrics,
        "drivers",
        "Is the critic the cause?",
        "Token PPO and ST-PPO with a critic trained for eight epochs, and with values that are Monte-Carlo truth: if these "
        "collapse too, inaccurate values are not the cause; if they do not, they may be a part of it.",
        {group.title: table for group, table in _titled(DRIVERS, run_groups(study, DRIVERS, planned))},
    )


def normalisers_figure(study: Study, planned: Plan | None = None) -> Plot | None:
    """What the sources leave open: every ablation against the default of its group."""
    return forest(
        study.metrics,
        "normalisers",
        "What the sources leave open",
        "Each group varies one choice of an algorithm, main regime. Differences are over the warm starts that arm and default "
        "share, so a default's own column may rest on more runs than its comparison.",
        {group.title: table for group, table in _titled(ABLATIONS, run_groups(study, ABLATIONS, planned))},
    )


def _titled(groups, tables):
    by_name = {table["group"].iloc[0]: table for table in tables}
    return [(group, by_name[group.name]) for group in groups if group.name in by_name]


def best_arms(study: Study, planned: Plan | None = None) -> dict[str, Arm]:
    """Each algorithm at its best learning rate: its arm in BEST, or in MAIN where tuning kept the shared rate.

    Empty where no run of BEST exists; an algorithm whose runs in BEST are planned and missing has that arm.
    """
    if not any(arm.regime == BEST for arm in study.arms):
        return {}
    best = {}
    for name in NINE:
        tuned = Arm(BEST, name)
        moved = study.runs(tuned) or (planned is not None and tuned in planned)
        arm = tuned if moved else Arm(MAIN, name)
        if moved or study.runs(arm):
            best[name] = arm
    return best


def best_table(study: Study, planned: Plan | None = None) -> pd.DataFrame | None:
    """`comparisons.compare` of all algorithms at their best learning rate, token PPO first; None without BEST."""
    best = best_arms(study, planned)
    if "token_ppo" not in best:
        return None
    lowest = short(MAIN_RATE * min(SEARCHED.values()))
    arms = []
    for name, arm in best.items():
        rate = _rate(study, arm)
        arms.append((arm, f"{look(name).label} at {rate}{LOWEST * (rate == lowest)}"))
    return compare(study, arms, planned)


def _rate(study: Study, arm: Arm) -> str:
    for run in study.runs(arm).values():
        rates = study.iterations(run).get("learning_rate", pd.Series(dtype=float)).dropna()
        if len(rates):
            return short(rates.max())
    return "unknown"


def best_settings_figure(study: Study, planned: Plan | None = None) -> Plot | None:
    """Every algorithm at the shared learning rate and at its best one."""
    best = best_table(study, planned)
    if best is None:
        return None
    shared = [(Arm(MAIN, name), look(name).label) for name in NINE if study.runs(Arm(MAIN, name))]
    tables = {"at the shared learning rate": compare(study, shared, planned)} if shared else {}
    return forest(
        study.metrics,
        "best_settings",
        "Each algorithm at the shared learning rate, and at its best",
        "Best: the learning rate with the highest mean final success on tuning seeds, by one budget for every "
        "algorithm; where that is the shared one, its runs are those of the main regime, and where it is the lowest tried "
        f"({LOWEST}), a lower one may be better still. Differences are to token PPO of the same block.",
        tables | {"each at its best learning rate": best},
        labels={"final_difference": "final success,\nminus token PPO's"},
        role="token PPO",
    )


def settings_figure(study: Study, repetitions: int = REPETITIONS) -> Plot | None:
    """Other worlds and another model family: success of the PPO variants."""
    regimes = [regime for regime in SETTINGS if regime in study.metrics.regimes]
    if not regimes:
        return None
    named = ", ".join(f"{regime}: {SETTINGS[regime]}" for regime in regimes)
    return grid(
        study.metrics,
        "settings",
        "Other worlds, another model family",
        f"Sampled success of the PPO variants at the main learning rate, whatever it does there ({named}).",
        PPO_VARIANTS,
        (SUCCESS,),
        repetitions,
        regimes=regimes,
    )


def factorial_effects(study: Study) -> dict[str, Estimate]:
    """Main effects of ratio and credit on restricted mean survival (share of the horizon), and their interaction.

    Empty where a corner has no runs. The interaction is the ratio's effect under turn-mean credit minus that
    under token credit.
    """
    arms = {corner: Arm(MAIN, name) for corner, name in FACTORIAL.items()}
    if not all(study.runs(arm) for arm in arms.values()):
        return {}
    signs = {
        "ratio: turn instead of token": lambda ratio, credit: 0.5 if ratio == "turn" else -0.5,
        "credit: turn mean instead of token": lambda ratio, credit: 0.5 if credit == "turn-mean" else -0.5,
        "interaction": lambda ratio, credit: 1.0 if (ratio == "turn") == (credit == "turn-mean") else -1.0,
    }
    effects = {}
    for name, sign in signs.items():
        coefficients = [sign(*corner) for corner in arms]
        found = estimate(
            lambda c: study.survival_contrast(list(arms.values()), c, n_draws=TABLE_DRAWS), coefficients
        )
        if found is not None:
            effects[name] = found
    return effects


def factorial_figure(study: Study) -> Plot | None:
    """Survival, collapse risk and final success over {token, turn} ratio x {token, turn-mean} credit."""
    corners = {corner: Arm(MAIN, name) for corner, name in FACTORIAL.items() if study.runs(Arm(MAIN, name))}
    if len(corners) < 2:
        return None
    panels = {
        "mean survival\n(share of the horizon)": lambda s, arm: s.survival_contrast(
            [arm], [1.0], n_draws=TABLE_DRAWS
        ),
        "collapse risk": risk,
        "final success": final_success,
    }
    rows = []
    with style():
        fig = Figure(figsize=(WIDTH, 3.9), layout="constrained")
        axes = fig.subplots(1, len(panels))
        for ax, (label, of) in zip(axes, panels.items(), strict=True):
            for shift, (credit, line) in enumerate((("token", "-"), ("turn-mean", "--"))):
                points = []
                for x, ratio in enumerate(("token", "turn")):
                    arm = corners.get((ratio, credit))
                    found = estimate(of, study, arm) if arm else None
                    if found is None:
                        continue
                    low, high = found.interval(CONFIDENCE)
                    at = x + (shift - 0.5) * 0.12
                    points.append((at, found.value))
                    color = look(arm.algorithm).color
                    if math.isfinite(low):
                        ax.plot([at, at], [low, high], color=color, linewidth=1.6, zorder=2)
                    ax.plot([at], [found.value], "o", color=color, markersize=7, zorder=3)
                    quantity = label.replace("\n", " ")
                    rows.append(
                        [ratio, credit, arm.algorithm, quantity, found.value, low, high, len(study.runs(arm))]
                    )
                ax.plot(
                    *zip(*points, strict=True), line, color="#888888", linewidth=1.2, zorder=1
                ) if points else None
            ax.set_xticks([0, 1], ["token ratio", "turn ratio"])
            ax.set(xlim=(-0.35, 1.35), title=label)
            ax.set_ylim(bottom=0)
        names = [arm.algorithm for arm in corners.values()]
        handles = line_handles(names)
        for handle in handles:
            handle.set(linestyle="none", marker="o", markersize=7)
        frame(fig, "Is it the ratio, or the credit?", study.metrics, [MAIN], handles)
    columns = ["ratio", "credit", "algorithm", "quantity", "value", "low", "high", "runs"]
    what = (
        "Ratio {token, turn} × credit {token, averaged over the turn}, main regime. Grey lines join arms with one credit "
        f"(solid: token; dashed: turn mean); parallel lines mean no interaction. {INTERVALS}"
    )
    effects = factorial_effects(study)
    table = pd.DataFrame(
        [[n, e.value, *e.interval(CONFIDENCE)] for n, e in effects.items()], columns=["effect", *columns[4:7]]
    )
    text = caption(study.metrics, what, [MAIN], names, False, False)
    return Plot("factorial", fig, pd.DataFrame(rows, columns=columns), text, {"effects": table})
