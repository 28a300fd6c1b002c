"""Every algorithm's YAML: identities that hold for all of them, and the formula of each related method written once more.

Objectives are built from the files, without Hydra. A file that is added is covered by the first part by itself.
"""

import itertools
import math

import numpy as np
import pytest
import torch

import stppo
from stppo.config import files as config_files
from stppo.config.algorithms import PAPER, RIVALS
from stppo.config.loading import build
from stppo.objectives import GroupCentred, Ratio, Weight
from stppo.objectives.rivals import (
    BalancedClip,
    DecidedBy,
    GradientClip,
    KLStop,
    LeaveOneOutKept,
    PrefixRatio,
    SampleSizeStep,
    VarianceFiltered,
)
from stppo.trajectories import Layout, Trajectories
from tests.objectives_cases import (
    TabularPolicy,
    batch_from_turns,
    mixed_batch,
    normal,
    off_policy,
    sentences_of,
)

FILES = {file.stem: config_files.read(file) for file in config_files.option_files("algorithm")}
ALL = [name for name, content in FILES.items() if "objective" in content]


def load(name):
    return build(FILES[name]["objective"], "algorithm.objective")


def advantages_of(objective, batch):
    """The credit's own, on groups of 2 where it compares groups."""
    credit = objective.credit
    if credit.group_size > 1:
        credit = type(credit)(**{**vars(credit), "group_size": 2})
    return credit(batch, normal(batch.rewards, 5)).advantages


# --- all algorithms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_on_fresh_data_nothing_is_restricted_and_the_gradient_is_reinforce(name):
    """w = 1: the gradient is sum_t weight_t A_t grad log pi_t, A pooled over the ratio's segment where the term is a
    function of that ratio."""
    objective, policy = load(name), TabularPolicy()
    batch = off_policy(mixed_batch(group_size=2), policy, spread=0.0)
    logprobs, layout = policy.logprobs(batch.tokens), batch.layout
    advantages = advantages_of(objective, batch)
    known = {"entropy": normal(batch.rewards, 9).abs(), "proximal": logprobs}
    got = objective(logprobs, batch, advantages, **known)
    a = layout.gather(advantages)
    if (
        name == "vcpo"
    ):  # measures advantages from their mean over the minibatch, weighted by W^2, here equally
        a = a - layout.row_mean(a).mean()
    if name == "successes_only":  # takes nothing from the others, on fresh data either
        a = a.clamp(min=0.0)
    else:
        assert not got.any_clipped and got.diagnostics["clip_fraction"] == 0
        assert policy.gradient(got.bias_surrogate).norm() < 1e-14
    if objective.clip.clip_on == "turn":
        a = layout.turn_mean(a)[layout.turns]
    count = {
        "trajectory_mean": len(batch) * layout.row_lengths[layout.rows],
        "token_mean": torch.full_like(layout.rows, len(layout.rows)),
        "turn_mean": len(batch) * layout.row_turns[layout.rows] * layout.turn_lengths[layout.turns],
    }[objective.loss_aggregation]
    weighted = a / count
    if not isinstance(objective.surrogate, Weight):
        segments = layout.segments(objective.ratio.granularity)
        pool = segments.sum if getattr(objective.ratio, "aggregation", "") == "product" else segments.mean
        weighted = segments.share(pool(weighted))
    expected = policy.gradient((weighted * layout.gather(logprobs)).sum())
    torch.testing.assert_close(policy.gradient(-got.loss), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_off_policy_the_gradient_is_finite_on_agent_tokens_alone_whatever_the_order(name):
    objective, policy = load(name), TabularPolicy()
    batch = off_policy(mixed_batch(group_size=2), policy, spread=0.4)
    advantages, entropy = advantages_of(objective, batch), normal(batch.rewards, 9).abs()

    def outcome(rows):
        part = batch.select(rows)
        logprobs = policy.logprobs(batch.tokens)[rows].detach()[:, : part.tokens.shape[1]].requires_grad_()
        off = ~part.agent_mask
        dirty = Trajectories(
            **part.state_dict() | {"behaviour_logprobs": part.behaviour_logprobs.masked_fill(off, math.nan)}
        )
        a, h = (x[rows, : part.tokens.shape[1]].masked_fill(off, math.inf) for x in (advantages, entropy))
        near = dirty.behaviour_logprobs + 0.5 * (logprobs.detach() - dirty.behaviour_logprobs)
        got = objective(logprobs, dirty, a, entropy=h, proximal=near)
        (gradient,) = torch.autograd.grad(got.loss, logprobs)
        assert all(isinstance(value, float) for value in got.diagnostics.values())
        assert gradient.isfinite().all() and not gradient[off].any()
        assert gradient.abs().sum() > 0 or got.diagnostics["clip_fraction"] == 1
        return got.loss.item(), gradient

    order = torch.tensor([3, 0, 5, 1, 4, 2])
    (loss, gradient), (again, permuted) = outcome(torch.arange(6)), outcome(order)
    assert again == pytest.approx(loss, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(permuted, gradient[order][:, : permuted.shape[1]], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_knob_is_declared_and_both_ends_of_its_prior_build(name):
    said = FILES[name].get("prior")
    if name in (*PAPER, *RIVALS):
        assert said is not None
    if said in (None, config_files.NO_KNOB):
        return
    prior = config_files.Prior.of(said)
    built = set()
    for share in (0.0, 0.5, 1.0):
        objective = FILES[name]["objective"]
        for override in prior.overrides(prior.at(share)):
            key, _, value = override.removeprefix("algorithm.objective.").partition("=")
            section, field = key.split(".")
            assert field in objective[section], key
            objective = objective | {section: objective[section] | {field: float(value)}}
        built.add(build(objective, "algorithm.objective"))
    assert len(built) == 3
    published = [config_files.value(FILES[name], key.split(".")) for key in prior.keys]
    assert all(prior.low <= value <= prior.high for value in published), "the published value lies outside"


# --- the formula of each method, by loops, against central differences -----------------------------------------


class Setting:
    """One off-policy batch; log-ratios l, advantages, entropies, log pi_old as numpy arrays over agent tokens."""

    def __init__(self):
        self.batch = batch = batch_from_turns([[3, 2], [4], [1, 2, 3], [2, 2]], seed=3)
        self.layout = layout = batch.layout
        n = layout.rows
        self.l, self.a = (normal(n, 5, 1.3).numpy(), normal(n, 6).numpy())
        self.h, self.b = normal(n, 8).abs().numpy(), -normal(n, 9).abs().numpy()
        self.p = normal(n, 10, 0.6).numpy()  # log pi_prox - log pi_old
        # What chance left out: a trajectory far less likely than before (7), a token that lost likelihood in a turn that
        # gained (10), one without advantage in a sentence of high entropy (13), a small step away (14), a failure with a
        # ratio above 20 (18), a trajectory as likely as before (0), a proximal policy far from the one that sampled (3).
        self.l[[7, 10, 14, 18]], self.a[[13, 18]], self.h[13] = (-4.0, -0.3, -0.3, 3.05), (0.0, -0.1), 9.0
        self.l[0], self.p[3] = 0.015 - self.l[1:5].sum(), 2.0
        self.segments = {"token": [[t] for t in range(len(n))]}
        for kind, of in {"turn": layout.turns, "sequence": layout.rows}.items():
            self.segments[kind] = [(of == s).nonzero().squeeze(1).tolist() for s in of.unique()]
        place = {int(p): t for t, p in enumerate(layout.positions)}
        width = layout.shape[1]
        self.segments["sentence"] = [
            [place[row * width + t] for t in sentence]
            for row in range(len(batch))
            for sentence in sentences_of(batch, row)
        ]

    def each(self, kind, function, values):
        """(N,): function of the token's segment"""
        out = np.zeros(len(values))
        for segment in self.segments[kind]:
            out[segment] = function(values[segment])
        return out

    def weights(self, aggregation):
        ones = np.ones(len(self.l))
        rows = len(self.segments["sequence"])
        if aggregation == "token_mean":
            return ones / len(ones)
        if aggregation == "trajectory_mean":
            return 1 / (rows * self.each("sequence", len, ones))
        turns = np.zeros(len(ones))
        for row in self.segments["sequence"]:
            turns[row] = sum(turn[0] in row for turn in self.segments["turn"])
        return 1 / (rows * turns * self.each("turn", len, ones))


def min_clip(w, a, low=0.8, high=1.2):
    return np.minimum(w * a, np.clip(w, low, high) * a)


def token(s, l):
    return np.exp(l)


def geometric(kind):
    return lambda s, l: s.each(kind, lambda x: math.exp(x.mean()), l)


def product(kind):
    return lambda s, l: s.each(kind, lambda x: math.exp(x.sum()), l)


def ppo(w=token, low=0.8, high=1.2):
    return lambda s, l: min_clip(w(s, l), s.a, low, high)


def plain(s, l):
    return s.a * l


def weighted(factor):
    """sg(factor) A log pi"""
    return lambda s, l: factor(s) * s.a * l


def dual_clip(s, l):
    terms = min_clip(np.exp(l), s.a)
    return np.where(s.a < 0, np.maximum(terms, 3.0 * s.a), terms)


def agilerl(s, l):
    return min_clip(product("turn")(s, l), s.each("turn", np.mean, s.a))


def sspo(s, l):
    width = np.clip(s.each("sentence", np.mean, s.h) / s.h.mean(), 0.5, 2.0)
    return min_clip(geometric("sentence")(s, l), s.a, 1 - 0.2 * width, 1 + 0.2 * width)


def bapo(rule):
    def bounds(s):
        r = np.exp(s.l)
        lows, highs = np.arange(0.6, 0.9001, 0.05), np.arange(1.2, 3.0001, 0.05)
        for low, high in [(low, 1.2) for low in lows] + [(0.9, high) for high in highs[1:]]:
            positive = sum(
                a * (min(w, high) if rule == "ratio" else w * (w <= high))
                for w, a in zip(r, s.a, strict=True)
                if a > 0
            )
            negative = sum(
                -a * (max(w, low) if rule == "ratio" else w * (w >= low))
                for w, a in zip(r, s.a, strict=True)
                if a < 0
            )
            if positive >= (negative if rule == "ratio" else 0.5 * (positive + negative)):
                break
        return low, high

    return lambda s, l: min_clip(np.exp(l), s.a, *bounds(s))


def guard(s, l):
    place = np.zeros(len(l), int)
    for row in s.segments["sequence"]:
        for k, turn in enumerate(turn for turn in s.segments["turn"] if turn[0] in row):
            place[turn] = k
    mean = np.array([s.l[place == k].mean() for k in range(place.max() + 1)])[place]
    spread = np.array([s.l[place == k].std() for k in range(place.max() + 1)])[place]
    whole = np.sqrt(((s.l - mean) ** 2).mean())
    return min_clip(np.exp((l - mean) * (whole + 0.05) / (spread + 0.05)), s.a)


def seeupo(s, l):
    a = s.a.copy()
    for row in s.segments["sequence"]:
        turns = [turn for turn in s.segments["turn"] if turn[0] in row]
        for k, turn in enumerate(turns):
            later = math.prod(math.exp(s.l[t].mean()) for t in turns[k + 1 :])
            a[turn] *= min(max(later, 0.8), 1.2)
    return min_clip(geometric("turn")(s, l), a)


def trajectory_weight(s):
    return product("sequence")(s, s.l)


def vespo(s):
    w, up = trajectory_weight(s), s.a >= 0
    k, rate = np.where(up, 2.0, 3.0), np.where(up, 3.0, 2.0)
    return w**k * np.exp(rate * (1 - w))


def vcpo(s, l):
    first = [row[0] for row in s.segments["sequence"]]
    w = trajectory_weight(s)
    baseline = (w[first] ** 2 * s.each("sequence", np.mean, s.a)[first]).sum() / (w[first] ** 2).sum()
    return np.minimum(w, 8.0) * (s.a - baseline) * l


def masked(keep, cap=math.inf):
    return weighted(lambda s: keep(s, np.exp(s.l)) * np.minimum(np.exp(s.l), cap))


def by_sign(low, high):
    return lambda s, r: ~(((s.a > 0) & (r > high)) | ((s.a < 0) & (r < low)))


def sequence_mask(s, r):
    return by_sign(0.8, 1.2)(s, r) & ~((s.a < 0) & (s.each("sequence", np.mean, -s.l) > 0.5))


def dppo(s, r):
    moved = np.exp(s.b + s.l) - np.exp(s.b)
    return ~(((s.a > 0) & (moved > 0.2)) | ((s.a < 0) & (-moved > 0.2)))


def m2po(s, r):
    keep = np.ones(len(r), bool)
    away = [t for t in range(len(r)) if s.a[t] * s.l[t] > 0]
    while away and np.mean(s.l[away] ** 2) > 0.04:
        keep[away.pop(int(np.argmax(s.l[away] ** 2)))] = False
    return keep


def sapo(s, l):
    tau = np.where(s.a > 0, 1.0, 1.05)
    return 4 / tau / (1 + np.exp(-tau * (np.exp(l) - 1))) * s.a


def gmpo(s, l):
    held = np.where(s.a > 0, np.minimum(l, 0.4), np.where(s.a < 0, np.maximum(l, -0.4), l))
    return geometric("sequence")(s, held) * s.a


def llds(s, l):
    lost = (s.each("turn", np.sum, -s.l) > 0) & (s.a >= 0)
    penalty = 0.2 * (np.maximum(0, -l) * lost).mean()
    return min_clip(np.exp(l), s.a) - penalty  # weights sum to 1


def reading_c(s, l):
    w = geometric("turn")(s, s.l)
    assert 1 - by_sign(0.8, 1.2)(s, w).mean() > 0.2
    return min_clip(geometric("turn")(s, l), (s.a - s.a.mean()) / s.a.std(ddof=1))


def p3o(s, l):
    r = np.exp(s.l)
    size = r.sum() ** 2 / (len(r) * (r**2).sum())
    return np.minimum(r, size) * s.a * l - (1 - size) * (np.exp(l) * l - np.exp(l) + 1)


def decoupled(s, l):
    w = np.exp(s.p)
    return np.where(w > 5, 0.0, w * min_clip(np.exp(l - s.p), s.a))


def drpo(s, l):
    r = np.exp(l)
    return r * s.a - abs(s.a) * np.exp(s.b) * (r - 1) ** 2 / (2 * 12.5)


def near_sequence(s, r):
    return by_sign(0.8, 1.2)(s, r) & (abs(geometric("sequence")(s, s.l) - 1) <= 0.01)


def vaco(s, r):
    return ~((s.each("sequence", np.mean, abs(r - 1)) > 0.1) & (s.l * s.a > 0))


def before(s, function, first):
    """(N,) function of what stands before each token in its trajectory"""
    out = np.full(len(s.l), first)
    for row in s.segments["sequence"]:
        for i, t in enumerate(row[1:], 1):
            out[t] = function(s.l[row[:i]])
    return out


def minpro(s, l):
    return before(s, lambda x: math.exp(x.min()), 1.0) * min_clip(np.exp(l), s.a)


def ctpo(s, l):
    w, root = np.exp(before(s, np.sum, 0.0) + l), np.sqrt(before(s, len, 0) + 1.0)
    high = np.exp(0.05 * root)
    terms = min_clip(w, s.a, np.exp(-0.025 * root), high)
    return np.where((s.a < 0) & (w > high), high * s.a, terms)


FORMULAS = {
    "so_ppo_ctn_c": reading_c,
    "s_ppo_cheap": ppo(),
    "st_ppo_cheap": ppo(geometric("turn")),
    "reinforce": plain,
    "reinforce_whitened": plain,
    "rloo": plain,
    "loop_token": ppo(),
    "loop_turn": ppo(product("turn")),
    "loop_trajectory": ppo(product("sequence")),
    "dr_grpo": ppo(),
    "dapo": ppo(high=1.28),
    "dual_clip": dual_clip,
    "agilerl_turn": agilerl,
    "sspo": sspo,
    "bapo": bapo("share"),
    "bapo_ratio": bapo("ratio"),
    "grpo_guard": guard,
    "seeupo": seeupo,
    "starpo_s": ppo(high=1.28),
    "topr": weighted(lambda s: np.where(s.a > 0, 1.0, np.minimum(trajectory_weight(s), 1.0))),
    "cispo": weighted(lambda s: np.minimum(np.exp(s.l), 5.0)),
    "tis": weighted(lambda s: np.minimum(np.exp(s.l), 2.0)),
    "vespo": weighted(vespo),
    "vcpo": vcpo,
    "minirl": masked(by_sign(0.8, 1.27)),
    "icepop": masked(lambda s, r: (r >= 0.5) & (r <= 5.0)),
    "sequence_mask": masked(sequence_mask),
    "dppo": masked(dppo, 20.0),
    "m2po": masked(m2po),
    "sapo": sapo,
    "gmpo": gmpo,
    "llds": llds,
    "token_ppo_fixed": ppo(),
    "turn_ppo_fixed": ppo(geometric("turn")),
    "sao": masked(lambda s, r: (r >= 0.2) & (r <= 4.0)),
    "p3o": p3o,
    "decoupled_ppo": decoupled,
    "a3po": decoupled,
    "drpo": drpo,
    "geometric_mask": masked(near_sequence),
    "dro": lambda s, l: s.a * l - 0.025 * l**2,
    "prime_rl": lambda s, l: masked(dppo)(s, l) - 0.001 * l**2,
    "vaco": masked(vaco),
    "minpro": minpro,
    "ctpo": ctpo,
    "gigpo": ppo(),
    "sampo": ppo(geometric("sequence"), 1 - 3e-4, 1 + 4e-4),
    "grad_clip": ppo(),
    "kl_stop": ppo(),
    "successes_only": weighted(lambda s: np.where(s.a > 0, 1.0, 0.0)),
    "weight_one": weighted(lambda s: by_sign(0.8, 1.2)(s, np.exp(s.l)).astype(float)),
}


@pytest.mark.parametrize("name", RIVALS)
def test_gradient_is_its_formulas_by_central_differences(name):
    """Stop-gradients in the formulas are factors at the point itself (`s.l`), which the differences leave alone."""
    s, objective = Setting(), load(name)
    weights = s.weights(objective.loss_aggregation)
    step, expected = 1e-6, np.zeros(len(s.l))
    for i, sign in itertools.product(range(len(s.l)), (1, -1)):
        moved = s.l.copy()
        moved[i] += sign * step
        expected[i] += sign * (weights @ FORMULAS[name](s, moved)) / (2 * step)
    leaf = torch.from_numpy(s.l).requires_grad_()
    known = [torch.from_numpy(x) for x in (s.b, s.h)]
    proximal = torch.from_numpy(s.p)
    got = objective.evaluate(leaf, torch.from_numpy(s.a), s.layout, None, *known, proximal=proximal)
    (gradient,) = torch.autograd.grad(-got.loss, leaf)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=0, atol=2e-8)
    assert abs(expected).max() > 1e-3
    expects_clips = name not in ("reinforce", "reinforce_whitened", "rloo", "dro")
    assert got.any_clipped and (got.diagnostics["clip_fraction"] > 0) == expects_clips


# --- identities of single methods ------------------------------------------------------------------------------


def gradients(*names, spread=1.2, change=None):
    """Loss gradients by log-probability of several methods on one off-policy batch with the same advantages."""
    policy, out = TabularPolicy(), []
    batch = off_policy(mixed_batch(group_size=2), policy, spread=spread)
    advantages = normal(batch.rewards, 21)[:, :1].expand_as(batch.rewards) * batch.agent_mask
    for name in names:
        objective = (change or {}).get(name) or load(name)
        logprobs = policy.logprobs(batch.tokens).detach().requires_grad_()
        got = objective(logprobs, batch, advantages, entropy=normal(batch.rewards, 9).abs())
        out.append(torch.autograd.grad(got.loss, logprobs)[0])
    return out


def with_rule(name, part, **options):
    section = FILES[name]["objective"]
    return build(section | {part: section[part] | options}, "algorithm.objective")


@pytest.mark.parametrize(
    ("name", "changed", "other", "what"),
    [
        ("sspo", ("clip", {"most": 1.0}), ("st_ppo", ("ratio", {"granularity": "sentence"})), "a fixed clip"),
        ("dual_clip", ("surrogate", {"c": 1e9}), ("token_ppo", None), "PPO"),
        ("sequence_mask", ("surrogate", {"delta": 1e9}), ("grpo", None), "GRPO"),
        ("m2po", ("surrogate", {"tau": 1e9}), ("minirl", ("clip", {"epsilon_low": 1e9, "epsilon_high": 1e9})), "no mask"),
        ("llds", ("stabilizer", {"coefficient": 0.0}), ("grpo", None), "GRPO"),
        ("so_ppo_ctn_c", ("surrogate", {"threshold": 1.0}), ("turn_ppo", None), "Turn-PPO"),
        ("gmpo", ("surrogate", {"c": 1e9}), ("gspo", ("clip", {"epsilon_low": 1e9, "epsilon_high": 1e9})), "unclipped GSPO"),
        ("vespo", ("surrogate", {f"{x}_{y}": 0.0 for x in ("k", "lambda") for y in ("positive", "negative")}),
         ("reinforce", ("loss_aggregation", None)), "REINFORCE"),
        ("tis", ("clip", {"epsilon_high": 4.0}), ("cispo", ("loss_aggregation", None)), "CISPO"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_limits_of_a_knob_are_other_methods(name, changed, other, what):
    left = with_rule(name, changed[0], **changed[1])
    right, option = other
    section = FILES[right]["objective"]
    if option and option[0] == "loss_aggregation":
        section = section | {"loss_aggregation": left.loss_aggregation}
    elif option:
        section = section | {option[0]: section[option[0]] | option[1]}
    ours, theirs = gradients(name, right, change={name: left, right: build(section, "algorithm.objective")})
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=lambda text: f"{what}: {text}")
    if name in ("sspo", "sequence_mask"):  # at their published values the two agree on so small a batch
        return
    plain, _ = gradients(name, right)
    assert (plain - ours).abs().max() > 1e-4, "the published knob does something"


@pytest.mark.parametrize(
    ("weight", "decides", "options"),
    [
        *(("token", "turn", {}), ("turn", "token", {}), ("turn", "turn", {}), ("token", "token", {})),
        *(("token", "token", {"weighed": False}), ("token", "turn", {"most": 1.2})),
    ],
)
def test_one_ratio_weighs_and_another_decides(weight, decides, options):
    """d loss / d log pi of a token is -(w A / length / rows) where the deciding ratio is in range, by hand; w is 1 or held
    at a value where the options say so."""
    rule = {"_target_": "stppo.objectives.rivals.DecidedBy", "granularity": decides, **options}
    section = FILES["token_ppo"]["objective"] | {"surrogate": rule}
    objective = build(section | {"ratio": section["ratio"] | {"granularity": weight}}, "objective")
    policy, batch = TabularPolicy(), mixed_batch()
    batch = off_policy(batch, policy, spread=1.2)
    advantages = normal(batch.rewards, 5) * batch.agent_mask
    logprobs = policy.logprobs(batch.tokens).detach().requires_grad_()
    (found,) = torch.autograd.grad(objective(logprobs, batch, advantages).loss, logprobs)
    kept = 0
    for row in range(len(batch)):
        agent = batch.agent_mask[row].nonzero().squeeze(1).tolist()
        turns = batch.turn_ids[row]
        difference = (logprobs - batch.behaviour_logprobs)[row].detach()
        for t in agent:
            turn = [s for s in agent if turns[s] == turns[t]]
            ratios = {"token": difference[t].exp(), "turn": difference[turn].mean().exp()}
            a, decisive = advantages[row, t], ratios[decides]
            inside = not ((a > 0 and decisive > 1.2) or (a < 0 and decisive < 0.8))
            kept += inside
            w = (
                1.0
                if not options.get("weighed", True)
                else min(float(ratios[weight]), options.get("most", math.inf))
            )
            expected = -w * a * inside / len(agent) / len(batch)
            assert found[row, t].item() == pytest.approx(float(expected), abs=1e-12)
    assert 0.2 < kept / int(batch.agent_mask.sum()) < 0.95, "both kinds of token occur"


@pytest.mark.parametrize(
    ("rule", "field", "value"),
    [
        (BalancedClip, "rule", "sum"),
        (BalancedClip, "low_most", 0.1),
        (VarianceFiltered, "top_p", 0.0),
        (VarianceFiltered, "group_size", 1),
        (GradientClip, "max_norm", -1.0),
        (KLStop, "target_kl", 0.0),
        (DecidedBy, "granularity", "word"),
        (DecidedBy, "most", 0.0),
    ],
)
def test_bad_options_are_refused_by_name(rule, field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        rule(**{field: value})


# --- credit that keeps some trajectories, divisors -------------------------------------------------------------


def with_returns(returns, group_size):
    batch = batch_from_turns([[2, 1], [3]] * (len(returns) // 2), group_size=group_size)
    rewards = torch.zeros_like(batch.rewards)
    rewards[torch.arange(len(batch)), batch.agent_mask.double().cumsum(1).argmax(1)] = torch.tensor(
        returns, dtype=torch.float64
    )
    return Trajectories(**batch.state_dict() | {"rewards": rewards})


def test_loop_drops_trajectories_without_advantage():
    batch = with_returns([1, 0, 1, 0, 1, 1, 1, 1], 4)
    credit = LeaveOneOutKept(group_size=4)(batch)
    assert credit.kept.tolist() == [True] * 4 + [False] * 4
    kept = credit.advantages[:4][batch.agent_mask[:4]]
    torch.testing.assert_close(kept.abs(), torch.full_like(kept, 2 / 3))
    assert LeaveOneOutKept(group_size=4)(with_returns([1.0] * 8, 4)).kept is None, "none left: all"
    assert GroupCentred(group_size=4)(batch).kept is None


def test_starpo_s_keeps_the_groups_that_vary_and_whitens_over_them():
    returns = [0, 1, 0, 1] + [1, 1, 1, 1] + [0, 0.2, 0, 0.2] + [0, 0.01, 0, 0.01]  # std .5, 0, .1, .005
    batch, values = with_returns(returns, 4), None
    values = normal(batch.rewards, 3)
    credit = VarianceFiltered(group_size=4, top_p=0.9)(batch, values)
    assert credit.kept.tolist() == [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4
    on = batch.agent_mask & credit.kept[:, None]
    assert credit.advantages[on].mean().abs() < 1e-12 and credit.advantages[on].std().item() == pytest.approx(
        1
    )
    assert credit.value_mask[batch.agent_mask].all(), "the critic learns from all"
    one = VarianceFiltered(group_size=4, top_p=0.8)(batch, values)
    assert one.kept.sum() == 4
    every = VarianceFiltered(group_size=4, top_p=1.0)(batch, values)
    assert every.kept.sum() == 12, "a group that agrees is never kept"


def test_divisors():
    assert SampleSizeStep().divisor(0.25) == 2.0 and SampleSizeStep().divides == "step"
    clip = GradientClip(max_norm=0.5)
    assert (clip.divisor(0.4), clip.divisor(2.0)) == (1.0, 4.0) and math.isnan(clip.divisor(math.nan))
    assert KLStop(0.1).ends_iteration({"kl_behaviour_k3": 0.2}) is True
    assert KLStop(0.1).ends_iteration({"kl_behaviour_k3": 0.05}) is False


# --- the prefix ratio ------------------------------------------------------------------------------------------

PREFIX = ("product", "geometric")


@pytest.mark.parametrize("aggregation", PREFIX)
def test_a_prefix_ratio_begins_as_the_tokens_and_ends_as_the_trajectorys(aggregation):
    layout = mixed_batch().layout
    log_ratio = normal(layout.rows, 5, 0.4)
    prefix = PrefixRatio(aggregation)(log_ratio, layout)
    rows = layout.segments("sequence")
    last = rows.starts + rows.lengths - 1
    whole = Ratio("sequence", aggregation)(log_ratio, layout)
    torch.testing.assert_close(prefix[rows.starts], log_ratio[rows.starts].exp(), rtol=1e-14, atol=0)
    torch.testing.assert_close(prefix[last], whole[last], rtol=1e-13, atol=0)
    ones = batch_from_turns([[1], [1], [1]]).layout  # trajectories of one token
    alone = normal(ones.rows, 6)
    torch.testing.assert_close(PrefixRatio(aggregation)(alone, ones), alone.exp(), rtol=0, atol=0)
    at_old = PrefixRatio(aggregation)(torch.zeros_like(log_ratio), layout)
    assert (at_old == 1).all()


@pytest.mark.parametrize("aggregation", PREFIX)
def test_gradient_of_a_prefix_ratio_by_its_formula_and_by_differences(aggregation):
    """d w_t / d l_s = w_t for s <= t of the same trajectory (over t + 1 where it is a mean), else 0."""
    layout = mixed_batch().layout
    log_ratio, rule = normal(layout.rows, 5, 0.4), PrefixRatio(aggregation)
    place = torch.cat([torch.arange(int(n)) for n in layout.row_lengths])
    same = layout.rows[:, None] == layout.rows[None, :]
    upto = (same & (place[None, :] <= place[:, None])).double()
    w = rule(log_ratio, layout)
    expected = w[:, None] * upto / (1 if aggregation == "product" else place[:, None] + 1)
    jacobian = torch.autograd.functional.jacobian(lambda l: rule(l, layout), log_ratio)
    torch.testing.assert_close(jacobian, expected, rtol=1e-12, atol=1e-14)
    weights = normal(layout.rows, 7)
    pulled = rule.pullback(log_ratio, w, weights, layout)
    torch.testing.assert_close(pulled, weights @ expected, rtol=1e-12, atol=1e-14)
    step = 1e-6
    for s in (0, 4, 9):
        moved = torch.zeros_like(log_ratio)
        moved[s] = step
        difference = (rule(log_ratio + moved, layout) - rule(log_ratio - moved, layout)) / (2 * step)
        torch.testing.assert_close(difference, expected[:, s], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("aggregation", PREFIX)
def test_a_prefix_ratio_knows_nothing_of_padding_order_or_other_trajectories(aggregation):
    turns = [[3, 1, 4], [2], [1, 1], [5, 2]]
    batch = batch_from_turns(turns)
    rule, logprobs = PrefixRatio(aggregation), normal(batch.behaviour_logprobs, 8, 0.4)
    found = batch.layout.scatter(rule(batch.layout.gather(logprobs), batch.layout))
    wide = batch_from_turns(turns, extra=9).layout
    padded = torch.nn.functional.pad(logprobs, (0, wide.shape[1] - logprobs.shape[1]), value=math.nan)
    assert torch.equal(wide.scatter(rule(wide.gather(padded), wide))[:, : found.shape[1]], found)
    order = torch.tensor([2, 0, 3, 1])
    moved = Layout.of(batch.agent_mask[order])
    assert torch.equal(moved.scatter(rule(moved.gather(logprobs[order]), moved)), found[order])
    broken = logprobs.clone()
    broken[0][batch.agent_mask[0]] = math.inf
    others = batch.layout.scatter(rule(batch.layout.gather(broken), batch.layout))
    assert torch.equal(others[1:], found[1:]) and others[0][batch.agent_mask[0]].isinf().all()


def test_a_standardised_ratio_that_overflows_has_a_gradient():
    """One token e^200 times as likely as it was, among ordinary ones."""
    objective = stppo.load("grpo_guard")
    batch = mixed_batch()
    moved = 0.1 * normal(batch.behaviour_logprobs, 1)
    row, column = batch.agent_mask.nonzero()[3].tolist()
    moved[row, column] = 200.0
    logprobs = (batch.behaviour_logprobs + moved).float().requires_grad_()
    advantages = torch.full_like(batch.behaviour_logprobs, 1.0)
    surrogate = objective.loss(logprobs, batch.behaviour_logprobs.float(), advantages, batch.agent_mask)
    surrogate.loss.backward()
    assert torch.isfinite(surrogate.loss) and torch.isfinite(logprobs.grad).all()
