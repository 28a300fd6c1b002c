#!/usr/bin/env bash
# Guessed: Parallel(n_jobs=2)(delayed(draw)(rng) for ...), with one generator for all, draws what n_jobs=1 draws, or other numbers of the
# same kind.
# So is: tasks get copies of the generator as it was, one for each batch that joblib sends, and how many tasks make a batch it decides by
# how long they take. Most draws are copies of each other: of 400, 64 differ.
# joblib 1.6.0, numpy 2.4.6.
# Why it matters: a bootstrap that was made faster so has the interval of a few draws, and looks as before.
# Hand out a seed for each task: np.random.SeedSequence(0).spawn(400).
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet joblib==1.6.0 numpy==2.4.6
fi
cd "$(mktemp -d)"
cat > bootstrap.py <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
from joblib import Parallel, delayed

successes = np.random.default_rng(1).uniform(size=12)


def draw(generator):
    return float(generator.choice(successes, len(successes)).mean())


if __name__ == "__main__":
    print("joblib", version("joblib"), "numpy", np.__version__)
    different = {}
    for n_jobs in (1, 2):
        rng = np.random.default_rng(0)
        draws = Parallel(n_jobs=n_jobs)(delayed(draw)(rng) for _ in range(400))
        different[n_jobs] = len(set(draws))
        print(f"n_jobs={n_jobs}: {different[n_jobs]} different means in 400, interval", np.quantile(draws, [0.025, 0.975]).round(3))
    streams = [np.random.default_rng(seed) for seed in np.random.SeedSequence(0).spawn(400)]
    print("a stream for each:", len(set(Parallel(n_jobs=2)(delayed(draw)(stream) for stream in streams))), "different means")
    if different[1] < 300 or different[2] > 0.8 * different[1]:
        sys.exit("CHANGED: two workers draw as many different means as one")
PYTHON
"$FINDINGS_VENV/bin/python" bootstrap.py
