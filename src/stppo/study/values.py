"""The numbers that pages show, computed from the committed records.

`python -m stppo.study.values` writes `results/reference/values.yaml` and puts its numbers into the pages
(`stppo.study.pages`). A page names a number by the path to it: `study.off_policy.token_ppo.final`. Sampled
success unless a name says `greedy`; `low` and `high` are the ends of a 95 % interval over worlds. Regimes and
arms have their recorded names, in small letters and with `_` for other signs. `a_over_b` is arm a less arm b
in the worlds of both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy.stats import spearmanr, t

from stppo.files import repository_path, write_atomically
from stppo.record.runs import Metrics, load_metrics
from stppo.record.tidy import clips
from stppo.stats import by_world, contrast, difference, mean
from stppo.study import benchmark, pages, starving, thousand
from stppo.study import divisor as trials
from stppo.study.benchmark_figures import signals_of_methods

REFERENCE, FILE = Path("results/reference"), "values.yaml"
LEAST_WORLDS = 6  # of an arm that is told
LEVEL = 0.95
FELL = ("crashed and recovered", "collapsed")
LOST = ("did not learn", "lost its start")
LATER = "P"  # ids of the claims that were added after the runs
NINE = ("token_ppo", "turn_ppo", "s_ppo", "st_ppo", "so_ppo_ctn", "grpo", "so_grpo", "so_grpo_ctn", "gspo")
OFF, ONCE, TWICE = "OFF_POLICY", "FRESH_SAME_TRAJECTORIES", "ON_POLICY"
FRESH = (ONCE, "FRESH_SAME_UPDATES", TWICE)
# Comparisons of the study: regime, arm, the arm or arms that it is compared with.
PAIRS = (
    (OFF, "token_ppo", ()),
    (OFF, "turn_ppo", ("token_ppo", "weight_one", "token_ppo_lr0.5")),
    (OFF, "st_ppo", ("token_ppo", "turn_ppo", "turn_ppo_shuffled", "turn_ppo_replayed")),
    (OFF, "st_ppo", ("grad_clip", "kl_stop", "token_ppo_lr0.5")),
    (OFF, "s_ppo", ("token_ppo", "token_ppo_shuffled")),
    (OFF, "sequence_ppo", ("turn_ppo",)),
    (OFF, "weight_one", ("token_ppo",)),
    (OFF, "successes_only", ("topr",)),
    (OFF, "topr", ("st_ppo",)),
    (OFF, "token_ppo_lr0.5", ("token_ppo",)),
    (OFF, "grad_clip", ("token_ppo",)),
    (OFF, "kl_stop", ("token_ppo",)),
    (OFF, "turn_ppo_lr0.75", ("token_ppo_lr0.75",)),
    (OFF, "turn_ppo_lr0.5", ("token_ppo_lr0.5",)),
    (OFF, "token_ppo_critic8", ("token_ppo",)),
    (OFF, "token_ppo_true_values", ("token_ppo",)),
    (OFF, "turn_grpo", ("grpo",)),
    (OFF, "s_grpo", ("grpo",)),
    (OFF, "so_grpo", ("turn_grpo",)),
    ("CHAINS", "st_ppo", ("turn_ppo", "turn_ppo_shuffled")),
    ("CHAINS", "turn_ppo_shuffled", ("turn_ppo",)),
    ("CHAINS", "sequence_ppo", ("turn_ppo",)),
    ("LONG", "st_ppo", ("turn_ppo",)),
    ("ONE_TURN", "st_ppo", ("turn_ppo",)),
    (TWICE, "st_ppo", ("token_ppo", "turn_ppo")),
    (TWICE, "turn_ppo", ("token_ppo",)),
    (ONCE, "st_ppo", ("token_ppo", "turn_ppo")),
    (ONCE, "turn_ppo", ("token_ppo",)),
    ("FRESH_SAME_UPDATES", "st_ppo", ("turn_ppo",)),
)
# Methods of the benchmark that are compared at the same points.
BENCHMARK_PAIRS = (
    *(("turn_ppo", "token_ppo"), ("gspo", "grpo"), ("so_grpo", "grpo"), ("sequence_mask", "grpo")),
    *(("kl_stop", "token_ppo"), ("weight_one", "token_ppo"), ("turn_ppo", "weight_one")),
    *(("topr", "reinforce"), ("topr", "st_ppo"), ("successes_only", "topr"), ("st_ppo", "turn_ppo")),
    *(("s_ppo", "token_ppo"), ("grad_clip", "token_ppo"), ("dual_clip", "token_ppo"), ("dapo", "grpo")),
    *(("ctpo", "grpo"), ("minpro", "grpo"), ("gigpo", "grpo"), ("sampo", "gspo")),
    *(("decoupled_ppo", "grpo"), ("a3po", "decoupled_ppo")),
)


def key(name: str) -> str:
    """A recorded name as part of a path."""
    return re.sub(r"\W+", "_", name).lower()


def _estimate(found: Any) -> dict[str, float]:
    low, high = found.interval(LEVEL)
    return {"value": found.value, "low": low, "high": high, "worlds": found.n_worlds}


def _apart(one: pd.DataFrame, other: pd.DataFrame, column: str = "final") -> dict[str, float]:
    """One arm less another in a column of `Metrics.summary`, world by world."""
    return _estimate(difference(by_world(one, column), by_world(other, column)))


def _over_updates(metrics: Metrics, regime: str, arm: str) -> pd.DataFrame:
    """What the iterations of an arm's runs say, one row a run: both clip ratios and the divisor's course."""
    rows = metrics.rows_of(regime, arm)
    runs = rows.groupby("seed")
    course = runs[["clip_fraction", "out_of_range_fraction_token"]].mean()
    logs = np.log(rows["stabilizer_divisor"].astype("float64"))
    return course.assign(divisor_log_sd=logs.groupby(rows["seed"]).std(), world_seed=course.index)


def arm_of(metrics: Metrics, regime: str, arm: str) -> dict[str, Any]:
    """Ends, outcomes and course of an arm in one regime."""
    runs = metrics.arm(regime, arm)
    finals = by_world(runs, "final")
    ends = _estimate(mean(finals))
    number = lambda labels: int(runs["outcome"].isin(labels).sum())  # noqa: E731
    # kept within [0, 1], which a mean's interval need not be
    found = {
        "worlds": len(finals),
        "start": runs["start"].mean(),
        "greedy_start": runs["greedy_start"].mean(),
        "final": ends["value"],
        "low": max(ends["low"], 0.0),
        "high": min(ends["high"], 1.0),
        "greedy": runs["greedy_final"].mean(),
        "peak": runs["peak"].mean(),
        "learned": number(["learned"]),
        "recovered": number(FELL[:1]),
        "collapsed": number(FELL[1:]),
        "crashed": number(FELL),
        "never": number(LOST),
        "lost": number(LOST[1:]),
        "updates": runs["updates"].mean(),
        "largest_gradient": runs["gradient_norm_max"].median(),
    }
    course = _over_updates(metrics, regime, arm)
    if all(clips(r) for r in metrics.runs if (r["regime"], r["algorithm"]) == (regime, arm)):
        found["clip"] = course["clip_fraction"].mean()
    found["out_of_range"] = course["out_of_range_fraction_token"].mean()
    divisor = metrics.rows_of(regime, arm)["stabilizer_divisor"]
    if divisor.max() > 1:
        found |= {f"divisor_{q:02d}": divisor.quantile(q / 100) for q in (5, 50, 95)}
        found["divisor_least"] = divisor.min()
        found["divisor_log_sd"] = course["divisor_log_sd"].mean()
        found["divisor_at_one"] = (divisor <= 1).mean()
    return found


def _arms(metrics: Metrics) -> dict[str, dict[str, Any]]:
    return {
        key(regime): {key(arm): arm_of(metrics, regime, arm) for arm in metrics.algorithms(regime)}
        for regime in metrics.regimes
    }


# ---- one function for each folder of records -------------------------------------------------------
def study(folder: Path) -> dict[str, Any]:
    """The registered comparison."""
    metrics = load_metrics(folder / "metrics")
    found: dict[str, Any] = {"runs": len(metrics.runs), **_arms(metrics)}
    off = found[key(OFF)]
    for regime, arms in found.items():
        if regime not in ("runs", key(OFF)):
            for arm, row in arms.items():  # the same worlds at the main setting
                worlds = metrics.arm(regime.upper(), arm)["world_seed"]
                main = metrics.arm(OFF, arm)
                row["main"] = main[main["world_seed"].isin(worlds)]["final"].mean()
    for regime, one, others in PAIRS:
        for other in others:
            arms = metrics.arm(regime, one), metrics.arm(regime, other)
            row = _apart(*arms) | {"greedy": _apart(*arms, "greedy_final")["value"]}
            both = set(arms[0]["world_seed"]) & set(arms[1]["world_seed"])
            row |= {
                name: arm[arm["world_seed"].isin(both)]["final"].mean()
                for name, arm in zip(("one", "other"), arms, strict=True)
            }
            found[key(regime)][f"{key(one)}_over_{key(other)}"] = row
    for arm in ("turn_ppo", "st_ppo", "token_ppo"):
        row = _apart(metrics.arm(ONCE, arm), metrics.arm(OFF, arm))
        found[key(ONCE)][f"{arm}_over_off_policy"] = row
    for n in (10, 20, 40):
        row = _apart(metrics.arm(OFF, "st_ppo"), metrics.arm(OFF, "turn_ppo"), f"after_{n}")
        off["st_ppo_over_turn_ppo"][f"after_{n}"] = row
    one, other = (_over_updates(metrics, OFF, arm) for arm in ("st_ppo", "token_ppo"))
    for name, column in (("clip", "clip_fraction"), ("out_of_range", "out_of_range_fraction_token")):
        row = _apart(one, other, column)
        row["one"], row["other"] = one[column].mean(), other[column].mean()
        row["lower_in"] = int((one[column] < other[column]).sum())
        off["st_ppo_over_token_ppo"][name] = row
    curve = metrics.rows_of(OFF, "token_ppo", evaluations=True).groupby(["temperature", "iteration"])
    sampled, greedy = (curve["success"].mean()[temperature] for temperature in (1.0, 0.0))
    off["token_ppo"] |= {"highest_mean": sampled.max(), "greedy_highest": greedy.max()}
    off["token_ppo"]["greedy_highest_at"] = int(greedy.idxmax())
    off["token_ppo"]["passed_half"] = int((metrics.arm(OFF, "token_ppo")["peak"] > 0.5).sum())
    ahead = [row for arms in found.values() if isinstance(arms, dict) for row in arms.items()]
    divided = [row for name, row in ahead if name == "st_ppo_over_turn_ppo"]
    found["divisor"] = {"settings": len(divided), "above": sum(row["low"] > 0 for row in divided)}
    signs = {"st_ppo": 1 / len(FRESH), "turn_ppo": -1 / len(FRESH)}
    sampled, greedy = (
        contrast(
            [by_world(metrics.arm(of, arm), column) for of in FRESH for arm in signs], [*signs.values()] * 3
        )
        for column in ("final", "greedy_final")
    )
    found["divisor"]["fresh"] = _estimate(sampled) | {"greedy": greedy.value}
    return found | {"claims": _claims(folder), "alarms": _alarms(folder)}


def _claims(folder: Path) -> dict[str, Any]:
    """Verdicts as `stppo.study.claims` wrote them, with the numbers of each entry's last condition; counts
    are of the registered ones."""
    rows = pd.read_csv(folder / "claims/claims.csv").drop_duplicates("id", keep="last").set_index("id")
    registered = rows[~rows.index.str.startswith(LATER)]
    counts = registered["verdict"].value_counts()
    numbers = rows[["estimate", "median", "joint_low", "joint_high"]].dropna(how="all")
    return {
        "all": len(registered),
        **{key(name): int(n) for name, n in counts.items()},
        **{key(name): row.dropna().to_dict() for name, row in numbers.iterrows()},
    }


def _alarms(folder: Path) -> dict[str, float]:
    """The alarm that did best, from the data of the committed picture."""
    row = pd.read_csv(folder / "figures/early_warning.csv").set_index("signal").loc["best"]
    return row[["announced", "crashes", "by_chance"]].astype(float).to_dict()


def bench(folder: Path) -> dict[str, Any]:
    """Every method at forty settings, and its best again in fresh worlds."""
    metrics = load_metrics(folder / "metrics")
    runs = metrics.summary[metrics.summary["regime"] == benchmark.REGIME]
    finals = runs.pivot(index="seed", columns="algorithm", values="final")
    table = benchmark.points().set_index("point").loc[finals.index]
    table["reuse"] = table["learning_rate"] * table["epochs"]
    strong = table["reuse"].sort_values().index[len(table) // 2 :]
    updates, greedy = (runs.groupby("algorithm")[column].mean() for column in ("updates", "greedy_final"))
    found: dict[str, Any] = {
        "runs": len(metrics.runs),
        "methods": finals.shape[1],
        "lowest_start": metrics.summary["start"].min(),
        "highest_start": metrics.summary["start"].max(),
    }
    quantile = t.ppf(0.975, len(table) - 2)
    level = float(quantile / math.sqrt(len(table) - 2 + quantile**2))  # a rank correlation that is clear
    found["correlation_at_5_percent"] = level
    for column in ("learning_rate", "epochs", "staleness", "minibatches", "reuse"):
        with_it = finals.corrwith(table[column], method="spearman")
        found[column] = {"clear": int((with_it < -level).sum()), **with_it.to_dict()}
    for method in finals:
        fresh = metrics.arm(benchmark.CONFIRMATION, method)["final"].mean()
        found[key(method)] = {
            "one": finals[method].mean(),
            "five": benchmark.best_of(finals[method], 5),
            "strong": finals.loc[strong, method].mean(),
            "greedy": greedy[method],
            "best": finals[method].max(),
            "fresh": fresh,
            "updates": updates[method] / updates["token_ppo"],
            "below_start": int((runs[runs["algorithm"] == method].eval("final < start")).sum()),
        }
    fresh = pd.Series({method: found[key(method)]["fresh"] for method in finals})
    best = finals.max()[fresh.notna()]  # of those that ran again in fresh worlds
    found["chosen"] = {"best": best.mean(), "fresh": fresh.mean()}
    found["chosen"]["within_05"] = int((fresh >= fresh.max() - 0.05).sum())
    for one, other in BENCHMARK_PAIRS:
        row = benchmark.difference(metrics, one, other)
        ends = {name: row[f"mean_{name}"] for name in ("low", "high")}
        found[f"{one}_over_{other}"] = {"value": row["mean"], **ends}
    epsilon = pd.Series(
        {
            record["seed"]: record["objective"]["clip"]["epsilon_low"]
            for record in metrics.runs
            if (record["regime"], record["algorithm"]) == (benchmark.REGIME, "turn_ppo")
        }
    ).sort_index()
    for one, other in (("st_ppo", "turn_ppo"), ("s_ppo", "token_ppo")):
        apart = finals[one] - finals[other]
        found[f"{one}_over_{other}"] |= {
            "rank_with_epsilon": spearmanr(apart, epsilon).statistic,
            "narrow": apart[epsilon < 0.13].mean(),
            "wide": apart[epsilon > 0.3].mean(),
        }
    found["epsilon"] = {"least": epsilon.min(), "most": epsilon.max()}
    told = signals_of_methods(metrics.all.of([benchmark.REGIME]), benchmark.leaderboard(metrics)).dropna()
    n = math.ceil(len(told) / 4)
    least, highest = set(told.nsmallest(n, "push")["method"]), set(told.nlargest(n, "final")["method"])
    found["push"] = {"quarter": n, "both": len(least & highest), "by_chance": n * n / len(told)}
    found["push"]["correlation"] = told["final"].corr(told["push"], method="spearman")
    found["topr"]["knob"] = spearmanr(finals["topr"], table["knob"]).statistic
    return found


def divisor(folder: Path) -> dict[str, Any]:
    """The divisor's trial: its first part, at the benchmark's points with one epsilon, and runs of both
    parts."""
    metrics = load_metrics(folder.parent / "benchmark/metrics")
    trial = load_metrics(folder / "part2/metrics")
    fixed = sum(r["algorithm"].endswith("_fixed") for r in metrics.runs)
    found: dict[str, Any] = {"runs": {"part1": fixed, "part2": len(trial.runs)}}
    for name, one, other in (("b1_s", "s_ppo", "token_ppo_fixed"), ("b1_st", "st_ppo", "turn_ppo_fixed")):
        runs = metrics.arm(benchmark.REGIME, other)
        if len(runs) == len(benchmark.points()):  # the question waits for every point
            row = benchmark.difference(metrics, one, other, looks=2)
            ends = {end: row[f"mean_{end}"] for end in ("low", "high")}
            joint = {f"joint_{end}": row[f"joint_{end}"] for end in ("low", "high")}
            found[name] = {"value": row["mean"], **ends, **joint}
            for arm in (one, other):
                ended = metrics.arm(benchmark.REGIME, arm)
                found[arm] = {"final": ended["final"].mean(), "greedy": ended["greedy_final"].mean()}
            found[one]["log_sd"] = _over_updates(metrics, benchmark.REGIME, one)["divisor_log_sd"].median()
    arms = trial.summary.groupby(["regime", "algorithm"]).size()
    for regime, arm in arms[arms >= LEAST_WORLDS].index:
        runs = trial.arm(regime, arm)
        ends = {"worlds": len(runs), "final": runs["final"].mean(), "greedy": runs["greedy_final"].mean()}
        base = "token_ppo" if arm.startswith(("s_ppo", "token_ppo")) else "turn_ppo"
        less: dict[str, float] = {}
        if arm != base and base in arms[regime]:
            of = by_world(trial.arm(regime, base), "final")
            both = [of[world] for world in by_world(runs, "final") if world in of]
            less = _apart(runs, trial.arm(regime, base)) | {"base": float(np.mean(both))}
        divisors = trial.rows_of(regime, arm)["stabilizer_divisor"]
        acts = {"divided": int((divisors != 1).sum()), "iterations": len(divisors)}
        told = less | ends | acts
        found.setdefault(key(regime), {})[key(arm)] = told
    if width := trials.widths(trial):
        found["width"] = {key(r): {key(arm): row for arm, row in of.items()} for r, of in width.items()}
    found |= trials.left(trial)
    for _, row in pd.read_csv(folder / trials.CLAIMS).iterrows():
        numbers = {name: row[name] for name in ("low", "high", "joint_low", "joint_high", "worlds")}
        part = "sampled" if row["measured"].startswith("final") else "greedy"
        found.setdefault(key(row["id"]), {})[part] = {"value": row["estimate"], **numbers}
    return found


def mechanism(folder: Path) -> dict[str, Any]:
    """The turn's ratio taken apart, in three worlds."""
    metrics = load_metrics(folder / "metrics")
    found: dict[str, Any] = {"runs": len(metrics.runs)}
    for arm, row in _arms(metrics)["critical"].items():
        runs = metrics.arm("CRITICAL", arm).sort_values("seed")
        early = metrics.rows_of("CRITICAL", arm).query("iteration <= 10")
        found[arm] = row | {
            "each": runs["final"].tolist(),
            "least": runs["final"].min(),
            "most": runs["final"].max(),
            "from_failures": early["negative_advantage_gradient_share"].mean(),
            "token_p99": early["ratio_p99_token"].median(),
            "turn_p99": early["ratio_p99_turn"].median(),
        }
    held = [name for name in found if name.startswith(("weight_one", "weight_turn"))]
    found["other_weights"] = {"least": min(found[name]["least"] for name in [*held, "turn_ppo"])}
    return found


def oracle(folder: Path) -> dict[str, Any]:
    """Expected gradients against the true one: group baselines, aggregations, every algorithm."""
    table = pd.read_csv(folder / "group_baselines.csv")
    found: dict[str, Any] = {}
    for (baseline, aggregation, turns), rows in table.groupby(["baseline", "aggregation", "turns"]):
        ends = {"least": rows["cosine"].min(), "most": rows["cosine"].max(), "scale": rows["scale"].mean()}
        found.setdefault(key(f"{baseline} {aggregation}"), {})[turns] = ends
    rows = pd.read_csv(folder / "algorithms.csv").set_index(["algorithm", "data"])
    for name in rows.index.unique("algorithm"):
        fresh, old = rows.loc[(name, "fresh")], rows.loc[(name, "off-policy")]
        found[key(name)] = {"fresh": fresh["bias"], "old": old["bias"]}
        found[key(name)] |= {"scale": fresh["scale"], "old_scale": old["scale"]}
    return found


def search(folder: Path) -> dict[str, Any]:
    """Where token PPO learns and then collapses, and what the chosen setting depends on."""
    metrics = load_metrics(folder / "metrics")
    table = metrics.summary
    table["shows"] = table["learned"] & table["crash_iteration"].notna()
    setting = table["regime"].str.extract(r"^E(\d+)_L(\d+)_([\d.e-]+?)(_160)?$")
    epochs, age, rate = (setting[i].astype(float) for i in range(3))
    short = table[epochs.notna() & setting[3].isna()].assign(epochs=epochs, age=age)
    short["steps"] = (epochs * rate).round(4)
    found: dict[str, Any] = {
        "runs": len(table),
        "lowest_start": table["start"].min(),
        "highest_start": table["start"].max(),
    }
    for steps, part in short.groupby("steps"):
        ages = part.groupby("age")["final"].mean()
        found[f"steps_{steps * 1e4:.0f}e_4"] = {
            "final": part["final"].mean(),
            "each": ages.tolist(),
            "outcomes": [int((part["outcome"] == name).sum()) for name in ("learned", *FELL, *LOST)],
        }
    found |= {f"age_{n:.0f}": part["final"].mean() for n, part in short.groupby("age")}
    largest = short[short["steps"] == short["steps"].max()]
    few, many = largest[largest["epochs"] == 4], largest[largest["epochs"] > 4]
    found["four_epochs"] = {"runs": len(few), "collapsed": int((few["outcome"] == "collapsed").sum())}
    found["more_epochs"] = {"runs": len(many), "lost": int((many["outcome"] == "lost its start").sum())}
    found["more_epochs"]["most"] = many["final"].max()
    for regime, part in table[setting[3].notna()].groupby("regime"):
        found[key(regime)] = {"shows": int(part["shows"].sum()), "most": part["final"].max()}
        found[key(regime)] |= {"least": part["final"].min(), "peak": part["peak"].mean()}
    found["yardstick"] = table[table["regime"] == "ON_POLICY"].sort_values("seed")["final"].tolist()
    dependence = load_metrics(folder / "dependence/metrics")
    for regime in dependence.regimes:
        runs = dependence.arm(regime, "token_ppo")
        found[key(regime)] = {
            **{name: runs[name].mean() for name in ("start", "peak", "final")},
            "worlds": len(runs),
            "shows": int((runs["learned"] & runs["crash_iteration"].notna()).sum()),
            "lost": int((runs["outcome"] == "lost its start").sum()),
        }
    return found | {"alarms": _alarms(folder)}


def mild(folder: Path) -> dict[str, Any]:
    """Eleven methods at smaller steps."""
    metrics = load_metrics(folder / "metrics")
    found: dict[str, Any] = {"runs": len(metrics.runs), **_arms(metrics)[key(OFF)]}
    rows = metrics.evaluations[metrics.evaluations["temperature"] == 1]
    entropy = rows.pivot_table(index="iteration", columns="algorithm", values="entropy_of_sampled")
    for arm in entropy:
        found[key(arm)] |= {"entropy": entropy.loc[10, arm]}
        found[key(arm)]["each"] = sorted(metrics.arm(OFF, arm)["final"], reverse=True)
    table = metrics.summary[["start", "greedy_start"]].mean()
    found["before"] = {"final": table["start"], "greedy": table["greedy_start"]}
    found["before"]["entropy"] = entropy.loc[0].mean()
    for name, place in (("signals", folder), ("signals_of_study", folder.parent / "study")):
        rows = pd.read_csv(place / "figures/beginnings_correlations.csv").set_index("signal")
        found[name] = {
            row: rows.loc[row, ["correlation", "low", "high"]].to_dict()
            for row in ("entropy", "clipping_bias_norm")
        }
    return found


def smollm(folder: Path) -> dict[str, Any]:
    """A language model of 135 million parameters: three seeds, and the runs before them."""
    beside = folder.parent / "smollm_comparison"
    found: dict[str, Any] = {"runs": len(load_metrics(folder / "metrics").runs)}
    metrics = load_metrics(beside / "metrics")
    found["comparison_runs"] = len(metrics.runs)
    for arm in metrics.algorithms():
        rows = metrics.rows_of("COMPARISON", arm, evaluations=True).sort_values("seed")
        last = metrics.rows_of("COMPARISON", arm).query("iteration > 30").groupby("seed")["success_train"]

        def at(iteration: int, temperature: float, column: str, rows: pd.DataFrame = rows) -> list[float]:
            return rows.query("iteration == @iteration and temperature == @temperature")[column].tolist()

        found[arm] = {
            "greedy_start": at(0, 0, "success"),
            "sampled_start": at(0, 1, "success"),
            "greedy_halfway": at(20, 0, "success"),
            "greedy": at(40, 0, "success"),
            "sampled": at(40, 1, "success"),
            "valid": at(40, 0, "valid_format_rate"),
            "last_batches": last.mean().tolist(),
            "updates": metrics.arm("COMPARISON", arm).sort_values("seed")["updates"].tolist(),
            "divisor": metrics.rows_of("COMPARISON", arm)["stabilizer_divisor"].median(),
        }
        found[arm]["share_of_start"] = (
            np.array(found[arm]["greedy"]) / np.array(found[arm]["greedy_start"])
        ).tolist()
    for one, other in (("turn_ppo", "token_ppo"), ("kl_stop", "token_ppo"), ("kl_stop", "turn_ppo")):
        apart = np.subtract(found[one]["greedy"], found[other]["greedy"])
        found[f"{one}_over_{other}"] = apart.tolist()
    for name, place in (("demonstration", folder / "metrics"), ("", beside / "tuning")):
        runs = load_metrics(place)
        for record in runs.runs:
            for decoding, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                curve = runs.success(record, temperature).set_index("iteration")
                row = curve.loc[[0, 10, 20], "success"].tolist()
                run = record["algorithm"] if name else key(record["regime"])
                place_of = found.setdefault(name, {}) if name else found
                place_of.setdefault(run, {})[decoding] = [*row, curve.loc[20, "valid_format_rate"]]
    places = {"rates": [beside / "tuning"], "recorded": [folder / "metrics", folder / "tuning"]}
    found["memory"] = {
        name: sorted(record["peak_memory_mb"] / 1024 for of in folders for record in load_metrics(of).runs)
        for name, folders in places.items()
    }
    counted = json.loads((beside / "notebook_26.json").read_text(encoding="utf-8"))
    return found | {"writes": {key(run): _writes(numbers) for run, numbers in counted.items()}}


def _writes(numbers: dict[str, Any]) -> dict[str, Any]:
    """What notebook 26 counted of one run, before and after it."""
    rows = pd.DataFrame(numbers["one hop"] + numbers["more hops"]).set_index(["benchmark", "agent"])
    kinds = {
        "new": "a new answer",
        "known": "an answer of a training question",
        "wiki_two_hops": "2wikimultihopqa, 2 hops",
        "musique_two_hops": "musique, 2 hops",
    }
    found: dict[str, Any] = {"right": [numbers[f"right {when}, of 10"] for when in ("before", "after")]}
    for name, kind in kinds.items():
        if kind in rows.index.get_level_values(0):
            found[name] = [rows.loc[(kind, when), "em"] for when in ("before", "after")]
    one_hop = pd.DataFrame(numbers["one hop"]).set_index(["benchmark", "agent"])
    right = one_hop["em"] * one_hop["n_questions"]
    asked = one_hop["n_questions"].groupby(level="agent").sum()
    found["all"] = [right.xs(when, level="agent").sum() / asked[when].item() for when in ("before", "after")]
    found["out_of_range"] = [numbers[f"{what} out of range"] for what in ("tokens", "turns")]
    return found


def speed(folder: Path) -> dict[str, Any]:
    """Roll-outs by PyTorch and by vLLM, and an update's passes, as `benchmarks/` measured them."""
    found: dict[str, Any] = {}
    for row in json.loads((folder / "rollouts.json").read_text(encoding="utf-8"))["rows"]:
        whole = row["engine"] == "vllm"
        found[f"{row['engine']}_{row['trajectories']}"] = {
            "prefix_cache": row["prefix_cache_hit_rate"] if whole else [],
            "mismatch": row["mismatch_mean"] if whole else [],
            "tokens": row["tokens_per_second"],
            "agent_tokens": row["agent_tokens_per_second"],
            "cpu_seconds": row["cpu_seconds"],
        }
    for n in (32, 64):
        found[f"torch_{n}"]["against_vllm"] = found[f"torch_{n}"]["tokens"] / found[f"vllm_{n}"]["tokens"]
    tables = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))["tables"]
    took = {row["forward and backward"]: row["milliseconds"].split()[0] for row in tables["A minibatch"]}
    (rows,) = json.loads((folder / "smollm.json").read_text(encoding="utf-8"))["tables"].values()
    parts = {row["part"]: float(row["measured"].split()[0]) for row in rows}
    found["smollm"] = {
        "rollout": parts["roll-out"],
        "values": parts["values"],
        "critic": parts["critic"],
        "epoch": parts["updates"] / 4,
        "together": parts["together"],
        "memory": parts["most memory"],
    }
    return found | {"passes": float(took["auto"]), "products_alone": float(took["floor"])}


def retrieval(folder: Path) -> dict[str, Any]:
    """A BM25 index of millions of passages (`m1`, ...), as `benchmarks/retrieval.py` measured it."""
    found: dict[str, Any] = {}
    sizes = json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))["sizes"]
    for passages, run in sizes.items():
        row = found[f"m{round(int(passages) / 1e6)}"] = {"passages": int(passages)}
        if built := run.get("build"):
            row |= {
                "build_minutes": built["cpu_seconds"] / 60,
                "build_gib": built["own_mib_peak"] / 1024,
                "index_gib": built["index_mib"] / 1024,
                "disk_gib": built["disk_gib_peak"],
                "corpus_gib": built["corpus_mib"] / 1024,
            }
        if searched := run.get("search"):
            row |= {name: searched["again"]["cpu_ms"][name] for name in ("p50", "p99")}
            row["recall"] = {name: found["3"] for name, found in searched["recall"].items()}
        if earlier := run.get("earlier"):  # on another machine
            row["earlier_p50"] = earlier["search"]["again"]["cpu_ms"]["p50"]
        for clients, served in run.get("serve", {}).get("clients", {}).items():
            row[f"clients_{clients}"] = [served["ms"]["p50"], served["ms"]["p99"], served["a_second"]]
        if killed := run.get("killed"):
            row |= {name: killed[name] for name in ("left_gib", "removed_after_seconds")}
        if other := run.get("bm25s_search"):
            row["bm25s_p50"], row["bm25s_gib"] = other["again"]["cpu_ms"]["p50"], other["own_mib_peak"] / 1024
        if "postings" in (indexed := run.get("bm25s_build", {})):
            row["bm25s_build_gib"] = indexed["own_mib_peak"] / 1024
    return found


def retokenised(folder: Path) -> dict[str, Any]:
    """What text in place of tokens does to fresh data, by temperature (`t1_0`, ...), as
    `benchmarks/retokenised.py` measured it."""
    record = json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))
    found = {key(f"t{temperature}"): ratios for temperature, ratios in record["ratios"].items()}
    metrics = load_metrics(folder / "metrics")
    for run in metrics.runs:
        rows = metrics.evaluations[metrics.evaluations["regime"] == run["regime"]].sort_values("iteration")
        trained = metrics.rows_of(run["regime"], run["algorithm"])
        success = {
            name: rows.loc[rows["temperature"] == t, "success"]
            for name, t in (("sampled", 1.0), ("greedy", 0.0))
        }
        found[key(run["regime"])] = {name: of.tolist() for name, of in success.items()} | {
            "last_batches": trained.query("iteration > 10")["success_train"].mean(),
            "out_of_range": trained["out_of_range_fraction_token"].mean(),
        }
    return found


def first_study(folder: Path) -> dict[str, Any]:
    """What the first study counted by its own rules, per regime and arm, from the table that it left."""
    table = pd.read_csv(folder / "metrics/summary.csv")
    keys = ["regime", "algorithm", "seed"]
    rows = pd.read_parquet(folder / "metrics/evaluations.parquet").query("temperature == 0")
    greedy = rows.sort_values("iteration").groupby(keys)["success"].agg(["first", "last"])
    table = table.join(greedy, on=keys)
    fallen = table[table["collapsed"]]
    nine = table[(table["regime"] == "MAIN") & table["algorithm"].isin(NINE)]
    found: dict[str, Any] = {
        "runs": len(table),
        "hours": table["wall_seconds"].sum() / 3600,
        "collapsed": len(fallen),
        "risen_before": int((fallen["success_max"] >= fallen["success_start"] + 0.05).sum()),
        "greedy_start": nine["first"].mean(),
        "start": nine["success_start"].mean(),
    }
    for (regime, arm), runs in table.groupby(["regime", "algorithm"]):
        found.setdefault(key(regime), {})[key(arm)] = {
            "runs": len(runs),
            "collapsed": int(runs["collapsed"].sum()),
            "final": runs["success_final"].mean(),
            "clip": runs["clip_fraction_mean"].mean(),
            "greedy": runs["last"].mean(),
        }
    claims = pd.read_csv(folder / "claims/claims.csv")
    counts = claims[claims["kind"] == "primary"]["verdict"].value_counts()
    return found | {"verdicts": {key(name): int(n) for name, n in counts.items()}}


PARTS = {
    "study": study,
    "benchmark": bench,
    "divisor": divisor,
    "mechanism": mechanism,
    "search": search,
    "mild": mild,
    "oracle": oracle,
    "starving": starving.values,
    "thousand": thousand.values,
    "smollm": smollm,
    "speed": speed,
    "retrieval": retrieval,
    "retokenised": retokenised,
    "first_study": first_study,
}


def compute(parts: Iterable[str] = PARTS, reference: str | Path = REFERENCE) -> dict[str, Any]:
    """The numbers of some folders of records, or of all."""
    folder = repository_path(reference)
    found = {part: _plain(PARTS[part](folder / part)) for part in parts}
    return found | {"recorded": recorded(folder)}


def recorded(folder: Path) -> dict[str, int]:
    """Runs of each folder."""
    files = sorted([*folder.glob("*/metrics/runs.json")])
    return {key(file.parent.parent.name): len(json.loads(file.read_text(encoding="utf-8"))) for file in files}


def _plain(value: Any) -> Any:
    """Python's own numbers with five digits behind the point; what is not known is left out."""
    if isinstance(value, dict):
        plain = {name: _plain(part) for name, part in value.items()}
        return {name: part for name, part in plain.items() if part is not None}
    if isinstance(value, Sequence):
        return [_plain(part) for part in value]
    if isinstance(value, (int, np.integer)):
        return int(value)
    return round(float(value), 5) + 0.0 if math.isfinite(value) else None


def load(file: str | Path = REFERENCE / FILE) -> dict[str, Any]:
    """The committed numbers."""
    return yaml.safe_load(repository_path(file).read_text(encoding="utf-8"))


def main() -> None:
    found = compute()
    head = "# Written by `python -m stppo.study.values` from the recorded runs; do not edit.\n"
    text = head + yaml.dump(found, sort_keys=False, default_flow_style=None, width=110)
    folder = repository_path(REFERENCE)
    write_atomically(folder / FILE, partial(Path.write_text, data=text, encoding="utf-8"))
    for page in pages.marked(folder.parent.parent):
        filled = pages.fill(page.read_text(encoding="utf-8"), found)
        write_atomically(page, partial(Path.write_text, data=filled, encoding="utf-8"))


if __name__ == "__main__":
    main()
