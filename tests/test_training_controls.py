"""Controls of a study: placebo divisors, KL early stopping, true values and the critic's error against them."""

import json
import math
import os
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from stppo.config.composition import compose
from stppo.config.files import ConfigError
from stppo.config.identity import data_section, identity_section, warm_start_dir
from stppo.config.loading import build, load
from stppo.policy.policy import load_policy
from stppo.rollout.rollout import RolloutConfig
from stppo.rollout.rollout_torch import TorchRollout
from stppo.training.controls import generator_for, identity
from stppo.training.monte_carlo import TrueValues, true_values
from stppo.training.run import Run
from stppo.training.trainer import Trainer
from stppo.training.warm_start import WARM_START_FILE, made_for
from stppo.trajectories import Layout
from tests.conftest import TINY
from tests.training_runs import assert_same_metrics, interrupted, run, tables

PLACEBO = "training.divisors.from_run"
KEY = ["iteration", "epoch", "minibatch"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, barely_trained):
    """Token PPO with plain gradient descent: the length of a step then shows what it was divided by."""
    folder = tmp_path_factory.mktemp("plain")
    run(compose([*TINY, *PLAIN]), folder, barely_trained)
    return folder


PLAIN = ["algorithm=token_ppo", "training.optimizer=sgd", "training.learning_rate=0.5"]


def source_run(folder, divisors=None, iterations=5, status="completed"):
    """The folder of a run of 2 epochs x 2 minibatches with these divisors (default: drawn from 1..9)."""
    rows = pd.DataFrame(
        [(i + 1, e, m) for i in range(iterations) for e in range(2) for m in range(2)], columns=KEY
    )
    drawn = np.random.default_rng(0).uniform(1, 9, len(rows))
    rows["stabilizer_divisor"] = drawn if divisors is None else divisors
    folder.mkdir(parents=True)
    rows.sample(frac=1, random_state=0).to_parquet(
        folder / "updates.parquet"
    )  # the order of rows is no matter
    (folder / "run.json").write_text(json.dumps({"status": status}))
    return rows


# ---- placebo divisors ---------------------------------------------------------------------------


def test_replayed_divisors_divide_the_same_updates(tmp_path, tiny, barely_trained):
    source = source_run(tmp_path / "source")
    run(tiny(*PLAIN, f"{PLACEBO}={tmp_path}/source"), tmp_path / "run", barely_trained)
    updates = tables(tmp_path / "run")[0]
    np.testing.assert_array_equal(updates["stabilizer_divisor"], source["stabilizer_divisor"])
    expected = 0.5 * updates["gradient_norm"] / source["stabilizer_divisor"]
    np.testing.assert_allclose(updates["update_norm"], expected, rtol=2e-3, atol=1e-7)


def test_shuffled_divisors_stay_within_their_iteration(tmp_path, tiny, barely_trained):
    source = source_run(tmp_path / "source")["stabilizer_divisor"].to_numpy().reshape(5, 4)
    shuffled = []
    for seed in (0, 1):
        config = tiny(
            *PLAIN, f"seed={seed}", f"{PLACEBO}={tmp_path}/source", "training.divisors.shuffle=true"
        )
        shuffled.append(
            Run(load(config), tmp_path, barely_trained).trainer.divisors.table.numpy().reshape(5, 4)
        )
        np.testing.assert_array_equal(np.sort(shuffled[-1]), np.sort(source))
    assert not np.array_equal(shuffled[0], shuffled[1]), "each seed has an order of its own"
    places = (shuffled[0][:, :, None] == source[:, None, :]).argmax(2)
    assert len({tuple(order) for order in places}) > 1, "and each iteration"


def test_a_constant_shortens_plain_gradient_descent_as_much_on_average(tmp_path, tiny, barely_trained):
    source = source_run(tmp_path / "source")["stabilizer_divisor"]
    config = tiny(*PLAIN, f"{PLACEBO}={tmp_path}/source", "+training.divisors.constant=true")
    table = Trainer(load(config), barely_trained).divisors.table
    assert len(table.unique()) == 1 and float(1 / table[0, 0, 0]) == pytest.approx((1 / source).mean())
    for wrong in (["training.divisors.shuffle=true"], ["training.divisors.from_run=null"]):
        with pytest.raises(ConfigError, match="constant=true divides by one number"):
            load(tiny(*PLAIN, f"{PLACEBO}={tmp_path}/source", "+training.divisors.constant=true", *wrong))


def test_replayed_divisors_of_the_step_are_not_undone_by_adam(tmp_path, tiny, barely_trained):
    source_run(tmp_path / "source", 4.0)
    once = ["algorithm=token_ppo", "training.iterations=5"]
    run(tiny(*once), tmp_path / "plain", barely_trained)
    config = tiny(*once, f"{PLACEBO}={tmp_path}/source", "+training.divisors.divides=step")
    run(config, tmp_path / "step", barely_trained)
    first = [tables(tmp_path / name)[0]["update_norm"].iloc[0] for name in ("plain", "step")]
    assert first[1] == pytest.approx(first[0] / 4, rel=1e-4)


def test_constant_divisor_is_a_learning_rate_under_sgd(plain, tmp_path, tiny, barely_trained):
    source_run(tmp_path / "source", 4.0)
    config = tiny(*PLAIN[:2], "training.learning_rate=2.0", f"{PLACEBO}={tmp_path}/source")
    run(config, tmp_path / "run", barely_trained)
    but = ("learning_rate", "stabilizer_divisor")
    assert_same_metrics(plain, tmp_path / "run", but)  # 4 is a power of two: not even rounding differs


def test_last_divisors_of_a_source_that_ended_non_finite_go_on(tmp_path, tiny, barely_trained):
    divisors = np.r_[np.arange(1.0, 12), np.nan]  # it broke in the last update of its third iteration
    source_run(tmp_path / "source", divisors, iterations=3, status="non_finite")
    its_run = Run(load(tiny(*PLAIN, f"{PLACEBO}={tmp_path}/source")), tmp_path, barely_trained)
    trainer = its_run.trainer
    expected = [*range(1, 9), *[5, 6, 7, 8] * 3]
    assert trainer.divisors.table.flatten().tolist() == expected


def lacking(folder):
    table = pd.read_parquet(folder / "updates.parquet")
    table.drop(columns="stabilizer_divisor").to_parquet(folder / "updates.parquet")


REFUSED = {  # the source, what is done to it, overrides, what is said
    "shorter": ({"iterations": 4}, None, [], "has 4 iterations .* needs 5"),
    "empty": ({"iterations": 0, "status": "non_finite"}, None, [], "has 0 iterations"),
    "unfinished": ({"status": "running"}, None, [], "unfinished"),
    "with a hole": ({"divisors": np.r_[np.ones(7), np.nan, np.ones(12)]}, None, [], "has 1 iterations"),
    "other epochs": ({}, None, ["training.epochs=1"], "has 0 iterations"),
    "other minibatches": ({}, None, ["training.minibatches=4"], "has 0 iterations"),
    "no such column": ({}, lacking, [], "stabilizer_divisor"),
    "damaged": ({}, lambda folder: (folder / "updates.parquet").write_bytes(b"PAR1"), [], "updates.parquet"),
    "gone": ({}, shutil.rmtree, [], "source"),
    "beside a divisor": ({}, None, ["algorithm=st_ppo"], "stabiliser"),
    "beside a penalty": ({}, None, ["algorithm=so_ppo_ctn"], "stabiliser"),
    "turn by turn": ({}, None, ["algorithm=seeupo"], "LastTurnsFirst"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_source_that_cannot_serve_is_refused(name, tmp_path, tiny, barely_trained):
    source, change, overrides, said = REFUSED[name]
    source_run(tmp_path / "source", **source)
    if change:
        change(tmp_path / "source")
    with pytest.raises(ConfigError, match=f"training.divisors.*{said}"):
        config = tiny(*PLAIN, *overrides, f"{PLACEBO}={tmp_path}/source")
        Run(load(config), tmp_path / "run", barely_trained)
    assert not (tmp_path / "run").exists()


def test_run_is_known_by_its_divisors_not_by_their_place(tmp_path, tiny, barely_trained, monkeypatch):
    source_run(tmp_path / "one")
    source_run(tmp_path / "moved")
    source_run(tmp_path / "other", 2.0)

    def known_as(source, *overrides):
        config = tiny(*PLAIN, f"{PLACEBO}={source}", *overrides)
        return Run(load(config), tmp_path, barely_trained).fingerprint

    one = known_as(tmp_path / "one")
    assert known_as(tmp_path / "moved") == one != known_as(tmp_path / "other")
    assert known_as(tmp_path / "one", "training.divisors.shuffle=true") != one
    (tmp_path / "Snakefile").touch()
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert known_as("one") == one, "a relative path starts at the repository's root"


# ---- KL early stopping --------------------------------------------------------------------------


def test_updates_of_an_iteration_end_once_the_kl_exceeds_the_target(plain, tmp_path, tiny, barely_trained):
    full = tables(plain)[0]
    first = full[full["iteration"] == 1]["kl_behaviour_k3"].to_numpy()
    assert first[0] < first[1] < first[2], "the third update must be the first one above the target"
    target = (first[1] + first[2]) / 2
    run(tiny(*PLAIN, f"training.target_kl={target}"), tmp_path, barely_trained)
    updates = tables(tmp_path)[0]
    timing = [column for column in full if column.startswith("seconds") or column == "tokens_per_second"]
    pd.testing.assert_frame_equal(
        updates[updates["iteration"] == 1].drop(columns=timing), full[:3].drop(columns=timing)
    )
    assert sorted(set(updates["iteration"])) == [1, 2, 3, 4, 5]
    for _, rows in updates.groupby("iteration"):
        above = (rows["kl_behaviour_k3"] > target).to_numpy()
        assert not above[:-1].any() and (above[-1] or len(rows) == 4)


# ---- true values --------------------------------------------------------------------------------

F1 = [*TINY, "algorithm=token_ppo", "world.reward=f1"]  # a barely trained policy seldom earns an exact match


@pytest.fixture(scope="module")
def f1_start(tmp_path_factory, barely_trained):
    """The barely trained policy as a warm start of the world with the F1 reward."""
    folder = tmp_path_factory.mktemp("start") / "f1"
    shutil.copytree(barely_trained, folder)
    record = json.loads((folder / WARM_START_FILE).read_text()) | {"made_for": made_for(compose(F1))}
    (folder / WARM_START_FILE).write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module")
def played(f1_start):
    """World, policy and a roll-out of it that takes several turns and earns something."""
    world = build(compose(F1)["world"], "world")
    policy = load_policy(f1_start)
    sampler = TorchRollout(world.environment, world.tokenizer, RolloutConfig(batch_size=50))
    return (
        world,
        policy,
        sampler.collect(policy, world.questions("train")[:24], torch.Generator().manual_seed(3)),
    )


@torch.no_grad()
def plain_continuation(world, policy, question, turns: list[str], tokens: list[int]) -> float:
    """Return of playing on greedily from `tokens`, after these turns: no cache, one token at a time."""
    episode = world.environment.start(question)
    for text in turns:
        world.environment.step([episode], [text])
    tokens = list(tokens)
    while not episode.done:
        turn = []
        while len(turn) < world.environment.protocol.max_turn_tokens:
            turn.append(int(policy(input_ids=torch.tensor([tokens + turn])).logits[0, -1].argmax()))
            text = world.tokenizer.decode(turn)
            ended = turn[-1] == world.tokenizer.eos_token_id
            if ended or any(tag in text for tag in world.environment.protocol.stop_strings):
                break
        observation = world.environment.step(
            [episode], [world.tokenizer.decode(turn, skip_special_tokens=True)]
        )[0]
        tokens += turn + world.tokenizer(observation or "", add_special_tokens=False)["input_ids"]
    return episode.reward


def test_true_values_of_a_policy_that_leaves_nothing_to_chance(played):
    """States that a noisy policy reached, valued for its near-deterministic version: the enumeration of one path."""
    world, policy, rollout = played
    batch, expected = rollout.trajectories, []
    sharp = TorchRollout(world.environment, world.tokenizer, RolloutConfig(temperature=1e-4, batch_size=50))
    truth = true_values(sharp, policy, rollout, 3, torch.Generator().manual_seed(0))
    layout = batch.layout
    assert truth.turns.tolist() == list(range(len(layout.turn_lengths)))
    for row, episode in enumerate(rollout.episodes):
        for k in range(len(episode.turns)):
            start = int((batch.turn_ids[row] == k).nonzero()[0])
            before = [turn.text for turn in episode.turns[:k]]
            expected.append(
                plain_continuation(
                    world, policy, episode.question, before, batch.tokens[row, :start].tolist()
                )
            )
    expected = torch.tensor(expected)
    assert len(expected) > 40 and expected.unique().numel() > 1
    first = torch.cat([torch.tensor([True]), layout.turn_rows[1:] != layout.turn_rows[:-1]])
    assert not torch.equal(expected, expected[first][layout.turn_rows]), "the turns taken must matter"
    torch.testing.assert_close(truth.returns, expected[:, None].expand(-1, 3))


def test_continuations_are_independent_and_reproducible(played):
    world, policy, rollout = played
    sampler = TorchRollout(world.environment, world.tokenizer, RolloutConfig(batch_size=50))
    truth, again = (
        true_values(sampler, policy, rollout, 16, generator_for("test", 0, 0), n_turns=8) for _ in range(2)
    )
    assert torch.equal(truth.returns, again.returns) and torch.equal(truth.turns, again.turns)
    assert truth.returns.shape == (8, 16) and len(set(truth.turns.tolist())) == 8
    assert truth.returns.var(1).max() > 0
    other = true_values(sampler, policy, rollout, 16, generator_for("test", 0, 1), n_turns=8)
    assert not torch.equal(truth.turns, other.turns)


def test_every_token_of_a_turn_gets_the_value_of_its_start(played):
    batch = played[2].trajectories
    means = torch.arange(1.0, len(batch.layout.turn_lengths) + 1)
    values = TrueValues(torch.arange(len(means)), torch.stack([means - 1, means + 1], 1)).per_token(batch)
    number = 0
    for row in range(len(batch)):
        for k in range(int(batch.n_turns[row])):
            assert (values[row][batch.turn_ids[row] == k] == means[number]).all()
            number += 1
    assert (values[~batch.agent_mask] == 0).all() and number == len(means)


@pytest.mark.parametrize(("offset", "spread"), [(0.1, 0.2), (0.0, 0.2), (0.1, 0.0)])
def test_error_of_the_critic_is_free_of_monte_carlo_noise(offset, spread):
    """Known truth: true values of known spread, a critic off by a known amount, coin tosses around the truth."""
    m, n = 20_000, 16
    generator = torch.Generator().manual_seed(0)
    layout = Layout.of(torch.tensor([[False, True]]).repeat(1, m))
    true = 0.5 + spread * (2 * torch.randint(2, (m,), generator=generator) - 1)
    returns = torch.bernoulli(true[:, None].expand(m, n), generator=generator)
    critic = true + offset * (2 * torch.randint(2, (m,), generator=generator) - 1)
    rmse, std = TrueValues(torch.arange(m), returns).error(layout.scatter(critic), layout)
    assert float((critic - returns.mean(1)).square().mean().sqrt()) > offset + 0.04, (
        "noise is there to subtract"
    )
    assert rmse == pytest.approx(offset, abs=0.02 if offset == 0 else 0.005)
    if spread:
        assert std == pytest.approx(spread, abs=0.005)
    else:
        assert math.isnan(std) or std < 0.02


MONTE_CARLO = ["training.values=monte_carlo", "training.monte_carlo_continuations=2"]
VALUE_ERROR = [
    "evaluation.value_error_every=2",
    "evaluation.value_states=12",
    "evaluation.value_continuations=4",
]


@pytest.fixture(scope="module")
def with_critic(tmp_path_factory, f1_start):
    folder = tmp_path_factory.mktemp("critic")
    run(compose(F1), folder, f1_start)
    return folder


def test_monte_carlo_values_replace_the_critic(tmp_path, f1_start, with_critic):
    its_run = Run(load(compose([*F1, *MONTE_CARLO])), tmp_path, f1_start, progress=False)
    trainer = its_run.trainer
    other_run = Run(load(compose(F1)), tmp_path, f1_start, progress=False)
    other = other_run.trainer
    assert trainer.critic is None
    queued, plain = trainer.batches.sample(0, 0), other.batches.sample(0, 0)
    assert torch.equal(queued.trajectories.tokens, plain.trajectories.tokens)
    assert torch.equal(trainer.generator.get_state(), other.generator.get_state()), "a stream of its own"
    its_run.train()
    updates, evaluations = tables(tmp_path)
    columns = ["critic_loss", "critic_explained_variance", "critic_value_rmse", "true_value_std"]
    assert updates[columns].isna().all(None) and (updates["seconds_critic"] == 0).all()
    assert (updates["gradient_norm"] > 0).any() and len(evaluations) > 0
    scoring = (updates["seconds_scoring"].mean(), tables(with_critic)[0]["seconds_scoring"].mean())
    assert scoring[0] > scoring[1], "the cost of the continuations is recorded"


def test_monte_carlo_values_that_nothing_reads_or_means_are_refused(tmp_path, f1_start):
    with pytest.raises(ConfigError, match="training.values.*GroupNormalised reads no values"):
        Run(load(compose([*F1, "algorithm=grpo", *MONTE_CARLO])), tmp_path, f1_start)
    for wish in (MONTE_CARLO, VALUE_ERROR):
        discounted = compose([*F1, "algorithm.objective.credit.gamma=0.9", *wish])
        with pytest.raises(ConfigError, match="credit.gamma = 0.9: .* undiscounted"):
            Run(load(discounted), tmp_path, f1_start)


def test_measuring_the_critic_changes_no_other_metric(tmp_path, f1_start, with_critic):
    run(compose([*F1, *VALUE_ERROR]), tmp_path, f1_start)
    columns = ("critic_value_rmse", "true_value_std")
    assert_same_metrics(with_critic, tmp_path, but=columns)
    updates = tables(tmp_path)[0]
    measured = updates[updates["critic_value_rmse"].notna()]
    assert sorted(set(measured["iteration"])) == [2, 4] and len(measured) == 2 * 4
    assert (measured.groupby("iteration")["critic_value_rmse"].nunique() == 1).all()
    assert tables(with_critic)[0][list(columns)].isna().all(None)


@pytest.mark.slow
@pytest.mark.parametrize("wish", [MONTE_CARLO, VALUE_ERROR, ["training.target_kl=1e-4"]], ids=str)
def test_interrupted_control_resumes_bit_for_bit(wish, tmp_path, f1_start):
    config = compose([*F1, *wish])
    run(config, tmp_path / "undisturbed", f1_start)
    interrupted(config, tmp_path / "resumed", f1_start, after=3)
    assert len(tables(tmp_path / "resumed")[0]["iteration"].unique()) == 2
    run(config, tmp_path / "resumed", f1_start)
    assert_same_metrics(tmp_path / "undisturbed", tmp_path / "resumed")


# ---- what a run is known by -----------------------------------------------------------------------

QWEN = ["preset=qwen", "policy.pretrained=model"]


def known_by(*overrides):
    """Identity of a run, folder of its warm start, and what that is checked against."""
    config = compose(overrides)
    return identity(config, None), warm_start_dir(config), made_for(config)


@pytest.mark.parametrize(
    "setting",
    [f"world.retriever.{how}" for how in ("url=http://elsewhere:9000/retrieve", "timeout=5", "attempts=2")]
    + [f"rollout.{how}" for how in ("gpu_memory_utilization=0.3", "sleep_level=0", "sync_tolerance=0.3")],
)
def test_where_a_retriever_answers_and_memory_of_the_engine_are_no_part_of_a_run(setting):
    assert known_by(*QWEN, setting) == known_by(*QWEN)


def test_another_kind_of_retriever_and_what_it_is_asked_are_part_of_a_run():
    for other in ("world.retriever.query_characters=10", "retriever@world.retriever=index"):
        assert all(a != b for a, b in zip(known_by(*QWEN, other), known_by(*QWEN), strict=True))
    assert known_by(*QWEN, "rollout.dtype=float32")[:2] != known_by(*QWEN)[:2]


@pytest.mark.parametrize("data", ["corpus.jsonl", "nq.jsonl", "model/model.safetensors"])
def test_what_data_hold_is_part_of_a_run(data, tmp_path, monkeypatch):
    """Not only where they are: another corpus at the same place is another run, the same one touched is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    for name in ("corpus.jsonl", "nq.jsonl", "model/model.safetensors"):
        (tmp_path / name).write_text("before")
    overrides = [
        "preset=qwen",
        f"policy.pretrained={tmp_path}/model",
        "~world.retriever",
        f"+world.corpus={tmp_path}/corpus.jsonl",
        f"world.records={{nq: {tmp_path}/nq.jsonl}}",
    ]
    before = known_by(*overrides)
    os.utime(tmp_path / data, (0, 0))
    assert known_by(*overrides) == before
    (tmp_path / data).write_text("behind")  # as long
    assert all(a != b for a, b in zip(known_by(*overrides), before, strict=True))


def test_a_run_without_data_is_known_as_before():
    config = compose(["preset=smoke"])
    assert data_section(config) == {} and "data" not in identity_section(config)
