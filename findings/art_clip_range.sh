#!/usr/bin/env bash
# Guessed: `epsilon=0.2` clips importance weights to [.8, 1.2], since `epsilon_high` "defaults to epsilon", and
# `max_negative_advantage_importance_sampling_weight` caps the weights of tokens with a negative advantage.
# So is: without `ppo` the upper end stays at 5 unless `epsilon_high` is given. The cap holds for positive advantages too.
# openpipe-art 0.5.18.
# Why it matters: a trial of clip ranges moves the lower end alone, and what is called a cap for failures also slows what is learned from successes.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet openpipe-art==0.5.18 torch==2.13.0 numpy
fi
LITELLM_LOCAL_MODEL_COST_MAP=True "$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from art._backend_training import build_rl_train_configs
from art.loss import loss_fn

RATIOS = [0.1, 0.9, 1.1, 3.0, 30.0]


def weights(advantage, **settings):
    """Of each ratio: the token's weight in the gradient, over its advantage. settings: as the backends' `train` takes them."""
    _, settings = build_rl_train_configs(learning_rate=1e-5, **settings)
    n = len(RATIOS) + 1  # every token is scored at the place before it
    old = torch.full((1, n), -4.0)
    new = (old[:, 1:] + torch.tensor(RATIOS).log()).requires_grad_()
    inputs = {
        "logprobs": old,
        "advantages": torch.full((1, n), advantage),
        "assistant_mask": torch.ones(1, n, dtype=torch.bool),
        "weights": torch.ones(1, n),
        "group_ids": torch.ones(1, n, dtype=torch.long),
    }
    padded = torch.nn.functional.pad(new, (0, 1))
    loss = loss_fn(inputs, padded, None, None, settings, reduction="sum")
    return [round(-float(g) / advantage, 2) for g in torch.autograd.grad(loss.policy_loss, new)[0][0]]


print("openpipe-art", version("openpipe-art"), "- ratios", RATIOS)
found = {
    "epsilon=0.2": weights(1.0, epsilon=0.2),
    "epsilon=0.2, epsilon_high=0.2": weights(1.0, epsilon=0.2, epsilon_high=0.2),
    "cap of negative advantages 1, advantage -1": weights(-1.0, max_negative_advantage_importance_sampling_weight=1.0),
    "cap of negative advantages 1, advantage +1": weights(1.0, max_negative_advantage_importance_sampling_weight=1.0),
}
for name, of in found.items():
    print(f"{name:44} weights {of}")
if [*found.values()] != [[0.8, 0.9, 1.1, 3.0, 5.0], [0.8, 0.9, 1.1, 1.2, 1.2], [0.1, 0.9, 1.0, 1.0, 1.0], [0.1, 0.9, 1.0, 1.0, 1.0]]:
    sys.exit("CHANGED: how ratios are clipped")
PYTHON
