#!/usr/bin/env bash
# Guessed: a StatefulDataLoader that takes up a saved state goes on as the one that saved it, in this epoch and in those after it.
# So is: with shuffle=True and a generator of one's own the epoch that was interrupted ends as it would have. Every later one has an order
# that the uninterrupted loader never had. So it is without workers alone; with a worker, without a generator, or with the generator
# in a RandomSampler, all epochs are as guessed. torchdata 0.11.0, torch 2.13.0.
# Why it matters: a training that was stopped and taken up sees its questions in another order than one that was not, and none of the two says so.
# Put the generator into a sampler: sampler=RandomSampler(data, generator=generator).
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torchdata==0.11.0 torch==2.13.0
fi
cd "$(mktemp -d)"
cat > script.py <<'PYTHON'
import sys
import warnings
from importlib.metadata import version

import torch
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.simplefilter("ignore")
QUESTIONS, BATCH, SEEN, EPOCHS = list(range(20)), 4, 2, 4


def loader(kind, workers):
    generator = torch.Generator().manual_seed(1)
    if kind == "sampler":
        return StatefulDataLoader(QUESTIONS, BATCH, sampler=RandomSampler(QUESTIONS, generator=generator), num_workers=workers)
    if kind == "generator":
        return StatefulDataLoader(QUESTIONS, BATCH, shuffle=True, generator=generator, num_workers=workers)
    torch.manual_seed(1)
    return StatefulDataLoader(QUESTIONS, BATCH, shuffle=True, num_workers=workers)


def epoch(batches):
    return [number for batch in batches for number in batch.tolist()]


def equal_epochs(kind, workers):
    """Of an interrupted loader's epochs, which are those of one that was not interrupted."""
    whole = loader(kind, workers)
    orders = [epoch(whole) for _ in range(EPOCHS)]
    stopped = loader(kind, workers)
    batches = iter(stopped)
    begun = epoch(next(batches) for _ in range(SEEN))
    resumed = loader(kind, workers)
    resumed.load_state_dict(stopped.state_dict())
    return [begun + epoch(resumed) == orders[0]] + [epoch(resumed) == order for order in orders[1:]]


if __name__ == "__main__":
    print("torchdata", version("torchdata"), "torch", version("torch"), "- are the epochs equal, the first interrupted after two batches?")
    found = {(kind, workers): equal_epochs(kind, workers) for kind in ("generator", "sampler", "neither") for workers in (0, 1)}
    for (kind, workers), equal in found.items():
        print(f"{kind:10} workers {workers}: {equal}")
    if found.pop(("generator", 0)) != [True, False, False, False] or not all(map(all, found.values())):
        sys.exit("CHANGED: which epochs are equal")
PYTHON
"$FINDINGS_VENV/bin/python" script.py
