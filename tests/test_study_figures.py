"""The study's figures, tables and sentences, on made-up metrics of its whole plan and on fragments of it."""

import dataclasses
import html
import json

import numpy as np
import pandas as pd
import pytest

from stppo.results.report_figures import HEADINGS
from stppo.results.resampling import Replicate
from stppo.results.runs import Metrics, load_metrics
from stppo.results.statistics import REPETITIONS
from stppo.results.style import LOOKS, look
from stppo.study import (
    answers,
    arms,
    comparisons,
    diagnostic_figures,
    figures,
    findings,
    mechanism_figures,
    phase_diagram,
    study_figures,
    words,
)
from stppo.study.claims import evaluate
from stppo.study.in_short import in_short
from stppo.study.ledger import load_ledger
from stppo.study.outcomes import Arm, Study
from tests.reference import assert_as_committed, assert_shows_all, references
from tests.study_cases import planned_replicates, study_metrics
from tests.synthetic_runs import Behaviour, make_metrics, replicates

PLAN = {arm: len(of) for arm, of in planned_replicates().items()}
FAST = 50


def draw_all(study, plan=None, repetitions=FAST):
    drawn = [
        study_figures.survival_figure(study),
        study_figures.controls_figure(study, plan),
        study_figures.drivers_figure(study, plan),
        study_figures.normalisers_figure(study, plan),
        study_figures.best_settings_figure(study, plan),
        study_figures.settings_figure(study, repetitions),
        study_figures.factorial_figure(study),
        phase_diagram.phase_diagram_figure(study),
        mechanism_figures.mechanism_figure(study),
        mechanism_figures.spikes_figure(study),
        diagnostic_figures.critic_figure(study, repetitions),
        diagnostic_figures.trends_figure(study),
    ]
    return {plot.name: plot for plot in drawn if plot}


@pytest.fixture(scope="module")
def study():
    return Study(study_metrics())


@pytest.fixture(scope="module")
def plots(study):
    return draw_all(study, PLAN)


def test_nothing_drawn_is_cut_off(study, plots):
    for plot in (*plots.values(), *figures.all_figures(study.metrics, FAST)):
        assert_shows_all(plot)


def test_panels_that_share_an_axis_hold_the_higher_ones_too():
    """The main regime is drawn first, and here it has the lower success."""
    levels = {"MAIN": 0.1, "ON_POLICY": 0.6}
    names = ("token_ppo", "turn_ppo", "grpo", "gspo", "so_grpo")
    of = {Arm(regime, name): Behaviour(final=f) for regime, f in levels.items() for name in names}
    for plot in figures.all_figures(make_metrics(of), FAST):
        assert_shows_all(plot)


# --- the plan ---------------------------------------------------------------------------------
def test_every_planned_arm_has_its_place():
    grouped = {
        name for g in (*arms.CONTROLS, *arms.DRIVERS, *arms.ABLATIONS) for name in (g.default, *g.arms)
    }
    for arm in PLAN:
        assert arm.regime in {arms.MAIN, arms.ON_POLICY, arms.LONG, *arms.COVERED}, arm
        split = any(ending and arm.algorithm.endswith(ending) for ending in arms.SPLITS.values())
        assert arm.algorithm in LOOKS or split or str(arm) in grouped, arm
        assert (arms.variant(arm.algorithm) is None) == (arm.algorithm in LOOKS), arm
    planned = {str(arm) for arm in PLAN}
    for name in grouped:
        assert name in planned, f"{name} is no arm of the study"


def test_arms_of_the_ledger_are_planned():
    conditions = [c for claim in load_ledger().claims for part in claim.parts for c in part.conditions]
    for names in (names for condition in conditions for names in condition.arms.values()):
        assert any(comparisons.arm_of(name) in PLAN for name in names.split("|")), names


def test_variants_look_like_what_they_vary():
    assert look("st_ppo_max_c2").color == look("st_ppo").color != look("turn_ppo_sgd").color
    assert "max(1, ‖C‖/2)" in look("st_ppo_max_c2").label
    assert arms.variant("my_st_ppo") is None and arms.variant("token_ppo_turn_mean") is None


# --- figures ----------------------------------------------------------------------------------
def test_every_figure_of_the_ledger_is_drawn(plots, study):
    named = {part.figure for claim in load_ledger().claims for part in claim.parts}
    curves = {"collapse", "stability", "clip_ratio", "so_grpo", "diagnostics"}  # of `figures`
    assert named - curves <= set(plots)
    assert {answer.figure for answer in answers.all_answers(study)} <= {*plots, *curves, "granularity"}
    assert {*plots, *curves} <= set(HEADINGS)


def test_curves_leave_ablations_and_covered_regimes_out(study):
    plot = figures.stability_figure(study.metrics, FAST)
    assert set(plot.data["regime"]) == {"MAIN", "ON_POLICY", "LONG"}
    assert set(plot.data["algorithm"]) == {*arms.PPO_VARIANTS, "so_ppo_ctn"}
    assert "warm starts, then seeds" in plot.caption
    settings = study_figures.settings_figure(study, FAST)
    assert set(settings.data["regime"]) == set(arms.SETTINGS)


def test_forests_show_every_arm_and_its_counts(plots):
    data = plots["normalisers"].data
    assert set(data["group"]) == {group.name for group in arms.ABLATIONS}
    assert data["runs"].min() > 0
    shown = [text.get_text() for text in plots["controls"].figure.axes[0].get_yticklabels()]
    assert "untreated: token PPO   15/18" in shown and "learning rate matched by KL   5/6" in shown


def test_planned_arm_without_runs_is_drawn_as_not_run():
    keep = {
        arm: of
        for arm, of in planned_replicates().items()
        if arm.algorithm.startswith("st_ppo") and not arm.algorithm.endswith("_max_c2")
    }
    study = Study(make_metrics({arm: Behaviour() for arm in keep}, keep))
    plot = study_figures.normalisers_figure(study, PLAN)
    labels = [text.get_text() for text in plot.figure.axes[0].get_yticklabels()]
    assert "max(1, ‖C‖/2)   not run" in labels
    table = comparisons.coverage(study.metrics, PLAN).set_index("regime")
    assert "st_ppo_max_c2 0 of 3" in table.loc["MAIN", "missing"]
    assert table.loc["LONG", ["runs", "runs_planned"]].tolist() == [4, 24]
    assert (
        "token_ppo 0 of 4" in table.loc["LONG", "missing"] and "st_ppo 4" not in table.loc["LONG", "missing"]
    )


def test_reference_figures_of_a_study_follow_from_its_metrics():
    compared = 0
    for folder in references():
        plan = folder / "planned.json"
        metrics = load_metrics(folder / "metrics")
        for name, plot in draw_all(
            Study(metrics), comparisons.load_plan(plan) if plan.is_file() else None, REPETITIONS
        ).items():
            if (folder / "figures" / f"{name}.csv").is_file():
                assert_as_committed(plot, folder / "figures")
                compared += 1
    if not compared:
        pytest.skip("no figure of a study is committed yet")


def test_phase_diagram_counts_collapses(plots):
    cells = plots["phase_diagram"].data.set_index(["part", "algorithm", "x", "y"])
    assert cells.loc[("phase", "token_ppo", "8", "1"), ["runs", "collapsed"]].tolist() == [18, 15]
    assert cells.loc[("phase", "st_ppo", "8", "1.5"), "collapse_share"] == 0
    assert cells.loc[("staleness", "token_ppo", "4", ""), "collapse_share"] == 1
    assert len(cells.loc["phase"]) == 4 * 9 and ("split", "turn_ppo", "8 × 4", "") not in cells.index


def test_spikes_are_those_of_the_runs(plots):
    scores = plots["spikes"].data
    ill, well = (scores.loc[scores["kind"] == kind, "score"] for kind in ("collapsed", "control"))
    assert ill.min() > well.max() and (plots["spikes"].tables["auc"]["auc"] == 1).all()


def test_trends_find_the_growth(plots):
    table = plots["trends"].tables["summary"].set_index(["algorithm", "metric"])
    grown = table.loc[("st_ppo", "clipping_bias_norm")]
    assert grown["factor_low"] < np.exp(0.3) < grown["factor_high"] * 1.02 and grown["r_squared"] > 0.8
    assert table.loc[("st_ppo", "gradient_norm"), "factor"] == pytest.approx(1, abs=0.05)


def test_fragments_of_the_study_are_enough():
    one = [Replicate(11, 111, 1111)]
    for names in (
        ["MAIN/token_ppo"],
        ["A/gspo"],
        ["MAIN/st_ppo", "MAIN/st_ppo_raw"],
        ["E2_LR1/s_ppo", "LLAMA/s_ppo"],
    ):
        chosen = [comparisons.arm_of(name) for name in names]
        fragment = Study(make_metrics({arm: Behaviour() for arm in chosen}, one, iterations=8))
        for plot in draw_all(fragment).values():
            assert plot.png.startswith(b"\x89PNG")
        for answer in (
            *answers.all_answers(fragment),
            *(findings.ablation(fragment, n) for n in findings.GROUPS),
        ):
            assert answer.text.endswith(".") and "nan" not in answer.text, answer.text
            assert answer.id in html.unescape(findings.shown(fragment, answer)._repr_html_())
        for finding in (findings.phase(fragment), findings.factorial(fragment), findings.critic(fragment)):
            assert finding.text
        assert findings.moves_first(fragment).text and findings.settings(fragment).text
        assert findings.matching(fragment).text.startswith("Not tested")


def test_caption_tells_bands_over_warm_starts_from_bands_over_seeds():
    """Three seeds from each of two warm starts are drawn in another way than one seed from each of three."""
    several, single = Arm("MAIN", "token_ppo"), Arm("MAIN", "st_ppo")
    of = {several: replicates(2, 1, 3), single: replicates(1, 3, 1)}
    for arms_, expected, absent in (
        ([several], "warm starts, then seeds", "Other arms"),
        ([single], "means of 3 seeds (interquartile", "warm starts, then seeds"),
        ([several, single], "Other arms: Lines: means of 3 seeds", "means of 3–6"),
    ):
        metrics = make_metrics(dict.fromkeys(arms_, Behaviour()), of)
        text = figures.stability_figure(metrics, FAST).caption
        assert expected in text and absent not in text


# --- sentences --------------------------------------------------------------------------------
def test_answers_follow_the_metrics(study):
    cured = {answer.id: answer.text for answer in answers.all_answers(study)}
    same = {answer.id: answer.text for answer in answers.all_answers(Study(study_metrics(cure=False)))}
    assert cured["Q5"].startswith("0 of 13 controls had no collapse in any run. In 14 comparisons")
    assert "collapses more often in 14 and less often in 0" in cured["Q5"]
    assert "collapses more often in 0 and less often in 0; in the others no difference" in same["Q5"]
    assert "less often (−0.83" in cured["Q7"] and "less often" not in same["Q7"]
    assert all(cured[name] != same[name] for name in cured)


def test_summary_counts_and_means_follow_the_metrics():
    made = {
        Arm("MAIN", "token_ppo"): Behaviour(risk=1),
        Arm("MAIN", "st_ppo"): Behaviour(final=0.5),
        Arm("MAIN", "turn_ppo_kl_matched"): Behaviour(final=0.4),
        Arm("MAIN", "turn_ppo_step_matched"): Behaviour(risk=1),
        Arm("MAIN", "st_ppo_one_plus_c2"): Behaviour(risk=1),
        Arm("MAIN", "token_ppo_critic8"): Behaviour(),
        Arm("BEST", "st_ppo"): Behaviour(final=0.5),
        Arm("STALE0", "token_ppo"): Behaviour(),
        Arm("STALE0", "st_ppo"): Behaviour(risk=1),
        Arm("STALE4", "token_ppo"): Behaviour(),
        Arm("STALE4", "st_ppo"): Behaviour(),
        Arm("LLAMA", "token_ppo"): Behaviour(risk=1),
        Arm("LLAMA", "st_ppo"): Behaviour(),
        Arm("E8_LR1.5", "token_ppo"): Behaviour(),  # without its partner: not told
    }
    metrics = make_metrics(made, replicates(1, 2, 1))
    collapse, line, learning, age, divisor, critic, controls, best, family = in_short(Study(metrics))
    assert "collapsed: token PPO (2 of 2 runs); never: ST-PPO (SO-PPO) (2 runs)" in collapse
    assert line == "With the line at 0.4 / 0.5 / 0.6 of the success reached, collapsed: token PPO 2 / 2 / 2."
    assert learning.startswith("1 of these 2 ended at least 0.05 above their warm starts")
    assert age == (
        "By age of the batch in iterations (0 / 2 / 4), collapsed: token PPO 0 of 2 / 2 of 2 / 0 of 2; "
        "ST-PPO (SO-PPO) 2 of 2 / 0 of 2 / 0 of 2."
    )
    assert (
        "the one used 0.48" in divisor
        and "(0 of 2); 1 + ‖C‖/2 0.0" in divisor
        and divisor.endswith("(2 of 2).")
    )
    assert critic == (
        "Token PPO with a better critic, collapsed: critic trained 8 epochs 0 of 2 (without it 2 of 2)."
    )
    assert (
        controls.startswith("Of 2 controls")
        and "1 had no collapse (2 of 4 runs collapsed in all)" in controls
    )
    assert "highest at the end: Turn-PPO, learning rate matched by KL" in controls
    assert best.startswith("Each at its best learning rate: 0 of 2 runs collapsed")
    assert family.startswith(
        "Main settings, but Llama policy: 2 of 4 runs collapsed, and they ended at token PPO 0.0"
    )
    assert "(2 of 2 collapsed) and ST-PPO (SO-PPO) 0.4" in family
    assert in_short(Study(make_metrics({Arm("A", "token_ppo"): Behaviour()}, replicates(1, 1)))) == []


def test_greedy_success_is_told_where_it_was_measured():
    metrics = make_metrics(
        {Arm("MAIN", "token_ppo"): Behaviour(), Arm("MAIN", "s_ppo"): Behaviour()}, replicates(1, 2, 1)
    )
    assert not any("Greedy" in sentence for sentence in in_short(Study(metrics)))
    last = metrics.evaluations[metrics.evaluations["iteration"] == 40]
    low = (last["algorithm"] == "token_ppo") & (last["seed"] == last["seed"].min())
    greedy = last.assign(temperature=0.0, success=np.where(low, 0.2, 0.5))
    measured = dataclasses.replace(metrics, evaluations=pd.concat([metrics.evaluations, greedy]))
    (told,) = [sentence for sentence in in_short(Study(measured)) if sentence.startswith("Greedy")]
    assert told.endswith("mean of the starts 0.45): token PPO 0.35 (1 of 2) and S-PPO 0.50 (0 of 2).")


def test_missing_runs_are_named():
    study = Study(make_metrics({Arm("MAIN", "token_ppo"): Behaviour()}))
    told = {answer.id: answer.text for answer in answers.all_answers(study)}
    assert "no runs of LLAMA/s_ppo and LLAMA/token_ppo" in told["Q6"]
    assert "no runs of MAIN/so_grpo and MAIN/grpo" in told["Q7"]
    assert (
        told["Q1"].startswith("Not tested")
        and "Not run: MAIN/turn_ppo, MAIN/s_ppo and MAIN/st_ppo." in told["Q4"]
    )


def test_no_direction_from_two_warm_starts():
    behaviours = {
        Arm("MAIN", "token_ppo"): Behaviour(final=0.25),
        Arm("MAIN", "st_ppo"): Behaviour(final=0.60),
    }
    few, many = (
        answers.versus(Study(make_metrics(behaviours, of)), Arm("MAIN", "st_ppo"), Arm("MAIN", "token_ppo"))
        for of in (replicates(2, 1, 1), replicates())
    )
    assert "too few warm starts" in few and "higher" not in few
    assert "ends higher (+0.3" in many


@pytest.mark.parametrize(
    ("n_starts", "said"),
    [(2, "Not tested: no control shares 3 warm starts"), (3, "1 of 1 controls had no collapse")],
)
def test_controls_are_not_judged_from_two_warm_starts(n_starts, said):
    made = {Arm("MAIN", name): Behaviour() for name in ("s_ppo", "token_ppo_kl_stop")}
    study = Study(make_metrics(made, replicates(1, n_starts, 3)))
    assert answers.why_divide(study, None).text.startswith(said)


def phase_study(n_starts, arms_):
    of = [r for r in replicates(seeds=1) if r.warm_start_seed in (111, 121, 112, 122, 113, 123)[:n_starts]]
    return Study(make_metrics({Arm(r, "token_ppo"): b for r, b in arms_.items()}, of))


def test_phase_compares_cells_that_differ_in_one_dial():
    """Collapse comes with epochs. Without the cell of 4 epochs at x 0.5 that level says nothing of epochs."""
    ill, well = Behaviour(risk=1), Behaviour()
    cells = {"E2_LR1": well, "E4_LR1": ill, "MAIN": ill, "E2_LR0.5": ill, "E8_LR0.5": well}
    text = findings.phase(phase_study(6, cells)).text
    assert "Token PPO's share of collapsed runs rises (+1.00" in text
    assert (
        "with epochs 2 to 8 and is not shown to change (+0.00" in text and "learning rate 0.5 to 1." in text
    )
    whole = findings.phase(phase_study(6, cells | {"E4_LR0.5": ill})).text
    assert "Token PPO's share of collapsed runs is not shown to change (+0.00" in whole


@pytest.mark.parametrize("n_starts", [2, 6])
def test_phase_names_no_direction_from_two_warm_starts(n_starts):
    cells = {"E2_LR1": Behaviour(), "E4_LR1": Behaviour(risk=1), "MAIN": Behaviour(risk=1)}
    text = findings.phase(phase_study(n_starts, cells)).text
    few = "too few warm starts for a direction along epochs 2 to 8 (+1.00" in text
    assert few == (n_starts == 2) == (not any(word in text for word in ("rises", "highest")))


def test_no_best_algorithm_from_two_warm_starts():
    finals = {"token_ppo": 0.3, "grpo": 0.35, "st_ppo": 0.4, "s_ppo": 0.6}
    of = {Arm("MAIN", name): replicates() for name in finals}
    of[Arm("MAIN", "s_ppo")] = replicates(2, 1)
    made = {Arm("MAIN", name): Behaviour(final=final) for name, final in finals.items()}
    told = answers.baselines(Study(make_metrics(made, of)), None).text
    assert "of the 3 with runs from enough warm starts ST-PPO (SO-PPO) has the highest" in told
    few = answers.baselines(Study(make_metrics(made, replicates(1, 1))), None).text
    assert "too few have runs from 3 warm starts to name the best (0)" in few
    assert "highest" not in few and "-1" not in few


def test_what_moves_first_needs_collapses_from_three_warm_starts():
    told = findings.moves_first(
        Study(make_metrics({Arm("MAIN", "token_ppo"): Behaviour(risk=1)}, replicates(2, 1)))
    )
    assert told.text == (
        "6 collapsed runs of token PPO in MAIN, from 2 warm starts: too few to say what moves first."
    )
    one = findings.moves_first(Study(make_metrics({Arm("MAIN", "token_ppo"): Behaviour(risk=1 / 18)})))
    assert one.text.startswith("1 collapsed run of token PPO in MAIN, from 1 warm start:")


def test_norms_that_shrink_are_not_said_to_grow():
    shrinking = Behaviour(bias_growth=-0.05)
    told = answers.diagnostics(Study(make_metrics({Arm("MAIN", "st_ppo"): shrinking})), None).text
    assert "changes per ten iterations by a factor (above 1: it grows) of 0.6" in told


def group_text(**of):
    """The sentence on three arms whose final successes are given, beside a default of 0.40."""
    group = arms.Group("g", "t", "q", "MAIN/st_ppo", {f"MAIN/st_ppo_{name}": name for name in of})
    made = {Arm("MAIN", f"st_ppo_{name}"): Behaviour(final=final) for name, final in of.items() if final}
    study = Study(make_metrics({Arm("MAIN", "st_ppo"): Behaviour(final=0.40)} | made))
    return words.group_sentence(comparisons.group_table(study, group))


def test_group_sentence_tells_higher_lower_equal_and_missing():
    text = group_text(up=0.6, down=0.25, equal=0.40, gone=None)
    assert "Higher at the end: up +0.2" in text or "Higher at the end: up +0.1" in text
    assert "Lower at the end: down −0.1" in text
    assert "No difference shown for equal" in text and "Not run: MAIN/st_ppo_gone." in text
    assert group_text(gone=None) == "Not tested: no runs of MAIN/st_ppo_gone."


def test_mechanism_names_what_moves_in_the_ill_alone(study):
    told = findings.moves_first(study)
    assert set(told.table["signal"]) >= {"entropy", "gradient_norm_max"}
    assert "of 15 collapsed runs" in told.text.replace("15 of 15", "of 15") and "survivors" in told.text
    assert (
        findings.moves_first(study, "ON_POLICY").text
        == "None of the 18 runs of token PPO in ON_POLICY collapsed."
    )


def test_words():
    assert words.listed([]) == "" and words.listed(["a", "b", "c"]) == "a, b and c"
    assert words.listed(["a, x", "b", "c"]) == "a, x; b and c"
    assert words.interval(-0.5, -1, 0.25, sign=True) == "−0.50 [−1.00, +0.25]"
    assert "one warm start" in words.interval(0.1, np.nan, np.nan)


def test_axes_of_success_hold_no_more_than_success_can_be():
    """An interval from two warm starts may be wider than any difference of two shares."""
    behaviours = {Arm("MAIN", "st_ppo"): Behaviour(final=0.4), Arm("MAIN", "st_ppo_raw"): Behaviour()}
    metrics = make_metrics(behaviours, replicates(2, 1, 1))
    metrics.evaluations.loc[metrics.evaluations["seed"] == 1111, "success"] *= 0.1
    last = metrics.evaluations["algorithm"] == "st_ppo_raw"
    metrics.evaluations.loc[last, "success"] = 1 - metrics.evaluations.loc[last, "success"]
    plot = study_figures.normalisers_figure(Study(metrics))
    assert plot.data["final_difference_high"].max() == 1
    for ax, lowest in zip(plot.figure.axes[1:3], (-0.1, -1.1), strict=True):
        assert lowest <= ax.get_xlim()[0] and ax.get_xlim()[1] < 1.1


# --- input ------------------------------------------------------------------------------------
def test_plan_is_read_and_bad_ones_are_named(tmp_path):
    file = tmp_path / "planned.json"
    file.write_text(json.dumps({"MAIN/st_ppo": 18}))
    assert comparisons.load_plan(file) == {Arm("MAIN", "st_ppo"): 18} and comparisons.load_plan("") is None
    for text in ("[1]", '{"MAIN": 3}', '{"MAIN/st_ppo": "many"}', "{"):
        file.write_text(text)
        with pytest.raises(ValueError, match="planned.json: must map REGIME/algorithm"):
            comparisons.load_plan(file)
    with pytest.raises(FileNotFoundError, match="snakemake"):
        comparisons.load_plan(tmp_path / "none.json")


def test_coverage_without_a_plan_claims_none(study):
    names = ["regime", "setting", "iterations", "learning_rate", "staleness", "updates", "arms", "runs"]
    table = comparisons.coverage(study.metrics, None).set_index("regime")
    assert list(table.reset_index()) == names
    assert table.loc["MAIN", ["iterations", "staleness"]].tolist() == ["40", "2"]


def metrics_of(iterations, metrics):
    return Metrics(metrics.runs, iterations, metrics.evaluations)


def test_matching_is_the_ratio_of_what_an_arm_and_its_stabilised_one_reach_early():
    metrics = study_metrics(keep=3)
    rows = metrics.iterations.copy()
    rows["kl_behaviour_k3"] = 0.01
    mine = rows["algorithm"] == "token_ppo_kl_matched"
    rows.loc[mine, "kl_behaviour_k3"] = np.where(rows.loc[mine, "iteration"] <= 10, 0.02, 5.0)
    answer = findings.matching(Study(metrics_of(rows, metrics)))
    table = answer.table.set_index(["block", "label"])["kl_ratio"]
    assert table["S-PPO against its controls", "learning rate matched by KL"] == pytest.approx(2.0)
    assert table["ST-PPO against its controls", "learning rate matched by KL"] == pytest.approx(1.0)
    assert "token PPO, learning rate matched by KL 2.00 [2.00, 2.00]" in answer.text
    assert (
        "matched by KL 2.00"
        in {a.id: a.text for a in answers.all_answers(Study(metrics_of(rows, metrics)))}["Q5"]
    )


def test_matched_epsilon_is_measured_against_token_ppo():
    metrics = study_metrics(keep=3)
    rows = metrics.iterations.copy()
    rows["out_of_range_fraction"] = 0.2
    mine = rows["algorithm"] == "turn_ppo_epsilon_matched"
    rows.loc[mine, "out_of_range_fraction"] = np.where(rows.loc[mine, "iteration"] <= 5, 0.3, 0.9)
    answer = findings.matching(Study(metrics_of(rows, metrics)))
    assert "as a multiple of token PPO's: Turn-PPO, matched ε 1.50 [1.50, 1.50]" in answer.text
    assert "GSPO, matched ε 1.00" in answer.text


def test_verdict_table_is_short(study):
    table = findings.ledger(evaluate(study.metrics))
    assert isinstance(table, pd.DataFrame) and "0.83 [0.39, 1.00]" in set(table["measured"])
    early = findings.ledger(evaluate(study.metrics, planned={arm: n + 1 for arm, n in PLAN.items()}))
    row = early.set_index("").loc["C2.st_ppo"]
    assert row["verdict"] == "supported (provisional)" and row["runs"] == "36 of 38"


def test_intervals_of_shares_end_at_their_bounds():
    ends = {
        Arm("A", "token_ppo"): Behaviour(final=0.98, risk=1 / 3),
        Arm("A", "st_ppo"): Behaviour(final=0.98),
    }
    study = Study(make_metrics(ends, replicates(1, 3, 1)))
    wide = comparisons.final_success(study, Arm("A", "token_ppo")).interval(0.95)
    assert wide[0] < 0 and wide[1] > 1  # Student's factor for three warm starts
    table = comparisons.compare(study, [(arm, arm.algorithm) for arm in ends])
    assert table.loc[0, ["final_success_low", "final_success_high"]].tolist() == [0, 1]
    assert table.loc[1, "final_difference_high"] <= 1
    assert np.isnan(table.loc[0, "final_difference_low"])
