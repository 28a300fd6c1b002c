"""The two main settings, chosen by the rule of `results/reference/search/PLAN.md` from runs of token PPO alone."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from stppo.figures.curves import BASELINE
from stppo.figures.settings_map import SHOWN, cells
from stppo.record.runs import Metrics

YARDSTICK = "ON_POLICY"
EPOCHS, STALENESS = 8, 2  # at which the learning rate is chosen where nothing else decides


@dataclass(frozen=True)
class Choice:
    """A chosen setting and why; `regime` is None where the rule finds none."""

    regime: str | None
    why: str


def learnable(metrics: Metrics) -> float:
    """G: mean of (final success - start) of the yardstick's runs. ValueError where it has none."""
    runs = metrics.arm(YARDSTICK, BASELINE)
    if runs.empty:
        raise ValueError(f"the search has no run of {BASELINE} in {YARDSTICK}, by which it is measured")
    return float((runs["final"] - runs["start"]).mean())


def judged(metrics: Metrics) -> pd.DataFrame:
    """`cells` of every setting but the yardstick's, with `below`: the number of runs that end below start + G / 2."""
    half = learnable(metrics) / 2
    table = cells(metrics)
    table = table[table["regime"] != YARDSTICK].reset_index(drop=True)
    arms = [metrics.arm(regime, BASELINE) for regime in table["regime"]]
    return table.assign(below=[int((arm["final"] < arm["start"] + half).sum()) for arm in arms])


def critical(table: pd.DataFrame) -> Choice:
    """The setting that shows the paper's shape in most runs (ties: the lower learning rate x epochs, then 8 epochs, then
    staleness 2); if none shows it, 8 epochs and staleness 2 at the lowest rate at which half of the runs stay below."""
    found = table[table["share"] >= SHOWN]
    if len(found):
        found = found.assign(other=found["epochs"] != EPOCHS, stale=found["staleness"] != STALENESS)
        best = found.sort_values(
            ["shows", "intensity", "other", "stale"], ascending=[False, True, True, True]
        ).iloc[0]
        return Choice(
            best["regime"], f"{best['shows']} of {best['runs']} runs learn and lose half of their gain"
        )
    for row in _rates(table).to_dict("records"):
        if row["below"] >= row["runs"] / 2:
            return Choice(
                row["regime"],
                f"no setting shows the shape; here {row['below']} of {row['runs']} runs gain less than half",
            )
    return Choice(None, "no setting shows the shape, and at every rate most runs gain half or more")


def mild(table: pd.DataFrame) -> Choice:
    """8 epochs and staleness 2 at the highest rate at which every run gains at least half of what can be learned; if there
    is none, the lowest rate of the grid."""
    rates = _rates(table)
    good = rates[rates["below"] == 0]
    if len(good):
        return Choice(good.iloc[-1]["regime"], "the highest rate at which every run gains half or more")
    if rates.empty:
        return Choice(None, f"no run at {EPOCHS} epochs and staleness {STALENESS}")
    return Choice(rates.iloc[0]["regime"], "at no rate does every run gain half; this is the lowest")


def _rates(table: pd.DataFrame) -> pd.DataFrame:
    """The settings at which the learning rate alone is chosen, lowest rate first, each at its longest horizon."""
    part = table[(table["epochs"] == EPOCHS) & (table["staleness"] == STALENESS)]
    part = part.sort_values("iterations").drop_duplicates("learning_rate", keep="last")
    return part.sort_values("learning_rate")
