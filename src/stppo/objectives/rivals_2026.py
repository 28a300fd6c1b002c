"""Rules of related methods of 2026, as `stppo.objectives.rivals` has those before them, in its notation; a
file of their own, so that no earlier method's runs depend on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from stppo.checks import in_range, whole_number
from stppo.objectives.advantages import Estimate, GroupNormalised, TokenGAE
from stppo.objectives.clipping import Bounds, ClipRule
from stppo.objectives.ratios import RatioRule, kl_policy_to_behaviour, safe_exp
from stppo.objectives.stabilizers import TokenPenalty
from stppo.objectives.surrogates import Mask, MinClip, SurrogateRule, Terms, Weight
from stppo.objectives.tokens import Tokens
from stppo.trajectories import Layout, Trajectories


# --- credit ----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class TrainedCritic(TokenGAE):
    """SAO (arXiv 2607.07508): token GAE, whose critic goes over each batch `critic_passes` times as often."""

    critic_passes: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self, "critic_passes")


@dataclass(frozen=True, kw_only=True)
class EqualStates(GroupNormalised):
    """GiGPO (arXiv 2505.10978): GRPO's advantage of the trajectory plus step_weight x that of each turn.

    A turn's is (G - mean) / (std + eps) over the turns of the question's trajectories that began in the same
    state, std with Bessel's correction, and 0 where these agree or the turn is alone. G: the rewards from
    that turn on, discounted by gamma a turn. State: what the environment wrote last, token by token; of a
    first turn the question."""

    step_weight: float = 1.0
    gamma: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, "step_weight", 0.0)
        in_range(self, "gamma", 0.0, 1.0)

    def estimate(self, trajectories, layout, values):
        whole = super().estimate(trajectories, layout, values).advantages
        return Estimate(whole + self.step_weight * self.of_turns(trajectories)[layout.turns])

    def of_turns(self, trajectories: Trajectories, probabilities: Tensor | None = None) -> Tensor:
        """(K,) advantages of turns. probabilities (B,): of trajectories that stand for infinitely many; the
        moments are then theirs."""
        layout = trajectories.layout
        to_go = trajectories.turn_rewards
        same = (layout.turn_rows[1:] == layout.turn_rows[:-1]).tolist()
        for turn in reversed(range(len(same))):
            if same[turn]:
                to_go[turn] += self.gamma * to_go[turn + 1]
        state = _states(trajectories).to(to_go.device)
        sized = torch.ones_like(to_go) if probabilities is None else probabilities[layout.turn_rows]
        n_states = int(state.max()) + 1

        def total(values: Tensor) -> Tensor:
            return to_go.new_zeros(n_states).index_add(0, state, sized * values)

        size = total(torch.ones_like(to_go))
        centred = to_go - (total(to_go) / size)[state]
        degrees = (size - 1).clamp_min(1) if probabilities is None else size
        spread = (total(centred.square()) / degrees).sqrt()[state]
        # Rounding over eps would invent an advantage where all agree.
        differs = spread > 1e-6 * to_go.abs().amax().clamp_min(1.0)
        return torch.where(differs, centred / (spread + self.eps), 0.0)


def _states(trajectories: Trajectories) -> Tensor:
    """(K,) which state each turn begins in, numbered through the batch; no two questions share one."""
    layout, width = trajectories.layout, trajectories.tokens.shape[1]
    starts = layout.positions[layout.turn_starts]
    ends = (starts + layout.turn_lengths).tolist()
    known: dict[tuple[int, ...], int] = {}
    found, before = [], -1
    for turn, (start, row) in enumerate(zip(starts.tolist(), layout.turn_rows.tolist(), strict=True)):
        begin = ends[turn - 1] - row * width if row == before else 0
        seen = trajectories.tokens[row, begin : start - row * width].tolist()
        key = (int(trajectories.group_ids[row]), row == before, *seen)
        found.append(known.setdefault(key, len(known)))
        before = row
    return torch.tensor(found)


# --- ratio and clip ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class PrefixWeight(RatioRule):
    """CTPO (arXiv 2605.07331), as its code has it: exp(sum of l_s over the agent tokens s <= t), of which
    token t's own ratio alone has a gradient: w_t grad log pi_t, unbiased where A is and nothing is clipped.
    `PrefixRatio` has the gradient of the whole product."""

    granularity: ClassVar[str] = "token"

    def ratio(self, log_ratio: Tensor, layout: Layout) -> Tensor:
        return safe_exp(log_ratio + _before(log_ratio.detach(), layout, lambda x: x.cumsum(1), 0.0))


def _before(values: Tensor, layout: Layout, running, first: float) -> Tensor:
    """(N,) of each agent token what `running` makes of the rows (B, T) of values before it; `first` of a
    row's first token."""
    rows = layout.segments("sequence")
    place = torch.arange(len(values), device=values.device) - rows.share(rows.starts)
    table = values.new_zeros(layout.shape)
    upto = running(table.index_put((layout.rows, place), values))
    found = upto[layout.rows, (place - 1).clamp_min(0)]
    return torch.where(place > 0, found, first)


@dataclass(frozen=True)
class GrowingClip(ClipRule):
    """CTPO: [exp(-low sqrt t), exp(high sqrt t)] for the t-th agent token of its trajectory: a sum of t
    log-ratios spreads as sqrt t."""

    low: float = 0.025
    high: float = 0.05

    def __post_init__(self) -> None:
        in_range(self, "low", 0.0, low_open=True)
        in_range(self, "high", 0.0, low_open=True)

    def bounds(self, tokens: Tokens) -> Bounds:
        ones = torch.ones_like(tokens.log_ratio)
        root = (_before(ones, tokens.layout, lambda x: x.cumsum(1), 0.0) + 1).sqrt()
        return Bounds((-self.low * root).exp(), (self.high * root).exp())


# --- surrogate ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class HeldBothSides(MinClip):
    """CTPO: PPO's min, and for A < 0 the term is held at its value at the upper bound beyond that, too: the
    dual clip whose constant is that bound."""

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        found = super().terms(tokens, bounds)
        held = (tokens.advantages < 0) & (tokens.ratio.detach() > bounds.high)
        terms = torch.where(held, bounds.high * tokens.advantages, found.terms)
        return found._replace(terms=terms, clipped=found.clipped | held)


@dataclass(frozen=True)
class MinimumPrefix(MinClip):
    """MinPRO (arXiv 2601.22718), our reading of its abstract: PPO's clipped term times sg(min of r_s over the
    agent tokens s < t), in place of their product; 1 for a first token."""

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        ratio = tokens.log_ratio.detach().exp()
        least = _before(ratio, tokens.layout, lambda x: x.cummin(1).values, 1.0)
        return super().terms(replace(tokens, advantages=tokens.advantages * least), bounds)


@dataclass(frozen=True)
class Decoupled(MinClip):
    """Decoupled PPO (arXiv 2110.00641): pi_prox / pi_old x min(p A, clip(p) A), p = pi / pi_prox: the trust
    region lies about the proximal policy, the weight corrects for the one that sampled.

    proximal: "scored", the policy as it was before this iteration's updates; "interpolated", A-3PO (arXiv
    2512.06547), on the line from log pi_old to log pi as far as the updates before this iteration are of
    those since sampling. cap: a token whose weight pi_prox / pi_old passes it is left out. Token ratios."""

    proximal: str = "scored"
    cap: float = 5.0

    def __post_init__(self) -> None:
        if self.proximal not in ("scored", "interpolated"):
            raise ValueError(f"Decoupled.proximal={self.proximal!r}: must be one of scored, interpolated")
        in_range(self, "cap", 1.0)

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        behind = tokens.known("proximal")
        weight = behind.exp()
        kept = weight <= self.cap
        near = safe_exp(tokens.log_ratio - behind)
        found = super().terms(replace(tokens, ratio=near, advantages=tokens.advantages * weight), bounds)
        return found._replace(terms=torch.where(kept, found.terms, 0.0), clipped=found.clipped | ~kept)


@dataclass(frozen=True)
class QuadraticShift(SurrogateRule):
    """DRPO (arXiv 2606.09821): r A - |A| pi_old (r - 1)^2 / (2 delta), whose gradient is r A grad log pi
    times 1 - sgn(A) (pi - pi_old) / delta: 0 where DPPO's mask begins, and back towards pi_old beyond. A
    token counts as clipped where that factor is below a half."""

    delta: float = 12.5

    def __post_init__(self) -> None:
        in_range(self, "delta", 0.0, low_open=True)

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        old, plain = tokens.known("behaviour_logprobs").exp(), tokens.ratio * tokens.advantages
        pull = tokens.advantages.abs() * old * (tokens.ratio - 1).square() / (2 * self.delta)
        moved = old * tokens.log_ratio.detach().expm1() * tokens.advantages.sign()
        return Terms(plain - pull, plain, moved > 0.5 * self.delta)


@dataclass(frozen=True)
class GeometricMask(Mask):
    """The two-sided geometric sequence mask: beside the clip, drops a trajectory whose geometric ratio
    exp(mean l) leaves [1 - width, 1 + width], whatever the advantage."""

    width: float = 0.01

    def __post_init__(self) -> None:
        in_range(self, "width", 0.0, 1.0, low_open=True)

    def keep(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        layout = tokens.layout
        near = layout.row_mean(tokens.log_ratio.detach()).expm1().abs() <= self.width
        return super().keep(tokens, bounds) & near[layout.rows]


@dataclass(frozen=True)
class FarSequenceMask(Mask):
    """VACO (arXiv 2603.01365): in trajectories whose mean |r - 1| passes delta, drops the tokens whose step
    would lead further away, l A > 0. The clip's bounds change nothing."""

    delta: float = 0.1

    def __post_init__(self) -> None:
        in_range(self, "delta", 0.0)

    def keep(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        layout, logs = tokens.layout, tokens.log_ratio.detach()
        far = layout.row_mean(logs.expm1().abs()) > self.delta
        return ~(far[layout.rows] & (logs * tokens.advantages > 0))


# --- the effective sample size -------------------------------------------------------------------------
def token_sample_size(log_ratio: Tensor) -> Tensor:
    """(sum r)^2 / (n sum r^2) of n token ratios, in [1 / n, 1]; scalar, no gradient. In units of the largest
    ratio, so that one beyond the float's range has all the weight; NaN where a log-ratio is not finite."""
    logs = log_ratio.detach()
    shares = (logs - logs.max()).exp()
    return shares.sum().square() / (len(shares) * shares.square().sum())


@dataclass(frozen=True)
class SampleSizeWeight(Weight):
    """P3O (arXiv 2605.12380): f = min(r, ESS), ESS `token_sample_size` of the minibatch. A token counts as
    clipped where f is less than half of r."""

    sees_batch: ClassVar[bool] = True

    def factor(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        return tokens.ratio.detach().clamp(max=token_sample_size(tokens.log_ratio))

    def terms(self, tokens: Tokens, bounds: Bounds) -> Terms:
        found = super().terms(tokens, bounds)
        return found._replace(clipped=self.factor(tokens, bounds) < 0.5 * tokens.ratio.detach())


@dataclass(frozen=True)
class SampleSizeKL(TokenPenalty):
    """P3O: (1 - ESS) x KL(pi || pi_old), estimated by r l - r + 1. It looks at the minibatch, as the
    surrogate does that belongs to it. A ratio beyond the float's range makes it infinite, which ends a
    run."""

    def costs(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        return (1 - token_sample_size(tokens.log_ratio)) * kl_policy_to_behaviour(tokens.log_ratio)


@dataclass(frozen=True)
class SquaredLogRatio(TokenPenalty):
    """coefficient x mean over agent tokens of l^2: DRO's penalty (arXiv 2405.19107) with beta / 2, prime-rl's
    with 1e-3."""

    coefficient: float = 0.025

    def __post_init__(self) -> None:
        in_range(self, "coefficient", 0.0)

    def costs(self, tokens: Tokens, bounds: Bounds) -> Tensor:
        return self.coefficient * tokens.log_ratio.square()
