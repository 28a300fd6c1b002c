"""Jobs in forks of one process that has imported what they need: importing takes longer than many a job.

    python -m stppo.preloaded serve SOCKET PID [MODULE ...]    imports, then forks while PID lives
    python -m stppo.preloaded papermill A B                    `papermill A B` in such a fork

Where nobody serves at STPPO_PRELOADED, the command is run as it stands. A fork has its caller's streams,
folder and environment, and ends when the caller does, or whoever started the server. The jobs of Snakemake
on this machine, their notebooks' kernels (`preloaded_kernel`) and the runs of `training.campaign` are such
forks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn

SERVER = "STPPO_PRELOADED"  # environment: where the server listens
KERNEL, JOB = "ipykernel_launcher", "stppo-job"
PROVISIONER = "stppo-preloaded"  # entry point of `preloaded_kernel`
# Which function is which command.
COMMANDS = {
    "papermill": ("papermill.cli", "papermill"),
    "jupyter-nbconvert": ("nbconvert.nbconvertapp", "main"),
    "stppo": ("stppo.cli", "main"),
    JOB: ("stppo.training.campaign", "job"),
    KERNEL: ("ipykernel.kernelapp", "launch_new_instance"),
}
TRAINING = ("stppo.training.run", "stppo.training.warm_start", "stppo.training.campaign")
NOTEBOOKS = ("stppo.figures.live", "stppo.figures.trajectory_view")
INLINE = "module://matplotlib_inline.backend_inline"  # what a kernel sets before matplotlib is imported
_WORD = struct.Struct("!q")


def main(argv: list[str]) -> NoReturn:
    """Serve, or run a command in a fork of the server; ends this process with the command's exit status."""
    if argv[:1] == ["serve"]:
        serve(argv[1], int(argv[2]), argv[3:])
        sys.exit(0)
    try:
        running = Fork(argv)
    except OSError:
        os.execvp(argv[0], argv)
    status = running.wait()
    sys.exit(status if status >= 0 else 128 - status)


def start(modules: Sequence[str] = ()) -> subprocess.Popen:
    """A server for this process and all that it starts, which find it in the environment.

    modules: to import, whose `warm_up` is called where they have one; by default those of every command.
    """
    address = os.environ[SERVER] = os.path.join(tempfile.mkdtemp(prefix="stppo-"), "socket")
    command = [sys.executable, "-m", "stppo.preloaded", "serve", address, str(os.getpid())]
    return subprocess.Popen([*command, *modules])


@contextlib.contextmanager
def serving(modules: Sequence[str] = ()) -> Iterator[None]:
    """A server for the time being; one that this process had before is its own again afterwards."""
    before = os.environ.pop(SERVER, None)
    server = start(modules)
    address = os.environ[SERVER]
    try:
        yield
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)
        os.environ.pop(SERVER, None)
        if before is not None:
            os.environ[SERVER] = before


class Fork:
    """A command that runs in a fork of the server, with the methods of `subprocess.Popen` that Jupyter uses.

    argv: the command; its first word is one of COMMANDS. env, cwd, streams (standard ones): default this
    process's. session: leads one of its own, as kernels do. OSError where nobody serves.
    """

    stdin = stdout = stderr = None

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        session: bool = False,
        streams: Sequence[int] = (0, 1, 2),
    ) -> None:
        self._status: int | None = None
        self._reading = threading.RLock()  # one thread may wait while another asks or ends
        self._socket = _connected(os.environ.get(SERVER, ""))
        wish = {"argv": argv, "env": dict(env or os.environ), "cwd": cwd or os.getcwd(), "session": session}
        text = json.dumps(wish).encode()
        try:
            socket.send_fds(self._socket, [_WORD.pack(len(text))], list(streams))
            self._socket.sendall(text)
            self.pid = _read(self._socket)
        except BaseException:
            self._socket.close()
            raise

    def wait(self, timeout: float | None = None) -> int:
        """Exit status; negative: it was killed."""
        with self._reading:
            if self._status is None:
                self._socket.settimeout(timeout)
                try:
                    self._status = _read(self._socket)
                except TimeoutError:
                    raise
                except OSError:
                    self._status = -signal.SIGKILL
                self._socket.close()
            return self._status

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        if not self._reading.acquire(blocking=False):
            return self._status  # another thread waits for it
        try:
            if self._status is None:
                with selectors.DefaultSelector() as ready:
                    ready.register(self._socket, selectors.EVENT_READ)
                    if not ready.select(0):
                        return None
            return self.wait()
        finally:
            self._reading.release()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _read(connection: socket.socket) -> int:
    data = connection.recv(_WORD.size, socket.MSG_WAITALL)
    if len(data) < _WORD.size:
        raise OSError("the process at the other end is gone")
    return _WORD.unpack(data)[0]


def _connected(address: str) -> socket.socket:
    """A server that was just started has a few seconds to listen; where its folder is not, there is none."""
    until = time.monotonic() + 5
    while True:
        found = socket.socket(socket.AF_UNIX)
        try:
            found.connect(address)
            return found
        except OSError:
            found.close()
            if time.monotonic() > until or not os.path.isdir(os.path.dirname(address)):
                raise
        time.sleep(0.05)


def serve(address: str, parent: int, modules: Sequence[str] = ()) -> None:
    """Import, then fork for each caller, until the parent of this process is gone.

    address: path of the socket, in a folder of its own, at which callers may wait while this imports.
    """
    modules = modules or [*TRAINING, *NOTEBOOKS, *(module for module, _ in COMMANDS.values())]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the callers, and with them what they called
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork becomes a zombie
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.environ.setdefault("MPLBACKEND", INLINE)
    for name in modules:
        with contextlib.suppress(ImportError):  # whoever needs it is told, in its own process
            getattr(import_module(name), "warm_up", lambda: None)()
    gc.collect()
    gc.freeze()  # forks share these pages as long as nobody writes to them
    listener.settimeout(1.0)
    server = os.getpid()
    while os.getppid() == parent:
        with contextlib.suppress(OSError):  # no caller, or no room for a process: its connection ends
            caller, _ = listener.accept()
            with caller:
                if os.fork() == 0:
                    listener.close()
                    _serve(caller, server)
    with contextlib.suppress(OSError):
        os.unlink(address)
        os.rmdir(os.path.dirname(address))


def _serve(caller: socket.socket, server: int) -> NoReturn:
    """In a fork: do what the caller wishes, tell it the exit status and end; end when the caller does."""
    status, told = 1, False
    try:
        head, streams, *_ = socket.recv_fds(caller, _WORD.size, 3)
        wish = json.loads(caller.recv(_WORD.unpack(head)[0], socket.MSG_WAITALL))
        caller.sendall(_WORD.pack(os.getpid()))
        told = True
        threading.Thread(target=_end_with, args=(caller, server), daemon=True).start()
        status = _run(wish, streams)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            if told:  # else it would take the status for the process's number
                caller.sendall(_WORD.pack(status))
        os._exit(status)


def _end_with(caller: socket.socket, server: int) -> None:
    """End this process when its caller does, or the server, and so whoever started that."""
    caller.settimeout(1.0)
    while os.getppid() == server:
        with contextlib.suppress(TimeoutError):
            with contextlib.suppress(ConnectionError):
                caller.recv(1)  # it says nothing more, so it is gone
            break
    os.kill(os.getpid(), signal.SIGTERM)


def _run(wish: dict[str, Any], streams: list[int]) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, number in zip(streams, (0, 1, 2), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(wish["cwd"])
    os.environ.clear()
    os.environ.update(wish["env"], JUPYTER_DEFAULT_PROVISIONER_NAME=PROVISIONER)
    if wish["session"]:
        os.setsid()
        os.environ["JPY_PARENT_PID"] = str(os.getppid())  # without which a kernel ends
    sys.argv = wish["argv"]
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as shown:  # its name in `top`, on Linux
        shown.write(sys.argv[0][:15])
    module, function = COMMANDS[sys.argv[0]]
    try:
        getattr(import_module(module), function)()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
