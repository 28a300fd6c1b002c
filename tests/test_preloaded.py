"""Commands in forks of a process that has imported everything, or where there is none in their own."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from jupyter_client import KernelManager

from stppo import preloaded

COMMAND = [sys.executable, "-m", "stppo.preloaded"]
pytestmark = pytest.mark.xdist_group("preloaded")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A serving process, and the environment in which commands find it."""
    address = tmp_path_factory.mktemp("s") / "socket"
    process = subprocess.Popen([*COMMAND, "serve", str(address), str(os.getpid())])
    while not address.exists():
        assert process.poll() is None
        time.sleep(0.05)
    yield process, os.environ | {"STPPO_PRELOADED": str(address)}
    process.kill()


def notebook(path, *cells):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(book, path)
    return path


def gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_for(condition, seconds=30):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("address", [None, "/nowhere/socket"])
def test_without_a_server_the_command_runs_by_itself(address):
    environment = {name: value for name, value in os.environ.items() if name != "STPPO_PRELOADED"}
    environment |= {"STPPO_PRELOADED": address} if address else {}
    done = subprocess.run([*COMMAND, "stppo", "--version"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:6]) == (0, "stppo ")


def test_streams_folder_and_exit_status_are_the_callers(server, tmp_path):
    command = [*COMMAND, "stppo", "collect", "out", "nothing-here"]
    done = subprocess.run(command, env=server[1], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "nothing-here" in done.stderr


def test_kernels_are_forks_that_have_imported_the_trainer(server, tmp_path):
    process, environment = server
    source = notebook(
        tmp_path / "in.ipynb",
        "import os, sys, json\nimported = 'stppo.training.trainer' in sys.modules",
        "print(json.dumps([os.getppid(), imported, os.getcwd(), os.environ['MARK']]))",
    )
    command = [
        *COMMAND,
        "papermill",
        str(source),
        "out.ipynb",
        "--cwd",
        str(tmp_path),
        "--no-progress-bar",
        "-k",
        "python3",
    ]
    subprocess.run(command, env=environment | {"MARK": "mine"}, cwd=tmp_path, check=True, capture_output=True)
    said = nbformat.read(tmp_path / "out.ipynb", 4).cells[1].outputs[0].text
    assert json.loads(said) == [process.pid, True, str(tmp_path), "mine"]


def test_kernels_that_start_at_once_share_no_port(monkeypatch):
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "stppo-preloaded")
    kernels = [KernelManager() for _ in range(2)]
    try:
        for kernel in kernels:
            kernel.start_kernel()
        one, other = (kernel.get_connection_info() for kernel in kernels)
        assert (one["transport"], other["transport"]) == ("ipc", "ipc") and one["ip"] != other["ip"]
        for kernel in kernels:
            client = kernel.blocking_client()
            client.start_channels()
            client.wait_for_ready(timeout=60)
            kernel.restart_kernel(now=True)
            client.wait_for_ready(timeout=60)
            client.stop_channels()
    finally:
        for kernel in kernels:
            kernel.shutdown_kernel(now=True)
    for kernel in kernels:
        assert not Path(kernel.ip).parent.exists(), "the sockets are gone"


def test_a_killed_caller_takes_its_command_and_its_kernel_along(server, tmp_path):
    told = tmp_path / "pid"
    source = notebook(
        tmp_path / "in.ipynb",
        f"import os, time\nopen({str(told)!r}, 'w').write(str(os.getpid()))",
        "time.sleep(600)",
    )
    command = [*COMMAND, "papermill", str(source), "out.ipynb", "--no-progress-bar", "-k", "python3"]
    caller = subprocess.Popen(command, env=server[1], cwd=tmp_path, stderr=subprocess.DEVNULL)
    kernel = int(wait_for(lambda: told.is_file() and told.read_text()))
    assert not gone(kernel)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    wait_for(lambda: gone(kernel))


def test_the_server_ends_with_its_parent_and_leaves_nothing(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    start = (
        f"import os, subprocess\ncommand = {[*COMMAND, 'serve', str(folder / 'socket')]!r}\n"
        "print(subprocess.Popen([*command, str(os.getpid())], stdout=subprocess.DEVNULL).pid)"
    )
    parent = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
    wait_for(lambda: gone(int(parent.stdout)), 120)
    assert not folder.exists()


def test_a_fork_ends_with_whoever_started_the_server(tmp_path):
    """A killed Snakemake leaves no run behind, though its shells, the callers, live on."""
    start = (
        "import os, time\nfrom stppo import preloaded\npreloaded.start(['json'])\n"
        "print(os.environ[preloaded.SERVER], flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    environment = os.environ | {preloaded.SERVER: parent.stdout.readline().strip()}
    command = [*COMMAND, "stppo", "progress", str(tmp_path), "--watch"]
    caller = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert caller.stdout.readline().endswith("no run has recorded anything yet\n")
    parent.kill()
    assert caller.wait(timeout=30) == 128 + signal.SIGKILL
    parent.wait()


def test_without_room_for_a_process_the_caller_does_its_work_itself(tmp_path):
    full = (
        "import os, sys\nfrom stppo import preloaded\n"
        "def fork(): raise BlockingIOError('Resource temporarily unavailable')\n"
        "os.fork = fork\npreloaded.serve(sys.argv[1], os.getppid(), ['json'])"
    )
    server = subprocess.Popen([sys.executable, "-c", full, str(tmp_path / "socket")])
    wait_for((tmp_path / "socket").exists)
    environment = os.environ | {"STPPO_PRELOADED": str(tmp_path / "socket")}
    done = subprocess.run([*COMMAND, "stppo", "--version"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:6]) == (0, "stppo ") and server.poll() is None
    server.kill()


def test_one_thread_may_wait_while_another_asks(server, monkeypatch):
    monkeypatch.setenv(preloaded.SERVER, server[1][preloaded.SERVER])
    with open(os.devnull) as nothing:
        for _ in range(10):
            fork = preloaded.Fork(["stppo", "--version"], streams=[nothing.fileno()] * 3)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(fork.wait)
                asked = wait_for(lambda fork=fork: {fork.poll()} - {None})
            assert asked == {waiting.result()}


def test_a_server_for_the_time_being_leaves_nothing(monkeypatch):
    monkeypatch.setenv(preloaded.SERVER, "/that/before")
    with preloaded.serving(["json"]):
        address = os.environ[preloaded.SERVER]
        wait_for(lambda: os.path.exists(address))
    assert not os.path.exists(os.path.dirname(address))
    assert os.environ[preloaded.SERVER] == "/that/before"
