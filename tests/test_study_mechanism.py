import math

import numpy as np
import pandas as pd
import pytest

from stppo.study import mechanism, mechanism_figures
from stppo.study.mechanism import ABOVE, BELOW, EITHER, Range, departure, departures, lead_table
from stppo.study.outcomes import Arm, Study
from tests.synthetic_runs import Behaviour, make_metrics

ARM, WELL = Arm("MAIN", "token_ppo"), Arm("MAIN", "st_ppo")


def study(risk=12 / 18, **behaviour):
    return Study(make_metrics({ARM: Behaviour(risk=risk, **behaviour), WELL: Behaviour()}))


@pytest.fixture(scope="module")
def spiking():
    return study()


def signal(values):
    return pd.Series(values, index=np.arange(1, len(values) + 1), dtype=float)


def limits(n, low=-1.0, high=1.0):
    return Range(np.full(n, low), np.full(n, high))


@pytest.mark.parametrize(
    ("values", "side", "end", "expected"),
    [
        ([0, 0, 2, 2, 0], ABOVE, math.inf, 3),
        ([0, 2, 0, 2, 2], ABOVE, math.inf, 4),  # one iteration outside is noise
        ([0, -2, -2, 0, 0], ABOVE, math.inf, None),
        ([0, -2, -2, 0, 0], BELOW, math.inf, 2),
        ([0, -2, 2, 0, 0], EITHER, math.inf, 2),
        ([0, 0, 0, 2, 2], ABOVE, 4, None),  # complete only behind the collapse
    ],
)
def test_departure_is_the_first_of_two_iterations_outside(values, side, end, expected):
    at = departure(signal(values), limits(len(values)), side, end)
    assert math.isnan(at) if expected is None else at == expected


def test_rarely_measured_signals_count_measured_iterations():
    values = pd.Series([0.0, 2.0, 2.0], index=[8, 16, 24])
    assert departure(values, limits(3), ABOVE, 40) == 16


def test_spike_score_is_the_jump_over_the_runs_own_level():
    frame = pd.DataFrame(
        {"iteration": range(1, 11), "gradient_norm": 3.0, "gradient_norm_max": [4.0] * 8 + [30.0, 4.0]}
    )
    assert mechanism.spike_score(frame, 10, 4) == 10.0
    assert mechanism.spike_score(frame, 8, 4) == pytest.approx(4 / 3)
    assert math.isnan(mechanism.spike_score(frame, 5, 4))  # one iteration before the window


def test_an_infinite_norm_is_the_largest_spike():
    frame = pd.DataFrame(
        {"iteration": range(1, 11), "gradient_norm": 3.0, "gradient_norm_max": [4.0] * 9 + [math.inf]}
    )
    assert mechanism.spike_score(frame, 10, 4) == math.inf
    frame.loc[9, ["gradient_norm", "gradient_norm_max"]] = math.inf, math.nan  # the maximum was not recorded
    assert mechanism.spike_score(frame, 10, 4) == math.inf
    frame.loc[6:, ["gradient_norm", "gradient_norm_max"]] = math.nan
    assert math.isnan(mechanism.spike_score(frame, 10, 4))


def test_runs_stopped_by_an_infinite_norm_are_cases_of_the_highest_score():
    """Without any other spike: infinity alone tells the cases from the controls."""
    metrics = make_metrics({ARM: Behaviour(risk=12 / 18, non_finite=True, onset=20, spike_lead=-1000)})
    rows = metrics.iterations
    last = rows.groupby("seed")["iteration"].transform("max")
    rows.loc[(last == 20) & (rows["iteration"] == 20), ["gradient_norm", "gradient_norm_max"]] = math.inf
    auc = mechanism.spike_auc(Study(metrics), [ARM])
    assert auc.value == 1 and auc.n_runs == (12, 6)
    plot = mechanism_figures.spikes_figure(Study(metrics))
    assert np.isinf(plot.data["score"]).sum() == 12 and plot.png.startswith(b"\x89PNG")
    drawn = [line.get_ydata() for line in plot.figure.axes[0].get_lines()]
    assert sum(len(values) for values in drawn) == len(plot.data) and np.isfinite(np.concatenate(drawn)).all()


def test_spikes_before_collapse_are_told_from_survivors(spiking):
    auc = mechanism.spike_auc(spiking, [ARM])
    assert auc.value > 0.95 and auc.n_runs[0] == 12 and auc.n_runs[1] >= 6


def test_no_spikes_no_auc_to_speak_of():
    auc = mechanism.spike_auc(study(spike_lead=-1000), [ARM])
    assert 0.2 < auc.value < 0.8


def test_arms_of_a_pool_are_compared_within_themselves():
    """Another arm's tenfold norms change nothing."""
    metrics = make_metrics({ARM: Behaviour(risk=0.5), WELL: Behaviour(risk=0.5)})
    alone = [mechanism.spike_auc(Study(metrics), [arm]).value for arm in (ARM, WELL)]
    columns = ["gradient_norm", "gradient_norm_max"]
    metrics.iterations.loc[metrics.iterations["algorithm"] == WELL.algorithm, columns] *= 10
    pooled = mechanism.spike_auc(Study(metrics), [ARM, WELL])
    assert min(alone) <= pooled.value <= max(alone) and pooled.n_runs[0] == 18


def test_arm_without_survivors_or_collapses_has_no_auc(spiking):
    with pytest.raises(ValueError, match="cases and controls"):
        mechanism.spike_auc(spiking, [WELL])
    with pytest.raises(ValueError, match="cases and controls"):
        mechanism.spike_auc(study(risk=1.0, onset=30, non_finite=True), [ARM])


def test_growth_of_the_clipping_bias_is_recovered_before_collapse_only(spiking):
    slopes = spiking.outcomes(ARM, lambda run: mechanism.bias_norm_slope(spiking, run))
    known = [slope for slope in slopes.values() if math.isfinite(slope)]
    assert len(known) == 12 and np.mean(known) == pytest.approx(0.03, abs=0.01)


def test_growth_while_the_lag_builds_up_is_left_out():
    """‖C‖ is small in the first two iterations, when batches are still fresh: that is no growth of the bias."""
    metrics = make_metrics({ARM: Behaviour(risk=1.0, bias_growth=0.0)})
    early = metrics.iterations["iteration"] <= 2
    metrics.iterations.loc[early, "clipping_bias_norm"] *= 0.01
    data = Study(metrics)
    slopes = data.outcomes(ARM, lambda run: mechanism.bias_norm_slope(data, run))
    assert np.mean(list(slopes.values())) == pytest.approx(0, abs=0.01)


def test_signal_planted_first_leads(spiking):
    table = lead_table(departures(spiking, ARM)).set_index("signal")
    assert table.loc["gradient_norm_max", "departed"] == table.loc["gradient_norm_max", "collapsed"] == 12
    for later in ("entropy", "success_train"):
        assert table.loc["gradient_norm_max", "lead_mean"] > table.loc[later, "lead_mean"] + 0.5
    assert table.loc["clip_fraction", "lead_median"] == 0  # moves with nothing
    assert (table["reference"] == "survivors").all() and (table["survivors"] == 6).all()
    row = table.loc["gradient_norm_max"]
    assert row["lead_low"] < row["lead_mean"] < row["lead_high"]
    assert "critic_explained_variance" not in table.index  # not recorded


def test_lead_is_the_distance_to_the_collapse(spiking):
    rows = departures(spiking, ARM)
    rows = rows[(rows["signal"] == "gradient_norm_max") & rows["collapse"].notna()]
    assert (rows["lead"] == rows["collapse"] - rows["departure"]).all()
    assert (
        rows["lead"].between(5, 12).all()
    )  # planted 4 iterations before the fall, which the rule sees later


def test_rollout_columns_belong_to_the_weights_that_sampled_them():
    """Batches two iterations old: the first three were sampled by the same weights."""
    frame = pd.DataFrame(
        {
            "iteration": range(1, 7),
            "staleness_iterations": [0.0, 1, 2, 2, 2, 2],
            "valid_format_rate": [0.9, 0.8, 0.7, 0.6, np.nan, 0.4],
            "entropy": np.arange(6.0),
        }
    )
    shifted = mechanism.by_weights(frame, "valid_format_rate")
    assert shifted.to_dict() == pytest.approx({1: 0.8, 2: 0.6, 4: 0.4})
    assert list(mechanism.by_weights(frame, "entropy").index) == list(range(1, 7))
    fresh = frame.drop(columns="staleness_iterations")
    assert list(mechanism.by_weights(fresh, "valid_format_rate").index) == [1, 2, 3, 4, 6]


def test_signals_of_the_same_weights_have_no_lead_over_each_other():
    """From iteration 10 on the weights of collapsing runs spike and write badly; the batches show it two rows later."""
    metrics = make_metrics({ARM: Behaviour(risk=12 / 18)})
    rows, whole = metrics.iterations, Study(metrics)
    ill = {run["seed"] for run in whole.runs(ARM).values() if whole.collapsed(run)}
    sick = rows["seed"].isin(ill)
    rows[["gradient_norm_max", "valid_format_rate"]] = 2.0, 0.9
    rows.loc[sick & (rows["iteration"] >= 10), "gradient_norm_max"] = 100.0
    sampled = rows["iteration"] - rows["staleness_iterations"]
    rows.loc[sick & (sampled >= 10), "valid_format_rate"] = 0.1
    found = mechanism.lead_difference(Study(metrics), ARM, "gradient_norm_max", "valid_format_rate")
    assert found.value == 0 and found.n_runs == (12,)
    table = departures(Study(metrics), ARM)
    at = table[table["collapse"].notna() & table["signal"].isin(["gradient_norm_max", "valid_format_rate"])]
    assert (at["departure"] == 10).all() and len(at) == 24


def test_survivors_show_how_often_the_rule_fires_anyway(spiking):
    table = lead_table(departures(spiking, ARM)).set_index("signal")
    assert table.loc["gradient_norm_max", "survivors_departed"] <= 3


def test_without_survivors_the_own_first_quarter_is_the_range():
    table = departures(study(risk=1.0, onset=26), ARM)
    assert (table["reference"] == "own first quarter").all()
    spikes = table[table["signal"] == "gradient_norm_max"]
    assert (spikes["departure"] > 10).all() and (spikes["lead"] > 3).all()


def test_which_signal_moves_first_is_a_paired_difference():
    early = mechanism.lead_difference(study(spike_lead=6), ARM, "gradient_norm_max", "success_train")
    late = mechanism.lead_difference(study(spike_lead=-2), ARM, "gradient_norm_max", "success_train")
    assert early.interval(0.95)[0] > 0 > late.interval(0.95)[1]
    assert early.n_runs == (12,)


def test_arm_without_collapses_has_no_lead():
    table = departures(study(), WELL)
    assert table["lead"].isna().all() and lead_table(table).empty
