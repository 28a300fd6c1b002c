#!/usr/bin/env bash
# Guessed: spearmanr of three settings gives a p-value of a third at best, as kendalltau does: by chance one order in three is as extreme.
# So is: 0.0. The p-value is Student's approximation at every size, and a perfect rank correlation of any few points has none at all. Of
# all orders of three points, equally likely, a third is "significant" at .05; of four or five points one in twelve.
# scipy 1.17.1.
# Why it matters: does success rise with the learning rate, an alarm's lead with the batch? Such questions are asked of three to five
# settings. kendalltau is exact, and so is permutation_test.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet scipy==1.17.1
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from itertools import permutations

import scipy
from scipy.stats import kendalltau, spearmanr

print("scipy", scipy.__version__)
share = {}
for n in (3, 4, 5, 6):
    for test in (spearmanr, kendalltau):
        p = [float(test(range(n), order).pvalue) for order in permutations(range(n))]
        share[n, test.__name__] = sum(value < 0.05 for value in p) / len(p)
        print(f"{n} points, {test.__name__:10} least p {min(p):.4f}, below .05 in {share[n, test.__name__]:.1%} of all orders")
if share[3, "spearmanr"] < 0.3 or share[3, "kendalltau"] > 0:
    sys.exit("CHANGED: three points in order are not significant")
PYTHON
