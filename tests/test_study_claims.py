"""The claims ledger: verdicts on runs of known truth, and what the shipped ledger asks for."""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from stppo.cli import app
from stppo.config.planned import planned_runs
from stppo.record.runs import Metrics
from stppo.stats import fewest_worlds
from stppo.study import claims, measures
from stppo.study.arms import Group, groups
from stppo.study.claims import Ledger, best_elsewhere, evaluate, load_ledger
from tests.synthetic_runs import write_metrics

START, EVERY, HORIZON = 0.2, 2, 40


def curve(final, peak=None):
    """Success at every second iteration: a rise to `peak` by iteration 20, then `final`."""
    at = np.arange(0, HORIZON + 1, EVERY)
    return at, np.interp(at, [0, 20, 26, HORIZON], [START, peak or final, final, final])


def make(arms, preset="study"):
    """Metrics of {[REGIME/]arm: {world: final success, or (final, peak)}}, one run per world."""
    records, iterations, evaluations = [], [], []
    for arm, worlds in arms.items():
        regime, algorithm = arm.split("/") if "/" in arm else ("OFF_POLICY", arm)
        for world, end in worlds.items():
            at, success = curve(*np.atleast_1d(end))
            keys = {"regime": regime, "algorithm": algorithm, "seed": world}
            start = {"success_sampled": START, "success_greedy": 0.4, "n_sampled": 2048}
            other = {
                "world": "synthetic",
                "world_seed": world,
                "warm_start_seed": world,
                "status": "completed",
                "preset": preset,
            }
            other |= {"iterations": HORIZON, "updates": HORIZON, "wall_seconds": 1.0, "non_finite": None}
            records.append({**keys, **other, "warm_start": start})
            t = np.arange(1, HORIZON + 1)
            norm = {"gradient_norm": 1.0, "gradient_norm_max": 2.0, "clip_fraction": 0.1}
            iterations.append(pd.DataFrame({**keys, "iteration": t, **norm}))
            for temperature, up in ((1.0, 0.0), (0.0, 0.05)):
                columns = {"iteration": at, "temperature": temperature, "success": success + up}
                evaluations.append(pd.DataFrame({**keys, **columns}))
    return Metrics(records, pd.concat(iterations), pd.concat(evaluations))


def ledger(*entries, **more):
    """Entries as (id, conditions), all of the study's preset."""
    full = [
        {"claim": "A.", "source": "us", **dict(zip(("id", "holds_if", "gate"), entry, strict=False))}
        for entry in entries
    ]
    return Ledger.model_validate({"preset": "study", "error": 0.05, "claims": full} | more)


def higher(one="new", other="old", column="final", **threshold):
    return {"difference": [one, other], "column": column, **(threshold or {"above": 0})}


def spread(mean, n=12, sd=0.05, seed=0):
    """n worlds whose mean is exactly `mean`."""
    noise = np.random.default_rng(seed).normal(size=n)
    return dict(enumerate(mean + sd * (noise - noise.mean()) / noise.std(ddof=1), start=31))


def only(metrics, *conditions, **more):
    (verdict,) = evaluate(metrics, ledger(("C1", list(conditions))), {}, {}, **more)
    return verdict


@pytest.mark.parametrize(
    ("truth", "verdict"), [(0.2, "supported"), (-0.2, "not supported"), (0.01, "inconclusive")]
)
def test_verdict_says_on_which_side_the_interval_lies(truth, verdict):
    metrics = make({"new": spread(0.5 + truth, seed=1), "old": spread(0.5)})
    found = only(metrics, higher())
    assert found.verdict == verdict
    assert found.checks[0].estimate.value == pytest.approx(truth)
    below = only(metrics, higher("old", "new", below=0))
    assert below.verdict == verdict, "the same asked from the other side"


def test_arms_are_compared_world_by_world():
    """Worlds differ by far more than arms do: only pairs can tell."""
    hard = spread(0.5, sd=0.15)
    easier = {world: value + 0.02 + 0.001 * (world % 3) for world, value in hard.items()}
    assert only(make({"new": easier, "old": hard}), higher()).verdict == "supported"
    shuffled = dict(zip(hard, np.roll(list(easier.values()), 5), strict=True))
    assert only(make({"new": shuffled, "old": hard}), higher()).verdict == "inconclusive"


def test_too_few_worlds_get_an_estimate_but_no_verdict():
    found = only(make({"new": spread(0.8, 5, seed=1), "old": spread(0.5)}), higher())
    assert found.verdict == "not asked" and found.checks[0].outcome == "5 worlds of 6 needed"
    assert found.checks[0].estimate.value == pytest.approx(0.3, abs=0.05)
    assert only(make({"new": spread(0.8, 6, seed=1), "old": spread(0.5)}), higher()).verdict == "supported"


def test_missing_arm_is_named():
    found = only(make({"old": spread(0.5)}), higher())
    assert (found.verdict, found.checks[0].outcome) == ("not asked", "no runs of OFF_POLICY/new")


def test_several_chances_to_fail_count_as_one():
    """A threshold between the joint limit and the wider one refutes alone, but not as one of two
    conditions."""
    metrics = make({"new": spread(0.5, seed=1), "old": spread(0.5)})
    estimate = only(metrics, higher()).checks[0].estimate
    between = np.mean([estimate.interval(0.95)[1], estimate.interval(0.975)[1]])
    assert only(metrics, higher(above=between)).verdict == "not supported"
    assert only(metrics, higher(above=between), higher(above=0)).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("threshold", "outcome"),
    [
        ({"above": 0}, "holds"),
        ({"above": 0.1}, "open"),
        ({"below": 0.1}, "open"),
        ({"above": 0.3}, "fails"),
        ({"below": 0}, "fails"),
    ],
)
def test_outcome_of_a_condition(threshold, outcome):
    metrics = make({"new": spread(0.6, seed=1), "old": spread(0.5)})
    assert claims.table([only(metrics, higher(**threshold))])["outcome"].tolist() == [outcome]


def test_a_mean_that_few_worlds_make_stands_beside_its_median():
    old = spread(0.3)
    metrics = make({"new": {w: v + (0.5 if w < 33 else 0.02) for w, v in old.items()}, "old": old})
    found = only(metrics, higher()).checks[0]
    assert found.estimate.value == pytest.approx(0.1, abs=1e-6) and found.median == pytest.approx(0.02)
    assert np.isnan(only(metrics, higher(column="learned")).checks[0].median), "of 0 and 1"


@pytest.mark.parametrize(("collapsed", "verdict"), [(12, "supported"), (1, "inconclusive")])
def test_collapses_are_shares_with_an_interval_of_their_own(collapsed, verdict):
    falls = {world: (0.2, 0.8) if world < 31 + collapsed else (0.8, 0.8) for world in range(31, 43)}
    metrics = make({"old": falls, "new": {world: (0.8, 0.8) for world in falls}})
    found = only(metrics, higher("old", "new", "collapsed"))
    assert found.verdict == verdict
    assert found.checks[0].estimate.value == pytest.approx(collapsed / 12)


def test_gated_entry_is_asked_only_if_its_gate_is_supported():
    metrics = make({"new": spread(0.7, seed=1), "old": spread(0.5), "same": spread(0.7, seed=2)})
    gated = ("C2", [higher("new", "old")], "C1")
    shut = evaluate(metrics, ledger(("C1", [higher("new", "same")]), gated), {}, {})
    assert [v.verdict for v in shut] == ["inconclusive", "not asked"]
    assert shut[1].checks[0].outcome == "C1 is inconclusive"
    refuted = evaluate(
        metrics, ledger(("C1", [higher("old", "new")]), ("C2", [higher("old", "new")], "C1")), {}, {}
    )
    assert [v.verdict for v in refuted] == ["not supported", "not asked"]
    opened = evaluate(metrics, ledger(("C1", [higher()]), gated), {}, {})
    assert [v.verdict for v in opened] == ["supported", "supported"]


def test_level_is_shared_among_ungated_entries_of_a_family():
    asked = [("C1", [higher()]), ("C2", [higher()]), ("C3", [higher()], "C1"), ("Q1", [higher()])]
    found = ledger(*asked)
    assert [found.level(entry) for entry in found.claims] == pytest.approx([0.975, 0.975, 0.975, 0.95])


def test_main_effect_averages_over_the_other_factor():
    group = Group(
        "f", "Which?", ("a", "b", "c", "d"), factors={"ratio": ("token", "turn"), "divisor": ("no", "yes")}
    )
    means = {"a": 0.3, "b": 0.4, "c": 0.6, "d": 0.9}
    metrics = make({arm: spread(mean, seed=i, sd=0.02) for i, (arm, mean) in enumerate(means.items())})
    asked = {"main_effect": "f.ratio", "column": "final", "above": 0.3}
    (found,) = evaluate(metrics, ledger(("C1", [asked])), {"f": group}, {})
    assert found.checks[0].estimate.value == pytest.approx((0.6 + 0.9 - 0.3 - 0.4) / 2)
    assert found.verdict == "supported"


def test_preset_without_claims_has_none(tmp_path):
    metrics = make({"token_ppo": spread(0.5)}, preset="laptop")
    assert evaluate(metrics) == []
    for path in claims.write_claims(metrics, tmp_path):
        assert path.is_file()
    assert pd.read_csv(tmp_path / "claims.csv").empty


def test_command_writes_the_shipped_claims_of_a_metrics_folder(tmp_path):
    truth = {"token_ppo": 0.3, "st_ppo": 0.7, "turn_ppo": 0.65, "kl_stop": 0.82}
    write_metrics(
        make({arm: spread(mean, seed=i) for i, (arm, mean) in enumerate(truth.items())}), tmp_path / "metrics"
    )
    options = ["claims", str(tmp_path / "metrics"), str(tmp_path / "out")]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    rows = pd.read_csv(tmp_path / "out" / "claims.csv").groupby("id")["verdict"].first()
    assert rows["C4.st_ppo"] == "supported" and rows["C5"] == "supported"
    assert rows["C4.st_ppo.nulls"] == "not supported", "KL early stopping does better"
    assert rows["C8.a"] == "not asked"
    assert "token PPO, KL stop" in (tmp_path / "out" / "claims.csv").read_text()


# ---- measures of a run's course -----------------------------------------------------------------


def test_measures_of_a_known_course():
    t = np.arange(1, 31)
    course = pd.DataFrame(
        {
            "iteration": t,
            "gradient_norm": 2.0,
            "gradient_norm_max": np.where(t == 17, 200.0, 3.0),
            "staleness_iterations": np.minimum(t - 1, 2),
            "clipping_bias_norm": np.where(t <= 2, 9.0, 0.1 * np.exp(0.04 * t)),
            "critic_value_rmse": np.where(t % 10 == 0, 0.1 * t / 10, np.nan),
            "true_value_std": np.where(t % 10 == 0, 0.2, np.nan),
        }
    )
    assert measures.gradient_spike(course) == pytest.approx(2)  # a hundred times the usual
    stopped = course.assign(gradient_norm_max=course["gradient_norm_max"].replace({3.0: np.inf}))
    assert measures.gradient_spike(stopped) == pytest.approx(2), "else its world would drop out of the claim"
    assert measures.clipping_bias_growth(course) == pytest.approx(0.4)  # the lag's own growth left out
    assert measures.critic_error(course) == pytest.approx(np.mean([0.5, 1.0, 1.5]))
    own = course.assign(out_of_range_fraction_token=np.where(t <= 15, 0.1, 0.3))
    assert measures.own_ratio_out_of_range(own) == pytest.approx(0.2)
    assert np.isnan(measures.own_ratio_out_of_range(course))
    bare = course[["iteration", "gradient_norm"]]
    assert np.isnan([measures.clipping_bias_growth(bare), measures.critic_error(bare)]).all()


def test_each_world_has_the_setting_that_is_best_in_the_others():
    low, high = {1: 0.9, 2: 0.2, 3: 0.2, 4: 0.2}, {1: 0.0, 2: 0.4, 3: 0.4, 4: 0.4}
    # In world 1 `low` would have been better: it may not look. Without world 2: .9 + .2 + .2 against 0 + .4 + .4.
    assert best_elsewhere([low, high], [low, high]) == {1: 0.0, 2: 0.2, 3: 0.2, 4: 0.2}
    assert best_elsewhere([low, dict(low)], [low, dict(low)]) == low
    with pytest.raises(ValueError, match="1 worlds in common"):
        best_elsewhere([low, {2: 1.0}], [low, {2: 1.0}])


def test_the_best_elsewhere_is_chosen_by_final_success_and_judged_by_the_column():
    """Without world 1 a has .9 on average. Without another, a .63 and b .37: a everywhere."""
    a, b = {1: 0.1, 2: 0.9, 3: 0.9, 4: 0.9}, {1: 0.9, 2: 0.1, 3: 0.1, 4: 0.1}
    runs = make({"a": a, "b": b, "c": dict.fromkeys((1, 2, 3, 4), 0.2)})
    asked = {"best_elsewhere": [["a", "b"], ["c"]], "column": "final", "above": 0}
    (verdict,) = evaluate(runs, ledger(("S1", [asked])), {}, {})
    assert verdict.checks[0].estimate.value == pytest.approx((0.1 + 3 * 0.9) / 4 - 0.2)


# ---- the shipped ledger -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (("C1", [higher(column="happiness")]), "column happiness is unknown"),
        (("C1", [higher(above=0, below=1)]), "one of above and below"),
        (("C1", [{"mean": "a", "main_effect": "f.x", "column": "final", "above": 0}]), "one of mean"),
        (("C1", [higher()], "C9"), "C1: its gate C9 is no earlier entry"),
    ],
)
def test_wrong_ledger_says_what_is_wrong(entry, said):
    with pytest.raises(ValueError, match=said):
        ledger(entry)


def test_wrong_ledger_file_is_one_line(tmp_path):
    text = claims.LEDGER_FILE.read_text(encoding="utf-8").replace("column: lost", "column: lust")
    (tmp_path / "claims.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"claims.yaml: claims.0.*lust is unknown") as error:
        load_ledger(tmp_path / "claims.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", claims.LEDGER_FILES, ids=lambda file: file.stem)
def test_every_condition_can_be_decided_by_the_worlds_that_are_planned(file):
    shipped = load_ledger(file)
    known, worlds = groups(shipped.preset), {}
    for run in planned_runs(shipped.preset):
        worlds.setdefault((run.regime, run.algorithm), set()).add(run.seed)
    for entry in shipped.claims:
        for condition in entry.holds_if:
            of = [worlds.get(arm, set()) for arm in condition.weights(known)]
            common = len(set.intersection(*of))
            assert common >= fewest_worlds(shipped.level(entry)), f"{entry.id}: {condition}"


def test_runs_have_the_ledger_of_their_preset():
    for file in claims.LEDGER_FILES:
        shipped = load_ledger(file)
        runs = make({"a": spread(0.5)}, preset=shipped.preset)
        assert claims.ledger_of(runs) == shipped
        assert [verdict.entry for verdict in evaluate(runs)] == list(shipped.claims)
    assert claims.ledger_of(make({"a": spread(0.5)}, preset="mine")) is None
