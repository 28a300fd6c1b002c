#!/usr/bin/env bash
# Guessed: an answer that is judged by whether it contains the right one (SkyRL-gym's compute_score_subem, FlashRAG's "acc") has to hold its words.
# So is: its letters, inside of other words too. "I do not know" is right wherever the answer is "no", and "Europe" where it is "Ur".
# skyrl-gym 0.4.0, flashrag-dev 0.1.2; Search-R1's own subem_check is the same.
# Why it matters: sets of comparisons have many a "no". Who takes such a measure as the reward pays a policy for giving up.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet skyrl-gym==0.4.0
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps flashrag-dev==0.1.2 # its metrics need nothing else
fi
"$FINDINGS_VENV/bin/python" -W ignore - <<'PYTHON'
import sys
from importlib.metadata import version

from flashrag.evaluator.metrics import Sub_ExactMatch
from skyrl_gym.envs.search.utils import compute_score_subem

flashrag = Sub_ExactMatch({"dataset_name": "2wikimultihopqa"})
print("skyrl-gym", version("skyrl-gym"), "and flashrag-dev", version("flashrag-dev"))
found = {}
for reply, answer in [("No.", "no"), ("I do not know", "no"), ("in Europe", "Ur"), ("I do not know", "Ur")]:
    found[reply, answer] = (
        compute_score_subem(f"<answer>{reply}</answer>", {"target": [answer]}),
        flashrag.calculate_sub_em(reply, [answer]),
    )
    print(f'"{reply}" where "{answer}" is right: {found[reply, answer]}')
if found != {("No.", "no"): (1, 1), ("I do not know", "no"): (1, 1), ("in Europe", "Ur"): (1, 1), ("I do not know", "Ur"): (0, 0)}:
    sys.exit("CHANGED: letters inside of a word no longer count")
PYTHON
