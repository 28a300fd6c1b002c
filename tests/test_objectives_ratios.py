import itertools
import math

import pytest
import torch

from stppo.objectives import Ratio, RatioRule, kl_behaviour_to_policy, kl_policy_to_behaviour
from stppo.objectives.ratios import kl_to_reference
from tests.objectives_cases import mixed_batch, normal, sentences_of

ALL = list(
    itertools.product(("token", "turn", "sentence", "sequence"), ("geometric", "arithmetic", "product"))
)


def by_hand(granularity, aggregation, log_ratio, batch):
    """Python loops over segments, straight from the definition."""
    layout = batch.layout
    sentences = [s for row in range(len(batch)) for s in sentences_of(batch, row)]
    keys = {
        "token": range(len(log_ratio)),
        "turn": layout.turns.tolist(),
        "sentence": [i for i, sentence in enumerate(sentences) for _ in sentence],
        "sequence": layout.rows.tolist(),
    }[granularity]
    segments = {}
    for key, value in zip(keys, log_ratio.tolist(), strict=True):
        segments.setdefault(key, []).append(value)
    rule = {
        "geometric": lambda ls: math.exp(sum(ls) / len(ls)),
        "arithmetic": lambda ls: sum(map(math.exp, ls)) / len(ls),
        "product": lambda ls: math.prod(map(math.exp, ls)),
    }[aggregation]
    return torch.tensor([rule(segments[key]) for key in keys], dtype=torch.float64)


@pytest.mark.parametrize(("granularity", "aggregation"), ALL)
def test_ratio_is_its_definition(granularity, aggregation):
    batch = mixed_batch()
    log_ratio = normal(batch.layout.rows, 3, 0.4)
    got = Ratio(granularity, aggregation)(log_ratio, batch.layout)
    torch.testing.assert_close(got, by_hand(granularity, aggregation, log_ratio, batch), rtol=1e-13, atol=0)


class Doubled(RatioRule):
    """A ratio of one's own, which gives no pullback."""

    def ratio(self, log_ratio, layout):
        return layout.row_mean(2 * log_ratio).exp()[layout.rows]


def test_the_pullback_of_a_ratio_of_ones_own_is_found_by_autograd():
    layout, rule = mixed_batch().layout, Doubled()
    log_ratio, weights = normal(layout.rows, 3, 0.4), normal(layout.rows, 4)
    ratio = rule(log_ratio, layout)
    got = rule.pullback(log_ratio, ratio, weights, layout)
    expected = 2 * (layout.row_sum(weights) / layout.row_lengths)[layout.rows] * ratio
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_a_ratio_of_the_wrong_shape_is_refused():
    class PerTurn(RatioRule):
        def ratio(self, log_ratio, layout):
            return layout.turn_mean(log_ratio).exp()

    layout = mixed_batch().layout
    with pytest.raises(ValueError, match=r"PerTurn.ratio: expected one value a token, \(34,\), got"):
        PerTurn()(normal(layout.rows, 3), layout)


@pytest.mark.parametrize(("granularity", "aggregation"), ALL)
def test_pullback_is_the_vector_jacobian_product(granularity, aggregation):
    layout = mixed_batch().layout
    log_ratio = normal(layout.rows, 3, 0.4).requires_grad_()
    weights = normal(layout.rows, 4)
    rule = Ratio(granularity, aggregation)
    ratio = rule(log_ratio, layout)
    (expected,) = torch.autograd.grad((weights * ratio).sum(), log_ratio)
    got = rule.pullback(log_ratio.detach(), ratio.detach(), weights, layout)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("field", ["granularity", "aggregation"])
def test_unknown_choices_are_named(field):
    with pytest.raises(ValueError, match=f"{field}='median': must be one of"):
        Ratio(**{field: "median"})


def test_kl_estimators_have_the_named_expectation_and_gradient():
    """Exact expectations under pi_old over a categorical: each estimator gives its KL and that KL's gradient."""
    old = torch.tensor([0.3, -0.5, 1.0, 0.1], dtype=torch.float64).log_softmax(0)
    logits = torch.tensor([-0.4, 0.6, 0.2, 0.9], dtype=torch.float64, requires_grad=True)
    new = logits.log_softmax(0)
    exact = {
        kl_behaviour_to_policy: (old.exp() * (old - new)).sum(),
        kl_policy_to_behaviour: (new.exp() * (new - old)).sum(),
    }
    assert abs(exact[kl_behaviour_to_policy] - exact[kl_policy_to_behaviour]) > 1e-3  # they can be told apart
    for estimator, kl in exact.items():
        estimate = (old.exp() * estimator(new - old)).sum()
        torch.testing.assert_close(estimate, kl, rtol=1e-13, atol=1e-15)
        (got,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)
        assert (estimator(normal(torch.empty(100), 1)) >= 0).all()


def test_the_reference_penalty_follows_the_kl_that_it_says():
    """Expected gradients by enumeration of five actions, sampled by an older policy."""
    g = torch.Generator().manual_seed(0)
    logits, old, reference = (torch.randn(5, generator=g, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    old, reference = old.log_softmax(0), reference.log_softmax(0)
    new = logits.log_softmax(0)

    def kl(p, q):
        return (p.exp() * (p - q)).sum()

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    to_reference, from_reference = gradient(kl(new, reference)), gradient(kl(reference, new))
    fresh = gradient((new.detach().exp() * kl_to_reference(new, reference)).sum())
    assert fresh == pytest.approx(from_reference) and fresh != pytest.approx(to_reference, rel=0.1)
    older = gradient((old.exp() * kl_to_reference(new, reference)).sum())
    assert older != pytest.approx(from_reference, rel=0.1)
    weighted = kl_to_reference(new, reference, old)
    assert gradient((old.exp() * weighted).sum()) == pytest.approx(to_reference)
    assert float((old.exp() * weighted).sum().detach()) == pytest.approx(float(kl(new, reference).detach()))
