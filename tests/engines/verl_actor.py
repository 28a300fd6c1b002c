"""verl's actor on two Ray workers: updates its weights on a given batch and writes down what came of it.

    python -m tests.engines.verl_actor FOLDER    FOLDER holds model/, batch.pt and runs.json; result.pt is written there

Driver and workers go through what verl's trainer goes through: `RayWorkerGroup`, `ActorRolloutRefWorker.init_model`,
`compute_log_prob`, `update_actor`, with verl's FSDP2 engine inside.
"""

import json
import os
import sys
from pathlib import Path

import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

WORKERS = 2


class Actor(ActorRolloutRefWorker):
    """verl's worker; shows its weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict:
        """The process, this worker's own part of each weight, and the whole weights as verl hands them to a roll-out."""
        module = self.actor.engine.module
        whole, _ = self.actor.engine.get_per_tensor_param()
        return {
            "pid": os.getpid(),
            "own": {name: weight.to_local().detach().clone() for name, weight in module.named_parameters()},
            "whole": {name: weight.detach().clone() for name, weight in whole},
        }


def config_of(folder: Path, overrides: list[str]):
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    given = [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.model.external_lib=stppo.plugins.verl",
        "actor_rollout_ref.model.use_remove_padding=false",  # needs flash-attn
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.use_torch_compile=false",
        f"+{actor}.fsdp_config.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
        f"{rollout}.name=vllm",
        *overrides,
    ]
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        config = compose("ppo_trainer", overrides=given)
    OmegaConf.resolve(config)  # as verl's task runner does
    return config.actor_rollout_ref


def without_padding(batch: dict) -> tu.TensorDict:
    return left_right_2_no_padding(tu.get_tensordict(dict(batch), {"temperature": 1.0}))


def run(folder: Path, overrides: list[str], batch: dict) -> dict:
    config = config_of(folder, overrides)
    pool = RayResourcePool([WORKERS], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(Actor), config=config, role="actor")
    group = RayWorkerGroup(pool, made, device_name="cpu")
    group.init_model()

    data = without_padding(batch)
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False)
    log_probs = no_padding_2_padding(tu.get(group.compute_log_prob(data), "log_probs"), data)

    data = without_padding(batch | {"old_log_probs": log_probs + batch["moved"]})
    actor = config.actor
    tu.assign_non_tensor(  # as in RayPPOTrainer._update_actor
        data,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=actor.ppo_mini_batch_size,
        mini_batch_size=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        seed=actor.data_loader_seed,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )
    before = group.weights()
    metrics = {
        name: [float(value) for value in values] if isinstance(values, list) else float(values)
        for name, values in tu.get(group.update_actor(data), "metrics").items()
    }
    after = group.weights()
    for worker in group.workers:
        ray.kill(worker)
    ray.util.remove_placement_group(pool.pgs[0])
    return {"log_probs": log_probs, "before": before, "after": after, "metrics": metrics}


def start_ray(tries: int = 3, **options) -> None:
    """Ray waits 30 seconds for its own start, whatever else the machine does."""
    for left in reversed(range(tries)):
        try:
            ray.init(num_cpus=WORKERS, include_dashboard=False, **options)
            return
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise


def main(folder: Path) -> None:
    batch = torch.load(folder / "batch.pt")
    passed_on = {
        name: value for name, value in os.environ.items() if name.startswith(("VERL_", "PYTHONPATH"))
    }
    start_ray(runtime_env={"env_vars": passed_on})
    try:
        runs = json.loads((folder / "runs.json").read_text())
        torch.save(
            {name: run(folder, overrides, batch) for name, overrides in runs.items()}, folder / "result.pt"
        )
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
