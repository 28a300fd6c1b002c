#!/usr/bin/env bash
# Guessed: `--rollout.max_new_tokens` limits what an agent of several turns writes in each turn, or in all, and trajectories of a group do not touch each
# other.
# So is: each turn may take all that is left of `--data.max_len`; the limit is overwritten. It is overwritten in the settings that the group shares, so the
# next trajectory, which keeps room for a whole turn, is left as long a first observation as the first one had, cut from the front. openrlhf 0.11.2.
# Why it matters: one turn may use up the budget of all searches, and where `reset` adds to the question the agent may not see its beginning.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy transformers==5.24.0 aiohttp pylatexenc
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps openrlhf==0.11.2 # of its requirements this part needs the ones above
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON' 2>/dev/null
import asyncio
import sys
from importlib.metadata import version
from types import SimpleNamespace

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

MAX_LEN, MAX_NEW_TOKENS = 200, 20


class Tokenizer:
    """One token a word."""

    def __call__(self, text, **_):
        return {"input_ids": torch.tensor([[len(word) for word in text.split()]])}

    def decode(self, ids, **_):
        return " ".join("x" * i for i in ids)


class Engine:
    """Five tokens a turn, whatever is asked for."""

    def __init__(self):
        self.asked = []

    async def generate(self, prompt, sampling_params, multi_modal_data=None):
        self.asked.append((len(prompt), sampling_params.max_tokens))
        await asyncio.sleep(0)
        turn = SimpleNamespace(token_ids=[1] * 5, text="one two three four five", finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[turn])


def group(*first_observations):
    """(length of the prompt, tokens allowed) of each turn of a group of trajectories of two turns."""
    lengths = iter(first_observations)

    class Search(AgentInstanceBase):
        def __init__(self):
            self.turns = 0

        async def reset(self, states, **_):
            return {"observation": " ".join(["word"] * next(lengths))}

        async def step(self, states, **_):
            self.turns += 1
            feedback = {"environment_feedback": "a passage of five words", "done": self.turns == 2}
            return feedback | {"rewards": torch.tensor(0.0)}

    engine, settings = Engine(), SimpleNamespace(max_tokens=MAX_NEW_TOKENS, logprobs=None)

    async def together():  # as `generate_responses` of its vLLM actor
        executor = MultiTurnAgentExecutor(Search)
        of = [executor.execute("question", "label", settings, MAX_LEN, Tokenizer(), engine) for _ in first_observations]
        await asyncio.gather(*of)

    asyncio.run(together())
    return engine.asked


print("openrlhf", version("openrlhf"), "- max_len", MAX_LEN, "max_new_tokens", MAX_NEW_TOKENS)
alone, both = group(30), group(10, 30)
print("first observation 30 tokens: (prompt, allowed) by turn", alone)
print("first observations 10 and 30 in one group: first turns", both[:2])
if alone[0] != (30, MAX_LEN - 30) or both[1][0] != 10:
    sys.exit("CHANGED: what limits a turn")
PYTHON
