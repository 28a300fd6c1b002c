#!/usr/bin/env bash
# Guessed: in GEM's world of questions a reply without an answer earns 0; a reply that answers ends its episode, whatever follows in it.
# So is: a reply without <answer> raises UnboundLocalError, and so does a search after the last that is allowed, which is handed on as a reply.
# A reply that answers and then searches is a search: its answer is not judged, and the episode goes on. gem-llm 0.1.0.
# Why it matters: an untrained policy writes such a reply within its first batch. The same reply ends an episode in Search-R1, whose first tag
# counts, so success under one budget of turns is not the same number.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet gem-llm==0.1.0 datasets==5.2.0 msgspec requests
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from datasets import Dataset, disable_progress_bars
from gem.envs.qa_env import QaEnv
from gem.tools.search_tool import SearchTool
from gem.tools.tool_env_wrapper import ToolEnvWrapper


class Search(SearchTool):
    """Finds the same passage for every question, without a server."""

    def _search(self, query):
        return "Doc 1(Title: Paris) The capital of France.\n"


disable_progress_bars()
questions = Dataset.from_list([{"question": "What is the capital of France?", "answer": "Paris"}])
search, answer = "<search>France</search>", "<answer>Paris</answer>"
dialogues = {
    "answers": [answer],
    "says nothing of use": ["I do not know."],
    "searches once too often": [search, search, search],
    "answers, then searches": [f"{answer} {search}"],
}
found = {}
print("gem-llm", version("gem-llm"), "- two searches are allowed")
for name, replies in dialogues.items():
    world = ToolEnvWrapper(QaEnv(dataset=questions), [Search(search_url="none")], max_tool_uses=2)
    world.reset()
    try:
        for reply in replies:
            _, reward, ended, *_ = world.step(reply)
        found[name] = (reward, ended)
    except UnboundLocalError as error:
        found[name] = type(error).__name__
    print(f"{name:24} {found[name]}")
if [*found.values()] != [(1.0, True), "UnboundLocalError", "UnboundLocalError", (0.0, False)]:
    sys.exit("CHANGED: how an episode ends")
PYTHON
