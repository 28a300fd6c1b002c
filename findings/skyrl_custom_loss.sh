#!/usr/bin/env bash
# Guessed: a policy loss that is registered in SkyRL returns the mean over the batch's tokens, as its documentation's example of a
# custom loss does, and `loss_reduction` chooses how built-in losses average.
# So is: `loss_reduction` is laid into the advantages before any loss sees them, and every built-in loss returns a plain sum. A
# registered loss that averages is divided twice: its gradient is that of the built-in one over the number of entries.
# skyrl 0.4.0 (it needs Python 3.12; the file of losses is loaded alone here, with stand-ins for Ray and the config classes).
# Why it matters: the method of one's own seems not to learn, or hides behind Adam, while entropy and KL terms beside it weigh
# hundreds of times more than stated.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$folder/venv
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy
fi
"$FINDINGS_VENV/bin/python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest "$folder" skyrl==0.4.0
cd "$folder"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import importlib
import sys
import types
import zipfile
from pathlib import Path
from unittest.mock import MagicMock

import torch

(wheel,) = Path().glob("skyrl-*.whl")
zipfile.ZipFile(wheel).extractall("site")
for name in ("ray", "loguru", "jaxtyping", "skyrl.train", "skyrl.train.config", "skyrl.utils", "skyrl.utils.tok"):
    sys.modules[name] = MagicMock()
sys.modules["ray"].is_initialized = lambda: False
sys.modules["ray"].remote = lambda kind: kind
place = "skyrl.backends.skyrl_train.utils"
for depth in range(1, 5):
    name = ".".join(place.split(".")[:depth])
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [f"site/{name.replace('.', '/')}"]
losses = importlib.import_module(f"{place}.ppo_utils")


@losses.register_policy_loss("averaged")
def averaged(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    weights = (log_probs - old_log_probs).exp()
    return -(weights * advantages).mean(), {}


torch.manual_seed(0)
rows, width = 4, 50
old = -torch.rand(rows, width)
now = (old + 0.01 * torch.randn(rows, width)).requires_grad_()
mask = torch.ones(rows, width)
advantages = torch.randn(rows, 1).expand(rows, width)
config = types.SimpleNamespace(
    policy_loss_type="regular",
    eps_clip_low=0.2,
    eps_clip_high=0.2,
    off_policy_correction=types.SimpleNamespace(
        tis_ratio_type=None,
        sequence_mask_metric=None,
        outlier_token_is_threshold_low=None,
        outlier_token_is_threshold_high=None,
        token_mask_is_threshold_low=None,
        token_mask_is_threshold_high=None,
    ),
)
scaled = losses.apply_loss_reduction_to_advantages_minibatch(advantages, mask, "token_mean", rows, width)


def gradient(name):
    loss, _ = losses.PolicyLossRegistry.get(name)(now, old, scaled, config, loss_mask=mask)
    return torch.autograd.grad(loss, now)[0]


ratio = float(gradient("regular").norm() / gradient("averaged").norm())
print(wheel.name.split("-")[:2], "torch", torch.__version__)
print(f"built-in loss over one that averages, on the same {rows} x {width} tokens: {ratio:.1f} times the gradient")
if abs(ratio - rows * width) > 1:
    sys.exit("CHANGED: a registered loss that averages is not divided twice")
PYTHON
