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

Related methods that TRL lacks go by name (`stppo.plugins.methods.OFFERED`): objective="topr" takes the rules
of `configs/algorithm/topr.yaml`, knobs={"clip": {"most": 2.0}} their constants, but for what TRL has an
option for: averages (`loss_type`), PPO's clip range (`epsilon`, `epsilon_high`) and advantages. Rules that
look at the whole batch see one micro-batch, and a penalty is a mean over it: raise
`per_device_train_batch_size` for them. See docs/howto/trl.md.

Ratios differ from 1 only where a batch of completions serves more than one optimiser step, which TRL's
defaults do not do: set num_iterations=2 or more, or steps_per_generation above gradient_accumulation_steps.
Otherwise all rows of the table with one loss_type are the same algorithm; the log warns of it.

How it works. TRL gets each token's term of our objective as its advantage, with its graph, beside a ratio
that is always 1: what it averages, masks, weighs (by entropy, the off-policy mask, the vLLM correction) and
adds to is then our term, whatever its form. Turns are the runs of ones in `completion_mask * tool_mask`. The
clipping bias C is the gradient of TRL's loss on these terms minus that on the unrestricted ones, whatever the
normalisation. The ratio by which TRL would weigh its KL is gone, so use_bias_correction_kl is False here.

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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from stppo.checks import one_of
from stppo.objectives import (
    BatchBaseline,
    Bounds,
    Clip,
    ClippingBiasNorm,
    CtnKL,
    NoStabilizer,
    Objective,
    Penalty,
    Ratio,
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

MEANS = ("grpo", "bnpo", "dr_grpo", "dapo", "turn_mean")
_CHOICES = {
    # Ratio's fourth level, sentences, needs marks that TRL's batches do not have.
    "importance_sampling_level": ("token", "turn", "sequence"),
    "stabilizer": ("none", "clipping_bias_norm", "ctn_kl"),
    "bias_norm_estimator": ("logprob", "exact"),
    "old_logprobs": ("trainer", "rollout"),
}


@dataclass
class TurnGRPOConfig(GRPOConfig):
    """GRPOConfig with turn-level importance ratios and the stabilisers; see the module for the algorithms.

    importance_sampling_level: turn (default), token or sequence.
    loss_type: how terms are averaged: TRL's grpo (default), bnpo, dr_grpo or dapo, or turn_mean: as grpo, but
        every turn of a completion weighs the same.
    ratio_aggregation: geometric (v1 Eq. 4; TRL's sequence ratio), arithmetic or product over the segment.
    stabilizer: none, clipping_bias_norm (divide the gradient, v1 Eq. 7 and 8) or ctn_kl (a penalty, v2).
    bias_norm_c0: from which norm on the divisor acts. It belongs to an estimator, a batch size, a completion
        length and a loss_type. exact: 0.1 if not set. logprob: no default; run with stabilizer="none", which
        logs `stabilizer/clipping_bias_norm_logprob`, and take a fixed share of its median.
    bias_norm_estimator: logprob, the norm of C in log-prob space, without another backward pass (what it is
        and how well it tracks ||C|| stands in `stppo.plugins.verl`), or exact, ||C|| itself, with one (single
        process only).
    ctn_coefficient: as in `stppo.objectives.CtnKL`.
    objective: name of a related method (`stppo.plugins.methods.OFFERED`), which has ratio, clip, surrogate
        and penalty of its own; importance_sampling_level is then not read.
    knobs: its constants, {section: {key: value}} as in its YAML.
    old_logprobs: trainer, as in TRL (the weights when a batch is generated score it), or rollout: the
        log-probs that a `rollout_func` (or vLLM) returns, at the trainer's temperature. Completions from
        older weights are corrected for by rollout alone.
    disable_dropout: True here. Else old log-probs are scored with dropout on, and ratios differ from 1 before
        any update.

    Raises ValueError naming the option, also for combinations that cannot work.
    """

    importance_sampling_level: str = "turn"
    loss_type: str = "grpo"
    ratio_aggregation: str = "geometric"
    stabilizer: str = "none"
    bias_norm_c0: float | None = None
    bias_norm_estimator: str = "logprob"
    ctn_coefficient: float = 1.0
    objective: str | None = None
    knobs: dict[str, Any] | None = None
    old_logprobs: str = "trainer"
    disable_dropout: bool = True
    use_bias_correction_kl: bool = False

    def __post_init__(self):
        self._refuse_what_cannot_work()
        self.build_objective()  # this validates the other options
        super().__post_init__()

    def build_objective(self) -> Objective:
        """The loss; its credit is not used, since advantages are TRL's."""
        high = "epsilon" if self.epsilon_high is None else "epsilon_high"
        clip = self._build(Clip, epsilon_low="epsilon", epsilon_high=high)
        if self.objective is not None:
            bounds = clip.epsilon_low, clip.epsilon_high
            return methods.objective(self.objective, self.knobs, bounds, "TurnGRPOConfig.knobs")
        ratio = self._build(Ratio, granularity="importance_sampling_level", aggregation="ratio_aggregation")
        stabilizer = NoStabilizer()
        if self.stabilizer == "ctn_kl":
            stabilizer = self._build(CtnKL, coefficient="ctn_coefficient")
        elif self.stabilizer == "clipping_bias_norm":
            c0 = {} if self.bias_norm_c0 is None else {"c0": "bias_norm_c0"}
            stabilizer = self._build(ClippingBiasNorm, estimator="bias_norm_estimator", **c0)
        return Objective(BatchBaseline(), ratio, clip, stabilizer)

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
        for option, allowed in _CHOICES.items():
            one_of(self, option, allowed)
        if self.loss_type not in MEANS:
            raise ValueError(
                f"TurnGRPOConfig.loss_type={self.loss_type!r}: use one of {', '.join(MEANS)}, which say how "
                "to average; TRL's other loss types are objectives of their own, for its GRPOConfig"
            )
        if self.delta is not None:
            raise ValueError("TurnGRPOConfig.delta: the objectives here have no second bound; leave it out")
        if self.beta and self.use_bias_correction_kl:
            raise ValueError(
                "TurnGRPOConfig.use_bias_correction_kl=True weighs the KL by TRL's ratio, which is always 1 "
                "here: set it to False, or beta=0.0"
            )
        if self.old_logprobs == "rollout" and self.use_vllm and self.vllm_importance_sampling_correction:
            raise ValueError(
                "TurnGRPOConfig.vllm_importance_sampling_correction=True corrects for the roll-out's "
                "log-probs beside the ratio, old_logprobs='rollout' in it: set one of them otherwise"
            )
        if self.objective is not None:
            self._refuse_beside_objective()
        elif self.knobs:
            raise ValueError(
                f"TurnGRPOConfig.knobs={self.knobs!r}: are those of a method, set objective as well"
            )
        if self.stabilizer != "clipping_bias_norm":
            return
        if self.bias_norm_estimator == "logprob" and self.bias_norm_c0 is None:
            raise ValueError(
                "TurnGRPOConfig.bias_norm_c0 has no default for bias_norm_estimator='logprob': run with "
                "stabilizer='none', and set a share of the median stabilizer/clipping_bias_norm_logprob, "
                "say 1/5"
            )
        reentrant = (self.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        if self.bias_norm_estimator == "exact" and reentrant:
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
        own = {"importance_sampling_level": "turn", "ratio_aggregation": "geometric", "stabilizer": "none"}
        if not methods.clips_as_host(name):
            own |= {"epsilon": 0.2, "epsilon_high": None}
        for option, default in own.items():
            if (value := getattr(self, option)) != default:
                raise ValueError(
                    f"TurnGRPOConfig.{option}={value!r} would do nothing, since objective={name!r} has its "
                    "own: leave it out"
                )


@dataclass(eq=False)
class _Minibatch:
    """What one loss is computed from; the log-probs are scored once and the rest filled in from them."""

    inputs: dict[str, Any]
    mask: Tensor  # (B, T) bool, the agent's tokens
    layout: Layout
    scores: tuple[Tensor, Tensor | None, Tensor | None] | None = None
    # Without rows that TRL has masked out altogether: they take no part in any mean.
    tokens: Tokens | None = None
    bounds: Bounds | None = None
    terms: Terms | None = None  # None where no row is left


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
        self.objective = self.args.build_objective()
        self.stabilizer = self.objective.stabilizer
        self._minibatch: _Minibatch | None = None
        self._turn_mean = self.loss_type == "turn_mean"
        if self._turn_mean:
            self.loss_type = "grpo"
        self.importance_sampling_level = "token"
        if isinstance(self.stabilizer, ClippingBiasNorm):
            self._refuse_unseen_gradients()
        self._bias_estimator = self.stabilizer.estimator or "logprob"
        self._warn_if_on_policy()
        self._warn_of_lost_steps()
        self.add_callback(_WarnIfResumed())
        self._measures_bias = self.args.objective is None
        if self._measures_bias:
            self.add_callback(_DivideGradient(self))
        self._reset_bias()

    def _refuse_another_reference(self) -> None:
        """TRL loads the KL's reference anew from where the config says that the model came from. Under an
        adapter it is the model without it, or a second adapter begun as the first, and some take weights."""
        for adapter in getattr(self.accelerator.unwrap_model(self.model), "peft_config", {}).values():
            begun = str(getattr(adapter, "init_lora_weights", True)).lower()
            if self.beta and begun.startswith(_TAKES_WEIGHTS):
                raise ValueError(
                    f"TurnGRPOTrainer: init_lora_weights={begun!r} moves weights into the adapter; beta > "
                    "0 measures the KL from what is left: leave init_lora_weights at True, or set beta=0.0"
                )
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
                "one step is made from each batch of completions: every ratio is 1, and neither clip nor "
                "stabiliser ever acts; set num_iterations=2 or more, or steps_per_generation above "
                "gradient_accumulation_steps"
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
        self._minibatch = _Minibatch(dict(inputs), mask, Layout.of(mask))
        try:
            loss = super()._compute_loss(model, self._minibatch.inputs)
            self._log_ratios(self._minibatch)
            if self._measures_bias and self.model.training:
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
            self._put_in_terms(batch)
        return batch.scores

    def _put_in_terms(self, batch: _Minibatch) -> None:
        """Each token's term in place of its advantage, beside a log-ratio of 0, whose two gradients
        cancel."""
        logprobs = batch.scores[0]
        old = batch.inputs.get("old_per_token_logps")
        old = logprobs.detach() if old is None else old
        # Half precision would round a ratio near 1 away.
        precision = torch.promote_types(logprobs.dtype, torch.float32)
        log_ratio = batch.layout.gather(logprobs.to(precision) - old)
        layout = Layout.of(batch.mask[batch.mask.any(1)])
        tokens = self.objective.tokens(log_ratio, self._advantages(batch), layout, batch.layout.gather(old))
        batch.tokens, batch.bounds = tokens, Bounds(tokens.ratio, tokens.ratio)
        if len(tokens.ratio):
            batch.terms, batch.bounds = self.objective.terms(tokens)
        batch.inputs.setdefault("sampling_per_token_logps", old)  # what the off-policy mask compares with
        batch.inputs["advantages"] = self._weighed(batch, batch.terms.terms if batch.terms else log_ratio)
        batch.inputs["old_per_token_logps"] = logprobs

    def _weighed(self, batch: _Minibatch, terms: Tensor) -> Tensor:
        """(N,) terms -> (B, T), weighed so that TRL's mean over tokens is the mean over turns where that is
        asked for."""
        terms = batch.layout.scatter(terms)
        if not self._turn_mean:
            return terms
        wanted, given = (
            loss_weights(batch.mask, kind, terms.dtype) for kind in ("turn_mean", "trajectory_mean")
        )
        return terms * (wanted / given).masked_fill(~batch.mask, 0.0)

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
        if batch.terms is None:
            return
        bias = self._bare_loss(batch, batch.terms.terms) - self._bare_loss(batch, batch.terms.unrestricted)
        if self._bias_estimator == "logprob":
            (gradient,) = torch.autograd.grad(bias, batch.scores[0], retain_graph=True)
            # Micro-batches hold different tokens, so their squares add.
            self._bias_square += gradient.double().square().sum().item()
            return
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradient = torch.autograd.grad(bias, parameters, retain_graph=True, materialize_grads=True)
        before = self._bias or [0.0] * len(parameters)
        self._bias = [old + new for old, new in zip(before, gradient, strict=True)]

    def _bare_loss(self, batch: _Minibatch, terms: Tensor) -> Tensor:
        """TRL's loss on (N,) terms, without its entropy bonus, auxiliary loss and metrics."""
        bare = {"_entropy_bonus_enabled": False, "aux_loss_enabled": False}
        bare["_metrics"] = {mode: defaultdict(list) for mode in self._metrics}
        with _set(self, **bare):
            return super()._compute_loss(
                self.model, batch.inputs | {"advantages": self._weighed(batch, terms)}
            )

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
        clipped = batch.terms.clipped if batch.terms else torch.zeros_like(ratio, dtype=torch.bool)
        sides = {"low": clipped & (ratio < 1), "high": clipped & (ratio > 1), "region": clipped}
        for name, clipped in sides.items():
            shares = clipped.to(ratio.dtype)
            self._log_mean(f"clip_ratio/turn_{name}_mean", layout.turn_mean(shares))
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


class _WarnIfResumed(TrainerCallback):
    """TRL goes on with the next prompts only between two batches of completions of its first epoch."""

    def on_train_begin(self, args, state, control, **kwargs):
        log, begun = logging.getLogger(__name__), state.global_step * args.gradient_accumulation_steps
        if begun % (args.steps_per_generation * args.num_iterations):
            log.warning(
                "resumed at step %d, inside a batch of completions: its prompts are answered and trained on "
                "anew; set save_steps to a multiple of steps_per_generation * num_iterations",
                state.global_step,
            )
        if (state.epoch or 0) >= 1:
            log.warning(
                "resumed in epoch %d: TRL takes the order of its first one, so some prompts come twice and "
                "others not at all; train one epoch of dataset.repeat(n).shuffle(seed)",
                1 + int(state.epoch),
            )


class _DivideGradient(TrainerCallback):
    """Called between gradient-norm clipping and the optimiser's step."""

    def __init__(self, trainer: TurnGRPOTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer._divide_gradient()


_TAKES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # of PEFT's ways to begin an adapter
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


@contextmanager
def _set(target: object, **values: Any) -> Iterator[None]:
    """Attributes for the length of a block."""
    before = {name: getattr(target, name) for name in values}
    try:
        vars(target).update(values)
        yield
    finally:
        vars(target).update(before)
