import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stppo.objectives import Clip, MinClip, Ratio, Tokens
from tests.objectives_cases import batch_from_turns, mixed_batch, normal


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
