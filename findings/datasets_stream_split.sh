#!/usr/bin/env bash
# Guessed: a stream of datasets that was shuffled, then split by take (validation) and skip (training), stays split.
# So is: both parts shuffle anew when they are read. At each epoch accelerate's loader, and so Trainer, tells the training part its number;
# the order changes, and skip leaves out what comes first in the new one. 466 of 500 validation records are trained on in the
# second epoch. datasets 5.2.0, accelerate 1.15.0.
# Why it matters: its documentation warns to shuffle before the split. From the second epoch on the held-out score is no such thing.
# Split by a field or the index of the records, before anything shuffles.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet datasets==5.2.0 torch==2.13.0 accelerate==1.15.0
fi
cd "$(mktemp -d)"
HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 HF_DATASETS_CACHE=$PWD/cache "$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader

records = Dataset.from_dict({"question": list(range(10_000))}).to_iterable_dataset(num_shards=8)
shuffled = records.shuffle(seed=1, buffer_size=10_000)
validation, training = shuffled.take(500), shuffled.skip(500)
held_out = {record["question"] for record in validation}
loader = Accelerator(cpu=True).prepare(DataLoader(training, batch_size=100))
print("datasets", version("datasets"), "accelerate", version("accelerate"))
leaked = []
for epoch in range(3):
    trained = {int(question) for batch in loader for question in batch["question"]}
    leaked.append(len(trained & held_out))
    print(f"epoch {epoch}: {len(trained)} questions trained on, {leaked[-1]} of the {len(held_out)} held out among them")
if leaked[0] != 0 or min(leaked[1:]) < 250:
    sys.exit("CHANGED: the split holds at later epochs")
PYTHON
