#!/usr/bin/env bash
# Guessed: on Hydra's command line `shares={2: 1.0}` replaces the mapping, as `layers=[64]` replaces the list.
# So is: a list is replaced, a mapping is merged. What the file had beside is kept: three shares that should have become one are
# 1.0, 0.2 and 0.3. `++shares={...}` merges as well; `~shares +shares={2: 1.0}` replaces. hydra-core 1.3.8, omegaconf 2.3.1.
# Why it matters: mixtures of questions, weights of rewards, arms of a study are mappings. The run trains on all of them, and the
# override stands in its record as if it had not.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet hydra-core==1.3.8 omegaconf==2.3.1
fi
cd "$(mktemp -d)"
printf 'shares: {1: 0.3, 2: 0.5, 3: 0.2}\nlayers: [64, 64]\n' > config.yaml
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import os
import sys
from importlib.metadata import version

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

print("hydra-core", version("hydra-core"), "omegaconf", version("omegaconf"), "- the file has 1: 0.3, 2: 0.5, 3: 0.2")
found = {}
with initialize_config_dir(os.getcwd(), version_base="1.3"):
    for overrides in (["shares={2: 1.0}"], ["++shares={2: 1.0}"], ["~shares", "+shares={2: 1.0}"], ["layers=[32]"]):
        key = " ".join(overrides)
        found[key] = OmegaConf.to_container(compose("config", overrides))
        print(f"{key:26}", found[key])
if len(found["shares={2: 1.0}"]["shares"]) != 3 or found["layers=[32]"]["layers"] != [32]:
    sys.exit("CHANGED: a mapping is replaced")
PYTHON
