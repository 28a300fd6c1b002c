#!/usr/bin/env bash
# Guessed: a task whose answer is one number pays 1 for that number and nothing for another.
# So is: where a task brings no scorer of its own, an answer that has the right one anywhere within it earns the ratio of their lengths. The right number
# with a minus before it, or with a zero behind it, earns three quarters of the reward of arithmetic. reasoning-gym 0.1.25.
# Why it matters: a policy is paid for the wrong sign or the wrong magnitude nearly as for the truth, and a mean reward of .7 may be no solved task.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet reasoning-gym==0.1.25
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import reasoning_gym

SIZE, TASKS = 500, ("basic_arithmetic", "leg_counting", "gcd")
WAYS = {"right": "{}", "negated": "-{}", "ten times": "{}0"}
print("reasoning-gym", version("reasoning-gym"), "- mean reward of an answer, right and wrong;", SIZE, "tasks of a kind")
found = {}
for name in TASKS:
    tasks = reasoning_gym.create_dataset(name, size=SIZE, seed=1)
    asked = [task for task in tasks if task["answer"] not in ("0", "-0") and not task["answer"].startswith("-")]
    for way, form in WAYS.items():
        rewards = [tasks.score_answer(form.format(task["answer"]), task) for task in asked]
        found[name, way] = round(sum(rewards) / len(rewards), 2)
    print(f"{name:18}", {way: found[name, way] for way in WAYS})
wrong = [reward for (_, way), reward in found.items() if way != "right"]
if not (all(found[name, "right"] == 1 for name in TASKS) and min(wrong) > 0.4):
    sys.exit("CHANGED: what wrong numbers earn")
PYTHON
