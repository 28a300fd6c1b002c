"""Exact moments of surrogate-gradient estimators, their clipping bias, and the terms of Lemma 4.2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stppo.objectives import (
    Clip,
    CtnKL,
    MinClip,
    Objective,
    Penalty,
    SampleWeight,
    Terms,
    TokenPenalty,
    Tokens,
    loss_weights,
)
from stppo.objectives.clipping import Bounds
from stppo.oracle.exact import Oracle

NORMS = ("exact", "last_block", "logprob", "logit")  # of the clipping bias; a table of logits is one block
UNCLIPPED = Clip(epsilon_low=math.inf, epsilon_high=math.inf)
TABLE_LIMIT = 100_000_000  # numbers in the (N, P) table of gradients
BATCH_LIMIT = 2_000_000  # batches that `batch_moments` goes through
CHUNK = 4_000_000  # numbers gathered at a time


# --- the expected surrogate: one graph from theta to J ------------------------------------------
@dataclass(frozen=True, eq=False)
class ExpectedSurrogate:
    """Expectations over the behaviour policy's trajectories; the tensors are scalars that carry theta's
    graph.

    surrogate      J(theta) = E[sum_t weight_t term_t], to maximise; by default
                   term_t = min(w_t A_t, clip(w_t) A_t)
    bias           its gradient is the clipping bias C(theta)
    penalty        what the stabiliser subtracts from J; 0 for those without a penalty
    clip_fraction  share of agent tokens whose term is clipped (expected clipped over expected tokens)
    """

    surrogate: Tensor
    bias: Tensor
    penalty: Tensor
    clip_fraction: float


def expected_surrogate(
    oracle: Oracle,
    objective: Objective,
    theta: Tensor,
    advantages: Tensor,
    probabilities: Tensor | None = None,
) -> ExpectedSurrogate:
    """What `Objective.surrogate` estimates from a batch, exactly.

    theta (P,); advantages (M,), one for each agent token of the tree. Loss weights are those of one
    trajectory among infinitely many, so token_mean divides by the expected number of agent tokens.
    probabilities (N,) of the trajectories: default the behaviour policy's; the shares of a sampled batch's
    trajectories give that batch's own surrogate. ValueError for advantages of another shape or not finite,
    and for rules that have no expectation over a tree: those that look at a whole batch (`sees_batch`), and
    penalties other than CtnKL and means over tokens."""
    layout = oracle.layout
    p = oracle.probabilities if probabilities is None else probabilities
    log_ratio = oracle.log_ratio(theta)
    tokens, terms, bounds = _terms(oracle, objective, theta, log_ratio, advantages)
    weights = p[layout.rows] * _trajectory_weights(oracle, objective, p)
    penalty = log_ratio.new_zeros(())
    if isinstance(objective.stabilizer, TokenPenalty):
        costs = objective.stabilizer.costs(tokens, bounds)
        penalty = (p[layout.rows] * costs).sum() / (p * layout.row_lengths).sum()
    if isinstance(objective.stabilizer, CtnKL):
        share, kl = objective.stabilizer.parts(tokens, bounds)
        inside = objective.stabilizer.formula == "inside"
        penalty = (p * share * kl).sum() if inside else (p * share).sum() * (p * kl).sum()
        penalty = objective.stabilizer.coefficient * penalty
    chance = p[layout.rows]
    return ExpectedSurrogate(
        surrogate=(weights * terms.terms).sum(),
        bias=(weights * (terms.unrestricted - terms.terms)).sum(),
        penalty=penalty,
        clip_fraction=float((chance * terms.clipped).sum() / chance.sum()),
    )


def _terms(
    oracle: Oracle, objective: Objective, theta: Tensor, log_ratio: Tensor, advantages: Tensor
) -> tuple[Tokens, Terms, Bounds]:
    for rule in (objective.ratio, objective.clip, objective.surrogate):
        if rule.sees_batch:
            raise ValueError(f"{type(rule).__name__}: looks at a whole batch, which the tree is not")
    known = isinstance(objective.stabilizer, CtnKL | TokenPenalty)
    if isinstance(objective.stabilizer, Penalty) and not known:
        raise ValueError(
            f"{type(objective.stabilizer).__name__}: its expectation over the tree is not known; of "
            "penalties the oracle knows CtnKL and means over tokens alone"
        )
    expected = (len(oracle.tree.edges),)
    if tuple(advantages.shape) != expected:
        raise ValueError(f"advantages: expected shape {expected}, got {tuple(advantages.shape)}")
    if not advantages.isfinite().all():
        raise ValueError("advantages: must be finite")
    behaviour = oracle.behaviour_log_probs.reshape(-1)[oracle.tree.edges]
    entropy = oracle.token_entropy(theta)
    halfway = 0.5 * log_ratio.detach()  # a proximal policy, for the rules that read one
    tokens = objective.tokens(log_ratio, advantages, oracle.layout, behaviour, entropy, halfway)
    return tokens, *objective.terms(tokens)


def _trajectory_weights(oracle: Oracle, objective: Objective, probabilities: Tensor) -> Tensor:
    """(M,) loss weights of each trajectory by itself, before its probability."""
    if objective.loss_aggregation == "token_mean":
        expected_length = (probabilities * oracle.layout.row_lengths).sum()
        return torch.ones(len(oracle.tree.edges), dtype=torch.float64) / expected_length
    weights = loss_weights(oracle.tree.agent_mask, objective.loss_aggregation, torch.float64)
    return oracle.layout.gather(weights) * len(oracle.tree)


# --- the estimator: one gradient per trajectory --------------------------------------------------
class BatchGradients(NamedTuple):
    """Gradients (n, P) of n batches after the stabiliser; their bias norms (n,) and divisors (n,)."""

    gradients: Tensor
    bias_norms: Tensor
    divisors: Tensor


@dataclass(frozen=True, eq=False)
class SurrogateGradient:
    """The estimator that a batch of B trajectories makes of the surrogate's gradient, ascent direction.

    A batch's gradient is the mean of its rows of `gradients`, divided by the stabiliser's N(||C||), C being
    the mean of its rows of `biases`. N trajectories, P parameters; norms are L2."""

    objective: Objective
    probabilities: Tensor  # (N,)
    gradients: Tensor  # (N, P) of the clipped surrogate of one trajectory (CtnKL inside: minus its penalty)
    biases: Tensor  # (N, P) of what clipping took from its terms: the clipping bias
    squared_logprob: Tensor  # (N,) squared norm of the bias in log-probability space
    squared_logit: Tensor  # (N,) and in logit space
    shares: Tensor  # (N,) out-of-range share, for CtnKL outside; else 0
    kl_gradients: Tensor  # (N, P) of the trajectory's mean KL estimate, for CtnKL outside; else (N, 0)
    log_weights: Tensor  # (N,) log of the full trajectory ratio
    clip_fraction: float

    # --- without the stabiliser's divisor ---
    @property
    def mean(self) -> Tensor:
        """(P,) expectation for any batch size, before any divisor (and before a CtnKL penalty outside)."""
        return self.probabilities @ self.gradients

    @property
    def covariance(self) -> Tensor:
        """(P, P) covariance for a batch of one, before any divisor; a batch of B has 1/B of it."""
        return _covariance(self.probabilities, self.gradients)

    @property
    def variance(self) -> float:
        """Trace of `covariance`, without making it."""
        return _variance(self.probabilities, self.gradients)

    @property
    def clipping_bias(self) -> Tensor:
        """(P,) C(theta)"""
        return self.probabilities @ self.biases

    @property
    def clipping_bias_covariance(self) -> Tensor:
        """(P, P) of a batch of one."""
        return _covariance(self.probabilities, self.biases)

    @property
    def clipping_bias_variance(self) -> float:
        """Its trace; E||C_B||^2 = ||C||^2 + trace / B is why a batch's norm is biased upward."""
        return _variance(self.probabilities, self.biases)

    # --- with it ---
    def limit(self) -> Tensor:
        """(P,) the stabilised gradient of an infinite batch.

        ValueError for the norm estimators `logprob` and `logit`, which go to zero as the batch grows.
        """
        check_has_limit(self.objective)
        p = self.probabilities
        gradient = self.mean - self._outside_penalty(p @ self.shares, p @ self.kl_gradients)
        return gradient / self.objective.stabilizer.divisor(float(self.clipping_bias.norm()))

    def batch_moments(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Exact expectation (P,) and covariance (P, P) of the stabilised gradient of `batch_size`
        trajectories.

        A divisor mixes the trajectories of a batch, so all N^batch_size batches are gone through; ValueError
        beyond BATCH_LIMIT of them. Estimators without one need no enumeration.
        """
        if not self._mixes:
            return self.mean, self.covariance / batch_size
        n = len(self.probabilities)
        if n**batch_size > BATCH_LIMIT:
            raise ValueError(
                f"batch_size={batch_size}: {n}^{batch_size} = {n**batch_size:,} batches, the limit is "
                f"{BATCH_LIMIT:,}; use a smaller TokenMDP, or `minibatches`, which samples"
            )
        total = torch.zeros_like(self.mean)
        second = torch.zeros(len(total), len(total), dtype=torch.float64)
        for first in range(0, n**batch_size, self._chunk(batch_size)):
            numbers = torch.arange(first, min(n**batch_size, first + self._chunk(batch_size)))
            index = torch.stack([numbers // n**i % n for i in range(batch_size)], 1)
            weight = self.probabilities[index].prod(1)
            gradients = self.batches(index).gradients
            total += weight @ gradients
            second += (weight[:, None] * gradients).T @ gradients
        return total, second - torch.outer(total, total)

    def minibatches(self, batch_size: int, n: int, generator: torch.Generator) -> BatchGradients:
        """`n` batches of `batch_size` trajectories drawn from the behaviour policy."""
        index = torch.multinomial(self.probabilities, n * batch_size, replacement=True, generator=generator)
        step = self._chunk(batch_size)
        parts = [self.batches(rows) for rows in index.view(n, batch_size).split(step)]
        return BatchGradients(*(torch.cat(part) for part in zip(*parts, strict=True)))

    @property
    def _mixes(self) -> bool:
        stabilizer = self.objective.stabilizer
        return stabilizer.estimator is not None or self.kl_gradients.shape[1] > 0

    def _chunk(self, batch_size: int) -> int:
        return max(1, CHUNK // (batch_size * self.gradients.shape[1]))

    def batches(self, index: Tensor) -> BatchGradients:
        """The stabilised gradients of n given batches of B trajectories, by their rows in the tree (n, B)."""
        gradients = self.gradients[index].mean(1)
        if self.kl_gradients.shape[1]:
            gradients = gradients - self._outside_penalty(
                self.shares[index].mean(1, keepdim=True), self.kl_gradients[index].mean(1)
            )
        norms, stabilizer = self._bias_norms(index), self.objective.stabilizer
        read = norms
        if stabilizer.estimator == "gradient_norm":
            read = gradients.norm(dim=1)
        elif stabilizer.estimator == "effective_sample_size":
            read = 1 / (index.shape[1] * self.log_weights[index].softmax(1).square().sum(1))
        divisors = torch.tensor([stabilizer.divisor(x) for x in read.tolist()], dtype=torch.float64)
        return BatchGradients(gradients / divisors[:, None], norms, divisors)

    def _bias_norms(self, index: Tensor) -> Tensor:
        estimator = self.objective.stabilizer.estimator
        if estimator in ("logprob", "logit"):
            squared = self.squared_logprob if estimator == "logprob" else self.squared_logit
            return squared[index].sum(1).sqrt() / index.shape[1]
        return self.biases[index].mean(1).norm(dim=1)

    def _outside_penalty(self, share: Tensor, kl_gradient: Tensor) -> Tensor | float:
        if not self.kl_gradients.shape[1]:
            return 0.0
        return self.objective.stabilizer.coefficient * share * kl_gradient


def surrogate_gradient(
    oracle: Oracle, objective: Objective, theta: Tensor, advantages: Tensor
) -> SurrogateGradient:
    """Every trajectory's own gradient of `objective` at theta (P,), for advantages (M,).

    Use the clip `UNCLIPPED` for the estimator without clipping. ValueError where the table of N gradients
    with P numbers would pass TABLE_LIMIT, or for advantages of another shape or not finite."""
    tree, layout = oracle.tree, oracle.layout
    if len(tree) * oracle.policy.n_parameters > TABLE_LIMIT:
        raise ValueError(
            f"surrogate_gradient: {len(tree):,} trajectories x {oracle.policy.n_parameters:,} parameters is "
            f"beyond {TABLE_LIMIT:,} numbers; use a smaller TokenMDP or policy, or `expected_surrogate`"
        )
    _check_estimator(objective, (*NORMS, "gradient_norm", "effective_sample_size"))
    scores = oracle.policy.jacobian(theta)
    log_ratio = oracle.log_ratio(theta.detach()).detach().requires_grad_()
    tokens, terms, bounds = _terms(oracle, objective, theta, log_ratio, advantages)
    weights = _trajectory_weights(oracle, objective, oracle.probabilities)
    value = (weights * terms.terms).sum()
    if isinstance(objective.stabilizer, TokenPenalty):
        expected_length = (oracle.probabilities * layout.row_lengths).sum()
        value = value - objective.stabilizer.costs(tokens, bounds).sum() / expected_length
    bias = (weights * (terms.unrestricted - terms.terms)).sum()
    shares = torch.zeros(len(tree), dtype=torch.float64)
    kl_gradients = torch.zeros(len(tree), 0, dtype=torch.float64)
    if isinstance(objective.stabilizer, CtnKL):
        shares, kl = objective.stabilizer.parts(tokens, bounds)
        if objective.stabilizer.formula == "inside":
            value = value - objective.stabilizer.coefficient * (shares * kl).sum()
        else:
            kl_gradients = _by_trajectory(oracle, _gradient(kl.sum(), log_ratio), scores)
    bias_coefficients = _gradient(bias, log_ratio)
    chance = oracle.probabilities[layout.rows]
    squared = bias_coefficients.square()
    return SurrogateGradient(
        objective=objective,
        probabilities=oracle.probabilities,
        gradients=_by_trajectory(oracle, _gradient(value, log_ratio), scores),
        biases=_by_trajectory(oracle, bias_coefficients, scores),
        squared_logprob=layout.row_sum(squared),
        squared_logit=layout.row_sum(squared * _logit_factor(oracle, theta)),
        shares=shares,
        kl_gradients=kl_gradients,
        log_weights=layout.row_sum(log_ratio.detach()),
        clip_fraction=float((chance * terms.clipped).sum() / chance.sum()),
    )


def _gradient(value: Tensor, log_ratio: Tensor) -> Tensor:
    return torch.autograd.grad(value, log_ratio, retain_graph=True)[0]


def _by_trajectory(oracle: Oracle, coefficients: Tensor, scores: Tensor) -> Tensor:
    """(M,) d/d log pi of each token, (H * A, P) scores -> (N, P)"""
    if not coefficients.any():  # nothing is clipped, say
        return scores.new_zeros(len(oracle.tree), scores.shape[1])
    index = torch.stack([oracle.layout.rows, oracle.tree.edges])
    shape = (len(oracle.tree), oracle.tree.n_edges)
    return torch.sparse_coo_tensor(index, coefficients, shape, check_invariants=False) @ scores


def _logit_factor(oracle: Oracle, theta: Tensor) -> Tensor:
    """(M,) squared norm of d log p(y) / d logits = e_y - p, at every token"""
    p = oracle.policy.log_probs(theta.detach()).exp()
    norms = (torch.eye(p.shape[1], dtype=p.dtype) - p[:, None, :]).square().sum(2)
    return norms.reshape(-1)[oracle.tree.edges]


def _covariance(probabilities: Tensor, rows: Tensor) -> Tensor:
    centred = rows - probabilities @ rows
    return (probabilities[:, None] * centred).T @ centred


def _variance(probabilities: Tensor, rows: Tensor) -> float:
    return float(probabilities @ (rows - probabilities @ rows).square().sum(1))


def check_has_limit(objective: Objective) -> None:
    """ValueError for the norm estimators `logprob` and `logit`, which vanish in an infinite batch, and for
    divisors by anything else than a norm of the clipping bias."""
    _check_estimator(objective, NORMS)
    if objective.stabilizer.estimator in ("logprob", "logit"):
        raise ValueError(
            f"estimator={objective.stabilizer.estimator!r}: its norm goes to 0 as the batch grows, so there "
            "is no limit; use estimator='exact', or SurrogateGradient.batch_moments or minibatches"
        )


def _check_estimator(objective: Objective, known: tuple[str, ...]) -> None:
    stabilizer = objective.stabilizer
    if stabilizer.estimator not in (None, *known):
        raise ValueError(
            f"{type(stabilizer).__name__}.estimator={stabilizer.estimator!r}: the oracle divides here by "
            f"functions of {', '.join(known)} alone"
        )
    if stabilizer.over_median:
        raise ValueError(
            f"{type(stabilizer).__name__}.over_median=True: a run's median, which the oracle has none of"
        )
    if isinstance(stabilizer, SampleWeight):
        raise ValueError(f"{type(stabilizer).__name__}: the oracle weighs no samples")


# --- Lemma 4.2 -----------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Decomposition:
    """Lemma 4.2 (v1, as summaries give it), each (P,):

    gradient = exact_advantage + advantage_error - clipping_bias

    gradient         of the clipped surrogate, by autograd from theta on
    exact_advantage  E[sum_t weight_t A_t grad w_t], A the behaviour policy's exact token advantage: the
                     gradient of the unclipped surrogate, which is not the policy gradient unless theta is
                     theta_old
    advantage_error  E[sum_t weight_t (estimate_t - A_t) grad w_t]
    clipping_bias    C(theta) = E[sum over clipped t of weight_t estimate_t grad w_t]
    """

    gradient: Tensor
    exact_advantage: Tensor
    advantage_error: Tensor
    clipping_bias: Tensor

    @property
    def residual(self) -> float:
        """Largest absolute difference of the two sides."""
        right = self.exact_advantage + self.advantage_error - self.clipping_bias
        return float((self.gradient - right).abs().max())


def decompose(oracle: Oracle, objective: Objective, theta: Tensor, advantages: Tensor) -> Decomposition:
    """The terms of Lemma 4.2 at theta (P,) for estimated advantages (M,), without any stabiliser.

    The right-hand terms come from the closed form of grad w and the scores, the left from autograd. Errors as
    in `expected_surrogate`; ValueError for surrogates other than MinClip, of which the lemma does not speak.
    """
    if objective.surrogate != MinClip():
        name = type(objective.surrogate).__name__
        raise ValueError(f"decompose: Lemma 4.2 is about MinClip, got the surrogate {name}")
    theta = theta.detach().requires_grad_()
    left = expected_surrogate(oracle, objective, theta, advantages).surrogate
    scores = oracle.policy.jacobian(theta)
    log_ratio = oracle.log_ratio(theta).detach()
    tokens, terms, _ = _terms(oracle, objective, theta, log_ratio, advantages)
    ratio = tokens.ratio
    weights = oracle.probabilities[oracle.layout.rows]
    weights = weights * _trajectory_weights(oracle, objective, oracle.probabilities)

    def term(credit: Tensor) -> Tensor:
        coefficients = objective.ratio.pullback(log_ratio, ratio, weights * credit, oracle.layout)
        per_choice = torch.zeros(oracle.tree.n_edges, dtype=torch.float64)
        return per_choice.index_add(0, oracle.tree.edges, coefficients) @ scores

    exact = oracle.token_advantages()
    return Decomposition(
        gradient=torch.autograd.grad(left, theta)[0],
        exact_advantage=term(exact),
        advantage_error=term(advantages - exact),
        clipping_bias=term(tokens.advantages * terms.clipped),
    )
