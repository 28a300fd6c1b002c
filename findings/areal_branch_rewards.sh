#!/usr/bin/env bash
# Guessed: `export_interactions("individual", reward_discount=...)` hands a turn's reward back to the turns that led to it.
# So is: to all that were asked for before it, in the order of their making. Of two attempts at one question, the wrong one that was made first gets the
# right one's reward; made in the other order it gets nothing. areal 1.0.4.
# Why it matters: an agent that branches (attempts, a judge, helpers beside it) has its failures paid, and which ones depends on what answered first.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy transformers==5.24.0 openai httpx hydra-core ray==2.52.1 datasets==4.4.2 pyarrow==21.0.0 \
    colorlog tenacity flask torchdata lark uvloop numba orjson einops aiofiles aiohttp pillow
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps areal==1.0.4 # of its requirements this part needs the ones above
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON' 2>/dev/null
import sys
from importlib.metadata import version

from areal.experimental.openai.cache import InteractionCache
from areal.experimental.openai.types import InteractionWithTokenLogpReward

QUESTION = {"role": "user", "content": "who wrote the odyssey?"}


def turn(cache, name, messages, said, reward=None):
    made = InteractionWithTokenLogpReward(messages=messages, output_message_list=[{"role": "assistant", "content": said}])
    made.interaction_id = name
    cache[name] = made
    if reward is not None:
        cache.set_reward(name, reward)
    return messages + made.output_message_list


def credit(*order):
    """What each turn is paid of a plan and two attempts that follow it, made in this order."""
    cache = InteractionCache()
    planned = turn(cache, "plan", [QUESTION], "I will try two ways.")
    attempts = {"wrong": ("Virgil did.", 0.0), "right": ("Homer did.", 1.0)}
    for name in order:
        turn(cache, name, [*planned, {"role": "user", "content": f"attempt {name}"}], *attempts[name])
    found = cache.export_interactions("individual", reward_discount=1.0)
    assert all(found[name].parent is found["plan"] for name in attempts)
    return {name: found[name].reward for name in ("plan", *attempts)}


print("areal", version("areal"), "- a plan, and two attempts that follow it: paid to each")
found = [credit("wrong", "right"), credit("right", "wrong")]
print("the wrong one made first ", found[0])
print("the right one made first ", found[1])
if [of["wrong"] for of in found] != [1.0, 0.0]:
    sys.exit("CHANGED: to whom a reward is handed back")
PYTHON
