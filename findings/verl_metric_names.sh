#!/usr/bin/env bash
# Guessed: a metric that a policy loss of verl returns is averaged over micro-batches, as the built-in ones are.
# So is: its name decides. Where the letters "max" stand anywhere in it the largest is kept, where "min" stands anywhere the smallest:
# "actor/terminated" (ter-min-ated), "actor/minibatch_kl", "actor/dominance", "actor/softmax_temperature". verl 0.9.1.
# Why it matters: of 64 micro-batches in one of which no trajectory terminated, the share that did is logged as 0. The curve is smooth, has
# the right name, and is an extreme. What a registered loss returns and what a reward function's metrics are called is up to the user.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet "verl[verl-core]==0.9.1"
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
from verl.utils.metric import reduce_metrics

print("verl", version("verl"))
shares = np.random.default_rng(0).binomial(8, 0.8, size=64) / 8
names = ["actor/finished", "actor/terminated", "actor/minibatch_kl", "actor/softmax_temperature"]
found = reduce_metrics({name: list(shares) for name in names})
print(f"64 micro-batches: mean {shares.mean():.3f}, smallest {shares.min():.3f}, largest {shares.max():.3f}")
for name, value in found.items():
    print(f"{name:26} {value:.3f}")
if [found[name] for name in names] != [shares.mean(), shares.min(), shares.min(), shares.max()]:
    sys.exit("CHANGED: verl reduces metrics in another way")
PYTHON
