"""Roll-outs by our PyTorch sampler and by vLLM, side by side, on one core: python benchmarks/rollouts.py MODEL [--json FILE].

MODEL: a pretrained model that searches, such as a warm start of preset `smollm`. It answers made-up questions over made-up
passages in at most three turns, sampled at temperature 1. Each engine runs in a process of its own, with one thread, 32 and 64
trajectories at once, three times after one that does not count; a cell is the median. vLLM's prefix cache holds within a roll-out, as in training, where weights change in between. With one
environment for both: `make test-engines` makes `.venv-engines`.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ENGINES, SIZES, TIMES = ("torch", "vllm"), (32, 64), 3


def measure(engine: str, model: str, precision: str) -> list[dict]:
    """Rows of one engine: tokens of whole trajectories and of the agent a second of wall time, CPU seconds a roll-out."""
    import torch

    from benchmarks.smollm import Library
    from stppo.policy.compute import place
    from stppo.policy.policy import load_policy, load_tokenizer
    from stppo.rollout.engines import make_rollout
    from stppo.rollout.rollout import RolloutConfig, VLLMRolloutConfig
    from stppo.world.environment import SearchEnvironment
    from stppo.world.protocol import PROMPTS, Protocol, Question

    torch.set_num_threads(1)
    policy, tokenizer = load_policy(model), load_tokenizer(model)
    place(policy, torch.device("cpu"), precision)
    library = Library()
    protocol = Protocol(
        **PROMPTS["short"],
        max_information_words=60,
        max_turn_tokens=32,
        max_observation_tokens=160,
        turn_budget=2,
    )
    config = (
        RolloutConfig(max_tokens=384, batch_size=max(SIZES))
        if engine == "torch"
        else VLLMRolloutConfig(max_tokens=384, max_num_seqs=max(SIZES), dtype=precision, sync_tolerance=1.0)
    )
    sampler = make_rollout(SearchEnvironment(protocol, library, 1), tokenizer, config, policy)
    rows = []
    for n in SIZES:
        found = []
        for repeat in range(TIMES + 1):
            questions = [Question(str(i), library.words(8).capitalize() + "?", ("Paris",)) for i in range(n)]
            wall, cpu = time.perf_counter(), _cpu_seconds()
            with torch.no_grad():
                rollout = sampler.collect(
                    policy, questions, torch.Generator().manual_seed(repeat), policy_updates=repeat
                )
            wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
            batch = rollout.trajectories
            measured = {
                "tokens_per_second": float(batch.lengths.sum()) / wall,
                "agent_tokens_per_second": float(batch.agent_mask.sum()) / wall,
                "cpu_seconds": cpu,
                "tokens_per_trajectory": float(batch.lengths.float().mean()),
                "prefix_cache_hit_rate": rollout.metrics.get("prefix_cache_hit_rate"),
                "mismatch_mean": rollout.metrics.get("mismatch_mean"),
            }
            found += [measured] if repeat else []
        middle = {
            name: None if found[0][name] is None else statistics.median(row[name] for row in found)
            for name in found[0]
        }
        rows.append({"engine": engine, "precision": precision, "trajectories": n} | middle)
    sampler.close()
    return rows


def _cpu_seconds() -> float:
    """Of this process with all its threads, and of those of its children that have ended."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--only", choices=ENGINES)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.model, options.precision)))
        return
    from stppo.config.provenance import environment

    rows = []
    one = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    for engine in ENGINES:
        command = [sys.executable, "-m", "benchmarks.rollouts", options.model, "--only", engine]
        command = ["taskset", "-c", "0", *command, "--precision", options.precision]
        done = subprocess.run(command, capture_output=True, text=True, env=one)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        rows += json.loads(done.stdout.strip().splitlines()[-1])
        print(json.dumps(rows[-len(SIZES) :], indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
