"""Losses in a loop of one's own: by name, from log-probs and a mask, with the divisor between backward and step."""

import math
import re
from pathlib import Path

import pytest
import torch

import stppo
from stppo.config.files import ConfigError
from stppo.objectives import ClippingBiasNorm, Objective, backward
from tests.objectives_cases import mixed_batch, normal


@pytest.fixture
def moved():
    """Log-probs of a linear policy that has moved away from the sampler's, its parameters, advantages and mask."""
    batch = mixed_batch()
    features = normal(torch.empty(*batch.tokens.shape, 6), 1)
    parameters = torch.full((6,), 0.3, dtype=torch.float64, requires_grad=True)

    def logprobs():
        return batch.behaviour_logprobs + features @ parameters

    return logprobs, batch.behaviour_logprobs, normal(batch.rewards, 2), batch.agent_mask, parameters


def gradient(objective: Objective, logprobs, *given, parameters):
    return torch.autograd.grad(objective.loss(logprobs(), *given).loss, parameters)[0]


@pytest.mark.parametrize("name", ["st_ppo", "s_ppo"])
def test_backward_divides_by_the_norm_of_what_the_clip_removed(moved, name):
    """C as the difference of two gradients, with the clip and without one, not by the library's own bias."""
    logprobs, *given, parameters = moved
    objective = stppo.load(name)
    unclipped = Objective(
        objective.credit,
        objective.ratio,
        type(objective.clip)(epsilon_low=1.0, epsilon_high=math.inf),
        objective.stabilizer,
    )
    clipped = gradient(objective, logprobs, *given, parameters=parameters)
    removed = (gradient(unclipped, logprobs, *given, parameters=parameters) - clipped).norm()
    divisor = max(1.0, float(removed) / objective.stabilizer.c0)
    assert divisor > 1
    told = backward(objective, objective.loss(logprobs(), *given), [parameters])
    torch.testing.assert_close(parameters.grad, clipped / divisor, rtol=1e-9, atol=0)
    assert told["stabilizer_divisor"] == pytest.approx(divisor, rel=1e-9)
    assert told["gradient_norm"] == pytest.approx(float(clipped.norm()), rel=1e-9)


def test_the_gradient_is_clipped_before_it_is_divided(moved):
    logprobs, *given, parameters = moved
    objective = stppo.load("st_ppo")
    told = backward(objective, objective.loss(logprobs(), *given), [parameters], max_grad_norm=1e-3)
    expected = 1e-3 / told["stabilizer_divisor"]
    assert float(parameters.grad.norm()) == pytest.approx(expected, rel=1e-2)  # torch adds 1e-6 to the norm


def test_without_a_stabiliser_the_gradient_is_that_of_the_loss(moved):
    logprobs, *given, parameters = moved
    objective = stppo.load("turn_ppo")
    plain = gradient(objective, logprobs, *given, parameters=parameters)
    told = backward(objective, objective.loss(logprobs(), *given), [parameters])
    torch.testing.assert_close(parameters.grad, plain)
    assert told["stabilizer_divisor"] == 1 and told["clipping_bias_norm"] == 0


METHODS = sorted(file.stem for file in (Path(__file__).parents[1] / "configs/algorithm").glob("*.yaml"))


@pytest.mark.parametrize("name", METHODS)
def test_no_method_reads_what_the_policy_did_not_write(moved, name):
    """NaN at observations and padding, in all that is given: the same loss, and no gradient there."""
    logprobs, old, advantages, mask, _ = moved
    objective, now = stppo.load(name), logprobs().detach()
    entropy, proximal = normal(old, 3).abs(), (now + old) / 2

    def found(unwritten: float | None):
        given = [
            x if unwritten is None else x.masked_fill(~mask, unwritten)
            for x in (now, old, advantages, entropy, proximal)
        ]
        given[0].requires_grad_()
        loss = objective.loss(*given[:3], mask, *given[3:]).loss
        return loss.item(), torch.autograd.grad(loss, given[0])[0]

    clean, dirty = found(None), found(math.nan)
    assert clean[0] == dirty[0] and torch.equal(clean[1], dirty[1])
    assert (clean[1][~mask] == 0).all()


def test_a_file_of_ones_own_is_loaded_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setenv("STPPO_CONFIG_DIR", "")
    file = tmp_path / "algorithm" / "wide.yaml"
    file.parent.mkdir()
    file.write_text("defaults: [turn_ppo, _self_]\nname: wide\nobjective: {clip: {epsilon_low: 0.4}}\n")
    assert stppo.load(file).clip.epsilon_low == 0.4
    assert stppo.load(file).ratio == stppo.load("turn_ppo").ratio


def test_what_cannot_be_is_said_in_one_line(moved):
    logprobs, old, advantages, mask, parameters = moved
    with pytest.raises(ConfigError, match="algorithm=st_pppo: unknown algorithm; allowed: "):
        stppo.load("st_pppo")
    with pytest.raises(ConfigError, match="must be a file FOLDER/algorithm/NAME.yaml"):
        stppo.load("nowhere.yaml")
    objective = stppo.load("st_ppo")
    with pytest.raises(ValueError, match=r"^advantages: must have the shape of logprobs, \(6, "):
        objective.loss(logprobs(), old, advantages[:, :3], mask)
    unlike = {
        "logprobs: must be": (logprobs()[0], old[0], advantages[0], mask[0]),
        "agent_mask: row 0 has no agent token": (
            logprobs(),
            old,
            advantages,
            mask & (torch.arange(6) > 0)[:, None],
        ),
        "logprobs: has no graph, and old_logprobs has one": (old, logprobs(), advantages, mask),
        "old_logprobs: must be finite": (logprobs(), old * math.nan, advantages, mask),
        "advantages: must be finite": (logprobs(), old, advantages / 0, mask),
    }
    for said, given in unlike.items():
        with pytest.raises(ValueError, match=f"^{said}"):
            objective.loss(*given)
    cheap = Objective(
        objective.credit, objective.ratio, objective.clip, ClippingBiasNorm(estimator="logprob")
    )
    with pytest.raises(ValueError, match="use estimator='exact'"):
        backward(cheap, cheap.loss(logprobs(), old, advantages, mask), [parameters])
    with pytest.raises(AttributeError, match="has no attribute"):
        _ = stppo.nothing
    assert stppo.__version__.count(".") == 2


@pytest.mark.parametrize("name", ["kl_stop", "seeupo", "st_ppo", "loop_token", "starpo_s"])
def test_what_a_loss_cannot_do_is_said_when_it_is_loaded(name, caplog):
    stppo.load(name)
    assert bool(caplog.records) == (name != "st_ppo")


def test_the_readmes_example_runs(moved, capsys):
    logprobs, old, advantages, mask, parameters = moved
    model = torch.nn.Module()
    model.weights = torch.nn.Parameter(parameters.detach().clone())
    features = (logprobs().detach() - old) / 0.3
    names = {
        "logprobs": old + features * model.weights.mean(),
        "old_logprobs": old,
        "advantages": advantages,
        "agent_mask": mask,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    before = model.weights.detach().clone()
    (block,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(encoding="utf-8"), re.S)
    exec(block, names)
    clipped, divisor = map(float, capsys.readouterr().out.split())
    assert clipped > 0 and divisor >= 1 and not torch.equal(before, model.weights)
