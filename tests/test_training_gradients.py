"""Micro-batches, checkpointed layers, pieces of logits and bfloat16: what a large model needs changes no gradient."""

import math
from types import SimpleNamespace

import pytest
import torch

from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.objectives.ratios import kl_to_reference
from stppo.policy import policy as policy_module
from stppo.policy.compute import body_of, computing, last_block, logits_of, place
from stppo.policy.critic import Critic
from stppo.policy.policy import PolicyConfig, build_policy, score
from stppo.training.gradients import Passes, PolicyPass, WatchedNorm
from stppo.training.models import Models
from stppo.training.updates import CriticUpdates, PolicyUpdates
from stppo.trajectories import Trajectories

ALGORITHMS = ["s_ppo", "st_ppo", "so_ppo_ctn", "gspo"]  # one of each kind of ratio and stabiliser
VOCABULARY, LONGEST = 23, 40


class Words:
    """As much of a tokenizer as building a policy takes."""

    pad_token_id, eos_token_id = 0, None

    def __len__(self):
        return VOCABULARY


def make_policy(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    shape = PolicyConfig(
        name="x", hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24, max_positions=64
    )
    policy = build_policy(shape, Words()).to(dtype)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(4)
    return policy


@pytest.fixture(scope="module")
def batch():
    """16 trajectories in two groups, 8 to 40 tokens in turns of 1 to 5, sampled by another policy."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, LONGEST + 1, (16,), generator=g)
    lengths[3] = LONGEST
    width = int(lengths.max())
    mask = torch.rand(16, width, generator=g) < 0.6
    mask[:, 0] = False
    mask[:, 5] = True
    mask &= torch.arange(width) < lengths[:, None]
    unscored = Trajectories(
        tokens=torch.randint(VOCABULARY, (16, width), generator=g),
        lengths=lengths,
        agent_mask=mask,
        behaviour_logprobs=torch.zeros(16, width, dtype=torch.float64),
        rewards=torch.zeros(16, width, dtype=torch.float64),
        group_ids=torch.arange(16) // 8,
        policy_updates=torch.zeros(16, dtype=torch.long),
    )
    state = unscored.state_dict()
    with torch.no_grad():
        other = make_policy()
        for weight in other.parameters():
            weight.add_(0.05 * weight.abs().mean() * torch.randn(weight.shape, generator=g))
        state["behaviour_logprobs"] = score(other, unscored).logprobs
    last = torch.where(mask, torch.arange(width), 0).argmax(1)
    rewards = state["rewards"].clone()
    rewards[torch.arange(16), last] = (torch.rand(16, generator=g) < 0.4).double()
    return Trajectories(**state | {"rewards": rewards})


def objective_of(name):
    return build(compose([f"algorithm={name}"])["algorithm"]["objective"], "objective")


def settings_with(*overrides):
    return load(compose(["preset=smoke", *overrides])).settings.training


def one_step(name, batch, budget, *overrides):
    """(row of metrics, gradient) of one step of plain descent with all regularisers and norms on."""
    policy, objective = make_policy(), objective_of(name)
    training = settings_with(
        "training.kl_coefficient=0.3",
        "training.entropy_coefficient=0.2",
        "training.bias_norm_every=1",
        *overrides,
    )
    place(policy, torch.device("cpu"), "float32", training.gradient_checkpointing)
    g = torch.Generator().manual_seed(2)
    values = torch.rand(batch.tokens.shape, generator=g, dtype=torch.float64)
    advantages = objective.credit(batch, values).advantages.double()
    reference = batch.behaviour_logprobs + 0.1 * torch.randn(values.shape, generator=g, dtype=torch.float64)
    weights = 1 + torch.rand(values.shape, generator=g, dtype=torch.float64)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    found = []  # gradients are let go after the step
    optimizer.register_step_pre_hook(lambda *_: found.extend(p.grad.flatten() for p in policy.parameters()))
    passes = Passes(budget, chunks=2)
    steps = PolicyUpdates(policy, optimizer, objective, training, passes, 1.0, None)
    row = {"update": 1, "iteration": 1, "epoch": 0, "minibatch": 0}
    steps.step(row, batch, advantages, reference, weights)
    del row["seconds_update"]
    return row, torch.cat(found)


def test_regularisers_enter_the_gradient_with_their_signs(batch):
    """Plus the mean KL to the reference, minus the mean entropy, over agent tokens; the weighted KL is another one."""
    none = "training.kl_coefficient=0", "training.entropy_coefficient=0"
    plain, with_kl, with_entropy, both = (
        one_step("token_ppo", batch, None, *off)[1] for off in (none, none[1:], none[:1], ())
    )
    policy = make_policy()
    scores = score(policy, batch, entropy_gradient=True)
    g = torch.Generator().manual_seed(2)  # as `one_step` draws its reference
    torch.rand(batch.tokens.shape, generator=g, dtype=torch.float64)
    reference = batch.behaviour_logprobs + 0.1 * torch.randn(
        batch.tokens.shape, generator=g, dtype=torch.float64
    )
    mask = batch.agent_mask
    kl = kl_to_reference(scores.logprobs[mask], reference[mask]).mean()
    for found, expected in ((with_kl, 0.3 * kl), (with_entropy, -0.2 * scores.entropy[mask].mean())):
        gradient = torch.autograd.grad(expected, list(policy.parameters()), retain_graph=True)
        gradient = torch.cat([part.flatten() for part in gradient])
        assert gradient.norm() > 1e-3
        torch.testing.assert_close(found - plain, gradient, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(both - plain, with_kl + with_entropy - 2 * plain, rtol=1e-3, atol=1e-6)
    _, weighted = one_step("token_ppo", batch, None, "+training.kl_weighted=true")
    assert (weighted - both).norm() > 1e-4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batches_give_the_gradient_and_the_bias_norm_of_one_batch(name, batch):
    row, gradient = one_step(name, batch, None)
    assert row["clip_fraction"] > 0.02 and row["clipping_bias_norm"] > 1e-4, "C must not be trivial"
    for budget in (1, 90, 200):
        assert len(Passes(budget).cut(batch)) > 2
        other, found = one_step(name, batch, budget)
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)
        assert other == pytest.approx(row, rel=1e-10, abs=1e-11, nan_ok=True)


@pytest.mark.parametrize("budget", [None, 90])
def test_checkpointed_layers_give_the_same_gradient_and_bias_norm(budget, batch, monkeypatch):
    row, gradient = one_step("st_ppo", batch, None)
    runs = []
    block = type(body_of(make_policy()).layers[0])
    monkeypatch.setattr(
        block, "forward", lambda self, *a, _f=block.forward, **k: runs.append(1) or _f(self, *a, **k)
    )
    once = one_step("st_ppo", batch, budget) and len(runs)
    runs.clear()
    other, found = one_step("st_ppo", batch, budget, "training.gradient_checkpointing=true")
    assert len(runs) > once, "layers are computed again"
    torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)
    assert other == pytest.approx(row, rel=1e-10, abs=1e-11, nan_ok=True)


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_logits_in_pieces_give_the_same_gradient(checkpoint_layers, batch, monkeypatch):
    row, gradient = one_step("st_ppo", batch, None)
    monkeypatch.setattr(policy_module, "LOGITS_AT_ONCE", 10 * VOCABULARY)
    flag = f"training.gradient_checkpointing={str(checkpoint_layers).lower()}"
    other, found = one_step("st_ppo", batch, 200, flag)
    torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)
    assert other == pytest.approx(row, rel=1e-10, abs=1e-11, nan_ok=True)


def test_a_budget_bounds_padded_tokens_but_for_rows_that_are_longer(batch):
    lengths = batch.lengths
    for budget in (1, LONGEST - 1, LONGEST, 100, 10_000):
        parts = Passes(budget).cut(batch)
        assert sorted(torch.cat([rows for rows, _ in parts]).tolist()) == list(range(len(batch)))
        for rows, part in parts:
            padded = part.tokens.numel()
            assert padded == len(rows) * int(lengths[rows].max())
            assert padded <= budget or len(rows) == 1
    assert len(Passes(1).cut(batch)) == len(batch)
    (whole,) = Passes(10_000).cut(batch)
    assert whole[1] is batch, "what fits is not cut, hence not scored twice"


def test_critic_values_and_regression_are_those_of_one_batch(batch):
    found = []
    for budget in (None, 1, 100):
        torch.manual_seed(0)
        critic = Critic(make_policy()).double()
        torch.nn.init.normal_(critic.head.weight)
        training = settings_with(
            "training.value_clip=0.3",
            "training.trajectories_per_iteration=16",
            "training.minibatches=2",
            "training.critic_epochs=2",
        )
        optimizer = torch.optim.SGD(critic.parameters(), lr=1e-2)
        updates = CriticUpdates(critic, optimizer, training, Passes(budget, chunks=2))
        before = updates.values(batch)
        targets = torch.rand(before.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        generator = torch.Generator().manual_seed(4)
        loss = updates.regress(batch, targets, batch.agent_mask, before, generator, 0, 0)
        found.append((before, updates.values(batch), torch.tensor(loss, dtype=torch.float64)))
    assert (found[0][0] - found[0][1]).abs().max() > 1e-3, "it learned something"
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_the_clipped_critic_loss_is_the_larger_of_two(batch):
    """Of (v - target)^2 and the same with v held near the old value, half the mean over agent tokens."""
    critic = Critic(make_policy()).double()
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    whole = "training.trajectories_per_iteration=16", "training.minibatches=1"
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.0)
    updates = CriticUpdates(critic, optimizer, settings_with("training.value_clip=0.3", *whole), Passes())
    values, mask = updates.values(batch), batch.agent_mask
    g = torch.Generator().manual_seed(3)
    old = values + torch.randn(values.shape, generator=g, dtype=torch.float64)
    targets = torch.rand(values.shape, generator=g, dtype=torch.float64)
    found = updates.regress(batch, targets, mask, old, g, 0, 0)
    free, held = ((v - targets)[mask].square() for v in (values, old + (values - old).clamp(-0.3, 0.3)))
    assert (free > held).any() and (free < held).any()
    assert found == pytest.approx(float(torch.maximum(free, held).mean() / 2), rel=1e-6)


def test_reference_scores_are_those_of_one_batch(batch):
    models = Models(make_policy(), make_policy(seed=5), None)
    whole = models.reference_logprobs(batch, Passes(), 1.3)
    cut = models.reference_logprobs(batch, Passes(90), 1.3)
    torch.testing.assert_close(whole, cut, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole, score(models.reference, batch, 1.3).logprobs.detach())
    assert not whole.requires_grad and whole.abs().max() > 0


def test_frozen_parameters_are_left_out(batch):
    policy = make_policy()
    body_of(policy).embed_tokens.requires_grad_(False)
    for budget in (None, 90):
        scored = PolicyPass(policy, batch, Passes(budget))
        assert len(scored.parameters) == len(list(policy.parameters())) - 1
        total = scored.scores.logprobs.sum()
        norms = scored.backward(total, {"x": WatchedNorm(total, scored.parameters)})
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        assert norms["x"] == pytest.approx(float(norm), rel=1e-10)
        policy.zero_grad(set_to_none=True)


@pytest.mark.parametrize("budget", [None, 90])
def test_norms_over_some_parameters_are_those_of_the_whole_gradient(budget, batch):
    policy = make_policy()
    block = list(body_of(policy).layers[-1].parameters())
    assert [id(p) for p in last_block(policy)] == [id(p) for p in block]
    scored = PolicyPass(policy, batch, Passes(budget))
    scalar = scored.scores.logprobs.square().sum()
    watched = {
        "all": WatchedNorm(scalar, scored.parameters),
        "block": WatchedNorm(scalar, block),
        "head": WatchedNorm(scored.scores.logprobs.sum(), [policy.lm_head.weight]),
    }
    norms = scored.backward(scalar, watched)
    for name, parameters in (("all", list(policy.parameters())), ("block", block)):
        norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
        assert norms[name] == pytest.approx(float(norm), rel=1e-10)
    policy.zero_grad()
    score(policy, batch).logprobs.sum().backward()
    assert norms["head"] == pytest.approx(float(policy.lm_head.weight.grad.norm()), rel=1e-10)


def test_the_norm_over_the_last_block_divides_and_needs_no_pass_below_it(batch, monkeypatch):
    option = "algorithm.objective.stabilizer.estimator=last_block"
    policy, objective = make_policy(), compose(["algorithm=st_ppo", option])["algorithm"]["objective"]
    training = settings_with("training.bias_norm_every=1000")
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    steps = PolicyUpdates(policy, optimizer, build(objective, "objective"), training, Passes(), 1.0, None)
    asked, grad = [], torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda out, to, *a, **k: asked.append(to) or grad(out, to, *a, **k)
    )
    row = {"update": 5, "iteration": 1, "epoch": 0, "minibatch": 0}
    steps.step(row, batch, torch.randn(batch.tokens.shape).double(), batch.behaviour_logprobs, None)
    (parameters,) = [to for to in asked if isinstance(to, list)]  # the estimates' is one tensor
    assert {id(p) for p in parameters} == {id(p) for p in last_block(policy)}
    assert math.isnan(row["clipping_bias_norm"]) and row["clipping_bias_norm_last_block"] > 0.1
    c0 = steps.objective.stabilizer.c0
    assert row["stabilizer_divisor"] == pytest.approx(row["clipping_bias_norm_last_block"] / c0)


def test_a_body_without_known_blocks_says_so_where_its_last_one_is_needed():
    policy = make_policy()
    body_of(policy).layers = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="last block is not found"):
        last_block(policy)


# ---- precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "tf32"), [("cuda", False), ("cpu", True)])
def test_float32_on_a_gpu_is_not_tf32(device, tf32, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    policy = SimpleNamespace(to=lambda _: None, base_model=SimpleNamespace())
    torch.set_float32_matmul_precision("high")
    try:
        place(policy, torch.device(device))
        found = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert found == (tf32, tf32), "on a CPU nothing changes"


def test_bfloat16_computes_in_it_and_keeps_weights_gradients_and_scores_in_float32(batch):
    exact, rounded = make_policy(dtype=torch.float32), make_policy(dtype=torch.float32)
    place(rounded, torch.device("cpu"), "bfloat16")
    seen = []
    body_of(rounded).layers[0].mlp.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    scores = score(rounded, batch)
    assert seen == [torch.bfloat16]
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    scores.logprobs.sum().backward()
    assert {p.grad.dtype for p in rounded.parameters()} == {torch.float32}
    difference = (scores.logprobs - score(exact, batch).logprobs).abs()
    assert difference.max() > 1e-4 and difference.mean() < 0.2


def test_output_layer_stays_in_float32_under_bfloat16(batch):
    policy = make_policy(dtype=torch.float32)
    place(policy, torch.device("cpu"), "bfloat16")
    states = torch.randn(9, policy.config.hidden_size).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):  # trained, or frozen beside adapters
        head = policy.lm_head.to(dtype)
        logits = logits_of(policy, states)
        assert logits.dtype == torch.float32
        assert torch.equal(logits, torch.nn.functional.linear(states.float(), head.weight.float()))
        logits.sum().backward()
        assert head.weight.grad.dtype == dtype and head.weight.grad.any()
        head.weight.grad = None


def test_bfloat16_holds_in_micro_batches_with_checkpointed_layers_and_in_the_critic(batch):
    policy = make_policy(dtype=torch.float32)
    place(policy, torch.device("cpu"), "bfloat16", checkpoint_layers=True)
    critic = Critic(policy)
    seen = []
    body_of(policy).layers[0].mlp.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    critic.body.layers[0].mlp.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    scored = PolicyPass(policy, batch, Passes(200))
    scored.backward(scored.scores.logprobs.sum(), {})
    critic(batch).sum().backward()
    assert len(seen) > 6 and set(seen) == {torch.bfloat16}, "on the way back too"


def test_checkpointed_layers_keep_the_cache_of_a_roll_out(batch):
    policy = make_policy()
    place(policy, torch.device("cpu"), checkpoint_layers=True)
    body = body_of(policy)
    with torch.no_grad(), computing(body):
        out = body(input_ids=batch.tokens[:2, :6], use_cache=True)
    assert out.past_key_values.get_seq_length() == 6
    training = [m.training for m in policy.modules()]
    with computing(body):
        body(input_ids=batch.tokens[:2, :6], use_cache=False)
    assert [m.training for m in policy.modules()] == training
