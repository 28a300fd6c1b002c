"""Exact ascent: its steps are the optimiser's on the exact gradient, and the stabiliser acts where it says."""

import pytest

from stppo.objectives import ClippingBiasNorm, NoStabilizer, Ratio
from stppo.oracle import Oracle, ascend, surrogate_gradient
from tests.oracle_cases import close, objective, small_oracle


def run(oracle, its, **options):
    options = {"iterations": 2, "updates": 6, "learning_rate": 60.0, **options}
    return ascend(oracle.tree, oracle.policy, oracle.behaviour, its, Oracle.token_advantages, **options)


def test_sgd_steps_along_the_limit_of_the_estimator():
    oracle = small_oracle("neural")
    its = objective(Ratio("turn"), stabilizer=ClippingBiasNorm(c0=0.005))
    rows = run(oracle, its, updates=3)
    theta = oracle.behaviour
    for i, row in enumerate(rows):
        if i % 3 == 0:
            frozen = Oracle(oracle.tree, oracle.policy, theta)
        estimator = surrogate_gradient(frozen, its, theta, frozen.token_advantages())
        assert row["expected_return"] == pytest.approx(float(frozen.expected_return(theta)))
        assert row["gradient_norm"] == pytest.approx(float(estimator.mean.norm()))
        assert row["clipping_bias_norm"] == pytest.approx(float(estimator.clipping_bias.norm()), abs=1e-14)
        assert (row["iteration"], row["update"]) == (i // 3, i)
        step = 60.0 * estimator.limit()
        assert row["step_norm"] == pytest.approx(float(step.norm()))
        truth = frozen.policy_gradient(theta)
        assert row["cosine"] == pytest.approx(float(step @ truth / step.norm() / truth.norm()))
        theta = theta + step
        close(row["theta"], theta)
    assert max(row["divisor"] for row in rows) > 1.5


def test_adam_ignores_a_constant_divisor():
    oracle = small_oracle("neural")
    # A floor that no bias reaches divides every gradient by the same number.
    divided = objective(stabilizer=ClippingBiasNorm(c0=0.05, form="floor"))
    plain, scaled = (run(oracle, its, optimizer="adam", learning_rate=0.02) for its in (objective(), divided))
    assert {row["divisor"] for row in scaled} == {0.05}
    moved = (plain[-1]["theta"] - oracle.behaviour).norm()
    assert moved > 0.3
    assert (
        plain[-1]["theta"] - scaled[-1]["theta"]
    ).norm() < 0.005 * moved  # Adam's eps makes the difference


def test_a_norm_clip_that_binds_after_the_divisor_cancels_it():
    oracle = small_oracle("neural")
    its = objective(stabilizer=ClippingBiasNorm(c0=0.005))
    options = {"max_grad_norm": 0.0005, "learning_rate": 1000.0}
    none = run(oracle, objective(stabilizer=NoStabilizer()), **options)
    after = run(oracle, its, clip_norm_first=False, **options)
    before = run(oracle, its, **options)
    assert max(row["divisor"] for row in before) > 1.5
    close(after[-1]["theta"], none[-1]["theta"])
    assert all(row["step_norm"] == pytest.approx(0.5 / row["divisor"]) for row in before)


def test_what_is_refused():
    oracle = small_oracle("neural")
    with pytest.raises(ValueError, match="optimizer='lion': must be one of sgd, adam"):
        run(oracle, objective(), optimizer="lion")
    with pytest.raises(ValueError, match="estimator='logit'"):
        run(oracle, objective(stabilizer=ClippingBiasNorm(estimator="logit")))
    with pytest.raises(ValueError, match="theta: must be finite"):
        run(oracle, objective(), learning_rate=float("inf"))
