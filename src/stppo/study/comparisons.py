"""Arms of the study beside their default: one row each, with intervals at 95 % and no verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from stppo.results import resampling
from stppo.results.captions import regime_settings
from stppo.results.resampling import Estimate
from stppo.results.runs import Metrics
from stppo.results.statistics import CONFIDENCE
from stppo.results.style import in_order, look
from stppo.study.arms import MEANING, Group
from stppo.study.claims import Plan
from stppo.study.outcomes import TABLE_DRAWS, Arm, Study

QUANTITIES = ("collapse_risk", "extra_risk", "final_success", "final_difference")


def load_plan(file: str | Path | None) -> Plan | None:
    """Planned runs from a JSON file {"REGIME/algorithm": runs}; None without a file: the plan is unknown.

    ValueError of one line for a file of another form; FileNotFoundError names the remedy.
    """
    if not file:
        return None
    file = Path(file)
    try:
        counts = json.loads(file.read_text(encoding="utf-8"))
        return {arm_of(name): int(runs) for name, runs in counts.items()}
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} is missing; make it with: snakemake {file}") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{file}: must map REGIME/algorithm to a number of runs ({error})") from None


def arm_of(name: str) -> Arm:
    """The arm that REGIME/algorithm names; ValueError for a name of another form."""
    regime, _, algorithm = name.partition("/")
    if not regime or not algorithm or "/" in algorithm:
        raise ValueError(f"{name!r} is not REGIME/algorithm")
    return Arm(regime, algorithm)


def coverage(metrics: Metrics, planned: Plan | None) -> pd.DataFrame:
    """One row per regime: what is different in it in words, iterations, learning_rate, staleness and updates as recorded
    (`captions.regime_settings`), arms and runs recorded and, where a plan is given, planned, and what is missing."""
    recorded: dict[Arm, int] = {}
    for run in metrics.runs:
        arm = Arm(run["regime"], run["algorithm"])
        recorded[arm] = recorded.get(arm, 0) + 1
    rows = []
    for regime in sorted({arm.regime for arm in (*recorded, *(planned or ()))}):
        here = {arm: n for arm, n in recorded.items() if arm.regime == regime}
        row: dict[str, object] = {
            "regime": regime,
            "setting": MEANING.get(regime, ""),
            **dict.fromkeys(("iterations", "learning_rate", "staleness", "updates"), ""),
            **regime_settings(metrics, regime, metrics.algorithms(regime)),
            "arms": len(here),
            "runs": sum(here.values()),
        }
        if planned is not None:
            plan = {arm: n for arm, n in planned.items() if arm.regime == regime}
            short = {
                arm.algorithm: f"{here.get(arm, 0)} of {n}" for arm, n in plan.items() if here.get(arm, 0) < n
            }
            row |= {
                "arms_planned": len(plan),
                "runs_planned": sum(plan.values()),
                "missing": ", ".join(f"{name} {short[name]}" for name in in_order(short)),
            }
        rows.append(row)
    return pd.DataFrame(rows)


def group_table(study: Study, group: Group, planned: Plan | None = None) -> pd.DataFrame:
    """One row per arm of a group, its default first, those without runs included. See `compare`."""
    default = arm_of(group.default)
    others = [(arm_of(name), words) for name, words in group.arms.items()]
    return compare(study, [(default, look(default.algorithm).label), *others], planned).assign(
        group=group.name
    )


def compare(study: Study, arms: Sequence[tuple[Arm, str]], planned: Plan | None = None) -> pd.DataFrame:
    """One row per arm; differences are to the first one, over the warm starts that both have.

    Columns: arm, label, runs, planned (NA: unknown), warm_starts, shared (warm starts of the comparison), collapsed,
    recovered, and each of
    collapse_risk, extra_risk (the arm's minus the default's), final_success, final_difference (likewise)
    with _low and _high, cut at the bounds of a share or a difference of two; NaN where runs are missing, an interval also
    from a single warm start.
    """
    default = arms[0][0]
    rows = []
    for arm, label in arms:
        runs = study.runs(arm)
        verdicts = [study.collapsed(run) for run in runs.values()]
        row: dict[str, object] = {
            "arm": str(arm),
            "label": label,
            "runs": len(runs),
            "planned": pd.NA if planned is None else planned.get(arm, 0),
            "warm_starts": len({replicate.cluster for replicate in runs}),
            "collapsed": sum(verdict == 1 for verdict in verdicts),
            "recovered": sum(
                study.metrics.collapses[run["regime"], run["algorithm"], run["seed"]].transient
                for run in runs.values()
            ),
        }
        for name in QUANTITIES:
            compared = name in ("extra_risk", "final_difference")
            found = None if compared and arm == default else estimate(_ESTIMATES[name], study, arm, default)
            low, high = found.interval(CONFIDENCE) if found else (math.nan, math.nan)
            low, high = np.clip((low, high), -1.0 if compared else 0.0, 1.0)  # all are shares
            if compared:
                row["shared"] = found.n_clusters if found else 0
            row |= {name: found.value if found else math.nan, f"{name}_low": low, f"{name}_high": high}
        rows.append(row)
    return pd.DataFrame(rows).astype({"planned": "Int64"})


def estimate(of: Callable[..., Estimate], *args: object) -> Estimate | None:
    """The estimate, or None where an arm has no run with a value."""
    try:
        return of(*args)
    except ValueError:
        return None


def extra_risk(study: Study, arm: Arm, default: Arm) -> Estimate:
    """Collapse risk of `arm` minus that of `default`. ValueError where one has no decidable run."""
    return study.risk_difference(arm, default, n_draws=TABLE_DRAWS)


def final_difference(study: Study, arm: Arm, default: Arm) -> Estimate:
    """Final success of `arm` minus that of `default`. ValueError where one has no run."""
    finals = [study.outcomes(one, study.final_success) for one in (arm, default)]
    return resampling.difference(*finals, n_draws=TABLE_DRAWS)


def final_success(study: Study, arm: Arm) -> Estimate:
    """Mean final success of an arm. ValueError without runs."""
    return resampling.mean(study.outcomes(arm, study.final_success), n_draws=TABLE_DRAWS)


def risk(study: Study, arm: Arm) -> Estimate:
    """Collapse risk of an arm. ValueError without decidable runs."""
    return study.risk(arm, n_draws=TABLE_DRAWS)


_ESTIMATES: dict[str, Callable[[Study, Arm, Arm], Estimate]] = {
    "collapse_risk": lambda study, arm, _: risk(study, arm),
    "extra_risk": extra_risk,
    "final_success": lambda study, arm, _: final_success(study, arm),
    "final_difference": final_difference,
}


def missing_arms(table: pd.DataFrame) -> list[str]:
    """Arms of a table that have no runs."""
    return table.loc[table["runs"] == 0, "arm"].tolist()


def run_groups(study: Study, groups: Iterable[Group], planned: Plan | None = None) -> list[pd.DataFrame]:
    """Tables of the groups that can be compared at all: with runs of the default and of another arm."""
    tables = [group_table(study, group, planned) for group in groups]
    return [table for table in tables if table["runs"].iloc[0] and (table["runs"].iloc[1:] > 0).any()]
