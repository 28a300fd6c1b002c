"""Adapters for hosts whose loss function gets log-probs and a mask.

prime-rl and slime are on no index, and SkyRL needs a newer Python: there a stand-in has the documented signature, so these
tests show what such a host would get, not that it calls us so. TorchRL's is its own, where it is installed."""

import math
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch

from stppo.objectives import estimated_bias_norms
from stppo.plugins import losses, methods, prime_rl, skyrl, slime


def batch(rows=6, width=12):
    """Log-probs now and when sampled, advantages, mask of two turns; the last row has no agent token."""
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64) - 0.2
    now = (old + 0.4 * torch.randn(rows, width, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, width)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row in range(rows - 1):
        mask[row, 1 : 3 + row] = mask[row, 8 : 9 + row % 3] = True
    return now.requires_grad_(), old, advantages, mask


def expected(name, mean, now, old, advantages, mask):
    """The gradient of the YAML's loss under an aggregation, divided by its stabiliser's word on the log-prob norm."""
    objective, rows = losses.objective_of(name), mask.any(1)
    objective = type(objective)(**{**vars(objective), "loss_aggregation": mean})
    found = objective.loss(now[rows], old[rows], advantages[rows], mask[rows])
    norm = estimated_bias_norms(found, now)["clipping_bias_norm_logprob"] if found.any_clipped else 0.0
    return torch.autograd.grad(found.ppo_loss / objective.stabilizer.divisor(norm), now)[0]


def stand_in(monkeypatch, path, **content):
    names = path.split(".")
    for end in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), ModuleType(".".join(names[:end])))
    vars(sys.modules[path]).update(content)


@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict


@pytest.mark.parametrize("name", ["turn_ppo", "gspo", "topr"])
def test_prime_rl_sums_trajectories_to_a_mean_over_tokens(monkeypatch, name):
    stand_in(monkeypatch, "prime_rl.trainer.rl.loss", LossOutputs=LossOutputs)
    now, old, advantages, mask = batch()
    inputs = [
        SimpleNamespace(trainer_logprobs=a, inference_logprobs=b, advantages=c, loss_mask=d)
        for a, b, c, d in zip(now, old, advantages, mask, strict=True)
    ]
    outputs = [getattr(prime_rl, name)(one) for one in inputs]
    got = torch.autograd.grad(sum(o.loss for o in outputs) / mask.sum(), now)[0]
    torch.testing.assert_close(got, expected(name, "token_mean", now, old, advantages, mask))
    assert 0 <= float(outputs[0].metrics["clip_fraction"]) <= 1


@pytest.mark.parametrize("name", ["st_ppo", "m2po"])
def test_prime_rl_refuses_what_reads_a_whole_batch(name):
    with pytest.raises(ValueError, match=f"{name}: .*one trajectory at a time"):
        getattr(prime_rl, name)(None)


@pytest.mark.parametrize("name", ["turn_ppo", "st_ppo"])
def test_skyrl_sums_what_its_advantages_average(monkeypatch, name):
    registry = {}

    def register_policy_loss(key):
        return lambda function: registry.setdefault(key, function)

    stand_in(
        monkeypatch,
        "skyrl.backends.skyrl_train.utils.ppo_utils",
        register_policy_loss=register_policy_loss,
    )
    now, old, advantages, mask = batch()
    scaled = advantages / (mask.any(1).sum() * mask.sum(1, keepdim=True).clamp(min=1))  # its sequence_mean
    loss, metrics = registry[skyrl.register(name)](now, old, scaled, SimpleNamespace(), mask.long())
    got = torch.autograd.grad(loss, now)[0]
    torch.testing.assert_close(got, expected(name, "trajectory_mean", now, old, advantages, mask))
    assert metrics["stabilizer_divisor"] >= 1


@pytest.mark.parametrize("option", ["tis_ratio_type", "outlier_token_is_threshold_low"])
def test_skyrl_does_not_pass_over_a_correction_that_is_on(option):
    config = SimpleNamespace(off_policy_correction=SimpleNamespace(**{option: 0.0}))
    now, old, advantages, mask = batch()
    with pytest.raises(ValueError, match=f"off_policy_correction.{option}"):
        skyrl.loss("turn_ppo", None, now, old, advantages, config, mask)


@pytest.mark.parametrize("name", ["st_ppo", "so_grpo_ctn"])
def test_slime_averages_trajectories_as_it_does(monkeypatch, name):
    now, old, advantages, mask = (value[:-1] for value in batch())
    lengths = [9, 12, 11, 12, 10]

    def cut(value):
        return [row[:n] for row, n in zip(value, lengths, strict=True)]

    def sum_of_sample_mean(flat):
        parts = zip(flat.split(lengths), cut(mask), strict=True)
        return sum((part * m).sum() / m.sum() for part, m in parts)

    scored = {"log_probs": cut(now)}
    place = "slime.backends.megatron_utils.loss"
    stand_in(monkeypatch, place, get_log_probs_and_entropy=lambda logits, **_: scored)
    content = {"log_probs": cut(old), "advantages": cut(advantages), "loss_masks": cut(mask.long())}
    content |= dict.fromkeys(("unconcat_tokens", "total_lengths", "response_lengths"))
    args = SimpleNamespace(use_rollout_logprobs=False)
    loss, logged = getattr(slime, name)(args, content, torch.zeros(1, 4, 3), sum_of_sample_mean)
    got = torch.autograd.grad(loss, now)[0]
    objective = losses.objective_of(name)
    whole = objective.loss(now, old, advantages, mask)
    weights = 1 / (mask.sum(1, keepdim=True) * torch.ones_like(old))
    found, norm, divisor = losses.evaluate(
        objective, now, old, advantages, layout := losses.Layout.of(mask), layout.gather(weights)
    )
    wanted = found.ppo_loss / divisor + (0 if whole.penalty is None else 5 * whole.penalty)
    torch.testing.assert_close(got, torch.autograd.grad(wanted, now)[0])
    assert math.isclose(float(logged["stabilizer_divisor"]) / 5, divisor)
    with pytest.raises(ValueError, match="context-parallel-size"):
        getattr(slime, name)(SimpleNamespace(context_parallel_size=2), content, None, None)


@pytest.mark.parametrize(
    ("name", "part"),
    [("st_pp", "did you mean st_ppo"), ("kl_stop", "ends the updates"), ("st_ppo_cheap", "last block")],
)
def test_what_is_no_loss_is_no_attribute(name, part):
    with pytest.raises(AttributeError, match=part):
        getattr(slime, name)
    with pytest.raises(ValueError, match=part):
        skyrl.register(name)


def test_shapes_that_differ_are_named():
    now, old, advantages, mask = batch()
    with pytest.raises(ValueError, match="advantages: must be"):
        skyrl.loss("turn_ppo", None, now, old, advantages[:, :-1], None, mask)


@pytest.mark.parametrize("mean", ["token_mean", "prompt_mean"])
@pytest.mark.parametrize("name", ["turn_ppo", "st_ppo", "topr"])
def test_torchrl_computes_the_losses_of_the_yaml_files(name, mean):
    llm = pytest.importorskip("torchrl.objectives.llm", reason="torchrl is not installed")
    from tensordict import TensorDict

    from stppo.plugins.torchrl import StppoLoss

    now, old, advantages, mask = (value[:-1] for value in batch())

    class Policy(torch.nn.Module):
        in_keys = ()
        mask = None

        def get_dist(self, *_, **__):
            return self

        def log_prob(self, action):
            return now

    policy = Policy()
    policy.mask = mask
    loss = StppoLoss(policy, name, entropy_bonus=False, aggregation=mean)
    assert isinstance(loss, llm.GRPOLoss)
    data = {"tokens": {"full": mask.long()}, "log_probs": {"full": old}, "advantage": advantages[..., None]}
    found = loss(TensorDict(data, [len(mask)]))
    got = torch.autograd.grad(found.loss_objective.sum(), now)[0]
    ours = {"token_mean": "token_mean", "prompt_mean": "trajectory_mean"}[mean]
    torch.testing.assert_close(got, expected(name, ours, now, old, advantages, mask))
    with pytest.raises(ValueError, match="clip_epsilon"):
        StppoLoss(policy, name, clip_epsilon=0.1)


def test_the_divisor_acts_where_c0_is_that_of_the_norm_a_loss_sees():
    now, old, advantages, mask = batch()
    _, metrics = skyrl.loss("st_ppo", {"stabilizer": {"c0": 1e-3}}, now, old, advantages, None, mask)
    assert metrics["stabilizer_divisor"] == pytest.approx(metrics["clipping_bias_norm_logprob"] / 1e-3)
    assert "c0" in methods.knobs_of("st_ppo")["stabilizer"]
