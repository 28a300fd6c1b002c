#!/usr/bin/env bash
# Guessed: a Dataset that draws from a generator of its own, rng = numpy.random.default_rng(seed), draws other numbers in each worker and epoch,
# now that DataLoader seeds numpy and random in its workers.
# So is: only the global generators are seeded. Each worker starts from a copy of the dataset as it stands in the main process, where the
# generator never moves: workers draw the same numbers, and every epoch draws those of the first again. Of 40 draws 5 differ. With
# persistent_workers=True epochs differ and workers do not; with num_workers=0 all do. torch 2.13.0, on Linux.
# Why it matters: which search results are shown, which answer is drawn, noise and dropout of passages repeat from epoch to epoch, and only
# where workers are used. Make the generator from torch.utils.data.get_worker_info().seed in each worker.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy
fi
cd "$(mktemp -d)"
cat > script.py <<'PYTHON'
import random
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Ten records with a number drawn for each, from its own generator or from numpy's global one."""

    def __init__(self, own):
        self.rng = np.random.default_rng(0) if own else np.random

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.rng.random() if self.rng is not np.random else np.random.random()


def different(own, **options):
    """How many of the draws of four epochs are different, each epoch of ten records."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    loader = DataLoader(Noisy(own), batch_size=5, **options)
    return len({float(number) for _ in range(4) for batch in loader for number in batch})


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("fork")
    print("torch", torch.__version__, "numpy", np.__version__)
    two = {"num_workers": 2}
    found = {
        "own generator, no workers": different(True),
        "own generator, two workers": different(True, **two),
        "own generator, two that stay": different(True, persistent_workers=True, **two),
        "numpy's global one, two workers": different(False, **two),
    }
    for name, count in found.items():
        print(f"{name:32} of 40 draws {count} are different")
    if list(found.values()) != [40, 5, 20, 40]:
        sys.exit("CHANGED: workers draw other numbers")
PYTHON
"$FINDINGS_VENV/bin/python" script.py
