"""Our losses in TorchRL (0.14), in place of its GRPOLoss:

    loss = StppoLoss(policy, "st_ppo", knobs={"stabilizer": {"c0": 1.6e-4}}, masking_strategy="rlhf")
    loss(batch).loss_objective.backward()

Keys, masks, the entropy bonus and the KL terms are GRPOLoss'; so is the average: `aggregation="prompt_mean"`
for the mean of our YAML files. Advantages are the batch's: `MCAdvantage(trajectory_return="sum")` is GRPO's.
Its clip range is not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torchrl.objectives.llm import GRPOLoss

from stppo.plugins.losses import loss_and_metrics, objective_of, weights_of


class StppoLoss(GRPOLoss):
    """GRPOLoss with the policy loss of an algorithm of configs/algorithm.

    knobs: constants in place of the YAML's, nested as there. What was logged of the last batch is in
    `metrics`. ValueError for an unknown algorithm or knob, and for options of GRPOLoss that would do
    nothing."""

    def __init__(
        self, actor_network: Any, algorithm: str, *, knobs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        for option in ("clip_epsilon", "kl_mask_threshold"):
            if options.get(option) is not None:
                raise ValueError(
                    f"StppoLoss.{option}: {algorithm} does not read it; use knobs, or leave it out"
                )
        if "none" in (options.get("aggregation"), options.get("reduction")):
            raise ValueError(
                "StppoLoss: aggregation 'none' has no gradient that a divisor could divide; use token_mean"
            )
        super().__init__(actor_network, **options)
        self.objective = objective_of(algorithm, knobs)
        self.metrics: dict[str, float] = {}

    def _log_weight(self, tensordict: Any, adv_shape: Any) -> tuple[Tensor, Any, Tensor, Tensor]:
        found = super()._log_weight(tensordict, adv_shape)
        self._mask, self._logprobs = found[3], tensordict["_cur_log_prob"]
        return found

    def _compute_policy_objective(self, log_weight: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        mask, logprobs = self._mask, self._logprobs
        weights = weights_of(lambda terms: self._aggregate_loss_value(terms, mask).sum(), log_weight.detach())
        old = (logprobs - log_weight[..., 0]).detach()
        given = (logprobs, old, advantage.expand_as(log_weight)[..., 0], mask, weights[..., 0])
        loss, self.metrics = loss_and_metrics(self.objective, *given)
        clipped = logprobs.new_tensor(self.metrics.get("clip_fraction", 0.0))
        # What the aggregation makes the loss of.
        return (loss / weights.sum()).expand_as(log_weight), clipped
