"""Every run's outcome, recomputed from the committed Parquet files by a script that shares no code with the package."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import yaml

from stppo.record.runs import load_metrics
from stppo.study.divisor import READ

REFERENCE = Path(__file__).parents[1] / "results/reference"
RECORDS = sorted(file.parent for file in REFERENCE.rglob("runs.json") if "first_study" not in str(file))


def last_tenth(curve: list[float]) -> float:
    n = max(1, math.ceil(len(curve) / 10))
    return sum(curve[-n:]) / n


def outcome(curve: list[float], start: float, stopped: bool) -> dict[str, float | str]:
    """Success at temperature 1, evaluation by evaluation, against the rules at the head of `results/outcomes.py`."""
    peak, crashed, learned = start, False, False
    for i in range(2, len(curve)):
        mean = (curve[i - 2] + curve[i - 1] + curve[i]) / 3
        peak = max(peak, mean)
        learned = learned or peak >= start + 0.1
        crashed = crashed or (learned and mean < start + (peak - start) / 2)
    final = 0.0 if stopped else last_tenth(curve)
    half = start + (peak - start) / 2
    if stopped or (crashed and final <= half):
        label = "collapsed"
    elif learned:
        label = "crashed and recovered" if crashed else "learned"
    else:
        label = "lost its start" if final <= start / 2 else "did not learn"
    return {"start": start, "peak": peak, "final": final, "outcome": label}


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: str(folder.relative_to(REFERENCE)))
def test_outcomes_of_all_runs(folder):
    summary = load_metrics(folder).summary.set_index(["regime", "algorithm", "seed"])
    rows = pd.read_parquet(folder / "evaluations.parquet").sort_values("iteration")
    runs = json.loads((folder / "runs.json").read_text())
    records = {
        (r["regime"], r["algorithm"], r["seed"]): r
        for r in (runs if isinstance(runs, list) else runs["runs"])
    }
    assert set(records) == set(summary.index)
    curves = {key: of for key, of in rows.groupby(["regime", "algorithm", "seed", "temperature"])["success"]}
    for key, record in records.items():
        sampled = list(curves[(*key, 1.0)])
        said = summary.loc[key]
        found = outcome(sampled, record["warm_start"]["success_sampled"], record["non_finite"] is not None)
        assert found.pop("outcome") == said["outcome"], key
        if record["non_finite"] is None:
            assert found == pytest.approx(said[list(found)].to_dict(), abs=1e-4), key
            assert last_tenth(list(curves[(*key, 0.0)])) == pytest.approx(said["greedy_final"], abs=1e-4), key


def test_numbers_of_the_divisors_trial():
    """Ends, differences and how often the divisor acted, as its page shows them."""
    folder, keys = REFERENCE / "divisor/part2/metrics", ["algorithm", "seed"]
    said = yaml.safe_load((REFERENCE / "values.yaml").read_text())["divisor"]["paper"]
    rows = pd.read_parquet(folder / "evaluations.parquet").query("regime == 'PAPER'").sort_values("iteration")
    sampled, greedy = (
        rows[rows["temperature"] == t]
        .groupby(keys)["success"]
        .agg(lambda of: last_tenth(list(of)))
        .unstack(0)
        for t in (1.0, 0.0)
    )
    updates = pd.read_parquet(folder / "iterations.parquet").query("regime == 'PAPER'")
    acted = (updates["stabilizer_divisor"] != 1).groupby(updates["algorithm"]).sum()
    arms = [arm for arm in sampled if sampled[arm].notna().sum() >= 6]
    assert len(arms) == 12
    for arm in arms:
        base = "token_ppo" if arm.startswith(("s_ppo", "token")) else "turn_ppo"
        found = {"final": sampled[arm].mean(), "greedy": greedy[arm].mean(), "divided": acted[arm]}
        found |= {"value": (sampled[arm] - sampled[base]).mean()} if arm != base else {}
        row = said[arm.replace(".", "_")]
        assert found == pytest.approx({name: row[name] for name in found}, abs=2e-5), arm


STEP, OWN = "ppo_step", "ppo_own_norm_trajectory"
DIFFERENCES = {
    "D1.s": ("PAPER/s_ppo", "PAPER/token_ppo"),
    "D1.st": ("PAPER/st_ppo", "PAPER/turn_ppo"),
    "D2.s": ("PAPER_AFTER/s_ppo_bare", "PAPER/token_ppo"),
    "D2.st": ("PAPER_AFTER/st_ppo_bare", "PAPER/turn_ppo"),
    "D3.s": ("PAPER_EDGE/s_ppo", "PAPER_EDGE/token_ppo"),
    "D3.st": ("PAPER_EDGE/st_ppo", "PAPER_EDGE/turn_ppo"),
    "D4.s": (f"PAPER/s_{STEP}", "PAPER/token_ppo"),
    "D4.st": (f"PAPER/st_{STEP}", "PAPER/turn_ppo"),
    "D5.s": (f"OFF_POLICY/s_{STEP}", "OFF_POLICY/token_ppo"),
    "D5.st": (f"OFF_POLICY/st_{STEP}", "OFF_POLICY/turn_ppo"),
    "D6.s": (f"OFF_POLICY/token_{OWN}", "OFF_POLICY/token_ppo"),
    "D6.st": (f"OFF_POLICY/turn_{OWN}", "OFF_POLICY/turn_ppo"),
    "G1": ("GUESS/successes_only", "GUESS/turn_ppo"),
    "N1": ("NOISY/successes_only", "NOISY/turn_ppo"),
    "H1": ("CHAINS/st_ppo", "CHAINS/turn_ppo"),
    "H1.own": ("CHAINS/st_ppo", "CHAINS/turn_ppo_shuffled"),
}
RATES = ("SGD_1/{}", "SGD_2/{}", "SGD_3/{}", "SGD_4/{}")
WIDTHS = [f"OFF_POLICY{clip}/{{}}{e}" for clip in ("", "_CLIP") for e in ("_e0.05", "_e0.1", "", "_e0.4")]
BEST_ELSEWHERE = {
    "S1.s": ("s_ppo", "token_ppo", RATES),
    "S1.st": ("st_ppo", "turn_ppo", RATES),
    "W1": ("turn_ppo", "token_ppo", WIDTHS),
}


def chosen_elsewhere(ends, arm, settings):
    """{temperature: {world: end}} of an arm at the setting that is best, sampled, in the other worlds."""
    named = [setting.format(arm) for setting in settings]
    worlds = set.intersection(*({*ends[1.0][name]} for name in named))
    best = {w: max(named, key=lambda n: sum(ends[1.0][n][v] for v in worlds - {w})) for w in worlds}
    return {t: {w: of[name][w] for w, name in best.items()} for t, of in ends.items()}


def test_the_differences_of_the_divisors_trial():
    """World by world, as the protocol's table asks, from the runs that were there when a letter was read."""
    folder = REFERENCE / "divisor/part2"
    runs = json.loads((folder / "metrics/runs.json").read_text())
    finite = {f"{r['regime']}/{r['algorithm']}/{r['seed']}" for r in runs if r["non_finite"] is None}
    rows = pd.read_parquet(folder / "metrics/evaluations.parquet").sort_values("iteration")
    ends = {1.0: {}, 0.0: {}}
    for (regime, arm, seed, temperature), of in rows.groupby(["regime", "algorithm", "seed", "temperature"]):
        end = last_tenth(list(of["success"])) if f"{regime}/{arm}/{seed}" in finite else 0.0
        ends[temperature].setdefault(f"{regime}/{arm}", {})[seed] = end
    claims = pd.read_csv(folder / "claims.csv").set_index("id")
    assert {*claims.index} == {*DIFFERENCES, *BEST_ELSEWHERE}
    started = {(f"{r['regime']}/{r['algorithm']}", r["seed"]): r["started"] for r in runs}

    def read(letter):
        return {
            t: {
                arm: {seed: end for seed, end in of.items() if started[arm, seed] < READ[letter]}
                for arm, of in arms.items()
            }
            for t, arms in ends.items()
        }

    pairs = {
        entry: [{t: of[arm] for t, of in read(entry[0]).items()} for arm in arms]
        for entry, arms in DIFFERENCES.items()
    }
    for entry, (one, other, settings) in BEST_ELSEWHERE.items():
        pairs[entry] = [chosen_elsewhere(read(entry[0]), arm, settings) for arm in (one, other)]
    for entry, (one, other) in pairs.items():
        for row, temperature in zip(claims.loc[entry].itertuples(), (1.0, 0.0), strict=True):
            with_it, without = one[temperature], other[temperature]
            apart = [with_it[seed] - without[seed] for seed in with_it.keys() & without.keys()]
            assert len(apart) == row.worlds, entry
            assert sum(apart) / len(apart) == pytest.approx(row.estimate, abs=1e-4), entry
