"""Turn-level ratios and our stabilisers inside TRL's GRPOTrainer, and multi-turn roll-outs of our worlds for
it.

An existing GRPO script changes in three lines:

    from stppo.plugins.trl import TurnGRPOConfig, TurnGRPOTrainer

    args = TurnGRPOConfig(output_dir="run", num_iterations=2, stabilizer="clipping_bias_norm",
    bias_norm_c0=2e-3)
    trainer = TurnGRPOTrainer(model=..., args=args, ...)  # everything else as for GRPOTrainer

and trains on one of our worlds with

    trainer = TurnGRPOTrainer(
        model=...,
        args=args,
        processing_class=world.tokenizer,
        train_dataset=search_dataset(world),
        rollout_func=search_rollout(world),
        reward_funcs=search_reward,
    )

| algorithm | importance_sampling_level | ratio_aggregation | stabilizer | loss_type |
| --- | --- | --- | --- | --- |
| grpo | token | geometric | none | grpo |
| gspo | sequence | geometric | none | grpo |
| turn_grpo | turn | geometric | none | grpo |
| s_grpo | token | geometric | clipping_bias_norm | grpo |
| so_grpo, reading A | turn | geometric | clipping_bias_norm | grpo |
| so_grpo, reading B | turn | arithmetic | ctn_kl | turn_mean |

Related methods that TRL lacks go by name: objective="topr", "minirl", "m2po", "bapo", "bapo_ratio",
"grpo_guard", "llds", "icepop", "dppo" or "reinforce" puts the terms of `configs/algorithm/NAME.yaml` where
TRL has min(w A, clip(w) A). What TRL has an option for is TRL's: `loss_type` says how terms are averaged
(grpo, bnpo, dr_grpo, dapo or turn_mean), `epsilon` and `epsilon_high` are the clip's range where the method
has PPO's clip, advantages are TRL's groups'. Constants that TRL has no option for are `knobs`, as in the
YAML: knobs={"clip": {"most": 2.0}}. Rules that look at the whole batch (m2po, bapo, bapo_ratio, grpo_guard)
see one micro-batch, and llds' penalty is a mean over it: raise `per_device_train_batch_size` for them. What
else is not here, and why: `stppo.plugins.methods.why_not`, or docs/howto/trl.md.

Ratios differ from 1 only where a batch of completions serves more than one optimiser step, which TRL's
defaults do not do: set num_iterations=2 or more, or steps_per_generation above gradient_accumulation_steps.
Otherwise all rows of the table with one loss_type are the same algorithm; the log warns of it.

How it works. TRL's loss reads the old log-probs only as part of the log-ratio, and its own log-probs for all
else (KL to the reference, CISPO). So the trainer replaces the old ones by `log pi - log w`, w the ratio of
`stppo.objectives.Ratio`: clip, two-sided clip, loss normalisation, entropy mask and bonus, off-policy mask,
vLLM correction and metrics remain TRL's code. Turns are the runs of ones in `completion_mask * tool_mask`.
The KL that TRL adds for beta > 0 is weighted by w where `use_bias_correction_kl` is on, as TRL does with its
sequence ratio.

With `objective`, TRL gets each token's term as its advantage, with its graph, beside a ratio that is always
1: what it averages, masks, weighs (by entropy, the off-policy mask, the vLLM correction) and adds to is then
our term, whatever its form. The ratio by which TRL would weigh its KL is gone, so beta > 0 needs
use_bias_correction_kl=False.

The clipping bias needs no second formula either: C is the gradient of TRL's loss with the clip minus that of
TRL's loss without it, on the same log-probs, whatever the normalisation.

Not offered: a critic, and with it PPO's credit, since TRL has none; credit of turns, since a completion has
one reward, to which `search_reward` adds what turns were paid; the logit-space norm; the divisor under
DeepSpeed, which hides the gradient. `loss_type="dapo"` (TRL's default, ours is grpo) and bnpo weigh long
completions more. TRL's `tools=` and `environment_factory=` mark their turns by the same mask, but speak in a
chat template's tool calls instead of our search tags, and need jmespath with transformers before 5.13; TRL
calls `rollout_func` experimental and warns, which TRL_EXPERIMENTAL_SILENCE=1 turns off. Its
`completions/clipped_ratio` counts completions that do not end in an end token: here nearly all."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from stppo.objectives import (
    Bounds,
    Clip,
    ClippingBiasNorm,
    CtnKL,
    MinClip,
    NoStabilizer,
    Objective,
    Penalty,
    Ratio,
    Stabilizer,
    Terms,
    Tokens,
    loss_weights,
)
from stppo.plugins import methods, require_host
from stppo.trajectories import Layout

require_host("trl")  # an exact minor version: the trainer builds on the inside of GRPOTrainer._compute_loss

from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.utils import nanmax, nanmin  # noqa: E402

from stppo.plugins.trl_rollout import search_dataset, search_reward, search_rollout  # noqa: E402

__all__ = ["TurnGRPOConfig", "TurnGRPOTrainer", "search_dataset", "search_reward", "search_rollout"]

CLIPPING_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "turn_mean")
MEANS = (
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
    "turn_mean",
)  # loss types that are a way to average and nothing else
LEVELS = ("token", "turn", "sequence")
OLD_LOGPROBS = ("trainer", "rollout")
_STABILIZERS = ("none", "clipping_bias_norm", "ctn_kl")


@dataclass
class TurnGRPOConfig(GRPOConfig):
    """GRPOConfig with turn-level importance ratios and the stabilisers; see the module for the algorithms.

    importance_sampling_level: turn, or TRL's token and sequence.
    ratio_aggregation: geometric (v1 Eq. 4; TRL's sequence ratio), arithmetic or product over the segment.
    loss_type: TRL's, or turn_mean: as grpo, but every turn of a completion weighs the same. Default grpo.
    stabilizer: none, clipping_bias_norm (divide the gradient, v1 Eq. 7 and 8) or ctn_kl (a penalty, v2).
    bias_norm_estimator: logprob, the norm of C in log-prob space, without another backward pass (what it is
        and how well it tracks ||C|| stands in `stppo.plugins.verl`), or exact, ||C|| itself, with one (single
        process only).
    bias_norm_c0: from which norm on the divisor acts. It belongs to an estimator, a batch size, a completion
        length and a loss_type. exact: 0.1 if not set. logprob: no default; run with stabilizer="none", which
        logs `stabilizer/clipping_bias_norm_logprob`, and take a fixed share of its median.
    bias_norm_form: max, one_plus, floor or bare, as in `stppo.objectives.ClippingBiasNorm`.
    ctn_coefficient, ctn_formula, ctn_kl: as in `stppo.objectives.CtnKL`.
    objective: name of a related method (`stppo.plugins.methods.OFFERED`), which has ratio, clip, surrogate
        and penalty of its own; importance_sampling_level is then not read.
    knobs: its constants, {section: {key: value}} as in its YAML.
    old_logprobs: trainer, as in TRL (the weights when a batch is generated score it), or rollout: the
        log-probs that a `rollout_func` (or vLLM) returns, at the trainer's temperature. Completions from
        older weights are corrected for by rollout alone.
    disable_dropout: True here. Else old log-probs are scored with dropout on, and ratios differ from 1 before
        any update.
    epsilon_high: with loss_type="cispo" the cap of the weight itself, above 1.

    Raises ValueError naming the option, also for combinations that cannot work.
    """

    importance_sampling_level: str = field(
        default="turn", metadata={"help": "Segment of the importance ratio: turn, token or sequence."}
    )
    loss_type: str = field(default="grpo", metadata={"help": "One of TRL's loss types, or turn_mean."})
    ratio_aggregation: str = field(
        default="geometric", metadata={"help": "Over the segment's tokens: geometric, arithmetic or product."}
    )
    stabilizer: str = field(
        default="none", metadata={"help": "none, clipping_bias_norm (a divisor) or ctn_kl (a penalty)."}
    )
    bias_norm_c0: float | None = field(
        default=None, metadata={"help": "Norm of the clipping bias from which on the divisor acts."}
    )
    bias_norm_form: str = field(
        default="max", metadata={"help": "max(1, n/c0), one_plus (1 + n/c0), floor (max(n, c0)) or bare (n)."}
    )
    bias_norm_estimator: str = field(
        default="logprob", metadata={"help": "logprob (cheap) or exact (a second backward pass)."}
    )
    ctn_coefficient: float = field(default=1.0, metadata={"help": "Weight of the CTN penalty."})
    ctn_formula: str = field(default="inside", metadata={"help": "inside or outside the expectation."})
    ctn_kl: str = field(
        default="policy_to_behaviour", metadata={"help": "policy_to_behaviour or behaviour_to_policy."}
    )
    objective: str | None = field(
        default=None, metadata={"help": "A related method by name, in place of TRL's clipped term."}
    )
    knobs: dict[str, Any] | None = field(
        default=None, metadata={"help": "Constants of `objective`: {section: {key: value}} as in its YAML."}
    )
    old_logprobs: str = field(
        default="trainer", metadata={"help": "Where old log-probs come from: trainer or rollout."}
    )
    disable_dropout: bool = field(
        default=True, metadata={"help": "No dropout, neither scoring nor training."}
    )

    def __post_init__(self):
        self._refuse_what_cannot_work()
        if self.bias_norm_c0 is None:
            self.bias_norm_c0 = 0.1
        self.ratio, self.clip, self.build_stabilizer(), self.build_objective()  # this validates the options
        super().__post_init__()

    @property
    def ratio(self) -> Ratio:
        options = {"granularity": "importance_sampling_level", "aggregation": "ratio_aggregation"}
        return self._build(Ratio, **options)

    @property
    def clip(self) -> Clip:
        high = "epsilon" if self.epsilon_high is None else "epsilon_high"
        return self._build(Clip, epsilon_low="epsilon", epsilon_high=high)

    def build_stabilizer(self) -> Stabilizer:
        if self.stabilizer not in _STABILIZERS:
            allowed = ", ".join(_STABILIZERS)
            raise ValueError(f"TurnGRPOConfig.stabilizer={self.stabilizer!r}: must be one of {allowed}")
        norm = {"c0": "bias_norm_c0", "form": "bias_norm_form", "estimator": "bias_norm_estimator"}
        ctn = {"coefficient": "ctn_coefficient", "formula": "ctn_formula", "kl": "ctn_kl"}
        built = {
            "none": NoStabilizer(),
            "clipping_bias_norm": self._build(ClippingBiasNorm, **norm),
            "ctn_kl": self._build(CtnKL, **ctn),
        }
        return built[self.stabilizer]

    def build_objective(self) -> Objective | None:
        if self.objective is None:
            return None
        clip = self.clip.epsilon_low, self.clip.epsilon_high
        return methods.objective(self.objective, self.knobs, clip, "TurnGRPOConfig.knobs")

    def _build(self, kind: type, **options: str) -> Any:
        """An object of ours from options of this config; its errors name the options instead of its
        fields."""
        try:
            return kind(**{name: getattr(self, option) for name, option in options.items()})
        except ValueError as error:
            message = str(error)
            for name, option in options.items():
                message = message.replace(f"{kind.__name__}.{name}=", f"TurnGRPOConfig.{option}=")
            raise ValueError(message) from None

    def _refuse_what_cannot_work(self) -> None:
        level, loss = self.importance_sampling_level, self.loss_type
        if level not in LEVELS:  # Ratio's fourth, sentences, needs marks that TRL's batches do not have
            raise ValueError(
                f"TurnGRPOConfig.importance_sampling_level={level!r}: must be one of {', '.join(LEVELS)}"
            )
        if self.old_logprobs not in OLD_LOGPROBS:
            raise ValueError(
                f"TurnGRPOConfig.old_logprobs={self.old_logprobs!r}: must be one of {', '.join(OLD_LOGPROBS)}"
            )
        if self.old_logprobs == "rollout" and self.use_vllm and self.vllm_importance_sampling_correction:
            raise ValueError(
                "TurnGRPOConfig.vllm_importance_sampling_correction=True corrects for the roll-out's "
                "log-probs beside the ratio, old_logprobs='rollout' in it: set one of them otherwise"
            )
        if loss == "cispo" and (cap := self.epsilon if self.epsilon_high is None else self.epsilon_high) <= 1:
            raise ValueError(
                f"TurnGRPOConfig.loss_type='cispo' holds the weight at epsilon_high itself, here {cap}, so "
                "every token has about that weight: set epsilon_high to a cap above 1, such as 5.0"
            )
        if self.objective is not None:
            self._refuse_beside_objective()
        elif self.knobs:
            raise ValueError(
                f"TurnGRPOConfig.knobs={self.knobs!r}: are those of a method, set objective as well"
            )
        if loss == "vespo" and (level != "token" or self.ratio_aggregation != "geometric"):
            raise ValueError(
                "TurnGRPOConfig.loss_type='vespo' has a ratio of its own, so "
                f"importance_sampling_level={level!r} "
                "would do nothing: use loss_type='grpo', or importance_sampling_level='token'"
            )
        if loss == "luspo" and level != "sequence":
            raise ValueError(
                f"TurnGRPOConfig.loss_type='luspo' is an objective of whole sequences, "
                f"importance_sampling_level={level!r} is not: use loss_type='grpo'"
            )
        if self.stabilizer != "none" and loss not in CLIPPING_LOSSES:
            raise ValueError(
                f"TurnGRPOConfig.stabilizer={self.stabilizer!r} answers to a clip, which loss_type={loss!r} "
                f"does not have: use stabilizer='none' or one of {', '.join(CLIPPING_LOSSES)}"
            )
        if self.stabilizer != "clipping_bias_norm":
            return
        if self.bias_norm_estimator == "logprob" and self.bias_norm_c0 is None:
            raise ValueError(
                "TurnGRPOConfig.bias_norm_c0 has no default for bias_norm_estimator='logprob': run with "
                "stabilizer='none', and set a share of the median stabilizer/clipping_bias_norm_logprob, "
                "say 1/5"
            )
        if self.bias_norm_estimator == "logit":
            raise ValueError(
                "TurnGRPOConfig.bias_norm_estimator='logit' needs the whole distribution of every token, "
                "which TRL does not keep: use 'logprob' or 'exact'"
            )
        if self.bias_norm_estimator == "last_block":
            raise ValueError(
                "TurnGRPOConfig.bias_norm_estimator='last_block' is for this project's own trainer: use "
                "'logprob' or 'exact'"
            )
        if self.bias_norm_estimator == "exact" and (self.gradient_checkpointing_kwargs or {}).get(
            "use_reentrant"
        ):
            raise ValueError(
                "TurnGRPOConfig.bias_norm_estimator='exact' does not work with reentrant checkpointing: set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}, or use 'logprob'"
            )

    def _refuse_beside_objective(self) -> None:
        name = self.objective
        if name not in methods.OFFERED["trl"]:
            why, allowed = methods.why_not("trl", name), ", ".join(methods.OFFERED["trl"])
            because = f"not offered, since {why}" if why else f"must be one of {allowed}"
            raise ValueError(f"TurnGRPOConfig.objective={name!r}: {because}")
        if self.loss_type not in MEANS:
            raise ValueError(
                f"TurnGRPOConfig.loss_type={self.loss_type!r} is an objective too, beside "
                f"objective={name!r}: use one of "
                f"{', '.join(MEANS)}, which say how to average, or objective=None"
            )
        clips = methods.clips_as_host(name)
        own = {
            "importance_sampling_level": ("turn", "has a ratio of its own"),
            "ratio_aggregation": ("geometric", "has a ratio of its own"),
            "stabilizer": ("none", "has a stabiliser of its own or none"),
            "delta": (None, "has no second bound"),
            **(
                {}
                if clips
                else {
                    "epsilon": (0.2, "has bounds of its own"),
                    "epsilon_high": (None, "has bounds of its own"),
                }
            ),
        }
        for option, (default, why) in own.items():
            if (value := getattr(self, option)) != default:
                raise ValueError(
                    f"TurnGRPOConfig.{option}={value!r} would do nothing, since objective={name!r} {why}: "
                    "leave it out"
                )
        if self.beta and self.use_bias_correction_kl:
            raise ValueError(
                "TurnGRPOConfig.use_bias_correction_kl=True weighs the KL by TRL's ratio, which "
                f"objective={name!r} replaces: set use_bias_correction_kl=False, or beta=0.0"
            )


@dataclass(eq=False)
class _Minibatch:
    """What one loss is computed from; the log-probs are scored once and the rest filled in from them."""

    inputs: dict[str, Any]
    mask: Tensor  # (B, T) bool, the agent's tokens
    layout: Layout
    scores: tuple[Tensor, Tensor | None, Tensor | None] | None = None
    tokens: Tokens | None = (
        None  # without rows that TRL has masked out altogether: they take no part in any mean
    )
    bounds: Bounds | None = None
    terms: Terms | None = None  # of `objective`


class TurnGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose importance ratios can be those of turns, with the stabilisers of `TurnGRPOConfig`.

    The divisor acts once per optimiser step, on the accumulated gradient and after gradient-norm clipping (a
    clip that binds afterwards would cancel it). The CTN penalty is a mean over each micro-batch.

    Metrics beside TRL's: clip_ratio/turn_{low,high,region}_mean (mean over turns of the turn's clipped
    share), clip_ratio/out_of_range_token (unsigned), importance_ratio/{mean,min,max}, completions/mean_turns,
    stabilizer/{divisor,clipping_bias_norm_logprob or _exact,ctn_penalty}. TRL's own clip_ratio/* count
    tokens.

    Raises ValueError for another kind of `args`, a divisor under DeepSpeed, an exact one in several
    processes, a reference (beta > 0) that is not the model, and, while training, for empty or missing
    completions, masks that leave a completion without a turn, and log-probs that `old_logprobs` wants and a
    roll-out lacks."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        try:
            super().__init__(*positional, **named)
        except OSError as error:
            given = named.get("args") or next((p for p in positional if isinstance(p, GRPOConfig)), None)
            if given is None or not given.beta:
                raise
            raise ValueError(f"TurnGRPOTrainer: {_NO_REFERENCE} ({error})") from error
        if not isinstance(self.args, TurnGRPOConfig):
            raise ValueError(
                f"TurnGRPOTrainer: args must be a TurnGRPOConfig, got {type(self.args).__name__}"
            )
        self._refuse_another_reference()
        if self.args.disable_dropout:
            for module in self.model.modules():  # attention holds it as a number, which TRL does not find
                if getattr(module, "attention_dropout", None):
                    module.attention_dropout = 0.0
        if self.rollout_func is not None:
            self.rollout_func = partial(_checked_rollout, self.rollout_func)
        elif self.args.old_logprobs == "rollout" and not self.use_vllm:
            raise ValueError(
                "TurnGRPOConfig.old_logprobs='rollout' needs log-probs of a roll-out: give a rollout_func, "
                "or set it to 'trainer'"
            )
        self.ratio, self.clip = self.args.ratio, self.args.clip
        self.objective = self.args.build_objective()
        self.stabilizer = (
            self.args.build_stabilizer() if self.objective is None else self.objective.stabilizer
        )
        self._minibatch: _Minibatch | None = None
        self._turn_mean = self.loss_type == "turn_mean"
        if self._turn_mean:
            self.loss_type = "grpo"
        # Our ratio goes into TRL's token path; its own two levels are left to TRL.
        self._own_ratio = self.ratio.granularity == "turn" or self.ratio.aggregation != "geometric"
        if self._own_ratio or self.objective is not None:
            self.importance_sampling_level = "token"
        if isinstance(self.stabilizer, ClippingBiasNorm):
            self._refuse_unseen_gradients()
        self._bias_estimator = self.stabilizer.estimator or "logprob"
        self._clips = self.objective is None and self.loss_type in CLIPPING_LOSSES
        self._warn_if_on_policy()
        self._warn_of_lost_steps()
        if self._clips:
            self.add_callback(_DivideGradient(self))
        self._reset_bias()

    def _refuse_another_reference(self) -> None:
        """TRL loads the KL's reference anew from where the config says that the model came from."""
        if (
            self.ref_model is None or self.is_deepspeed_enabled or self.is_fsdp_enabled
        ):  # sharded: not to be seen
            return
        model = self.accelerator.unwrap_model(self.model)
        reference = dict(self.accelerator.unwrap_model(self.ref_model).named_parameters())
        for name, weights in model.named_parameters():
            there = reference.get(name)
            if (
                there is None
                or there.shape != weights.shape
                # The two may differ by rounding to half precision.
                or not torch.allclose(weights.float(), there.to(weights.device).float(), rtol=1e-2, atol=1e-3)
            ):
                raise ValueError(f"TurnGRPOTrainer: {_NO_REFERENCE} ({name} differs)")

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.args.old_logprobs == "rollout":
            output["old_per_token_logps"] = _rollouts_logprobs(output)
        return output

    def _warn_if_on_policy(self) -> None:
        args = self.args
        if args.old_logprobs == "rollout":
            return
        if args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0:
            logging.getLogger(__name__).warning(
                "num_iterations=%d with steps_per_generation=%d and gradient_accumulation_steps=%d makes "
                "one step from "
                "each batch of completions: every ratio is 1, and neither clip nor stabiliser ever acts; set "
                "num_iterations=2 or more, or steps_per_generation above gradient_accumulation_steps",
                args.num_iterations,
                args.steps_per_generation,
                args.gradient_accumulation_steps,
            )

    def _warn_of_lost_steps(self) -> None:
        """Adam moves a weight by about the learning rate; in half precision most weights are too coarse."""
        rate, lost, n = self.args.learning_rate, 0, 0
        for weight in (w.detach() for w in self.model.parameters() if w.requires_grad):
            n += weight.numel()
            if weight.dtype in (torch.bfloat16, torch.float16):
                half_a_step = weight.abs() * torch.finfo(weight.dtype).eps / 4  # at least, to the next number
                lost += int((half_a_step > rate).sum())
        if 2 * lost > n:
            logging.getLogger(__name__).warning(
                "learning_rate=%g is lost in the rounding of %.0f %% of the weights, which are in half "
                "precision: load the model with dtype=torch.float32, name its folder (TRL reads it so), or "
                "train an adapter",
                rate,
                100 * lost / n,
            )

    def _refuse_unseen_gradients(self) -> None:
        if self.is_deepspeed_enabled:
            raise ValueError(
                "stabilizer='clipping_bias_norm' cannot reach DeepSpeed's gradients: run with DDP or FSDP"
            )
        if self.stabilizer.estimator == "exact" and self.accelerator.num_processes > 1:
            raise ValueError(
                "bias_norm_estimator='exact' needs a single process: use bias_norm_estimator='logprob'"
            )

    def _compute_loss(self, model, inputs):
        mask = _agent_mask(inputs)
        inputs = dict(inputs)
        if self._turn_mean and self.objective is None:
            inputs["advantages"] = _turn_mean_advantages(inputs["advantages"], mask)
        self._minibatch = _Minibatch(inputs, mask, Layout.of(mask))
        try:
            loss = super()._compute_loss(model, inputs)
            self._log_ratios(self._minibatch)
            if self._clips and self.model.training:
                self._add_clipping_bias(self._minibatch)
            return loss + self._penalty(self._minibatch)
        finally:
            self._minibatch = None

    def _get_per_token_logps_and_entropies(self, *positional, **named):
        batch = self._minibatch
        if batch is None:  # scoring of the behaviour or reference policy, not a loss
            return super()._get_per_token_logps_and_entropies(*positional, **named)
        if batch.scores is None:
            batch.scores = super()._get_per_token_logps_and_entropies(*positional, **named)
            self._put_in_ratio(batch)
        return batch.scores

    def _put_in_ratio(self, batch: _Minibatch) -> None:
        logprobs = batch.scores[0]
        old = batch.inputs.get("old_per_token_logps")
        old = logprobs.detach() if old is None else old
        # Half precision would round a ratio near 1 away.
        precision = torch.promote_types(logprobs.dtype, torch.float32)
        log_ratio = batch.layout.gather(logprobs.to(precision) - old)
        layout = Layout.of(batch.mask[batch.mask.any(1)])
        advantages, behaviour = self._advantages(batch), batch.layout.gather(old)
        if self.objective is not None:
            batch.tokens = self.objective.tokens(log_ratio, advantages, layout, behaviour)
            self._put_in_terms(batch, old)
            return
        batch.tokens = Tokens(log_ratio, self.ratio(log_ratio, layout), advantages, layout, behaviour)
        batch.bounds = self.clip(batch.tokens)
        if self._own_ratio:
            # A ratio that underflows has no gradient left; without the floor its logarithm's would be NaN.
            log_weight = batch.tokens.ratio.clamp_min(torch.finfo(precision).tiny).log()
            batch.inputs.setdefault("sampling_per_token_logps", old)  # what the off-policy mask compares with
            batch.inputs["old_per_token_logps"] = logprobs - batch.layout.scatter(log_weight)

    def _put_in_terms(self, batch: _Minibatch, old: Tensor) -> None:
        """Each token's term in place of its advantage, beside a log-ratio of 0, whose two gradients
        cancel."""
        tokens = batch.tokens
        if len(tokens.ratio):
            batch.terms, batch.bounds = self.objective.terms(tokens)
            terms = batch.layout.scatter(batch.terms.terms)
        else:
            batch.bounds, terms = Bounds(tokens.ratio, tokens.ratio), batch.layout.scatter(tokens.log_ratio)
        batch.inputs.setdefault("sampling_per_token_logps", old)
        batch.inputs["advantages"] = _turn_mean_advantages(terms, batch.mask) if self._turn_mean else terms
        batch.inputs["old_per_token_logps"] = batch.scores[0]

    def _penalty(self, batch: _Minibatch) -> Tensor | float:
        """The stabiliser's, scaled for gradient accumulation as TRL scales its losses."""
        if not isinstance(self.stabilizer, Penalty):
            return 0.0
        tokens = batch.tokens
        penalty = (
            self.stabilizer.penalty(tokens, batch.bounds) if len(tokens.ratio) else tokens.log_ratio.sum()
        )
        self._log("stabilizer/ctn_penalty", self.accelerator.reduce(penalty.detach(), "mean").item())
        return penalty / (self.current_gradient_accumulation_steps if self.model.training else 1)

    def _advantages(self, batch: _Minibatch) -> Tensor:
        """(N,)"""
        advantages = batch.inputs["advantages"]
        advantages = (advantages if advantages.dim() > 1 else advantages[:, None]).expand(batch.layout.shape)
        return batch.layout.gather(advantages)

    def _add_clipping_bias(self, batch: _Minibatch) -> None:
        """Collect this micro-batch's part of C, for `_divide_gradient`."""
        bias = self._bare_loss(batch) - self._bare_loss(batch, clipped=False)
        if self._bias_estimator == "logprob":
            (gradient,) = torch.autograd.grad(bias, batch.scores[0], retain_graph=True)
            # Micro-batches hold different tokens, so their squares add.
            self._bias_square += gradient.double().square().sum().item()
            return
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradient = torch.autograd.grad(bias, parameters, retain_graph=True, materialize_grads=True)
        before = self._bias or [0.0] * len(parameters)
        self._bias = [old + new for old, new in zip(before, gradient, strict=True)]

    def _bare_loss(self, batch: _Minibatch, clipped: bool = True) -> Tensor:
        """TRL's loss on the same log-probs, without its entropy bonus, auxiliary loss and metrics."""
        bare = {"_entropy_bonus_enabled": False, "aux_loss_enabled": False}
        bare["_metrics"] = {mode: defaultdict(list) for mode in self._metrics}
        no_clip = {} if clipped else {"epsilon_low": math.inf, "epsilon_high": math.inf}
        delta = self.args.delta if clipped else None
        with _set(self, **bare, **no_clip), _set(self.args, delta=delta):
            return super()._compute_loss(self.model, batch.inputs)

    def _divide_gradient(self) -> None:
        if self._bias_estimator == "exact":
            norm = math.sqrt(sum(part.double().square().sum().item() for part in self._bias or []))
        else:
            # Processes hold different tokens too, and their gradients are averaged.
            square = torch.tensor(self._bias_square, dtype=torch.float64, device=self.accelerator.device)
            total = self.accelerator.reduce(square, "sum").item()
            norm = math.sqrt(total) / self.accelerator.num_processes
        self._reset_bias()
        divisor = self.stabilizer.divisor(norm)  # 1 unless the stabiliser is ClippingBiasNorm
        self._log(f"stabilizer/clipping_bias_norm_{self._bias_estimator}", norm)
        self._log("stabilizer/divisor", divisor)
        if divisor != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)

    def _reset_bias(self) -> None:
        self._bias_square: float = 0.0
        self._bias: list[Tensor] | None = None

    @torch.no_grad()
    def _log_ratios(self, batch: _Minibatch) -> None:
        tokens, bounds, layout = batch.tokens, batch.bounds, batch.layout
        ratio = tokens.ratio.detach()
        extremes = ratio.aminmax() if len(ratio) else (ratio.new_tensor(math.nan),) * 2
        self._log_mean("importance_ratio/mean", ratio)
        self._log("importance_ratio/min", nanmin(self.accelerator.gather(extremes[0])).item())
        self._log("importance_ratio/max", nanmax(self.accelerator.gather(extremes[1])).item())
        self._log_mean("completions/mean_turns", layout.row_turns.to(ratio.dtype))
        out_of_range = bounds.out_of_range(tokens.log_ratio.detach().exp())
        self._log_mean("clip_ratio/out_of_range_token", out_of_range.float())
        if self._clips:
            clipped = MinClip()(tokens, bounds).clipped
        elif self.objective is not None:
            clipped = batch.terms.clipped if batch.terms else torch.zeros_like(ratio, dtype=torch.bool)
        else:
            return
        sides = {"low": clipped & (ratio < 1), "high": clipped & (ratio > 1), "region": clipped}
        for name, clipped in sides.items():
            shares = clipped.to(ratio.dtype)
            self._log_mean(f"clip_ratio/turn_{name}_mean", layout.turn_mean(shares))
            if self.objective is not None:
                self._replace_trls(name, shares, layout)

    def _replace_trls(self, name: str, shares: Tensor, layout: Layout) -> None:
        """TRL has seen a ratio of 1 at every token, and counted none."""
        logged = self._metrics["train" if self.model.training else "eval"]
        logged[f"clip_ratio/{name}_mean"].pop()
        self._log_mean(f"clip_ratio/{name}_mean", shares)
        if extreme := {"low": ("min", nanmin), "high": ("max", nanmax)}.get(name):
            of_rows = self.accelerator.gather(layout.row_mean(shares))
            logged[f"clip_ratio/{name}_{extreme[0]}"][-1] = extreme[1](of_rows).item()

    def _log_mean(self, name: str, values: Tensor) -> None:
        """Mean over the values of all processes."""
        total = torch.stack([values.sum(), values.new_tensor(float(len(values)))])
        total, count = self.accelerator.reduce(total, "sum").tolist()
        self._log(name, total / max(count, 1.0))

    def _log(self, name: str, value: float) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value)


class _DivideGradient(TrainerCallback):
    """Called between gradient-norm clipping and the optimiser's step."""

    def __init__(self, trainer: TurnGRPOTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer._divide_gradient()


_NO_REFERENCE = (
    "beta > 0 measures the KL from weights that TRL loads from model.config._name_or_path, and those are not "
    "the model's: save the model and load it from that folder, or set beta=0.0"
)


def _checked_rollout(rollout: Callable, prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
    """What the roll-out gave; ValueError for an empty completion, and where there is not one a prompt."""
    found = rollout(prompts, trainer)
    if (made := len(found.get("completion_ids", prompts))) != len(prompts):
        raise ValueError(
            f"rollout_func: {made} completion_ids for {len(prompts)} prompts; give each its own, in order"
        )
    for i, completion in enumerate(found.get("completion_ids", ())):
        if len(completion) == 0:
            raise ValueError(
                f"rollout_func: completion_ids[{i}] is empty; a completion needs at least one token of the "
                "policy, such as its end token"
            )
    return found


def _rollouts_logprobs(output: dict[str, Any]) -> Tensor:
    """(B, T) log-probs as sampled, 0 off the agent's tokens; ValueError where one is missing."""
    logprobs = output.get("sampling_per_token_logps")
    if logprobs is None:
        raise ValueError(
            "old_logprobs='rollout': the roll-out gave no logprobs; return them, or use 'trainer'"
        )
    agent = _agent_mask(output)
    if logprobs.shape != agent.shape:
        raise ValueError(
            f"rollout_func: logprobs must be as long as completion_ids, got {tuple(logprobs.shape)} for "
            f"{tuple(agent.shape)}"
        )
    wrong = agent & ~(logprobs <= 0)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"rollout_func: logprobs[{row}][{column}]={logprobs[row, column].item()}: old_logprobs='rollout' "
            "needs the log-prob, at most 0, of each token that the policy sampled"
        )
    return logprobs.masked_fill(~agent, 0.0)


def _agent_mask(inputs: dict[str, Any]) -> Tensor:
    """(B, T) bool from TRL's masks; ValueError where they cannot tell turns."""
    completion = inputs["completion_mask"].bool()
    if "tool_mask" not in inputs:
        return completion
    tool = inputs["tool_mask"]  # a roll-out's env_mask, padded with ones
    if tool.shape != completion.shape:
        raise ValueError(
            f"env_mask: must be as long as completion_ids, got {tuple(tool.shape)} for "
            f"{tuple(completion.shape)}"
        )
    if ((tool != 0) & (tool != 1)).any():
        raise ValueError("env_mask: must hold 1 on tokens that the policy sampled and 0 on all others")
    agent = completion & tool.bool()
    silent = completion.any(1) & ~agent.any(1)  # rows without completion are TRL's masked, truncated ones
    if silent.any():
        raise ValueError(
            f"env_mask: completion {int(silent.nonzero()[0])} of the batch has no agent token, hence no "
            "turn; mark what the policy sampled with 1"
        )
    return agent


def _turn_mean_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """(B, T) advantages that make TRL's mean over tokens the mean over turns; their signs, hence clips,
    stay."""
    advantages = advantages if advantages.dim() > 1 else advantages[:, None]
    wanted, given = (loss_weights(mask, kind, advantages.dtype) for kind in ("turn_mean", "trajectory_mean"))
    return advantages * (wanted / given).masked_fill(~mask, 0.0)


@contextmanager
def _set(target: object, **values: Any) -> Iterator[None]:
    """Attributes for the length of a block."""
    before = {name: getattr(target, name) for name in values}
    try:
        vars(target).update(values)
        yield
    finally:
        vars(target).update(before)
