"""What a condition of the claims ledger can measure: named estimates over the runs of arms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from stppo.results import resampling
from stppo.results.resampling import MIN_CLUSTERS, Estimate, Replicate
from stppo.study import mechanism
from stppo.study.outcomes import Arm, Study, differences_by_tenth
from stppo.study.words import called, listed, number

Arms = Mapping[str, Arm]  # by role
Labelled = tuple[str, Estimate]  # what was estimated, in words


class Untested(Exception):
    """Something that a quantity needs is missing; the message says what."""


def _collapse_risk(study: Study, arms: Arms) -> list[Labelled]:
    return [(f"collapse risk of {called(arms['of'])}", study.risk(arms["of"]))]


def _risk_difference(study: Study, arms: Arms) -> list[Labelled]:
    untreated, treated = arms["untreated"], arms["treated"]
    words = f"collapse risk of {called(untreated)} minus {called(treated)}"
    return [(words, study.risk_difference(untreated, treated))]


def _final_success_difference(study: Study, arms: Arms) -> list[Labelled]:
    finals = [study.outcomes(arms[role], study.final_success) for role in ("one", "other")]
    words = f"final success of {called(arms['one'])} minus {called(arms['other'])}"
    return [(words, resampling.difference(*finals))]


def _survival_gain(study: Study, arms: Arms) -> list[Labelled]:
    words = f"mean survival of {called(arms['one'])} minus {called(arms['other'])}, share of the horizon"
    return [(words, study.survival_contrast([arms["one"], arms["other"]], [1.0, -1.0]))]


def _ratio_main_effect(study: Study, arms: Arms) -> list[Labelled]:
    roles = ("turn", "turn_mean_credit", "token", "token_mean_credit")
    effect = study.survival_contrast([arms[role] for role in roles], [0.5, 0.5, -0.5, -0.5])
    return [("main effect of the turn ratio on mean survival, share of the horizon", effect)]


def _highest_tenth_difference(study: Study, arms: Arms, column: str) -> list[Labelled]:
    _require(study, column)
    tested = []
    for i, pairs in enumerate(differences_by_tenth(study, arms["one"], arms["other"], column)):
        known = [replicate for replicate, value in pairs.items() if math.isfinite(value)]
        if len({replicate.cluster for replicate in known}) >= MIN_CLUSTERS:
            words = f"{_signal(column)} of {called(arms['one'])} minus {called(arms['other'])} in tenth {i + 1} ({len(known)} pairs)"
            tested.append((words, resampling.mean(pairs)))
    if not tested:
        raise Untested(
            f"no tenth of training has pairs of {called(arms['one'])} and {called(arms['other'])} from {MIN_CLUSTERS} warm starts "
            "before a collapse"
        )
    return tested


def _spike_auc(study: Study, arms: Arms) -> list[Labelled]:
    _require(study, "gradient_norm", "gradient_norm_max")
    auc = mechanism.spike_auc(study, list(arms.values()))
    cases, controls = auc.n_runs
    words = f"spike AUC in {listed([called(arm) for arm in arms.values()])} ({cases} collapsed runs, {controls} controls)"
    return [(words, auc)]


def _bias_norm_slope(study: Study, arms: Arms) -> list[Labelled]:
    _require(study, "clipping_bias_norm", "staleness_iterations")
    slopes = study.outcomes(arms["of"], partial(mechanism.bias_norm_slope, study))
    slope = resampling.mean(slopes)
    words = f"log-slope of the clipping-bias norm before collapse in {called(arms['of'])} ({slope.n_runs[0]} runs)"
    return [(words, slope)]


def _lead_difference(study: Study, arms: Arms, signal: str, over: str) -> list[Labelled]:
    _require(study, signal, over)
    lead = mechanism.lead_difference(study, arms["of"], signal, over)
    words = f"iterations by which {_signal(signal)} leads {_signal(over)} in {called(arms['of'])} ({lead.n_runs[0]} runs)"
    return [(words, lead)]


def _critic_error_difference(study: Study, arms: Arms) -> list[Labelled]:
    columns = ["critic_value_rmse", "true_value_std"]
    _require(study, *columns)
    other = study.runs(arms["other"])
    differences: dict[Replicate, float] = {}
    levels: list[np.ndarray] = []
    for replicate, record in study.runs(arms["one"]).items():
        if replicate not in other:
            continue
        both = (record, other[replicate])
        frames = [study.iterations(run).set_index("iteration")[columns].dropna() for run in both]
        shared = frames[0].index.intersection(frames[1].index)
        shared = shared[shared < min(map(study.collapse_iteration, both))]
        if len(shared):
            rmse, spread = np.array([frame.loc[shared].mean() for frame in frames]).T
            levels.append(rmse / spread)
            differences[replicate] = float(levels[-1][0] - levels[-1][1])
    means = " and ".join(number(level) for level in np.mean(levels, axis=0)) if levels else "none"
    words = (
        f"relative error of the critic's values, {called(arms['one'])} minus {called(arms['other'])} "
        f"({len(differences)} pairs, means {means})"
    )
    return [(words, resampling.mean(differences))]


def _signal(column: str) -> str:
    """A recorded column in words."""
    return mechanism.SIGNALS[column][0] if column in mechanism.SIGNALS else column.replace("_", " ")


def _require(study: Study, *columns: str) -> None:
    recorded = study.metrics.iterations
    for column in columns:
        if column not in recorded or recorded[column].isna().all():
            raise Untested(f"no run recorded {column}")


class Quantity(NamedTuple):
    """How to estimate something, and what a condition must name for it."""

    estimate: Callable[..., list[Labelled]]
    roles: tuple[str, ...]  # none: arms to pool, in roles of any name
    options: tuple[str, ...] = ()


QUANTITIES: dict[str, Quantity] = {
    "collapse_risk": Quantity(_collapse_risk, ("of",)),
    "risk_difference": Quantity(_risk_difference, ("untreated", "treated")),
    "final_success_difference": Quantity(_final_success_difference, ("one", "other")),
    "survival_gain": Quantity(_survival_gain, ("one", "other")),
    "ratio_main_effect": Quantity(
        _ratio_main_effect, ("turn", "turn_mean_credit", "token", "token_mean_credit")
    ),
    "highest_tenth_difference": Quantity(_highest_tenth_difference, ("one", "other"), ("column",)),
    "spike_auc": Quantity(_spike_auc, ()),
    "bias_norm_slope": Quantity(_bias_norm_slope, ("of",)),
    "lead_difference": Quantity(_lead_difference, ("of",), ("signal", "over")),
    "critic_error_difference": Quantity(_critic_error_difference, ("one", "other")),
}
# What some quantity takes besides arms
OPTIONS = sorted({name for quantity in QUANTITIES.values() for name in quantity.options})
