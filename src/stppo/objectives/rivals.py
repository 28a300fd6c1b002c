"""Rules of related methods, named by `_target_` in their YAML files, which say source, settings and what is
uncertain.

Not imported by `stppo.objectives`, so a run of another method does not depend on this file. Notation: r =
pi_theta / pi_old of a token, l = log r in nats, w the objective's ratio, W = exp(sum l) of a trajectory, A
the advantage, sg a stop-gradient. Most methods differ from PPO in what stands where min(w A, clip(w) A)
stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from stppo.checks import in_range, one_of
from stppo.objectives.advantages import Estimate, LeaveOneOut, TokenGAE
from stppo.objectives.clipping import Bounds, Clip, ClipRule
from stppo.objectives.ratios import Ratio, RatioRule, safe_exp
from stppo.objectives.stabilizers import Divisor, Stabilizer, TokenPenalty
from stppo.objectives.surrogates import (
    ClippedWeight,
    Mask,
    MinClip,
    SurrogateRule,
    Terms,
    Weight,
    beyond,
)
from stppo.objectives.tokens import Tokens
from stppo.trajectories import SEGMENTS, Layout


# --- credit ----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class LeaveOneOutKept(LeaveOneOut):
    """LOOP (arXiv 2502.01600): leave-one-out, and trajectories with |A| < drop_below are not trained on."""

    drop_below: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, "drop_below", 0.0)

    def estimate(self, trajectories, layout, values):
        advantages = super().estimate(trajectories, layout, values).advantages
        largest = advantages.new_zeros(len(trajectories))
        largest = largest.scatter_reduce(0, layout.rows, advantages.abs(), "amax")
        return Estimate(advantages, kept=largest >= self.drop_below)


@dataclass(frozen=True, kw_only=True)
class VarianceFiltered(TokenGAE):
    """StarPO-S (RAGEN): token GAE, and only the questions whose returns vary most are trained on.

    The smallest set of groups (equal `group_ids`) whose standard deviations of the return make up at least
    `top_p` of the batch's sum; all of them where no return varies. The critic learns from all trajectories.
    """

    group_size: int = 8
    top_p: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, "top_p", 0.0, 1.0, low_open=True)
        if not isinstance(self.group_size, int) or self.group_size < 2:
            raise ValueError(f"VarianceFiltered.group_size={self.group_size!r}: a group needs at least 2")

    def estimate(self, trajectories, layout, values):
        groups, of_row = trajectories.group_ids.unique(return_inverse=True)
        spread = torch.stack(
            [trajectories.returns[of_row == g].std(correction=0) for g in range(len(groups))]
        )
        order = spread.argsort(descending=True, stable=True)
        before = spread[order].cumsum(0) - spread[order]
        kept = torch.zeros(len(groups), dtype=torch.bool)
        kept[order] = (before < self.top_p * spread.sum()) & (spread[order] > 0)
        return super().estimate(trajectories, layout, values)._replace(kept=kept[of_row])


# --- ratio -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StandardisedByTurn(RatioRule):
    """After GRPO-Guard (arXiv 2510.22319), our adaptation to text: exp((l - m_k) (s + floor) / (s_k + floor))
    for a token of turn k.

    m_k and s_k are mean and standard deviation of the batch's log-ratios in k-th turns, s that of all centred
    log-ratios: every turn drifts about 1 and reaches the clip as often as the others. The statistics take no
    gradient. floor (nats) keeps a turn that has hardly moved from being blown up."""

    granularity: ClassVar[str] = "token"
    sees_batch: ClassVar[bool] = True
    floor: float = 0.05

    def __post_init__(self) -> None:
        in_range(self, "floor", 0.0, low_open=True)

    def ratio(self, log_ratio: Tensor, layout: Layout) -> Tensor:
        first = layout.row_turns.cumsum(0) - layout.row_turns
        place = layout.turns - first[layout.rows]
        values = log_ratio.detach()
        count = place.bincount().clamp_min(1).to(values.dtype)
        mean = values.new_zeros(len(count)).index_add(0, place, values) / count
        centred = values - mean[place]
        square = values.new_zeros(len(count)).index_add(0, place, centred.square()) / count
        scale = (centred.square().mean().sqrt() + self.floor) / (square.sqrt() + self.floor)
        return safe_exp((log_ratio - mean[place]) * scale[place])


@dataclass(frozen=True)
class PrefixRatio(RatioRule):
    """The ratio of everything that the trajectory's agent wrote up to and including token t, over its s <= t
    agent tokens:

        product    exp(sum l_s)    the exact correction of token t for the state that it was drawn in
        geometric  exp(mean l_s)   the same, length-normalised

    MinPRO (arXiv 2601.22718) and CTPO (arXiv 2605.07331) argue for the prefix; what else they do is not here.
    The first token's is its token ratio, the last one's that of the whole trajectory. Every token has a ratio
    of its own."""

    granularity: ClassVar[str] = "token"
    aggregation: str = "geometric"

    def __post_init__(self) -> None:
        one_of(self, "aggregation", ("geometric", "product"))

    def ratio(self, log_ratio: Tensor, layout: Layout) -> Tensor:
        rows = layout.segments("sequence")
        place = torch.arange(len(layout.rows), device=log_ratio.device) - rows.share(rows.starts)
        # One row of the table a trajectory: a cumulative sum over all would carry rounding, and inf, into the
        # next one.
        table = log_ratio.new_zeros(layout.shape[0], int(layout.row_lengths.max()))
        total = table.index_put((layout.rows, place), log_ratio).cumsum(1)[layout.rows, place]
        return safe_exp(total if self.aggregation == "product" else total / (place + 1))


# --- clip ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EntropyClip(Clip):
    """SSPO (arXiv 2511.04256): wider bounds for sentences of high entropy, narrower for those of low entropy.

    Both epsilons are multiplied by the sentence's mean entropy over the minibatch's, held within [1 / most,
    most]; most = 1 is a fixed clip. The paper's schedule is not public: this one is ours."""

    sees_batch: ClassVar[bool] = True
    most: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, "most", 1.0)

    def bounds(self, tokens: Tokens) -> Bounds:
        entropy, sentences = tokens.known("entropy"), tokens.layout.segments("sentence")
        of_sentence = sentences.share(sentences.mean(entropy))
        width = of_sentence / entropy.mean().clamp_min(torch.finfo(entropy.dtype).tiny)
        width = width.clamp(1 / self.most, self.most)
        return Bounds(1 - self.epsilon_low * width, 1 + self.epsilon_high * width)


@dataclass(frozen=True)
class BalancedClip(ClipRule):
    """BAPO (arXiv 2510.18927): bounds that move until positive advantages have enough weight in the
    minibatch.

    Beginning with [low, high], the lower bound rises by `step` to at most `low_most`, then the upper one to
    at most `high_most`, and stops as soon as the target is met. P and N are the sums of |term| over positive
    and negative A:

        share   P / (P + N) >= target, over terms that keep a gradient: a clipped token no longer counts
                (ours, see bapo.yaml)
        ratio   P / N >= target, over all terms, a clipped one with the bound's value: as the authors' code
                has it (there a higher lower bound makes N larger, so that only the upper one can help)
    """

    sees_batch: ClassVar[bool] = True
    rule: str = "share"
    target: float = 0.5
    low: float = 0.6
    low_most: float = 0.9
    high: float = 1.2
    high_most: float = 3.0
    step: float = 0.05

    def __post_init__(self) -> None:
        one_of(self, "rule", ("share", "ratio"))
        in_range(self, "target", 0.0, 1.0 if self.rule == "share" else float("inf"))
        in_range(self, "low", 0.0, 1.0)
        in_range(self, "low_most", self.low, 1.0)
        in_range(self, "high", 1.0)
        in_range(self, "high_most", self.high)
        in_range(self, "step", 0.0, low_open=True)

    def bounds(self, tokens: Tokens) -> Bounds:
        low, high = self.low, self.high
        while not self._met(tokens, Bounds(low, high)):
            if low < self.low_most:
                low = min(low + self.step, self.low_most)
            elif high < self.high_most:
                high = min(high + self.step, self.high_most)
            else:
                break
        return Bounds(low, high)

    def _met(self, tokens: Tokens, bounds: Bounds) -> bool:
        ratio, advantages = tokens.ratio, tokens.advantages
        if self.rule == "share":
            mass = (ratio * advantages).abs().masked_fill(beyond(tokens, bounds), 0.0)
        else:
            held = torch.where(advantages >= 0, ratio.clamp(max=bounds.high), ratio.clamp(min=bounds.low))
            mass = (held * advantages).abs()
        positive, negative = mass[advantages > 0].sum(), mass[advantages < 0].sum()
        whole = positive + negative if self.rule == "share" else negative
        return bool(positive >= self.target * whole)


@dataclass(frozen=True)
class TaperedClip(ClipRule):
    """TOPR (arXiv 2503.14286), for `ClippedWeight`: weight 1 for A > 0, min(w, most) for A <= 0 (most 0: no
    failure counts)."""

    most: float = 1.0

    def __post_init__(self) -> None:
        in_range(self, "most", 0.0)

    def bounds(self, tokens: Tokens) -> Bounds:
        positive = tokens.advantages > 0
        one = torch.ones_like(tokens.ratio)
        return Bounds(one.where(positive, 0 * one), one.where(positive, self.most * one))


# --- surrogate: a weight -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Unweighted(Weight):
    """REINFORCE: f = 1, the plain A log pi whatever the data's age. No token counts as clipped, but C is not
    0: it is what leaving the ratio out changes."""

    def factor(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        return torch.ones_like(tokens.ratio)

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        found = super().terms(tokens, bounds)
        return found._replace(clipped=torch.zeros_like(found.clipped))


@dataclass(frozen=True)
class GammaWeight(Weight):
    """VESPO (arXiv 2602.10693): f = W^k exp(lambda (1 - W)), k and lambda by the advantage's sign; 1 at W =
    1.

    Smooth, so a token counts as clipped where f is less than half of w.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        for name in ("k_positive", "lambda_positive", "k_negative", "lambda_negative"):
            in_range(self, name, 0.0)

    def factor(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        log_w = tokens.layout.row_sum(tokens.log_ratio.detach())[tokens.layout.rows]
        positive = tokens.advantages >= 0
        k, rate = (
            torch.where(positive, *pair).to(log_w.dtype)
            for pair in (
                (self.k_positive, self.k_negative),
                (self.lambda_positive, self.lambda_negative),
            )
        )
        return (k * log_w - rate * log_w.expm1()).exp()

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        factor = self.factor(tokens, bounds)
        return super().terms(tokens, bounds)._replace(clipped=factor < 0.5 * tokens.ratio.detach())


@dataclass(frozen=True)
class OffPolicyBaseline(ClippedWeight):
    """VCPO (arXiv 2602.17616): a truncated weight, and A measured from its mean over trajectories weighted by
    W^2.

    The authors' optimal baseline also weighs by the squared norm of each trajectory's score, and is taken per
    group; leaving the first out and taking the minibatch is ours. The clip holds the weight: Clip with
    epsilon_low = 1 bounds it from above alone."""

    sees_batch: ClassVar[bool] = True

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        layout = tokens.layout
        weights = (2 * layout.row_sum(tokens.log_ratio.detach())).softmax(0)
        baseline = (weights * layout.row_mean(tokens.advantages)).sum()
        return super().terms(replace(tokens, advantages=tokens.advantages - baseline), bounds)


# --- surrogate: a mask -------------------------------------------------------------------------------
@dataclass(frozen=True)
class RangeMask(Mask):
    """IcePop: no gradient for a token out of range on either side, whatever its advantage's sign."""

    def keep(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        return ~bounds.out_of_range(tokens.ratio.detach())


@dataclass(frozen=True)
class DecidedBy(Mask):
    """Ours, to take PPO's ratio apart: the weight is the ratio as configured, but whether a token counts is
    decided, with the clip's bounds and as PPO's min would, by the geometric ratio of its segment of this kind
    (`stppo.trajectories.SEGMENTS`).

    Every token keeps its own advantage and score: a turn ratio's gradient would give its tokens the turn's
    mean advantage. weighed: False puts the weight 1 in place of the ratio. most: the weight is held at or
    below it."""

    granularity: str = "turn"
    weighed: bool = True
    most: float = float("inf")

    def __post_init__(self) -> None:
        one_of(self, "granularity", SEGMENTS)
        in_range(self, "most", 0.0, low_open=True)

    def keep(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        decisive = Ratio(self.granularity)(tokens.log_ratio.detach(), tokens.layout)
        return ~beyond(replace(tokens, ratio=decisive), bounds)

    def factor(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        found = super().factor(tokens, bounds)
        return (found if self.weighed else (found > 0).to(found.dtype)).clamp(max=self.most)


@dataclass(frozen=True)
class SequenceMask(Mask):
    """Off-policy sequence masking (DeepSeek-V3.2): beside the clip, drops a trajectory's tokens with A < 0
    where the mean of log(pi_old / pi) over the trajectory passes delta (nats)."""

    delta: float = 0.5

    def __post_init__(self) -> None:
        in_range(self, "delta", 0.0)

    def keep(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        layout = tokens.layout
        far = -layout.row_mean(tokens.log_ratio.detach())[layout.rows] > self.delta
        return super().keep(tokens, bounds) & ~((tokens.advantages < 0) & far)


@dataclass(frozen=True)
class ProbabilityMask(Mask):
    """DPPO (arXiv 2602.04879), total variation of the drawn token: no gradient where A > 0 and pi - pi_old >
    delta, or A < 0 and pi_old - pi > delta; the others' weights are cut at `cap`. The clip's bounds change
    nothing."""

    delta: float = 0.2
    cap: float = 20.0

    def __post_init__(self) -> None:
        in_range(self, "delta", 0.0, 1.0)
        in_range(self, "cap", 1.0)

    def keep(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        moved = tokens.known("behaviour_logprobs").exp() * tokens.log_ratio.detach().expm1()
        return tokens.advantages.sign() * moved <= self.delta

    def factor(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        return super().factor(tokens, bounds).clamp(max=self.cap)


@dataclass(frozen=True)
class SecondMomentMask(Mask):
    """M2PO (arXiv 2510.01161): of the tokens that lead further away (A > 0 with r > 1, A < 0 with r < 1)
    drops those with the largest l^2, as few as bring the mean l^2 of the rest down to tau. The clip's bounds
    change nothing."""

    sees_batch: ClassVar[bool] = True
    tau: float = 0.04

    def __post_init__(self) -> None:
        in_range(self, "tau", 0.0)

    def keep(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        log_ratio = tokens.log_ratio.detach()
        away = (tokens.advantages * log_ratio > 0).nonzero().squeeze(1)
        squared, order = log_ratio[away].square().sort(stable=True)
        # Sorted, the mean of the smallest n grows with n.
        mean = squared.cumsum(0) / torch.arange(1, len(squared) + 1, device=squared.device)
        keep = torch.ones_like(log_ratio, dtype=torch.bool)
        keep[away[order[mean > self.tau]]] = False
        return keep


# --- surrogate: others -------------------------------------------------------------------------------
@dataclass(frozen=True)
class DualClip(MinClip):
    """Dual-clip PPO (arXiv 1912.09729): beside the clip, the term of a token with A < 0 is held at c A beyond
    w = c, and has no gradient there."""

    c: float = 3.0

    def __post_init__(self) -> None:
        in_range(self, "c", 1.0, low_open=True)

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        found = super().terms(tokens, bounds)
        held = (tokens.advantages < 0) & (tokens.ratio.detach() > self.c)
        return found._replace(
            terms=torch.where(held, self.c * tokens.advantages, found.terms), clipped=found.clipped | held
        )


@dataclass(frozen=True)
class GeometricClip(SurrogateRule):
    """GMPO (arXiv 2507.20673): A exp(mean_t l'_t) over the trajectory, where l'_t is l_t held at +c for A > 0
    and at
    -c for A < 0. Unrestricted: A exp(mean l), GSPO's ratio. The clip's bounds change nothing."""

    c: float = 0.4

    def __post_init__(self) -> None:
        in_range(self, "c", 0.0, low_open=True)

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        layout, logs, advantages = tokens.layout, tokens.log_ratio, tokens.advantages
        clipped = advantages.sign() * logs.detach() > self.c
        held = torch.where(clipped, self.c * advantages.sign(), logs)
        restricted, free = (layout.row_mean(values).exp()[layout.rows] for values in (held, logs))
        return Terms(restricted * advantages, free * advantages, clipped)


@dataclass(frozen=True)
class LastTurnsFirst(MinClip):
    """SeeUPO (arXiv 2602.06554): the trainer steps on one turn at a time, the last first; the advantages of a
    turn are multiplied by the later turns' ratios so far, clip(prod of geometric turn ratios, 1 - delta, 1 +
    delta)."""

    one_turn_at_a_time: ClassVar[bool] = True
    delta: float = 0.2

    def __post_init__(self) -> None:
        in_range(self, "delta", 0.0, 1.0)

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        layout = tokens.layout
        logs = layout.turn_mean(tokens.log_ratio.detach())
        upto = logs.cumsum(0)
        last = upto[layout.row_turns.cumsum(0) - 1]  # of each trajectory
        later = (last[layout.turn_rows] - upto).exp().clamp(1 - self.delta, 1 + self.delta)
        return super().terms(replace(tokens, advantages=tokens.advantages * later[layout.turns]), bounds)


@dataclass(frozen=True)
class NormaliseWhenClipped(MinClip):
    """Reading C of v2's CTN, from a public re-implementation: the minibatch's advantages are normalised (mean
    0, standard deviation 1 over its tokens) while more than `threshold` of its tokens are clipped, else left
    alone."""

    sees_batch: ClassVar[bool] = True
    threshold: float = 0.2

    def __post_init__(self) -> None:
        in_range(self, "threshold", 0.0, 1.0)

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        advantages = tokens.advantages
        if beyond(tokens, bounds).double().mean() > self.threshold:
            spread = advantages.std(correction=min(1, len(advantages) - 1))
            advantages = (advantages - advantages.mean()) / (spread + 1e-8)
        return super().terms(replace(tokens, advantages=advantages), bounds)


# --- stabiliser --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class KeepLikelihood(TokenPenalty):
    """LLDS (arXiv 2512.04220): coefficient x mean over agent tokens of max(0, -l), counted in turns that have
    lost likelihood as a whole (sum of l < 0) and at tokens with A >= 0."""

    coefficient: float = 0.2

    def __post_init__(self) -> None:
        in_range(self, "coefficient", 0.0)

    def costs(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        layout, lost = tokens.layout, -tokens.log_ratio
        counts = (layout.turn_sum(lost.detach()) > 0)[layout.turns] & (tokens.advantages >= 0)
        return self.coefficient * lost.clamp(min=0) * counts


@dataclass(frozen=True)
class SampleSizeStep(Divisor):
    """VCPO (arXiv 2602.17616): learning rate x sqrt(ESS / B), of the full trajectory ratios of the
    minibatch."""

    estimator: ClassVar[str] = "effective_sample_size"
    divides: ClassVar[str] = "step"

    def divisor(self, value: float) -> float:
        return value**-0.5


@dataclass(frozen=True)
class GradientClip(Divisor):
    """The plain null: gradient norm clipped at `max_norm`, the divisor max(1, norm / max_norm)."""

    estimator: ClassVar[str] = "gradient_norm"
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        in_range(self, "max_norm", 0.0, low_open=True)

    def divisor(self, value: float) -> float:
        return 1.0 if value <= self.max_norm else value / self.max_norm


@dataclass(frozen=True)
class KLStop(Stabilizer):
    """The plain null: ends an iteration's updates after the first whose minibatch has kl_behaviour_k3, nats
    per token, above `target_kl`; the same as `training.target_kl`, as a method's own knob."""

    target_kl: float = 0.05

    def __post_init__(self) -> None:
        in_range(self, "target_kl", 0.0, low_open=True)

    def ends_iteration(self, row: dict[str, float]) -> bool:
        return row["kl_behaviour_k3"] > self.target_kl
