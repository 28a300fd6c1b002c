#!/usr/bin/env bash
# Guessed: Tunix's PPO learns from the reward that a function returned, less beta times how far the policy has gone from the reference.
# So is: of the reward only the whole part is left, since it is added to an array of whole numbers: .75 and -.5 are 0, 1.9 is 1. And the policy's
# log-probs are taken at temperature 1, the reference's at that of the roll-outs, .9 by default: an equal policy is already punished. google-tunix 0.1.7.
# Why it matters: F1 scores, rewards for form and penalties below one teach nothing. `rewards/score/mean` shows them whole, `rewards/reward/mean` does not.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet google-tunix==0.1.7 jax==0.10.2 flax==0.12.8
fi
JAX_PLATFORMS=cpu "$FINDINGS_VENV/bin/python" -W ignore - <<'PYTHON'
import sys
from importlib.metadata import version

import grain
import optax
from flax import nnx
from jax.interpreters import pxla
from tunix.rl import rl_cluster, utils
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.tests.test_common import MockVocab, ModelConfig, ToyTransformer

vocabulary, mesh = MockVocab(), pxla.thread_resources.env.physical_mesh
roles = ("ACTOR", "CRITIC", "REFERENCE", "ROLLOUT", "REWARD")


def toy():
    return ToyTransformer(config=ModelConfig(vocab_size=vocabulary.GetPieceSize()), rngs=nnx.Rngs(0))


def logged(reward, **rollout):
    """Mean score and mean reward of a first step, as Tunix logs them; policy and reference are equal."""
    actor = toy()
    still = dict(actor_optimizer=optax.sgd(0.0), critic_optimizer=optax.sgd(0.0), eval_every_n_steps=10, max_steps=1)
    config = rl_cluster.ClusterConfig(
        role_to_mesh={rl_cluster.Role[name]: mesh for name in roles},
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(**still, gradient_accumulation_steps=None),
        rollout_config=RolloutConfig(max_tokens_to_generate=10, max_prompt_length=32, kv_cache_size=64, **rollout),
    )
    models = dict(actor=actor, critic=utils.create_critic_model(actor), reference=toy())
    cluster = rl_cluster.RLCluster(**models, tokenizer=vocabulary, cluster_config=config)
    seen = {}
    cluster.with_external_metrics_logger(lambda buffer: seen.update({name: values for name, (values, *_) in buffer.metrics.items()}))
    rewards = lambda prompts, completions, **rest: [reward] * len(completions)
    questions = grain.MapDataset.source(["input string", "hello world"]).batch(2).map(lambda batch: {"prompts": batch})
    PPOLearner(rl_cluster=cluster, reward_fns=rewards, ppo_config=PPOConfig()).train(questions)
    return [round(float(seen[name][0]), 3) for name in ("rewards/score/mean", "rewards/reward/mean")]


print("google-tunix", version("google-tunix"))
at_one = [logged(reward, temperature=1.0) for reward in (1.0, 0.75, -0.5, 1.9)]
print("temperature 1, score and reward:", at_one)
by_default = logged(1.0)
print("default temperature", RolloutConfig().temperature, "and beta", PPOConfig().beta, ", score and reward:", by_default)
if at_one != [[1.0, 1.0], [0.75, 0.0], [-0.5, 0.0], [1.9, 1.0]] or not by_default[1] < 0.995:
    sys.exit("CHANGED: rewards are no longer cut to whole numbers, or an equal policy is no longer punished")
PYTHON
