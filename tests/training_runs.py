"""Short training runs and what they recorded, for the tests of the trainer."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from stppo.config.loading import load
from stppo.policy.policy import score
from stppo.record.schema import CHECKPOINT_DIR, TIMING_COLUMNS
from stppo.training.checkpoint import newest
from stppo.training.run import Run


def imitate(policy, data, steps: int, rate: float = 1e-2, rows: int | None = None):
    """The policy after Adam's steps on the likelihood of demonstrations, all of them or `rows` drawn at random."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=rate)
    for _ in range(steps):
        batch = data if rows is None else data.select(torch.randint(len(data), (rows,)))
        loss = -score(policy, batch).logprobs.sum() / batch.agent_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def run(config, folder, start, **options):
    return Run(load(config), folder, start, progress=False).train(**options)


def interrupted(config, folder, start, after: int = 2) -> None:
    """A run that is stopped after some iterations and leaves its checkpoint."""

    def stop(trainer):
        if trainer.iteration == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run(load(config), folder, start, on_iteration=stop, progress=False).train()
    assert newest(folder / CHECKPOINT_DIR) is not None


def tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    return tuple(pd.read_parquet(folder / f"{name}.parquet") for name in ("updates", "evaluations"))


def assert_same_metrics(left: Path, right: Path, but: tuple[str, ...] = ()) -> None:
    """Bit for bit, timings and the columns `but` aside."""
    for a, b in zip(tables(left), tables(right), strict=True):
        ignored = [column for column in (*TIMING_COLUMNS, *but) if column in a]
        pd.testing.assert_frame_equal(a.drop(columns=ignored), b.drop(columns=ignored), check_exact=True)
