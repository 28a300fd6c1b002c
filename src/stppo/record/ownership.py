"""Who works in a folder, and whether whoever started this process still lives. Standard library only.

A lock is a file `.lock` in the folder: the kernel's lock on it (flock) where the file system has one, its owner as JSON
inside, and its time of change as a heartbeat. The kernel frees its lock when the owner dies. Where it does not reach,
on another machine of a network file system, an owner counts as dead when its heartbeat stops.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

from stppo.files import PART

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
PARENT = "STPPO_PARENT"  # environment: the process without which a run need not go on


class FolderInUse(OSError):
    """Another process works in this folder, or has taken it over."""


def _machine() -> str:
    """This boot of this kernel and, in a container, its process numbers: they mean something within it alone."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str | None:
    """When a process started, in ticks since boot, which tells it from a later one of its number; None if unknown.

    ProcessLookupError where there is none.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        os.kill(pid, 0) if pid != os.getpid() else None
        return None
    if fields[0] in "ZX":  # ended, though nobody has asked for its exit code yet
        raise ProcessLookupError(pid)
    return fields[19]


def _lives(pid: int, started: str | None) -> bool:
    try:
        return _started(pid) == started or started is None
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's, so it is there
        return True


def in_use(folder: Path, patience: float = 90) -> bool:
    """Whether a process that works in a folder still lives; of one on another machine, whether its heartbeat is younger
    than `patience` seconds."""
    file = Path(folder) / LOCK_FILE
    owner = _owner(file)
    if owner is None:
        return False
    if owner.get("machine") == _machine():
        return _lives(int(owner["pid"]), owner.get("process_started"))
    with contextlib.suppress(OSError):
        return time.time() - _beat_of(file) / 1e9 < patience
    return False


class FolderLock:
    """Sole use of a folder, which is made where it is missing: `with FolderLock(folder) as lock: ...`.

    wait: until a living owner has finished, instead of FolderInUse. beat: seconds between heartbeats; patience: how long
    a heartbeat on another machine must stand still before its owner counts as dead.
    """

    def __init__(self, folder: Path, wait: bool = False, beat: float = 10, patience: float = 90) -> None:
        self.folder, self.file = Path(folder), Path(folder) / LOCK_FILE
        self._wait, self._beat, self._patience = wait, beat, patience
        self._token = uuid.uuid4().hex
        self._handle: int | None = None
        self._over = threading.Event()

    def __enter__(self) -> FolderLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        told = False
        while True:
            try:
                self._handle = self._claim()
                break
            except FolderInUse as error:
                if not self._wait:
                    raise
                if not told:
                    log.warning("%s; waiting for it", error)
                told = True
                time.sleep(0.5)
        _HELD.add(self)
        for depth in (f"{PART}*", f"*/*/{PART}*"):  # what a killed owner left unfinished
            for left in self.folder.glob(depth):
                with contextlib.suppress(OSError):
                    left.unlink()
        threading.Thread(target=self._keep_beating, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        _HELD.discard(self)
        if self._is_ours():
            self.file.unlink(missing_ok=True)
        self._close()

    def check(self) -> None:
        """FolderInUse where the folder is no longer this process's, e.g. after it slept and another took over."""
        if not self._is_ours():
            owner = _owner(self.file)
            raise FolderInUse(
                f"{self.folder} was taken over by {_name(owner)}" if owner else f"{self.file} is gone"
            )

    def _is_ours(self) -> bool:
        return (_owner(self.file) or {}).get("token") == self._token

    def _claim(self) -> int:
        """The open lock file with this process in it."""
        while True:
            handle = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                by_kernel = _flock(handle)
                if not _is_at(handle, self.file):  # its owner removed it while we opened it
                    os.close(handle)
                    continue
                owner = _owner(self.file)
                if owner is not None and self._is_alive(owner, by_kernel):
                    raise FolderInUse(self._refusal(owner))
                content = {
                    "token": self._token,
                    "machine": _machine(),
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "process_started": _started(os.getpid()),
                    "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                }
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(content).encode(), 0)
                os.fsync(handle)
                if not by_kernel:
                    time.sleep(0.2)  # the last of several who wrote at once has it
                    self.check()
                if owner is not None:
                    log.warning("%s: %s is gone, its lock is taken over", self.folder, _name(owner))
                return handle
            except BlockingIOError:
                refusal = self._refusal(_owner(self.file))
                os.close(handle)
                raise FolderInUse(refusal) from None
            except BaseException:
                os.close(handle)
                raise

    def _is_alive(self, owner: dict[str, Any], by_kernel: bool) -> bool:
        """Whether the owner that the file names still lives, when the kernel's lock did not say so."""
        if owner.get("machine") == _machine():
            return not by_kernel and _lives(int(owner["pid"]), owner.get("process_started"))
        first, until = _beat_of(self.file), time.monotonic() + self._patience
        log.warning(
            "%s: waiting up to %.0f s for a sign of life of %s", self.folder, self._patience, _name(owner)
        )
        while time.monotonic() < until:
            if _beat_of(self.file) != first:
                return True
            time.sleep(min(1, self._patience / 10))
        return False

    def _refusal(self, owner: dict[str, Any] | None) -> str:
        return f"{self.folder} is in use by {_name(owner)}: wait for it or end it, or choose another folder"

    def _keep_beating(self) -> None:
        while not self._over.wait(self._beat):
            try:
                os.utime(self._handle)
            except (OSError, TypeError):  # a full disk or a lost server: whoever writes next is told
                continue

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


_HELD: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """A forked child shares the open file, and would hold the kernel's lock after its parent's death."""
    for lock in list(_HELD):
        lock._close()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _flock(handle: int) -> bool:
    """Take the kernel's lock; False where the file system has none. BlockingIOError where another process holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _is_at(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


def _owner(file: Path) -> dict[str, Any] | None:
    """Whom a lock file names; None where it names nobody, as after a kill amid its writing."""
    try:
        owner = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and isinstance(owner.get("pid"), int) else None


def _beat_of(file: Path) -> int:
    with file.open("rb") as opened:  # opening asks a network file system anew
        return os.fstat(opened.fileno()).st_mtime_ns


def _name(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "another process"
    return f"process {owner['pid']} on {owner.get('host')} (since {owner.get('since')})"


def announce_parent() -> None:
    """Name this process, in the environment of those that it starts, as the one without which runs stop.

    One that is named already stays, except another machine's, as in a job of a cluster.
    """
    if os.environ.get(PARENT, "").partition(" ")[0] != _machine():
        os.environ[PARENT] = f"{_machine()} {os.getpid()} {_started(os.getpid()) or ''}"


def is_orphan() -> bool:
    """Whether the process that `announce_parent` named is gone; never where none was, as in a run under nohup."""
    machine, _, process = os.environ.get(PARENT, "").partition(" ")
    pid, _, started = process.partition(" ")
    return machine == _machine() and pid.isdigit() and not _lives(int(pid), started or None)
