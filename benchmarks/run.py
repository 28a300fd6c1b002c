"""Speed and memory, measured side by side on this machine: `python benchmarks/run.py` prints Markdown tables.

Times compare only within one table: its rows take turns, repeat by repeat, in one thread. Each cell is a median
with its range over the repeats.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.utils.logging import disable_progress_bar

from stppo import config as configs
from stppo.agent.policy import score
from stppo.agent.rollout_torch import TorchRollout
from stppo.objectives import estimated_bias_norms
from stppo.provenance import hardware, versions
from stppo.training.gradients import global_norm, gradient_of
from stppo.training.trainer import Trainer
from stppo.training.warm_start import ensure_warm_start, load_warm_start
from stppo.world.environment import Episode
from stppo.world.protocol import Question

ALGORITHMS = ("token_ppo", "st_ppo", "grpo", "so_grpo")
Table = list[dict[str, str]]


def spread(values: list[float], digits: int = 3) -> str:
    """Median (smallest to largest)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def ratios(values: list[float], base: list[float]) -> str:
    """Repeat by repeat, so that what slows both down cancels."""
    return spread([v / b for v, b in zip(values, base, strict=True)], 2) + " ×"


def markdown(title: str, rows: Table) -> str:
    lines = [f"\n### {title}\n", " | ".join(["", *rows[0], ""]).strip(), "|" + " --- |" * len(rows[0])]
    return "\n".join(lines + [" | ".join(["", *row.values(), ""]).strip() for row in rows])


def make_trainers(overrides: list[str], start: Path, scratch: Path) -> dict[str, Trainer]:
    """Trainers of regime A with a full queue; evaluation and checkpoints are left out of the times."""
    quiet = ["evaluation.every=100000", "training.iterations=100000", "training.checkpoint_every=100000"]
    trainers = {}
    for name in ALGORITHMS:
        config = configs.compose([*overrides, *quiet, "training=off_policy", f"algorithm={name}"])
        trainers[name] = trainer = Trainer(config, scratch / name, start, progress=False)
        for _ in range(trainer.settings.training.staleness_iterations + 1):
            trainer.queue.append(trainer._sample())
    return trainers


def iterations(trainers: dict[str, Trainer], repeats: int) -> Table:
    parts = ("roll-out", "scoring", "update", "critic and rest", "whole iteration")
    times = {name: {part: [] for part in parts} for name in trainers}
    for repeat in range(repeats + 1):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            trainer._iterate()
            whole = time.perf_counter() - began
            rows = [row for row in trainer.update_rows if row["iteration"] == trainer.iteration]
            split = [
                trainer.queue[-1].metrics["seconds_rollout"],
                rows[0]["seconds_scoring"],
                sum(row["seconds_update"] for row in rows),
            ]
            if repeat:  # the first one clips nothing yet and warms up
                for part, value in zip(parts, [*split, whole - sum(split), whole], strict=True):
                    times[name][part].append(value)
    base = times["token_ppo"]["whole iteration"]
    return [
        {"algorithm": name}
        | {part: spread(found[part], 2) for part in parts}
        | {"against token_ppo": ratios(found["whole iteration"], base)}
        for name, found in times.items()
    ]


class TurnCloses(StoppingCriteria):
    """Ends a row of `generate` at the tag that ends a turn, as the roll-out does."""

    def __init__(self, sampler: TorchRollout, prompt_length: int) -> None:
        self.turn_end, self.prompt_length = sampler.turn_end, prompt_length

    def __call__(self, input_ids, scores, **_):
        everyone = torch.ones(len(input_ids), dtype=torch.bool)
        return self.turn_end(input_ids[:, -1], input_ids[:, self.prompt_length :], everyone)


def generate_turns(
    sampler: TorchRollout, policy, questions: list[Question], greedy: bool = False
) -> tuple[int, list[Episode]]:
    """Play questions as one left-padded batch, feeding the whole history to `generate` every turn.

    Returns the number of agent tokens and the episodes."""
    environment, tokenizer = sampler.environment, sampler.tokenizer
    episodes = [environment.start(question) for question in questions]
    histories = [sampler.encode(episode.prompt) for episode in episodes]
    running, agent_tokens = list(range(len(questions))), 0
    while running:
        fed = {"input_ids": [histories[i] for i in running]}
        fed = tokenizer.pad(fed, padding_side="left", return_tensors="pt")
        length = fed["input_ids"].shape[1]
        produced = policy.generate(
            **fed,
            do_sample=not greedy,
            top_k=0,
            max_new_tokens=environment.protocol.max_turn_tokens,
            pad_token_id=tokenizer.pad_token_id,
            stopping_criteria=StoppingCriteriaList([TurnCloses(sampler, length)]),
        )[:, length:]
        turns = []
        for row in produced.tolist():
            while row[-1] == tokenizer.pad_token_id:
                row.pop()
            turns.append(row)
        texts = [tokenizer.decode(turn, skip_special_tokens=True) for turn in turns]
        observations = environment.step([episodes[i] for i in running], texts)
        agent_tokens += sum(map(len, turns))
        for i, turn, observation in zip(running, turns, observations, strict=True):
            histories[i] += turn + sampler.encode(observation or "")
        running = [i for i in running if not episodes[i].done]
    return agent_tokens, episodes


def rollouts(sampler: TorchRollout, policy, questions: list[Question], repeats: int) -> Table:
    few = questions[:32]
    generator = torch.Generator().manual_seed(0)
    ours = sampler.collect(policy, few, generator, greedy=True).episodes
    theirs = generate_turns(sampler, policy, few, greedy=True)[1]
    same = sum(a.turns == b.turns for a, b in zip(ours, theirs, strict=True))
    print(f"\nUnder greedy decoding both play {same} of {len(few)} questions with the same turns.")

    def collect(asked: list[Question]) -> int:
        return int(sampler.collect(policy, asked, generator).trajectories.agent_mask.sum())

    ways: dict[str, Callable[[], int]] = {
        f"roll-out, {len(questions)} together": lambda: collect(questions),
        "roll-out, one by one": lambda: sum(collect([question]) for question in few),
        f"generate, {len(questions)} together": lambda: generate_turns(sampler, policy, questions)[0],
        "generate, one by one": lambda: sum(generate_turns(sampler, policy, [q])[0] for q in few),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            agent_tokens = way()
            speeds[name].append(agent_tokens / (time.perf_counter() - began))
    best = next(iter(speeds.values()))
    rows = [(name, spread(found, 0), ratios(best, found)) for name, found in speeds.items()]
    return [{"way": w, "agent tokens / s": s, "the first is faster by": r} for w, s, r in rows]


def bias_norms(trainer: Trainer, repeats: int) -> Table:
    """One policy update, with and without the norm, on minibatches of the oldest batch in the queue."""
    batch = trainer.queue[0].trajectories
    training = trainer.settings.training
    with torch.no_grad():
        values = trainer.critic(batch) if trainer.critic is not None else None
    advantages = trainer.objective.credit(batch, values).advantages
    still = torch.optim.Adam(trainer.parameters, lr=0.0)  # a step that costs but leaves the policy alone

    def update(rows: torch.Tensor, kind: str) -> float:
        part = batch.select(rows)
        scores = score(trainer.policy, part, n_chunks=training.length_chunks)
        width = part.tokens.shape[1]
        surrogate = trainer.objective(scores.logprobs, part, advantages[rows, :width])
        norm = float("nan")
        if kind == "exact":
            norm = global_norm(gradient_of(surrogate.bias_surrogate, trainer.parameters))
        elif kind != "off":
            found = estimated_bias_norms(surrogate, scores.logprobs, scores.squared_prob_sum)
            norm = found[f"clipping_bias_norm_{kind}"]
        still.zero_grad()
        surrogate.loss.backward()
        still.step()
        return norm

    kinds = ("off", "exact", "logprob", "logit")
    times = {kind: [] for kind in kinds}
    norms = {kind: [] for kind in kinds}
    size = training.trajectories_per_iteration // training.minibatches
    for repeat in range(repeats + 1):
        rows = torch.randperm(len(batch.lengths), generator=trainer.generator)[:size]
        for kind in kinds:
            began = time.perf_counter()
            norm = update(rows, kind)
            if repeat:
                times[kind].append(time.perf_counter() - began)
                norms[kind].append(norm)
    return [
        {"‖C‖": kind, "seconds per update": spread(found), "against off": ratios(found, times["off"])}
        | {"its value": "" if kind == "off" else spread(norms[kind])}
        for kind, found in times.items()
    ]


def peak_memory(overrides: list[str], start: Path, scratch: Path) -> float:
    """Peak resident memory in MiB of a process that trains and evaluates a little; meant for a fresh process."""
    short = ["training.iterations=3", "evaluation.every=1", "evaluation.greedy_every=1"]
    config = configs.compose([*overrides, *short])
    return Trainer(config, scratch / "memory", start, progress=False).train()["peak_memory_mb"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warm-start", type=Path, help="default: the preset's own, made if missing")
    parser.add_argument("--json", type=Path, help="also write tables, hardware and versions here")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. preset=smoke")
    arguments = parser.parse_args()
    disable_progress_bar()
    overrides = ["preset=laptop", "seed=0", *arguments.overrides]
    start = arguments.warm_start or ensure_warm_start(configs.compose(overrides))
    tables: dict[str, Table] = {}

    def show(title: str, rows: Table) -> None:
        tables[title] = rows
        print(markdown(title, rows), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        trainers = make_trainers(overrides, start, Path(folder))
        show("Seconds per iteration", iterations(trainers, repeats=5))
        for name in ("token_ppo", "st_ppo"):
            clipped = trainers[name].update_rows[-1]["clip_fraction"]
            show(f"One update of {name}, clip fraction {clipped:.2f}", bias_norms(trainers[name], repeats=20))
        sampler, asked = trainers["st_ppo"].sampler, trainers["st_ppo"].train_questions[:128]
        policy = load_warm_start(start)[0].eval()
        show("Roll-out against transformers.generate", rollouts(sampler, policy, asked, repeats=5))
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            peak = fresh.submit(peak_memory, overrides, start, Path(folder)).result()
        show("Memory", [{"process": "training st_ppo", "peak resident MiB": f"{peak:.0f}"}])
    if arguments.json:
        content = {"hardware": hardware(), "versions": versions(), "tables": tables}
        arguments.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
