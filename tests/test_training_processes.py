"""Calls in a process of their own: results, errors, interruptions and sudden ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from stppo import cli
from stppo.config.composition import compose
from stppo.config.loading import load
from stppo.training import warm_start as starts
from stppo.training.failures import RunStopped
from stppo.training.processes import in_own_process
from tests.conftest import TINY

pytestmark = pytest.mark.slow  # processes and dry runs of whole graphs

HERE = "tests.test_training_processes"


def pid_of(value):
    return os.getpid(), value


def fail():
    raise RunStopped("out of memory; lower it")


class Stubborn(ValueError):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def fail_in_a_way_that_cannot_travel():
    raise Stubborn("no", "way")


def vanish():
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ever(file):
    with open(file, "w") as stream:
        stream.write(str(os.getpid()))
    try:
        time.sleep(120)
    finally:
        os.unlink(file)


def test_a_result_comes_from_another_process():
    pid, value = in_own_process(f"{HERE}:pid_of", {"a": [1]})
    assert pid != os.getpid() and value == {"a": [1]}


def test_an_error_is_raised_here_with_its_traceback_beside_it():
    with pytest.raises(RunStopped) as caught:
        in_own_process(f"{HERE}:fail")
    assert str(caught.value) == "out of memory; lower it"
    assert "in fail" in caught.value.__notes__[0]
    with pytest.raises(ValueError) as caught:
        in_own_process(f"{HERE}:fail_in_a_way_that_cannot_travel")
    assert str(caught.value) == "no way"


def test_a_killed_process_is_named():
    with pytest.raises(ChildProcessError, match="exit code -9; it was killed"):
        in_own_process(f"{HERE}:vanish")


# The parent as a program of its own, since it is to be interrupted or killed.
PARENT = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from stppo.training.processes import in_own_process\n"
    f"in_own_process('{HERE}:wait_for_ever', sys.argv[1])"
)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=str)
@pytest.mark.parametrize("to_both", [False, True], ids=["parent", "group"])
def test_a_child_ends_with_its_parent(tmp_path, sent, to_both):
    """Ctrl-C reaches the parent, or in a terminal the whole group; the child leaves in order either way."""
    if to_both and sent == signal.SIGKILL:
        pytest.skip("nothing can be done about that, nor need it")
    file = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, file], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline and parent.poll() is None, "the child did not start"
        time.sleep(0.02)
    child = int(file.read_text())
    if to_both:
        os.killpg(parent.pid, sent)
    else:
        parent.send_signal(sent)
    error = parent.communicate(timeout=60)[1]
    if sent == signal.SIGINT:
        assert "KeyboardInterrupt" in error.splitlines()[-1]
    while file.exists():
        assert time.monotonic() < deadline, f"process {child} goes on"
        time.sleep(0.02)


def recorded(monkeypatch, module):
    asked = []
    monkeypatch.setattr(module, "in_own_process", lambda *arguments: asked.append(arguments) or "done")
    return asked


def test_a_warm_start_with_vllm_is_made_in_a_process_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = recorded(monkeypatch, starts)
    monkeypatch.setattr(starts, "warm_start", lambda *_, **__: asked.append("here"))
    vllm, torch = (load(compose([*TINY, f"rollout={engine}"])) for engine in ("vllm", "torch"))
    path = starts.ensure_warm_start(vllm)
    starts.ensure_warm_start(torch)
    assert asked == [("stppo.training.warm_start:warm_start_of", vllm.config, path), "here"]


@pytest.mark.parametrize(
    ("engine", "seeds", "apart"), [("vllm", "0,1", 2), ("vllm", "0", 0), ("torch", "0,1", 0)]
)
def test_runs_of_a_sweep_with_vllm_have_a_process_each(monkeypatch, capsys, engine, seeds, apart):
    asked = recorded(monkeypatch, cli)
    monkeypatch.setattr(cli, "train_one", lambda *arguments: "done")
    cli.train([*TINY, f"rollout={engine}", f"seed={seeds}"], None, "auto")
    assert [name for name, *_ in asked] == ["stppo.cli:train_config"] * apart
    assert capsys.readouterr().out == "done\n" * len(seeds.split(","))
