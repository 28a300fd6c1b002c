"""Identities and limits of the related methods of 2026; their gradients are held to their formulas beside the others'."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from stppo.config.loading import build
from stppo.objectives import Clip, GroupNormalised, loss_weights
from stppo.objectives.rivals_2026 import (
    Decoupled,
    EqualStates,
    GeometricMask,
    GrowingClip,
    QuadraticShift,
    TrainedCritic,
    token_sample_size,
)
from stppo.oracle import Oracle, TabularSoftmax, TokenMDP
from stppo.oracle.comparison import limiting_advantages
from stppo.trajectories import Trajectories
from tests.objectives_cases import TabularPolicy, batch_from_turns, mixed_batch, normal, off_policy
from tests.test_objectives_rivals import FILES, load, with_rule


class Case:
    """One off-policy batch, on which methods are compared with the same advantages and proximal policy."""

    def __init__(self, turns=None, spread=0.8):
        batch = mixed_batch() if turns is None else batch_from_turns(turns)
        self.policy = TabularPolicy()
        self.batch = off_policy(batch, self.policy, spread)
        self.new = self.policy.logprobs(batch.tokens).detach()
        self.old = self.batch.behaviour_logprobs
        self.advantages = normal(batch.rewards, 21) * batch.agent_mask

    def gradient(self, objective, proximal=None):
        """(B, T) of the loss by the log-probs."""
        logprobs = self.new.clone().requires_grad_()
        proximal = self.old if proximal is None else proximal
        found = objective(logprobs, self.batch, self.advantages, proximal=proximal)
        return torch.autograd.grad(found.loss, logprobs)[0]


def changed(name, **sections):
    """The YAML's objective with other keys in some sections, or another loss aggregation."""
    section = FILES[name]["objective"]
    for part, change in sections.items():
        section = section | {part: section[part] | change if isinstance(change, dict) else change}
    return build(section, "algorithm.objective")


NOTHING_CLIPS = {"epsilon_low": 1e9, "epsilon_high": 1e9}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (changed("decoupled_ppo"), load("grpo")),
        (changed("a3po"), load("grpo")),
        (with_rule("drpo", "surrogate", delta=1e15), changed("grpo", clip=NOTHING_CLIPS, loss_aggregation="token_mean")),
        (with_rule("geometric_mask", "surrogate", width=1.0), None),
        (with_rule("vaco", "surrogate", delta=1e9), changed("minirl", clip=NOTHING_CLIPS)),
        (with_rule("dro", "stabilizer", coefficient=0.0), changed("rloo", loss_aggregation="token_mean")),
        (with_rule("prime_rl", "stabilizer", coefficient=0.0), with_rule("dppo", "surrogate", cap=math.inf)),
        (with_rule("sao", "clip", epsilon_low=0.5, epsilon_high=4.0), changed("icepop", loss_aggregation="token_mean")),
        (load("gigpo"), changed("grpo", loss_aggregation="token_mean")),
        (load("sampo"), load("gspo")),
    ],
    ids=["decoupled", "a3po", "drpo", "geometric", "vaco", "dro", "prime_rl", "sao", "gigpo", "sampo"],
)  # fmt: skip
def test_without_its_own_part_it_is_another_method(left, right):
    """decoupled, A-3PO: where the proximal policy is the one that sampled. The geometric mask at width 1: trajectories
    whose geometric ratio passes 2 alone are dropped, none here."""
    case = Case()
    right = right or changed("minirl", clip={"epsilon_low": 0.2, "epsilon_high": 0.2})
    torch.testing.assert_close(case.gradient(left), case.gradient(right), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["minpro", "ctpo"])
def test_trajectories_of_one_token_have_no_prefix(name):
    case = Case([[1]] * 6)
    plain = changed("grpo", loss_aggregation="token_mean")
    if name == "ctpo":  # its bounds at t = 1, and the one for A < 0 above
        low, high = math.exp(-0.025), math.exp(0.05)
        plain = changed(
            "grpo", loss_aggregation="token_mean", clip={"epsilon_low": 1 - low, "epsilon_high": high - 1}
        )
        case.advantages = case.advantages.abs()
    torch.testing.assert_close(case.gradient(load(name)), case.gradient(plain), rtol=0, atol=1e-14)


def test_a_prefix_weighs_by_what_came_before_in_its_trajectory_alone():
    """By loops: exp(sum) of CTPO, and MinPRO's least ratio; the gradient falls on the token itself."""
    case = Case(spread=0.3)
    wide = changed("ctpo", clip={"low": 50.0, "high": 50.0})
    free = changed("minpro", clip=NOTHING_CLIPS)
    got, least = case.gradient(wide), case.gradient(free)
    tokens = int(case.batch.agent_mask.sum())
    for row, mask in enumerate(case.batch.agent_mask):
        logs = (case.new - case.old)[row][mask].tolist()
        a = case.advantages[row][mask].tolist()
        for t in range(len(logs)):
            w = math.exp(sum(logs[: t + 1]))
            assert got[row][mask][t].item() == pytest.approx(-w * a[t] / tokens, rel=1e-9)
            w = math.exp(logs[t] + min(logs[:t], default=0.0))
            assert least[row][mask][t].item() == pytest.approx(-w * a[t] / tokens, rel=1e-9)


def test_bounds_grow_with_the_root_of_the_place():
    layout = mixed_batch().layout
    objective = load("ctpo")
    tokens = objective.tokens(torch.zeros(len(layout.rows)).double(), torch.ones(len(layout.rows)), layout)
    bounds = GrowingClip(0.1, 0.2)(tokens)
    place = torch.cat([torch.arange(1, int(n) + 1) for n in layout.row_lengths]).double()
    torch.testing.assert_close(bounds.low, torch.exp(-0.1 * place.sqrt()))
    torch.testing.assert_close(bounds.high, torch.exp(0.2 * place.sqrt()))


def test_at_the_proximal_policy_nothing_is_clipped_and_the_weight_corrects():
    """pi_prox = pi: p = 1, so the gradient is sg(r) A grad log pi, but for tokens whose weight passes the cap."""
    case = Case(spread=1.5)
    ratio = (case.new - case.old).exp()
    kept = case.batch.agent_mask & (ratio <= 5)
    assert 0 < int(kept.sum()) < int(case.batch.agent_mask.sum())
    weights = loss_weights(case.batch.agent_mask, "trajectory_mean", torch.float64)
    expected = -weights * ratio * case.advantages * kept
    torch.testing.assert_close(case.gradient(load("decoupled_ppo"), case.new), expected, rtol=1e-12, atol=1e-15)  # fmt: skip


def test_a_rule_that_reads_a_proximal_policy_asks_for_it():
    case, objective = Case(), load("decoupled_ppo")
    with pytest.raises(ValueError, match="proximal: a rule of this objective reads it"):
        objective(case.new, case.batch, case.advantages)
    mask = case.batch.agent_mask
    given = objective.loss(case.new, case.old, case.advantages, mask, proximal_logprobs=case.new)
    assert given.loss == objective(case.new, case.batch, case.advantages, proximal=case.new).loss


def test_drpo_is_zero_where_dppos_mask_begins_and_turns_back_beyond():
    """At A = 1, pi_old = .25: pi - pi_old = delta is r = 1 + 4 delta."""
    layout = batch_from_turns([[1]] * 3).layout
    objective = with_rule("drpo", "surrogate", delta=0.2)
    log_ratio = torch.tensor([1.4, 1.8, 2.6], dtype=torch.float64).log().requires_grad_()
    found = objective.evaluate(
        log_ratio, torch.ones(3), layout, behaviour_logprobs=torch.full((3,), 0.25).double().log()
    )
    (gradient,) = torch.autograd.grad(-found.loss, log_ratio)
    torch.testing.assert_close(gradient * 3, torch.tensor([0.7, 0.0, -2.6]).double(), rtol=0, atol=1e-6)
    assert found.diagnostics["clip_fraction"] == pytest.approx(2 / 3)


def test_the_sample_size_is_its_formula_and_stays_within_its_limits():
    logs = normal(torch.zeros(50), 3, 0.7)
    r = logs.exp()
    assert token_sample_size(logs).item() == pytest.approx(float(r.sum() ** 2 / (50 * r.square().sum())))
    assert token_sample_size(torch.zeros(50)) == 1
    far = torch.zeros(50)
    far[7] = 1000.0  # a ratio that no float holds has all the weight
    assert token_sample_size(far).item() == pytest.approx(1 / 50)
    far[7] = math.inf
    assert token_sample_size(far).isnan(), "passed on, not hidden"


def test_p3o_far_away_is_bounded_by_the_sample_size_and_pulled_back():
    """One ratio of e^5 among ones: its weight is 1 / n or so, and the KL term outweighs its advantage."""
    layout = batch_from_turns([[4]] * 5).layout
    log_ratio = torch.zeros(20).double()
    log_ratio[3] = 5.0
    log_ratio.requires_grad_()
    found = load("p3o").evaluate(log_ratio, torch.ones(20), layout)
    (gradient,) = torch.autograd.grad(-found.ppo_loss, log_ratio, retain_graph=True)
    size = float(token_sample_size(log_ratio))
    assert 1 / 20 < size < 0.07
    torch.testing.assert_close(gradient, torch.full_like(gradient, size / 20))
    (whole,) = torch.autograd.grad(-found.loss, log_ratio)
    assert whole[3] < 0 < whole[0]
    beyond = log_ratio.detach().float()
    beyond[3] = 100.0
    assert not load("p3o").evaluate(beyond, torch.ones(20), layout).loss.isfinite(), "a run ends, and says so"


# --- GiGPO's credit --------------------------------------------------------------------------------------------


def searches(rng, n=8, group_size=4):
    """Trajectories of one to three turns of two tokens, between observations of one token out of six."""
    batch = batch_from_turns([[2] * (1 + int(rng.integers(3))) for _ in range(n)], gap=1, group_size=group_size)  # fmt: skip
    tokens = torch.from_numpy(rng.integers(6, size=batch.tokens.shape))
    tokens[:, 0] = batch.group_ids  # the question
    rewards = batch.rewards.sign()
    return Trajectories(**batch.state_dict() | {"tokens": tokens, "rewards": rewards})


def by_loops(batch, gamma, weight, eps=1e-6):
    turns = defaultdict(list)
    for row in range(len(batch)):
        ids, group = batch.turn_ids[row].tolist(), int(batch.group_ids[row])
        n = int(batch.n_turns[row])
        paid = [sum(batch.rewards[row, t].item() for t in range(len(ids)) if ids[t] == k) for k in range(n)]
        for k in range(n):
            start = ids.index(k)
            before = max((t + 1 for t in range(start) if ids[t] == k - 1), default=0) if k else 0
            state = (group, k > 0, tuple(batch.tokens[row, before:start].tolist()))
            turns[state].append((row, k, sum(gamma**j * x for j, x in enumerate(paid[k:]))))
    whole = GroupNormalised(group_size=4)(batch).advantages
    out, alone = whole.clone(), 0
    for members in turns.values():
        values = torch.tensor([g for _, _, g in members], dtype=torch.float64)
        alone += len(values) == 1
        for row, k, g in members:
            on = batch.turn_ids[row] == k
            if len(values) > 1 and values.min() < values.max():
                out[row][on] += weight * (g - values.mean()) / (values.std() + eps)
    return out, whole, alone


@pytest.mark.parametrize("seed", range(4))
def test_turns_that_began_alike_are_compared(seed):
    batch = searches(np.random.default_rng(seed))
    expected, whole, alone = by_loops(batch, 0.9, 0.7)
    got = EqualStates(group_size=4, step_weight=0.7, gamma=0.9)(batch).advantages
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert alone and not torch.allclose(got, whole)
    off = EqualStates(group_size=4, step_weight=0.0)(batch).advantages
    torch.testing.assert_close(off, whole, rtol=0, atol=0)


def test_groups_of_unequal_size_are_one_clear_line():
    batch = batch_from_turns([[2]] * 6, group_size=4)
    with pytest.raises(ValueError, match="EqualStates: group 1 has 2 trajectories in this batch") as error:
        EqualStates(group_size=4)(batch)
    assert "\n" not in str(error.value)


def test_in_a_large_batch_the_credit_is_its_limit():
    """10,000 trajectories of the tree in one group a prompt against `limiting_advantages`."""
    mdp = TokenMDP(n_words=1, max_turn_tokens=2, max_turns=2, n_observations=2, n_prompts=1)
    tree = mdp.enumerate()
    policy = TabularSoftmax(tree)
    oracle = Oracle(tree, policy, policy.initial(1, 0.7))
    rule = EqualStates(group_size=10_000)
    rows = oracle.sample(10_000, torch.Generator().manual_seed(0))
    batch = oracle.trajectories.select(rows)
    got = batch.layout.gather(rule(batch).advantages)
    expected = limiting_advantages(oracle, rule)
    by_row = torch.split(expected, oracle.layout.row_lengths.tolist())
    wanted = torch.cat([by_row[row] for row in rows.tolist()])
    assert (got - wanted).square().mean().sqrt() < 0.06 * wanted.std()
    alike = torch.cat(
        [torch.split(oracle.group_advantages(), oracle.layout.row_lengths.tolist())[r] for r in rows]
    )
    assert (alike - wanted).square().mean().sqrt() > 0.3 * wanted.std(), "the turns' part is seen"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Decoupled(proximal="guessed"),
            "Decoupled.proximal='guessed': must be one of scored, interp",
        ),
        (lambda: Decoupled(cap=0.5), "Decoupled.cap=0.5"),
        (lambda: QuadraticShift(delta=0.0), "QuadraticShift.delta=0.0"),
        (lambda: GeometricMask(width=0.0), "GeometricMask.width=0.0"),
        (lambda: GrowingClip(low=-1.0), "GrowingClip.low=-1.0"),
        (lambda: EqualStates(step_weight=-1.0), "EqualStates.step_weight=-1.0"),
        (lambda: EqualStates(gamma=1.5), r"EqualStates.gamma=1.5: must be a number in \[0, 1\]"),
        (lambda: TrainedCritic(critic_passes=0), "critic_passes must be a whole number of at least 1"),
    ],
)
def test_bad_options_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_published_values():
    assert load("sao").clip == Clip(0.8, 3.0) and load("sao").credit.group_size == 1
    assert load("ctpo").clip == GrowingClip(0.025, 0.05)
