#!/usr/bin/env bash
# Guessed: beta=0.04, the default of Tunix's GRPO and of its agentic GRPO, pulls the policy back to the reference, and more so the further it has gone.
# So is: the default kl_loss_mode "kl" takes log pi - log pi_ref itself as the loss. A fresh token's gradient is 0 on average, however far the policy
# has gone: beta adds noise and no pull to the reference. "low_var_kl" pulls. google-tunix 0.1.7.
# Why it matters: who raises beta because a run drifts off gets a noisier run that drifts off.
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

import jax
import jax.numpy as jnp
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig as AgenticConfig
from tunix.rl.common import compute_kl_divergence
from tunix.rl.grpo.grpo_learner import GRPOConfig

policy, reference = 1.5 * jax.random.normal(jax.random.key(0), (2, 12))


def mean_loss(logits, drawn_with, mode):
    """What the penalty is on average over tokens that `drawn_with` drew; their weights stand still, as in training."""
    penalty = compute_kl_divergence(jax.nn.log_softmax(logits), jax.nn.log_softmax(reference), mode)
    return (drawn_with * penalty).sum()


fresh = jax.nn.softmax(policy)
found = {}
for mode in ("kl", "mse_kl", "low_var_kl"):
    value, gradient = jax.value_and_grad(mean_loss)(policy, fresh, mode)
    found[mode] = float(jnp.linalg.norm(gradient))
    print(f'{mode}: the penalty is {float(value):.2f} on average, the length of its mean gradient {found[mode]:.6f}')
print("google-tunix", version("google-tunix"))
print("the default of GRPOConfig:", GRPOConfig(num_generations=2).kl_loss_mode, "with beta", GRPOConfig(num_generations=2).beta)
print("the default of the agentic GRPOConfig:", AgenticConfig().kl_loss_mode, "with beta", AgenticConfig().beta)
if found["kl"] > 1e-5 or found["low_var_kl"] < 0.1 or {GRPOConfig(num_generations=2).kl_loss_mode, AgenticConfig().kl_loss_mode} != {"kl"}:
    sys.exit("CHANGED: the default penalty now pulls")
PYTHON
