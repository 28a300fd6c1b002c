"""Eager PyTorch against compiled code, by turns on one core: `python benchmarks/compiled.py` prints Markdown tables.

Times are CPU seconds of this process. The floor is what PyTorch takes for the update's matrix products alone (linear layers
at all positions, output layer at agent tokens; forward and twice backward), at the sizes of the same minibatch.
"""

import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from run import QUIET, Table, measure, ratios, spread

from stppo.config.composition import compose
from stppo.config.loading import load
from stppo.policy.compiled import SOURCE
from stppo.policy.compiler import compiled_library
from stppo.policy.compute import last_block
from stppo.policy.policy import score
from stppo.training.gradients import PolicyPass, WatchedNorm
from stppo.training.trainer import Trainer

KERNELS = ("eager", "auto")
NORMS = ("off", "last block", "exact")
Way = Callable[[], object]


def by_turns(ways: dict[str, Way], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each way, repeat by repeat; the first one warms up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            began = time.process_time()
            way()
            if repeat:
                times[name].append(time.process_time() - began)
    return times


def make_trainers(overrides: list[str], start: Path, algorithm: str) -> dict[str, Trainer]:
    """One trainer with each kind of kernels, equal otherwise, with a full queue."""
    found = {}
    for kernels in KERNELS:
        config = compose([*overrides, *QUIET, f"algorithm={algorithm}", f"training.kernels={kernels}"])
        trainer = Trainer(load(config), start)
        if kernels == "auto" and trainer.models.kernels != "compiled":
            raise SystemExit("there is no compiled code here; the log says why")
        trainer.fill_queue()
        found[kernels] = trainer
    return found


def products(trainer: Trainer, batch) -> tuple[Way, float]:
    """The matrix products of one forward and backward pass, and their floating-point operations."""
    tokens, agent = int(batch.lengths.sum()) - len(batch), int(batch.agent_mask.sum())
    body = trainer.policy.base_model
    sizes = [
        (tokens, *module.weight.shape) for module in body.modules() if isinstance(module, torch.nn.Linear)
    ]
    sizes.append((agent, *trainer.policy.get_output_embeddings().weight.shape))
    operands = [(torch.randn(n, i), torch.randn(o, i), torch.randn(n, o)) for n, o, i in sizes]

    def multiply() -> None:
        for x, weight, y in operands:
            x @ weight.T, y @ weight, y.T @ x

    return multiply, 6.0 * sum(n * o * i for n, o, i in sizes)


def passes(trainers: dict[str, Trainer], repeats: int) -> Table:
    """Forward and backward pass of a minibatch, and how much of the speed of a large product that is."""
    batch = trainers["eager"].queue[0].trajectories
    training = trainers["eager"].settings.training
    part = batch.select(torch.arange(len(batch) // training.minibatches))
    floor, operations = products(trainers["eager"], part)

    def pass_of(trainer: Trainer) -> Way:
        def both() -> None:
            score(trainer.policy, part, n_chunks=training.length_chunks).logprobs.sum().backward()
            trainer.policy.zero_grad()

        return both

    large = torch.randn(1024, 1024)
    ways = {name: pass_of(trainer) for name, trainer in trainers.items()}
    times = by_turns(ways | {"floor": floor, "large product": lambda: large @ large}, repeats)
    peak = [2 * 1024**3 / seconds for seconds in times.pop("large product")]
    shares = {
        name: [operations / s / p for s, p in zip(found, peak, strict=True)] for name, found in times.items()
    }
    return [
        {
            "forward and backward": name,
            "milliseconds": spread([1e3 * s for s in found], 1),
            "eager takes": ratios(times["eager"], found),
            "share of a large product's speed": spread(shares[name], 2),
        }
        for name, found in times.items()
    ]


def iterations(trainers: dict[str, Trainer], repeats: int) -> Table:
    """Whole iterations, and their parts."""
    spent = {name: {"roll-out": 0.0, "reference": 0.0, "critic": 0.0, "updates": 0.0} for name in trainers}
    for name, trainer in trainers.items():
        owners = [(trainer.batches, "sample"), (trainer.models, "reference_logprobs")]
        owners += [(trainer.critic_updates, "regress"), (trainer.policy_updates, "step")]
        for part, (owner, method) in zip(list(spent[name]), owners, strict=True):
            setattr(owner, method, _timed(getattr(owner, method), spent[name], part))
    times = {name: {part: [] for part in (*spent[name], "whole iteration")} for name in trainers}
    for repeat in range(repeats + 1):
        for name, trainer in trainers.items():
            spent[name].update(dict.fromkeys(spent[name], 0.0))
            began = time.process_time()
            trainer.iterate()
            found = spent[name] | {"whole iteration": time.process_time() - began}
            for part, seconds in found.items() if repeat else ():  # the first one warms up
                times[name][part].append(seconds)
    return [
        {"part": part}
        | {f"{name}, s": spread(times[name][part]) for name in trainers}
        | {"eager takes": ratios(times["eager"][part], times["auto"][part])}
        for part in times["eager"]
    ]


def _timed(method: Callable, into: dict[str, float], part: str) -> Callable:
    """The method, adding its CPU seconds."""

    def timed(*arguments, **options):
        began = time.process_time()
        found = method(*arguments, **options)
        into[part] += time.process_time() - began
        return found

    return timed


class Norms:
    """Passes for the loss on minibatches of the oldest batch, with or without a norm of the clipping bias's gradient."""

    def __init__(self, trainer: Trainer) -> None:
        queued = trainer.queue[0]
        self.trainer, self.batch, self.clipped = trainer, queued.trajectories, []
        self.advantages = trainer.objective.credit(self.batch, trainer._values(queued, self.batch)).advantages

    def draw(self) -> None:
        size = len(self.batch) // self.trainer.settings.training.minibatches
        self.rows = torch.randperm(len(self.batch), generator=self.trainer.generator)[:size]

    def pass_with(self, norm: str) -> None:
        part = self.batch.select(self.rows)
        scored = PolicyPass(self.trainer.policy, part, self.trainer.passes)
        advantages = self.advantages[self.rows, : part.tokens.shape[1]]
        found = self.trainer.objective(scored.scores.logprobs, part, advantages)
        self.clipped.append(found.diagnostics["clip_fraction"])
        over = {"exact": scored.parameters, "last block": last_block(self.trainer.policy)}.get(norm)
        scored.backward(found.ppo_loss, {"norm": WatchedNorm(found.bias_surrogate, over)} if over else {})
        self.trainer.policy.zero_grad()


def bias_norms(trainers: dict[str, Trainer], repeats: int) -> Table:
    """What the norm over all weights, and that over the last block's alone, add to a pass for the loss."""
    norms = {name: Norms(trainer) for name, trainer in trainers.items()}
    ways: dict[str, Way] = {}
    for name, one in norms.items():
        ways[f"draw {name}"] = one.draw
        ways |= {f"{norm} {name}": functools.partial(one.pass_with, norm) for norm in NORMS}
    times = by_turns(ways, repeats)
    return [
        {"‖C‖": name, "clip fraction": spread(one.clipped, 2)}
        | {f"{norm}, ms": spread([1e3 * s for s in times[f"{norm} {name}"]], 1) for norm in NORMS}
        | {f"{norm} against off": ratios(times[f"{norm} {name}"], times[f"off {name}"]) for norm in NORMS[1:]}
        for name, one in norms.items()
    ]


def building() -> Table:
    """CPU seconds until the compiled code is there: with an empty cache folder, and with a full one."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("STPPO_CACHE_DIR")
        os.environ["STPPO_CACHE_DIR"] = folder
        for cache in ("empty", "full"):
            compiled_library.cache_clear()
            began = sum(os.times()[:4])
            compiled_library(SOURCE)
            rows.append({"cache folder": cache, "CPU seconds": f"{sum(os.times()[:4]) - began:.2f}"})
        os.environ.pop("STPPO_CACHE_DIR")
        if before is not None:
            os.environ["STPPO_CACHE_DIR"] = before
    return rows


def tables(overrides: list[str], start: Path, folder: Path, quick: bool) -> Iterator[tuple[str, Table]]:
    few, many = (1, 1) if quick else (6, 20)
    yield "Building", building()
    for algorithm in ("token_ppo", "st_ppo"):
        trainers = make_trainers(overrides, start, algorithm)
        if algorithm == "token_ppo":
            yield "A minibatch", passes(trainers, many)
        yield f"An iteration of {algorithm}", iterations(trainers, few)
        yield f"‖C‖ of {algorithm}", bias_norms(trainers, many)


if __name__ == "__main__":
    measure(__doc__, tables)
