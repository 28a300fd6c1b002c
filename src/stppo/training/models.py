"""The models of a run, each where and how it computes: policy, reference, critic."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stppo.config.settings import RunConfig
from stppo.policy.compiled import choose_kernels
from stppo.policy.compute import body_of, place, resolve_device
from stppo.policy.critic import Critic
from stppo.policy.frozen import freeze_below, frozen_copy, is_divided, states_below
from stppo.policy.policy import load_policy, score
from stppo.training.gradients import Passes, join
from stppo.trajectories import Trajectories


@dataclass
class Models:
    """policy; reference: the warm start, frozen, or under LoRA the policy itself, whose adapters are then
    switched off while it scores, and None where it is not scored (`RunConfig.scores_reference`); critic: None
    where nothing reads its values. kernels: what computes them, "compiled" or "eager"."""

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    critic: Critic | None
    kernels: str = "eager"

    def with_states(self, batch: Trajectories) -> Trajectories:
        """The batch with the states of the policy's frozen layers, where it has such layers and they were not
        kept."""
        body = body_of(self.policy)
        if not is_divided(body) or batch.below is not None:
            return batch
        return dataclasses.replace(batch, below=states_below(body, batch))

    def reference_logprobs(self, batch: Trajectories, passes: Passes, temperature: float) -> Tensor | None:
        """(B, T) log-probs of the agent tokens under the reference, without graph; None where it is not
        scored."""
        if self.reference is None:
            return None
        off = self.policy.disable_adapter if self.reference is self.policy else contextlib.nullcontext
        with off():
            return logprobs(self.reference, batch, passes, temperature)


@torch.no_grad()
def logprobs(model: PreTrainedModel, batch: Trajectories, passes: Passes, temperature: float) -> Tensor:
    """(B, T) log-probs of the agent tokens under a model, nats, without graph."""
    parts = passes.cut(batch)
    chunks = passes.chunks_of(parts)
    scored = [(rows, score(model, part, temperature, chunks).logprobs) for rows, part in parts]
    return join(scored, batch.tokens)


def make_models(policy: PreTrainedModel, warm_start: Path, settings: RunConfig, critic: bool) -> Models:
    """Models of a run from the policy that a warm start's folder holds.

    Weights that are trained are float32 in every precision. With training.precision=bfloat16 what stays
    frozen beside adapters is bfloat16, and of the reference the linear layers, so that its log-probs begin as
    the policy's very own. With policy.trainable_layers policy, reference and critic share the layers below.
    Raises ValueError where the device is not there, or the policy has too few layers."""
    training, lora = settings.training, settings.policy.lora
    divided, wanted = settings.policy.trainable_layers, settings.scores_reference
    device = resolve_device(training.device)
    frozen = torch.bfloat16 if training.precision == "bfloat16" else torch.float32
    if lora is not None:
        for weight in policy.parameters():  # `policy.to` would round the rotary frequencies, too
            weight.data = weight.data.to(frozen)
    place(policy, device, training.precision, training.gradient_checkpointing)
    if divided is not None:
        freeze_below(policy, divided)
    plain = lora is None and divided is None
    kernels = choose_kernels(policy, training.kernels if plain else "eager")
    values = Critic(policy, lora) if critic else None
    if lora is not None:
        from stppo.policy.lora import with_lora

        policy = with_lora(policy, lora)
        return Models(policy, policy if wanted else None, values, kernels)
    if not wanted:
        return Models(policy, None, values, kernels)
    if divided is not None:
        return Models(policy, frozen_copy(policy), values, kernels)
    reference = load_policy(warm_start, settings.policy.attention).requires_grad_(False)
    if training.precision == "bfloat16":
        for layer in body_of(reference).modules():
            if isinstance(layer, nn.Linear | Conv1D):
                layer.to(torch.bfloat16)  # as autocast has it in each pass of the policy
    place(reference, device, training.precision)
    if kernels == "compiled":
        choose_kernels(reference, training.kernels)
    return Models(policy, reference, values, kernels)
