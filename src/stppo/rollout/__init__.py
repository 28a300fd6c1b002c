"""Sampling: dialogues between a policy and a world, by one of several engines."""

# `rollout.engine` -> the sampler's class. By name, for an engine that is an extra is imported only where it
# is chosen.
ENGINES = {
    "torch": "stppo.rollout.rollout_torch.TorchRollout",
    "vllm": "stppo.plugins.vllm_rollout.VLLMRollout",
}
