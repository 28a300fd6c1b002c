#!/usr/bin/env bash
# Guessed: the AUROC of torchmetrics' BinaryAUROC, or the accuracy of BinaryAccuracy, is that of all scores that were given to it, however
# they were divided into batches.
# So is: each batch for itself is taken for probabilities where all its scores lie between 0 and 1, and for logits otherwise, which then go
# through a sigmoid. A raw score of .9 counts as .9 in one batch and as .71 in another, and both are sorted into one list.
# torchmetrics 1.9.0.
# Why it matters: a reward model or critic gives scores that are no probabilities. Its AUROC is then another with another batch size, or
# with fewer answers to a question, and the last, smaller batch of an evaluation is on a scale of its own. Apply the sigmoid first.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.13.0 numpy
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys

import torch
import torchmetrics
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

torch.manual_seed(0)
scores = torch.randn(1000) * 0.8 + 0.3
right = (torch.rand(1000) < scores.sigmoid()).int()


def measured(metric, size, scores):
    """The metric of all scores, given to it in batches of one size."""
    for start in range(0, len(scores), size):
        metric.update(scores[start : start + size], right[start : start + size])
    return metric.compute().item()


print("torchmetrics", torchmetrics.__version__)
found = {}
for size in (1000, 8, 4, 2, 1):
    found[size] = [measured(metric(), size, scores) for metric in (BinaryAUROC, BinaryAccuracy)]
    print(f"batches of {size:4}: AUROC {found[size][0]:.3f}, accuracy {found[size][1]:.3f}")
same = [measured(BinaryAUROC(), size, scores.sigmoid()) for size in (1000, 1)]
print(f"after a sigmoid: AUROC {same[0]:.3f} and {same[1]:.3f}")
if found[1000][0] - found[1][0] < 0.03 or found[1000][1] - found[1][1] < 0.03 or abs(same[0] - same[1]) > 1e-6:
    sys.exit("CHANGED: the division into batches does not count")
PYTHON
