"""What a method's gradient gives up: its bias and its noise against the true policy gradient, free of its
scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from stppo.objectives import (
    BatchBaseline,
    CreditRule,
    GroupNormalised,
    MinClip,
    NoStabilizer,
    Objective,
    Ratio,
    TokenGAE,
)
from stppo.objectives.rivals_2026 import EqualStates
from stppo.oracle.estimators import UNCLIPPED, surrogate_gradient
from stppo.oracle.exact import Oracle


@dataclass(frozen=True)
class Quality:
    """A method's gradient from batches of `batch_size` trajectories, compared with the true gradient of J.

    Objectives differ in scale (whitening, 1/|y|), which Adam undoes, so bias and noise are relative:

    bias        |a E[g] - grad J| / |grad J| at the best scale a: the sine of the angle between the two; 1
                where E[g] points away from grad J
    scale       <E[g], grad J> / |grad J|^2: 1 where the expected gradient is the true one and not only
                parallel to it
    noise       sqrt(trace Cov[g]) / |E[g]|, of one batch
    efficiency  E<g, grad J> / sqrt(E|g|^2 |grad J|^2) = cosine(E[g], grad J) / sqrt(1 + noise^2): how well
                one batch's gradient points uphill, 1 at best
    sampled     True: from sampled batches, since the method looks at a whole batch; else exact
    """

    bias: float
    scale: float
    noise: float
    efficiency: float
    sampled: bool


def gradient_quality(
    oracle: Oracle,
    objective: Objective,
    theta: Tensor,
    batch_size: int = 16,
    n_batches: int = 400,
    seed: int = 0,
) -> Quality:
    """Quality of an objective's gradient at theta (P,) on data of the oracle's behaviour policy.

    Credit is what the method's own rule gives in an infinite batch with an exact critic
    (`limiting_advantages`), so the objective alone is judged. Methods whose divisor or rules look at a batch
    are measured on `n_batches` sampled ones. ValueError for a credit that has no known limit."""
    advantages = limiting_advantages(oracle, objective.credit)
    rules = (objective.ratio, objective.clip, objective.surrogate)
    generator = torch.Generator().manual_seed(seed)
    looks = any(rule.sees_batch for rule in rules)
    sampled = looks or objective.stabilizer.estimator is not None
    if sampled:
        n = n_batches if looks else 10 * n_batches  # look-ups in the tree's table cost little
        mean, variance = _sampled(oracle, objective, theta, advantages, batch_size, n, looks, generator)
    else:
        estimator = surrogate_gradient(oracle, objective, theta, advantages)
        if estimator.kl_gradients.shape[1]:
            raise ValueError("CtnKL outside: its batches are not drawn here; use formula='inside'")
        mean, variance = estimator.mean, estimator.variance / batch_size
    truth = oracle.policy_gradient(theta)
    cosine, scale = float(cosine_similarity(mean, truth, dim=0)), float(mean @ truth / truth.square().sum())
    noise = variance**0.5 / float(mean.norm())
    bias = (1 - min(1.0, cosine**2)) ** 0.5 if cosine > 0 else 1.0
    return Quality(bias, scale, noise, cosine / (1 + noise**2) ** 0.5, sampled)


def limiting_advantages(oracle: Oracle, rule: CreditRule) -> Tensor:
    """(M,) advantages of a credit rule in an infinite batch, with the behaviour policy's exact values as
    critic.

    Which trajectories a rule keeps plays no part here. ValueError for a rule whose limit is not known.
    """
    if isinstance(rule, TokenGAE):
        advantages = oracle.credit(TokenGAE(gamma=rule.gamma, lam=rule.lam, whiten=False))
    elif rule.needs_critic and rule.group_size == 1:
        advantages = oracle.credit(replace(rule, whiten=False, center=False, pooling="token"))
    elif rule.group_size > 1 and not rule.needs_critic:
        advantages = oracle.group_advantages(normalise=isinstance(rule, GroupNormalised))
        if isinstance(rule, EqualStates):
            of_turns = rule.of_turns(oracle.trajectories, oracle.probabilities)
            advantages = advantages + rule.step_weight * of_turns[oracle.layout.turns]
    elif isinstance(rule, BatchBaseline):
        returns = oracle.tree.rewards
        advantages = (returns - oracle.probabilities @ returns)[oracle.layout.rows]
    else:
        raise ValueError(f"{type(rule).__name__}: its advantages in an infinite batch are not known")
    if rule.whiten:
        advantages = oracle.whiten(advantages)
    if rule.pooling != "token":
        pool = oracle.layout.turn_mean if rule.pooling == "turn_mean" else oracle.layout.turn_sum
        advantages = pool(advantages)[oracle.layout.turns]
    return advantages


class BatchGradient:
    """The ascent direction of a batch of trajectories: the objective on that batch, as training would see it,
    at theta (P,) with advantages (M,) and the stabiliser's divisor. What batches share is computed once."""

    def __init__(self, oracle: Oracle, objective: Objective, theta: Tensor, advantages: Tensor) -> None:
        layout, tree = oracle.layout, oracle.tree
        self.oracle, self.objective = oracle, objective
        self.scores = oracle.policy.jacobian(theta)
        self.edges = layout.scatter(tree.edges)
        self.logprobs = layout.scatter(oracle.token_logprobs(theta.detach()))
        self.advantages = layout.scatter(advantages)
        self.entropy = layout.scatter(oracle.token_entropy(theta))

    def __call__(self, rows: Tensor) -> Tensor:
        """(P,), of the batch whose rows in the tree are given (B,)."""
        batch, objective = self.oracle.trajectories.select(rows), self.objective
        layout, width = batch.layout, batch.tokens.shape[1]
        logprobs, advantages, entropy, edges = (
            layout.gather(x[rows, :width]) for x in (self.logprobs, self.advantages, self.entropy, self.edges)
        )
        behaviour = layout.gather(batch.behaviour_logprobs)
        log_ratio = (logprobs - behaviour).detach().requires_grad_()
        known = (behaviour, entropy, None, 0.5 * log_ratio.detach())
        found = objective.evaluate(log_ratio, advantages, layout, None, *known)
        (coefficients,) = torch.autograd.grad(-found.loss, log_ratio, retain_graph=True)
        gradient = coefficients @ self.scores[edges]
        estimator = objective.stabilizer.estimator
        if estimator is None:
            return gradient
        if estimator == "gradient_norm":
            value = gradient.norm()
        elif estimator in ("exact", "last_block"):  # a table of logits is one block
            (bias,) = torch.autograd.grad(found.bias_surrogate, log_ratio)
            value = (bias @ self.scores[edges]).norm()
        else:
            value = found.diagnostics[estimator]
        return gradient / objective.stabilizer.divisor(float(value))


def _sampled(
    oracle: Oracle,
    objective: Objective,
    theta: Tensor,
    advantages: Tensor,
    batch_size: int,
    n_batches: int,
    looks_at_batch: bool,
    generator: torch.Generator,
) -> tuple[Tensor, float]:
    """Mean (P,) and variance (trace) over sampled batches, with a control variate: the objective without what
    looks at a batch (no clip, no divisor), whose moments are known exactly. On fresh data the two are one."""
    free = replace(objective, stabilizer=NoStabilizer())
    if looks_at_batch:
        ratio = objective.ratio if not objective.ratio.sees_batch else Ratio(objective.ratio.granularity)
        free = replace(free, ratio=ratio, clip=UNCLIPPED, surrogate=MinClip())
    control = surrogate_gradient(oracle, free, theta, advantages)
    shape = (n_batches, batch_size)
    drawn = torch.multinomial(
        oracle.probabilities, n_batches * batch_size, replacement=True, generator=generator
    ).view(shape)
    if looks_at_batch:
        batch = BatchGradient(oracle, objective, theta, advantages)
        gradients = torch.stack([batch(rows) for rows in drawn])
    else:
        gradients = surrogate_gradient(oracle, objective, theta, advantages).batches(drawn).gradients
    beside = control.batches(drawn).gradients
    centred, other = gradients - gradients.mean(0), beside - beside.mean(0)
    slope = float((centred * other).sum() / other.square().sum())
    mean = gradients.mean(0) + slope * (control.mean - beside.mean(0))
    known, found = control.variance / batch_size, float(other.square().sum()) / (n_batches - 1)
    variance = float(centred.square().sum()) / (n_batches - 1) + slope**2 * (known - found)
    return mean, variance
