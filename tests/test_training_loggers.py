"""Loggers: they see each recorded row, change nothing, and what becomes of them stops no run."""

import errno
import logging
from importlib.util import find_spec

import pytest

from stppo.config.files import ConfigError
from stppo.config.identity import identity_section, run_section, warm_start_dir
from stppo.config.loading import load
from stppo.training import loggers as module
from stppo.training.loggers import Loggers, evaluation_scalars, update_scalars
from stppo.training.run import Run
from tests.training_runs import assert_same_metrics, interrupted, run, tables

needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="TensorBoard is not installed: pip install 'stppo[tensorboard]'"
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")


class Recorder:
    """Keeps what it sees; raises an error at the update where it is told to."""

    made: list["Recorder"] = []

    def __init__(self, run_dir, name, identifier, step, fails_at=None):
        self.identifier, self.step, self.fails_at = identifier, step, fails_at
        self.seen, self.closed = [], 0
        Recorder.made.append(self)

    def write(self, step, scalars):
        if step == self.fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.seen.append((step, scalars))

    def close(self):
        self.closed += 1

    def steps(self):
        return [step for step, scalars in self.seen if "update/entropy" in scalars]


@pytest.fixture
def recorder(monkeypatch):
    """In TensorBoard's place, and taken for installed."""
    Recorder.made = []
    monkeypatch.setitem(module.LOGGERS, "tensorboard", Recorder)
    monkeypatch.setattr(module, "find_spec", lambda name: True)
    return Recorder


def events(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_logger_sees_the_rows_as_they_are_recorded(tmp_path, tiny, barely_trained, recorder):
    run(tiny("loggers=[tensorboard]"), tmp_path, barely_trained)
    (seen,) = recorder.made
    updates, evaluations = (table.to_dict("records") for table in tables(tmp_path))
    assert [pair for pair in seen.seen if "update/entropy" in pair[1]] == [
        (row["update"], update_scalars(row)) for row in updates
    ]
    others = [scalars for _, scalars in seen.seen if "update/entropy" not in scalars]
    assert others == [evaluation_scalars(row) for row in evaluations]
    assert seen.closed == 1 and seen.step == 0


def test_run_that_goes_on_keeps_its_identifier_and_names_its_step(tmp_path, tiny, barely_trained, recorder):
    config = tiny("loggers=[tensorboard]", "training.checkpoint_every=1")
    interrupted(config, tmp_path, barely_trained, after=2)
    run(config, tmp_path, barely_trained)
    first, second = recorder.made
    assert first.closed == 1 and second.identifier == first.identifier
    assert second.step == tables(tmp_path)[0].query("iteration == 2")["update"].max()
    assert second.steps() == list(range(second.step + 1, 21))


def test_failing_logger_warns_once_and_the_run_ends_the_same(
    tmp_path, tiny, barely_trained, monkeypatch, caplog
):
    run(tiny(), tmp_path / "without", barely_trained)
    Recorder.made = []
    monkeypatch.setattr(module, "find_spec", lambda name: True)
    monkeypatch.setitem(module.LOGGERS, "wandb", Recorder)
    monkeypatch.setitem(module.LOGGERS, "tensorboard", lambda *arguments: Recorder(*arguments, fails_at=3))
    with caplog.at_level(logging.WARNING, logger="stppo.training.loggers"):
        run(tiny("loggers=[tensorboard,wandb]"), tmp_path / "with", barely_trained)
    (warning,) = caplog.messages
    assert "logger tensorboard is off" in warning and "No space left on device" in warning
    failed, other = Recorder.made
    assert failed.steps() == [1, 2] and len(other.steps()) == 20
    assert_same_metrics(tmp_path / "without", tmp_path / "with")


def test_logger_that_cannot_begin_is_off(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="stppo.training.loggers"):
        Loggers(["tensorboard"], tmp_path).update_row({"update": 1, "entropy": 1.0})
    assert len(caplog.messages) == 1 and "logger tensorboard is off" in caplog.messages[0]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_missing_package_names_its_extra_before_anything_is_trained(
    name, tmp_path, tiny, barely_trained, monkeypatch
):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install -e '.*\[{name}\]'") as error:
        Run(load(tiny(f"loggers=[{name}]")), tmp_path / "run", barely_trained)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_loggers_are_no_part_of_a_run(tiny):
    plain, logged = tiny(), tiny("loggers=[tensorboard]")
    assert identity_section(plain) == identity_section(logged)
    assert run_section(plain) == run_section(logged)
    assert warm_start_dir(plain) == warm_start_dir(logged)


@needs_tensorboard
def test_tensorboard_of_a_run_that_went_on_has_each_step_once(tmp_path, tiny, barely_trained):
    config = tiny("loggers=[tensorboard]")
    interrupted(config, tmp_path, barely_trained, after=3)  # the checkpoint is that of iteration 2
    assert [step for step, _ in events(tmp_path / "tensorboard")["update/entropy"]] == list(range(1, 13))
    run(config, tmp_path, barely_trained)
    updates, evaluations = tables(tmp_path)
    found = events(tmp_path / "tensorboard")
    for tag, table, column in (
        ("update/entropy", updates, "entropy"),
        ("update/gradient_norm", updates, "gradient_norm"),
        ("evaluation/success/sampled", evaluations[evaluations["temperature"] == 1], "success"),
    ):
        assert [step for step, _ in found[tag]] == table["update"].tolist(), tag
        assert [value for _, value in found[tag]] == pytest.approx(table[column].tolist(), rel=1e-6), tag


def test_scalars_are_the_finite_numbers_by_tag():
    row = {"update": 3, "iteration": 1, "entropy": 0.5, "critic_loss": float("nan"), "epoch": 0}
    assert update_scalars(row) == {"update/entropy": 0.5, "update/epoch": 0}
    row = {"update": 3, "iteration": 1, "temperature": 0.0, "success": 0.25, "by_benchmark": {"nq": 0.5}}
    assert evaluation_scalars(row) == {"evaluation/success/greedy": 0.25, "evaluation/success/greedy/nq": 0.5}
