"""Runs as two tidy tables, made once: what every figure draws from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from stppo.config.algorithms import Algorithm, in_order
from stppo.record import schema

KEYS = list(schema.KEY_COLUMNS)
BASELINE = "token_ppo"  # what others are compared with
SUCCESS, GREEDY = "success", "success_greedy"  # columns that come from the evaluations: temperature 1, and 0
LOOKS = ["label", "color", "line", "family"]


@dataclass(frozen=True)
class Runs:
    """Recorded runs with the looks of their algorithms joined on.

    rows: one per run and iteration: regime, algorithm, seed, iteration, `world`, `label`, `color`, `family`
    and every recorded column, `success` and `success_greedy` of the evaluations among them; NaN where a run
    has no value or the column says nothing of it (`_told`). runs: one per run: `Metrics.summary`, `LOOKS`,
    learning_rate, epochs, staleness, iterations, policy, policy_parameters, world_name, start_samples (0: not
    recorded), critic (whether it has one).
    """

    rows: pd.DataFrame
    runs: pd.DataFrame

    def of(self, regimes: Iterable[str] = (), algorithms: Iterable[str] = ()) -> Runs:
        """The runs of some regimes and algorithms; none named: of all."""
        tables = [self.rows, self.runs]
        for column, names in (("regime", list(regimes)), ("algorithm", list(algorithms))):
            tables = [table[table[column].isin(names)] if names else table for table in tables]
        return Runs(*tables)

    @cached_property
    def algorithms(self) -> list[str]:
        """In figures' order."""
        return in_order(self.runs["algorithm"])

    @cached_property
    def looks(self) -> pd.DataFrame:
        """label, short (without what stands in brackets, where that tells them apart), color, line, family by
        algorithm."""
        looks = self.runs.drop_duplicates("algorithm").set_index("algorithm")[LOOKS].loc[self.algorithms]
        short = looks["label"].str.partition(" (")[0]
        return looks.assign(short=short.where(~short.duplicated(keep=False), looks["label"]))

    @cached_property
    def filled(self) -> int:
        """First iteration at which batches are as old as they get; before it the queue of old batches fills.
        1: at once."""
        if "staleness_iterations" not in self.rows:
            return 1
        ages = self.rows["staleness_iterations"]
        first = self.rows.loc[ages == ages.max(), "iteration"].min()
        return 1 if pd.isna(first) else int(first)

    def curves(self, algorithm: str, column: str) -> pd.DataFrame:
        """An algorithm's course: a row per iteration, a column per run, named (world, seed). Empty if nothing
        was recorded.

        Of one regime.
        """
        if column not in self.rows:
            return pd.DataFrame()
        found = self._by_algorithm.get(algorithm, self.rows.iloc[:0])
        curves = found.pivot(index="iteration", columns=["world", "seed"], values=column)
        return curves.dropna(how="all").dropna(how="all", axis="columns").sort_index()

    def means(self, column: str) -> pd.DataFrame:
        """Mean over a world's runs of a column of `runs`: a row per world, a column per algorithm."""
        values = self.runs.assign(value=self.runs[column].astype("float64"))
        wide = values.pivot_table(index="world_seed", columns="algorithm", values="value")
        return wide.reindex(columns=self.algorithms)

    @cached_property
    def _by_algorithm(self) -> dict[str, pd.DataFrame]:
        return dict(iter(self.rows.groupby("algorithm", sort=False)))


def tidy(
    records: Sequence[dict[str, Any]],
    iterations: pd.DataFrame,
    evaluations: pd.DataFrame,
    summary: pd.DataFrame,
    settings: pd.DataFrame,
    look: Callable[[str], Algorithm],
) -> Runs:
    """Both tables. summary: of `records`, in their order; settings: learning_rate, epochs, staleness,
    likewise."""
    looks = {name: look(name) for name in {record["algorithm"] for record in records}}
    more = pd.DataFrame(
        [
            {
                "label": looks[record["algorithm"]].label,
                "color": looks[record["algorithm"]].color,
                "line": looks[record["algorithm"]].line,
                "family": family(record, looks[record["algorithm"]]),
                "clips": clips(record),
                "plain_loss": _loss_is_the_surrogate(record),
                "iterations": record["iterations"],
                "policy": record.get("policy"),
                "policy_parameters": record.get("policy_parameters"),
                "world_name": str(record["world"]),
                "start_samples": record["warm_start"].get("n_sampled", 0),
            }
            for record in records
        ],
        index=summary.index,
    )
    losses = iterations.reindex(columns=[*KEYS, "critic_loss"]).dropna()
    critics = set(losses[["regime", "algorithm"]].drop_duplicates().itertuples(index=False, name=None))
    arms = zip(summary["regime"], summary["algorithm"], strict=True)
    runs = (
        summary.join(more).join(settings.set_axis(summary.index)).assign(critic=[a in critics for a in arms])
    )
    rows = iterations.merge(_success(records, evaluations), how="outer", on=[*KEYS, "iteration"])
    joined = runs[[*KEYS, "world_seed", "label", "color", "family", "clips", "plain_loss"]]
    rows = rows.merge(joined.rename(columns={"world_seed": "world"}), on=KEYS)
    return Runs(_told(rows), runs)


def _success(records: Sequence[dict[str, Any]], evaluations: pd.DataFrame) -> pd.DataFrame:
    """One row per run and evaluation: `SUCCESS` and `GREEDY`.

    Both count as 0 after a run stopped for a number that is not finite, wherever another of its regime was
    evaluated.
    """
    parts = []
    for name, temperature in ((SUCCESS, 1.0), (GREEDY, 0.0)):
        rows = evaluations.loc[evaluations["temperature"] == temperature, [*KEYS, "iteration", "success"]]
        stopped = [[record[key] for key in KEYS] for record in records if record.get("non_finite")]
        zeros = [rows]
        for regime, algorithm, seed in stopped:
            own = rows[(rows["regime"] == regime) & (rows["algorithm"] == algorithm) & (rows["seed"] == seed)]
            every = rows.loc[rows["regime"] == regime, "iteration"].unique()
            if len(own):
                late = pd.DataFrame({"iteration": every[every > own["iteration"].max()], "success": 0.0})
                zeros.append(late.assign(regime=regime, algorithm=algorithm, seed=seed))
        parts.append(pd.concat(zeros, ignore_index=True).rename(columns={"success": name}))
    return parts[0].merge(parts[1], how="outer", on=[*KEYS, "iteration"])


def _told(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows without what says nothing: numbers that are not finite; clip shares of methods that weigh and clip
    nothing; a divisor that is 1 throughout; a norm of the surrogate's gradient that is the whole
    gradient's."""
    rows = rows.replace([np.inf, -np.inf], np.nan)
    if "advantage_raw_std" in rows:
        rows["advantage_variance"] = rows["advantage_raw_std"] ** 2
    for name in ("clip_fraction", "out_of_range_fraction", "out_of_range_fraction_token"):
        if name in rows:
            rows[name] = rows[name].where(rows["clips"])
    arm = [rows["regime"], rows["algorithm"]]
    if "stabilizer_divisor" in rows:
        divides = ((rows["stabilizer_divisor"] - 1).abs() > 1e-6).groupby(arm).transform("any")
        rows["stabilizer_divisor"] = rows["stabilizer_divisor"].where(divides)
    if "ppo_gradient_norm" in rows:
        apart = (rows["ppo_gradient_norm"] - rows["gradient_norm"]).abs() > 1e-6 * rows["gradient_norm"].abs()
        apart = apart.groupby(arm).transform("any") & ~rows["plain_loss"].groupby(arm).transform("any")
        rows["ppo_gradient_norm"] = rows["ppo_gradient_norm"].where(apart)
    return rows.drop(columns=["clips", "plain_loss"])


def clips(record: dict[str, Any]) -> bool:
    """Whether a run's clip fraction is one: not where a weight takes the ratio's place, which differs from it
    everywhere."""
    rules = record.get("objective") or {}
    clip, surrogate = (rules.get(part) or {} for part in ("clip", "surrogate"))
    weighs = str(surrogate.get("_target_")).endswith(("Unweighted", "GammaWeight"))
    by_sign = str(clip.get("_target_")).endswith("TaperedClip")
    return not (weighs or by_sign or surrogate.get("weighed") is False)


def family(record: dict[str, Any], its: Algorithm) -> str:
    """What a run's ratio is one of, or that it clips none."""
    if not clips(record):
        return "no clip"
    ratio = (record.get("objective") or {}).get("ratio") or {}
    granularity = ratio.get("granularity") or its.granularity
    return f"{granularity} ratio" if granularity else "ratio not recorded"


def _loss_is_the_surrogate(record: dict[str, Any]) -> bool:
    """Whether the recorded config adds no regulariser to the surrogate."""
    training, objective = record.get("training"), record.get("objective")
    if not training or not objective:
        return False
    kind = str(objective.get("stabilizer", {}).get("_target_", "")).rpartition(".")[2]
    added = [training.get(f"{name}_coefficient") for name in ("entropy", "kl")]
    return kind in ("NoStabilizer", "ClippingBiasNorm") and added == [0, 0]


def main_regime(runs: pd.DataFrame) -> str:
    """The regime that has most algorithms; ties: most runs, most iterations, first name. runs: one row per
    run."""
    counts = runs.groupby("regime").agg({"algorithm": ["nunique", "size"], "iterations": "max"})
    return str(counts.sort_index().sort_values(list(counts), ascending=False, kind="stable").index[0])


def stopped_at(record: dict[str, Any], iterations: pd.DataFrame) -> float | None:
    """The iteration in which a number that is not finite ended a run, given its rows; None for any other
    run."""
    if not record.get("non_finite"):
        return None
    last = float(iterations["iteration"].max())
    return 0.0 if math.isnan(last) else last
