"""Commands in forks of one process that has imported what they need: a pipeline of many runs imports it once.

    python -m stppo.preloaded serve SOCKET PID   the process that imports and then forks itself, until its parent PID is gone
    python -m stppo.preloaded papermill A B      what `papermill A B` does, in a fork of the process at STPPO_PRELOADED

Where nobody serves, the command is run as it stands. It has the caller's streams, folder and environment, and ends when
the caller does. The kernels that papermill starts are forks too (`preloaded_kernel`). Standard library only, but for what
is preloaded.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from importlib import import_module
from typing import Any, NoReturn

SERVER = "STPPO_PRELOADED"  # environment: where the server listens
KERNEL = "ipykernel_launcher"
PROVISIONER = "stppo-preloaded"  # entry point of `preloaded_kernel`
# Which function is which command.
COMMANDS = {
    "papermill": ("papermill.cli", "papermill"),
    "jupyter-nbconvert": ("nbconvert.nbconvertapp", "main"),
    "stppo": ("stppo.cli", "main"),
    KERNEL: ("ipykernel.kernelapp", "launch_new_instance"),
}
MODULES = (
    "stppo.training.trainer",
    "stppo.training.warm_start",
    "stppo.figures.live",
    "stppo.figures.trajectory_view",
)
INLINE = "module://matplotlib_inline.backend_inline"  # what a kernel sets before matplotlib is imported


def main(argv: list[str]) -> NoReturn:
    """Serve, or run a command in a fork of the server; ends this process with the command's exit status."""
    if argv[:1] == ["serve"]:
        serve(argv[1], int(argv[2]))
        sys.exit(0)
    try:
        running = Fork(argv)
    except OSError:
        os.execvp(argv[0], argv)
    status = running.wait()
    sys.exit(status if status >= 0 else 128 - status)


class Fork:
    """A command that runs in a fork of the server, with the methods of `subprocess.Popen` that Jupyter uses.

    argv: the command; its first word is one of COMMANDS. env, cwd: default this process's. session: leads one of its own,
    as kernels do. OSError where nobody serves.
    """

    stdin = stdout = stderr = None

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        session: bool = False,
    ) -> None:
        self._socket = _connected(os.environ.get(SERVER, ""))
        wish = {"argv": argv, "env": dict(env or os.environ), "cwd": cwd or os.getcwd(), "session": session}
        text = json.dumps(wish).encode()
        socket.send_fds(self._socket, [struct.pack("!Q", len(text))], [0, 1, 2])
        self._socket.sendall(text)
        self._status: int | None = None
        self.pid = self._read()

    def _read(self) -> int:
        data = self._socket.recv(8, socket.MSG_WAITALL)
        if len(data) < 8:
            raise OSError("the process that forks is gone")
        return struct.unpack("!q", data)[0]

    def wait(self, timeout: float | None = None) -> int:
        """Exit status; negative: the signal that ended it."""
        if self._status is None:
            self._socket.settimeout(timeout)
            try:
                self._status = self._read()
            except TimeoutError:
                raise
            except OSError:
                self._status = -signal.SIGKILL
            self._socket.close()
        return self._status

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        if self._status is None:
            with selectors.DefaultSelector() as ready:
                ready.register(self._socket, selectors.EVENT_READ)
                if not ready.select(0):
                    return None
        return self.wait()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _connected(address: str) -> socket.socket:
    """A server that has just been started has a few seconds to listen; where its folder is not, there is none."""
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


def serve(address: str, parent: int) -> None:
    """Import, then fork for each caller, until the parent of this process and all callers are gone.

    address: path of the socket, in a folder of its own, at which callers may wait while this imports.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the callers, and with them what they called
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.environ.setdefault("MPLBACKEND", INLINE)
    for name in (*MODULES, *(module for module, _ in COMMANDS.values())):
        with contextlib.suppress(ImportError):  # whoever needs it is told, in its own process
            import_module(name)
    gc.collect()
    gc.freeze()  # forks share these pages as long as nobody writes to them
    callers: dict[int, socket.socket] = {}
    woken, wake = socket.socketpair()  # by the end of a fork
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    with selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        ready.register(woken, selectors.EVENT_READ)
        while callers or os.getppid() == parent:
            for key, _ in ready.select(1.0):
                if key.fileobj is woken:
                    woken.recv(4096)
                elif key.fileobj is listener:
                    caller = listener.accept()[0]
                    pid = _fork(caller, [listener, *callers.values()])
                    if pid:
                        callers[pid] = caller
                        ready.register(caller, selectors.EVENT_READ, pid)
                else:  # it says nothing, so it is gone
                    ready.unregister(key.fileobj)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGTERM)
            for pid, status in _ended():
                caller = callers.pop(pid)
                with contextlib.suppress(KeyError):
                    ready.unregister(caller)
                with contextlib.suppress(OSError):
                    caller.sendall(struct.pack("!q", status))
                caller.close()
    with contextlib.suppress(OSError):
        os.unlink(address)
        os.rmdir(os.path.dirname(address))


def _ended() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


def _fork(caller: socket.socket, others: list[socket.socket]) -> int:
    """Process number of the fork that does what the caller wishes; 0 where the caller broke off, or there is no room for a
    process, and then the caller's connection ends."""
    caller.settimeout(10)
    streams: list[int] = []
    try:
        head, streams, *_ = socket.recv_fds(caller, 8, 3)
        wish = json.loads(caller.recv(struct.unpack("!Q", head)[0], socket.MSG_WAITALL))
        pid = os.fork()
    except (OSError, ValueError, struct.error):
        for stream in streams:
            os.close(stream)
        caller.close()
        return 0
    if pid == 0:
        try:
            for other in (caller, *others):
                other.close()
            status = _run(wish, streams)
        except BaseException:
            traceback.print_exc()
            status = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(OSError):
        caller.sendall(struct.pack("!q", pid))
    return pid


def _run(wish: dict[str, Any], streams: list[int]) -> int:
    signal.set_wakeup_fd(-1)
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
