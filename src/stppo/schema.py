"""Names of everything a run records: files, columns and fields, each with a one-line definition.

Training writes these names and the analysis reads them; this file is all the two sides share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

# --- files of one run folder -----------------------------------------------------------------
RUN_FILE = "run.json"
POLICY_DIR = "policy"  # weights and tokenizer at the end
SET_ASIDE = "earlier-"  # begins the names of the sub-folders of what a run set aside
UPDATES_FILE = "updates.parquet"
EVALUATIONS_FILE = "evaluations.parquet"
TRAJECTORIES_FILE = "trajectories.json"
CONFIG_FILE = "config.yaml"
BY_BENCHMARK_FILE = "evaluations_by_benchmark.json"  # where questions of several benchmarks are asked

# --- files of an evaluation's folder; RESULT_FILE and TRAJECTORIES_FILE once per benchmark and decoding ---
BENCHMARKS_FILE, BENCHMARKS_TABLE_FILE = "benchmarks.json", "benchmarks.csv"
RESULT_FILE = "result.json"

# --- files of a metrics folder, made from many runs by `results.runs.collect` ---------------
RUNS_FILE = "runs.json"
ITERATIONS_FILE = "iterations.parquet"
COLLECTED_EVALUATIONS_FILE = "evaluations.parquet"
SUMMARY_FILE = "summary.csv"


def is_set_aside(file: Path, folder: Path) -> bool:
    """Whether a file below a folder belongs to what a run of that folder set aside."""
    return any(part.startswith(SET_ASIDE) for part in file.relative_to(folder).parts)


# --- values of RunRecord.status ---------------------------------------------------------------
COMPLETED, NON_FINITE, RUNNING = "completed", "non_finite", "running"

# What identifies a run; `collect` puts these columns before all others.
KEY_COLUMNS: dict[str, str] = {
    "regime": "off-policy setting (learning rate, epochs, staleness, iterations), e.g. OFF_POLICY",
    "algorithm": "name of the objective, e.g. st_ppo",
    "seed": "seed of roll-outs and minibatches; the warm start has its own seed",
}


class WarmStart(TypedDict):
    """What the supervised start scores, from at least 2,048 sampled trajectories on full presets."""

    success_sampled: float
    success_greedy: float
    n_sampled: int


class NonFinite(TypedDict):
    """Which quantity stopped being finite, and at which update."""

    what: str
    update: int


class RunRecord(TypedDict):
    """The content of `run.json`."""

    status: str
    regime: str
    algorithm: str
    label: str | None
    seed: int
    variant: str  # overrides but for algorithm and seed, as typed; "" for runs of a pipeline
    preset: str
    policy: str
    policy_parameters: int
    world: str
    warm_start_seed: int
    warm_start_folder: str
    warm_start_weights: str
    world_seed: int
    config_fingerprint: str
    code_hash: str
    git_commit: str | None
    git_dirty: bool | None
    versions: dict[str, str]
    hardware: dict[str, Any]
    resumed_on: list[dict[str, Any]]
    kernels: list[str]
    started: str
    wall_seconds: float
    cpu_seconds: float
    peak_memory_mb: float
    gpu_peak_memory_mb: float | None
    iterations: int
    updates: int
    warm_start: WarmStart
    non_finite: NonFinite | None


RUN_FIELDS: dict[str, str] = {
    "status": f"{COMPLETED}, {NON_FINITE} (stopped by a non-finite loss or gradient) or {RUNNING}",
    **KEY_COLUMNS,
    "label": "what figures call the algorithm, where its config says so; else null",
    "variant": "overrides that it was started with but for algorithm and seed, as typed; empty for runs of a pipeline",
    "preset": "name of the preset, e.g. laptop",
    "policy": "name of the policy config, e.g. tiny",
    "policy_parameters": "number of trainable parameters of the policy, critic not counted",
    "world": "name of the world config, e.g. synthetic",
    "warm_start_seed": "seed of the supervised start",
    "warm_start_folder": "name of the folder with the supervised start; another version of the code would name it differently",
    "warm_start_weights": "hash of the weights in that folder, which every run that begins alike shares",
    "world_seed": "seed of the synthetic knowledge base",
    "config_fingerprint": "hash of the composed config",
    "code_hash": "hash of the syntax tree of every module that training imports",
    "git_commit": "commit of the source tree; null outside git",
    "git_dirty": "true if the source tree had uncommitted changes; null outside git",
    "versions": "versions of Python and the main packages",
    "hardware": "processor, cores, memory, GPU",
    "resumed_on": "versions, hardware and commit of each later part that ran under others than the part before it; mostly empty",
    "kernels": "what computed policy and critic: compiled or eager; both where the run went on under the other",
    "started": "start time, ISO 8601, UTC",
    "wall_seconds": "seconds of training in all, resumed parts added up",
    "cpu_seconds": "CPU seconds of the training process, all threads, resumed parts added up",
    "peak_memory_mb": "largest resident memory of the process, MiB",
    "gpu_peak_memory_mb": "largest memory allocated on the GPU, MiB, as PyTorch counts it (torch.cuda.max_memory_allocated); null on a CPU",
    "iterations": "iterations done",
    "updates": "optimiser updates done",
    "warm_start": "success of the policy before training: sampled, greedy, number sampled",
    "non_finite": "what became non-finite and at which update; null if nothing did",
}


def _ratio_columns() -> dict[str, str]:
    """Mean, max, 99th percentile and min of the importance ratio at each granularity.

    Each statistic is over the minibatch with one value per token, turn or trajectory.
    """
    statistics = {"mean": "mean", "max": "largest", "p99": "99th percentile of the", "min": "smallest"}
    segments = {
        "token": "token importance ratio in the minibatch, one value per agent token",
        "turn": "turn importance ratio (geometric) in the minibatch, one value per turn",
        "sequence": "sequence importance ratio (geometric) in the minibatch, one value per trajectory",
    }
    return {
        f"ratio_{statistic}_{segment}": f"{adjective} {text}"
        for segment, text in segments.items()
        for statistic, adjective in statistics.items()
    }


# Norms that cost a backward pass of their own and that not every objective needs.
_WATCHED = (
    "where the objective does not use it, it is sampled on one update in bias_norm_every, at a place in the "
    "epoch that rotates from iteration to iteration, and NaN on the others; infinite where float32 has no number for it"
)

# One row per optimiser update. Values that belong to an iteration repeat on each of its rows.
UPDATE_COLUMNS: dict[str, str] = {
    "update": "optimiser updates done so far, counting this one",
    "iteration": "roll-out batches trained on so far, counting this one",
    "epoch": "pass over the batch, from 0",
    "minibatch": "minibatch within the epoch, from 0",
    "success_train": "share of the iteration's sampled training trajectories with exact match 1",
    "reward_train": "mean reward of the iteration's training trajectories",
    "valid_format_rate": "share of turns that parse as one well-formed search or answer",
    "turns_per_trajectory": "mean number of agent turns",
    "searches_per_trajectory": "mean number of valid searches",
    "agent_tokens_per_turn": "mean number of agent tokens in a turn",
    "trajectory_tokens": "mean length of a trajectory, prompt and environment tokens included",
    "gradient_norm": "global L2 norm of the actor's gradient before clipping, regularisers included",
    "ppo_gradient_norm": f"global L2 norm of the gradient of the PPO surrogate alone; {_WATCHED}",
    "clipping_bias_norm": f"L2 norm of C, the gradient that clipping removed; {_WATCHED}",
    "clipping_bias_norm_last_block": "the same over the last transformer block alone, without the output layer",
    "clipping_bias_norm_logprob": "estimate of clipping_bias_norm in log-probability space, no second backward pass",
    "clipping_bias_norm_logit": "estimate of the same in logit space, no second backward pass",
    "stabilizer_divisor": "number the gradient was divided by; 1 where nothing divides it",
    "sample_divisor": "number a token's term was divided by, mean over agent tokens; NaN where samples are not weighed",
    "update_norm": "L2 norm of the parameter change that the optimiser made",
    "clip_low": "lower clip bound of the ratio that was used, mean over agent tokens",
    "clip_high": "upper clip bound of the ratio that was used, mean over agent tokens",
    "clip_fraction": "clipped agent tokens / agent tokens; with PPO's min sign-aware: the term takes the clipped branch; "
    "for other surrogates see stppo.objectives.surrogates",
    "clip_fraction_high": "share of agent tokens clipped with a ratio above 1; with PPO's min: advantage > 0 and ratio "
    "above its bound",
    "clip_fraction_low": "share of agent tokens clipped with a ratio below 1; with PPO's min: advantage < 0 and ratio "
    "below its bound",
    "out_of_range_fraction": "share of agent tokens whose ratio leaves the bounds that were used, whatever the advantage",
    "out_of_range_fraction_token": "the same for the token-level ratio, whatever ratio the objective uses",
    "turn_fully_clipped_fraction": "share of turns of which every token is clipped",
    **_ratio_columns(),
    "effective_sample_size": "(sum w)^2 / sum w^2 of trajectory product ratios, as a share of the minibatch",
    "kl_behaviour_k1": "mean of -log r on behaviour samples: estimates KL(behaviour || policy), nats per token",
    "kl_behaviour_k3": "mean of r - 1 - log r: estimates KL(behaviour || policy), nats per token, never negative",
    "kl_policy_to_behaviour": "mean of r log r - r + 1: estimates KL(policy || behaviour), nats per token",
    "negative_advantage_gradient_share": "share of the surrogate's gradient mass (by |d loss / d log-prob|) on tokens with negative advantage",
    "advantage_mean": "mean advantage over agent tokens, as the loss sees it",
    "advantage_std": "standard deviation of the advantage over agent tokens, as the loss sees it",
    "advantage_max": "largest absolute advantage over agent tokens, as the loss sees it",
    "ctn_penalty": "value of the clipping-triggered KL penalty; 0 without it",
    "kl_reference": "mean of r - 1 - log r with r = warm start / policy (k3 estimator), nats per token, over the "
    "agent tokens that the behaviour policy sampled: estimates KL(policy || warm start) only on-policy; NaN where it is not "
    "scored: pretrained policies without kl_coefficient",
    "entropy": "mean entropy of the policy's next-token distribution at agent tokens, nats",
    "advantage_raw_std": "standard deviation of the iteration's advantages before whitening and pooling",
    "critic_loss": "half the mean squared error of the critic; NaN without critic",
    "critic_explained_variance": "1 - Var(return - V) / Var(return); NaN without critic or without reward variance",
    "critic_value_rmse": "root mean squared error of the critic's values that the iteration's credit reads against "
    "Monte-Carlo values of the policy that sampled its batch, at starts of turns, Monte-Carlo noise subtracted; units "
    "of reward; NaN where not measured (evaluation.value_error_every) and without critic",
    "true_value_std": "standard deviation of those Monte-Carlo values over the same states, noise subtracted; NaN "
    "where not measured and where the noise leaves no variance",
    "staleness_iterations": "iterations between sampling the batch and training on it",
    "staleness_updates": "optimiser updates made since the batch was sampled",
    "learning_rate": "learning rate of the actor",
    "seconds_rollout": "seconds the iteration spent sampling, scoring what was sampled not among them",
    "seconds_sync": "seconds of these spent handing weights to the sampling engine and checking it; NaN in PyTorch",
    "seconds_scoring": "seconds the iteration spent on critic values, Monte-Carlo values and other scoring passes",
    "seconds_critic": "seconds the iteration spent training the critic; 0 without critic",
    "seconds_update": "seconds of this update",
    "tokens_rollout": "agent tokens sampled in the iteration",
    "tokens_per_second": "agent tokens sampled per second of roll-out",
    "prefix_cache_hit_rate": "share of prompt tokens that the sampling engine had cached from earlier turns; NaN in "
    "PyTorch",
    "mismatch_mean": "mean |difference| between the log-probs that trainer and sampling engine give to the sampled "
    "tokens, nats; like all mismatch columns NaN where both are one, in PyTorch in float32",
    "mismatch_max": "largest such difference over the agent tokens of the batch",
    "mismatch_kl": "KL(engine || trainer) by k3 = r - 1 - log r, r = pi_trainer / pi_engine",
    "mismatch_effective_sample_size": "of the trajectories' product ratios r, as share of the batch",
}

# One row per evaluation on the fixed held-out questions.
EVALUATION_COLUMNS: dict[str, str] = {
    "iteration": "iterations done when evaluated; 0 is the warm start",
    "update": "optimiser updates done when evaluated",
    "temperature": "1.0: sampled; 0.0: greedy",
    "n_questions": "number of held-out questions",
    "success": "share of questions answered with exact match 1",
    "f1": "mean token F1 of the answers",
    "valid_format_rate": "share of turns that parse as one well-formed search or answer",
    "turns": "mean number of agent turns",
    "searches": "mean number of valid searches",
    "entropy_of_sampled": "mean of -log-probability of the sampled agent tokens, nats",
    "seconds": "seconds the evaluation took",
}

# One row per benchmark and decoding of `stppo evaluate`; each mean has its standard error over questions beside it.
BENCHMARK_MEANS: dict[str, str] = {
    "em": "share of questions whose answer scores 1: exact match, for multiple choice the right option",
    "search_r1_em": "the same as Search-R1 scores a dialogue: by its last answer block, in whatever turn",
    "f1": "mean token F1 of the answers; for multiple choice the same as em",
    "turns": "mean number of agent turns",
    "searches": "mean number of valid searches",
    "valid_format_rate": "share of turns that parse as one well-formed search or answer",
}
BENCHMARK_COLUMNS: dict[str, str] = {
    "benchmark": "which questions were asked; synthetic for those of a synthetic world",
    "decoding": "greedy, or sampled at temperature 1",
    "n_questions": "number of questions",
    **BENCHMARK_MEANS,
    **{f"{name}_se": f"standard error of {name}" for name in BENCHMARK_MEANS},
    "seconds": "seconds the evaluation took",
}

# Update columns that only a sampling engine beside the trainer (vLLM) fills; `mismatch_...` also bfloat16 in PyTorch.
ENGINE_COLUMNS: tuple[str, ...] = (
    "seconds_sync",
    "prefix_cache_hit_rate",
    "mismatch_mean",
    "mismatch_max",
    "mismatch_kl",
    "mismatch_effective_sample_size",
)

# Columns that say how long something took: never the same twice, so left out of comparisons of two runs.
TIMING_COLUMNS: tuple[str, ...] = (
    "seconds_rollout",
    "seconds_sync",
    "seconds_scoring",
    "seconds_critic",
    "seconds_update",
    "tokens_per_second",
    "seconds",
)

# iterations.parquet holds the mean of every update column per iteration and, for these, also the
# largest value under the name `<column>_max`: a spike of one update vanishes in a mean.
PEAK_COLUMNS: tuple[str, ...] = (
    "gradient_norm",
    "ppo_gradient_norm",
    "clipping_bias_norm",
    "ratio_max_token",
    "ratio_max_turn",
    "ratio_max_sequence",
)

# One row per run, for people.
SUMMARY_COLUMNS: dict[str, str] = {
    **KEY_COLUMNS,
    "world_seed": RUN_FIELDS["world_seed"],
    "warm_start_seed": RUN_FIELDS["warm_start_seed"],
    "status": RUN_FIELDS["status"],
    "start": "S0: sampled success of the warm start",
    "peak": "P: largest trailing mean (of 3 evaluations) of sampled success, at least the start",
    "final": "F: mean sampled success of the last tenth of the evaluations; 0 after a non-finite stop",
    "area": "mean height of the curve of sampled success",
    **{
        f"after_{n}": f"trailing mean of sampled success after {n} iterations; empty in shorter runs"
        for n in (10, 20, 40, 60)
    },
    "greedy_start": "greedy success of the warm start",
    "greedy_final": "mean greedy success of the last tenth of the greedy evaluations; 0 after a non-finite stop",
    "greedy_area": "mean height of the curve of greedy success",
    "learned": "true if the peak lies at least 0.10 above the start",
    "gain_kept": "(final - start) / (peak - start) of a run that learned, else empty",
    "crash_iteration": "first evaluation at which more than half of the gain is lost, or the non-finite update's; empty if none",
    "rapid_crashes": "how often half of the gain was lost within 10 iterations, recovered or not",
    "collapsed": "true if a crash (more than half of the gain lost) was not made good by the end, or a loss or gradient stopped being finite",
    "outcome": "learned, crashed and recovered, collapsed, did not learn, or lost its start",
    "clip_fraction_mean": "mean sign-aware clip fraction over all iterations",
    "gradient_norm_max": "largest gradient norm of any update, before clipping",
    "updates": RUN_FIELDS["updates"],
    "wall_seconds": RUN_FIELDS["wall_seconds"],
}

# Keys of each record of trajectories.json.
TRAJECTORY_FIELDS: dict[str, str] = {
    "question": "text of the question",
    "answers": "accepted answers",
    "reward": "reward of the trajectory",
    "tokens": "tokens as text, padding removed",
    "agent_mask": "1 where the policy emitted the token, 0 where the environment did",
    "turn_ids": "turn of each agent token from 0, -1 elsewhere",
    "logprobs": "log-probability of each token under the policy that sampled it, 0 off the mask",
}

GLOSSARY: dict[str, dict[str, str]] = {
    "Per update (`updates.parquet`; means per iteration in `iterations.parquet`)": UPDATE_COLUMNS,
    "Per evaluation (`evaluations.parquet`)": EVALUATION_COLUMNS,
    "Per benchmark (`benchmarks.csv` of `stppo evaluate`)": BENCHMARK_COLUMNS,
    "Per run, summary (`summary.csv`)": SUMMARY_COLUMNS,
    "Per run, record (`run.json`)": RUN_FIELDS,
}
