"""What a run records: roll-out statistics, evaluations, and the tables and record they are written to."""

import ctypes
import os
import resource
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stppo.files import write_atomically, write_json
from stppo.record.schema import (
    BY_BENCHMARK_FILE,
    EVALUATION_COLUMNS,
    EVALUATIONS_FILE,
    TRAJECTORIES_FILE,
    UPDATE_COLUMNS,
    UPDATES_FILE,
)
from stppo.rollout.rollout import Rollout, Sampler
from stppo.world.protocol import Question
from stppo.world.rewards import mean_by_source, score


def success_of(rollout: Rollout) -> float:
    """Share of episodes whose answer matches exactly; an episode without answer counts as a failure."""
    matches = [score(e.question, e.answer) for e in rollout.episodes]
    return sum(matches) / len(matches)


def valid_format_rate(rollout: Rollout) -> float:
    """Share of agent turns that parse as one well-formed search or answer."""
    turns = sum(len(e.turns) for e in rollout.episodes)
    return 1 - sum(e.n_invalid for e in rollout.episodes) / turns


def rollout_metrics(rollout: Rollout, seconds: float) -> dict[str, float]:
    """Iteration-level columns of one batch that took so many seconds; those of scoring it anew are no seconds
    of sampling."""
    seconds -= rollout.metrics.get("seconds_scoring", 0.0)
    batch, episodes = rollout.trajectories, rollout.episodes
    agent_tokens = int(batch.agent_mask.sum())
    return {
        "success_train": success_of(rollout),
        "reward_train": float(batch.rewards.sum(1).mean()),
        "valid_format_rate": valid_format_rate(rollout),
        "turns_per_trajectory": float(batch.n_turns.float().mean()),
        "hops": sum(e.question.hops for e in episodes) / len(episodes),
        "searches_per_trajectory": sum(e.n_searches for e in episodes) / len(episodes),
        "agent_tokens_per_turn": agent_tokens / int(batch.n_turns.sum()),
        "trajectory_tokens": float(batch.lengths.float().mean()),
        "seconds_rollout": seconds,
        "tokens_rollout": agent_tokens,
        "tokens_per_second": agent_tokens / seconds,
        **rollout.metrics,
    }


def evaluate(
    sampler: Sampler, policy: PreTrainedModel, questions: list[Question], greedy: bool, seed: int
) -> tuple[dict[str, float], Rollout]:
    """One evaluation row (without iteration and update); its own generator leaves training's untouched.

    Where questions of several benchmarks were asked, `by_benchmark` holds the success on each.
    """
    began = time.perf_counter()
    rollout = sampler.collect(policy, questions, torch.Generator().manual_seed(seed), greedy=greedy)
    batch, episodes = rollout.trajectories, rollout.episodes
    row = {
        "temperature": 0.0 if greedy else sampler.config.temperature,
        "n_questions": len(questions),
        "success": success_of(rollout),
        "f1": sum(score(e.question, e.answer, "f1") for e in episodes) / len(episodes),
        "valid_format_rate": valid_format_rate(rollout),
        "turns": float(batch.n_turns.float().mean()),
        "searches": sum(e.n_searches for e in episodes) / len(episodes),
        "entropy_of_sampled": float(-batch.behaviour_logprobs[batch.agent_mask].mean()),
        "seconds": time.perf_counter() - began,
    }
    by_source = mean_by_source(questions, [score(e.question, e.answer) for e in episodes])
    return row | ({"by_benchmark": by_source} if len(by_source) > 1 else {}), rollout


def write_tables(run_dir: Path, updates: list[dict], evaluations: list[dict]) -> None:
    """Both tables with exactly the columns of the schema, in its order; success per benchmark in a file of
    its own."""
    names = ("iteration", "update", "temperature", "by_benchmark")
    if parts := [{name: row[name] for name in names} for row in evaluations if "by_benchmark" in row]:
        write_json(run_dir / BY_BENCHMARK_FILE, parts)
    evaluations = [{key: row[key] for key in row if key != "by_benchmark"} for row in evaluations]
    for name, columns, rows in (
        (UPDATES_FILE, UPDATE_COLUMNS, updates),
        (EVALUATIONS_FILE, EVALUATION_COLUMNS, evaluations),
    ):
        table = pd.DataFrame(rows, columns=list(columns))
        write_atomically(run_dir / name, lambda part, table=table: table.to_parquet(part, index=False))


def read_tables(run_dir: Path) -> tuple[list[dict], list[dict]]:
    """The rows that `write_tables` wrote, of updates and of evaluations. OSError where a table is missing."""
    updates, evaluations = (pd.read_parquet(run_dir / name) for name in (UPDATES_FILE, EVALUATIONS_FILE))
    return updates.to_dict("records"), evaluations.to_dict("records")


def as_columns(rows: list[dict[str, float]]) -> dict[str, Tensor]:
    """Rows of numbers as columns (n,) of int64 or float64: thousands of rows are a checkpoint's largest part,
    and as text they take several times the room and time. A number that a row lacks is NaN."""
    frame = pd.DataFrame([dict(row) for row in rows])
    return {name: torch.from_numpy(frame[name].to_numpy(copy=True)) for name in frame}


def as_rows(columns: dict[str, Tensor]) -> list[dict[str, float]]:
    """The rows that `as_columns` took."""
    return pd.DataFrame({name: column.numpy() for name, column in columns.items()}).to_dict("records")


def trajectory_records(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, n: int) -> list[dict[str, Any]]:
    """The first n trajectories of a roll-out, token by token, as the viewer reads them
    (`schema.TrajectoryRecord`)."""
    batch, records = rollout.trajectories, []
    turn_rewards = batch.turn_rewards.split(batch.n_turns.tolist())
    for row, episode in enumerate(rollout.episodes[:n]):
        length, paid = int(batch.lengths[row]), [round(x, 5) for x in turn_rewards[row].tolist()]
        plain = [0.0] * (len(paid) - 1) + [round(float(episode.reward), 5)]  # the answer's reward is all
        ids, mask = batch.tokens[row, :length].tolist(), batch.agent_mask[row, :length].int().tolist()
        records.append(
            {
                "question": episode.question.text,
                "answers": list(episode.question.answers),
                "reward": float(episode.reward),
                **({} if paid == plain else {"turn_rewards": paid}),
                "tokens": _texts(ids, mask, tokenizer),
                "agent_mask": mask,
                "turn_ids": batch.turn_ids[row, :length].tolist(),
                "logprobs": [round(x, 5) for x in batch.behaviour_logprobs[row, :length].tolist()],
            }
        )
    return records


def _texts(ids: list[int], mask: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each token; a character of several tokens is that of the last of them."""
    texts, part = [], []
    for t, token in enumerate(ids):
        part.append(token)
        text = tokenizer.decode(part)
        last = t + 1 == len(ids) or mask[t + 1] != mask[t] or len(part) == 4  # bytes of a character at most
        whole = last or not text.endswith("\ufffd")
        texts.append(text if whole else "")
        part = [] if whole else part
    return texts


def write_sample(run_dir: Path, sampler: Sampler, rollout: Rollout, n: int) -> None:
    """`trajectory_records` as a file of the run."""
    write_json(run_dir / TRAJECTORIES_FILE, trajectory_records(rollout, sampler.tokenizer, n))


def peak_memory_mb() -> float:
    """Largest resident memory of this process so far, MiB.

    On Linux not `ru_maxrss`, which begins at the peak of the process that started this one (getrusage(2)).
    """
    if os.uname().sysname == "Linux":
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2  # macOS counts in bytes


def give_back_memory() -> None:
    """Return to the system what the C library holds unused, where it can (glibc). Buffers of ever other sizes
    leave gaps: a run grows by more than 1 MiB an iteration without this."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def gpu_peak_memory_mb(device: torch.device) -> float | None:
    """Most memory that this process has had allocated on a GPU since its peak was reset, MiB, as PyTorch
    counts it; None for a CPU."""
    if device.type != "cuda":
        return None
    return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
