"""Verdicts on made-up studies of known truth, through the committed ledger."""

import dataclasses
import math
import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import beta, betabinom

from stppo import schema
from stppo.results.resampling import joint_level
from stppo.study.claims import evaluate as evaluate_all
from stppo.study.claims import ledger_markdown, ledger_table, write_ledger
from stppo.study.evaluation import write_evaluation
from stppo.study.ledger import LEDGER_FILE, Ledger, load_ledger
from stppo.study.outcomes import Study
from stppo.study.quantities import QUANTITIES
from stppo.study.study_figures import best_arms
from tests.reference import REFERENCE
from tests.synthetic_runs import Behaviour, make_metrics, replicates

LEDGER = load_ledger()
STUDY = REFERENCE / "study"
ILL = Behaviour(risk=16 / 18)
WELL = Behaviour(final=0.45, clip=0.04)
TOKEN, S, ST = ("MAIN", "token_ppo"), ("MAIN", "s_ppo"), ("MAIN", "st_ppo")
CONTROLS = ["kl_matched", "step_matched", "placebo_shuffled", "placebo_replayed", "kl_stop"]


def evaluate(metrics, claim, planned=None):
    """Verdicts of one claim, at the level of the whole ledger."""
    part = LEDGER.model_copy(update={"claims": tuple(c for c in LEDGER.claims if c.id == claim)})
    error = part.n_primary * LEDGER.family_error / LEDGER.n_primary
    ledger = part.model_copy(update={"family_error": error})
    assert ledger.level == pytest.approx(LEDGER.level)
    return {verdict.id: verdict for verdict in evaluate_all(metrics, ledger, planned)}


def verdict_of(arms, part, of=None, planned=None):
    return evaluate(make_metrics(arms, of), part.split(".")[0], planned)[part]


# --- C1, C2: collapse --------------------------------------------------------------------------------
def test_a_collapsing_arm_beside_a_stable_control_is_supported():
    found = verdict_of({TOKEN: Behaviour(risk=1), ("ON_POLICY", "token_ppo"): WELL}, "C1")
    assert found.verdict == "supported" and found.value == 1
    assert found.n_runs == {"MAIN/token_ppo": (18, None), "ON_POLICY/token_ppo": (18, None)}


def test_a_collapse_that_comes_on_policy_too_is_not_off_policy():
    found = verdict_of({TOKEN: Behaviour(risk=1), ("ON_POLICY", "token_ppo"): Behaviour(risk=1)}, "C1")
    assert found.verdict == "not supported"
    assert [check.outcome for check in found.checks] == ["holds", "fails"]


def test_a_stable_baseline_refutes_collapse():
    assert verdict_of({TOKEN: WELL, ("ON_POLICY", "token_ppo"): WELL}, "C1").verdict == "not supported"


def test_a_treatment_that_stabilises_is_supported_and_one_that_does_not_is_refuted():
    found = evaluate(make_metrics({TOKEN: ILL, S: ILL, ST: WELL}), "C2")
    assert found["C2.st_ppo"].verdict == "supported"
    assert found["C2.st_ppo"].value == pytest.approx(16 / 18)  # untreated minus treated
    assert found["C2.s_ppo"].verdict == "not supported"


def test_in_between_is_inconclusive():
    assert verdict_of({TOKEN: ILL, ST: Behaviour(risk=5 / 18)}, "C2.st_ppo").verdict == "inconclusive"


def test_no_collapse_of_few_runs_is_no_proof_of_stability():
    """0 of 18 runs bound the risk below 0.25 at the joint level, 0 of 12 do not."""
    of = replicates(seeds=2)
    found = verdict_of({TOKEN: Behaviour(risk=1), ST: WELL}, "C2.st_ppo", of)
    assert found.verdict == "inconclusive"
    assert [check.outcome for check in found.checks] == ["holds", "open"]
    assert found.value == 0 and found.threshold == "below 0.25"  # shown is the condition that decides
    (row,) = (line for line in ledger_markdown([found]).splitlines() if line.startswith("| C2.st_ppo"))
    assert "(1 of 2 conditions hold)" in row


def test_a_dip_counts_as_collapse():
    assert verdict_of({TOKEN: ILL, ST: Behaviour(dip=True)}, "C2.st_ppo").verdict == "not supported"


def test_a_non_finite_stop_counts_as_collapse():
    broken = Behaviour(risk=1, non_finite=True)
    assert verdict_of({TOKEN: broken, ST: WELL}, "C2.st_ppo").verdict == "supported"
    assert verdict_of({TOKEN: broken, ST: broken}, "C2.st_ppo").verdict == "not supported"


def test_verdict_follows_the_metrics():
    """The same runs with the treated arm's success taken away from iteration 12 on."""
    metrics = make_metrics({TOKEN: ILL, ST: WELL})
    evaluations = metrics.evaluations.copy()
    late = (evaluations["algorithm"] == "st_ppo") & (evaluations["iteration"] >= 12)
    evaluations.loc[late, "success"] = 0.01
    altered = dataclasses.replace(metrics, evaluations=evaluations)
    assert evaluate(metrics, "C2")["C2.st_ppo"].verdict == "supported"
    assert evaluate(altered, "C2")["C2.st_ppo"].verdict == "not supported"


def test_it_is_specific_only_if_every_control_is_beaten():
    arms = {TOKEN: ILL, S: WELL} | {("MAIN", f"token_ppo_{control}"): ILL for control in CONTROLS}
    of = dict.fromkeys(arms, replicates()) | {
        ("MAIN", f"token_ppo_{control}"): replicates(seeds=1) for control in CONTROLS
    }
    assert verdict_of(arms, "C2.s_ppo.specific", of).verdict == "supported"
    arms["MAIN", "token_ppo_step_matched"] = WELL  # smaller steps do as well
    found = verdict_of(arms, "C2.s_ppo.specific", of)
    assert found.verdict == "inconclusive"
    assert [check.outcome for check in found.checks].count("open") == 1


def test_what_is_gated_is_asked_only_behind_its_gate():
    arms = {TOKEN: ILL, S: Behaviour(risk=5 / 18)} | {("MAIN", f"token_ppo_{c}"): ILL for c in CONTROLS}
    found = verdict_of(arms, "C2.s_ppo.specific")
    assert found.verdict == "not asked" and "Asked only if C2.s_ppo is supported" in found.explanation
    del arms[S]
    assert verdict_of(arms, "C2.s_ppo.specific").verdict == "not tested", "its gate is not tested either"


def test_so_grpo_is_judged_by_both_readings():
    grpo, a, b = (("MAIN", name) for name in ("grpo", "so_grpo", "so_grpo_ctn"))
    found = evaluate(make_metrics({grpo: Behaviour(risk=1), a: WELL, b: Behaviour(risk=1)}), "C8")
    assert (found["C8.a"].verdict, found["C8.b"].verdict) == ("supported", "not supported")


def test_so_grpo_has_its_placebos_to_beat():
    grpo, treated = ("MAIN", "grpo"), ("MAIN", "so_grpo")
    controls = [("MAIN", f"turn_grpo_{control}") for control in CONTROLS if control != "kl_stop"]
    arms = {grpo: ILL, treated: WELL} | dict.fromkeys(controls, ILL)
    of = dict.fromkeys(arms, replicates()) | dict.fromkeys(controls, replicates(seeds=1))
    found = verdict_of(arms, "C8.a.specific", of)
    assert found.verdict == "supported" and set(found.n_runs) == {f"{r}/{n}" for r, n in [treated, *controls]}
    arms["MAIN", "turn_grpo_placebo_replayed"] = WELL  # any divisor of that size does
    assert verdict_of(arms, "C8.a.specific", of).verdict == "inconclusive"


# --- C3, C4, C5: clip fractions, success, survival ---------------------------------------------------
def test_lower_clip_fractions_count_up_to_the_first_collapse():
    found = evaluate(make_metrics({TOKEN: ILL, S: WELL, ST: Behaviour(clip=0.3)}), "C3")
    assert found["C3.s_ppo"].verdict == found["C3.s_ppo.unsigned"].verdict == "supported"
    assert found["C3.st_ppo"].verdict == "not supported"
    assert found["C3.s_ppo"].value == pytest.approx(-0.06, abs=0.02)
    assert 2 <= len(found["C3.s_ppo"].checks) < 10  # late tenths lie behind the collapses
    assert found["C3.st_ppo.same_granularity"].verdict == "not tested"  # no Turn-PPO


def test_one_tenth_of_higher_clipping_refutes_throughout():
    metrics = make_metrics({TOKEN: Behaviour(), S: WELL})
    assert evaluate(metrics, "C3")["C3.s_ppo"].verdict == "supported"
    late = (metrics.iterations["algorithm"] == "s_ppo") & (metrics.iterations["iteration"] > 36)
    metrics.iterations.loc[late, "clip_fraction"] = 0.2
    found = evaluate(metrics, "C3")["C3.s_ppo"]
    assert found.verdict == "not supported" and "tenth 10" in found.quantity and found.value > 0
    assert found.held == "9 of 10 tenths hold, 1 fail"


def test_explanation_says_how_many_tenths_could_be_tested():
    found = evaluate(make_metrics({TOKEN: ILL, S: WELL}), "C3")["C3.s_ppo"]
    n = len(found.checks)
    assert f"{n} of 10 tenths could be tested: {n} holds." in found.explanation
    broken = Behaviour(
        risk=1, onset=6, non_finite=True
    )  # nothing but the first tenth lies before the collapses
    found = evaluate(make_metrics({TOKEN: broken, S: WELL}), "C3")["C3.s_ppo"]
    assert len(found.checks) == 1 and "1 of 10 tenths could be tested: 1 holds." in found.explanation


@pytest.mark.parametrize("level", [0.0, 0.3])
def test_an_interval_without_width_decides_nothing(level):
    """Every pair shows the very same difference: none (which is not 0.05), or one far above 0.05."""
    metrics = make_metrics({TOKEN: WELL, S: WELL})
    metrics.evaluations["success"] = metrics.evaluations["algorithm"].map(
        {"token_ppo": 0.2, "s_ppo": 0.2 + level}
    )
    found = evaluate(metrics, "C4")["C4.s_ppo.shared"]
    assert found.value == pytest.approx(level) and found.verdict == "inconclusive"
    assert "the same in all resamples: an interval without width decides nothing" in found.explanation


def test_higher_success_and_a_tie():
    found = evaluate(make_metrics({TOKEN: ILL, S: WELL}), "C4")
    assert found["C4.s_ppo.shared"].verdict == found["C4.s_ppo.shared.non_inferior"].verdict == "supported"
    tie = evaluate(make_metrics({TOKEN: WELL, S: WELL}), "C4")
    assert tie["C4.s_ppo.shared"].verdict == "not supported"  # not 0.05 higher
    assert tie["C4.s_ppo.shared.non_inferior"].verdict == "supported"


def test_best_settings_fall_back_on_the_shared_ones():
    best = ("BEST", "token_ppo")
    arms = {TOKEN: ILL, S: WELL, best: WELL}
    found = verdict_of(arms, "C4.s_ppo.best")
    assert set(found.n_runs) == {"BEST/token_ppo", "MAIN/s_ppo"} and found.verdict == "not supported"


def test_best_settings_that_were_planned_and_not_run_are_missed():
    planned = {TOKEN: 18, S: 18, ("BEST", "token_ppo"): 6, ("BEST", "s_ppo"): 6}
    arms = {TOKEN: ILL, S: WELL, ("BEST", "token_ppo"): WELL}
    found = verdict_of(arms, "C4.s_ppo.best", planned=planned)
    assert found.verdict == "not tested" and "no runs of BEST/s_ppo" in found.explanation
    assert found.n_runs["BEST/s_ppo"] == (0, 6) and "BEST/s_ppo 0 of 6" in found.runs


def test_without_any_best_settings_nothing_is_compared():
    assert verdict_of({TOKEN: ILL, S: WELL}, "C4.s_ppo.best").verdict == "not tested"


def test_while_no_best_settings_are_planned_none_is_compared():
    """Before tuning has decided, the shared setting is nobody's best; afterwards it is that of arms without one."""
    metrics = make_metrics({TOKEN: ILL, S: WELL})
    undecided = {TOKEN: 18, S: 18}
    found = evaluate(metrics, "C4", undecided)["C4.s_ppo.best"]
    assert found.verdict == "not tested" and "no runs of BEST/s_ppo, BEST/token_ppo" in found.explanation
    assert best_arms(Study(metrics), undecided) == {}
    decided = evaluate(metrics, "C4", undecided | {("BEST", "grpo"): 6})["C4.s_ppo.best"]
    assert decided.verdict == "supported" and set(decided.n_runs) == {"MAIN/token_ppo", "MAIN/s_ppo"}


def test_turn_ratios_help_and_the_factorial_says_whether_it_is_the_ratio():
    turn, mean, both = (("MAIN", n) for n in ("turn_ppo", "token_ppo_turn_mean", "turn_ppo_turn_mean"))
    ill = Behaviour(risk=1)
    ratio = evaluate(make_metrics({TOKEN: ill, turn: WELL, mean: ill, both: WELL}), "C5")
    assert ratio["C5"].verdict == ratio["C5.ratio"].verdict == "supported"
    # turn ratios help under one credit as much as they harm under the other
    crossed = evaluate(make_metrics({TOKEN: ill, turn: WELL, mean: WELL, both: ill}), "C5")
    assert crossed["C5"].verdict == "supported" and crossed["C5.ratio"].verdict == "inconclusive"


def test_later_collapse_of_little_length_is_no_gain():
    arms = {TOKEN: Behaviour(risk=1, onset=16), ("MAIN", "turn_ppo"): Behaviour(risk=1, onset=16)}
    assert verdict_of(arms, "C5").verdict == "inconclusive"


# --- C6, C7: mechanism -------------------------------------------------------------------------------
CORNERS = [TOKEN, *(("MAIN", n) for n in ("turn_ppo", "token_ppo_turn_mean", "turn_ppo_turn_mean"))]


def test_spikes_go_with_collapse_and_the_bias_grows():
    found = evaluate(make_metrics(dict.fromkeys(CORNERS, Behaviour(risk=0.5))), "C6")
    assert found["C6.spikes"].verdict == found["C6.bias"].verdict == "supported"
    assert found["C6.bias"].value == pytest.approx(0.03, abs=0.01)


def test_spikes_without_collapse_and_a_shrinking_bias_refute():
    steady = Behaviour(risk=0.5, spike_lead=-1000, bias_growth=-0.03)
    found = evaluate(make_metrics(dict.fromkeys(CORNERS, steady)), "C6")
    assert found["C6.spikes"].verdict in ("not supported", "inconclusive")
    assert found["C6.bias"].verdict == "not supported"
    assert found["C6.lead"].verdict == "not asked"


def test_spikes_that_come_last_are_no_cause():
    first, last = (Behaviour(risk=0.5, onset=20, spike_lead=lead) for lead in (9, 0))
    assert verdict_of(dict.fromkeys(CORNERS, first), "C6.lead").verdict == "supported"
    assert verdict_of(dict.fromkeys(CORNERS, last), "C6.lead").verdict == "not supported"


def test_spikes_need_controls_from_five_warm_starts():
    """All survivors come from three warm starts, the collapsed runs from six."""
    order = sorted(replicates(), key=lambda r: r.world_seed)
    found = verdict_of(dict.fromkeys(CORNERS, Behaviour(risk=12 / 18)), "C6.spikes", order)
    assert found.verdict == "not tested" and "from 3 warm starts; a verdict needs 5" in found.explanation


@pytest.mark.parametrize(("off_policy", "expected"), [(0.8, "supported"), (0.4, "not supported")])
def test_worse_critic_off_policy(off_policy, expected):
    arms = {
        TOKEN: Behaviour(risk=0.5, value_error=off_policy),
        ("ON_POLICY", "token_ppo"): Behaviour(value_error=0.4),
    }
    found = verdict_of(arms, "C7")
    assert found.verdict == expected and found.value == pytest.approx(off_policy - 0.4, abs=0.05)


def test_critic_is_compared_before_the_collapse_only():
    metrics = make_metrics(
        {TOKEN: Behaviour(risk=1, value_error=0.4), ("ON_POLICY", "token_ppo"): Behaviour(value_error=0.4)}
    )
    off_policy = (metrics.iterations["algorithm"] == "token_ppo") & (metrics.iterations["regime"] == "MAIN")
    metrics.iterations.loc[off_policy & (metrics.iterations["iteration"] > 24), "critic_value_rmse"] *= 10
    assert evaluate(metrics, "C7")["C7"].verdict == "not supported"


# --- what is missing ---------------------------------------------------------------------------------
def test_missing_arm_is_named():
    found = verdict_of({TOKEN: ILL}, "C2.s_ppo", planned={TOKEN: 18, S: 18})
    assert found.verdict == "not tested" and math.isnan(found.value)
    assert found.explanation == "Missing: no runs of MAIN/s_ppo."
    assert found.runs == "MAIN/token_ppo 18 of 18, MAIN/s_ppo 0 of 18"


def test_a_refuted_half_needs_no_other_half():
    assert verdict_of({TOKEN: WELL}, "C1").verdict == "not supported"
    assert verdict_of({TOKEN: Behaviour(risk=1)}, "C1").verdict == "not tested"


def test_missing_column_is_named():
    metrics = make_metrics({TOKEN: ILL, ("ON_POLICY", "token_ppo"): WELL})
    metrics.iterations["critic_value_rmse"] = math.nan
    found = evaluate(metrics, "C7")["C7"]
    assert found.verdict == "not tested" and "no run recorded critic_value_rmse" in found.explanation


def test_too_few_warm_starts_give_a_number_and_no_verdict():
    found = verdict_of({TOKEN: ILL, ST: WELL}, "C2.st_ppo", replicates(worlds=1))
    assert found.verdict == "not tested"
    assert "from 3 warm starts; a verdict needs 5" in found.explanation


def test_arms_without_shared_replicates_are_no_pairs():
    other = [replicate._replace(seed=replicate.seed + 5) for replicate in replicates()]
    found = verdict_of({TOKEN: WELL, S: WELL}, "C3.s_ppo", {TOKEN: replicates(), S: other})
    assert found.verdict == "not tested" and "no tenth of training has pairs" in found.explanation


def test_nothing_of_another_study_is_tested():
    found = evaluate_all(make_metrics({("A", "token_ppo"): ILL, ("A", "st_ppo"): WELL}))
    assert {verdict.verdict for verdict in found} == {"not tested"}
    assert all("Missing: no runs of" in verdict.explanation for verdict in found)


# --- the ledger itself and its tables ----------------------------------------------------------------
def test_every_claim_of_the_paper_has_verdicts():
    assert [claim.id for claim in LEDGER.claims] == [f"C{i}" for i in range(1, 9)]
    assert all(part.id.split(".")[0] == claim.id for claim in LEDGER.claims for part in claim.parts)
    used = {
        condition.quantity for claim in LEDGER.claims for part in claim.parts for condition in part.conditions
    }
    assert used == set(QUANTITIES)


def test_joint_level_counts_the_primary_verdicts():
    kinds = [part.kind for claim in LEDGER.claims for part in claim.parts]
    assert LEDGER.n_primary == kinds.count("primary") == 15
    assert LEDGER.level == joint_level(15)


def test_a_second_threshold_reads_the_interval_of_a_counted_part():
    """What is not counted because it shares an interval does share it."""
    parts = [part for claim in LEDGER.claims for part in claim.parts]
    counted = [(c.quantity, c.arms) for part in parts if part.kind == "primary" for c in part.conditions]
    for part in parts:
        if part.kind == "same_interval":
            assert [(c.quantity, c.arms) in counted for c in part.conditions] == [True]


def test_columns_of_the_ledger_are_recorded():
    known = {*schema.UPDATE_COLUMNS, *(f"{name}_max" for name in schema.PEAK_COLUMNS)}
    for claim in LEDGER.claims:
        for condition in (c for part in claim.parts for c in part.conditions):
            assert {condition.column, condition.signal, condition.over} - {None} <= known


def test_tables_hold_every_verdict(tmp_path):
    verdicts = list(evaluate(make_metrics({TOKEN: ILL, ST: WELL}), "C2").values())
    table = ledger_table(verdicts)
    assert list(table["id"]) == [verdict.id for verdict in verdicts]
    paths = write_ledger(verdicts, tmp_path)
    assert [path.name for path in paths] == ["claims.csv", "claims.md"]
    read = pd.read_csv(paths[0])
    assert list(read["verdict"]) == list(table["verdict"]) and read["low"].notna().any()
    text = paths[1].read_text()
    assert text == ledger_markdown(verdicts)
    rows = [line for line in text.splitlines() if line.startswith("| C2")]
    assert len(rows) == 4 and all(line.count("|") == 8 for line in rows)
    assert "supported [1] | 36 |" in rows[1] and "0.89 [" in rows[1]
    assert not read["provisional"].any() and "rovisional" not in text


def test_verdicts_from_fewer_runs_than_planned_are_provisional():
    metrics = make_metrics({TOKEN: ILL, S: WELL, ST: WELL})
    planned = {TOKEN: 18, S: 18, ST: 20}
    found = evaluate(metrics, "C2", planned | {("MAIN", "token_ppo_kl_matched"): 6})
    table = ledger_table(list(found.values())).set_index("id")
    assert table["verdict"]["C2.st_ppo"] == table["verdict"]["C2.s_ppo"] == "supported"
    assert table["provisional"].to_dict() == {
        "C2.s_ppo": False,
        "C2.st_ppo": True,
        "C2.s_ppo.specific": False,  # not tested is no verdict that more runs could overturn
        "C2.st_ppo.specific": False,
    }
    text = ledger_markdown(list(found.values()))
    assert "| supported (provisional) [1] | 36 of 38 |" in text and "| supported [1] | 36 of 36 |" in text
    assert "Provisional: from fewer runs than planned" in text


def test_thresholds_that_lean_on_the_smoothing_are_disclosed():
    """Every part that asks for a risk below 0.25 has the note, and its numbers are right."""
    leaning = []
    for part in (part for claim in LEDGER.claims for part in claim.parts):
        asks = any(c.quantity == "collapse_risk" and c.below == 0.25 for c in part.conditions)
        assert ("Clopper-Pearson" in part.note) == asks, part.id
        leaning += [part.note] * asks
    assert len(leaning) == 4
    rate, both = 0.25, (1 - LEDGER.level) / 2
    alike = betabinom.pmf(0, 3, rate * (1 / 0.3 - 1), (1 - rate) * (1 / 0.3 - 1)) ** 6
    exact, luck = 1 - both ** (1 / 18), (1 - rate) ** 18
    verdicts = list(evaluate(make_metrics({TOKEN: ILL, ST: WELL}), "C2").values())
    smoothed = next(
        check.high for v in verdicts for check in v.checks if check.outcome == "holds" and check.value == 0
    )
    assert smoothed == pytest.approx(beta.ppf(1 - both, 0.5, 18.5), abs=0.005)  # Jeffreys' limit
    told = (f"at {smoothed:.2f}", f"at {exact:.2f}", f"{luck:.4f}", f"{alike:.2f}", f"{both:.4f}")
    assert told == ("at 0.24", "at 0.30", "0.0056", "0.02", "0.0017")
    assert all(number in leaning[0] for number in told)
    lines = ledger_markdown(verdicts).splitlines()
    assert sum("[1]" in line for line in lines) == 3 and f"[1] {leaning[0]}" in lines


def test_committed_verdicts_follow_from_the_committed_metrics(tmp_path):
    write_evaluation(STUDY / "metrics", tmp_path, STUDY / "planned.json")
    now, was = (pd.read_csv(folder / "claims.csv").set_index("id") for folder in (tmp_path, STUDY / "claims"))
    assert now["verdict"].to_dict() == was["verdict"].to_dict() and now["runs"].equals(was["runs"])
    for name in ("value", "low", "high"):
        np.testing.assert_allclose(now[name], was[name], rtol=1e-3, atol=1e-4)
    lines = [(folder / "in_short.txt").read_text() for folder in (tmp_path, STUDY / "claims")]
    assert lines[0] == lines[1]


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_readme_shows_the_committed_sentences_and_verdicts():
    text = (STUDY / "claims" / "claims.md").read_text(encoding="utf-8")
    rows = [cells(line) for line in text.splitlines() if line.startswith("| C")]
    expected = [
        [name, claim, measured, re.sub(r" \[\d+\]$", "", verdict)]
        for name, claim, _, measured, verdict, _, _ in rows
        if not claim.endswith(("(secondary)", "(same interval)"))
        and not (claim.endswith("(gated)") and verdict.startswith(("not asked", "not tested")))
    ]
    readme = (REFERENCE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert sum(not row[1].endswith("(gated)") for row in expected) == LEDGER.n_primary
    assert [cells(line) for line in readme.splitlines() if line.startswith("| C")] == expected
    study = readme.split("## The study")[1].split("\n## ")[0]
    sentences = (STUDY / "claims" / "in_short.txt").read_text(encoding="utf-8").splitlines()
    assert [line.removeprefix("- ") for line in study.splitlines() if line.startswith("- ")] == sentences


def test_same_metrics_give_the_same_ledger():
    metrics = make_metrics({TOKEN: ILL, ST: WELL})
    tables = [ledger_table(list(evaluate(metrics, "C2").values())) for _ in range(2)]
    pd.testing.assert_frame_equal(*tables)


PART = {"id": "X", "text": "t", "kind": "primary", "figure": "f", "rule": "r"}
RISK = {"quantity": "collapse_risk", "arms": {"of": "MAIN/a"}, "above": 0.5}


@pytest.mark.parametrize(
    ("part", "condition", "message"),
    [
        ({}, {"quantity": "luck"}, "unknown quantity luck"),
        ({}, {"arms": {"to": "MAIN/a"}}, "collapse_risk needs arms in the roles of"),
        ({}, {"arms": {"of": "a"}}, "arm a is not REGIME/algorithm"),
        ({}, {"below": 0.1}, "one of above and below"),
        ({}, {"column": "entropy"}, "collapse_risk has no column"),
        ({}, {"threshold": 1}, "threshold"),
        ({"kind": "gated"}, {}, "a gate goes with kind gated"),
        ({"kind": "gated", "gate": "Y"}, {}, "its gate Y is no earlier part"),
        ({"kind": "certain"}, {}, "kind"),
    ],
)
def test_wrong_entry_is_one_line(tmp_path, part, condition, message):
    entry = {**PART, **part, "conditions": [{**RISK, **condition}]}
    content = {"family_error": 0.05, "claims": [{"id": "X", "text": "t", "source": "s", "parts": [entry]}]}
    path = tmp_path / "claims.yaml"
    path.write_text(str(content).replace("'", '"'))
    with pytest.raises(ValueError, match=message) as caught:
        load_ledger(path)
    assert str(caught.value).count("\n") == 0 and str(path) in str(caught.value)


def test_ledger_lies_in_the_package():
    assert LEDGER_FILE.parent.name == "analysis" and isinstance(load_ledger(LEDGER_FILE), Ledger)
