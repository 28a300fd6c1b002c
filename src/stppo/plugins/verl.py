"""Our policy losses inside verl: `turn_ppo`, `s_ppo`, `st_ppo`, `so_ppo`, `so_grpo`, and related methods by
name.

verl finds this module by its entry point, by `actor_rollout_ref.model.external_lib=stppo.plugins.verl` or by
`VERL_USE_EXTERNAL_MODULES=stppo.plugins.verl`; `stppo plugins check verl` tells whether it did. Then

    actor_rollout_ref.actor.policy_loss.loss_mode=st_ppo
    actor_rollout_ref.actor.policy_loss._target_=stppo.plugins.verl.TurnPolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.c0=1.6e-4

trains with it. The second and third line are needed for options alone; verl's own PolicyLossConfig gives
their defaults, with which the divisor hardly ever acts (c0 = 0.1; the log warns of it). Clip range, loss
aggregation and advantages are verl's options (`clip_ratio_low`, `clip_ratio_high`, `loss_agg_mode`,
`algorithm.adv_estimator`); verl's `clip_ratio_c` (dual clip) is not read.

    loss_mode        ratio per          divided by the clipping bias    source
    turn_ppo         turn, geometric    no                              v1 Eq. 4
    s_ppo            token              yes                             v1 Eq. 7
    st_ppo           turn, geometric    yes                             v1 Eq. 8
    so_ppo, so_grpo  turn, geometric    yes                             v2, `reading: A`
    so_ppo, so_grpo  turn, arithmetic   no: clipping-triggered KL       v2, `reading: B`

The equations are v1's as summaries of the paper give them. `so_ppo` and `so_grpo` are one loss: what differs
is `algorithm.adv_estimator`: `gae`, or `grpo`, or for reading B `grpo_turn_return`, which this module
registers. (verl's driver must know it too: by the entry point or VERL_USE_EXTERNAL_MODULES; `external_lib`
reaches the workers.) `loss_agg_mode=seq-mean-token-mean` is v1's 1/|y|; with it, reading B has 1/n over turns
(`turn_mean`).

Related methods (`stppo.plugins.methods.OFFERED`) are what verl lacks of `configs/algorithm`, each built from
    its YAML but for what verl has an option for: clip range (TOPR and BAPO have bounds of their own), loss
    aggregation, advantages; docs/howto/verl.md has the options that make a method its YAML's. Other constants
    are `knobs`, as in the YAML: +actor_rollout_ref.actor.policy_loss.knobs.clip.most=2. Rules that look at
    the whole batch see the micro-batch that verl hands over: raise `ppo_micro_batch_size_per_gpu` for them. A
    penalty (llds) is a mean over the minibatch's tokens, in any mode.

Turns A turn is a maximal run of ones in `response_mask`; padding cannot matter. Rows without agent tokens, as
    sequence-level rejection leaves them, are dropped, and a micro-batch of such rows alone has the loss 0.
    Token-level rejection (`algorithm.rollout_correction.rollout_rs=token_*`) punches holes into the mask and
    so splits turns. verl does not tell a loss of it. It is refused where it can be seen: in the option
    itself, which reaches the worker by `policy_loss.rollout_correction: ${algorithm.rollout_correction}`
    (configs/cluster has this line) and the advantage estimator by verl; and in observations of one token, as
    one rejected token looks.

The divisor
    ||C||, the norm of the clipping bias, would need a second backward pass through the policy; a loss
    function sees log-probs alone. So n = sqrt(sum_t c_t^2), with c_t the derivative of the clipped terms'
    unclipped surrogate by token t's log-prob. In parameter space C = sum_t c_t grad log pi_t; n is its norm
    if the scores grad log pi_t were orthonormal. It sees how much was clipped and at what advantages, not
    whether trajectories agree on it. Hence it has no limit: in a minibatch of B trajectories it falls like
    1/sqrt(B) where ||C|| levels off (notebook 03), and so **a c0 belongs to this estimator and to one batch
    size and response length**: with c0 = 0.1, which was meant for ||C||, it hardly ever acts. In the first
    study's runs (main regime, minibatches of 32 trajectories of about 50 tokens) ||C|| was 28 to 41 times n
    in the median, and the Pearson correlation of their iteration means within a run .3 to .7 for turn_ppo and
    so_grpo, .5 to 1.0 for s_ppo, -.1 to .7 for st_ppo (18 runs each).

    It tracks, loosely. To set c0, run some iterations with turn_ppo, which logs
    `actor/clipping_bias_norm_logprob`, and take a fixed share of its median: c0 = 0.1 was about 1/5 of ||C||
    in those runs of ST-PPO.

    verl calls the loss once per micro-batch and adds the gradients. Squares of n add over disjoint
    micro-batches, so each estimates the minibatch's n as its own times sqrt(number of micro-batches), counted
    in what `loss_agg_mode` averages over (rows or tokens, of all data-parallel ranks). Every micro-batch thus
    has a divisor of its own, all about equal if micro-batches are large; the smaller, the noisier. The
    entropy and reference-KL terms of verl are added afterwards and not divided; `actor/pg_loss` is the
    divided loss.

    verl clips the gradient's norm after the loss (`grad_clip`), so a clip that binds cancels the divisor:
    what is left of it is which steps bind. Raise `grad_clip` for it to act. Adam is nearly free of scale: a
    constant divisor does nothing there, only the relative weight of updates inside its moments changes.

Not possible here: the exact ||C|| or the logit-space norm; turn credit from a critic (`TurnReturnMinusValue`,
`TurnGAE`), since registered advantage estimators get no `values` (`gae` with `lam=1` is R - V at every token,
not at the turn's first); the gradient clip before the divisor. verl's deprecated trainer (`use_v1=false`)
replaces any loss in its bypass mode."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from stppo.checks import in_range, one_of
from stppo.objectives import (
    ClippingBiasNorm,
    Objective,
    TokenPenalty,
    loss_weights,
)
from stppo.objectives.rivals import KeepLikelihood, StandardisedByTurn
from stppo.plugins import VERL_LOSSES, methods, require_host
from stppo.plugins.losses import METRICS, evaluate, weights_of
from stppo.trajectories import Layout

require_host("verl")

from verl.trainer.ppo.core_algos import (  # noqa: E402
    POLICY_LOSS_REGISTRY,
    agg_loss,
    register_policy_loss,
)
from verl.workers.config import PolicyLossConfig  # noqa: E402

from stppo.plugins.verl_advantages import refuse_token_rejection  # noqa: E402 (registers the estimators)

READING_B = ("so_ppo", "so_grpo")


@dataclass
class TurnPolicyLossConfig(PolicyLossConfig):
    """Options of the losses above; other losses of verl ignore them. ValueError names a bad field.

    reading: A (geometric ratio and divisor) or B (arithmetic ratio and clipping-triggered KL, turns of a
    trajectory weighed alike), of so_ppo and so_grpo.
    c0: of `stppo.objectives.ClippingBiasNorm`.
    knobs: constants of a related method, {section: {key: value}} as in its YAML, such as {clip: {most: 2.0}}
    of topr."""

    loss_mode: str = "st_ppo"
    reading: str = "A"
    c0: float = 0.1
    knobs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        why = methods.why_not("verl", self.loss_mode)
        if why and self.loss_mode not in POLICY_LOSS_REGISTRY:
            raise ValueError(f"TurnPolicyLossConfig.loss_mode={self.loss_mode!r}: not offered, since {why}")
        one_of(self, "loss_mode", tuple(POLICY_LOSS_REGISTRY))
        one_of(self, "reading", ("A", "B"))
        in_range(self, "c0", 0.0, low_open=True)
        if self.loss_mode in VERL_LOSSES and _reads_turns(objective_of(self.loss_mode, self)):
            refuse_token_rejection(self.rollout_correction)


def objective_of(
    name: str, options: TurnPolicyLossConfig, clip_range: tuple[float, float] | None = None
) -> Objective:
    """The loss `name` as its YAML and `options` have it, at verl's clip range (epsilon_low, epsilon_high);
    its credit is not used. ValueError where reading B is asked of a loss that has none, and for `knobs` that
    the loss does not have."""
    if options.reading == "B" and name not in READING_B:
        raise ValueError(f"TurnPolicyLossConfig.reading='B': {name} has reading A alone; B is of {READING_B}")
    algorithm = f"{name}_ctn" if options.reading == "B" else name
    found = methods.objective(algorithm, options.knobs, clip_range, "TurnPolicyLossConfig.knobs")
    if isinstance(found.stabilizer, ClippingBiasNorm):
        if options.knobs:
            raise ValueError(
                f"TurnPolicyLossConfig.knobs={dict(options.knobs)}: {name} has c0 in their place"
            )
        found = replace(found, stabilizer=ClippingBiasNorm(c0=options.c0, estimator="logprob"))
    return found


def _reads_turns(objective: Objective) -> bool:
    by_turn = objective.loss_aggregation == "turn_mean" or objective.ratio.granularity == "turn"
    rules = isinstance(objective.ratio, StandardisedByTurn), isinstance(objective.stabilizer, KeepLikelihood)
    return by_turn or any(rules)


def policy_loss(
    name: str,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics of one micro-batch, as verl's registry wants them.

    Tensors are (B, T): log-probs in nats, log_prob with graph; response_mask is 0/1 and right-padded;
    `config` is the actor's config. ValueError for a missing config, misshapen tensors, a mask that is not
    0/1, and holes that token-level rejection punched into it."""
    if config is None:
        raise ValueError(
            f"{name}: config is missing; pass the actor's config (verl.workers.config.ActorConfig)"
        )
    options = config.policy_loss
    if not isinstance(options, TurnPolicyLossConfig):
        options = TurnPolicyLossConfig(loss_mode=name)
    objective = objective_of(name, options, _clip_range(config))
    if objective.stabilizer == ClippingBiasNorm(estimator="logprob"):
        _warn_of_default_c0(name)
    tensors = {
        "old_log_prob": old_log_prob,
        "advantages": advantages,
        "rollout_is_weights": rollout_is_weights,
    }
    mask = _agent_mask(response_mask, log_prob, tensors)

    # Rows without agent tokens add nothing to any sum, but their means are 0/0.
    rows, n_rows = mask.any(1), len(mask)
    if not rows.any():
        return log_prob[rows].sum(), dict(_NO_METRICS)  # 0, with the graph that verl's backward needs
    mask, log_prob, old_log_prob, advantages = (
        value[rows] for value in (mask, log_prob, old_log_prob, advantages)
    )
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    layout = Layout.of(mask)
    factor = torch.ones_like(layout.rows, dtype=dtype)  # on top of the weights of `loss_agg_mode`
    if rollout_is_weights is not None:
        factor = factor * layout.gather(rollout_is_weights[rows].detach())
    if _reads_turns(objective):
        _refuse_holes(layout)
    if objective.loss_aggregation == "turn_mean":
        by_turn, by_token = (loss_weights(mask, to, dtype) for to in ("turn_mean", "trajectory_mean"))
        factor = factor * layout.gather(by_turn) / layout.gather(by_token)

    info = dict(config.get("global_batch_info") or {})
    weights = weights_of(lambda terms: agg_loss(terms, mask, loss_agg_mode, **info), mask.to(dtype))
    scale = math.sqrt(_micro_batches(loss_agg_mode, info, n_rows, len(layout.rows)))
    scale /= info.get("dp_size", 1)  # the ranks' gradients are averaged
    given = (log_prob, old_log_prob, advantages, layout, layout.gather(weights) * factor)
    found, norm, divisor = evaluate(objective, *given, scale)
    loss, penalty = found.ppo_loss / divisor, found.penalty
    if penalty is not None:  # a mean over tokens, or made of trajectories' means, whatever the mode
        each, counted, mode = penalty.expand(len(mask), 1), mask.any(1, keepdim=True), "seq-mean-token-sum"
        if isinstance(objective.stabilizer, TokenPenalty):
            each, counted, mode = penalty.expand(mask.shape), mask, "token-mean"
        loss = loss + agg_loss(each, counted, mode, **info)

    metrics = {name: found.diagnostics[source] for name, source in _METRICS.items()}
    metrics["actor/turns_per_trajectory"] = len(layout.turn_lengths) / len(mask)
    metrics["actor/clipping_bias_norm_logprob"] = norm
    metrics["actor/stabilizer_divisor"] = divisor
    metrics["actor/ctn_penalty"] = found.diagnostics["ctn_penalty"]
    return loss, metrics


@lru_cache
def _warn_of_default_c0(name: str) -> None:
    """Once a process and loss."""
    logging.getLogger(__name__).warning(
        "%s: c0=0.1, the default, is far above what the log-prob norm of a large batch reaches, so the "
        "divisor stays 1; "
        "run with turn_ppo, and set actor_rollout_ref.actor.policy_loss.c0 (with _target_=stppo.plugins.verl."
        "TurnPolicyLossConfig) to a fifth of the median of actor/clipping_bias_norm_logprob",
        name,
    )


# verl's name -> ours (stppo.objectives.diagnostics); verl averages each over micro-batches and ranks.
_VERLS = {"clip_fraction": "pg_clipfrac", "kl_behaviour": "ppo_kl"}
_METRICS = {f"actor/{_VERLS.get(name, name)}": source for name, source in METRICS.items()}
_NO_METRICS = {name: 1.0 if "ratio_mean" in name else 0.0 for name in _METRICS} | {
    "actor/turns_per_trajectory": 0.0,
    "actor/clipping_bias_norm_logprob": 0.0,
    "actor/stabilizer_divisor": 1.0,
    "actor/ctn_penalty": 0.0,
}

for _name in VERL_LOSSES:
    register_policy_loss(_name)(partial(policy_loss, _name))


def _clip_range(config: Any) -> tuple[float, float]:
    """verl's (epsilon_low, epsilon_high): `clip_ratio` where the one-sided options are null."""
    both = config.clip_ratio
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return both if low is None else low, both if high is None else high


def _micro_batches(mode: str, info: Mapping[str, Any], n_rows: int, n_tokens: int) -> float:
    """How many micro-batches like this one the global minibatch has; 1 where verl did not say."""
    by_token = mode.startswith("token-")
    total = info.get("batch_num_tokens" if by_token else "global_batch_size")
    return 1.0 if total is None else float(total) / (n_tokens if by_token else n_rows)


def _agent_mask(response_mask: Tensor, log_prob: Tensor, tensors: dict[str, Tensor | None]) -> Tensor:
    """(B, T) bool; ValueError for shapes that differ and for a mask that is not 0/1."""
    for name, value in {"response_mask": response_mask, **tensors}.items():
        if value is not None and (value.shape != log_prob.shape or value.ndim != 2):
            expected = tuple(log_prob.shape)
            raise ValueError(
                f"{name}: expected the (B, T) shape of log_prob, {expected}, got {tuple(value.shape)}"
            )
    mask = response_mask.bool()
    if response_mask.dtype != torch.bool and not torch.equal(mask.to(response_mask.dtype), response_mask):
        raise ValueError("response_mask: must be 1 on agent tokens and 0 elsewhere")
    return mask


def _refuse_holes(layout: Layout) -> None:
    starts = layout.positions[layout.turn_starts]
    gaps = starts[1:] - (starts + layout.turn_lengths)[:-1]
    short = (gaps < 2) & (layout.turn_rows[1:] == layout.turn_rows[:-1])
    if short.any():
        raise ValueError(
            f"response_mask: {int(short.sum())} observations of one token between turns, as token-level "
            "rejection leaves them (algorithm.rollout_correction.rollout_rs=token_*), which splits turns; "
            "use a seq_* mode"
        )
