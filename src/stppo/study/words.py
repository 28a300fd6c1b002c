"""Sentences about numbers that are not known beforehand: each says what its interval allows, and no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pandas as pd

from stppo.results.resampling import Estimate
from stppo.results.statistics import CONFIDENCE
from stppo.results.style import look
from stppo.study.arms import MAIN
from stppo.study.outcomes import Arm

# Warm starts below which no sentence names a direction: two say next to nothing of how much warm starts differ.
FEWEST = 3


def listed(items: Sequence[str]) -> str:
    """a, b and c; with semicolons where an item has a comma of its own."""
    items = list(items)
    if len(items) < 2:
        return "".join(items)
    comma = "; " if any("," in item for item in items) else ", "
    return f"{comma.join(items[:-1])} and {items[-1]}"


def called(arm: Arm) -> str:
    """An arm's label, with its regime unless that is the main one."""
    label = look(arm.algorithm).label
    return label if arm.regime == MAIN else f"{label} ({arm.regime})"


def capital(text: str) -> str:
    """With a capital first letter, the rest as it is."""
    return text[:1].upper() + text[1:]


def number(value: float, sign: bool = False) -> str:
    """Two decimals, with a true minus; `sign` writes a plus too."""
    if not math.isfinite(value):
        return "unknown"
    text = f"{value:+.2f}" if sign else f"{value:.2f}"
    return text.replace("-", "−")


def interval(value: float, low: float, high: float, sign: bool = False) -> str:
    """0.12 [0.03, 0.21]; without an interval it says why."""
    if not math.isfinite(low):
        return f"{number(value, sign)} (one warm start: no interval)"
    return f"{number(value, sign)} [{number(low, sign)}, {number(high, sign)}]"


def of(found: Estimate, sign: bool = False) -> str:
    """`interval` of an estimate at 95 %."""
    return interval(found.value, *found.interval(CONFIDENCE), sign)


def side(low: float, high: float) -> int:
    """1 if an interval lies wholly above 0, -1 if below, 0 if it holds 0 or there is none."""
    return 1 if low > 0 else -1 if high < 0 else 0


def difference(found: Estimate | None, above: str, below: str, open_: str) -> str:
    """The phrase for the side on which a difference lies, with its interval."""
    if found is None:
        return "not compared"
    if found.n_clusters < FEWEST:
        return f"with too few warm starts for a direction ({of(found, sign=True)})"
    phrase = {1: above, -1: below, 0: open_}[side(*found.interval(CONFIDENCE))]
    return f"{phrase} ({of(found, sign=True)})"


def share(collapsed: int, runs: int) -> str:
    """k of n."""
    return f"{collapsed} of {runs}"


def _named(rows: pd.DataFrame, column: str) -> str:
    cells = rows[["label", column, f"{column}_low", f"{column}_high"]].itertuples(index=False, name=None)
    return listed([f"{label} {interval(*values, sign=True)}" for label, *values in cells])


def where(table: pd.DataFrame, column: str, which: int) -> pd.DataFrame:
    """Rows of `comparisons.compare` whose interval of a difference lies on one `side`, from enough warm starts."""
    enough = table[table["shared"] >= FEWEST]
    sides = [side(*pair) for pair in zip(enough[f"{column}_low"], enough[f"{column}_high"], strict=True)]
    return enough[[one == which for one in sides]]


def found(table: pd.DataFrame, column: str, which: int) -> str:
    """How many rows lie on one `side`, see `where`; up to five of them named, with their intervals."""
    rows = where(table, column, which)
    return f"{len(rows)}{f' ({_named(rows, column)})' if 0 < len(rows) <= 5 else ''}"


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """A table for people: value and interval in one cell, labels in place of arms, counts as k of n."""
    shown = table.drop(columns=["arm", "group"], errors="ignore") if "label" in table else table.copy()
    if "algorithm" in shown:
        shown["algorithm"] = [look(name).label for name in shown["algorithm"]]
    for name in [column for column in table if f"{column}_low" in table]:
        cells = table[[name, f"{name}_low", f"{name}_high"]].itertuples(index=False, name=None)
        shown[name] = [interval(*cell) if math.isfinite(cell[0]) else "" for cell in cells]
        shown = shown.drop(columns=[f"{name}_low", f"{name}_high"])
    if "collapsed" in shown and "warm_starts" in shown:  # of `comparisons.compare`
        shown["collapsed"] = [share(*pair) for pair in zip(table["collapsed"], table["runs"], strict=True)]
        plans = table["planned"].where(table["planned"] != table["runs"])
        shown["runs"] = [
            n if pd.isna(plan) else share(n, plan) for n, plan in zip(table["runs"], plans, strict=True)
        ]
        shown = shown.drop(
            columns=["planned", "warm_starts", *(["recovered"] if not table["recovered"].any() else [])]
        )
    first = [name for name in ("block",) if name in shown]
    return shown[[*first, *shown.columns.drop(first)]].rename(columns=lambda name: name.replace("_", " "))


def group_sentence(table: pd.DataFrame) -> str:
    """What the table of a group (`comparisons.compare`) shows: which arms differ from the default, and how."""
    default, others = table.iloc[0], table.iloc[1:]
    run = others[others["runs"] > 0]
    absent = [str(arm) for arm in table.loc[table["runs"] == 0, "arm"]]
    if not default["runs"] or run.empty:
        return f"Not tested: no runs of {listed(absent)}."
    name = default["label"]
    parts = [
        f"{capital(name)} collapsed in {share(default['collapsed'], default['runs'])} runs and ended at "
        f"{interval(*(default[c] for c in ('final_success', 'final_success_low', 'final_success_high')))}."
    ]
    phrases = [
        ("final_difference", 1, "Higher at the end"),
        ("final_difference", -1, "Lower at the end"),
        ("extra_risk", 1, "Collapses more often"),
        ("extra_risk", -1, "Collapses less often"),
    ]
    told: set[str] = set()
    for column, which, words in phrases:
        found = where(run, column, which)
        if len(found):
            parts.append(f"{words}: {_named(found, column)}.")
            told |= set(found["arm"])
    rest = run[~run["arm"].isin(told)]
    if len(rest):
        widest = (rest["final_difference_high"] - rest["final_difference_low"]).max() / 2
        precision = (
            f", with intervals of up to ±{number(widest)} in final success" if math.isfinite(widest) else ""
        )
        parts.append(f"No difference shown for {listed(list(rest['label']))}{precision}.")
    if absent:
        parts.append(f"Not run: {listed(absent)}.")
    return " ".join(parts)


def untested(missing: Sequence[str]) -> str:
    """For an answer whose runs do not exist."""
    return f"Not tested: no runs of {listed(list(missing))}."


def ranking(items: Sequence[tuple[str, float]], best: Callable = max) -> list[str]:
    """Labels whose value is the best one; several where they tie."""
    top = best(value for _, value in items)
    return [label for label, value in items if value == top]
