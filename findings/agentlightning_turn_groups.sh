#!/usr/bin/env bash
# Guessed: under GRPO an answer's advantage is its reward against those of the other answers to its question.
# So is: each turn is a member of the group, with its answer's reward. One right answer of four has advantage 1.5 if all take one turn, .73 if it takes
# five, 3.75 if the others do. With the trace aggregator's level "trajectory" it is 1.5 each time. agentlightning 0.3.0.
# Why it matters: a success is worth less the more searches it took, whatever the reward says, and failures that search long push their question's
# baseline down.
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
from importlib.metadata import version

import torch
from agentlightning.types import RolloutLegacy, Triplet
from agentlightning.verl.daemon import AgentModeDaemon
from verl.trainer.ppo.ray_trainer import compute_advantage, compute_response_mask

REWARDS = [1.0, 0.0, 0.0, 0.0]  # of four answers to one question


def answer(name, turns, reward):
    """An answer of so many turns of three tokens, each with all that came before as its prompt."""
    context, written = [5, 6], []
    for turn in range(turns):
        response = [10 + turn] * 3
        written.append(Triplet(prompt={"token_ids": list(context)}, response={"token_ids": response}))
        context += response + [7, 8]
    return RolloutLegacy(rollout_id=name, final_reward=reward, triplets=written)


def advantage_of_success(turns, level):
    daemon = object.__new__(AgentModeDaemon)  # without its server
    daemon.is_train, daemon.pad_token_id, daemon.tokenizer, daemon._use_mrope = True, 0, None, False
    daemon.trace_aggregator, daemon._total_tasks_queued = {"level": level}, len(turns)
    answers = {f"answer {i}": answer(f"answer {i}", n, r) for i, (n, r) in enumerate(zip(turns, REWARDS))}
    daemon._completed_rollouts_v0 = answers
    daemon._task_id_to_original_sample = {name: {"data_id": "question"} for name in answers}
    batch, _ = daemon.get_train_data_batch(64, 64, torch.device("cpu"), 0)
    # What its trainer does next.
    batch.non_tensor_batch["uid"] = batch.non_tensor_batch["data_id_list"]
    if "response_mask" not in batch.batch:
        batch.batch["response_mask"] = compute_response_mask(batch)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch = compute_advantage(batch, adv_estimator="grpo", num_repeat=len(turns), norm_adv_by_std_in_grpo=True)
    row = batch.non_tensor_batch["rollout_id_list"].tolist().index("answer 0")
    return round(float(batch.batch["advantages"][row, 0]), 2)


TURNS = ([1, 1, 1, 1], [5, 1, 1, 1], [1, 5, 5, 5])
print("agentlightning", version("agentlightning"), "verl", version("verl"), "- rewards", REWARDS, "turns", TURNS)
found = {level: [advantage_of_success(turns, level) for turns in TURNS] for level in ("transition", "trajectory")}
for level, of in found.items():
    print(f"level {level:11} advantage of the right answer {of}")
each, whole = found.values()
if len(set(whole)) != 1 or not each[1] < each[0] < each[2]:
    sys.exit("CHANGED: what GRPO's group is made of")
PYTHON
