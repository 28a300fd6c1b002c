"""Copies of a run's newest checkpoints where another machine finds them.

STPPO_CHECKPOINTS names the place: a folder, or any URL that fsspec knows (`s3://bucket/prefix` with s3fs).
Each copy is a folder NUMBER-HASH, named by the content that it is to have: one that was written in part is
known for what it is, and the one before it, which is kept, is taken."""

from __future__ import annotations

import logging
import os
import posixpath
from pathlib import Path

from stppo.files import content_hash, write_folder
from stppo.training.failures import RunStopped

log = logging.getLogger(__name__)

VARIABLE = "STPPO_CHECKPOINTS"
_KEPT = 2


class Elsewhere:
    """The copies of one run below `url`; `name` tells it from every other run, by its fingerprint."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self._failing = False

    @classmethod
    def asked_for(cls, name: str) -> Elsewhere | None:
        """Where the environment says; None where it says nothing."""
        url = os.environ.get(VARIABLE, "").rstrip("/")
        return cls(url, name) if url else None

    def copies(self) -> list[str]:
        """Paths of the copies, newest first.

        RunStopped, before anything was trained, where the place cannot be reached or written to."""
        try:
            return self._copies()
        except Exception as error:  # each of fsspec's file systems has errors of its own
            raise RunStopped(
                f"{VARIABLE}={self.url} cannot be used ({_said(error)}); nothing is lost: mend the address, "
                f"the credentials or the network and start again, or leave {VARIABLE} out"
            ) from error

    def fetch(self, copies: list[str], folder: Path) -> Path | None:
        """The newest whole copy, now in the checkpoint folder `folder`; None where none is whole. RunStopped
        as `copies`."""
        for copy in copies:
            number, _, content = posixpath.basename(copy).partition("-")
            target = folder / str(int(number))
            try:
                write_folder(target, lambda part, copy=copy, content=content: self._get(copy, content, part))
            except (_DamagedError, FileNotFoundError):  # half written, or removed meanwhile
                log.warning("%s is not whole; the copy before it is taken", copy)
            except Exception as error:
                raise RunStopped(
                    f"checkpoint {copy} cannot be fetched ({_said(error)}); nothing is lost: start again "
                    f"when {self.url} can be reached"
                ) from error
            else:
                log.info("checkpoint fetched from %s", copy)
                return target
        return None

    def store(self, checkpoint: Path) -> None:
        """Copy a checkpoint there, then drop copies that are no longer needed.

        Where that fails a line of the log says so, once, and training goes on: the checkpoint itself is on
        this machine, and the next is copied again."""
        try:
            copies = self._copies()
            copy = f"{self.root}/{int(checkpoint.name):08d}-{content_hash(checkpoint)}"
            self.files.makedirs(copy, exist_ok=True)
            for file in sorted(checkpoint.iterdir()):
                self.files.put_file(str(file), f"{copy}/{file.name}")
            for older in sorted({copy, *copies}, reverse=True)[_KEPT:]:
                self.files.rm(older, recursive=True)
        except Exception as error:
            if not self._failing:
                log.warning(
                    "checkpoint %s is not copied to %s (%s); training goes on, the next one is tried",
                    checkpoint,
                    self.url,
                    _said(error),
                )
            self._failing = True
        else:
            self._failing = False

    def _copies(self) -> list[str]:
        import fsspec

        self.files, place = fsspec.core.url_to_fs(self.url)
        self.root = f"{place}/{self.name}"
        self.files.makedirs(self.root, exist_ok=True)
        self.files.invalidate_cache()  # of listings
        try:
            found = self.files.ls(self.root, detail=False)
        except FileNotFoundError:  # in S3 an empty folder is none
            return []
        named = [path.rstrip("/") for path in found]
        return sorted((p for p in named if posixpath.basename(p).partition("-")[0].isdigit()), reverse=True)

    def _get(self, copy: str, content: str, part: Path) -> None:
        for path in self.files.ls(copy, detail=False):
            self.files.get_file(path, str(part / posixpath.basename(path)))
        if content_hash(part) != content:
            raise _DamagedError


class _DamagedError(Exception):
    """What was fetched is not what its name says."""


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
