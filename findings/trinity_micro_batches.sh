#!/usr/bin/env bash
# Guessed: cutting a batch into micro-batches to fit the memory leaves its gradient as it is.
# So is: Trinity-RFT gives verl's engine a loss that is a mean over each micro-batch. The engine adds gradients up and divides by nothing, because
# verl's own losses divide by the whole batch. In eight parts the gradient is nine times as long. trinity-rft 0.6.0, verl 0.8.0; for an older verl it has
# another trainer, which divides.
# Why it matters: by default the number of parts follows the lengths (`use_dynamic_bsz`), so steps weigh more where trajectories are long, a clip
# of the gradient's norm acts k times as early, and curves from cards of different memory are not of one method.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet trinity-rft==0.6.0 verl==0.8.0 torch==2.13.0 datasets==4.4.2 pyarrow==21.0.0
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON' 2>/dev/null
import sys
from functools import partial
from importlib.metadata import version

import torch
import torch.distributed as dist
import verl.workers.engine.fsdp.transformer_impl as engine
from tensordict import TensorDict
from trinity.common.config import AlgorithmConfig, Config
from trinity.common.config_validator import AlgorithmConfigValidator
from trinity.trainer.verl.losses import build_trinity_loss
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

PROMPT, LENGTHS, PARTS = 2, [3, 5, 4, 6, 2, 7, 3, 4], (1, 2, 4, 8)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
engine.get_device_id = lambda: "cpu"


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class Policy(engine.FSDPEngine):
    """verl's engine around a policy of one parameter a token: its log-prob."""

    ulysses_sequence_parallel_size = 1

    def __init__(self):
        random = torch.Generator().manual_seed(1)
        self.rows = [(-torch.rand(PROMPT + n, generator=random) - 0.1).requires_grad_() for n in LENGTHS]

    def get_data_parallel_group(self):
        return dist.group.WORLD

    def get_data_parallel_size(self):
        return 1

    def forward_step(self, micro_batch, loss_function, forward_only):
        logprobs = jagged([self.rows[i] for i in micro_batch["row"].tolist()])
        loss, metrics = loss_function(model_output={"log_probs": logprobs}, data=micro_batch, dp_group=None)
        return loss, {"loss": loss.detach().item(), "metrics": metrics}


def batch(parts):
    random, n = torch.Generator().manual_seed(0), len(LENGTHS)
    rows = {
        "input_ids": [torch.arange(PROMPT + n) for n in LENGTHS],
        "prompts": [torch.arange(PROMPT) for _ in LENGTHS],
        "responses": [torch.arange(n) for n in LENGTHS],
        "response_mask": [torch.ones(n) for n in LENGTHS],
        "loss_mask": [torch.ones(n) for n in LENGTHS],
        "old_log_probs": [-torch.rand(n, generator=random) - 0.1 for n in LENGTHS],
        "advantages": [torch.full((n,), 1.0 if i % 2 else -1.0) for i, n in enumerate(LENGTHS)],
    }
    data = TensorDict({name: jagged(of) for name, of in rows.items()} | {"row": torch.arange(n)}, batch_size=[n])
    settings = {"use_dynamic_bsz": False, "global_batch_size": n, "micro_batch_size_per_gpu": n // parts}
    tensordict_utils.assign_non_tensor(data, **settings)
    return data


def gradient(loss, parts):
    policy = Policy()
    policy.forward_backward_batch(batch(parts), loss)
    return torch.cat([row.grad for row in policy.rows])


config = Config(algorithm=AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))
AlgorithmConfigValidator().validate(config)
actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_mini_batch_size=len(LENGTHS), ppo_micro_batch_size_per_gpu=1)
losses = {"Trinity-RFT": build_trinity_loss(config.algorithm), "verl": partial(ppo_loss, config=actor)}
print("trinity-rft", version("trinity-rft"), "verl", version("verl"), "- PPO's loss by both; micro-batches", PARTS)
found = {}
for name, loss in losses.items():
    whole = gradient(loss, 1)
    found[name] = [round(float(gradient(loss, parts).norm() / whole.norm()), 2) for parts in PARTS]
    print(f"{name:12} length of the gradient over that of the whole batch {found[name]}")
same = torch.equal(gradient(losses["verl"], 1), gradient(losses["Trinity-RFT"], 1))
print("uncut, both are equal:", same)
if not same or found["verl"] != [1.0] * 4 or not all(got > 0.9 * n for got, n in zip(found["Trinity-RFT"], PARTS)):
    sys.exit("CHANGED: how micro-batches are added up")
PYTHON
