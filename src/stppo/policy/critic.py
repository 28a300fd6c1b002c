"""The critic: a separate network of the policy's body with a value head."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stppo.policy.compute import body_of, device_of
from stppo.policy.frozen import is_divided, own_upper_part
from stppo.policy.policy import LoraSettings, agent_states, scatter
from stppo.trajectories import Trajectories


class Critic(nn.Module):
    """V(s_t), the expected return of the state before token t (same units as the reward).

    The body starts as a copy of the policy's (as verl does from the SFT model); the head starts at zero,
    so the first values are 0 rather than noise.

    policy: a plain one. lora: train adapters on the copy instead of the copy itself, which is then kept
    frozen: the critic must not move with the policy, so it shares nothing with it but layers that are frozen
    in both (`stppo.policy.frozen`)."""

    def __init__(self, policy: PreTrainedModel, lora: LoraSettings | None = None) -> None:
        super().__init__()
        body = body_of(policy)
        self.body = own_upper_part(body) if is_divided(body) else copy.deepcopy(body)
        if lora is not None:
            from stppo.policy.lora import with_lora

            self.body = with_lora(self.body, lora)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.head.to(device_of(self.body))

    def forward(self, batch: Trajectories, n_chunks: int = 1) -> Tensor:
        """Values (B, T), zero off the agent mask; position t holds the value of the state before token t."""
        states, positions = agent_states(self.body, batch, n_chunks)
        values = self.head(states.to(self.head.weight.dtype)).squeeze(-1)
        return scatter(values, positions, batch.tokens)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 − Var(returns − values) / Var(returns) over the mask; NaN where the returns do not vary."""
    target = returns[mask].double()
    spread = torch.var(target, correction=0)
    if target.numel() == 0 or spread < 1e-8:
        return float("nan")
    return float(1 - torch.var(target - values[mask].double(), correction=0) / spread)
