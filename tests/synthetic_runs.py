"""Made-up finished runs with plausible dynamics, for tests of the analysis. Nothing here is a result."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from stppo.record import schema
from stppo.record.runs import Metrics, per_iteration


@dataclass(frozen=True)
class Dynamics:
    """What a made-up run does: it rises to `level`, and where it has an `onset` falls to nothing, for ten
    iterations or for good. Iterations are those of a run of 40, stretched in a longer one."""

    level: float
    onset: int | None = None
    recovers: bool = False
    clip: float = 0.1
    clip_growth: float = 0.0  # log-slope of the clip fraction, an iteration
    gradient: float = 1.0
    granularity: str = "token"
    family: str = "PPO"  # algorithms of one family differ in the granularity alone


START, GREEDY_START = 0.2, 0.45
N_UPDATES = 4
# One that learns and collapses, learns, crashes and recovers, does not learn, loses its start: every outcome
# there is.
DYNAMICS = {
    "token_ppo": Dynamics(0.70, onset=24, clip=0.12, clip_growth=0.02, gradient=3.0),
    "turn_ppo": Dynamics(0.75, clip=0.40, gradient=1.2, granularity="turn"),
    "s_ppo": Dynamics(0.60, onset=16, recovers=True, gradient=2.0, family="S-PPO"),
    "st_ppo": Dynamics(0.80, clip=0.32, gradient=1.4, granularity="turn", family="S-PPO"),
    "so_ppo_ctn": Dynamics(0.22, clip=0.13, gradient=2.5, granularity="turn", family="CTN"),
    "grpo": Dynamics(0.22, clip=0.05, gradient=1.6, family="GRPO"),
    "so_grpo": Dynamics(0.70, clip=0.15, gradient=0.9, granularity="turn", family="SO-GRPO"),
    "so_grpo_ctn": Dynamics(0.04, clip=0.18, gradient=1.1, granularity="turn", family="CTN-GRPO"),
    "gspo": Dynamics(0.50, clip=0.20, gradient=0.8, granularity="sequence", family="GRPO"),
}
Run = tuple[dict, pd.DataFrame, pd.DataFrame]  # record, updates, evaluations


def simulate(
    algorithm: str,
    seed: int = 0,
    regime: str = "A",
    iterations: int = 40,
    every: int = 2,
    non_finite: bool = False,
    dynamics: Dynamics | None = None,
    **training: float,
) -> Run:
    """One finished run in a world of its own; the same arguments give the same numbers. training: keys of the
    config's."""
    rng = np.random.default_rng([seed, *algorithm.encode(), *regime.encode()])
    dynamics = dynamics or DYNAMICS[algorithm]
    stretch = max(iterations, 40) / 40
    steps = np.arange(iterations + 1)
    level = dynamics.level + rng.normal(0, 0.02)
    success = START + (level - START) * (1 - np.exp(-steps / (6 * stretch)))
    sick = np.zeros(len(steps))
    if dynamics.onset is not None:
        onset = (dynamics.onset + rng.integers(-2, 3)) * stretch
        sick = 1 / (1 + np.exp(-((steps - onset) / 0.7).clip(-50, 50)))
        if dynamics.recovers:
            sick = sick * (steps < onset + 10 * stretch)
    success = (success * (1 - 0.97 * sick)).clip(0, 1)
    has_critic = "grpo" not in algorithm and algorithm != "gspo"
    training = {"learning_rate": 3.5e-4, "epochs": 2, "staleness_iterations": 2, **training}
    training |= {"entropy_coefficient": 0.0, "kl_coefficient": 0.0}

    rows = []
    for iteration in range(1, iterations + 1):
        ill = sick[iteration]
        shared = {
            "success_train": success[iteration],
            "reward_train": success[iteration],
            "valid_format_rate": 0.9 * (1 - 0.85 * ill),
            "entropy": 0.3 + 1.1 * ill,
            "effective_sample_size": 0.3,
            "advantage_raw_std": 0.36 + 0.2 * ill,
            "staleness_iterations": min(training["staleness_iterations"], iteration - 1),
            "learning_rate": training["learning_rate"],
            "seconds_rollout": 0.1,
            "seconds_critic": 0.05 if has_critic else 0.0,
            "critic_loss": 0.1 if has_critic else np.nan,
            "critic_explained_variance": 0.2 if has_critic else np.nan,
            "stabilizer_divisor": 2.0 if dynamics.family == "S-PPO" else 1.0,
        }
        for k in range(N_UPDATES):
            noise = np.exp(rng.normal(0, 0.25, 4))
            norm = dynamics.gradient * noise[0] * (1 + 25 * ill * rng.random())
            growth = np.exp(dynamics.clip_growth * iteration)
            clipped = float(np.clip(dynamics.clip * noise[1] * growth * (1 + 0.8 * ill), 0, 1))
            rows.append(
                {
                    **dict.fromkeys(schema.UPDATE_COLUMNS, np.nan),
                    **shared,
                    "update": (iteration - 1) * N_UPDATES + k + 1,
                    "iteration": iteration,
                    "epoch": k // 2,
                    "minibatch": k % 2,
                    "gradient_norm": norm,
                    "ppo_gradient_norm": norm,
                    "clipping_bias_norm": 0.3 * noise[2] * np.exp(0.03 * iteration) if k == 0 else np.nan,
                    "clip_fraction": clipped,
                    "out_of_range_fraction": min(1.0, clipped * 1.7),
                    "kl_behaviour_k3": 1e-13 if iteration == 1 else 0.02 * noise[3] * (1 + 10 * ill),
                    "ratio_max_token": 4 * noise[3] * (1 + 100 * ill),
                }
            )
    updates = pd.DataFrame(rows)
    if non_finite:
        updates.loc[updates.index[-1], "gradient_norm"] = np.inf

    evaluations = []
    for iteration in range(0, iterations + 1, every):
        for temperature in (1.0, 0.0) if iteration % 10 == 0 else (1.0,):
            mean = min(0.95, success[iteration] * (1.0 if temperature else 1.5))
            evaluations.append(
                {
                    "iteration": iteration,
                    "update": iteration * N_UPDATES,
                    "temperature": temperature,
                    "n_questions": 256,
                    "success": rng.binomial(256, mean) / 256,
                    "f1": mean,
                    "valid_format_rate": 0.9,
                    "turns": 2.4,
                    "searches": 1.5,
                    "entropy_of_sampled": 0.3,
                    "seconds": 1.0,
                }
            )

    record = {
        "status": schema.NON_FINITE if non_finite else schema.COMPLETED,
        "regime": regime,
        "algorithm": algorithm,
        "label": None,
        "seed": seed,
        "preset": "made-up",
        "policy": "tiny",
        "policy_parameters": 120_000,
        "world": "synthetic",
        "warm_start_seed": seed,
        "world_seed": seed,
        "config_fingerprint": f"{rng.integers(16**8):08x}",
        "code_hash": "0123456789abcdef",
        "git_commit": "0" * 40,
        "git_dirty": False,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "hardware": {"cpu": "made-up CPU", "cores": 2, "memory_gib": 24.0, "gpu": None, "platform": "Linux"},
        "kernels": ["eager"],
        "started": "2025-01-01T00:00:00+00:00",
        "wall_seconds": 60.0 + seed,
        "cpu_seconds": 50.0 + seed,
        "peak_memory_mb": 900.0,
        "iterations": iterations,
        "updates": iterations * N_UPDATES,
        "warm_start": {"success_sampled": START, "success_greedy": GREEDY_START, "n_sampled": 2048},
        "non_finite": {"what": "gradient", "update": iterations * N_UPDATES} if non_finite else None,
        "objective": {
            "credit": {"_target_": dynamics.family},
            "ratio": {"granularity": dynamics.granularity, "aggregation": "geometric"},
            "stabilizer": {"_target_": "stppo.objectives.NoStabilizer"},
        },
        "training": training,
    }
    return record, updates, pd.DataFrame(evaluations)


def make_run(run_dir: Path, algorithm: str, *arguments: Any, **options: Any) -> Path:
    """Write what `simulate` gives as a run folder, its config in the config's file."""
    record, updates, evaluations = simulate(algorithm, *arguments, **options)
    config = {"algorithm": {"objective": record.pop("objective")}, "training": record.pop("training")}
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / schema.RUN_FILE).write_text(json.dumps(record))
    (run_dir / schema.CONFIG_FILE).write_text(yaml.safe_dump(config))
    updates.to_parquet(run_dir / schema.UPDATES_FILE)
    evaluations.to_parquet(run_dir / schema.EVALUATIONS_FILE)
    return run_dir


def gather(runs: Iterable[Run]) -> Metrics:
    """What `collect` would read back of these runs."""
    parts = [[], [], []]
    for record, updates, evaluations in runs:
        keys = {name: record[name] for name in schema.KEY_COLUMNS}
        for part, one in zip(parts, (record, per_iteration(updates), evaluations), strict=True):
            part.append(one if one is record else one.assign(**keys))
    return Metrics(parts[0], *(pd.concat(part, ignore_index=True) for part in parts[1:]))


def make_study(root: Path, seeds: int = 3) -> list[Path]:
    """Nine algorithms in regime A, two of them in LONG for one seed fewer."""
    runs = [
        make_run(root / f"A-{name}-{seed}", name, seed, "A") for name in DYNAMICS for seed in range(seeds)
    ]
    runs += [
        make_run(root / f"LONG-{name}-{seed}", name, seed, "LONG", 90)
        for name in ("token_ppo", "st_ppo")
        for seed in range(max(1, seeds - 1))
    ]
    return runs


def write_metrics(metrics: Metrics, folder: Path) -> None:
    """Write a metrics folder as `collect` does, from memory."""
    folder.mkdir(parents=True)
    metrics.iterations.to_parquet(folder / schema.ITERATIONS_FILE, index=False)
    metrics.evaluations.to_parquet(folder / schema.COLLECTED_EVALUATIONS_FILE, index=False)
    (folder / schema.RUNS_FILE).write_text(json.dumps(metrics.runs, default=int))
