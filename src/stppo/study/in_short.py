"""What the study showed, in a few sentences made from the numbers: counts and means, no verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from stppo.results.collapse import IMPROVEMENT
from stppo.results.style import look
from stppo.study import words
from stppo.study.arms import (
    ABLATIONS,
    BEST,
    CELLS,
    CONTROLS,
    DRIVERS,
    LONG,
    MAIN,
    NINE,
    ON_POLICY,
    SETTINGS,
)
from stppo.study.comparisons import arm_of
from stppo.study.outcomes import Arm, Study
from stppo.study.phase_diagram import phase_table
from stppo.study.sensitivity import FRACTIONS, collapse_counts

ELSEWHERE = {
    ON_POLICY: "Nearly on-policy",
    LONG: "In the longer, milder regime",
    BEST: "Each at its best learning rate",
} | {regime: f"Main settings, but {what}" for regime, what in SETTINGS.items()}
UNTREATED, TREATED = "token_ppo", ("s_ppo", "st_ppo")
DIVISOR = next(group for group in ABLATIONS if group.name == "st_ppo_divisor")


def in_short(study: Study) -> list[str]:
    """Sentences on collapse, learning, what drives it, controls and other regimes; those without runs are left out."""
    main = [arm for arm in (Arm(MAIN, name) for name in NINE) if study.runs(arm)]
    if not main:
        return []
    elsewhere = (_elsewhere(study, regime, opening) for regime, opening in ELSEWHERE.items())
    others = (
        _greedy(study, main),
        *_drivers(study),
        _divisor(study),
        _critic(study),
        _controls(study),
        *elsewhere,
    )
    return [
        _collapse(study, main),
        _line(study, main),
        _learning(study, main),
        *(told for told in others if told),
    ]


def _collapses(study: Study, arm: Arm) -> tuple[int, int]:
    runs = study.runs(arm)
    return sum(study.collapsed(run) == 1 for run in runs.values()), len(runs)


def _final(study: Study, arm: Arm) -> float:
    return fmean(study.outcomes(arm, study.final_success).values())


def _collapse(study: Study, arms: Sequence[Arm]) -> str:
    counts = {look(arm.algorithm).label: _collapses(study, arm) for arm in arms}
    ill = [f"{label} ({words.share(*count)} runs)" for label, count in counts.items() if count[0]]
    well = [f"{label} ({count[1]} runs)" for label, count in counts.items() if not count[0]]
    parts = [f"collapsed: {words.listed(ill)}"] * bool(ill) + [f"never: {words.listed(well)}"] * bool(well)
    return f"At shared settings, {'; '.join(parts)}."


def _line(study: Study, arms: Sequence[Arm]) -> str:
    """How much the counts owe to where the rule draws its line."""
    names = [f"{fraction:g}" for fraction in FRACTIONS]
    table = collapse_counts(study.metrics).set_index(["regime", "algorithm"])
    told = [
        f"{look(arm.algorithm).label} {' / '.join(str(table.loc[arm, name]) for name in names)}"
        for arm in arms
        if table.loc[arm, names].any()
    ]
    drawn = f"With the line at {' / '.join(names)} of the success reached"
    return f"{drawn}, collapsed: {words.listed(told)}." if told else f"{drawn}, no run collapsed."


def _learning(study: Study, arms: Sequence[Arm]) -> str:
    """Whether anything was learned where collapse was provoked: final success beside the warm starts'."""
    starts = [fmean(run["warm_start"]["success_sampled"] for run in study.runs(arm).values()) for arm in arms]
    finals = [_final(study, arm) for arm in arms]
    learned = sum(final >= start + IMPROVEMENT for start, final in zip(starts, finals, strict=True))
    verdicts = [study.verdict(run).never_improved for arm in arms for run in study.runs(arm).values()]
    told = [
        f"{look(arm.algorithm).label} {words.number(final)}" for arm, final in zip(arms, finals, strict=True)
    ]
    return (
        f"{learned} of these {len(arms)} ended at least {IMPROVEMENT:g} above their warm starts "
        f"(mean success {words.number(fmean(starts))}): {words.listed(told)}. "
        f"{words.share(verdicts.count(False), len(verdicts))} runs ever stood that high."
    )


def _greedy(study: Study, arms: Sequence[Arm]) -> str | None:
    """The last greedy evaluation beside the warm start's: what no verdict speaks of."""
    told = []
    for arm in arms:
        runs = study.runs(arm).values()
        ends = [(run["warm_start"]["success_greedy"], study.final_greedy(run)) for run in runs]
        if not any(math.isnan(end) for _, end in ends):
            low = sum(end <= start / 2 for start, end in ends)
            mean = words.number(fmean(end for _, end in ends))
            told.append(f"{look(arm.algorithm).label} {mean} ({words.share(low, len(ends))})")
    if not told:
        return None
    start = fmean(run["warm_start"]["success_greedy"] for arm in arms for run in study.runs(arm).values())
    return (
        "Greedy success, on which no verdict rests, at the end (runs at or below half of their warm start; mean of the "
        f"starts {words.number(start)}): {words.listed(told)}."
    )


def _drivers(study: Study) -> list[str]:
    """Collapses along each axis of the phase diagram that crosses the main regime: without and with the cure."""
    table = phase_table(study)
    phase = table[table["part"] == "phase"]
    epochs, factor = next(cell for cell, regime in CELLS.items() if regime == MAIN)
    axes = {
        "age of the batch in iterations": (table[table["part"] == "staleness"], "x"),
        "epochs per batch": (phase[phase["y"] == f"{factor:g}"], "x"),
        "multiple of the learning rate": (phase[phase["x"] == str(epochs)], "y"),
        "epochs × minibatches": (table[table["part"] == "split"], "x"),
    }
    sentences = []
    for name, (cells, axis) in axes.items():
        columns = {one: cells[cells["algorithm"] == one] for one in (UNTREATED, *TREATED)}
        at = list(columns[UNTREATED][axis])
        told = [
            f"{look(one).label} {' / '.join(map(words.share, column['collapsed'], column['runs']))}"
            for one, column in columns.items()
            if list(column[axis]) == at
        ]
        if len(at) > 1 and len(told) > 1:
            sentences.append(f"By {name} ({' / '.join(at)}), collapsed: {'; '.join(told)}.")
    return sentences


def _told(study: Study, arm: Arm, called: str) -> str:
    return f"{called} {words.number(_final(study, arm))} ({words.share(*_collapses(study, arm))})"


def _divisor(study: Study) -> str | None:
    """What the constant and the form of ST-PPO's divisor do."""
    arms = {arm_of(name): what for name, what in DIVISOR.arms.items() if study.runs(arm_of(name))}
    default = arm_of(DIVISOR.default)
    if not arms or not study.runs(default):
        return None
    told = [_told(study, arm, what) for arm, what in ({default: "the one used"} | arms).items()]
    return f"ST-PPO by its divisor, final success (and collapsed runs): {'; '.join(told)}."


def _critic(study: Study) -> str | None:
    """Token PPO with a better critic, beside token PPO on the same replicates."""
    group = next(group for group in DRIVERS if group.default == f"{MAIN}/{UNTREATED}")
    default, told = study.runs(arm_of(group.default)), []
    for name, what in group.arms.items():
        runs = study.runs(arm_of(name))
        if shared := [replicate for replicate in runs if replicate in default]:
            counts = (sum(study.collapsed(of[r]) == 1 for r in shared) for of in (runs, default))
            with_it, without = (words.share(count, len(shared)) for count in counts)
            told.append(f"{what} {with_it} (without it {without})")
    return f"Token PPO with a better critic, collapsed: {'; '.join(told)}." if told else None


def _controls(study: Study) -> str | None:
    arms = dict.fromkeys(arm_of(name) for group in CONTROLS for name in group.arms)
    controls = [arm for arm in arms if study.runs(arm) and arm.algorithm not in (*NINE, "turn_grpo")]
    if not controls:
        return None
    counts = [_collapses(study, arm) for arm in controls]
    free = sum(not collapsed for collapsed, _ in counts)
    together = words.share(*map(sum, zip(*counts, strict=True)))
    finals = {look(arm.algorithm).label: _final(study, arm) for arm in controls}
    top = max(finals, key=finals.__getitem__)
    return (
        f"Of {len(controls)} controls that take shorter or fewer steps and know nothing of their own clipping bias, {free} had "
        f"no collapse ({together} runs collapsed in all); highest at the end: {top}, {words.number(finals[top])}."
    )


def _elsewhere(study: Study, regime: str, opening: str) -> str | None:
    arms = [arm for arm in (Arm(regime, name) for name in NINE) if study.runs(arm)]
    if not arms:
        return None
    counts = [_collapses(study, arm) for arm in arms]
    together = words.share(*map(sum, zip(*counts, strict=True)))
    told = [
        f"{look(arm.algorithm).label} {words.number(_final(study, arm))}"
        + (f" ({words.share(*count)} collapsed)" if count[0] else "")
        for arm, count in zip(arms, counts, strict=True)
    ]
    return f"{opening}: {together} runs collapsed, and they ended at {words.listed(told)}."
