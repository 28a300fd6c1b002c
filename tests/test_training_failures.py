"""Memory and servers that give out in the middle of a run: what is done is kept, and one line says how to go on."""

import json

import pytest
import torch

from stppo import config as configs
from stppo.training.checkpoint import newest
from stppo.training.failures import RunStopped, what_stopped
from stppo.training.trainer import Trainer
from tests.conftest import TINY
from tests.training_runs import assert_same_metrics, run, tables


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, barely_trained):
    folder = tmp_path_factory.mktemp("undisturbed")
    run(configs.compose([*TINY, "training.staleness_iterations=1"]), folder, barely_trained)
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


# Early to late: in the first evaluation, the first roll-outs, and in roll-outs and evaluations between updates.
@pytest.mark.parametrize("searches", [0, 5, 10, 14, 19, 24, 30])
def test_a_retriever_that_is_gone_stops_the_run_which_goes_on_bit_for_bit(
    searches, undisturbed, tmp_path, tiny, barely_trained
):
    config = tiny("training.staleness_iterations=1")
    trainer = Trainer(config, tmp_path, barely_trained, progress=False)
    failing(trainer, searches)
    with pytest.raises(RunStopped, match="retriever at http://x does not answer; run the same command again"):
        trainer.train()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "running"
    done = trainer.iteration
    assert len(tables(tmp_path)[0]) == 4 * done, "all updates of the iterations that were done"
    again = Trainer(config, tmp_path, barely_trained, progress=False)
    seen = []
    again.on_iteration = lambda t: seen.append(t.iteration)
    assert again.train()["status"] == "completed"
    assert seen == list(range(done + 1, 6)), "no iteration is repeated"
    assert_same_metrics(undisturbed, tmp_path)


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more")


def test_out_of_memory_in_an_update_names_the_knobs_and_keeps_the_checkpoint(tmp_path, tiny, barely_trained):
    trainer = Trainer(tiny(), tmp_path, barely_trained, progress=False)
    trainer.on_iteration = lambda t: (
        setattr(t.policy_updates, "step", out_of_memory) if t.iteration == 3 else None
    )
    with pytest.raises(RunStopped) as stopped:
        trainer.train()
    message = str(stopped.value)
    assert "\n" not in message and message.startswith("out of memory (CUDA out of memory.")
    knobs = ["micro_batch_tokens (now null)", "gradient_checkpointing=true", "policy.lora", "adam8bit"]
    assert sorted(knobs, key=message.index) == knobs
    assert "gpu_memory_utilization" not in message, "no engine that could take less"
    assert json.loads((newest(tmp_path / "checkpoint") / "state.json").read_text())["state"]["iteration"] == 2
    run(tiny(), tmp_path / "other", barely_trained)
    run(tiny(), tmp_path, barely_trained)
    assert_same_metrics(tmp_path / "other", tmp_path)


def test_only_memory_and_connections_are_the_outside(tiny, tmp_path):
    settings = configs.validate(tiny())
    vllm = configs.validate(tiny("rollout=vllm", "training.micro_batch_tokens=512"))
    assert what_stopped(RuntimeError("shape mismatch"), settings, tmp_path, 0) is None
    assert what_stopped(ValueError("out of memory"), settings, tmp_path, 0) is None
    line = str(what_stopped(RuntimeError("CUDA error: out of memory"), vllm, tmp_path, 7))
    assert "(now 512)" in line and "rollout.gpu_memory_utilization (now 0.4)" in line
