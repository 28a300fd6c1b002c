"""Who works in a folder.

A lock is filelock's lease in the file `.lock` of the folder: its owner stands in it, its time of change is a
heartbeat. An owner that is gone from this machine makes room at once, one on another machine of a network
file system when its heartbeat stops.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from pathlib import Path

from filelock import OwnerRecord, SoftFileLease, Timeout

from stppo.files import PART

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
BEAT, PATIENCE = 10.0, 90.0  # seconds between heartbeats, and how long they must be missed


class FolderInUse(OSError):
    """Another process works in this folder, or has taken it over."""


class FolderLock:
    """Sole use of a folder, which is made where it is missing: `with FolderLock(folder) as lock: ...`.

    wait: until a living owner has finished, instead of FolderInUse. beat, patience: as the constants; all who
    use a folder must share the latter.
    """

    def __init__(
        self, folder: Path, wait: bool = False, beat: float = BEAT, patience: float = PATIENCE
    ) -> None:
        self.folder, self.file, self._wait = Path(folder), Path(folder) / LOCK_FILE, wait
        self._lease = SoftFileLease(
            self.file, lease_duration=patience, heartbeat_interval=beat, thread_local=False
        )

    def __enter__(self) -> FolderLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self._lease.owner
        try:
            self._lease.acquire(timeout=0.5, poll_interval=0.1)  # a try removes a dead owner
            if before is not None:
                log.warning("%s: %s is gone, its lock is taken over", self.folder, _name(before))
        except Timeout:
            self._wait_for(self._lease.owner)
        for depth in (f"{PART}*", f"*/*/{PART}*"):  # what a killed owner left unfinished
            for left in self.folder.glob(depth):
                with contextlib.suppress(OSError):
                    left.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        self._lease.release()

    def check(self) -> None:
        """FolderInUse where the folder is another process's, e.g. after this one slept too long."""
        owner = self._lease.owner
        if owner is None or owner.token != self._lease.token:
            raise FolderInUse(
                f"{self.folder} was taken over by {_name(owner)}" if owner else f"{self.file} is gone"
            )

    def _wait_for(self, owner: OwnerRecord | None) -> None:
        refusal = FolderInUse(
            f"{self.folder} is in use by {_name(owner)}: wait for it or end it, or choose another folder"
        )
        if self._wait:
            log.warning("%s; waiting for it", refusal)
            self._lease.acquire(timeout=-1, poll_interval=0.5)
            return
        if owner is not None and _is_here(owner):
            raise refusal
        log.warning("%s: waiting for a sign of life of %s", self.folder, _name(owner))
        last = _beat_of(self.file)
        try:
            self._lease.acquire(timeout=-1, cancel_check=lambda: _beat_of(self.file) not in (None, last))
        except Timeout:
            raise refusal from None


def in_use(folder: Path) -> bool:
    """Whether a process that works in a folder still lives: whether its heart has beaten lately."""
    last = _beat_of(Path(folder) / LOCK_FILE)
    return last is not None and time.time() - last < 3 * BEAT


def _beat_of(file: Path) -> float | None:
    """When the owner last gave a sign of life; None where there is no lock."""
    with contextlib.suppress(OSError), file.open("rb") as opened:  # opening asks a network file system anew
        return os.fstat(opened.fileno()).st_mtime
    return None


def _is_here(owner: OwnerRecord) -> bool:
    """Whether the owner's process number means something here: a container has numbers of its own."""
    with contextlib.suppress(OSError):
        space = os.stat("/proc/self/ns/pid").st_ino
        if owner.hostname == f"{socket.gethostname()}?pidns-{space:x}":
            return True
    return owner.hostname == socket.gethostname()


def _name(owner: OwnerRecord | None) -> str:
    if owner is None:
        return "another process"
    return f"process {owner.pid} on {owner.hostname.partition('?')[0]}"
