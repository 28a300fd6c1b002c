#!/usr/bin/env bash
# Guessed: at the level "trajectory" the agent's own tokens are trained, also after it rewrote its history (a summary, a dropped thought), when a new
# row begins.
# So is: what of that row's prompt is beyond `trajectory_max_prompt_length` counts as the agent's, and the mask slips by as many places: of the next
# observation so many tokens are trained, the last turn is not, and padding is. agentlightning 0.3.0.
# Why it matters: that length is meant to be the first prompt's, and a prompt after a rewrite is longer. Passages and padding are then trained
# in place of what the agent wrote.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet verl==0.8.0 torch==2.13.0 datasets==4.4.2 pyarrow==21.0.0 cachetools
  "$FINDINGS_VENV/bin/pip" install --quiet agentlightning==0.3.0 # apart: it and verl want other versions of what neither needs here
fi
LITELLM_LOCAL_MODEL_COST_MAP=True "$FINDINGS_VENV/bin/python" - <<'PYTHON' 2>/dev/null
import sys
from collections import Counter
from importlib.metadata import version

import torch
from agentlightning.types import RolloutLegacy, Triplet
from agentlightning.verl.daemon import AgentModeDaemon

KINDS = {0: "padding", 1: "prompt", 2: "agent", 3: "observation"}  # by a token's hundreds


def tokens(kind, n, first):
    return [100 * kind + 10 * first + i for i in range(n)]


def trained(longest_prompt):
    """By kind: how many of a row's tokens are trained, of a row that begins after a rewrite: prompt, turn, observation, turn."""
    prompt, one, seen, two = tokens(1, 8, 1), tokens(2, 3, 1), tokens(3, 4, 0), tokens(2, 3, 2)
    turns = [(tokens(1, 4, 0), tokens(2, 3, 0)), (prompt, one), (prompt + one + seen, two)]
    daemon = object.__new__(AgentModeDaemon)  # without its server
    daemon.is_train, daemon.pad_token_id, daemon.tokenizer, daemon._use_mrope = True, 0, None, False
    daemon.trace_aggregator, daemon._total_tasks_queued = {"level": "trajectory"}, 1
    triplets = [Triplet(prompt={"token_ids": p}, response={"token_ids": r}) for p, r in turns]
    daemon._completed_rollouts_v0 = {"a": RolloutLegacy(rollout_id="a", final_reward=1.0, triplets=triplets)}
    daemon._task_id_to_original_sample = {"a": {"data_id": "question"}}
    batch, _ = daemon.get_train_data_batch(longest_prompt, 24, torch.device("cpu"), 0)
    rows = zip(batch.batch["responses"][1].tolist(), batch.batch["response_mask"][1].tolist())
    return dict(Counter(KINDS[token // 100] for token, mask in rows if mask))


print("agentlightning", version("agentlightning"), "- tokens trained after a rewrite; the agent wrote 6, its prompt has 8")
found = {longest: trained(longest) for longest in (16, 5)}
for longest, of in found.items():
    print(f"trajectory_max_prompt_length {longest:2}: {of}")
if found[16] != {"agent": 6} or not {"prompt", "observation", "padding"} <= set(found[5]):
    sys.exit("CHANGED: which tokens are trained")
PYTHON
