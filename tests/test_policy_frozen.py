"""`policy.trainable_layers`: states of frozen layers computed once give what the whole policy computes."""

import copy
import dataclasses
import json

import pytest
import torch

from stppo.config.files import ConfigError
from stppo.config.loading import build, load
from stppo.policy.compute import body_of
from stppo.policy.critic import Critic
from stppo.policy.frozen import freeze_below, frozen_copy, layers_of, parts_of, states_below
from stppo.policy.policy import PolicyConfig, build_policy, load_policy, score
from stppo.training.checkpoint import newest, trained
from stppo.training.gradients import Passes, PolicyPass, WatchedNorm
from stppo.trajectories import Trajectories
from tests.training_runs import assert_same_metrics, interrupted, run, tables

LAYERS, TOP = 4, 2
EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(params=["qwen2", "llama", "gpt2"])
def family(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def policy(family, request, tiny):
    """In float64, random and so large that states hang on every earlier token and its position."""
    world = build(tiny()["world"], "world")
    torch.manual_seed(0)
    own = PolicyConfig(name="x", family=family, layers=LAYERS, tie_word_embeddings=request.param)
    policy = build_policy(own, world.tokenizer).double()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)
    return policy


def random_batch(vocabulary: int, below=None) -> Trajectories:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([30, 17, 24, 9, 30])
    shape = (len(lengths), 30)
    mask = torch.rand(shape, generator=generator) < 0.4
    mask &= torch.arange(shape[1]) < lengths[:, None]
    mask[:, 0], mask[:, 5] = False, True
    zeros = torch.zeros(shape)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    n = torch.arange(len(lengths))
    return Trajectories(tokens, lengths, mask, zeros, zeros, n, n, below=below)


@pytest.fixture
def batch(policy):
    return random_batch(policy.config.vocab_size)


def gradients(policy, batch, budget=None, chunks=2) -> tuple[dict, torch.Tensor, float]:
    """Gradient of a scalar of the log-probs by name, the log-probs, and the norm of another's gradient."""
    policy.zero_grad()
    scored = PolicyPass(policy, batch, Passes(budget, chunks), 0.7, entropy_gradient=True)
    logprobs = scored.scores.logprobs
    watched = WatchedNorm(logprobs.exp().sum(), scored.parameters)
    norm = scored.backward(logprobs.square().sum() + scored.scores.entropy.sum(), {"watched": watched})[
        "watched"
    ]
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return found, logprobs.detach(), norm


@pytest.mark.parametrize("budget", [None, 70])
def test_log_probs_and_gradients_are_those_of_the_ordinary_path(policy, batch, budget):
    whole, expected, _ = gradients(policy, batch)
    freeze_below(policy, TOP)
    names = set(trained(policy))
    # The watched norm, too, is over what is trained: of the ordinary path with these parameters alone.
    ordinary = copy.deepcopy(policy)
    del body_of(ordinary).frozen_layers
    _, _, norm = gradients(ordinary, batch)
    for below in (None, states_below(body_of(policy), batch)):
        found, logprobs, watched = gradients(policy, dataclasses.replace(batch, below=below), budget)
        torch.testing.assert_close(logprobs, expected, **EXACT)
        assert set(found) == names and names < set(whole)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, whole[name], **EXACT)
        assert watched == pytest.approx(norm, rel=1e-10)


def test_kept_states_are_what_the_upper_layers_begin_with(policy, batch):
    """A trained part that did not read them, or read them one token late, would not notice that they are changed."""
    freeze_below(policy, TOP)
    kept = dataclasses.replace(batch, below=states_below(body_of(policy), batch))
    with torch.no_grad():
        before = score(policy, kept).logprobs
        last = kept.lengths[0] - 1
        kept.below[0, last:] += 1
        assert torch.equal(score(policy, kept).logprobs, before), "no later token is left to be scored"
        kept.below[0, 7, 3] += 1
        after = score(policy, kept).logprobs
    changed = (after != before).nonzero()
    assert set(changed[:, 0].tolist()) == {0} and changed[:, 1].min() >= 8


def test_critic_and_reference_share_the_frozen_layers_and_nothing_else(policy, batch):
    freeze_below(policy, TOP)
    kept = dataclasses.replace(batch, below=states_below(body_of(policy), batch))
    ordinary = copy.deepcopy(policy)
    del body_of(ordinary).frozen_layers
    pairs = [(Critic(model).double() for model in (policy, ordinary)), (frozen_copy(policy), ordinary)]
    (critic, whole_critic), (reference, _) = pairs
    torch.nn.init.normal_(critic.head.weight)
    whole_critic.head.load_state_dict(critic.head.state_dict())
    found = []
    for model, this in ((critic, kept), (critic, batch), (whole_critic, batch)):
        model.zero_grad()
        values = model(this, 2)
        values.square().sum().backward()
        found.append(
            (values.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        )
    for values, grads in found[:2]:
        torch.testing.assert_close(values, found[2][0], **EXACT)
        assert torch.cat([g.flatten() for g in grads.values()]).norm() == pytest.approx(
            torch.cat([g.flatten() for g in found[2][1].values()]).norm().item(), rel=1e-10
        )
    own = {p.data_ptr() for p in critic.parameters()}
    assert not own & {p.data_ptr() for p in policy.parameters()}
    shapes = sum(p.numel() for p in critic.parameters()) - critic.head.weight.numel() - 1
    output = policy.get_output_embeddings().weight
    assert shapes == sum(p.numel() for p in trained(policy).values() if p is not output)
    # The policy moves: the reference stays, in whatever the policy has trained.
    assert not trained(reference)
    with torch.no_grad():
        before = score(reference, kept).logprobs
        torch.testing.assert_close(before, score(policy, kept).logprobs, **EXACT)
        for weight in trained(policy).values():
            weight += 0.1
        assert torch.equal(score(reference, kept).logprobs, before)
        assert (score(policy, kept).logprobs - before).abs().max() > 0.01
        assert torch.equal(critic(kept, 2).detach(), found[0][0])


def test_what_is_trained_is_the_top_the_norm_and_an_untied_output_layer(policy):
    freeze_below(policy, 1)
    body, tied = body_of(policy), policy.config.tie_word_embeddings
    top = {id(p) for p in layers_of(body)[-1].parameters()}
    norm = {id(p) for p in (body.ln_f if hasattr(body, "ln_f") else body.norm).parameters()}
    output = set() if tied else {id(policy.get_output_embeddings().weight)}
    assert {id(p) for p in trained(policy).values()} == top | norm | output
    frozen, upper = parts_of(body)
    assert len(layers_of(frozen)) == LAYERS - 1 and len(layers_of(upper)) == 1
    assert len(layers_of(body)) == LAYERS, "the policy itself is whole"


@pytest.mark.parametrize("n", [LAYERS, LAYERS + 3])
def test_more_layers_than_there_are_is_refused(policy, n):
    with pytest.raises(ValueError, match=rf"policy\.trainable_layers={n}: the policy has {LAYERS} layers"):
        freeze_below(policy, n)


# ---- batches that carry states ------------------------------------------------------------------


def test_states_travel_with_their_rows():
    below = torch.randn(5, 30, 6)
    batch = random_batch(50, below)
    chosen = batch.select([3, 1])
    assert torch.equal(chosen.below, below[[3, 1], :17])
    both = Trajectories.cat([chosen, batch])
    assert torch.equal(both.below[:2, :17], chosen.below) and torch.equal(both.below[2:], below)
    assert not both.below[:2, 17:].any()
    again = Trajectories.from_state_dict(batch.state_dict())
    assert torch.equal(again.below, below)
    assert random_batch(50).below is None and "below" not in random_batch(50).state_dict()
    with pytest.raises(ValueError, match="below: expected shape"):
        random_batch(50, below[:, :-1])


# ---- runs ---------------------------------------------------------------------------------------


@pytest.fixture
def frozen_run(tiny, barely_trained, monkeypatch):
    """Settings of a run that trains one of two layers of a pretrained policy."""
    made = json.loads((barely_trained / "warm_start.json").read_text())["made_for"]
    monkeypatch.setattr("stppo.training.trainer.made_for", lambda config: made)
    return lambda *more: tiny(
        f"policy.pretrained={barely_trained}", "+policy.trainable_layers=1", "training.iterations=3", *more
    )


def test_run_trains_the_top_alone_and_resumes_bit_for_bit(tmp_path, frozen_run, barely_trained):
    record = run(frozen_run(), tmp_path / "whole", barely_trained)
    assert record["status"] == "completed" and record["kernels"] == ["eager"]
    before, after = load_policy(barely_trained), load_policy(tmp_path / "whole" / "policy")
    changed = {
        name
        for name, weight in after.state_dict().items()
        if not torch.equal(weight, before.state_dict()[name])
    }
    assert changed and all(".layers.1." in n or n in ("model.norm.weight", "lm_head.weight") for n in changed)
    assert record["policy_parameters"] < 0.6 * after.num_parameters()
    updates = tables(tmp_path / "whole")[0]
    assert updates["kl_reference"].isna().all(), "nothing reads it, so it is not scored"
    interrupted(frozen_run(), tmp_path / "cut", barely_trained)
    saved = newest(tmp_path / "cut" / "checkpoint") / "policy.safetensors"
    assert saved.stat().st_size < 0.6 * (barely_trained / "model.safetensors").stat().st_size
    run(frozen_run(), tmp_path / "cut", barely_trained)
    assert_same_metrics(tmp_path / "whole", tmp_path / "cut")


def test_frozen_layers_of_a_policy_from_scratch_are_refused(tiny):
    with pytest.raises(ConfigError, match=r"trainable_layers=1 would leave random layers as they are"):
        load(tiny("+policy.trainable_layers=1"))
