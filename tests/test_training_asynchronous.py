"""Batches of the groups that finish first, as under an asynchronous trainer."""

import pytest

from stppo.config.files import ConfigError
from stppo.config.loading import load
from stppo.training.trainer import Trainer
from tests.training_runs import assert_same_metrics, interrupted, run, tables

STALENESS, ITERATIONS = 2, 7
BRIEF = (
    f"training.iterations={ITERATIONS}",
    f"training.staleness_iterations={STALENESS}",
    "evaluation.every=9",
)


def in_groups(batch, size: int) -> list:
    """(tokens, turns of the longest dialogue) of each group, in order."""
    parts = [batch.select(range(i, i + size)) for i in range(0, len(batch), size)]
    return [(part.tokens.tolist(), int(part.n_turns.max())) for part in parts]


@pytest.mark.parametrize("algorithm", ["token_ppo", "grpo"])
@pytest.mark.parametrize(("pace", "oldest"), [(1, None), (1, 0), (1, 1), (2, 1), (4, None)])
def test_the_groups_that_end_first_are_trained_on_first(tiny, barely_trained, pace, oldest, algorithm):
    """Against a calendar: each group's end in turns since the beginning, as it was begun."""
    config = tiny(
        *(*BRIEF, f"algorithm={algorithm}", f"+training.staleness.turns_per_iteration={pace}"),
        f"+training.staleness.discard_above={'null' if oldest is None else oldest}",
    )
    trainer = Trainer(load(config), barely_trained)
    size = trainer.objective.credit.group_size
    n = trainer.settings.training.trajectories_per_iteration // size
    sampled, collect = [], trainer.batches.collect

    def noted(update, n_groups):
        rollout = collect(update, n_groups)
        sampled.extend(in_groups(rollout.trajectories, size))
        return rollout

    trainer.batches.collect = noted
    now, begun, calendar = 0, 0, []  # calendar: (end, place, iteration begun)
    for iteration in range(ITERATIONS):
        trainer.fill_queue()
        trainer.iteration += 1
        queued = trainer.queue.popleft()

        now += pace if iteration else 0
        discarded = 0
        while True:
            old = [e for e in calendar if e[0] <= now and oldest is not None and iteration - e[2] > oldest]
            calendar = sorted(set(calendar) - set(old))
            discarded += len(old)
            while len(calendar) < n * min(STALENESS + 1, ITERATIONS - iteration):
                calendar.append((now + sampled[begun][1], begun, iteration))
                begun += 1
            calendar.sort()
            if calendar[n - 1][0] <= now:
                break
            now += 1
        taken, calendar = calendar[:n], calendar[n:]
        assert [tokens for tokens, _ in in_groups(queued.trajectories, size)] == [
            sampled[e[1]][0] for e in taken
        ]
        assert queued.iteration == sum(e[2] for e in taken) / n
        assert queued.metrics["discarded_groups"] == discarded
        assert queued.trajectories.group_ids.tolist() == [g for g in range(n) for _ in range(size)]
    assert begun == len(sampled)


def test_what_a_batch_measures_is_measured_on_its_trajectories(tiny, barely_trained, tmp_path):
    run(tiny(*BRIEF, "+training.staleness.turns_per_iteration=1"), tmp_path / "run", barely_trained)
    updates, _ = tables(tmp_path / "run")
    trainer = Trainer(load(tiny(*BRIEF, "+training.staleness.turns_per_iteration=1")), barely_trained)
    trainer.fill_queue()
    batch, first = trainer.queue[0].trajectories, updates.iloc[0]
    assert first["turns_per_trajectory"] == pytest.approx(batch.n_turns.double().mean().item())
    assert first["agent_tokens_per_turn"] == pytest.approx(
        batch.n_agent_tokens.sum().item() / batch.n_turns.sum().item()
    )
    assert first["tokens_rollout"] == batch.n_agent_tokens.sum().item()
    assert first["reward_train"] == pytest.approx(batch.returns.mean().item())
    assert first["staleness_iterations"] == 0 and updates["staleness_iterations"].max() > 1


def test_an_interrupted_run_goes_on_bit_for_bit(tiny, barely_trained, tmp_path):
    config = tiny(
        *BRIEF,
        "+training.staleness.turns_per_iteration=1",
        "+training.staleness.discard_above=1",
        "training.checkpoint_every=1",
    )
    run(config, tmp_path / "whole", barely_trained)
    interrupted(config, tmp_path / "parts", barely_trained, after=3)
    run(config, tmp_path / "parts", barely_trained)
    assert_same_metrics(tmp_path / "whole", tmp_path / "parts")
    assert tables(tmp_path / "whole")[0]["discarded_groups"].max() > 0


def test_true_values_of_whole_batches_are_refused(tiny, barely_trained):
    config = tiny(*BRIEF, "+training.staleness.turns_per_iteration=1", "training.values=monte_carlo")
    with pytest.raises(ConfigError, match=r"training\.staleness.*training\.values"):
        Trainer(load(config), barely_trained)
