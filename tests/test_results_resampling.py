import math

import numpy as np
import pytest
from rliable import metrics
from scipy.stats import beta, mannwhitneyu, norm, t

from stppo.results import resampling
from stppo.results.resampling import Replicate, contrast, difference, joint_level, mean
from tests.synthetic_runs import replicates

BOUNDS = (0.0, 1.0)


def outcomes(function, runs=None):
    return {replicate: float(function(replicate)) for replicate in (runs or replicates())}


def first(k, runs=None):
    """1 for the first k replicates, 0 for the others."""
    runs = runs or replicates()
    return {replicate: float(i < k) for i, replicate in enumerate(runs)}


def width(estimate, level=0.95):
    low, high = estimate.interval(level)
    return high - low


def test_value_is_the_mean_over_warm_starts_of_the_mean_over_seeds():
    runs = [Replicate(0, 0, 0), Replicate(0, 0, 1), Replicate(0, 0, 2), Replicate(0, 1, 3)]
    assert mean(dict(zip(runs, [1.0, 2.0, 3.0, 10.0], strict=True))).value == 6.0


def test_draws_of_a_mean_average_to_its_value():
    noise = np.random.default_rng(0).normal(size=18)
    estimate = mean(dict(zip(replicates(), noise, strict=True)))
    assert estimate.draws.mean() == pytest.approx(estimate.value, abs=0.01)


def test_warm_starts_are_resampled_not_seeds_alone():
    by_start = mean(outcomes(lambda r: r.warm_start_seed - 115))
    by_seed = mean(outcomes(lambda r: r.seed % 10))
    # the same spread over runs, all of it between warm starts or all of it within
    between = np.std([r.warm_start_seed for r in replicates()]) / math.sqrt(6)
    within = np.std([1, 2, 3]) / math.sqrt(18)
    stretch = math.sqrt(6 / 5)
    assert by_start.draws.std() == pytest.approx(stretch * between, rel=0.02)
    assert by_seed.draws.std() == pytest.approx(stretch * within, rel=0.02)


@pytest.mark.parametrize(("n_starts", "nominal"), [(6, 0.95), (5, 0.95), (3, 0.95), (6, 0.9966)])
def test_interval_of_few_single_runs_misses_as_often_as_it_says(n_starts, nominal):
    """Simulated: 600 sets of normal data, one run per warm start. By the percentiles alone 12 to 20 % miss at 95 %."""
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(600):
        runs = {Replicate(1, i, i): value for i, value in enumerate(rng.normal(size=n_starts))}
        low, high = mean(runs, n_draws=800).interval(nominal)
        missed += not low < 0 < high
    assert 0.3 * (1 - nominal) <= missed / 600 < 1.5 * (1 - nominal) + 0.01


def test_student_widens_unbounded_quantities_only():
    runs = replicates(seeds=1)
    data = first(3, runs)
    free, bounded = mean(data), mean(data, BOUNDS)
    q = (1 + 0.99) / 2
    percentiles = np.quantile(free.draws, [1 - q, q])
    assert width(free, 0.99) == pytest.approx(np.ptp(percentiles) * t.ppf(q, 5) / norm.ppf(q))
    assert width(bounded, 0.99) == pytest.approx(np.ptp(np.quantile(bounded.draws, [1 - q, q])))


def test_band_needs_three_warm_starts():
    runs = replicates(worlds=1, warm_starts=3, seeds=2)
    curves = np.random.default_rng(0).normal(size=(6, 2))
    curves[[r.warm_start_seed == 113 for r in runs], 1] = np.nan
    value, low, high = resampling.curve_band(curves, runs, 200, 0.95)
    assert np.isfinite(value).all()
    assert low[0] < value[0] < high[0] and np.isnan([low[1], high[1]]).all()


@pytest.mark.parametrize("correlation", [0.0, 0.2])
def test_interval_covers_the_truth_of_clustered_data(correlation):
    """Simulated: six warm starts of three seeds; misses at 95 % may not exceed 7 % of 300 data sets."""
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(300):
        start = dict.fromkeys({r.cluster for r in replicates()}, 0.0)
        start = {cluster: rng.normal() * math.sqrt(correlation) for cluster in sorted(start)}
        data = outcomes(lambda r, s=start: s[r.cluster] + rng.normal() * math.sqrt(1 - correlation))
        low, high = mean(data, n_draws=1000).interval(0.95)
        missed += not low < 0 < high
    assert missed / 300 < 0.07


def test_interval_of_runs_taken_as_independent_would_be_too_narrow():
    """The reason for two levels: seeds of one warm start are alike, and runs taken singly do not know it."""
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(200):
        start = {cluster: rng.normal() for cluster in sorted({r.cluster for r in replicates()})}
        data = np.array([start[r.cluster] + 0.3 * rng.normal() for r in replicates()])
        means = rng.choice(data, (500, 18)).mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        missed += not low < 0 < high
    assert missed / 200 > 0.2


def test_pairs_share_their_draws():
    noise = outcomes(lambda r: np.random.default_rng(r.seed).normal())
    better = {replicate: value + 0.1 for replicate, value in noise.items()}
    assert difference(better, noise).interval(0.99) == pytest.approx((0.1, 0.1))
    unpaired = {Replicate(r.world_seed, r.warm_start_seed, r.seed + 5): v for r, v in better.items()}
    assert width(difference(unpaired, noise)) > 0.5


def test_arms_are_compared_on_the_warm_starts_that_all_have():
    one = outcomes(lambda r: 1.0 if r.world_seed == 11 else 100.0)
    other = outcomes(lambda r: 0.0, [r for r in replicates() if r.world_seed == 11])
    estimate = difference(one, other)
    assert (estimate.n_runs, estimate.n_clusters) == ((9, 9), 3)
    assert estimate.value == pytest.approx(1.0)


def test_arms_without_a_common_warm_start_are_drawn_apart():
    one = outcomes(lambda r: r.warm_start_seed % 10)
    other = {Replicate(r.world_seed + 50, *r[1:]): v for r, v in one.items()}
    apart, together = difference(one, other), difference(one, dict(one))
    assert width(together) == 0 and width(apart) > width(mean(one))


def test_an_arm_with_fewer_seeds_uses_all_seeds_of_the_other():
    estimate = difference(first(9), first(0, replicates(seeds=1)))
    assert estimate.n_runs == (18, 6) and estimate.value == 0.5


@pytest.mark.parametrize("n_seeds", [1, 3])
def test_no_collapse_has_jeffreys_interval(n_seeds):
    runs = replicates(seeds=n_seeds)
    for level in (0.95, joint_level(15)):
        low, high = mean(first(0, runs), BOUNDS).interval(level)
        assert high == pytest.approx(beta.ppf((1 + level) / 2, 0.5, len(runs) + 0.5), rel=0.03)
        assert 0 <= low < 0.001


def test_nothing_but_collapses_mirrors_no_collapse():
    low, high = mean(first(18), BOUNDS).interval(0.95)
    assert low == pytest.approx(1 - mean(first(0), BOUNDS).interval(0.95)[1], abs=0.01) and high <= 1


@pytest.mark.parametrize(("one", "other"), [(0, 0), (18, 18), (18, 0)])
def test_difference_of_sure_risks_has_width(one, other):
    low, high = difference(first(one), first(other), BOUNDS).interval(0.95)
    assert high - low > 0.1 and low >= -1 and high <= 1


def test_interval_of_a_risk_stays_within_its_bounds():
    low, high = mean(first(17), BOUNDS).interval(joint_level(15))
    assert 0 <= low < 17 / 18 < high <= 1


@pytest.mark.parametrize("risk", [0.1, 0.5, 0.8])
def test_risk_interval_covers_when_warm_starts_differ(risk):
    rng = np.random.default_rng(5)
    missed = 0
    for _ in range(200):
        shape = np.array([risk, 1 - risk]) * 4  # intra-cluster correlation 0.2
        start = {cluster: rng.beta(*shape) for cluster in sorted({r.cluster for r in replicates()})}
        data = outcomes(lambda r, s=start: rng.random() < s[r.cluster])
        low, high = mean(data, BOUNDS, n_draws=1000).interval(0.95)
        missed += not low < risk < high
    assert missed / 200 < 0.07


def test_main_effect_is_the_mean_of_the_simple_effects():
    rng = np.random.default_rng(0)
    arms = [outcomes(lambda r: rng.normal()) for _ in range(4)]
    means = [np.mean(list(arm.values())) for arm in arms]
    estimate = contrast(arms, [0.5, 0.5, -0.5, -0.5])
    assert estimate.value == pytest.approx((means[0] - means[2] + means[1] - means[3]) / 2)
    assert estimate.interval(0.95)[0] < estimate.value < estimate.interval(0.95)[1]


def test_same_data_in_any_order_give_the_same_draws():
    data = first(7)
    turned = dict(reversed(data.items()))
    np.testing.assert_array_equal(mean(data, BOUNDS).draws, mean(turned, BOUNDS).draws)


def test_runs_without_a_value_are_left_out():
    data = first(9) | {replicates()[0]: math.nan}
    assert mean(data).n_runs == (17,)


def test_no_value_at_all_is_an_error():
    with pytest.raises(ValueError, match="no runs with a value"):
        mean({replicates()[0]: math.nan})


def test_one_warm_start_has_no_interval():
    assert np.isnan(mean(first(1, replicates(1, 1))).interval(0.95)).all()


def test_more_verdicts_need_a_higher_level():
    assert joint_level(1) == 0.95 and joint_level(10) == pytest.approx(0.995)


def test_interquartile_mean_is_rliables():
    values = np.random.default_rng(0).normal(size=12)
    runs = replicates(seeds=2)
    estimate = resampling.interquartile_mean(dict(zip(runs, values, strict=True)))
    assert estimate.value == pytest.approx(metrics.aggregate_iqm(values[:, None]))
    assert estimate.interval(0.95)[0] < estimate.value < estimate.interval(0.95)[1]


def test_probability_of_improvement_is_the_u_statistic():
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 6, 18) + 1.0, rng.integers(0, 6, 18) + 0.0
    arms = [dict(zip(replicates(), values, strict=True)) for values in (one, other)]
    estimate = resampling.probability_of_improvement(*arms)
    assert estimate.value == pytest.approx(mannwhitneyu(one, other).statistic / 18**2)
    assert 0 <= estimate.interval(0.99)[0] < estimate.value < estimate.interval(0.99)[1] <= 1


def test_auc_with_the_same_controls_for_every_case_is_the_u_statistic():
    rng = np.random.default_rng(1)
    scores = rng.normal(size=18) + np.repeat([1.0, 0.0], 9)
    case = np.arange(18) < 9
    at_risk = case[:, None] & ~case[None, :]
    auc = resampling.matched_auc(replicates(), resampling.wins(scores, scores), at_risk)
    assert auc.value == pytest.approx(mannwhitneyu(scores[case], scores[~case]).statistic / 81)
    assert auc.n_runs == (9, 9)


def test_perfect_auc_of_few_runs_is_not_certain():
    at_risk = np.zeros((18, 18), dtype=bool)
    at_risk[:15, 15:] = True
    low, high = resampling.matched_auc(replicates(), np.ones((18, 18)), at_risk).interval(joint_level(15))
    assert low < 0.75 < high <= 1


def test_auc_counts_the_warm_starts_of_its_rarer_side():
    """Cases from six warm starts, controls from two: no more than two speak of both."""
    at_risk = np.zeros((18, 18), dtype=bool)
    at_risk[np.ix_(range(12), [12, 13])] = True
    assert len({r.cluster for r in replicates()[:12]}) == 6
    assert resampling.matched_auc(replicates(), np.ones((18, 18)), at_risk).n_clusters == 2
    turned = resampling.matched_auc(replicates(), np.ones((18, 18)), at_risk.T)
    assert turned.n_clusters == 2 and turned.n_runs == (2, 12)


def test_equal_infinities_are_ties():
    infinity = math.inf
    won = resampling.wins([infinity, 1.0], [infinity, 1.0, 2.0])
    np.testing.assert_array_equal(won, [[0.5, 1, 1], [0, 0.5, 0]])


def test_auc_matches_each_case_with_its_own_controls():
    at_risk, won = np.zeros((18, 18), dtype=bool), np.zeros((18, 18))
    at_risk[0, [1, 2]], won[0, [1, 2]] = True, [1, 0]
    at_risk[3, 4], won[3, 4] = True, 1
    won[5, 6] = 1  # no pair: run 5 is no case
    assert resampling.matched_auc(replicates(), won, at_risk).value == pytest.approx((0.5 + 1) / 2)


def test_auc_without_controls_is_an_error():
    with pytest.raises(ValueError, match="cases and controls"):
        resampling.matched_auc(replicates(), np.ones((18, 18)), np.zeros((18, 18)))
