"""Which engine samples: the one place that knows them all."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stppo.agent.rollout import RolloutConfig, Sampler, VLLMRolloutConfig
from stppo.agent.rollout_torch import TorchRollout
from stppo.world.environment import SearchEnvironment


def make_rollout(
    environment: SearchEnvironment,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig | VLLMRolloutConfig,
    policy: PreTrainedModel,
    score_tokens: int | None = None,
) -> Sampler:
    """The sampler that `config.engine` names; an engine with weights of its own is started for this policy.

    score_tokens: most padded tokens that are scored at once, where the trainer scores what an engine sampled.
    """
    if config.engine == "torch":
        return TorchRollout(environment, tokenizer, config)
    from stppo.agent.rollout_vllm import VLLMRollout  # vLLM is an extra

    return VLLMRollout(environment, tokenizer, config, policy, score_tokens)
