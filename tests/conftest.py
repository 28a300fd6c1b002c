"""A small world, a barely trained policy saved as a warm start, and configs shrunk to seconds."""

import gc
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from stppo import cli
from stppo.config import files as config_files
from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.policy.policy import build_policy
from stppo.rollout.rollout_torch import TorchRollout
from stppo.training.warm_start import demonstration_batch, made_for
from stppo.world.encoding import DialogueEncoder
from stppo.world.scripted import DemonstrationNoise, play
from tests.training_runs import imitate

# Else a tenth of the time goes into looking for cycles among the libraries' objects.
gc.set_threshold(100_000, 50, 1000)

TINY = [
    "preset=smoke",
    "world.n_entities=60",
    "world.n_name_parts=8",
    "world.held_out=0.4",
    "world.n_train=64",
    "world.n_validation=32",
    "world.n_test=32",
    "policy.hidden_size=32",
    "policy.intermediate_size=48",
    "warm_start.reading.max_steps=0",
    "warm_start.demonstrations=64",
    "training.iterations=5",
    "training.trajectories_per_iteration=16",
    "training.epochs=2",
    "training.minibatches=2",
    "training.checkpoint_every=2",
    "evaluation.questions=16",
    "evaluation.every=2",
]


@pytest.fixture
def tiny():
    """Compose the shrunk config with further overrides."""
    return lambda *overrides: compose([*TINY, *overrides])


@pytest.fixture
def stppo(monkeypatch, capsys, tmp_path):
    """Run the console command in an empty folder; returns (exit code, stdout, stderr)."""
    for variable in ("STPPO_DEBUG", "STPPO_CONFIG_DIR"):
        monkeypatch.setenv(variable, "")  # what an option sets ends with the test
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["stppo", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def assert_one_line_error(result, *parts):
    """Of `stppo`: exit code 1 and one line that names each of the parts."""
    code, _, err = result
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1
    assert all(part in err for part in parts), err


@pytest.fixture
def configs(tmp_path, monkeypatch) -> Path:
    """A copy of the shipped configs, which is in use."""
    shutil.copytree(config_files.config_dir(), tmp_path / "configs")
    monkeypatch.setattr(config_files, "config_dir", lambda: tmp_path / "configs")
    return tmp_path / "configs"


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new))


@pytest.fixture(scope="session")
def barely_trained(tmp_path_factory) -> Path:
    """A warm-start folder whose policy knows the format by halves: some turns are valid, some are not."""
    return make_start(tmp_path_factory.mktemp("warm_start"))


def strong_policy(*overrides: str):
    """(policy, sampler, questions): weights so large that log-probs hang on every earlier token and its position, and
    no bias is zero."""
    config = compose(["preset=smoke", "world.n_train=64", *overrides])
    settings = load(config).settings
    world = build(config["world"], "world")
    torch.manual_seed(0)
    policy = build_policy(settings.policy, world.tokenizer)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(6) if weight.dim() > 1 else weight.add_(0.1 * torch.randn_like(weight))
    sampler = TorchRollout(world.environment, world.tokenizer, settings.rollout)
    return policy, sampler, world.questions("train")[:24]


def make_start(folder: Path) -> Path:
    config = compose(TINY)
    settings = load(config).settings
    world = build(config["world"], "world")
    torch.manual_seed(0)
    rng = random.Random(0)
    demonstrations = play(world, world.questions("train"), rng, DemonstrationNoise())
    data = demonstration_batch(demonstrations, DialogueEncoder(world.environment.protocol, world.tokenizer))
    policy = build_policy(settings.policy, world.tokenizer)
    imitate(policy, data, 60, 1e-2)
    policy.save_pretrained(folder)
    world.tokenizer.save_pretrained(folder)
    record = {"made_for": made_for(config), "success_sampled": 0.0, "success_greedy": 0.0, "n_sampled": 1}
    (folder / "warm_start.json").write_text(json.dumps(record))
    return folder
