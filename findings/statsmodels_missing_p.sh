#!/usr/bin/env bash
# Guessed: a p-value that is NaN stays NaN, and the others are corrected as if it were not there.
# So is: it counts as one more test, and where the correction goes from the largest p-value down (Hochberg, Hommel, both false discovery
# rates) every corrected p-value is NaN. Benjamini and Hochberg's still rejects, Hommel's rejects nothing. statsmodels 0.15.0.
# Why it matters: two methods that fail in every world differ by 0 in each, and the t-test of that is NaN. One such pair, and a table of
# corrected p-values is empty, or "significant" with no number beside it.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet statsmodels==0.15.0 scipy==1.17.1 numpy==2.4.6
fi
"$FINDINGS_VENV/bin/python" -W ignore - <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
from scipy.stats import ttest_rel
from statsmodels.stats.multitest import multipletests

dead = np.zeros(6)
p = [0.0005, 0.0009, 0.03, ttest_rel(dead, dead).pvalue]
print("statsmodels", version("statsmodels"), "- p-values", p)
found = {}
for method in ("holm", "simes-hochberg", "hommel", "fdr_bh"):
    with_it, without = multipletests(p, method=method), multipletests(p[:3], method=method)
    found[method] = int(with_it[0].sum()), int(np.isnan(with_it[1]).sum())
    print(f"{method}: corrected {np.round(with_it[1], 4)}, {found[method][0]} rejected;", end=" ")
    print(f"without the NaN {np.round(without[1], 4)}, {int(without[0].sum())} rejected")
if found["fdr_bh"] != (3, 4) or found["hommel"] != (0, 4) or found["holm"][1] != 1:
    sys.exit("CHANGED: what is not a number no longer spoils the others")
PYTHON
