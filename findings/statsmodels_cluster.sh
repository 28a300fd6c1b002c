#!/usr/bin/env bash
# Guessed: statsmodels' OLS tests by Student's distribution, and fit(cov_type="cluster"), with runs clustered by world, does so with one
# degree of freedom less than there are worlds.
# So is: any cov_type but the plain one changes to the normal distribution. Of studies of six worlds in which nothing is
# true, one in ten is significant at .05, twice as many as said. use_t=True brings Student's back. statsmodels 0.15.0.
# Why it matters: asking for the more careful error makes the test bolder, just where worlds or seeds are few. The summary says so in
# one letter, z for t.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet statsmodels==0.15.0 scipy==1.17.1 pandas==2.3.3
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
import statsmodels.api as sm

rng, studies = np.random.default_rng(0), 2000
worlds = np.repeat(range(6), 8)
kinds = {"plain": {}, "as it is": {}, "use_t=True": {"use_t": True}}
found = dict.fromkeys(kinds, 0)
for _ in range(studies):
    gain = rng.normal(size=6)[worlds] + 0.3 * rng.normal(size=len(worlds))  # its mean over worlds is 0
    model = sm.OLS(gain, np.ones(len(worlds)))
    for kind, options in kinds.items():
        clustered = {} if kind == "plain" else {"cov_type": "cluster", "cov_kwds": {"groups": worlds}}
        found[kind] += model.fit(**clustered, **options).pvalues[0] < 0.05
print("statsmodels", version("statsmodels"), "- six worlds, eight runs in each, no effect")
for kind, count in found.items():
    print(f"{'clustered, ' if kind != 'plain' else ''}{kind}: p < .05 in {count / studies:.1%} of {studies} studies")
if found["as it is"] / studies < 0.09 or found["use_t=True"] / studies > 0.07:
    sys.exit("CHANGED: clustered errors are tested by Student's distribution")
PYTHON
