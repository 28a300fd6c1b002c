"""Controls of a study: placebo divisors, and random streams that leave training's own untouched."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from stppo.config.files import Config, ConfigError
from stppo.config.identity import fingerprint, identity_section
from stppo.config.settings import TrainingConfig
from stppo.files import parse_json, repository_path
from stppo.objectives import NoStabilizer, Objective
from stppo.record.schema import NON_FINITE, RUN_FILE, RUNNING, UPDATES_FILE

KEY = ["iteration", "epoch", "minibatch"]
COLUMN = "stabilizer_divisor"


def generator_for(purpose: str, seed: int, iteration: int) -> torch.Generator:
    """A generator of its own for one purpose, run seed and iteration: nothing that draws from it shifts
    another."""
    digest = hashlib.sha256(f"{purpose}/{seed}/{iteration}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


class ReplayedDivisors:
    """A placebo for a stabiliser: its divisors, cut off from the updates that called for them.

    They are those that another run recorded (`stabilizer_divisor` in its updates.parquet), matched by
    iteration, epoch and minibatch; with `shuffle` permuted within each iteration, with `constant` all
    replaced by their harmonic mean, which shortens plain gradient descent by as much on average. A source
    that ended non-finite may be shorter than this run: the divisors of its last whole iteration then go on to
    the end.

    Called with iteration (from 1), epoch and minibatch (from 0) it returns the divisor. Raises ConfigError
    for a source that is missing, unfinished, of other epochs or minibatches, or too short, and where the
    objective has a stabiliser of its own or steps turn by turn."""

    def __init__(self, training: TrainingConfig, objective: Objective, seed: int) -> None:
        if not isinstance(objective.stabilizer, NoStabilizer):
            raise ConfigError(
                "training.divisors.from_run takes a stabiliser's place, but algorithm.objective.stabilizer "
                f"is {type(objective.stabilizer).__name__}; use an algorithm without one, such as token_ppo"
            )
        if objective.surrogate.one_turn_at_a_time:
            raise ConfigError(
                "training.divisors.from_run has a divisor a minibatch, but "
                f"{type(objective.surrogate).__name__} steps on each turn of one; use another algorithm"
            )
        source = repository_path(training.divisors.from_run)
        recorded = _whole_iterations(source, training.epochs, training.minibatches)
        n, wanted = len(recorded), training.iterations
        status = _status(source)
        if n < wanted and not (n and status == NON_FINITE):
            raise ConfigError(
                f"training.divisors.from_run = {source}: has {n} iterations of {training.epochs} epochs x "
                f"{training.minibatches} minibatches with a divisor each, this run needs {wanted}; take a "
                "source of the same training settings that ran as long"
            )
        table = recorded[[min(i, n - 1) for i in range(wanted)]]
        self.divides = training.divisors.divides
        self.content = {"values": fingerprint(table.tolist()), "shuffle": training.divisors.shuffle}
        self.content |= training.divisors.model_dump(include={"constant", "divides"}, exclude_defaults=True)
        if training.divisors.shuffle:
            for i, row in enumerate(table):
                generator = generator_for("divisors", seed, i + 1)
                table[i] = row[torch.randperm(len(row), generator=generator)]
        if training.divisors.constant:
            table = torch.full_like(table, 1 / table.reciprocal().mean())
        self.table = table.view(wanted, training.epochs, training.minibatches)

    def __call__(self, iteration: int, epoch: int, minibatch: int) -> float:
        return float(self.table[iteration - 1, epoch, minibatch])


def _status(source: Path) -> str:
    """Status of the source run; ConfigError where it is not finished."""
    remedy = "train that run to its end first"
    try:
        status = parse_json((source / RUN_FILE).read_bytes())["status"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"training.divisors.from_run = {source}: no readable {RUN_FILE} there; {remedy}"
        ) from None
    if status == RUNNING:
        raise ConfigError(f"training.divisors.from_run = {source}: that run is unfinished; {remedy}")
    return status


def _whole_iterations(source: Path, epochs: int, minibatches: int) -> Tensor:
    """(n, epochs * minibatches) float64 divisors of the iterations 1..n that hold exactly these updates."""
    try:
        updates = pd.read_parquet(source / UPDATES_FILE)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"training.divisors.from_run = {source}: no readable {UPDATES_FILE} there "
            f"({type(error).__name__}); give the folder of a finished run"
        ) from None
    if missing := [column for column in (*KEY, COLUMN) if column not in updates]:
        raise ConfigError(
            f"training.divisors.from_run = {source}: its {UPDATES_FILE} lacks column {missing[0]}; train "
            "that run anew"
        )
    expected = [(epoch, minibatch) for epoch in range(epochs) for minibatch in range(minibatches)]
    whole: list[np.ndarray] = []
    for iteration, rows in updates.sort_values(KEY).groupby("iteration"):
        places = list(rows[["epoch", "minibatch"]].itertuples(index=False, name=None))
        divisors = rows[COLUMN].to_numpy("float64")
        usable = np.isfinite(divisors).all() and (divisors > 0).all()
        if iteration != len(whole) + 1 or places != expected or not usable:
            break
        whole.append(divisors)
    return torch.from_numpy(np.array(whole).reshape(-1, len(expected)))


def identity(config: Config, divisors: ReplayedDivisors | None) -> Config:
    """What a run depends on: `config.identity_section`, with replayed divisors by their content, not their
    place."""
    section = identity_section(config)
    if divisors is not None:
        section["training"]["divisors"] = divisors.content
    return section
