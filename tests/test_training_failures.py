"""Memory and servers that give out amid a run: what is done is kept, and one line says how to go on."""

import json

import pytest
import torch

from stppo.config.composition import compose
from stppo.config.loading import load
from stppo.rollout.rollout import EngineOutOfMemory
from stppo.training.checkpoint import newest
from stppo.training.failures import RunStopped, warm_start_stopped, what_stopped
from stppo.training.run import Run, engine_rounds_adapters
from stppo.training.warm_start import warm_start
from tests.conftest import TINY
from tests.training_runs import assert_same_metrics, interrupted, run, tables


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, barely_trained):
    folder = tmp_path_factory.mktemp("undisturbed")
    run(compose([*TINY, "training.staleness_iterations=1"]), folder, barely_trained)
    return folder


def failing(trainer, searches):
    """Let the trainer's retriever answer so many searches, then fail as a server that is gone."""
    retriever = trainer.world.environment.retriever
    original, asked = retriever.search, []

    def search(queries, top_k):
        asked.append(queries)
        if len(asked) > searches:
            raise ConnectionError("the retriever at http://x does not answer")
        return original(queries, top_k)

    retriever.search = search


# Early to late: in the first evaluation, the first roll-outs, and in those between updates.
@pytest.mark.parametrize(
    "searches", [0, 10, 24, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 14, 19, 22))]
)
def test_a_retriever_that_is_gone_stops_the_run_which_goes_on_bit_for_bit(
    searches, undisturbed, tmp_path, tiny, barely_trained
):
    config = tiny("training.staleness_iterations=1")
    its_run = Run(load(config), tmp_path, barely_trained, progress=False)
    trainer = its_run.trainer
    failing(trainer, searches)
    with pytest.raises(RunStopped, match="retriever at http://x does not answer; run the same command again"):
        its_run.train()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "running"
    done = trainer.iteration
    assert len(tables(tmp_path)[0]) == 4 * done, "all updates of the iterations that were done"
    again_run = Run(load(config), tmp_path, barely_trained, progress=False)
    seen = []
    again_run.on_iteration = lambda t: seen.append(t.iteration)
    assert again_run.train()["status"] == "completed"
    assert seen == list(range(done + 1, 6)), "no iteration is repeated"
    assert_same_metrics(undisturbed, tmp_path)


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more")


def test_out_of_memory_in_an_update_names_the_knobs_and_keeps_the_checkpoint(tmp_path, tiny, barely_trained):
    its_run = Run(load(tiny()), tmp_path, barely_trained, progress=False)
    its_run.on_iteration = lambda t: (
        setattr(t.policy_updates, "step", out_of_memory) if t.iteration == 3 else None
    )
    with pytest.raises(RunStopped) as stopped:
        its_run.train()
    message = str(stopped.value)
    assert "\n" not in message and message.startswith("out of memory (CUDA out of memory.")
    knobs = ["micro_batch_tokens (now null)", "gradient_checkpointing=true", "; or, as another run, "]
    knobs += ["rollout.batch_size (now 256)", "policy.lora"]
    assert sorted(knobs, key=message.index) == knobs
    assert "adam8bit" not in message, "a CPU has no such optimizer"
    assert "gpu_memory_utilization" not in message, "no engine that could take less"
    assert json.loads((newest(tmp_path / "checkpoint") / "state.json").read_text())["state"]["iteration"] == 2
    run(tiny(), tmp_path / "other", barely_trained)
    run(tiny(), tmp_path, barely_trained)
    assert_same_metrics(tmp_path / "other", tmp_path)


def test_only_memory_and_connections_are_the_outside(tiny, tmp_path):
    settings = load(tiny()).settings
    vllm = load(tiny("rollout=vllm", "training.micro_batch_tokens=512")).settings
    assert what_stopped(RuntimeError("shape mismatch"), settings, tmp_path, 0) is None
    assert what_stopped(ValueError("out of memory"), settings, tmp_path, 0) is None
    line = str(what_stopped(RuntimeError("CUDA error: out of memory"), vllm, tmp_path, 7))
    assert "(now 512)" in line and "rollout.gpu_memory_utilization (now 0.4)" in line


def test_memory_that_ran_out_in_the_engine_names_the_engines_knobs_first(tiny, tmp_path):
    settings = load(tiny("rollout=vllm", "training.micro_batch_tokens=512")).settings
    error = EngineOutOfMemory("vLLM ran out of memory sampling: lower this")
    knobs = [
        "gpu_memory_utilization (now",
        "max_num_seqs (now",
        "enforce_eager=true",
        "micro_batch_tokens (now",
    ]
    for line in (str(what_stopped(error, settings, tmp_path, 7)), str(warm_start_stopped(error, settings))):
        assert sorted(knobs, key=line.index) == knobs
    line = str(what_stopped(torch.OutOfMemoryError("CUDA out of memory"), settings, tmp_path, 7))
    assert line.index("micro_batch_tokens") < line.index("gpu_memory_utilization")
    awake = load(tiny("rollout=vllm", "rollout.sleep_level=0")).settings
    assert "rollout.sleep_level=2" in str(what_stopped(MemoryError(), awake, tmp_path, 7))


def test_out_of_memory_in_a_warm_start_is_one_line_too(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr("stppo.training.warm_start.make_rollout", out_of_memory)
    with pytest.raises(RunStopped) as stopped:
        warm_start(load(tiny()), tmp_path, progress=False)
    line = str(stopped.value)
    assert "\n" not in line and line.startswith("warm start: out of memory (CUDA out of memory.")
    assert "micro_batch_tokens (now null)" in line and line.endswith("run the same command again")
    assert "lower rollout.batch_size (now 256)" in line
    assert warm_start_stopped(ValueError("target"), load(tiny()).settings) is None


# ---- before an engine starts ----------------------------------------------------------------------


def test_a_checkpoint_that_does_not_fit_is_noticed_before_an_engine_starts(
    tmp_path, tiny, barely_trained, monkeypatch
):
    started = []
    monkeypatch.setattr("stppo.training.trainer.make_rollout", lambda *_: started.append(1) or 1 / 0)
    (tmp_path / "checkpoint" / "1").mkdir(parents=True)
    (tmp_path / "checkpoint" / "1" / "state.json").write_bytes(b"not a checkpoint")
    its_run = Run(load(tiny()), tmp_path, barely_trained, progress=False)
    with pytest.raises(ValueError, match="cannot be read"):
        its_run.train()
    assert not started
    with pytest.raises(ZeroDivisionError):
        its_run.train("set_aside")
    assert started and (tmp_path / "checkpoint").exists(), "nothing is moved for a run that cannot start"


def test_an_engine_is_closed_where_a_checkpoint_cannot_be_taken_up(
    tmp_path, tiny, barely_trained, monkeypatch
):
    interrupted(tiny(), tmp_path, barely_trained)
    its_run = Run(load(tiny()), tmp_path, barely_trained, progress=False)
    trainer = its_run.trainer
    closed = []
    monkeypatch.setattr(trainer.sampler, "close", lambda: closed.append(1))
    monkeypatch.setattr("stppo.training.trainer.restore", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        its_run.train()
    assert closed


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["rollout=vllm", "training.precision=bfloat16", "policy.lora={rank: 4}"], True),
        (["rollout=vllm", "policy.lora={rank: 4}"], False),
        (["rollout=vllm", "training.precision=bfloat16"], False),
    ],
)
def test_adapters_that_an_engine_rounds_away_are_warned_of(overrides, warned, tiny):
    assert engine_rounds_adapters(load(tiny(*overrides)).settings) == warned
