"""Our losses, advantages and clip fractions against verl's and TRL's own code, on the same tensors."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stppo.objectives import (
    Clip,
    GroupCentred,
    GroupNormalised,
    LeaveOneOut,
    NoStabilizer,
    Objective,
    Ratio,
    TokenGAE,
)
from stppo.trajectories import Trajectories

pytestmark = pytest.mark.engines

AGGREGATIONS = {"trajectory_mean": "seq-mean-token-mean", "token_mean": "token-mean"}


def normal(shape, seed, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def batch():
    """Eight trajectories of one to three turns with environment tokens between, terminal rewards, groups of 4."""
    mask = torch.zeros(8, 20, dtype=torch.bool)
    for i in range(8):
        mask[i, 2 : 5 + i % 3] = True
        mask[i, 9 : 9 + (i % 4)] = True
        mask[i, 15 : 15 + (i % 5)] = i % 2 == 0
    rewards = torch.zeros(8, 20, dtype=torch.float64)
    for i, reward in enumerate([1.0, 0.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0]):
        rewards[i, int(mask[i].nonzero()[-1])] = reward
    return Trajectories(
        tokens=torch.zeros(8, 20, dtype=torch.int64),
        lengths=torch.full((8,), 20),
        agent_mask=mask,
        behaviour_logprobs=-normal((8, 20), 1).abs() * mask,
        rewards=rewards,
        group_ids=torch.arange(8) // 4,
        policy_updates=torch.zeros(8, dtype=torch.int64),
    )


def make(granularity, low, high, loss_aggregation="trajectory_mean"):
    return Objective(TokenGAE(), Ratio(granularity), Clip(low, high), NoStabilizer(), loss_aggregation)


def ours(objective, batch, logprobs, advantages):
    logprobs = logprobs.clone().requires_grad_()
    got = objective.surrogate(logprobs, batch, advantages)
    return got.loss, torch.autograd.grad(got.loss, logprobs)[0], got.diagnostics


def verls(name, batch, logprobs, advantages, low, high, mode, **options):
    algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        **options,
    )
    logprobs = logprobs.clone().requires_grad_()
    loss, metrics = algos.get_policy_loss_fn(name)(
        old_log_prob=batch.behaviour_logprobs,
        log_prob=logprobs,
        advantages=advantages,
        response_mask=batch.agent_mask.double(),
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=None,
    )
    return loss, torch.autograd.grad(loss, logprobs)[0], metrics


def assert_close(a, b, tolerance=1e-7):
    # verl divides by lengths + 1e-8, hence not 1e-12.
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(a[1], b[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("loss_aggregation", AGGREGATIONS)
def test_token_ppo_is_verls_vanilla_without_its_dual_clip(batch, loss_aggregation):
    logprobs, advantages = batch.behaviour_logprobs + normal((8, 20), 2, 0.6), normal((8, 20), 3)
    mode = AGGREGATIONS[loss_aggregation]
    mine = ours(make("token", 0.2, 0.28, loss_aggregation), batch, logprobs, advantages)
    theirs = verls("vanilla", batch, logprobs, advantages, 0.2, 0.28, mode, clip_ratio_c=1e9)
    assert_close(mine, theirs)
    assert theirs[2]["actor/pg_clipfrac"] > 0.1
    assert mine[2]["clip_fraction"] == pytest.approx(theirs[2]["actor/pg_clipfrac"], abs=1e-6)
    assert mine[2]["kl_behaviour_k1"] == pytest.approx(theirs[2]["actor/ppo_kl"], abs=1e-6)


@pytest.mark.parametrize("loss_aggregation", AGGREGATIONS)
def test_sequence_geometric_is_verls_gspo(batch, loss_aggregation):
    """verl lets a sequence's ratio pass gradient token by token (GSPO-token); that is the same gradient only
    where advantage and weight are constant over the sequence, as with outcome rewards."""
    logprobs = batch.behaviour_logprobs + normal((8, 20), 2, 0.02)
    advantages = normal((8, 1), 3).expand(8, 20)
    mode = AGGREGATIONS[loss_aggregation]
    mine = ours(make("sequence", 3e-3, 4e-3, loss_aggregation), batch, logprobs, advantages)
    theirs = verls("gspo", batch, logprobs, advantages, 3e-3, 4e-3, mode)
    assert 0 < theirs[2]["actor/pg_clipfrac"] < 1
    assert_close(mine, theirs)
    assert mine[2]["clip_fraction"] == pytest.approx(theirs[2]["actor/pg_clipfrac"], abs=1e-6)
    uneven = normal((8, 20), 4)
    a = ours(make("sequence", 10.0, 10.0), batch, logprobs, uneven)
    b = verls("gspo", batch, logprobs, uneven, 10.0, 10.0, "seq-mean-token-mean")
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=1e-7)
    assert (a[1] - b[1]).abs().max() > 1e-3


def test_unclipped_geo_mean_is_the_unclipped_sequence_ratio(batch):
    """GMPO clips log-ratios inside the mean, another rule altogether; without a binding clip they agree."""
    logprobs = batch.behaviour_logprobs + normal((8, 20), 2, 0.3)
    advantages = normal((8, 1), 3).expand(8, 20)
    mine = ours(make("sequence", math.inf, math.inf), batch, logprobs, advantages)
    assert_close(mine, verls("geo_mean", batch, logprobs, advantages, 50.0, 50.0, "token-mean"))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.9), (0.9, 0.0)])
def test_token_gae_is_verls_over_a_mask_with_gaps(batch, gamma, lam):
    algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    mask, values = batch.agent_mask, normal((8, 20), 5)
    advantages, returns = algos.compute_gae_advantage_return(batch.rewards, values, mask.double(), gamma, lam)
    credit = TokenGAE(gamma=gamma, lam=lam, whiten=True)(batch, values)
    torch.testing.assert_close(credit.returns[mask], returns[mask], rtol=0, atol=1e-10)
    torch.testing.assert_close(credit.advantages[mask], advantages[mask], rtol=0, atol=1e-7)


def test_group_advantages_are_verls(batch):
    algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    index = np.array(batch.group_ids.tolist())
    mask = batch.agent_mask.double()
    expected = {
        GroupNormalised: algos.compute_grpo_outcome_advantage(batch.rewards, mask, index)[0],
        GroupCentred: algos.compute_grpo_outcome_advantage(
            batch.rewards, mask, index, norm_adv_by_std_in_grpo=False
        )[0],
        LeaveOneOut: algos.compute_rloo_outcome_advantage(batch.rewards, mask, index)[0],
    }
    for rule, advantages in expected.items():
        got = rule(group_size=4)(batch).advantages
        torch.testing.assert_close(got, advantages, rtol=0, atol=1e-7, msg=rule.__name__)


@pytest.mark.parametrize(
    ("granularity", "loss_type", "loss_aggregation"),
    [
        ("token", "grpo", "trajectory_mean"),
        ("token", "bnpo", "token_mean"),
        ("sequence", "grpo", "trajectory_mean"),
    ],
)
def test_losses_and_clip_fractions_are_trls(batch, granularity, loss_type, loss_aggregation):
    """TRL's own `_compute_loss`, on a stand-in for the trainer that hands it our log-probs."""
    trainer_class = pytest.importorskip("trl").GRPOTrainer
    spread, low, high = (0.5, 0.2, 0.28) if granularity == "token" else (0.02, 3e-3, 4e-3)
    logprobs = (batch.behaviour_logprobs + normal((8, 20), 2, spread)).requires_grad_()
    advantages = normal((8,), 3)
    metrics = {"train": {key: [] for key in _TRL_METRICS}}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=granularity,
        beta=0.0,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        args=SimpleNamespace(delta=None),
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x),
        _metrics=metrics,
    )
    inputs = {
        "prompt_ids": batch.tokens[:, :1],
        "prompt_mask": torch.ones(8, 1),
        "completion_ids": batch.tokens,
        "completion_mask": torch.ones(8, 20),
        "tool_mask": batch.agent_mask.double(),
        "advantages": advantages,
        "old_per_token_logps": batch.behaviour_logprobs,
    }
    loss = trainer_class._compute_loss(trainer, None, inputs)
    theirs = (loss, torch.autograd.grad(loss, logprobs)[0])
    objective = make(granularity, low, high, loss_aggregation)
    mine = ours(objective, batch, logprobs.detach(), advantages[:, None].expand(8, 20))
    assert_close(mine, theirs, 1e-10)
    fraction = metrics["train"]["clip_ratio/region_mean"][0]
    assert 0 < fraction < 1
    if granularity == "token":  # TRL counts sequences there, we count agent tokens
        assert mine[2]["clip_fraction"] == pytest.approx(fraction, abs=1e-6)
        assert mine[2]["clip_fraction_low"] == pytest.approx(
            metrics["train"]["clip_ratio/low_mean"][0], abs=1e-6
        )


_TRL_METRICS = ["entropy"] + [
    f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
]
