"""Made-up finished runs with plausible dynamics, for tests of the analysis. Nothing here is a result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from stppo import schema
from stppo.results.runs import Metrics


class Replicate(NamedTuple):
    """What tells the runs of an arm apart."""

    world_seed: int
    warm_start_seed: int
    seed: int


# algorithm: (final success, iteration of collapse or None, clip fraction, gradient norm)
DYNAMICS = {
    "token_ppo": (0.35, 14, 0.12, 3.0),
    "turn_ppo": (0.38, 26, 0.40, 1.2),
    "s_ppo": (0.36, 20, 0.10, 2.0),
    "st_ppo": (0.46, None, 0.32, 1.4),
    "so_ppo_ctn": (0.30, 17, 0.13, 2.5),
    "grpo": (0.33, 22, 0.05, 1.6),
    "so_grpo": (0.40, None, 0.15, 0.9),
    "so_grpo_ctn": (0.24, None, 0.18, 1.1),
    "gspo": (0.31, None, 0.20, 0.8),
}
START = 0.21
N_UPDATES = 4


def make_run(
    run_dir: Path,
    algorithm: str,
    seed: int = 0,
    regime: str = "A",
    iterations: int = 40,
    every: int = 2,
    non_finite: bool = False,
) -> Path:
    """Write one finished run; the same arguments give the same files."""
    rng = np.random.default_rng([seed, *algorithm.encode(), *regime.encode()])
    target, onset, clip, gradient = DYNAMICS[algorithm]
    if onset is not None:
        onset = onset * iterations / 40 + rng.integers(-3, 4)
    steps = np.arange(iterations + 1)
    success = START + (target - START) * (1 - np.exp(-steps / (iterations / 3)))
    sick = np.zeros(len(steps)) if onset is None else 1 / (1 + np.exp(-(steps - onset) / 1.5))
    success = success * (1 - 0.92 * sick)

    rows = []
    for iteration in range(1, iterations + 1):
        ill = sick[iteration]
        shared = {
            "success_train": success[iteration],
            "reward_train": success[iteration],
            "valid_format_rate": 0.9 * (1 - 0.85 * ill),
            "entropy": 0.3 + 1.1 * ill,
            "advantage_raw_std": 0.36 + 0.25 * ill * np.exp(-((iteration - (onset or 0)) ** 2) / 80),
            "staleness_iterations": min(2, iteration - 1),
            "learning_rate": 5e-4 if regime == "A" else 3e-4,
            "seconds_rollout": 0.1,
            "seconds_critic": 0.0 if "grpo" in algorithm or algorithm == "gspo" else 0.05,
            "critic_loss": np.nan if "grpo" in algorithm or algorithm == "gspo" else 0.1,
        }
        for k in range(N_UPDATES):
            noise = np.exp(rng.normal(0, 0.25, 4))
            norm = gradient * noise[0] * (1 + 25 * ill * rng.random())
            clipped = float(np.clip(clip * noise[1] * (1 + 0.8 * ill), 0, 1))
            rows.append(
                {
                    **dict.fromkeys(schema.UPDATE_COLUMNS, np.nan),
                    **shared,
                    "update": (iteration - 1) * N_UPDATES + k + 1,
                    "iteration": iteration,
                    "epoch": k // 2,
                    "minibatch": k % 2,
                    "gradient_norm": norm,
                    "ppo_gradient_norm": norm * 0.97,
                    "clipping_bias_norm": 0.3 * noise[2] * np.exp(0.03 * iteration) if k == 0 else np.nan,
                    "clip_fraction": clipped,
                    "out_of_range_fraction": min(1.0, clipped * 1.7),
                    "kl_behaviour_k3": 0.02 * noise[3] * (1 + 10 * ill),
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
        "seed": seed,
        "preset": "made-up",
        "policy": "tiny",
        "policy_parameters": 120_000,
        "world": "synthetic",
        "warm_start_seed": seed,
        "world_seed": 0,
        "config_fingerprint": f"{rng.integers(16**8):08x}",
        "code_hash": "0123456789abcdef",
        "git_commit": "0" * 40,
        "git_dirty": False,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "hardware": {"cpu": "made-up CPU", "cores": 2, "memory_gib": 24.0, "gpu": None, "platform": "Linux"},
        "started": "2025-01-01T00:00:00+00:00",
        "wall_seconds": 60.0 + seed,
        "peak_memory_mb": 900.0,
        "iterations": iterations,
        "updates": iterations * N_UPDATES,
        "warm_start": {"success_sampled": START, "success_greedy": 0.45, "n_sampled": 2048},
        "non_finite": {"what": "gradient", "update": iterations * N_UPDATES} if non_finite else None,
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / schema.RUN_FILE).write_text(json.dumps(record))
    updates.to_parquet(run_dir / schema.UPDATES_FILE)
    pd.DataFrame(evaluations).to_parquet(run_dir / schema.EVALUATIONS_FILE)
    return run_dir


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


# --- a study of known truth, in memory -------------------------------------------------------------
@dataclass(frozen=True)
class Behaviour:
    """What every run of an arm does; the truth that an analysis must find."""

    final: float = 0.40  # success of a run that does not collapse
    onset: int = 16  # iteration at which a collapsing run falls, give or take three
    risk: float = 0.0  # share of runs that collapse: exactly, rounded to runs
    dip: bool = False  # success is lost for ten iterations, then comes back
    clip: float = 0.10
    spike_lead: int = 4  # iterations from the first gradient spike of a collapsing run to its fall
    bias_growth: float = 0.03  # log-slope of the clipping-bias norm
    value_error: float = 0.6  # RMSE of the critic relative to the spread of the true values
    non_finite: bool = False  # a collapsing run ends at its onset
    learning_rate: float = 3.5e-4


def replicates(worlds: int = 2, warm_starts: int = 3, seeds: int = 3) -> list[Replicate]:
    """The replicates of a study, numbered as in its preset."""
    return [
        Replicate(world, 10 * world + start, 100 * world + 10 * start + seed)
        for seed in range(1, seeds + 1)
        for start in range(1, warm_starts + 1)
        for world in range(11, 11 + worlds)
    ]


def make_metrics(
    arms: Mapping[tuple[str, str], Behaviour],
    of: Sequence[Replicate] | Mapping[tuple[str, str], Sequence[Replicate]] | None = None,
    iterations: int = 40,
) -> Metrics:
    """Metrics of a study: every (regime, algorithm) on every replicate, or on those that `of` gives it."""
    parts = []
    for (regime, algorithm), behaviour in arms.items():
        runs = (of.get((regime, algorithm)) if isinstance(of, Mapping) else of) or replicates()
        collapsing = round(behaviour.risk * len(runs))
        parts += [
            _simulate(regime, algorithm, replicate, behaviour, i < collapsing, iterations)
            for i, replicate in enumerate(runs)
        ]
    records, rows, evaluations = zip(*parts, strict=True)
    return Metrics(
        list(records), pd.concat(rows, ignore_index=True), pd.concat(evaluations, ignore_index=True)
    )


def write_metrics(metrics: Metrics, folder: Path) -> None:
    """Write a metrics folder as `collect` does, from memory."""
    folder.mkdir(parents=True)
    metrics.iterations.to_parquet(folder / schema.ITERATIONS_FILE, index=False)
    metrics.evaluations.to_parquet(folder / schema.COLLECTED_EVALUATIONS_FILE, index=False)
    (folder / schema.RUNS_FILE).write_text(json.dumps(metrics.runs, default=int))


def _simulate(
    regime: str, algorithm: str, replicate: Replicate, behaviour: Behaviour, collapses: bool, iterations: int
) -> tuple[dict, pd.DataFrame, pd.DataFrame]:
    rng = np.random.default_rng([*replicate, *algorithm.encode(), *regime.encode()])
    stops = collapses and behaviour.non_finite
    end = behaviour.onset if stops else iterations
    onset = behaviour.onset + rng.integers(-3, 4) if collapses and not stops else np.inf
    steps = np.arange(end + 1)
    success = START + (behaviour.final - START) * (1 - np.exp(-steps / (iterations / 4)))
    success += rng.normal(0, 0.01)  # a run ends a little higher or lower than the next
    sick = 1 / (1 + np.exp(-(steps - onset).clip(-50, 50))) if np.isfinite(onset) else np.zeros(len(steps))
    if behaviour.dip:
        sick = ((steps >= behaviour.onset) & (steps < behaviour.onset + 10)).astype(float)
    success = success * (1 - 0.95 * sick)

    t, ill = steps[1:], sick[1:]
    noise = np.exp(rng.normal(0, 0.1, (6, end)))
    spiking = t >= onset - behaviour.spike_lead
    frame = {
        "regime": regime,
        "algorithm": algorithm,
        "seed": replicate.seed,
        "iteration": t,
        "success_train": success[1:] * noise[5],
        "valid_format_rate": 0.9 * (1 - 0.85 * ill) * (1 - 0.01 * (noise[0] - 1)),
        "entropy": (0.3 + 1.1 * ill) * noise[1],
        "gradient_norm": noise[2] * np.where(spiking, 3, 1),
        "ppo_gradient_norm": noise[2] * np.where(spiking, 3, 1),
        "learning_rate": behaviour.learning_rate,
        "critic_loss": np.nan if "grpo" in algorithm or "gspo" in algorithm else 0.1,
        "gradient_norm_max": 2 * noise[2] * np.where(spiking, 12, 1),
        "clipping_bias_norm": 0.3 * noise[3] * np.exp(behaviour.bias_growth * t),
        "staleness_iterations": np.minimum(2, t - 1).astype(float),
        "clip_fraction": behaviour.clip * noise[4],
        "out_of_range_fraction": 1.7 * behaviour.clip * noise[4],
        "critic_value_rmse": np.where(t % 8 == 0, 0.2 * behaviour.value_error * noise[5], np.nan),
        "true_value_std": np.where(t % 8 == 0, 0.2, np.nan),
    }
    grid = steps[::2]
    evaluations = pd.DataFrame(
        {
            **{name: frame[name] for name in schema.KEY_COLUMNS},
            "iteration": grid,
            "temperature": 1.0,
            "success": rng.binomial(256, success[grid].clip(0, 1)) / 256,
        }
    )
    record = {
        **{name: frame[name] for name in schema.KEY_COLUMNS},
        "world_seed": replicate.world_seed,
        "warm_start_seed": replicate.warm_start_seed,
        "world": "synthetic",
        "status": schema.NON_FINITE if stops else schema.COMPLETED,
        "iterations": int(end),
        "updates": int(end) * N_UPDATES,
        "wall_seconds": 60.0,
        "warm_start": {"success_sampled": START, "success_greedy": 0.45, "n_sampled": 2048},
        "non_finite": {"what": "gradient", "update": int(end) * N_UPDATES} if stops else None,
    }
    return record, pd.DataFrame(frame), evaluations
