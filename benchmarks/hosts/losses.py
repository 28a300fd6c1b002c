"""Each library's own advantages and loss on the batch, from a line of its own options: one function for each library.

All take such a line, the batch and, to cut it, a number of trajectories in each micro-batch; they return the loss's gradient and the advantages,
(B, T) each in float64.
"""

from __future__ import annotations

import ast
import inspect
import os
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

from benchmarks.hosts.batch import GROUP, Batch
from stppo.trajectories import Layout

# ---- verl ---------------------------------------------------------------------------------------


def verl(line: str, batch: Batch, size: int | None = None) -> tuple[Tensor, Tensor]:
    """(gradient, advantages) of verl's default trainer under the launch options `line`, in micro-batches of `size`
    trajectories: `compute_advantage` and `ppo_loss` on its own config."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.utils import tensordict_utils
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    import stppo.plugins.verl  # noqa: F401

    size = size or len(batch.mask)
    needed = [
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}",
        f"actor_rollout_ref.rollout.n={GROUP}",
    ]
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        config = compose("ppo_trainer", overrides=[*needed, *shlex.split(line)])
    OmegaConf.resolve(config)
    mask = batch.mask.double()
    given = {"token_level_rewards": batch.rewards, "response_mask": mask, "values": batch.values}
    questions = {"uid": np.array(batch.questions.tolist(), dtype=object)}
    options = config.algorithm
    advantages = compute_advantage(
        DataProto.from_dict({name: value.clone() for name, value in given.items()}, questions),
        adv_estimator=options.adv_estimator,
        gamma=options.gamma,
        lam=options.lam,
        num_repeat=GROUP,
        norm_adv_by_std_in_grpo=options.norm_adv_by_std_in_grpo,
        config=options,
    ).batch["advantages"]
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    logprobs = batch.new.clone().requires_grad_()
    gradient, lengths = torch.zeros_like(logprobs), batch.lengths

    def ragged(rows: Tensor, value: Tensor, before: int = 0, after: int = 0) -> Tensor:
        pad = torch.nn.functional.pad
        parts = [pad(value[i, : lengths[i]], (before, after)) for i in rows.tolist()]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    for rows in torch.arange(len(mask)).split(size):
        columns = {"response_mask": mask.long(), "old_log_probs": batch.old, "advantages": advantages}
        columns |= {"responses": mask.long()}
        data = TensorDict(
            {name: ragged(rows, value) for name, value in columns.items()}, batch_size=len(rows)
        )
        data["prompts"] = torch.nested.as_nested_tensor(
            [torch.zeros(2, dtype=torch.long) for _ in rows], layout=torch.jagged
        )
        counts = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
        tensordict_utils.assign_non_tensor(data, **counts)
        # A model's log-probs stand one place before the token that they are of.
        loss, _ = ppo_loss(actor, {"log_probs": ragged(rows, logprobs, 1, 1)}, data)
        gradient += torch.autograd.grad(loss, logprobs)[0]
    return gradient, advantages


# ---- TRL ----------------------------------------------------------------------------------------


def trl(line: str, batch: Batch, size: int | None = None) -> tuple[Tensor, Tensor]:
    """(gradient, advantages) of TRL's trainer, or ours on top of it, under the config that `line` is, in micro-batches of
    `size` trajectories whose gradients are accumulated. The trajectories come from a `rollout_func`, so that advantages, masks
    and counts are TRL's."""
    from trl import GRPOTrainer, RLOOTrainer

    ((kind, given),) = _calls(line)
    size, rows = size or len(batch.mask), len(batch.mask)
    fixed = dict(
        per_device_train_batch_size=size, gradient_accumulation_steps=rows // size, num_generations=GROUP
    )
    quiet = dict(report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False)
    with _quietly(), tempfile.TemporaryDirectory() as folder:
        trainer = _trl_trainer(
            kind, batch, dict(output_dir=folder, num_iterations=2, **fixed, **quiet) | given
        )
        trainer.model.train()
        prompts = [{"prompt": "Who"} for _ in range(rows)]
        inputs = trainer._generate_and_score_completions(prompts)
        inputs["advantages"] = inputs["advantages"].double()
        inputs["old_per_token_logps"] = batch.old
        inputs["old_logps"] = (batch.old * inputs["completion_mask"]).sum(1)  # RLOO's
        logprobs = batch.new.clone().requires_grad_()
        gradient = torch.zeros_like(logprobs)
        trainer.current_gradient_accumulation_steps = rows // size
        for part in torch.arange(rows).split(size):
            scores = (logprobs[part], torch.ones_like(logprobs[part]), None)
            cut = {name: value[part] if value.dim() else value for name, value in inputs.items()}
            base = RLOOTrainer if kind == "RLOOConfig" else GRPOTrainer
            with _swapped(base, "_get_per_token_logps_and_entropies", lambda *_, s=scores, **__: s):
                loss = trainer._compute_loss(trainer.model, cut)
            # Of RLOO's, transformers' trainer takes the mean over what is accumulated.
            scale = size / rows if kind == "RLOOConfig" else 1.0
            gradient += scale * torch.autograd.grad(loss, logprobs)[0]
    return gradient, inputs["advantages"][:, None].expand(batch.mask.shape)


def _trl_trainer(kind: str, batch: Batch, options: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    from stppo.plugins.trl import TurnGRPOConfig, TurnGRPOTrainer

    kinds = {
        "RLOOConfig": (RLOOConfig, RLOOTrainer),
        "GRPOConfig": (GRPOConfig, GRPOTrainer),
        "GMPOConfig": (GMPOConfig, GMPOTrainer),
        "TurnGRPOConfig": (TurnGRPOConfig, TurnGRPOTrainer),
    }
    lengths, mask = batch.lengths, batch.mask.long()

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list]:
        return {
            "prompt_ids": [[1] for _ in prompts],
            "completion_ids": [[1] * length for length in lengths],
            "logprobs": [row[:length].tolist() for row, length in zip(batch.old, lengths, strict=True)],
            "env_mask": [row[:length].tolist() for row, length in zip(mask, lengths, strict=True)],
        }

    def reward(completions: list, **_: Any) -> list[float]:
        return batch.rewards.sum(1).tolist()

    config, trainer = kinds[kind]
    model, tokenizer = _tiny_policy()
    given = dict(model=model, args=config(**options), processing_class=tokenizer, reward_funcs=reward)
    given["train_dataset"] = Dataset.from_list([{"prompt": "Who"}] * len(mask))
    if kind != "RLOOConfig":
        return trainer(**given, rollout_func=rollout)
    made = trainer(**given)  # no roll-out function and no mask of tools: what it generates is all the agent's
    made._generate_single_turn = lambda *_: [[1] * length for length in lengths]
    return made


@cache
def _tiny_policy() -> tuple[Any, Any]:
    from stppo.policy.policy import PolicyConfig, build_policy
    from stppo.world import SyntheticWorld

    small = dict(n_entities=12, n_relations=2, facts_per_document=2, n_name_parts=6, hop_shares=(1.0,))
    split = dict(n_train=16, n_validation=4, n_test=4, held_out=0.34, turn_budget=2, max_turn_tokens=8)
    tokenizer = SyntheticWorld(**small, **split, think_probability=0.0).tokenizer
    size = dict(hidden_size=16, intermediate_size=16, layers=1, heads=1, kv_heads=1, max_positions=64)
    return build_policy(PolicyConfig(name="tiny", **size), tokenizer), tokenizer


# ---- all others ---------------------------------------------------------------------------------
# Their losses and advantages are called as their trainers call them; the line is one or two calls in Python, or options of a launch.


def _calls(line: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and keyword arguments of each call in a line of Python."""
    calls = [statement.value for statement in ast.parse(line).body]
    return [
        (c.func.id, {keyword.arg: ast.literal_eval(keyword.value) for keyword in c.keywords}) for c in calls
    ]


def _parts(batch: Batch, size: int | None) -> tuple[Tensor, ...]:
    return torch.arange(len(batch.mask)).split(size or len(batch.mask))


def torchrl(line: str, batch: Batch, size: int | None = None) -> tuple[Tensor, Tensor]:
    """MCAdvantage on trajectories of two steps, the turns, and a loss with the mask of the agent's tokens; the mean over
    micro-batches, as its examples accumulate. The entropy bonus, which the losses return apart, is left out."""
    from tensordict import TensorDict
    from torchrl.objectives import llm

    (_, credit), (kind, options) = _calls(line)
    engine = llm.MCAdvantage(grpo_size=GROUP, **credit)
    layout, n = Layout.of(batch.mask), len(batch.mask)
    rewards = layout.turn_sum(layout.gather(batch.rewards)).view(n, 2, 1)
    done = torch.tensor([[False], [True]])
    by_turn = []
    for i in range(n):
        steps = {"query": batch.questions[i].expand(2, 1), "next": {"reward": rewards[i], "done": done}}
        found = engine.inv(TensorDict(steps, [2]))
        if found is not None:
            by_turn += found["advantage"].flatten().tolist()
    advantages = layout.scatter(torch.tensor(by_turn, dtype=torch.float64)[layout.turns])

    class Policy(torch.nn.Module):
        in_keys = ()

        def __init__(self, logprobs: Tensor, mask: Tensor) -> None:
            super().__init__()
            self.logprobs, self.mask = logprobs, mask

        def get_dist(self, *_: Any, **__: Any) -> Policy:
            return self

        def log_prob(self, action: Tensor) -> Tensor:
            return self.logprobs

    logprobs = batch.new.clone().requires_grad_()
    gradient, parts = torch.zeros_like(logprobs), _parts(batch, size)
    for rows in parts:
        loss = getattr(llm, kind)(Policy(logprobs[rows], batch.mask[rows]), entropy_bonus=False, **options)
        data = {"tokens": {"full": batch.mask[rows].long()}, "log_probs": {"full": batch.old[rows]}}
        data["advantage"] = advantages[rows][..., None]
        found = loss(TensorDict(data, [len(rows)])).loss_objective
        gradient += torch.autograd.grad(found.sum(), logprobs)[0] / len(parts)
    return gradient, advantages


def openrlhf(line: str, batch: Batch, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Launch options on its defaults: `compute_advantages_and_returns` and `PolicyLoss` with the counts of the whole batch."""
    _StandIns("flash_attn", "deepspeed", "vllm", "aiohttp", "ray", "pylatexenc")
    from openrlhf.models.loss import PolicyLoss
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    given = dict(option.removeprefix("--").split("=") for option in shlex.split(line))
    advantage = dict(estimator="gae", gamma=1.0, lambd=1.0, no_std_norm=False)
    advantage["estimator"] = given.pop("algo.advantage.estimator", "gae")
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=SimpleNamespace(**advantage)),
        rollout=SimpleNamespace(n_samples_per_prompt=GROUP),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    mask = batch.mask.double()
    experience = Experience(action_mask=mask, values=batch.values.clone(), rewards=batch.rewards.sum(1))
    experience.index, experience.kl, experience.info = list(range(len(mask))), torch.zeros_like(mask), {}
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        advantage_estimator=advantage["estimator"],
        kl_ctl=SimpleNamespace(value=0.01),
        get_advantages_and_returns=lambda *a: RemoteExperienceMaker.get_advantages_and_returns(None, *a),
        get_cumulative_returns=lambda *a: RemoteExperienceMaker.get_cumulative_returns(None, *a),
    )
    (experience,) = RemoteExperienceMaker.compute_advantages_and_returns(maker, [experience])
    low, high = (float(x) for x in given.pop("actor.eps_clip_low_high", "0.2 0.2").split())
    loss = PolicyLoss(
        clip_eps_low=low,
        clip_eps_high=high,
        token_level_loss=given.pop("actor.loss_agg_mode", "token-mean") == "token-mean",
        policy_loss_type=given.pop("actor.policy_loss_type", "ppo"),
        **({"dual_clip": float(given.pop("actor.dual_clip"))} if "actor.dual_clip" in given else {}),
    )
    assert not given, given
    counts = {"batch_num_tokens": mask.sum(), "global_batch_size": len(mask)}
    logprobs = batch.new.clone().requires_grad_()
    gradient = torch.zeros_like(logprobs)
    for rows in _parts(batch, size):
        found = loss(
            logprobs[rows], batch.old[rows], experience.advantages[rows].double(), mask[rows], **counts
        )[0]
        gradient += torch.autograd.grad(found, logprobs)[0]
    return gradient, experience.advantages


def areal(line: str, batch: Batch, size: int | None = None) -> tuple[Tensor, Tensor]:
    """`PPOActor.compute_advantages` and `grpo_loss_fn` under a PPOActorConfig; micro-batches weigh by their tokens, as its
    engines weigh them. Without a reference engine, so that its log-probs are 0, as by default."""
    from areal.api.cli_args import NormConfig, PPOActorConfig
    from areal.trainer.ppo.actor import PPOActor, grpo_loss_fn

    ((_, options),) = _calls(line)
    for name in ("reward_norm", "adv_norm"):
        if name in options:
            options[name] = NormConfig(**options[name])
    config = PPOActorConfig(**options)
    pad = torch.nn.functional.pad
    mask = pad(batch.mask.long(), (1, 0))
    lengths = torch.tensor(batch.lengths)[:, None] + 1
    data = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": (torch.arange(mask.shape[1]) < lengths).long(),
        "loss_mask": mask,
        "logprobs": pad(batch.old, (1, 0)),
        "rewards": batch.rewards.sum(1),
    }
    if "reward_norm" not in options:  # a critic in place of a group
        data["values"] = pad(batch.values, (0, 1))
    data = {name: value.float() if value.is_floating_point() else value for name, value in data.items()}
    data = PPOActor(config, None)._compute_advantages(data)
    logprobs = batch.new.clone().requires_grad_()
    gradient = torch.zeros_like(logprobs)
    for rows in _parts(batch, size):
        cut = {name: value[rows] for name, value in data.items()}
        found = grpo_loss_fn(
            pad(logprobs[rows], (0, 1)).float(),  # its statistics want single precision
            torch.zeros(len(rows), mask.shape[1]),
            cut,
            eps_clip=config.eps_clip,
            eps_clip_higher=config.eps_clip_higher,
            c_clip=config.c_clip,
            importance_sampling_level=config.importance_sampling_level,
            use_sapo_loss=config.use_sapo_loss,
            sapo_tau_pos=config.sapo_tau_pos,
            sapo_tau_neg=config.sapo_tau_neg,
        )
        share = cut["loss_mask"].sum() / data["loss_mask"].sum()
        gradient += share * torch.autograd.grad(found, logprobs)[0]
    return gradient, data["advantages"][:, :-1].double()


def art(line: str, batch: Batch, size: int | None = None) -> tuple[Tensor, Tensor]:
    """`packed_tensors_from_tokenized_results` and `loss_fn` under a dev.TrainConfig; a group's advantage as its tokeniser of
    trajectories has it, which wants a chat. The mean over micro-batches, which are steps of their own there."""
    from art.loss import loss_fn
    from art.preprocessing.pack import packed_tensors_from_tokenized_results
    from art.preprocessing.tokenize import TokenizedResult

    ((_, options),) = _calls(line)
    returns, lengths, rows = batch.rewards.sum(1), batch.lengths, []
    for i, length in enumerate(lengths):
        group = returns[batch.questions == batch.questions[i]]
        spread = group.std(correction=0) + 1e-6 if options.get("scale_rewards", True) else 1.0
        row = TokenizedResult(
            advantage=float((returns[i] - group.mean()) / spread),
            chat="",
            token_ids=[i] * (length + 1),
            input_pos=list(range(length + 1)),
            assistant_mask=[0, *batch.mask[i, :length].long().tolist()],
            logprobs=[float("nan"), *batch.old[i, :length].where(batch.mask[i, :length], torch.nan).tolist()],
            pixel_values=None,
            image_grid_thw=None,
            trajectory=None,
            choice_offsets=[],
            extra_logprobs={},
            _tokenizer=None,
        )
        row.weight, row.prompt_id = 1 / (sum(row.assistant_mask) + 1e-6), i
        rows.append(row)
    width = batch.mask.shape[1] + 1
    packed = packed_tensors_from_tokenized_results(
        rows, width, pad_token_id=0, pack_results=False, verbosity=0
    )
    packed.pop("pixel_values"), packed.pop("image_grid_thw")
    packed = {name: value[packed["tokens"][:, 0].argsort()] for name, value in packed.items()}  # it shuffles
    packed["logprobs"] = torch.nn.functional.pad(
        batch.old.where(batch.mask, torch.nan), (1, 0), value=torch.nan
    )
    packed = {name: value.double() if value.is_floating_point() else value for name, value in packed.items()}
    logprobs = batch.new.clone().requires_grad_()
    gradient, parts = torch.zeros_like(logprobs), _parts(batch, size)
    for part in parts:
        cut = {name: value[part].clone() for name, value in packed.items()}
        found = loss_fn(cut, torch.nn.functional.pad(logprobs[part], (0, 1)), None, None, options)
        gradient += torch.autograd.grad(found.policy_loss, logprobs)[0] / len(parts)
    return gradient, packed["advantages"][:, 1:]


def agilerl(line: str, batch: Batch, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Its GRPO's advantages and loss, made without a model: the defaults of its constructor and the options of the line. All
    rows have log-probs of the roll-out, which are the old ones, and the reference is the policy (no KL)."""
    from agilerl.algorithms.grpo import GRPO

    ((_, options),) = _calls(line)
    defaults = inspect.signature(GRPO.__init__).parameters
    given = {name: found.default for name, found in defaults.items() if name != "self"} | options
    made = object.__new__(GRPO)
    for name in ("beta", "off_policy_token_mask_bounds", "off_policy_sequence_mask_threshold", "kl_clamp"):
        setattr(made, name, given[name])
    made.use_bias_correction_kl, made.use_liger_loss = given["use_bias_correction_kl"], False
    made.device, made.loss_norm, made._segment_accumulation_steps = "cpu", given["loss_norm"], None
    made.clip_coef, made.clip_coef_min, made.clip_coef_max = made._resolve_clip_coef(given["clip_coef"])
    names = ("adv_norm", "group_size", "advantage_granularity", "whiten_advantages", "adv_clip_range")
    names += ("filter_zero_adv", "adv_filter_eps", "turn_advantage_trajectory_fallback")
    made._setup_advantage_options(*(given[name] for name in names))
    made._setup_objective(
        given["loss_type"], given["importance_sampling_level"], given["use_kl_advantage_shaping"]
    )
    layout, mask = Layout.of(batch.mask), batch.mask
    turn_ids = layout.scatter(layout.turns % 2 + 1) - 1  # two turns in each row
    advantages, _ = made._calculate_advantages(batch.rewards.sum(1), mask.long(), mask, turn_ids)
    made._window_action_tokens, parts = mask.sum(), _parts(batch, size)
    made.gradient_accumulation_steps = len(parts)
    logprobs = batch.new.clone().requires_grad_()
    gradient = torch.zeros_like(logprobs)
    for rows in parts:
        new, old = logprobs[rows], batch.old[rows]
        found = made._loss_fn(mask[rows], new, old, new.detach(), advantages[rows], turn_ids[rows])[0]
        gradient += torch.autograd.grad(found, logprobs)[0] / len(parts)
    return gradient, advantages.expand(mask.shape)


def swift(line: str, batch: Batch, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Options of `swift rlhf --rlhf_type grpo` on the defaults of its arguments: `compute_advantages` and the loss of its GRPO
    trainer, made without a model, whose reference is the policy (no KL). Its trainer divides by the micro-batches."""
    from swift.arguments import RLHFArguments
    from swift.rl_core.advantage import compute_advantages
    from swift.rl_core.data import GRPOBatch
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    options = dict(option.removeprefix("--").split(" ", 1) for option in line.split(" --"))
    args = SimpleNamespace(
        **{
            name: field.default_factory() if callable(field.default_factory) else field.default
            for name, field in RLHFArguments.__dataclass_fields__.items()
        }
    )
    kinds = {name: type(getattr(args, name)) for name in options}
    vars(args).update(
        {
            name: float(value) if kinds[name] is float or name == "epsilon_high" else value
            for name, value in options.items()
        }
    )
    args.loss_type = options.get("loss_type", "grpo")
    args.num_iterations, args.dataset_shuffle = 1, True
    RLHFArguments._init_grpo(args)
    made = object.__new__(GRPOTrainer)
    made.args, made.model = args, SimpleNamespace(training=True)
    made._prepare_algorithm_params()
    made.accelerator = SimpleNamespace(num_processes=1, gather_for_metrics=lambda found: found)
    made.compute_entropy, made.beta, made.chord_sft_iterator = False, 0.0, None
    made.max_completion_length, made.model_accepts_loss_kwargs, made.compute_loss_func = (
        args.max_completion_length,
        False,
        None,
    )
    made.disable_rollout_importance_sampling, made._has_teacher = True, False
    by_row, _ = compute_advantages(
        batch.rewards.sum(1)[:, None],
        torch.ones(1, dtype=torch.float64),
        GROUP,
        advantage_estimator=made.advantage_estimator,
        scale_rewards=made.scale_rewards,
    )
    advantages = by_row[:, None].expand(batch.mask.shape)
    logprobs, parts = batch.new.clone().requires_grad_(), _parts(batch, size)
    made.current_gradient_accumulation_steps = len(parts)
    gradient = torch.zeros_like(logprobs)
    for rows in parts:
        made._get_per_token_logps_and_entropies = lambda *_, rows=rows, **__: (logprobs[rows], None)
        given = GRPOBatch(
            completion_mask=batch.mask[rows],
            truncated_mask=torch.zeros(len(rows), dtype=torch.bool),
            seq_lengths=batch.mask[rows].sum(1),
            old_per_token_logps=batch.old[rows],
            advantages=advantages[rows],
            num_items_in_batch=batch.mask.sum(),
        )
        found, _ = made._compute_loss_and_metrics(None, {}, given)
        gradient += torch.autograd.grad(found, logprobs)[0] / len(parts)
    return gradient, advantages


def trinity(line: str, batch: Batch, size: int | None = None) -> tuple[Tensor, Tensor]:
    """An AlgorithmConfig completed by Trinity's own validator, its advantages and its loss. Micro-batches add up, as its
    trainer for verl hands them to verl's engine, which does not divide. The reference is the policy (no KL)."""
    from trinity.algorithm import ADVANTAGE_FN, POLICY_LOSS_FN
    from trinity.common.config import AlgorithmConfig, Config
    from trinity.common.config_validator import AlgorithmConfigValidator
    from trinity.common.experience import EID, Experience

    ((_, options),) = _calls(line)
    config = Config(algorithm=AlgorithmConfig(**options))
    AlgorithmConfigValidator().validate(config)
    algorithm = config.algorithm
    credit = ADVANTAGE_FN.get(algorithm.advantage_fn)(**algorithm.advantage_fn_args)
    if credit.compute_in_trainer():
        from verl import DataProto

        tensors = {"token_level_rewards": batch.rewards, "values": batch.values, "response_mask": batch.mask}
        data = DataProto.from_single_dict(tensors | {"uid": np.array(batch.questions.tolist(), dtype=object)})
        advantages = credit(data)[0].batch["advantages"]
    else:
        rows = [
            Experience(
                eid=EID(task=int(batch.questions[i]), run=i),
                tokens=torch.arange(1 + batch.mask.shape[1]),
                action_mask=batch.mask[i],
                reward=float(batch.rewards[i].sum()),
            )
            for i in range(len(batch.mask))
        ]
        advantages = torch.stack([row.advantages for row in credit.process(rows)[0]])
    loss = POLICY_LOSS_FN.get(algorithm.policy_loss_fn)(**algorithm.policy_loss_fn_args)
    logprobs = batch.new.clone().requires_grad_()
    gradient = torch.zeros_like(logprobs)
    for part in _parts(batch, size):
        found, _ = loss(
            logprob=logprobs[part],
            old_logprob=batch.old[part],
            action_mask=batch.mask[part],
            advantages=advantages[part].double(),
        )
        gradient += torch.autograd.grad(found, logprobs)[0]
    return gradient, advantages


def tunix(line: str, batch: Batch, size: int | None = None) -> tuple[Tensor, Tensor]:
    """A learner's configuration, the advantages and the loss that it names, on JAX in float32; micro-batches are averaged, as
    optax.MultiSteps does. All are given the mask of the agent's tokens and old log-probs, also the learners of single turns,
    which have neither. The reference is the policy, which leaves a gradient under the penalty of GRPO's loss; PPO's penalty in
    the reward is left out."""
    import jax
    from flax import nnx
    from jax import numpy as jnp
    from tunix.rl import common, function_registry
    from tunix.rl.agentic import agentic_grpo_learner
    from tunix.rl.grpo import dapo_learner, drgrpo_learner
    from tunix.rl.ppo import ppo_learner

    ((kind, options),) = _calls(line)
    learners = (agentic_grpo_learner, dapo_learner, drgrpo_learner, ppo_learner)
    config = next(getattr(learner, kind) for learner in learners if hasattr(learner, kind))(**options)
    if kind != "PPOConfig":
        config.temperature = 1.0  # the learner takes the roll-outs'
    credit = function_registry.get_advantage_estimator(config.advantage_estimator)
    mask, old, new, rewards, values = (
        jnp.asarray(tensor.numpy(), jnp.float32)
        for tensor in (batch.mask, batch.old, batch.new, batch.rewards, batch.values)
    )
    if config.advantage_estimator == "gae":
        advantages, _ = credit(rewards, values * mask, mask, config.gamma, config.gae_lambda)
    else:
        advantages = credit(rewards=np.asarray(rewards.sum(1)), num_generations=GROUP)
    loss = function_registry.get_policy_loss_fn(config.policy_loss_fn)
    gradient, parts = np.zeros(mask.shape, np.float32), _parts(batch, size)
    for part in parts:
        rows = part.numpy()
        example = SimpleNamespace(
            prompt_ids=None,
            completion_ids=mask[rows],
            completion_mask=mask[rows],
            advantages=jnp.asarray(advantages)[rows],
            old_per_token_logps=old[rows],
            ref_per_token_logps=new[rows],
        )

        def value(logprobs: Any, example: SimpleNamespace = example) -> Any:
            logits = jnp.zeros((*logprobs.shape, 2))
            with _swapped(common, "compute_per_token_logps", lambda *_, **__: (logprobs, logits)):
                return loss(nnx.Dict(), example, config, 0, 1)[0]

        gradient[rows] += np.asarray(jax.grad(value)(new[rows])) / len(parts)
    per_token = np.broadcast_to(np.asarray(advantages).reshape(len(mask), -1), mask.shape)
    return torch.from_numpy(gradient).double(), torch.from_numpy(per_token.copy()).double()


class _StandIns:
    """Empty modules for what a library imports, is not installed and a loss does not need."""

    def __init__(self, *names: str) -> None:
        self.names = {name for name in names if find_spec(name) is None}
        sys.meta_path.append(self)

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__spec__=spec, __path__=[])

    def exec_module(self, module: Any) -> None:
        pass


@contextmanager
def _swapped(owner: type, name: str, value: Any) -> Any:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _quietly() -> Any:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


HOSTS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], tuple[str, ...]]] = {  # function, packages
    "verl": (verl, ("verl", "torch")),
    "trl": (trl, ("trl", "transformers", "torch")),
    "torchrl": (torchrl, ("torchrl", "tensordict", "torch")),
    "openrlhf": (openrlhf, ("openrlhf", "torch")),
    "agilerl": (agilerl, ("agilerl", "torch")),
    "areal": (areal, ("areal", "torch")),
    "art": (art, ("openpipe-art", "torch")),
    "swift": (swift, ("ms-swift", "trl", "torch")),
    "trinity": (trinity, ("trinity-rft", "verl", "torch")),
    "tunix": (tunix, ("google-tunix", "jax", "flax")),
}
