import math

import pytest
import torch

from stppo.objectives import (
    Bounds,
    Clip,
    ClippingBiasNorm,
    CtnKL,
    NoStabilizer,
    Objective,
    OwnClippingBias,
    Ratio,
    TokenGAE,
    Tokens,
)
from tests.objectives_cases import mixed_batch, normal


@pytest.mark.parametrize(
    ("form", "pairs"),
    [
        ("max", [(0.0, 1.0), (0.1, 1.0), (0.05, 1.0), (0.4, 4.0)]),
        ("one_plus", [(0.0, 1.0), (0.1, 2.0), (0.4, 5.0)]),
        ("floor", [(0.0, 0.1), (0.05, 0.1), (0.4, 0.4)]),
        ("bare", [(0.0, 1.0), (0.05, 0.05), (0.4, 0.4)]),
    ],
)
def test_divisors_by_hand(form, pairs):
    rule = ClippingBiasNorm(c0=0.1, form=form)
    for norm, expected in pairs:
        assert rule.divisor(norm) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("form", ["max", "one_plus", "floor", "bare"])
def test_divisors_never_hide_a_broken_norm(form):
    assert math.isnan(ClippingBiasNorm(form=form).divisor(math.nan))
    assert ClippingBiasNorm(form=form).divisor(math.inf) == math.inf


RANGE = Bounds(0.8, 1.2)


def tokens(log_ratio, layout):
    """What a penalty sees; the objective's ratio and the advantages do not matter to this one."""
    return Tokens(log_ratio, torch.full_like(log_ratio, 9.0), torch.zeros_like(log_ratio), layout)


def shares_and_kls(log_ratio, out, layout, kl):
    """Python loops: each trajectory's share of flagged tokens and mean KL estimate."""
    estimate = {
        "policy_to_behaviour": lambda l: math.exp(l) * l - math.exp(l) + 1,
        "behaviour_to_policy": lambda l: math.exp(l) - 1 - l,
    }[kl]
    shares, kls = [], []
    for row in range(layout.shape[0]):
        at = layout.rows == row
        shares.append(sum(out[at].tolist()) / int(at.sum()))
        kls.append(sum(map(estimate, log_ratio[at].tolist())) / int(at.sum()))
    return shares, kls


@pytest.mark.parametrize("kl", ["policy_to_behaviour", "behaviour_to_policy"])
def test_ctn_formulas(kl):
    layout = mixed_batch().layout
    log_ratio = normal(layout.rows, 1, 0.5)
    out = (log_ratio.exp() - 1).abs() > 0.2
    shares, kls = shares_and_kls(log_ratio, out, layout, kl)
    n = len(shares)
    inside = CtnKL(coefficient=0.5, formula="inside", kl=kl).penalty(tokens(log_ratio, layout), RANGE)
    outside = CtnKL(coefficient=0.5, formula="outside", kl=kl).penalty(tokens(log_ratio, layout), RANGE)
    assert inside.item() == pytest.approx(
        0.5 * sum(s * k for s, k in zip(shares, kls, strict=True)) / n, rel=1e-10
    )
    assert outside.item() == pytest.approx(0.5 * sum(shares) / n * sum(kls) / n, rel=1e-10)
    covariance = torch.cov(torch.tensor([shares, kls], dtype=torch.float64), correction=0)[0, 1].item()
    assert abs(covariance) > 1e-4
    assert (inside - outside).item() == pytest.approx(0.5 * covariance, rel=1e-9)


@pytest.mark.parametrize("formula", ["inside", "outside"])
def test_ctn_gradient_is_the_kls_alone(formula):
    """The share enters as a constant weight: d(r l - r + 1)/dl = r l, per trajectory mean."""
    layout = mixed_batch().layout
    log_ratio = normal(layout.rows, 1, 0.5).requires_grad_()
    out = (log_ratio.detach().exp() - 1).abs() > 0.2
    (got,) = torch.autograd.grad(CtnKL(2.0, formula).penalty(tokens(log_ratio, layout), RANGE), log_ratio)
    share = layout.row_mean(out.double())
    weight = share if formula == "inside" else share.mean().expand_as(share)
    l = log_ratio.detach()
    expected = 2.0 * l.exp() * l * (weight / layout.row_lengths)[layout.rows] / layout.shape[0]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("rule", "field", "value"),
    [
        (ClippingBiasNorm, "c0", 0.0),
        (ClippingBiasNorm, "form", "min"),
        (ClippingBiasNorm, "estimator", "none"),
        (CtnKL, "coefficient", -1.0),
        (CtnKL, "formula", "both"),
        (CtnKL, "kl", "k3"),
        (OwnClippingBias, "form", "max"),
        (OwnClippingBias, "sample", "token"),
        (OwnClippingBias, "c0", 0.0),
    ],
)
def test_bad_options_are_named(rule, field, value):
    with pytest.raises(ValueError, match=f"{rule.__name__}.{field}={value!r}"):
        rule(**{field: value})


# ---- each sample by its own clipping --------------------------------------------------------------------


def weighed(stabilizer, scale=0.6, seed=1, **ratio):
    """The gradient by log-ratio, the (N,) divisors and the surrogate of a batch with clipped tokens."""
    batch = mixed_batch()
    layout = batch.layout
    objective = Objective(TokenGAE(), Ratio(**ratio), Clip(), stabilizer)
    log_ratio = normal(layout.rows, seed, scale).requires_grad_()
    advantages = normal(layout.rows, seed + 1)
    surrogate = objective.evaluate(log_ratio, advantages, layout)
    (gradient,) = torch.autograd.grad(-surrogate.loss, log_ratio, retain_graph=True)
    return gradient, log_ratio, advantages, layout, surrogate


@pytest.mark.parametrize("sample", ["sequence", "turn"])
@pytest.mark.parametrize("form", ["norm", "share"])
def test_own_clipping_bias_with_token_ratios_by_hand(sample, form):
    gradient, log_ratio, advantages, layout, surrogate = weighed(
        OwnClippingBias(form=form, sample=sample, c0=0.05)
    )
    w, total = log_ratio.detach().exp(), 0.0
    clipped = ((advantages > 0) & (w > 1.2)) | ((advantages < 0) & (w < 0.8))
    of = layout.rows if sample == "sequence" else layout.turns
    for i in range(int(of.max()) + 1):
        at = (of == i).nonzero().squeeze(1).tolist()
        removed = [float(w[t] * advantages[t]) / len(at) if clipped[t] else 0.0 for t in at]
        divisor = max(1.0, math.sqrt(sum(c * c for c in removed)) / 0.05)
        if form == "share":
            divisor = 1 + sum(clipped[at].tolist()) / len(at)
        for t in at:
            weight = 1 / (layout.shape[0] * int(layout.row_lengths[layout.rows[t]]) * divisor)
            expected = 0.0 if clipped[t] else weight * float(w[t] * advantages[t])
            assert gradient[t].item() == pytest.approx(expected, rel=1e-12)
        total += divisor * len(at)
    assert surrogate.diagnostics["sample_divisor"] == pytest.approx(total / len(w))
    assert surrogate.diagnostics["sample_divisor"] > 1.05


@pytest.mark.parametrize("granularity", ["token", "turn", "sequence"])
@pytest.mark.parametrize("sample", ["sequence", "turn"])
def test_own_clipping_bias_is_no_stabiliser_where_it_has_nothing_to_do(sample, granularity):
    plain = weighed(NoStabilizer(), granularity=granularity)[0]
    for form, c0 in (("norm", 1e9), ("norm", math.inf)):
        rule = OwnClippingBias(form=form, sample=sample, c0=c0)
        assert torch.equal(weighed(rule, granularity=granularity)[0], plain)
    assert not torch.equal(weighed(OwnClippingBias(sample=sample), granularity=granularity)[0], plain)
    near = weighed(NoStabilizer(), scale=0.01, granularity=granularity)[0]  # nothing is clipped
    for form in ("norm", "share"):
        rule = OwnClippingBias(form=form, sample=sample, c0=1e-9)
        assert torch.equal(weighed(rule, scale=0.01, granularity=granularity)[0], near)


@pytest.mark.parametrize("granularity", ["token", "turn"])
@pytest.mark.parametrize("form", ["norm", "share"])
def test_own_clipping_bias_is_a_constant_factor_and_weighs_the_bias_alike(form, granularity):
    """By central differences: the weights take no gradient. And grad J = grad J_unrestricted - C stays true of C."""
    rule = OwnClippingBias(form=form, sample="sequence", c0=0.01)
    gradient, leaf, advantages, layout, surrogate = weighed(rule, granularity=granularity)
    (bias,) = torch.autograd.grad(surrogate.bias_surrogate, leaf)
    log_ratio = leaf.detach()
    objective = Objective(TokenGAE(), Ratio(granularity), Clip(), NoStabilizer())
    tokens = objective.tokens(log_ratio.clone().requires_grad_(), advantages, layout)
    weights = rule.weights(tokens, objective.terms(tokens)[0]).detach()
    weights = weights / (layout.shape[0] * layout.row_lengths[layout.rows])

    def value(moved, unrestricted=False):
        terms, _ = objective.terms(objective.tokens(moved, advantages, layout))
        return float((weights * (terms.unrestricted if unrestricted else terms.terms)).sum())

    def differences(unrestricted):
        step, found = 1e-6, []
        for t in range(len(log_ratio)):
            up, down = log_ratio.clone(), log_ratio.clone()
            up[t] += step
            down[t] -= step
            found.append((value(up, unrestricted) - value(down, unrestricted)) / (2 * step))
        return torch.tensor(found, dtype=torch.float64)

    torch.testing.assert_close(gradient, differences(False), rtol=1e-6, atol=1e-9)
    assert surrogate.any_clipped
    torch.testing.assert_close(differences(True) - gradient, bias, rtol=1e-5, atol=1e-9)
