#!/usr/bin/env bash
# Guessed: under GAE the last token of an answer that earned 1 has advantage 1 where the critic says 0, whatever else is in the batch.
# So is: the reward is laid on the last column of the padded batch, and GAE runs over the padding: with lambda .95 the advantage is .81 where the longest
# response may be twice as long, .05 at sixteen times. rlinf 0.3.0.
# Why it matters: responses are padded to the longest that the config allows. The shorter an answer, the less of its reward reaches it.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy ray==2.52.1 omegaconf==2.3.0 regex
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps rlinf==0.3.0 # of its requirements this part needs the ones above
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from rlinf.algorithms.registry import calculate_adv_and_returns

TOKENS, WIDTHS, LAMBDA = 4, (4, 8, 64), 0.95


def last_advantage(width, lam):
    """Of the last of four tokens that earned 1, in rows of `width` tokens; a critic that says 0."""
    mask = torch.zeros(1, width, dtype=torch.bool)
    mask[:, :TOKENS] = True
    advantages, _ = calculate_adv_and_returns(
        task_type="reasoning",
        adv_type="gae",
        rewards=torch.ones(1),
        loss_mask=mask,
        values=torch.zeros(1, width),
        gamma=1.0,
        gae_lambda=lam,
        normalize_advantages=False,
    )
    return round(float(advantages[0, TOKENS - 1]), 3)


print("rlinf", version("rlinf"), "-", TOKENS, "tokens, rows of", WIDTHS)
found = {lam: [last_advantage(width, lam) for width in WIDTHS] for lam in (LAMBDA, 1.0)}
for lam, of in found.items():
    print(f"lambda {lam}: advantage of the last token {of}")
if found != {LAMBDA: [round(LAMBDA ** (width - TOKENS), 3) for width in WIDTHS], 1.0: [1.0] * 3}:
    sys.exit("CHANGED: where the reward lies")
PYTHON
