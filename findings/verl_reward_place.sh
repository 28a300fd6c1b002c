#!/usr/bin/env bash
# Guessed: a trajectory's score reaches its advantages under every estimator, and a response alone in its group has none to give.
# So is: the score stands on the last token that is no padding. Where that is an observation (the budget ended after a search), gae
# and reinforce_plus_plus pass over it: the score is lost, while grpo, which sums, keeps it. A response that is alone in its group
# is given its raw score by grpo and rloo as if it were an advantage, and 0 by rloo_vectorized.
# verl 0.9.1.
# Why it matters: a penalty for running out of budget, or part marks for what was found, never arrive under GAE. Where failed roll-outs
# are dropped from groups, those that are left alone push as hard as the whole score says, and always upwards.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet "verl[verl-core]==0.9.1"
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import torch
from verl.trainer.ppo import core_algos

print("verl", version("verl"))
values = torch.zeros(2, 6)
mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0]])  # the second response ends with an observation
scores = torch.zeros(2, 6)
scores[:, -1] = torch.tensor([1.0, -1.0])  # its last token, as verl's agent loop places a score
options = SimpleNamespace(gamma=1.0)
returns = {
    "gae": core_algos.compute_gae_advantage_return(scores, values, mask, 1.0, 1.0)[1],
    "reinforce_plus_plus": core_algos.compute_reinforce_plus_plus_outcome_advantage(scores, mask, options)[1],
}
groups = np.array(["a", "a"], dtype=object)
returns["grpo, without its std"] = core_algos.compute_grpo_outcome_advantage(scores, mask, groups, norm_adv_by_std_in_grpo=False)[1]
for name, found in returns.items():
    print(f"{name}: scores 1 and -1 arrive at the first token as {found[:, 0].tolist()}")

alone = {}
scores, mask = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]), torch.ones(3, 2)
groups = np.array(["alone", "pair", "pair"], dtype=object)
for name in ("grpo", "rloo", "rloo_vectorized"):
    alone[name] = float(core_algos.get_adv_estimator_fn(name)(scores, mask, index=groups)[0][0, 0])
print("advantage of a response with score 1 that is alone in its group:", alone)
lost = returns["gae"][1, 0] == 0 and returns["reinforce_plus_plus"][1, 0] == 0 and returns["grpo, without its std"][1, 0] == -1
if not lost or alone["grpo"] < 0.99 or alone["rloo"] != 1 or alone["rloo_vectorized"] != 0:
    sys.exit("CHANGED: the score arrives, or a response alone in its group has no advantage")
PYTHON
