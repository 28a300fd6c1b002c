#!/usr/bin/env bash
# Guessed: with `kl_discount_factor` above 0 an action's credit holds the penalty of later actions too, and tokens that the policy did not
# write keep a credit of 0, as they have without it.
# So is: the discounted sum runs over every position. Questions and passages get the credit of what follows them, and the mask that would
# leave them out is taken off before a batch is sent to the loss. Their sampling log-prob is written as 0, so by the loss's documentation
# the weight of a passage's token is its own probability. With the default, 0, all is as guessed. tinker-cookbook 0.6.1, tinker 0.38.0.
# Why it matters: an agent with long passages is trained to write or not to write what its search brought, most where a passage is easy to guess.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  # What the part on reinforcement learning imports; the whole package asks for renderers that it does not need here.
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 tinker==0.38.0 transformers datasets==5.2.0 chz pillow termcolor rich blobfile aiohttp cloudpickle \
    tiktoken pyrage
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps tinker-cookbook==0.6.1
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import asyncio
import sys
from importlib.metadata import version
from types import SimpleNamespace

import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.metrics import incorporate_kl_penalty
from tinker_cookbook.rl.train import _remove_mask
from tinker_cookbook.rl.types import Trajectory, Transition

question, search, passage, answer = [11, 12, 13], [21, 22], [31, 32, 33, 34, 35, 36], [41, 42]


class Reference:
    """Stands for the served base model: it gives every token a log-prob of -2."""

    def sample(self, prompt, **_):
        async def response():
            logprobs = [None] + [-2.0] * (prompt.length - 1)
            return SimpleNamespace(prompt_logprobs=logprobs, sequences=[], prompt_cache_hit_tokens=0)

        return SimpleNamespace(coroutine=response)


def batch():
    """A question, a search, what it brought, an answer; the policy is surer of its answer than of its search."""
    turns = [(question, search, [-1.5, -1.5]), (question + search + passage, answer, [-0.2, -0.2])]
    transitions = [
        Transition(
            ob=tinker.ModelInput.from_ints(seen),
            ac=TokensWithLogprobs(tokens=written, maybe_logprobs=logprobs),
            reward=0.0,
            episode_done=written is answer,
        )
        for seen, written, logprobs in turns
    ]
    return trajectory_to_data(Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty()), 0.0)


print("tinker-cookbook", version("tinker-cookbook"), "tinker", version("tinker"))
found = {}
for discount in (0.0, 0.9):
    data = batch()
    asyncio.run(incorporate_kl_penalty(data, Reference(), kl_penalty_coef=1.0, kl_discount_factor=discount))
    (sent,) = map(_remove_mask, data)
    credit = sent.loss_fn_inputs["advantages"].to_torch()
    targets = sent.loss_fn_inputs["target_tokens"].data
    of = {name: [round(float(c), 2) for c, t in zip(credit, targets) if t in tokens]
          for name, tokens in (("search", search), ("passage", passage), ("answer", answer))}
    found[discount] = of["passage"], sorted(sent.loss_fn_inputs)
    print(f"kl_discount_factor {discount}: credit of", of, "; sent:", found[discount][1])
named = ["advantages", "logprobs", "target_tokens"]
if found[0.0] != ([0.0] * 6, named) or found[0.9][1] != named or not all(c < -0.1 for c in found[0.9][0]):
    sys.exit("CHANGED: the credit of tokens that the policy did not write")
PYTHON
