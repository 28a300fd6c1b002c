#!/usr/bin/env bash
# Guessed: with `rank_penalty` GRPO pays unlikely right answers more than likely ones, and advantages still sum to 0 over a question's answers.
# So is: the penalised rewards only make the mean and the deviation; what they are taken from is the raw reward. Right answers stay equal, and all
# advantages move up together. trinity-rft 0.6.0.
# Why it matters: the option does not do what it is for, and every answer of every question is pushed up a little instead.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy safetensors ray==2.52.1 omegaconf==2.3.0 transformers==5.24.0
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps trinity-rft==0.6.0 # of its requirements these parts need the ones above
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from trinity.algorithm import ADVANTAGE_FN
from trinity.common.experience import EID, Experience

REWARDS, LOGPROBS = [1.0, 1.0, 0.0, 0.0], [-0.1, -2.0, -0.5, -1.0]  # of four answers: reward, mean log-prob


def advantages(**settings):
    kind = ADVANTAGE_FN.get("grpo")
    answers = [
        Experience(
            eid=EID(task=0, run=i), tokens=torch.arange(6), prompt_length=2, reward=r, logprobs=torch.full((4,), p)
        )
        for i, (r, p) in enumerate(zip(REWARDS, LOGPROBS))
    ]
    found, _ = kind(**kind.default_args() | settings).process(answers)
    return [round(float(answer.advantages[0]), 3) for answer in found]


print("trinity-rft", version("trinity-rft"), "- rewards", REWARDS, "mean log-probs", LOGPROBS)
plain, penalised = advantages(), advantages(rank_penalty=0.25)
print("rank_penalty=None", plain, "sum", round(sum(plain), 3))
print("rank_penalty=0.25", penalised, "sum", round(sum(penalised), 3))
if not (penalised[0] == penalised[1] and sum(penalised) > 0.3 and abs(sum(plain)) < 0.01):
    sys.exit("CHANGED: what rank_penalty does")
PYTHON
