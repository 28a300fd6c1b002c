"""Identities of the surrogate, its clipping bias and its diagnostics, in float64."""

import dataclasses
import itertools
import math

import pytest
import torch

from stppo.objectives import (
    Clip,
    ClippingBiasNorm,
    CtnKL,
    NoStabilizer,
    Objective,
    Ratio,
    TokenGAE,
    estimated_bias_norms,
    loss_weights,
)
from stppo.trajectories import Trajectories
from tests.objectives_cases import (
    TabularPolicy,
    batch_from_turns,
    mixed_batch,
    normal,
    off_policy,
    sentences_of,
)

RATIOS = [
    ("token", "geometric"),
    *itertools.product(("turn", "sentence", "sequence"), ("geometric", "arithmetic", "product")),
]
LOSS_AGGREGATIONS = ("trajectory_mean", "token_mean", "turn_mean")


def make(
    granularity="token",
    aggregation="geometric",
    epsilon=0.2,
    loss_aggregation="trajectory_mean",
    clip_on="token",
    stabilizer=None,
):
    return Objective(
        credit=TokenGAE(),
        ratio=Ratio(granularity, aggregation),
        clip=Clip(epsilon, epsilon, clip_on),
        stabilizer=stabilizer or NoStabilizer(),
        loss_aggregation=loss_aggregation,
    )


def _cases():
    for (granularity, aggregation), loss_aggregation in itertools.product(RATIOS, LOSS_AGGREGATIONS):
        for clip_on in ("token", "turn") if granularity == "turn" else ("token",):
            yield granularity, aggregation, loss_aggregation, clip_on


CASES = list(_cases())


@pytest.fixture
def setting():
    """Policy, off-policy batch (ratios spread around 1), its log-probs and mixed-sign advantages."""
    policy = TabularPolicy()
    batch = off_policy(mixed_batch(), policy, spread=0.5)
    logprobs = policy.logprobs(batch.tokens)
    advantages = normal(batch.rewards, 21) * batch.agent_mask
    return policy, batch, logprobs, advantages


def close(got, expected, atol=1e-12):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


# --- the loss itself ---------------------------------------------------------------------------------------


def loss_by_hand(objective, logprobs, batch, advantages):
    """Python loops from the formulas: segments by turn ids, per-token (or per-turn) min, nested means."""
    total, n_rows = 0.0, len(batch)
    n_tokens = int(batch.agent_mask.sum())
    clip = objective.clip
    for i in range(n_rows):
        ids = batch.turn_ids[i].tolist()
        agent = [t for t, k in enumerate(ids) if k >= 0]
        turns = [[t for t in agent if ids[t] == k] for k in range(max(ids) + 1)]
        l = {t: (logprobs[i, t] - batch.behaviour_logprobs[i, t]).item() for t in agent}
        for turn in turns:
            terms = []
            for t in turn:
                (sentence,) = [s for s in sentences_of(batch, i) if t in s]
                segments = {"token": [t], "turn": turn, "sentence": sentence, "sequence": agent}
                segment = segments[objective.ratio.granularity]
                logs = [l[j] for j in segment]
                w = {
                    "geometric": math.exp(sum(logs) / len(logs)),
                    "arithmetic": sum(map(math.exp, logs)) / len(logs),
                    "product": math.exp(sum(logs)),
                }[objective.ratio.aggregation]
                bounded = min(max(w, 1 - clip.epsilon_low), 1 + clip.epsilon_high)
                a = advantages[i, t].item()
                terms.append((w * a, bounded * a))
            if clip.clip_on == "turn":
                summed = min(sum(u for u, _ in terms), sum(c for _, c in terms))
            else:
                summed = sum(min(u, c) for u, c in terms)
            total += (
                summed
                * {
                    "trajectory_mean": 1 / (n_rows * len(agent)),
                    "token_mean": 1 / n_tokens,
                    "turn_mean": 1 / (n_rows * len(turns) * len(turn)),
                }[objective.loss_aggregation]
            )
    return -total


@pytest.mark.parametrize(("granularity", "aggregation", "loss_aggregation", "clip_on"), CASES)
def test_loss_is_its_formula(setting, granularity, aggregation, loss_aggregation, clip_on):
    _, batch, logprobs, advantages = setting
    objective = make(granularity, aggregation, 0.2, loss_aggregation, clip_on)
    got = objective(logprobs, batch, advantages)
    assert got.ppo_loss.item() == pytest.approx(
        loss_by_hand(objective, logprobs, batch, advantages), rel=1e-12
    )
    assert got.loss is got.ppo_loss


@pytest.mark.parametrize(("granularity", "aggregation", "loss_aggregation", "clip_on"), CASES)
def test_gradient_by_finite_differences(setting, granularity, aggregation, loss_aggregation, clip_on):
    _, batch, logprobs, advantages = setting
    objective = make(granularity, aggregation, 0.2, loss_aggregation, clip_on, CtnKL(0.7))

    def loss(values):
        return objective(values, batch, advantages).loss

    # Away from the clip bounds, where the loss has kinks, the analytic gradient is the difference quotient.
    assert torch.autograd.gradcheck(loss, logprobs.detach().clone().requires_grad_(), fast_mode=True)


def test_penalty_enters_the_loss_alone(setting):
    policy, batch, logprobs, advantages = setting
    plain = make("turn")(logprobs, batch, advantages)
    with_kl = make("turn", stabilizer=CtnKL(0.3))(logprobs, batch, advantages)
    close(with_kl.ppo_loss, plain.ppo_loss)
    assert with_kl.diagnostics["ctn_penalty"] > 0
    assert (with_kl.loss - plain.loss).item() == pytest.approx(with_kl.diagnostics["ctn_penalty"], rel=1e-10)
    close(policy.gradient(with_kl.bias_surrogate), policy.gradient(plain.bias_surrogate))
    divided = make("turn", stabilizer=ClippingBiasNorm())(logprobs, batch, advantages)
    close(divided.loss, plain.loss)


# --- the lemmas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("granularity", "aggregation", "loss_aggregation", "clip_on"), CASES)
def test_clipping_bias_is_what_clipping_removed(setting, granularity, aggregation, loss_aggregation, clip_on):
    policy, batch, logprobs, advantages = setting
    got = make(granularity, aggregation, 0.2, loss_aggregation, clip_on)(logprobs, batch, advantages)
    free = make(granularity, aggregation, math.inf, loss_aggregation, clip_on)(logprobs, batch, advantages)
    bias = policy.gradient(got.bias_surrogate)
    assert got.any_clipped and bias.norm() > 1e-3
    assert not free.any_clipped and free.bias_surrogate.item() == 0
    close(policy.gradient(-got.ppo_loss), policy.gradient(-free.ppo_loss) - bias)


# --- what must not matter ----------------------------------------------------------------------------------


def outcome(objective, batch, logprobs, advantages):
    """Loss, gradient at agent tokens (in row-major order), bias gradient there, diagnostics."""
    logprobs = logprobs.detach().clone().requires_grad_()
    got = objective(logprobs, batch, advantages)
    (gradient,) = torch.autograd.grad(got.loss, logprobs, retain_graph=True)
    (bias,) = torch.autograd.grad(got.bias_surrogate, logprobs, retain_graph=True)
    assert (gradient[~batch.agent_mask] == 0).all() and (bias[~batch.agent_mask] == 0).all()
    return got.loss.item(), gradient[batch.agent_mask], bias[batch.agent_mask], got.diagnostics


def assert_same(a, b, order=None):
    assert a[0] == pytest.approx(b[0], abs=1e-12)
    for x, y in ((a[1], b[1]), (a[2], b[2])):
        close(x, y if order is None else y[order])
    assert a[3] == pytest.approx(b[3], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("garbage", [5.0, math.inf, math.nan])
@pytest.mark.parametrize(("granularity", "aggregation"), RATIOS)
def test_environment_positions_cannot_matter(setting, granularity, aggregation, garbage):
    _, batch, logprobs, advantages = setting
    objective = make(granularity, aggregation, stabilizer=CtnKL())
    off = ~batch.agent_mask
    dirty = Trajectories(
        **{
            **batch.state_dict(),
            "tokens": batch.tokens.masked_fill(off, 0),
            "behaviour_logprobs": batch.behaviour_logprobs.masked_fill(off, garbage),
            "sentence_ends": batch.sentence_ends | off,
        }
    )
    clean = outcome(objective, batch, logprobs, advantages)
    got = outcome(objective, dirty, logprobs.masked_fill(off, -garbage), advantages.masked_fill(off, garbage))
    assert got[0] == clean[0] and torch.equal(got[1], clean[1]) and torch.equal(got[2], clean[2])
    assert got[3] == clean[3]


@pytest.mark.parametrize("loss_aggregation", LOSS_AGGREGATIONS)
@pytest.mark.parametrize(("granularity", "aggregation"), RATIOS)
def test_padding_and_batch_order_cannot_matter(setting, granularity, aggregation, loss_aggregation):
    _, batch, logprobs, advantages = setting
    objective = make(granularity, aggregation, 0.2, loss_aggregation, stabilizer=CtnKL())
    reference = outcome(objective, batch, logprobs, advantages)

    def pad(x):
        return torch.nn.functional.pad(x, (0, 4)) if x.ndim == 2 else x

    wide = Trajectories(**{name: pad(value) for name, value in batch.state_dict().items()})
    assert_same(outcome(objective, wide, pad(logprobs), pad(advantages)), reference)

    order = torch.tensor([4, 0, 5, 2, 1, 3])
    shuffled = Trajectories(**{name: value[order] for name, value in batch.state_dict().items()})
    places = torch.zeros(batch.tokens.shape, dtype=torch.int64)
    places[batch.agent_mask] = torch.arange(int(batch.agent_mask.sum()))
    moved = places[order][batch.agent_mask[order]]
    assert_same(outcome(objective, shuffled, logprobs[order], advantages[order]), reference, moved)


# --- estimators of the clipping bias -----------------------------------------------------------------------


@pytest.mark.parametrize(("granularity", "aggregation"), RATIOS)
def test_estimated_norms_on_a_policy_whose_logits_are_its_parameters(granularity, aggregation):
    """Every position has its own logits, so the logit-space norm is the exact ||C||."""
    batch = mixed_batch()
    logits = normal(torch.empty(*batch.tokens.shape, 5), 31).requires_grad_()
    log_table = logits.log_softmax(-1)
    logprobs = log_table.gather(-1, batch.tokens[..., None]).squeeze(-1)
    behaviour = (logprobs.detach() + normal(batch.rewards, 32, 0.5)) * batch.agent_mask
    batch = Trajectories(**{**batch.state_dict(), "behaviour_logprobs": behaviour})
    got = make(granularity, aggregation, 0.1)(logprobs, batch, normal(batch.rewards, 33))
    norms = estimated_bias_norms(got, logprobs, log_table.detach().exp().square().sum(-1))
    (exact,) = torch.autograd.grad(got.bias_surrogate, logits, retain_graph=True)
    (c,) = torch.autograd.grad(got.bias_surrogate, logprobs, retain_graph=True)
    assert exact.norm() > 1e-3
    assert norms["clipping_bias_norm_logit"] == pytest.approx(exact.norm().item(), rel=1e-12)
    assert norms["clipping_bias_norm_logprob"] == pytest.approx(c.norm().item(), rel=1e-12)
    got.loss.backward()  # the graph is still there


def test_estimated_norms_without_clipping_or_probabilities(setting):
    _, batch, logprobs, advantages = setting
    ones = torch.ones_like(advantages)
    free = make("turn", epsilon=math.inf)(logprobs, batch, advantages)
    zero = {"clipping_bias_norm_logprob": 0.0, "clipping_bias_norm_logit": 0.0}
    assert estimated_bias_norms(free, logprobs, ones) == zero
    got = estimated_bias_norms(make("turn")(logprobs, batch, advantages), logprobs)
    assert got["clipping_bias_norm_logprob"] > 0 and math.isnan(got["clipping_bias_norm_logit"])


def test_logit_norm_of_a_nearly_certain_token_is_small_not_nan():
    batch = batch_from_turns([[1]])
    logprobs = torch.full(batch.tokens.shape, -1e-9, requires_grad=True)
    state = {
        **batch.state_dict(),
        "behaviour_logprobs": batch.agent_mask * -1.0,
        "rewards": batch.rewards.float(),
    }
    batch = Trajectories(**state)
    got = make()(logprobs, batch, torch.ones(batch.tokens.shape))
    assert got.any_clipped
    norms = estimated_bias_norms(got, logprobs, torch.full(batch.tokens.shape, 1.0 - 1e-7))
    assert 0 <= norms["clipping_bias_norm_logit"] < 1e-3


# --- diagnostics -------------------------------------------------------------------------------------------

LOG = math.log


@pytest.fixture
def worked():
    """Turns (1.5, 1.5), (0.5) and (1.0, 4.0) by token ratio; advantages (1, -1), (-2) and (0, 3)."""
    batch = batch_from_turns([[2, 1], [2]])
    log_ratio = torch.tensor([1.5, 1.5, 0.5, 1.0, 4.0], dtype=torch.float64).log()
    logprobs = batch.behaviour_logprobs.clone()
    logprobs[batch.agent_mask] += log_ratio
    advantages = torch.zeros_like(logprobs)
    advantages[batch.agent_mask] = torch.tensor([1.0, -1.0, -2.0, 0.0, 3.0], dtype=torch.float64)
    return batch, logprobs, advantages


def test_token_diagnostics_by_hand(worked):
    batch, logprobs, advantages = worked
    got = make("token", epsilon=0.2)(logprobs, batch, advantages).diagnostics
    weights = [1 / 6] * 3 + [1 / 4] * 2
    kept = [0, weights[1] * 1.5, 0, 0, 0]  # |c_t| of the unclipped terms; the fourth has advantage 0
    sequence = [(1.5 * 1.5 * 0.5) ** (1 / 3), 2.0]
    products = [1.125, 4.0]
    expected = {
        "clip_fraction": 3 / 5,
        "clip_fraction_high": 2 / 5,
        "clip_fraction_low": 1 / 5,
        "clip_low": 0.8,
        "clip_high": 1.2,
        "out_of_range_fraction": 4 / 5,
        "out_of_range_fraction_token": 4 / 5,
        "turn_fully_clipped_fraction": 1 / 3,
        "ratio_mean_token": 8.5 / 5,
        "ratio_max_token": 4.0,
        "ratio_p99_token": 4.0,
        "ratio_min_token": 0.5,
        "ratio_mean_turn": 4.0 / 3,
        "ratio_max_turn": 2.0,
        "ratio_p99_turn": 2.0,
        "ratio_min_turn": 0.5,
        "ratio_mean_sequence": sum(sequence) / 2,
        "ratio_max_sequence": 2.0,
        "ratio_p99_sequence": 2.0,
        "ratio_min_sequence": sequence[0],
        "effective_sample_size": sum(products) ** 2 / (2 * sum(p * p for p in products)),
        "kl_behaviour_k1": -(2 * LOG(1.5) + LOG(0.5) + LOG(4)) / 5,
        "kl_behaviour_k3": (3.5 - (2 * LOG(1.5) + LOG(0.5) + LOG(4))) / 5,
        "kl_policy_to_behaviour": (3 * LOG(1.5) + 0.5 * LOG(0.5) + 4 * LOG(4) - 3.5) / 5,
        "negative_advantage_gradient_share": kept[1] / sum(kept),
        "advantage_mean": 1 / 5,
        "advantage_std": torch.tensor([1.0, -1, -2, 0, 3]).std().item(),
        "advantage_max": 3.0,
        "ctn_penalty": 0.0,
    }
    assert got == pytest.approx(expected, rel=1e-6)


def test_turn_diagnostics_by_hand(worked):
    batch, logprobs, advantages = worked
    got = make("turn", epsilon=0.2)(logprobs, batch, advantages).diagnostics
    # Turn ratios 1.5, 0.5, 2: clipped are A = 1 (high), A = -2 (low), A = 3 (high); A = 0 never is.
    assert got["clip_fraction"] == pytest.approx(3 / 5)
    assert got["clip_fraction_high"] == pytest.approx(2 / 5)
    assert got["out_of_range_fraction"] == pytest.approx(1.0)
    assert got["out_of_range_fraction_token"] == pytest.approx(4 / 5)
    assert got["turn_fully_clipped_fraction"] == pytest.approx(1 / 3)
    # The unclipped A = -1 spreads its gradient over both tokens of its turn, one of them with A = +1.
    assert got["negative_advantage_gradient_share"] == pytest.approx(0.5)


@pytest.mark.parametrize(("granularity", "aggregation"), RATIOS)
def test_negative_share_agrees_with_autograd(setting, granularity, aggregation):
    _, batch, logprobs, advantages = setting
    logprobs = logprobs.detach().requires_grad_()
    got = make(granularity, aggregation)(logprobs, batch, advantages)
    (c,) = torch.autograd.grad(got.ppo_loss, logprobs)
    expected = c.abs()[advantages < 0].sum() / c.abs().sum()
    assert got.diagnostics["negative_advantage_gradient_share"] == pytest.approx(expected.item(), rel=1e-10)


def test_p99_is_the_nearest_rank():
    batch = batch_from_turns([[200]], gap=1)
    logprobs = batch.behaviour_logprobs.clone()
    logprobs[batch.agent_mask] += torch.arange(1, 201, dtype=torch.float64).log()
    got = make()(logprobs, batch, torch.zeros_like(logprobs)).diagnostics
    assert got["ratio_p99_token"] == pytest.approx(198.0)


def test_no_gradient_at_all_has_no_negative_share(worked):
    batch, logprobs, _ = worked
    got = make()(logprobs, batch, torch.zeros_like(logprobs)).diagnostics
    assert got["negative_advantage_gradient_share"] == 0.0


@pytest.mark.parametrize(("granularity", "aggregation"), RATIOS)
def test_overflow_and_nan_are_visible(setting, granularity, aggregation):
    _, batch, logprobs, _ = setting
    advantages = -torch.ones_like(logprobs)  # negative: high ratios are not clipped
    first = batch.agent_mask.nonzero()[0]
    far = logprobs.detach().clone()
    far[first[0], first[1]] = 1e4  # overflows in every aggregation: exp(1e4 / 8) is inf too
    got = make(granularity, aggregation)(far, batch, advantages)
    assert got.loss.item() == math.inf
    assert got.diagnostics["ratio_max_token"] == math.inf
    far[first[0], first[1]] = math.nan
    got = make(granularity, aggregation)(far, batch, advantages)
    assert math.isnan(got.loss.item()) and math.isnan(got.diagnostics["kl_behaviour_k1"])


# --- composition -------------------------------------------------------------------------------------------


def test_granularity_of_an_own_ratio_is_checked():
    class PerWord(Ratio):
        granularity = "word"

        def __init__(self):
            pass

    with pytest.raises(ValueError, match="PerWord.granularity='word': must be one of token, turn"):
        Objective(TokenGAE(), PerWord(), Clip(), NoStabilizer())


def test_impossible_combinations_are_refused():
    for granularity in ("token", "sequence"):
        with pytest.raises(ValueError, match="clip_on='turn' needs Ratio.granularity='turn'"):
            make(granularity, clip_on="turn")
    with pytest.raises(
        ValueError, match="loss_aggregation='sum': must be one of trajectory_mean, token_mean"
    ):
        make(loss_aggregation="sum")
    with pytest.raises(ValueError, match="loss_aggregation=.sum.: must be one of"):
        loss_weights(torch.ones(1, 2, dtype=torch.bool), "sum")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_comes_in_half_precision_is_computed_in_float32(dtype):
    batch = batch_from_turns([[1000]])
    batch = dataclasses.replace(batch, behaviour_logprobs=torch.full(batch.tokens.shape, -1.0))
    logprobs = torch.full(batch.tokens.shape, -0.75, dtype=dtype)  # both are exact in half precision
    for found in (
        make("turn")(logprobs, batch, torch.ones(batch.tokens.shape)),
        make("turn").evaluate(torch.full((1000,), 0.25, dtype=dtype), -torch.ones(1000), batch.layout),
    ):
        assert found.diagnostics["ratio_mean_turn"] == pytest.approx(math.exp(0.25), rel=1e-6)


def test_float32_training_dtype_is_kept():
    batch = mixed_batch()
    floats = {k: v.float() if v.is_floating_point() else v for k, v in batch.state_dict().items()}
    batch = Trajectories(**floats)
    credit = TokenGAE()(batch, torch.zeros(batch.tokens.shape))
    logprobs = (batch.behaviour_logprobs + 0.3).requires_grad_()
    got = make("turn", stabilizer=ClippingBiasNorm())(logprobs, batch, credit.advantages)
    assert credit.advantages.dtype == got.loss.dtype == got.bias_surrogate.dtype == torch.float32
