"""Worlds, policies and objectives that the oracle's tests share, and the oracle's sums written as plain loops."""

import math
from itertools import product

import torch

from stppo.objectives import Clip, ClippingBiasNorm, CtnKL, NoStabilizer, Objective, Ratio, TokenGAE
from stppo.oracle import NeuralSoftmax, Oracle, TabularSoftmax, TokenMDP

RATIOS = [
    Ratio("token"),
    *(Ratio(level, how) for level in ("turn", "sequence") for how in ("geometric", "arithmetic", "product")),
]
KINDS = ("tabular", "neural")  # of policies
CLIPS = {"clipped": Clip(), "unclipped": Clip(math.inf, math.inf)}
STABILIZERS = [
    NoStabilizer(),
    ClippingBiasNorm(c0=0.01),
    ClippingBiasNorm(c0=0.01, form="one_plus", estimator="logprob"),
    ClippingBiasNorm(c0=0.01, form="floor", estimator="logit"),
    CtnKL(),
    CtnKL(formula="outside", kl="behaviour_to_policy"),
]


def objective(
    ratio=RATIOS[0], clip=CLIPS["clipped"], stabilizer=STABILIZERS[0], aggregation="trajectory_mean"
):
    return Objective(TokenGAE(whiten=False), ratio, clip, stabilizer, aggregation)


def tiny_oracle(kind="tabular", seed=0):
    """32 trajectories; the policy's parameters are shared by several histories."""
    return _oracle(TokenMDP(1, 2, 2, 2, 1, seed=seed), kind, seed)


def small_oracle(kind="tabular", seed=0):
    """1,334 trajectories with turns of 1 to 3 tokens."""
    return _oracle(TokenMDP(seed=seed), kind, seed)


def _oracle(mdp, kind, seed):
    tree = mdp.enumerate()
    policy = TabularSoftmax(tree) if kind == "tabular" else NeuralSoftmax(tree)
    return Oracle(tree, policy, policy.initial(seed + 1, 0.7))


def moved(oracle, amount=0.4):
    """Parameters some way from the behaviour policy's: about a third of the tokens are clipped."""
    return oracle.behaviour + amount * oracle.policy.initial(seed=9)


def wrong_critic(oracle, size=0.2, lam=1.0):
    """(M,) token GAE of a critic whose values are off by noise."""
    random = torch.Generator().manual_seed(3)
    noise = torch.randn(oracle.tree.n_histories, generator=random, dtype=torch.float64)
    return oracle.credit(TokenGAE(whiten=False, lam=lam), oracle.values() + size * noise)


def segments(oracle, row, granularity):
    """Flat indices of the agent tokens of one trajectory, grouped by the segment that shares a ratio."""
    layout = oracle.layout
    tokens = (layout.rows == row).nonzero().squeeze(1).tolist()
    if granularity == "token":
        return [[t] for t in tokens]
    if granularity == "sequence":
        return [tokens]
    groups = {}
    for t in tokens:
        groups.setdefault(int(layout.turns[t]), []).append(t)
    return list(groups.values())


def ratio_and_gradient(log_ratio, scores, segment, aggregation):
    """w and grad w of one segment, straight from the definitions; scores (M, P)."""
    l = [float(log_ratio[t]) for t in segment]
    n = len(segment)
    if aggregation == "geometric":
        w = math.exp(sum(l) / n)
        return w, w * sum(scores[t] for t in segment) / n
    if aggregation == "arithmetic":
        return sum(map(math.exp, l)) / n, sum(
            math.exp(x) * scores[t] for x, t in zip(l, segment, strict=True)
        ) / n
    w = math.exp(sum(l))
    return w, w * sum(scores[t] for t in segment)


def loss_weight(oracle, row, token, aggregation):
    """Weight of a token in its trajectory, before the trajectory's probability."""
    if aggregation == "trajectory_mean":
        return 1.0 / len(segments(oracle, row, "sequence")[0])
    if aggregation == "token_mean":
        expected = sum(
            float(oracle.probabilities[i]) * len(segments(oracle, i, "sequence")[0])
            for i in range(len(oracle.tree))
        )
        return 1.0 / expected
    turns = segments(oracle, row, "turn")
    own = next(turn for turn in turns if token in turn)
    return 1.0 / (len(turns) * len(own))


def all_terms():
    """Every ratio with every loss aggregation."""
    return list(product(RATIOS, ("trajectory_mean", "token_mean", "turn_mean")))


def numerical_gradient(function, theta, step=1e-6):
    """Central differences, one parameter at a time."""
    out = torch.zeros_like(theta)
    for i in range(len(theta)):
        shift = torch.zeros_like(theta)
        shift[i] = step
        out[i] = (function(theta + shift) - function(theta - shift)) / (2 * step)
    return out


def close(got, expected, tolerance=1e-12):
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
