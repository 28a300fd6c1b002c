#!/usr/bin/env bash
# Guessed: POST /step of an OpenEnv server continues the episode that POST /reset began.
# So is: each request makes an environment of its own, and closes it. A step always acts on one that was never reset, so every turn is a first one. A
# WebSocket has sessions, and /mcp has. The server's own description tells to call /reset, then /step again and again. openenv-core 0.3.0.
# Why it matters: where an environment can step without a reset, nothing fails: an agent trained over plain HTTP never reaches a second turn.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet openenv-core==0.3.0 httpx
fi
"$FINDINGS_VENV/bin/python" -W ignore - <<'PYTHON'
import sys
from importlib.metadata import version

from fastapi.testclient import TestClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Reply(Action):
    text: str


class Page(Observation):
    text: str = ""


class Search(Environment):
    """Three turns on a question that `reset` gives."""

    def __init__(self):
        super().__init__()
        self.turn, self.question = 0, "no question"

    def reset(self, seed=None, episode_id=None, **rest):
        self.turn, self.question = 0, "who wrote Emma"
        return Page(text=self.question, done=False, reward=0.0)

    def step(self, action, timeout_s=None, **rest):
        self.turn += 1
        return Page(text=f"turn {self.turn}: {self.question}", done=self.turn == 3, reward=float(self.turn == 3))

    @property
    def state(self):
        return State(step_count=self.turn)


client = TestClient(create_fastapi_app(Search, Reply, Page))
print("openenv-core", version("openenv-core"))
print("POST /reset:", client.post("/reset", json={}).json())
turns = [client.post("/step", json={"action": {"text": "Emma"}}).json() for _ in range(3)]
for turn in turns:
    print("POST /step:", turn)
print("GET /state:", client.get("/state").json())
with client.websocket_connect("/ws") as session:
    session.send_json({"type": "reset", "data": {}})
    session.receive_json()
    in_session = []
    for _ in range(3):
        session.send_json({"type": "step", "data": {"text": "Emma"}})
        in_session.append(session.receive_json()["data"])
print("the third step of a WebSocket session:", in_session[-1])
if any(turn["observation"]["text"] != "turn 1: no question" or turn["done"] for turn in turns) or not in_session[-1]["done"]:
    sys.exit("CHANGED: a step over HTTP now continues an episode, or a session no longer does")
PYTHON
