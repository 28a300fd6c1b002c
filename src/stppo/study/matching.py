"""Whether the controls reached what they were matched to: the KL and step length of the arm that they stand for, or token
PPO's share of ratios that leave the clip range."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from stppo.results import resampling
from stppo.results.resampling import Estimate
from stppo.results.statistics import CONFIDENCE
from stppo.results.style import look
from stppo.schema import RunRecord
from stppo.study import words
from stppo.study.arms import CONTROLS, MAIN
from stppo.study.comparisons import arm_of, estimate
from stppo.study.outcomes import TABLE_DRAWS, Arm, Study
from stppo.study.tuning import EPSILON_OVER, EPSILONS, MATCHED_BY, MATCHED_OVER

RANGE = "range"  # what an epsilon is matched by
_COLUMNS = MATCHED_BY | {RANGE: "out_of_range_fraction"}
_OVER = dict.fromkeys(MATCHED_BY, MATCHED_OVER) | {RANGE: EPSILON_OVER}


def matching_table(study: Study) -> pd.DataFrame:
    """One row per control: block, label, runs, and as multiples of its default's (a stabilised arm's; token PPO's for the
    matched epsilons) kl_ratio, step_ratio and range_ratio with _low and _high at 95 %; matched: the one of the three that
    was matched, empty for others. Over the first iterations, as tuning did. NaN where an arm has no runs."""
    pairs = [
        (group.title, arm_of(name), arm_of(group.default), label, MATCHED_BY)
        for group in CONTROLS
        for name, label in group.arms.items()
    ]
    token = Arm(MAIN, "token_ppo")
    pairs += [
        ("ε matched to token PPO", Arm(MAIN, f"{name}_epsilon_matched"), token, look(name).label, (RANGE,))
        for name in EPSILONS
    ]
    rows = []
    for block, arm, default, label, measured in pairs:
        by = [how for how in measured if arm.algorithm.endswith((f"{how}_matched", "epsilon_matched"))]
        row: dict[str, object] = {"block": block, "label": label, "runs": len(study.runs(arm))}
        for how in _COLUMNS:
            found = estimate(_log_ratio, study, arm, default, how) if how in measured else None
            ends = np.exp((found.value, *found.interval(CONFIDENCE))) if found else [math.nan] * 3
            row |= dict(zip((f"{how}_ratio", f"{how}_ratio_low", f"{how}_ratio_high"), ends, strict=True))
        rows.append({**row, "matched": by[0] if by else "", "arm": str(arm)})
    return pd.DataFrame(rows)


def matching_sentences(table: pd.DataFrame) -> list[str]:
    """What was matched, and how near it came, from `matching_table`; empty where no matched arm was run."""
    sentences = []
    for kinds, what in (
        (
            tuple(MATCHED_BY),
            f"Over iterations 1 to {MATCHED_OVER}, what was matched, as a multiple of the stabilised arm's",
        ),
        (
            (RANGE,),
            f"Share of ratios out of range over iterations 1 to {EPSILON_OVER}, as a multiple of token PPO's",
        ),
    ):
        told = [
            f"{look(arm_of(row['arm']).algorithm).label} "
            + words.interval(*(row[f"{row['matched']}_ratio{end}"] for end in ("", "_low", "_high")))
            for row in table.to_dict("records")
            if row["matched"] in kinds and math.isfinite(row[f"{row['matched']}_ratio"])
        ]
        if told:
            sentences.append(f"{what}: {words.listed(told)}.")
    return sentences


def _log_ratio(study: Study, arm: Arm, default: Arm, how: str) -> Estimate:
    """Log of what an arm reaches early over what its default does. ValueError where one has no run that recorded it."""
    column = _COLUMNS[how]
    if column not in study.metrics.iterations:
        raise ValueError(f"no run recorded {column}")

    def early(record: RunRecord) -> float:
        rows = study.iterations(record)
        return math.log(rows.loc[rows["iteration"] <= _OVER[how], column].mean())

    return resampling.difference(
        study.outcomes(arm, early), study.outcomes(default, early), n_draws=TABLE_DRAWS
    )
