"""A folder named by what it holds, that processes share while they need it."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


class SharedFolder:
    """`path`: a folder in `root` with what `write` puts into the folder that it is called with.

    Its name is a hash of names and contents, so the same content has the same path in every process and at
    every time. It goes with the last process that closes it; a process that is killed leaves it to the next
    one that wants it."""

    def __init__(self, root: Path, write: Callable[[Path], None]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=root, prefix=".part-"))
        try:
            write(made)
            self.path = root / _content(made)
            self._lock = _shared_lock(root / f".{self.path.name}.lock")
            if not self.path.exists():
                try:
                    os.rename(made, self.path)
                except OSError:  # another process was quicker
                    if not self.path.is_dir():
                        raise
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder unless another process uses it."""
        if self._lock is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked process may hold the file open
            os.close(self._lock)
            self._lock = None


def _shared_lock(file: Path) -> int | None:
    """Held by whoever uses the folder; None on a file system without locks, where the folder then stays.

    The file stays too: a lock on one that another process has unlinked would lock nothing.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
    except OSError:
        os.close(handle)
        return None
    return handle


def _content(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\n{file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
