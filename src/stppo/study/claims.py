"""Verdicts on the claims ledger from recorded metrics.

Nothing here knows a result: `evaluate` gives each part of each claim a verdict from the intervals of its
quantities and the thresholds in the ledger, by the decision rule that claims.yaml states at its head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from stppo.files import write_atomically
from stppo.results.resampling import MIN_CLUSTERS
from stppo.results.runs import Metrics
from stppo.study.ledger import Claim, Condition, Ledger, Part, load_ledger
from stppo.study.outcomes import Arm, Study
from stppo.study.quantities import QUANTITIES, Arms, Labelled, Untested

SUPPORTED, NOT_SUPPORTED = "supported", "not supported"
INCONCLUSIVE, NOT_TESTED = "inconclusive", "not tested"
NOT_ASKED = "not asked"  # a gated part whose gate was tested and is not supported
PROVISIONAL = "provisional"  # from fewer runs than planned
DECIDES = ("fails", "open", "holds")  # outcomes of conditions that must all hold, in this order
CSV_FILE, MARKDOWN_FILE = "claims.csv", "claims.md"


class Check(NamedTuple):
    """One interval against its threshold."""

    words: str
    value: float
    low: float
    high: float
    threshold: str
    outcome: str  # "holds", "fails" or "open"

    @property
    def has_no_width(self) -> bool:
        """Whether all resamples came out the same: then the interval says nothing of what other runs would show."""
        return math.isclose(self.low, self.high, rel_tol=1e-9, abs_tol=1e-12)

    def __str__(self) -> str:
        interval = f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"
        why = " (the same in all resamples: an interval without width decides nothing)" * self.has_no_width
        return f"{self.words}: {interval}, {self.threshold}: {self.outcome}{why}"


@dataclass(frozen=True)
class Verdict:
    """The answer to one part of a claim. The value is that of the condition that decides (of tenths: the worst): the
    first that fails, else the first that is open, else the first."""

    claim: str
    claim_text: str
    id: str
    text: str
    source: str
    kind: str
    rule: str
    figure: str
    verdict: str
    quantity: str
    value: float
    low: float
    high: float
    threshold: str  # that the interval must lie wholly beyond
    held: str  # how many conditions or tenths hold, and fail; empty for a single condition
    level: float
    n_runs: dict[str, tuple[int, int | None]]  # arm -> recorded, planned (None: no plan given)
    checks: tuple[Check, ...]
    explanation: str
    note: str  # on the rule; may be empty

    @property
    def provisional(self) -> bool:
        """Whether a verdict was given while runs that were planned are missing: more of them may change it."""
        short = any(planned is not None and n < planned for n, planned in self.n_runs.values())
        return short and self.verdict not in (NOT_TESTED, NOT_ASKED)

    @property
    def shown(self) -> str:
        """The verdict for people, with a suffix where it is provisional."""
        return f"{self.verdict} ({PROVISIONAL})" if self.provisional else self.verdict

    @property
    def counted(self) -> str:
        """Recorded runs of all arms together, of the planned ones where they are known."""
        recorded, planned = zip(*self.n_runs.values(), strict=True)
        return f"{sum(recorded)}" if None in planned else f"{sum(recorded)} of {sum(planned)}"

    @property
    def runs(self) -> str:
        """Recorded runs per arm, with the planned number where it is known."""
        return ", ".join(
            f"{arm} {n}" if planned is None else f"{arm} {n} of {planned}"
            for arm, (n, planned) in self.n_runs.items()
        )


Plan = Mapping[tuple[str, str], int]  # (regime, algorithm) -> runs


def evaluate(metrics: Metrics, ledger: Ledger | None = None, planned: Plan | None = None) -> list[Verdict]:
    """Verdicts of all parts, in the ledger's order; deterministic.

    planned: how many runs each arm was to have; with it, an arm that is planned and missing makes its
    claims untested instead of giving way to an alternative.
    """
    ledger = ledger or load_ledger()
    study = Study(metrics)
    verdicts: dict[str, Verdict] = {}
    for claim in ledger.claims:
        for part in claim.parts:
            gate = verdicts[part.gate] if part.gate else None
            verdicts[part.id] = _judge(study, claim, part, ledger.level, planned, gate)
    return list(verdicts.values())


def _judge(
    study: Study, claim: Claim, part: Part, level: float, planned: Plan | None, gate: Verdict | None
) -> Verdict:
    n_runs: dict[str, tuple[int, int | None]] = {}
    estimates: list[tuple[Condition, list[Labelled]]] = []
    missing: list[str] = []
    for condition in part.conditions:
        arms = {role: _resolve(study, names, planned) for role, names in condition.arms.items()}
        for arm in arms.values():
            n_runs[str(arm)] = (len(study.runs(arm)), None if planned is None else planned.get(arm, 0))
        try:
            estimates.append((condition, _estimate(study, condition, arms)))
        except Untested as reason:
            missing.append(str(reason))
    n_checks = sum(len(labelled) for _, labelled in estimates)
    fail_level = 1 - (1 - level) / max(1, n_checks)
    rows = [_checks(condition, labelled, level, fail_level) for condition, labelled in estimates]
    checks = [check for row in rows for check in row]
    outcomes = [check.outcome for check in checks]
    if "fails" in outcomes:
        verdict = NOT_SUPPORTED
    elif missing:
        verdict = NOT_TESTED
    else:
        verdict = SUPPORTED if set(outcomes) == {"holds"} else INCONCLUSIVE
    sentences = [_sentence(condition, row) for (condition, _), row in zip(estimates, rows, strict=True)]
    if missing:
        sentences.append(f"Missing: {'; '.join(dict.fromkeys(missing))}.")
    if gate is not None and gate.verdict != SUPPORTED:
        verdict = NOT_TESTED if gate.verdict in (NOT_TESTED, NOT_ASKED) else NOT_ASKED
        sentences.insert(0, f"Asked only if {gate.id} is supported, and it is {gate.verdict}.")
    first = part.conditions[0]
    unmeasured = Check(first.quantity.replace("_", " "), *[math.nan] * 3, first.threshold, "")
    head = min(map(_worst, rows), key=lambda check: DECIDES.index(check.outcome), default=unmeasured)
    return Verdict(
        claim=claim.id,
        claim_text=claim.text,
        source=claim.source,
        **part.model_dump(include={"id", "text", "kind", "rule", "figure", "note"}),
        verdict=verdict,
        quantity=head.words,
        value=head.value,
        low=head.low,
        high=head.high,
        threshold=head.threshold,
        held=_held(part, outcomes),
        level=level,
        n_runs=n_runs,
        checks=tuple(checks),
        explanation=" ".join(sentences),
    )


def _worst(checks: Sequence[Check]) -> Check:
    """Of the tenths of training, all of which must lie below a threshold, the one that comes highest."""
    return max(checks, key=lambda check: check.high)


def _held(part: Part, outcomes: Sequence[str]) -> str:
    tenths = any(condition.quantity == "highest_tenth_difference" for condition in part.conditions)
    n, unit = (len(outcomes), "tenths") if tenths else (len(part.conditions), "conditions")
    if n < 2:
        return ""
    failed = outcomes.count("fails")
    return f"{outcomes.count('holds')} of {n} {unit} hold" + (f", {failed} fail" if failed else "")


def _sentence(condition: Condition, checks: Sequence[Check]) -> str:
    if condition.quantity != "highest_tenth_difference":
        return f"{checks[0]}."
    outcomes = [check.outcome for check in checks]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    return f"{_worst(checks)}; {len(checks)} of 10 tenths could be tested: {counts}."


def _resolve(study: Study, names: str, planned: Plan | None) -> Arm:
    """The first alternative that was planned (without a plan: run).

    It is the first one in any case where nothing of its regime was planned or run: what is to run there is not decided
    then, and an alternative may stand in only for what was decided not to run.
    """
    alternatives = [Arm(*name.split("/")) for name in names.split("|")]
    regimes = study.metrics.regimes if planned is None else {regime for regime, _ in planned}
    if alternatives[0].regime not in regimes:
        return alternatives[0]
    for arm in alternatives:
        if arm in planned if planned is not None else study.runs(arm):
            return arm
    return alternatives[0]


def _estimate(study: Study, condition: Condition, arms: Arms) -> list[Labelled]:
    if absent := [str(arm) for arm in arms.values() if not study.runs(arm)]:
        raise Untested(f"no runs of {', '.join(absent)}")
    quantity = QUANTITIES[condition.quantity]
    try:
        labelled = quantity.estimate(
            study, arms, **{name: getattr(condition, name) for name in quantity.options}
        )
    except ValueError as error:
        raise Untested(f"{condition.quantity} of {', '.join(map(str, arms.values()))}: {error}") from None
    for words, estimate in labelled:
        if estimate.n_clusters < MIN_CLUSTERS:
            raise Untested(
                f"{words} is {estimate.value:.3g}, from {estimate.n_clusters} warm starts; a verdict needs {MIN_CLUSTERS}"
            )
    return labelled


def _checks(condition: Condition, labelled: list[Labelled], level: float, fail_level: float) -> list[Check]:
    checks = []
    for words, estimate in labelled:
        low, high = estimate.interval(level)
        holds, fails = condition.holds(low, high), condition.fails(*estimate.interval(fail_level))
        check = Check(words, estimate.value, low, high, condition.threshold, "open")
        if not check.has_no_width:
            check = check._replace(outcome="holds" if holds else "fails" if fails else "open")
        checks.append(check)
    return checks


def ledger_table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """One row per verdict: claim, claim_text, id, text, source, kind, rule, quantity, value, low, high, threshold, held, level,
    verdict, provisional (true: from fewer runs than planned), runs, figure, explanation, note."""
    names = [
        "claim",
        "claim_text",
        "id",
        "text",
        "source",
        "kind",
        "rule",
        "quantity",
        "value",
        "low",
        "high",
    ]
    names += [
        "threshold",
        "held",
        "level",
        "verdict",
        "provisional",
        "runs",
        "figure",
        "explanation",
        "note",
    ]
    return pd.DataFrame([{name: getattr(verdict, name) for name in names} for verdict in verdicts])


def ledger_markdown(verdicts: Sequence[Verdict]) -> str:
    """The ledger as a Markdown table for people: claim, source, quantity, interval, verdict, runs (recorded of planned),
    figure. A verdict from fewer runs than planned ends in `(provisional)`; numbers in brackets are notes below the table."""
    lines = [
        "| | claim | source | measured | verdict | runs | figure |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    notes = list(dict.fromkeys(v.note for v in verdicts if v.note))
    for v in verdicts:
        measured = "—"
        if not math.isnan(v.value):
            measured = f"{v.quantity}: {v.value:.2f} [{v.low:.2f}, {v.high:.2f}], threshold {v.threshold}"
            measured += f" ({v.held})" if v.held else ""
        star = "" if v.kind == "primary" else f" ({v.kind.replace('_', ' ')})"
        verdict = f"{v.shown} [{notes.index(v.note) + 1}]" if v.note else v.shown
        lines.append(
            f"| {v.id} | {v.text}{star} | {v.source} | {measured} | {verdict} | {v.counted} | {v.figure} |"
        )
    n, level = sum(v.kind == "primary" for v in verdicts), verdicts[0].level if verdicts else math.nan
    below = [
        f"Intervals at {level:.2%} each, so that the {n} primary verdicts hold jointly.".replace("%", " %")
    ]
    if any(v.provisional for v in verdicts):
        below.append(f"{PROVISIONAL.capitalize()}: from fewer runs than planned; more of them may change it.")
    below += [f"[{i}] {note}" for i, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", "\n\n".join(below), ""])


def write_ledger(verdicts: Sequence[Verdict], out_dir: str | Path) -> list[Path]:
    """Write claims.csv (every field) and claims.md; returns the paths."""
    table = ledger_table(verdicts).to_csv(index=False, float_format="%.5g", lineterminator="\n")
    paths = []
    for name, text in ((CSV_FILE, table), (MARKDOWN_FILE, ledger_markdown(verdicts))):
        paths.append(Path(out_dir) / name)
        write_atomically(paths[-1], partial(Path.write_text, data=text, encoding="utf-8"))
    return paths
