#!/usr/bin/env bash
# Guessed: TensorBoard's EventAccumulator gives every scalar that was logged.
# So is: by default it keeps 10,000 a tag, and which ones is drawn at random: of 20,000 updates half are gone, with gaps anywhere.
# size_guidance={"scalars": 0} keeps all. tensorboard 2.21.0.
# Why it matters: a spike that lasts one update, which is what a collapse begins with, is as likely as not missing from a figure made
# so, and two figures of one run differ.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet tensorboard==2.21.0 torch==2.13.0 numpy
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - 2>/dev/null <<'PYTHON'
import sys
from importlib.metadata import version

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

with SummaryWriter("log") as writer:
    for update in range(20_000):
        writer.add_scalar("gradient_norm", 28.0 if update % 100 == 0 else 1.0, update)
print("tensorboard", version("tensorboard"))
found = {}
for name, guidance in (("by default", None), ("with scalars: 0", {"scalars": 0})):
    events = EventAccumulator("log", guidance)
    events.Reload()
    values = events.Scalars("gradient_norm")
    found[name] = len(values)
    print(f"{name}: {len(values)} of 20000 updates, {sum(v.value > 2 for v in values)} of 200 spikes; first: {[v.step for v in values[:6]]}")
if list(found.values()) != [10_000, 20_000]:
    print("CHANGED: all are kept by default")
    sys.exit(1)
PYTHON
