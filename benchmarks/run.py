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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.utils.logging import disable_progress_bar

from stppo.config.composition import compose
from stppo.config.loading import load
from stppo.config.provenance import git_state, hardware, versions
from stppo.policy.compiled import choose_kernels
from stppo.rollout.rollout_torch import TorchRollout
from stppo.training.gradients import PolicyPass
from stppo.training.run import Run
from stppo.training.trainer import Trainer
from stppo.training.warm_start import ensure_warm_start, load_warm_start
from stppo.world.environment import Episode
from stppo.world.protocol import Question

ALGORITHMS = ("token_ppo", "st_ppo", "grpo", "so_grpo")
Table = list[dict[str, str]]
QUIET = ["evaluation.every=100000", "training.iterations=100000", "training.checkpoint_every=100000"]


def provenance() -> dict[str, object]:
    """Where and when something was measured; a load above the threads used here has disturbed it."""
    return {
        "hardware": hardware(),
        "versions": versions(),
        "git_commit": git_state()["git_commit"],
        "date": time.strftime("%Y-%m-%d"),
        "load_average": os.getloadavg()[0],
    }


def spread(values: list[float], digits: int = 3) -> str:
    """Median (smallest to largest)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def ratios(values: list[float], base: list[float]) -> str:
    """Repeat by repeat, so that what slows both down cancels."""
    return spread([v / b for v, b in zip(values, base, strict=True)], 2) + " ×"


def markdown(title: str, rows: Table) -> str:
    lines = [f"\n### {title}\n", " | ".join(["", *rows[0], ""]).strip(), "|" + " --- |" * len(rows[0])]
    return "\n".join(lines + [" | ".join(["", *row.values(), ""]).strip() for row in rows])


def keep(file: Path | None, tables: dict[str, Table]) -> None:
    """Write tables with hardware and versions to a JSON file, where one is asked for."""
    if file is not None:
        content = {**provenance(), "tables": tables}
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def measure(doc: str, tables: Callable[..., Iterator[tuple[str, Table]]], *setting: str) -> None:
    """The command of a script of this kind: prints its tables, made by tables(overrides, warm start, empty folder, quick)."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--warm-start", type=Path, help="default: the preset's own, made if missing")
    parser.add_argument("--json", type=Path, help="also write tables, hardware and versions here")
    parser.add_argument("--quick", action="store_true", help="one repeat of everything: does it run at all?")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. preset=smoke")
    arguments = parser.parse_args()
    overrides = ["preset=laptop", "seed=0", *setting, *arguments.overrides]
    start = arguments.warm_start or ensure_warm_start(load(compose(overrides)))
    found: dict[str, Table] = {}
    with tempfile.TemporaryDirectory() as folder:
        for title, rows in tables(overrides, start, Path(folder), arguments.quick):
            found[title] = rows
            print(markdown(title, rows), flush=True)
    keep(arguments.json, found)


def make_trainers(overrides: list[str], start: Path) -> dict[str, Trainer]:
    """Trainers of regime A with a full queue; evaluation and checkpoints are left out of the times."""
    trainers = {}
    for name in ALGORITHMS:
        config = compose([*overrides, *QUIET, "training=off_policy", f"algorithm={name}"])
        trainers[name] = trainer = Trainer(load(config), start)
        trainer.fill_queue()
    return trainers


def iterations(trainers: dict[str, Trainer], repeats: int) -> Table:
    parts = ("roll-out", "scoring", "update", "critic and rest", "whole iteration")
    times = {name: {part: [] for part in parts} for name in trainers}
    for repeat in range(repeats + 1):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            trainer.iterate()
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


def rollouts(sampler: TorchRollout, start: Path, questions: list[Question], repeats: int) -> Table:
    few = questions[:32]
    policy, compiled = load_warm_start(start)[0].eval(), load_warm_start(start)[0].eval()
    choose_kernels(compiled, "auto")
    generator = torch.Generator().manual_seed(0)
    ours = sampler.collect(policy, few, generator, greedy=True).episodes
    theirs = generate_turns(sampler, policy, few, greedy=True)[1]
    same = sum(a.turns == b.turns for a, b in zip(ours, theirs, strict=True))
    print(f"\nUnder greedy decoding both play {same} of {len(few)} questions with the same turns.")

    def collect(player, asked: list[Question]) -> int:
        return int(sampler.collect(player, asked, generator).trajectories.agent_mask.sum())

    ways: dict[str, Callable[[], int]] = {
        f"roll-out, {len(questions)} together, compiled": lambda: collect(compiled, questions),
        f"roll-out, {len(questions)} together, eager": lambda: collect(policy, questions),
        "roll-out, one by one, compiled": lambda: sum(collect(compiled, [question]) for question in few),
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


def exponent(sizes: list[float], seconds: list[list[float]]) -> str:
    """Slope of log(seconds) on log(size), one fit a repeat: 1 is proportional. seconds: by size, then repeat."""
    fits = [np.polyfit(np.log(sizes), np.log(found), 1)[0] for found in zip(*seconds, strict=True)]
    return spread([float(fit) for fit in fits], 2)


def growth(overrides: list[str], start: Path, repeats: int) -> Table:
    """CPU seconds of an iteration with more trajectories, and with more epochs; sizes take turns."""
    rows = []
    for key, sizes in (("trajectories_per_iteration", (32, 64, 128, 256)), ("epochs", (1, 2, 4, 8))):
        trainers = []
        for size in sizes:
            sized = [
                *overrides,
                *QUIET,
                "training=off_policy",
                "algorithm=token_ppo",
                f"training.{key}={size}",
            ]
            trainers.append(Trainer(load(compose(sized)), start))
            trainers[-1].fill_queue()
        times: list[list[float]] = [[] for _ in sizes]
        for repeat in range(repeats + 1):
            for found, trainer in zip(times, trainers, strict=True):
                began = time.process_time()
                trainer.iterate()
                if repeat:  # the first one warms up
                    found.append(time.process_time() - began)
        cells = {f"size {n}": spread(found, 2) for n, found in enumerate(times, start=1)}
        rows.append(
            {"of": key, "sizes": ", ".join(map(str, sizes)), **cells, "exponent": exponent(sizes, times)}
        )
    return rows


def lengths(trainer: Trainer, repeats: int) -> Table:
    """Forward and backward pass of the shortest to the longest quarter of a batch: cost against tokens and turns."""
    batch = trainer.queue[0].trajectories
    quarters = [batch.select(rows) for rows in batch.lengths.argsort().chunk(4)]
    times: list[list[float]] = [[] for _ in quarters]
    for repeat in range(repeats + 1):
        for part, found in zip(quarters, times, strict=True):
            began = time.process_time()
            scored = PolicyPass(trainer.policy, part, trainer.passes)
            scored.backward(scored.scores.logprobs.sum(), {})
            trainer.policy.zero_grad()
            if repeat:
                found.append(time.process_time() - began)
    tokens = [float(part.lengths.double().mean()) for part in quarters]
    return [
        {"quarter": str(n), "turns": f"{part.n_turns.double().mean():.1f}", "tokens": f"{size:.0f}"}
        | {"milliseconds": spread([1e3 * s for s in found], 1), "exponent in tokens": exponent(tokens, times)}
        for n, (part, size, found) in enumerate(zip(quarters, tokens, times, strict=True), start=1)
    ]


def peak_memory(overrides: list[str], start: Path, scratch: Path) -> float:
    """Peak resident memory in MiB of a process that trains and evaluates a little; meant for a fresh process."""
    short = ["training.iterations=3", "evaluation.every=1", "evaluation.greedy_every=1"]
    config = compose([*overrides, *short])
    return Run(load(config), scratch / "memory", start, progress=False).train()["peak_memory_mb"]


def memory_over_time(overrides: list[str], start: Path, scratch: Path, marks: tuple[int, ...]) -> list[float]:
    """Resident MiB of a process after so many small iterations; meant for a fresh process."""
    small = ["training.trajectories_per_iteration=8", "training.epochs=2", "training.minibatches=2"]
    small += ["evaluation.every=100000", f"training.iterations={marks[-1]}"]
    found = []

    def look(trainer: Trainer) -> None:
        if trainer.iteration in marks:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            found.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    run = load(compose([*overrides, "training=off_policy", "algorithm=token_ppo", *small]))
    Run(run, scratch / "long", start, on_iteration=look, progress=False).train()
    return found


def tables(overrides: list[str], start: Path, folder: Path, quick: bool) -> Iterator[tuple[str, Table]]:
    repeats, many = (1, 1) if quick else (5, 20)
    disable_progress_bar()
    trainers = make_trainers(overrides, start)
    yield "Seconds per iteration", iterations(trainers, repeats)
    yield "Cost against size, CPU seconds", growth(overrides, start, repeats)
    yield "Cost against length", lengths(trainers["token_ppo"], many)
    sampler, asked = trainers["st_ppo"].sampler, trainers["st_ppo"].batches.questions[:128]
    yield "Roll-out against transformers.generate", rollouts(sampler, start, asked, repeats)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        peak = fresh.submit(peak_memory, overrides, start, folder).result()
    rows = [{"process": "training st_ppo, at most", "resident MiB": f"{peak:.0f}", "of that above": ""}]
    if Path("/proc/self/statm").exists():
        marks = (2, 4) if quick else (100, 1000)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            early, late = fresh.submit(memory_over_time, overrides, start, folder, marks).result()
        for mark, size, share in ((marks[0], early, ""), (marks[1], late, f"{late / early:.2f} ×")):
            what = f"after {mark:,} small iterations of token_ppo"
            rows.append({"process": what, "resident MiB": f"{size:.0f}", "of that above": share})
    yield "Memory", rows


if __name__ == "__main__":
    measure(__doc__, tables)
