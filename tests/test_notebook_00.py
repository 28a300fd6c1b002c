"""ST-PPO on one page is the library's ST-PPO: same turns, credit, loss, clipping bias, divisor and updates."""

import ast
import copy
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.policy.critic import Critic
from stppo.policy.policy import PolicyConfig, build_policy, score
from stppo.training.gradients import Passes
from stppo.training.updates import CriticUpdates, PolicyUpdates
from stppo.trajectories import Trajectories, turn_ids
from tests.objectives_cases import TabularPolicy, batch_from_turns, mixed_batch, normal, off_policy

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "00-st-ppo-on-one-page.ipynb"
CELLS = [
    cell | {"source": "".join(cell["source"])}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
TITLES = {"token_ppo": "token PPO", "st_ppo": "ST-PPO"}  # the page's names for the library's


def defined() -> dict:
    """What the page's cells of definitions define."""
    names: dict = {}
    for cell in CODE:
        if "definitions" in cell["metadata"].get("tags", []):
            exec(cell["source"], names)
    return names


@pytest.fixture(scope="module")
def page() -> SimpleNamespace:
    return SimpleNamespace(**defined())


def library(name: str, **overrides):
    objective = build(compose([f"algorithm={name}"])["algorithm"]["objective"], "objective")
    return replace(objective, credit=replace(objective.credit, **overrides))


def as_page_batch(page: SimpleNamespace, batch: Trajectories):
    return page.Batch(batch.tokens, batch.agent_mask, batch.behaviour_logprobs, batch.rewards)


# ---- the page by itself -------------------------------------------------------------------------


def test_page_is_short_and_imports_torch_and_matplotlib_alone():
    source = "\n".join(cell["source"] for cell in CODE)
    assert len(source.splitlines()) < 400
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or ".").split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch", "matplotlib"}
    assert "import_module" not in source and "__import__" not in source


def test_files_that_the_page_names_exist():
    prose = "\n".join(cell["source"] for cell in CELLS if cell["cell_type"] == "markdown")
    named = re.findall(r"`((?:src|configs|tests)/[^`]*)`", prose) + re.findall(r"\]\(([^)]+\.ipynb)\)", prose)
    assert len(named) > 15
    missing = [name for name in named if not any((at / name).exists() for at in (ROOT, NOTEBOOK.parent))]
    assert missing == []


@pytest.mark.slow
def test_page_runs_to_its_picture(tmp_path):
    """Its checks by hand are assertions, so they are made here too."""
    names: dict = {}
    for cell in CODE:
        exec(cell["source"], names)
        if "parameters" in cell["metadata"].get("tags", []):
            names |= {"fast": True, "output_dir": str(tmp_path / "figures")}
    assert len(list((tmp_path / "figures").glob("*.png"))) == 1
    assert {key[1] for key in names["runs"]} == set(TITLES.values())


def test_rollout_gives_trajectories_that_the_library_accepts(page):
    torch.manual_seed(3)
    policy = page.warm_start(3, steps=150)
    batch = page.rollout(policy, 32, random.Random(3))
    lengths = (batch.tokens > 0).sum(1)
    assert ((batch.tokens > 0) == (torch.arange(batch.tokens.shape[1]) < lengths[:, None])).all()
    checked = Trajectories(
        tokens=batch.tokens,
        lengths=lengths,
        agent_mask=batch.agent,
        behaviour_logprobs=batch.old_logprobs,
        rewards=batch.rewards,
        group_ids=torch.arange(32),
        policy_updates=torch.zeros(32, dtype=torch.long),
    )
    assert checked.n_turns.max() > 1, "games of one turn would test nothing"
    rescored = page.token_logprobs(policy, batch.tokens)[batch.agent]
    torch.testing.assert_close(rescored, batch.old_logprobs[batch.agent], rtol=0, atol=1e-4)


# ---- against the library ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_turns(page, seed):
    agent = torch.rand(20, 15, generator=torch.Generator().manual_seed(seed)) < 0.6
    assert torch.equal(page.turn_ids(agent), turn_ids(agent))


@pytest.mark.parametrize("lam", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("seed", range(3))
def test_credit(page, lam, seed):
    batch = mixed_batch(seed=seed)  # rewards on every turn's last token, values on environment tokens too
    values = normal(batch.rewards, seed)
    raw = page.gae(batch.rewards, values, batch.agent_mask, lam)
    expected = library("st_ppo", lam=lam, whiten=False).credit(batch, values)
    torch.testing.assert_close(raw, expected.advantages, rtol=1e-12, atol=1e-12)
    targets = (raw + values)[batch.agent_mask]
    torch.testing.assert_close(targets, expected.returns[batch.agent_mask], rtol=1e-12, atol=1e-12)
    whitened = library("st_ppo", lam=lam).credit(batch, values).advantages
    torch.testing.assert_close(page.whiten(raw, batch.agent_mask), whitened, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", TITLES)
@pytest.mark.parametrize("spread", [0.05, 0.4, 1.5])
@pytest.mark.parametrize("turns", [[[3, 1, 4], [2], [5, 2]], [[1, 1, 1], [1]], [[6], [2], [9]]])
def test_loss_gradient_and_clipping_bias(page, name, spread, turns):
    policy, objective = TabularPolicy(), library(name)
    batch = off_policy(batch_from_turns(turns), policy, spread)
    advantages = normal(batch.rewards, 5)  # on environment tokens too, where they must not matter
    logprobs = policy.logprobs(batch.tokens)
    expected = objective(logprobs, batch, advantages)
    level = page.METHODS[TITLES[name]]["level"]
    found = page.surrogate(logprobs, as_page_batch(page, batch), advantages, level)

    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12, abs=1e-13)
    assert found.clip_fraction == pytest.approx(expected.diagnostics["clip_fraction"], abs=1e-6)
    assert (expected.diagnostics["clip_fraction"] > 0) == (spread > 0.1), "both kinds of batch are tested"
    scalars = [(found.loss, expected.loss)]
    if spread > 0.1:
        scalars.append((found.bias, expected.bias_surrogate))
    for mine, its in scalars:
        torch.testing.assert_close(policy.gradient(mine), policy.gradient(its), rtol=1e-11, atol=1e-13)


# ---- updates: the page's against the library's own, on copies of one model -----------------------


class Words:
    """As much of a tokenizer as building a policy takes."""

    pad_token_id, eos_token_id = 0, None

    def __len__(self):
        return 23


def tiny_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 24}
    model = build_policy(PolicyConfig(name="x", max_positions=64, **sizes), Words()).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return model


class AsPageNetwork(nn.Module):
    """A model of the library, called as the page calls its networks."""

    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, tokens, state=None):
        return self.head(self.body(input_ids=tokens, use_cache=False).last_hidden_state), None


@pytest.fixture(scope="module")
def stale() -> Trajectories:
    """16 trajectories of 1 to 3 turns from a policy near the tiny model; some are rewarded."""
    g = torch.Generator().manual_seed(1)
    turns = [
        torch.randint(1, 6, (int(n),), generator=g).tolist() for n in torch.randint(1, 4, (16,), generator=g)
    ]
    batch = batch_from_turns(turns)
    behaviour = tiny_model()
    with torch.no_grad():
        for weight in behaviour.parameters():
            weight += 0.08 * weight.abs().mean() * torch.randn(weight.shape, generator=g, dtype=weight.dtype)
        logprobs = score(behaviour, batch).logprobs
    return Trajectories(**batch.state_dict() | {"behaviour_logprobs": logprobs})


def training_settings():
    smoke = ["preset=smoke", "training.trajectories_per_iteration=16", "training.minibatches=4"]
    return load(compose(smoke)).settings.training


@pytest.mark.parametrize("name", TITLES)
def test_updates_lead_to_the_same_weights(page, name, stale):
    objective = library(name)
    advantages = objective.credit(stale, normal(stale.rewards, 2)).advantages
    theirs = tiny_model()
    mine = copy.deepcopy(theirs)
    network = AsPageNetwork(mine.base_model, mine.get_output_embeddings())
    adam = torch.optim.Adam(network.parameters(), 1e-2)
    library_adam = torch.optim.Adam(theirs.parameters(), 1e-2)
    steps = PolicyUpdates(theirs, library_adam, objective, training_settings(), Passes(), 1.0, None)
    divisors = []
    for number in range(5):
        rows = torch.randperm(16, generator=torch.Generator().manual_seed(number))[:8]
        row = {"update": number + 1, "iteration": 1, "epoch": 0, "minibatch": number}
        steps.step(row, stale.select(rows), advantages[rows], stale.behaviour_logprobs[rows], None)
        batch = as_page_batch(page, stale).rows(rows)
        clip_fraction, divisor = page.update(
            network, adam, batch, advantages[rows], **page.METHODS[TITLES[name]]
        )
        assert clip_fraction == pytest.approx(row["clip_fraction"], abs=1e-6) and clip_fraction > 0.02
        assert divisor == pytest.approx(row["stabilizer_divisor"], rel=1e-8)
        divisors.append(divisor)
    assert (max(divisors) > 1.1) == (name == "st_ppo"), "a divisor of 1 would test nothing"
    start = tiny_model()
    for before, a, b in zip(start.parameters(), mine.parameters(), theirs.parameters(), strict=True):
        assert (b - before).abs().max() > 1e-3, "nothing moved"
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_critic_is_fitted_alike(page, stale):
    theirs = Critic(tiny_model()).double()
    nn.init.normal_(theirs.head.weight)
    mine = copy.deepcopy(theirs)
    network = AsPageNetwork(mine.body, mine.head)
    values = page.state_values(network, stale.tokens).detach()
    updates = CriticUpdates(
        theirs, torch.optim.Adam(theirs.parameters(), 1e-3), training_settings(), Passes()
    )
    torch.testing.assert_close(values[stale.agent_mask], updates.values(stale)[stale.agent_mask])
    targets = normal(stale.rewards, 4)
    updates.regress(stale, targets, stale.agent_mask, values, torch.Generator().manual_seed(6), 1, 1)
    torch.manual_seed(6)
    adam = torch.optim.Adam(network.parameters(), 1e-3)
    page.fit_critic(network, adam, as_page_batch(page, stale), targets, minibatches=4)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_loop_trains_on_stale_batches_and_visits_every_row_once_an_epoch():
    names = defined()
    play, rolled, trained = names["rollout"], [], []

    def rollout(policy, games, rng, greedy=False):
        batch = play(policy, games, rng, greedy)
        mark = 100 * len(rolled) + torch.arange(games)[:, None]  # roll-out and row, written on the rewards
        rolled.append(len(trained))
        return batch._replace(rewards=mark.expand_as(batch.rewards) * batch.agent.float())

    def update(policy, optimizer, batch, advantages, level, c0):
        trained.append(batch.rewards.amax(1).int().tolist())
        return 0.0, 1.0

    names |= {"rollout": rollout, "update": update}
    sizes = {"iterations": 3, "size": 8, "epochs": 2, "minibatches": 2, "staleness": 2}
    names["train"](names["Network"](len(names["WORDS"])), 0, 1e-3, "turn", 0.1, **sizes)
    assert rolled == [0, 0, 0, 4, 8, 12], (
        "3 batches wait before the first update, then one comes per iteration"
    )
    for i in range(6):  # epochs of two updates
        batch = i // 2
        assert sorted(trained[2 * i] + trained[2 * i + 1]) == [100 * batch + row for row in range(8)]
