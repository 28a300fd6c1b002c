"""The claims ledgers and their verdicts: `claims.yaml` says what is claimed and what would show it,
`evaluate` what runs show.

An entry is a sentence with conditions. A condition names one number per run (`stppo.study.measures`) of arms
and a threshold: `mean` of an arm, `difference` of two arms, `best_elsewhere` of two lists of arms (their
difference, each in every world the one that ends highest in the others), or `main_effect` of a factor of a
factorial group. Its interval is over worlds, paired (`stppo.stats`). An entry is

- *supported* if the joint interval of every condition lies wholly beyond its threshold,
- *not supported* if that of some condition lies wholly on the other side (widened so that m chances to fail
  count as one),
- *not asked* if neither, and an arm has no runs, or too few worlds for the level, or the entry it is gated by
  is not supported,
- *inconclusive* otherwise. An interval without width decides nothing.

Joint level: 1 - error / n for the n entries without a gate whose id begins with the same letter: the paper's
claims (C) are one family, the reviewers' questions (Q) another. A gated entry is asked only if its gate is
supported, at the same level. The first behind a gate costs the family nothing (a fixed sequence); each
further one behind the same gate adds error / n to what the family errs at most, so two behind C5 make (n + 1)
/ n of `error`. Estimates and their 95 % intervals come first; the verdict is a label on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import pandas as pd
from omegaconf import OmegaConf
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from stppo import stats
from stppo.files import write_atomically
from stppo.record.runs import Metrics
from stppo.stats import Estimate, Values, fewest_worlds, joint_level
from stppo.study import arms
from stppo.study.arms import MAIN, Group
from stppo.study.measures import COLUMNS, SHARES, per_run
from stppo.study.questions import questions_figure

LEDGER_FILE = Path(__file__).with_name("claims.yaml")
LEDGER_FILES = (LEDGER_FILE, Path(__file__).with_name("claims_divisor.yaml"))  # one a preset
SUPPORTED, NOT_SUPPORTED, INCONCLUSIVE, NOT_ASKED = "supported", "not supported", "inconclusive", "not asked"
HOLDS, FAILS, OPEN = "holds", "fails", "open"
CSV_FILE = "claims.csv"
SHOWN = 0.95


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Condition(_Section):
    """A number of arms that must lie above or below a threshold. Arms are `REGIME/arm`, or `arm` in
    `OFF_POLICY`."""

    column: str
    mean: str | None = None
    difference: tuple[str, str] | None = None  # the first minus the second
    best_elsewhere: tuple[tuple[str, ...], tuple[str, ...]] | None = None  # the first less the second
    main_effect: str | None = None  # GROUP.FACTOR
    above: float | None = None
    below: float | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Condition:
        if self.column not in COLUMNS:
            raise ValueError(f"column {self.column} is unknown; known: {', '.join(COLUMNS)}")
        asked = (self.mean, self.difference, self.best_elsewhere, self.main_effect)
        if sum(of is not None for of in asked) != 1:
            raise ValueError("one of mean, difference, best_elsewhere and main_effect is needed")
        if (self.above is None) == (self.below is None):
            raise ValueError("one of above and below is needed")
        return self

    @property
    def threshold(self) -> str:
        return f"> {self.above:g}" if self.above is not None else f"< {self.below:g}"

    def holds(self, low: float, high: float) -> bool:
        """Whether an interval lies wholly beyond the threshold."""
        return low > self.above if self.above is not None else high < self.below

    def fails(self, low: float, high: float) -> bool:
        """Whether an interval lies wholly on the other side."""
        return high < self.above if self.above is not None else low > self.below

    def weights(self, groups: Mapping[str, Group]) -> dict[tuple[str, str], float]:
        """(regime, arm) -> weight of its mean in the number that is asked for; of `best_elsewhere`, if it is
        chosen."""
        if self.main_effect is not None:
            name, _, factor = self.main_effect.partition(".")
            if name not in groups:
                raise ValueError(
                    f"main_effect {self.main_effect}: no group {name}; known: {', '.join(groups)}"
                )
            effect = groups[name].main_effect(factor)
            return {(groups[name].regimes[0], arm): weight for arm, weight in effect.items()}
        if self.best_elsewhere is not None:
            ours, theirs = self.best_elsewhere
            named = dict.fromkeys(ours, 1.0) | dict.fromkeys(theirs, -1.0)
        else:
            named = {self.mean: 1.0} if self.mean else dict(zip(self.difference, (1.0, -1.0), strict=True))
        return {tuple(arm.rsplit("/", 1)) if "/" in arm else (MAIN, arm): w for arm, w in named.items()}


class Entry(_Section):
    """A claim or a question."""

    id: str
    claim: str
    source: str
    holds_if: tuple[Condition, ...] = Field(min_length=1)
    gate: str | None = None  # id of an earlier entry that must be supported
    note: str = ""


class Ledger(_Section):
    """All entries, of the runs of one preset."""

    preset: str
    error: float = Field(gt=0, lt=1)
    claims: tuple[Entry, ...]

    @model_validator(mode="after")
    def _ids_are_known(self) -> Ledger:
        ids = [entry.id for entry in self.claims]
        for i, entry in enumerate(self.claims):
            if entry.id in ids[:i]:
                raise ValueError(f"two entries are named {entry.id}")
            if entry.gate is not None and entry.gate not in ids[:i]:
                raise ValueError(f"{entry.id}: its gate {entry.gate} is no earlier entry")
        return self

    def level(self, entry: Entry) -> float:
        """Level of every interval that decides the entry."""
        family = [other for other in self.claims if other.id[0] == entry.id[0] and other.gate is None]
        return joint_level(max(1, len(family)), self.error)


def load_ledger(path: str | Path = LEDGER_FILE) -> Ledger:
    """Read a ledger; ValueError of one line names the entry that is wrong."""
    try:
        return Ledger.model_validate(OmegaConf.to_container(OmegaConf.load(path), resolve=True))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "ledger"
        raise ValueError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


def ledger_of(metrics: Metrics) -> Ledger | None:
    """The first shipped ledger of whose preset there is a run; None where there is none."""
    presets = {run["preset"] for run in metrics.runs}
    return next((found for found in map(load_ledger, LEDGER_FILES) if found.preset in presets), None)


@dataclass(frozen=True)
class Check:
    """What the runs say of one condition."""

    condition: Condition
    measured: str  # in words
    estimate: Estimate | None
    outcome: str  # HOLDS, FAILS, OPEN, or why it could not be asked
    median: float = math.nan  # over worlds; NaN of a share


@dataclass(frozen=True)
class Verdict:
    """The answer to one entry."""

    entry: Entry
    level: float
    verdict: str
    checks: tuple[Check, ...]


def evaluate(
    metrics: Metrics,
    ledger: Ledger | None = None,
    groups: Mapping[str, Group] | None = None,
    labels: Mapping[str, str] | None = None,
) -> list[Verdict]:
    """Verdicts in the order of the ledger (default: `ledger_of` the runs); none where no run is of its
    preset.

    groups, labels: of that preset (default: read from its YAML). Deterministic."""
    ledger = ledger or ledger_of(metrics)
    if ledger is None or all(run["preset"] != ledger.preset for run in metrics.runs):
        return []
    groups = arms.groups(ledger.preset) if groups is None else groups
    labels = arms.labels(ledger.preset) if labels is None else labels
    runs = {key: rows for key, rows in per_run(metrics).groupby(["regime", "algorithm"])}
    verdicts: dict[str, Verdict] = {}
    for entry in ledger.claims:
        level = ledger.level(entry)
        measure = partial(_check, runs, groups, labels, level, len(entry.holds_if))
        checks = tuple(map(measure, entry.holds_if))
        gate = verdicts[entry.gate] if entry.gate else None
        if gate is not None and gate.verdict != SUPPORTED:
            shut = f"{entry.gate} is {gate.verdict}"
            checks = tuple(replace(check, outcome=shut) for check in checks)
        verdicts[entry.id] = Verdict(entry, level, _verdict([check.outcome for check in checks]), checks)
    return list(verdicts.values())


def _verdict(outcomes: Sequence[str]) -> str:
    if FAILS in outcomes:
        return NOT_SUPPORTED
    if not set(outcomes) <= {HOLDS, OPEN}:
        return NOT_ASKED
    return INCONCLUSIVE if OPEN in outcomes else SUPPORTED


def _check(
    runs: Mapping[tuple[str, str], pd.DataFrame],
    groups: Mapping[str, Group],
    labels: Mapping[str, str],
    level: float,
    n_conditions: int,
    condition: Condition,
) -> Check:
    weights, column = condition.weights(groups), condition.column
    words = f"{column}: " + " − ".join(
        labels.get(arm, arm) + ("" if regime == MAIN else f" ({regime})") for regime, arm in weights
    )
    if condition.main_effect:
        words = f"{column}: main effect of {condition.main_effect.partition('.')[2]}"
    if condition.best_elsewhere:
        words = f"{column}: " + " − ".join(f"best of {', '.join(s)}" for s in condition.best_elsewhere)
    if absent := ["/".join(arm) for arm in weights if arm not in runs]:
        return Check(condition, words, None, f"no runs of {', '.join(absent)}")
    values = [stats.by_world(runs[arm], column) for arm in weights]
    signs = list(weights.values())
    if condition.best_elsewhere:
        first = len(condition.best_elsewhere[0])
        ends = [stats.by_world(runs[arm], "final") for arm in weights]
        sides = (values[:first], ends[:first]), (values[first:], ends[first:])
        try:
            values = [best_elsewhere(*side) for side in sides]
        except ValueError as error:
            return Check(condition, words, None, str(error))
        signs = [1.0, -1.0]
    try:
        bounds = (0.0, 1.0) if column in SHARES else None
        estimate = stats.contrast(values, signs, bounds)
    except ValueError:
        return Check(condition, words, None, f"no world in which all have {column}")
    outcome = _outcome(condition, estimate, level, n_conditions)
    return Check(
        condition, words, estimate, outcome, math.nan if column in SHARES else _median(values, signs)
    )


def best_elsewhere(settings: Sequence[Values], by: Sequence[Values]) -> dict[int, float]:
    """For each world the number of the setting with the highest mean of `by` over the *other* worlds (the
    first of equals). So trying more settings does not flatter an arm.

    settings: world -> the arm's number, one mapping a setting; by: likewise what is chosen by. ValueError
    where all together share fewer than two worlds."""
    worlds = sorted(set.intersection(*(set(of) for of in (*settings, *by))))
    if len(worlds) < 2:
        raise ValueError(
            f"the settings have {len(worlds)} worlds in common, two are needed to choose elsewhere"
        )

    def chosen(world: int) -> int:
        return max(range(len(settings)), key=lambda i: sum(by[i][w] for w in worlds if w != world))

    return {world: settings[chosen(world)][world] for world in worlds}


def _median(arms: Sequence[Mapping[int, float]], weights: Sequence[float]) -> float:
    """Of the worlds that all arms have, of the weighted sum in each."""
    worlds = set.intersection(*map(set, arms))
    return median(sum(w * arm[world] for arm, w in zip(arms, weights, strict=True)) for world in worlds)


def _outcome(condition: Condition, estimate: Estimate, level: float, n_conditions: int) -> str:
    if estimate.n_worlds < (needed := fewest_worlds(level)):
        return f"{estimate.n_worlds} worlds of {needed} needed"
    low, high = estimate.interval(level)
    if high - low < 1e-12:
        return OPEN
    if condition.holds(low, high):
        return HOLDS
    return FAILS if condition.fails(*estimate.interval(1 - (1 - level) / n_conditions)) else OPEN


COLUMN_NAMES = ("id", "claim", "source", "measured", "estimate", "low", "high", "median")
COLUMN_NAMES += ("joint_low", "joint_high", "threshold", "worlds", "outcome")
COLUMN_NAMES += ("level", "verdict", "gate", "note")


def table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """One row per condition, with the columns `COLUMN_NAMES`: estimate is the mean over worlds, low and high
    are those of its 95 % interval, joint_low and joint_high decide, the median of a share is empty; all are
    empty where nothing could be estimated."""
    rows = []
    for verdict, check in ((v, c) for v in verdicts for c in v.checks):
        entry, found, values, worlds = verdict.entry, check.estimate, [None] * 6, 0
        if found:
            values = [found.value, *found.interval(SHOWN), check.median, *found.interval(verdict.level)]
            worlds = found.n_worlds
        row = [entry.id, entry.claim, entry.source, check.measured, *values, check.condition.threshold]
        row += [worlds, check.outcome, verdict.level, verdict.verdict, entry.gate or "", entry.note]
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMN_NAMES))


def write_claims(metrics: Metrics, out_dir: str | Path) -> list[Path]:
    """Write claims.csv of the runs' ledger into a folder, and the picture of the runs' questions; returns the
    paths."""
    csv = table(evaluate(metrics)).to_csv(index=False, float_format="%.5g", lineterminator="\n")
    path = Path(out_dir) / CSV_FILE
    write_atomically(path, partial(Path.write_text, data=csv, encoding="utf-8"))
    plot = questions_figure(metrics) if metrics.runs else None
    return [path, *(plot.save(out_dir) if plot else ())]
