"""Surrogates against their formulas, written once more and differentiated by central differences; moving bounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stppo.objectives import (
    Bounds,
    Clip,
    ClippedWeight,
    ClipRule,
    Gate,
    Mask,
    MinClip,
    NoStabilizer,
    Objective,
    Ratio,
    SurrogateRule,
    Terms,
    TokenGAE,
    Tokens,
)
from tests.objectives_cases import TabularPolicy, batch_from_turns, mixed_batch, normal, off_policy

SURROGATES = [MinClip(), ClippedWeight(), Mask(), Gate()]
RATIOS = [Ratio(g, a) for g in ("token", "turn", "sentence", "sequence") for a in ("geometric", "arithmetic")]
LOW, HIGH = 0.8, 1.2


def make(surrogate, ratio=RATIOS[0], clip=None, loss_aggregation="trajectory_mean"):
    return Objective(TokenGAE(), ratio, clip or Clip(), NoStabilizer(), loss_aggregation, surrogate)


@pytest.fixture
def setting():
    policy = TabularPolicy()
    batch = off_policy(mixed_batch(), policy, spread=0.5)
    return policy, batch, policy.logprobs(batch.tokens), normal(batch.rewards, 21) * batch.agent_mask


# --- formulas, on one token: w now and where the factor was frozen, A, l -> (term, unrestricted) -------------


def by_formula(surrogate, w, frozen, a, l):
    clip = min(max(frozen, LOW), HIGH)
    beyond = (a > 0 and frozen > HIGH) or (a < 0 and frozen < LOW)
    if isinstance(surrogate, MinClip):
        return min(w * a, min(max(w, LOW), HIGH) * a), w * a
    if isinstance(surrogate, ClippedWeight):
        return clip * a * l, frozen * a * l
    if isinstance(surrogate, Mask):
        return (0.0 if beyond else frozen) * a * l, frozen * a * l
    tau = 1.0 if a > 0 else 1.05
    return 4 / tau / (1 + math.exp(-tau * (w - 1))) * a, w * a


@pytest.mark.parametrize("ratio", RATIOS, ids=str)
@pytest.mark.parametrize("surrogate", SURROGATES, ids=str)
def test_gradient_and_clipping_bias_by_central_differences(surrogate, ratio):
    batch = batch_from_turns([[3, 2], [4]], seed=3)
    layout, objective = batch.layout, make(surrogate, ratio)
    log_ratio, advantages = normal(layout.rows, 5, 1.2), normal(layout.rows, 6)
    weights = 0.5 / layout.row_lengths[layout.rows].double()
    frozen = ratio(log_ratio, layout).tolist()

    def sums(l):
        w = ratio(l, layout).tolist()
        terms = map(by_formula, [surrogate] * len(w), w, frozen, advantages.tolist(), l.tolist())
        terms = torch.tensor(list(terms), dtype=torch.float64)
        return weights @ terms[:, 0], weights @ (terms[:, 1] - terms[:, 0])

    step = 1e-6
    differences = []
    for i in range(len(log_ratio)):
        shift = torch.zeros_like(log_ratio)
        shift[i] = step
        pairs = zip(sums(log_ratio + shift), sums(log_ratio - shift), strict=True)
        differences.append([(up - down) / (2 * step) for up, down in pairs])
    gradient, bias = torch.tensor(differences, dtype=torch.float64).T

    leaf = log_ratio.clone().requires_grad_()
    got = objective.evaluate(leaf, advantages, layout)
    assert got.any_clipped and bias.norm() > 1e-3
    (found,) = torch.autograd.grad(-got.ppo_loss, leaf, retain_graph=True)
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-8)
    (found,) = torch.autograd.grad(got.bias_surrogate, leaf)
    torch.testing.assert_close(found, bias, rtol=0, atol=1e-8)


def test_the_gate_clips_a_token_where_half_of_its_gradient_is_gone():
    # sigmoid'(x) is half of its maximum at x = log(3 + sqrt 8) = 1.7627.
    ratio = torch.tensor([1 + 1.76, 1 + 1.77, 1e-3], dtype=torch.float64)
    tokens = Tokens(ratio.log(), ratio, torch.ones(3, dtype=torch.float64), batch_from_turns([[3]]).layout)
    assert Gate()(tokens, Bounds(LOW, HIGH)).clipped.tolist() == [False, True, False]
    assert Gate(tau_positive=3.0)(tokens, Bounds(LOW, HIGH)).clipped.all()


# --- identities ----------------------------------------------------------------------------------------------


def test_overflow_stays_visible_under_a_mask_and_a_masked_token_stays_finite():
    layout = batch_from_turns([[2]]).layout
    l = torch.tensor([800.0, 0.0], dtype=torch.float64, requires_grad=True)
    masked = make(Mask()).evaluate(l, torch.ones(2, dtype=torch.float64), layout)
    assert masked.loss.item() == -0.5  # A > 0: the first is masked
    visible = make(Mask()).evaluate(l, -torch.ones(2, dtype=torch.float64), layout)
    assert visible.loss.item() == math.inf


@pytest.mark.parametrize("ratio", [Ratio("token"), Ratio("turn", "product"), Ratio("sequence", "product")])
def test_a_clipped_ratio_that_overflows_has_a_gradient_of_zero_and_not_nan(ratio):
    layout = batch_from_turns([[2], [2]]).layout
    l = torch.tensor([100.0, 100.0, 0.1, -0.1], requires_grad=True)  # exp(100) is beyond float32
    found = make(MinClip(), ratio).evaluate(l, torch.ones(4), layout)
    (gradient,) = torch.autograd.grad(found.loss, l)
    assert found.loss.isfinite() and gradient[:2].tolist() == [0.0, 0.0]
    # Two trajectories of two tokens; a product's two tokens move the ratio 1 of both.
    w = [math.exp(0.1), math.exp(-0.1)] if ratio.granularity == "token" else [2.0, 2.0]
    assert gradient[2:].tolist() == pytest.approx([-x / 4 for x in w], rel=1e-5)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, "1"])
@pytest.mark.parametrize("field", ["tau_positive", "tau_negative"])
def test_gates_need_a_positive_temperature(field, value):
    with pytest.raises(ValueError, match=rf"Gate.{field}=.*\(0, inf\]"):
        Gate(**{field: value})


# --- bounds that move ------------------------------------------------------------------------------------------


class ByShare(ClipRule):
    """Raises the upper bound until positive advantages have six tenths of the batch's mass: looks at all tokens."""

    sees_batch = True

    def bounds(self, tokens):
        assert not torch.is_grad_enabled()
        high = 1.1
        while high < 3.0:
            mass = tokens.ratio.clamp(max=high) * tokens.advantages
            if mass[mass > 0].sum() >= 0.6 * mass.abs().sum():
                break
            high += 0.1
        return Bounds(0.5, high)


class ByEntropy(ClipRule):
    """Wider for tokens of high entropy."""

    def bounds(self, tokens):
        entropy = tokens.known("entropy")
        return Bounds(1 - 0.2 * entropy, 1 + 0.2 * entropy)


def test_bounds_may_move_with_the_batch(setting):
    _, batch, logprobs, advantages = setting
    found = set()
    for shift in (0.0, 0.2, 0.4, 1.0):
        a = advantages + shift * batch.agent_mask
        objective = make(MinClip(), clip=ByShare())
        got = objective(logprobs, batch, a).diagnostics
        fixed = make(MinClip(), clip=Clip(0.5, got["clip_high"] - 1))(logprobs, batch, a)
        assert got == pytest.approx(fixed.diagnostics, rel=1e-12)
        assert got["clip_low"] == 0.5
        found.add(round(got["clip_high"], 6))
    assert len(found) > 1


def test_bounds_may_differ_by_token(setting):
    policy, batch, logprobs, advantages = setting
    entropy = normal(batch.rewards, 9).abs() + 0.1
    got = make(MinClip(), clip=ByEntropy())(logprobs, batch, advantages, entropy=entropy)
    on = batch.agent_mask
    w, a = (logprobs - batch.behaviour_logprobs)[on].exp(), advantages[on]
    low, high = 1 - 0.2 * entropy[on], 1 + 0.2 * entropy[on]
    assert got.diagnostics["clip_low"] == pytest.approx(low.mean().item(), rel=1e-12)
    assert got.diagnostics["clip_high"] == pytest.approx(high.mean().item(), rel=1e-12)
    out = ((w < low) | (w > high)).double().mean().item()
    assert got.diagnostics["out_of_range_fraction"] == got.diagnostics["out_of_range_fraction_token"] == out
    weight = 1.0 / (len(batch) * batch.n_agent_tokens[batch.layout.rows].double())
    expected = (weight * torch.minimum(w * a, torch.maximum(torch.minimum(w, high), low) * a)).sum()
    assert got.ppo_loss.item() == pytest.approx(-expected.item(), rel=1e-12)
    torch.testing.assert_close(policy.gradient(got.ppo_loss), policy.gradient(-expected), rtol=0, atol=1e-12)


def test_what_the_caller_does_not_know_is_refused_by_name(setting):
    _, batch, logprobs, advantages = setting
    with pytest.raises(
        ValueError, match="entropy: a rule of this objective reads it, but the caller gave none"
    ):
        make(MinClip(), clip=ByEntropy())(logprobs, batch, advantages)


def test_rules_of_the_wrong_shape_are_refused(setting):
    _, batch, logprobs, advantages = setting

    class PerTurn(ClipRule):
        def bounds(self, tokens):
            return Bounds(0.8, tokens.layout.turn_mean(tokens.ratio))

    class OneTerm(SurrogateRule):
        def terms(self, tokens, bounds):
            return Terms(tokens.ratio.sum(), tokens.ratio, tokens.ratio > 1)

    with pytest.raises(
        ValueError, match=r"PerTurn.bounds \(high\): expected one value a token, \(34,\), got"
    ):
        make(MinClip(), clip=PerTurn())(logprobs, batch, advantages)
    with pytest.raises(
        ValueError, match=r"OneTerm.terms \(terms\): expected one value a token, \(34,\), got"
    ):
        make(OneTerm())(logprobs, batch, advantages)


def test_rules_that_return_something_else_are_refused(setting):
    _, batch, logprobs, advantages = setting

    class Tensors(SurrogateRule):
        def terms(self, tokens, bounds):
            return tokens.ratio * tokens.advantages

    class Forgotten(Mask):
        def keep(self, tokens, bounds):
            pass

    with pytest.raises(ValueError, match=r"Tensors.terms: expected Terms\(.*, got Tensor"):
        make(Tensors())(logprobs, batch, advantages)
    with pytest.raises(ValueError, match="Forgotten.keep: expected one value a token, .*, got NoneType"):
        make(Forgotten())(logprobs, batch, advantages)


# --- PPO's clip -----------------------------------------------------------------------------------------------


def min_clip(clip, ratio, advantages, layout):
    """PPO's terms and the bounds, from ratios alone."""
    if clip.clip_on == "turn":
        advantages = layout.turn_mean(advantages)[layout.turns]
    tokens = Tokens(ratio.log(), ratio, advantages, layout)
    bounds = clip(tokens)
    return MinClip()(tokens, bounds), bounds


@given(
    st.lists(
        st.tuples(st.floats(0.01, 4), st.floats(-3, 3).filter(lambda a: a == 0 or abs(a) > 1e-3)),
        min_size=1,
        max_size=8,
    ),
    st.floats(0.01, 0.9),
    st.floats(0.01, 2),
)
@settings(max_examples=100, deadline=None)
def test_terms_are_the_pessimistic_min(pairs, low, high):
    layout = batch_from_turns([[len(pairs)]]).layout
    ratio, advantages = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    got, _ = min_clip(Clip(low, high), ratio, advantages, layout)
    expected = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    torch.testing.assert_close(got.terms, expected, rtol=1e-14, atol=0)
    # Clipped is where the min took the bound.
    assert torch.equal(got.clipped, got.terms != got.unrestricted)


def test_clip_on_turn_is_the_min_of_the_turns_summed_term():
    batch = mixed_batch()
    layout = batch.layout
    log_ratio, advantages = normal(layout.rows, 1, 0.6), normal(layout.rows, 2)
    ratio = Ratio("turn")(log_ratio, layout)
    got, _ = min_clip(Clip(0.2, 0.2, clip_on="turn"), ratio, advantages, layout)
    per_token, _ = min_clip(Clip(0.2, 0.2), ratio, advantages, layout)
    for turn in range(len(layout.turn_lengths)):
        at = layout.turns == turn
        w, total = ratio[at][0], advantages[at].sum()
        expected = torch.minimum(w * total, w.clamp(0.8, 1.2) * total)
        torch.testing.assert_close(got.terms[at].sum(), expected, rtol=1e-12, atol=1e-14)
        assert got.clipped[at].all() or not got.clipped[at].any()
        torch.testing.assert_close(got.unrestricted[at].sum(), w * total, rtol=1e-12, atol=1e-14)
    # The two differ where signs mix within a turn: the token-wise min is the more pessimistic.
    mixed = layout.turn_sum(per_token.terms) - layout.turn_sum(got.terms)
    assert mixed.max() < 1e-12 and mixed.min() < -1e-3


@pytest.mark.parametrize("value", [0, -0.2, math.nan, "0.2", None, True])
@pytest.mark.parametrize("field", ["epsilon_low", "epsilon_high"])
def test_epsilon_must_be_positive(field, value):
    with pytest.raises(ValueError, match=rf"Clip.{field}=.*\(0, inf\]"):
        Clip(**{field: value})


def test_unknown_clip_on():
    with pytest.raises(ValueError, match="clip_on=.sequence.: must be one of token, turn"):
        Clip(clip_on="sequence")
