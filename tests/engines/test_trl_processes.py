"""The TRL plug-in in two processes (gloo): completions of unequal lengths train as in one process that has them all."""

import json
import os
import random
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
from stppo.plugins.trl import TurnGRPOConfig, TurnGRPOTrainer, search_dataset
from tests.engines.test_trl_plugin import options, policy, small_world

pytestmark = [pytest.mark.engines, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def train(folder: str, changes: str) -> None:
    """Four updates on made-up completions, those of every second question longer; the weights go to a file."""
    torch.set_num_threads(1)
    world, n = small_world(), int(os.environ.get("WORLD_SIZE", 1))

    def completions(prompts, trainer):
        made = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "logprobs": []}
        for i, prompt in enumerate(prompts):
            rng = random.Random(f"{prompt} {prompts[:i].count(prompt)} {trainer.state.global_step}")
            tokens, mask = [], []
            for _ in range(rng.randint(1, 3)):
                own = rng.randint(1, 2 if zlib.crc32(prompt.encode()) % 2 else 9)
                tokens += [rng.randrange(5, len(world.tokenizer)) for _ in range(own + 2)]
                mask += [1] * own + [0] * 2
            made["prompt_ids"].append(world.tokenizer(prompt)["input_ids"])
            made["completion_ids"].append(tokens)
            made["env_mask"].append(mask)
            made["logprobs"].append([-1.0] * len(tokens))
        return made

    def reward(completion_ids, **_):
        return [float(sum(ids) % 3 == 0) for ids in completion_ids]

    batch = dict(per_device_train_batch_size=8 // n, max_steps=4, num_iterations=2)
    plain = dict(optim="sgd", learning_rate=0.5, max_grad_norm=0.0)
    trainer = TurnGRPOTrainer(
        model=policy(world),
        args=TurnGRPOConfig(**options(folder, **batch, **plain, **json.loads(changes))),
        processing_class=world.tokenizer,
        train_dataset=search_dataset(world),
        reward_funcs=reward,
        rollout_func=completions,
    )
    before = torch.cat([w.detach().flatten().clone() for w in trainer.model.parameters()])
    trainer.train()
    after = torch.cat([w.detach().flatten() for w in trainer.model.parameters()])
    if trainer.accelerator.is_main_process:
        assert trainer.accelerator.num_processes == n
        rows = [row for row in trainer.state.log_history if "completions/max_length" in row]
        seen = [row["completions/max_length"] - row["completions/min_length"] for row in rows]
        assert max(seen) > 5
        torch.save({"before": before, "after": after}, Path(folder) / f"{n}.pt")


def test_two_processes_are_as_one(tmp_path):
    changes = {"loss_type": "turn_mean", "stabilizer": "clipping_bias_norm", "bias_norm_c0": 5e-4}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    several = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true",
    }
    for ranks in ([{}], [several | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]):
        command = [
            sys.executable,
            "-m",
            "tests.engines.test_trl_processes",
            str(tmp_path),
            json.dumps(changes),
        ]
        path = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TRL_EXPERIMENTAL_SILENCE": "1"}
        started = [subprocess.Popen(command, env=os.environ | path | rank, cwd=ROOT) for rank in ranks]
        assert [process.wait(600) for process in started] == [0] * len(ranks)
    one, two = (torch.load(tmp_path / f"{n}.pt") for n in (1, 2))
    assert torch.equal(one["before"], two["before"]) and (one["after"] - one["before"]).abs().max() > 1e-3
    torch.testing.assert_close(two["after"], one["after"], rtol=0, atol=1e-6)


if __name__ == "__main__":
    train(*sys.argv[1:])
