#!/usr/bin/env bash
# Guessed: `loss_agg_mode` says how a loss is averaged, among the loss's arguments or beside them, and GSPO averages by default as GSPO does.
# So is: beside them it counts only while the loss has no arguments of its own: with a clip range of yours it is dropped. Among them it is replaced by
# the default beside them, token-mean. So GSPO averages over tokens, until its own default clip range is written down. trinity-rft 0.6.0.
# Why it matters: who sets a clip range changes how trajectories weigh, without a word for most losses.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy safetensors ray==2.52.1 omegaconf==2.3.0 transformers==5.24.0
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps trinity-rft==0.6.0 # of its requirements these parts need the ones above
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from trinity.algorithm import POLICY_LOSS_FN
from trinity.common.config import AlgorithmConfig, Config
from trinity.common.config_validator import AlgorithmConfigValidator

WANTED, GSPO = "seq-mean-token-mean", {"clip_range_low": 3e-4, "clip_range_high": 4e-4}


def averaged(kind, **settings):
    """How the loss averages that a config with these settings comes to."""
    config = Config(algorithm=AlgorithmConfig(algorithm_type=kind, **settings))
    AlgorithmConfigValidator().validate(config)
    made = POLICY_LOSS_FN.get(config.algorithm.policy_loss_fn)(**config.algorithm.policy_loss_fn_args)
    return made.loss_agg_mode


found = {
    "grpo, loss_agg_mode beside the arguments": averaged("grpo", loss_agg_mode=WANTED),
    "... and a clip range among them": averaged("grpo", loss_agg_mode=WANTED, policy_loss_fn_args={"clip_range": 0.2}),
    "grpo, both among the arguments": averaged(
        "grpo", policy_loss_fn_args={"clip_range": 0.2, "loss_agg_mode": WANTED}
    ),
    "gspo": averaged("gspo"),
    "gspo, its default clip range among the arguments": averaged("gspo", policy_loss_fn_args=GSPO),
}
print("trinity-rft", version("trinity-rft"))
for name, of in found.items():
    print(f"{name:50} {of}")
if [*found.values()] != [WANTED, "token-mean", "token-mean", "token-mean", WANTED]:
    sys.exit("CHANGED: which loss_agg_mode counts")
PYTHON
