"""Typed settings of a run. Every key of `configs/` that is not built by `_target_` has its field here."""

import dataclasses
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from stppo.config.files import Presentation
from stppo.policy.compiled import Kernels
from stppo.policy.compute import Precision
from stppo.policy.policy import PolicyConfig, check_positions, positions_of
from stppo.rollout.rollout import RolloutConfig, VLLMRolloutConfig
from stppo.world.scripted import DemonstrationNoise

OptimizerName = Literal["adam", "sgd", "adam8bit"]
_MOST = 3e38  # what float32 holds
LoggerName = Literal["tensorboard", "wandb"]


class Section(BaseModel):
    """A config section: unknown keys are errors, and values of another type than the key's, which would else
    be converted: `epochs=true` is no 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class AlgorithmConfig(Section, Presentation):
    """A named point in credit × ratio × clip × stabiliser × loss aggregation, and how figures show it."""

    name: str
    objective: dict[str, Any]


class ReadingConfig(Section):
    """First stage of the warm start: look-ups in made-up documents, until the words looked up have this mean
    probability.

    Left out with max_steps=0, where the world makes up no documents (benchmarks), and where the policy is
    pretrained."""

    target_accuracy: float = Field(ge=0, lt=1)
    max_steps: int = Field(ge=0)
    measure_every: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    learning_rate: float = Field(gt=0, lt=_MOST)
    learning_rate_warmup_steps: int = Field(gt=0)


class WarmStartConfig(Section):
    """Supervised start: reading, then noisy scripted demonstrations of searching, stopped when sampled
    success reaches the target; with max_steps=0 the pretrained weights as they are.

    only_successes: demonstrations that fail, or are longer than a trajectory may be, are left out.
    trained_weights: "all", or those of the "policy" that training trains (adapters, top layers).
    first_questions: ask so many first, and `evaluate_questions` only where their success is within two
    standard errors of the target; null: always all."""

    reading: ReadingConfig
    target_success: float = Field(ge=0, lt=1)
    max_steps: int = Field(ge=0)
    evaluate_every: int = Field(gt=0)
    evaluate_questions: int = Field(gt=0)
    final_samples: int = Field(gt=0)
    demonstrations: int = Field(gt=0)
    only_successes: bool
    trained_weights: Literal["all", "policy"]
    first_questions: int | None = Field(gt=0)
    batch_size: int = Field(gt=0)
    learning_rate: float = Field(gt=0, lt=_MOST)
    noise: dict[str, float]

    @field_validator("noise")
    @classmethod
    def _noise_is_known(cls, noise: dict[str, float]) -> dict[str, float]:
        allowed = [field.name for field in dataclasses.fields(DemonstrationNoise)]
        if unknown := sorted(set(noise) - set(allowed)):
            raise ValueError(f"warm_start.noise.{unknown[0]}: unknown key; allowed: {', '.join(allowed)}")
        try:
            DemonstrationNoise(**noise)
        except ValueError as error:
            raise ValueError(f"warm_start.noise.{error}") from None
        return noise


class DivisorsConfig(Section):
    """Placebo stabiliser: divide the gradient by what another run divided its own by (see
    `training.controls`).

    divides: the gradient, or the step, as that run's stabiliser does. constant: by one number, whose
    reciprocal is the mean of the divisors' reciprocals. Neither stands in the configs of earlier runs."""

    from_run: str | None
    shuffle: bool
    constant: bool = False
    divides: Literal["gradient", "step"] = "gradient"

    @model_validator(mode="after")
    def _shuffle_has_something(self) -> "DivisorsConfig":
        if self.shuffle and self.from_run is None:
            raise ValueError(
                "training.divisors.shuffle=true shuffles the divisors of training.divisors.from_run; "
                "give that run's folder"
            )
        if self.constant and (self.shuffle or self.from_run is None):
            raise ValueError(
                "training.divisors.constant=true divides by one number made of the divisors of "
                "training.divisors.from_run; "
                "give that run's folder, and leave training.divisors.shuffle false"
            )
        return self


class StalenessConfig(Section):
    """Batches as an asynchronous trainer makes them (`training.asynchronous`).

    turns_per_iteration: turns that each dialogue plays while the trainer trains on one batch. discard_above:
    iterations; a group that was begun longer ago is thrown away, null keeps all."""

    turns_per_iteration: int = Field(gt=0)
    discard_above: int | None = Field(None, ge=0)


class TrainingConfig(Section):
    """One regime: how off-policy, how long, with which steps, and the controls of a study.

    kl_weighted: the penalty's tokens by their ratios (`objectives.ratios.kl_to_reference`); staleness: None
    samples whole batches. Neither is in the configs of earlier runs."""

    regime: str
    iterations: int = Field(gt=0)
    trajectories_per_iteration: int = Field(gt=1)
    epochs: int = Field(gt=0)
    minibatches: int = Field(gt=0)
    staleness_iterations: int = Field(ge=0)
    staleness: StalenessConfig | None = None
    device: Literal["auto", "cpu", "cuda"]
    precision: Precision
    kernels: Kernels
    gradient_checkpointing: bool
    micro_batch_tokens: int | None = Field(gt=0)
    optimizer: OptimizerName
    learning_rate: float = Field(gt=0, lt=_MOST)
    max_grad_norm: float | None = Field(gt=0)
    clip_order: Literal["before_divisor", "after_divisor"]
    entropy_coefficient: float = Field(ge=0)
    kl_coefficient: float = Field(ge=0)
    kl_weighted: bool = False
    critic_learning_rate: float = Field(gt=0, lt=_MOST)
    critic_epochs: int = Field(gt=0)
    value_clip: float | None = Field(gt=0)
    bias_norm_every: int = Field(gt=0)
    length_chunks: int = Field(gt=0)
    checkpoint_every: int = Field(gt=0)
    target_kl: float | None = Field(gt=0)
    divisors: DivisorsConfig
    values: Literal["critic", "monte_carlo"]
    monte_carlo_continuations: int = Field(gt=0)

    @model_validator(mode="after")
    def _minibatches_divide(self) -> "TrainingConfig":
        if self.trajectories_per_iteration % self.minibatches:
            raise ValueError(
                f"training.minibatches={self.minibatches} must divide "
                f"trajectories_per_iteration={self.trajectories_per_iteration}"
            )
        return self


class EvaluationConfig(Section):
    """Fixed held-out questions, and how wrong the critic is; all that ends in `every` counts iterations.

    trajectories: shown of the trained policy; no part of a run's identity, and not in the configs of earlier
    runs."""

    every: int = Field(gt=0)
    greedy_every: int = Field(gt=0)
    questions: int = Field(gt=0)
    value_error_every: int = Field(ge=0)
    value_states: int = Field(gt=1)
    value_continuations: int = Field(gt=1)
    trajectories: int = Field(3, gt=0)


class RunConfig(Section):
    """Everything one training run depends on."""

    # Evaluations, whose seeds are a million times as large, stay in 64 bits.
    seed: int = Field(ge=0, lt=2**32)
    warm_start_seed: int = Field(ge=0, lt=2**32)
    algorithm: AlgorithmConfig
    world: dict[str, Any]
    policy: PolicyConfig
    rollout: RolloutConfig | VLLMRolloutConfig = Field(discriminator="engine")
    warm_start: WarmStartConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    loggers: list[LoggerName]  # see copies of what is recorded, so no part of a run's identity

    @property
    def scores_reference(self) -> bool:
        """Whether a run scores the warm start. Its KL is always recorded for policies from scratch, where it
        costs next to nothing; a pretrained one is scored, and kept in memory, only where the loss reads
        it."""
        return self.training.kl_coefficient > 0 or self.policy.pretrained is None

    @property
    def scores_anew(self) -> bool:
        """Whether the trainer scores what was sampled, so that ratios start at 1: of an engine unless it is
        told otherwise, and in PyTorch where a pass over one token rounds otherwise than one over many, in
        bfloat16."""
        if self.rollout.engine == "vllm":
            return self.rollout.behaviour_logprobs == "trainer"
        return self.training.precision == "bfloat16"

    @model_validator(mode="after")
    def _attention_fits(self) -> "RunConfig":
        attention, training = self.policy.attention, self.training
        if attention != "sdpa" and self.rollout.engine == "torch":
            raise ValueError(
                f"policy.attention={attention}: roll-outs in PyTorch need sdpa; use it or rollout=vllm"
            )
        if attention == "flash_attention_2" and (
            training.precision != "bfloat16" or training.device == "cpu"
        ):
            raise ValueError(
                "policy.attention=flash_attention_2 needs a GPU and half precision: set "
                "training.precision=bfloat16 and training.device=auto, or policy.attention=sdpa"
            )
        return self

    @model_validator(mode="after")
    def _trajectories_have_positions(self) -> "RunConfig":
        check_positions(positions_of(self.policy), self.rollout.max_tokens)
        return self

    @model_validator(mode="after")
    def _start_has_weights(self) -> "RunConfig":
        if not self.warm_start.max_steps and self.policy.pretrained is None:
            raise ValueError(
                "warm_start.max_steps=0 takes pretrained weights as they are: set policy.pretrained, or steps"
            )
        return self
