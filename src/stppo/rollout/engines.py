"""Which engine samples: the one place that knows them all."""

from importlib import import_module

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stppo.policy.policy import check_positions
from stppo.policy.weights import without_adapters
from stppo.rollout import ENGINES
from stppo.rollout.rollout import RolloutConfig, Sampler, VLLMRolloutConfig
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
    ValueError where the policy has too few positions, which the settings cannot see of weights that come from
    the hub."""
    shape = without_adapters(policy).config
    check_positions(getattr(shape, "max_position_embeddings", None), config.max_tokens)
    module, _, name = ENGINES[config.engine].rpartition(".")
    return getattr(import_module(module), name)(environment, tokenizer, config, policy, score_tokens)
