"""What the study showed, in a few sentences made from the numbers: counts and means, no verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from stppo.analysis import words
from stppo.analysis.arms import BEST, CELLS, CONTROLS, LONG, MAIN, NINE, ON_POLICY, SETTINGS
from stppo.analysis.collapse import IMPROVEMENT
from stppo.analysis.comparisons import arm_of
from stppo.analysis.phase_diagram import phase_table
from stppo.analysis.study import Arm, Study
from stppo.analysis.style import look

ELSEWHERE = {
    ON_POLICY: "Nearly on-policy",
    LONG: "In the longer, milder regime",
    BEST: "Each at its best learning rate",
}


def in_short(study: Study) -> list[str]:
    """Sentences on collapse, learning, what drives it, controls and other regimes; those without runs are left out."""
    main = [arm for arm in (Arm(MAIN, name) for name in NINE) if study.runs(arm)]
    if not main:
        return []
    elsewhere = (_elsewhere(study, regime, opening) for regime, opening in ELSEWHERE.items())
    others = *_drivers(study), _controls(study), *elsewhere
    return [_collapse(study, main), _learning(study, main), *(told for told in others if told)]


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


def _learning(study: Study, arms: Sequence[Arm]) -> str:
    """Whether anything was learned where collapse was provoked: final success beside the warm starts'."""
    starts = [fmean(run["warm_start"]["success_sampled"] for run in study.runs(arm).values()) for arm in arms]
    finals = [_final(study, arm) for arm in arms]
    learned = sum(final >= start + IMPROVEMENT for start, final in zip(starts, finals, strict=True))
    told = [
        f"{look(arm.algorithm).label} {words.number(final)}" for arm, final in zip(arms, finals, strict=True)
    ]
    return (
        f"{learned} of these {len(arms)} ended at least {IMPROVEMENT:g} above their warm starts "
        f"(mean success {words.number(fmean(starts))}): {words.listed(told)}."
    )


def _drivers(study: Study) -> list[str]:
    """Collapses along each axis of the phase diagram that crosses the main regime, and in the other settings: without
    and with the cure."""
    table = phase_table(study)
    phase = table[table["part"] == "phase"]
    epochs, factor = next(cell for cell, regime in CELLS.items() if regime == MAIN)
    axes = {
        "age of the batch in iterations": (table[table["part"] == "staleness"], "x"),
        "epochs per batch": (phase[phase["y"] == f"{factor:g}"], "x"),
        "multiple of the learning rate": (phase[phase["x"] == str(epochs)], "y"),
        "epochs × minibatches": (table[table["part"] == "split"], "x"),
    }
    pair = ("token_ppo", "st_ppo")
    lines = {}
    for name, (cells, axis) in axes.items():
        columns = [cells[cells["algorithm"] == algorithm] for algorithm in pair]
        if len(columns[0]) > 1 and list(columns[0][axis]) == list(columns[1][axis]):
            lines[f"{name} ({' / '.join(columns[0][axis])})"] = [
                zip(column["collapsed"], column["runs"], strict=True) for column in columns
            ]
    settings = {r: what for r, what in SETTINGS.items() if all(study.runs(Arm(r, name)) for name in pair)}
    if settings:
        lines[f"setting ({' / '.join(settings.values())})"] = [
            [_collapses(study, Arm(regime, name)) for regime in settings] for name in pair
        ]
    token, cured = (look(name).label for name in pair)
    told = [
        (name, *(" / ".join(words.share(*of) for of in counts) for counts in of))
        for name, of in lines.items()
    ]
    return [f"By {name}: {token} collapsed in {ill} runs, {cured} in {well}." for name, ill, well in told]


def _controls(study: Study) -> str | None:
    arms = dict.fromkeys(arm_of(name) for group in CONTROLS for name in group.arms)
    controls = [arm for arm in arms if study.runs(arm) and arm.algorithm not in (*NINE, "turn_grpo")]
    if not controls:
        return None
    free = sum(not _collapses(study, arm)[0] for arm in controls)
    finals = {look(arm.algorithm).label: _final(study, arm) for arm in controls}
    top = max(finals, key=finals.__getitem__)
    return (
        f"Of {len(controls)} controls that take shorter or fewer steps and know nothing of their own clipping bias, {free} had "
        f"no collapse; highest at the end: {top}, {words.number(finals[top])}."
    )


def _elsewhere(study: Study, regime: str, opening: str) -> str | None:
    arms = [arm for arm in (Arm(regime, name) for name in NINE) if study.runs(arm)]
    if not arms:
        return None
    counts = [_collapses(study, arm) for arm in arms]
    told = [f"{look(arm.algorithm).label} {words.number(_final(study, arm))}" for arm in arms]
    return f"{opening}, {words.share(*map(sum, zip(*counts, strict=True)))} runs collapsed, and they ended at: {words.listed(told)}."
