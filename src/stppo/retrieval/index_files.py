"""What the folders of all retrieval indexes share: written whole or not at all, with a manifest, bound to a
corpus."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from stppo.files import parse_json
from stppo.retrieval.documents import CorpusFile

MANIFEST, OFFSETS = "manifest.json", "documents.npy"
_SAMPLES, _SAMPLE_BYTES = 64, 65_536


def fingerprint(path: str | Path) -> str:
    """SHA-256 of a file's size and of 64 blocks of 64 KiB spread over it: all of it up to 4 MiB.

    Reading an index of many gigabytes at each start would take minutes; a truncated file is always found,
    another file nearly always, a single changed byte in a large one mostly not."""
    size = os.path.getsize(path)
    digest = hashlib.sha256(str(size).encode())
    blocks = -(-size // _SAMPLE_BYTES)
    with open(path, "rb") as file:
        for block in sorted({i * (blocks - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)} if blocks else ()):
            file.seek(block * _SAMPLE_BYTES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A folder to fill beside `out`, moved to it at the end: whoever opens `out` finds all of it or nothing.

    FileExistsError where `out` is there already or another process makes it; what an exception or an earlier,
    killed process leaves is removed."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.building")
    lock = FileLock(f"{scratch}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise FileExistsError(
            f"{out}: another process makes it; wait for it or name another folder"
        ) from None
    try:
        if out.exists():
            raise FileExistsError(f"{out}: exists already; remove it or name another folder")
        shutil.rmtree(scratch, ignore_errors=True)
        staged = scratch / "index"
        staged.mkdir(parents=True)
        yield staged
        os.rename(staged, out)
    except OSError as error:
        if error.errno is None and "requested and" in str(error):  # what NumPy says of a full disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out)) from error
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def write_manifest(folder: Path, corpus: str | Path, offsets: np.ndarray, **facts: Any) -> dict[str, Any]:
    """Where each document begins, and the manifest: the corpus, the facts, fingerprints of the folder's
    files."""
    np.save(folder / OFFSETS, offsets)
    manifest = {
        **facts,
        "documents": len(offsets) - 1,
        "corpus": str(Path(corpus).resolve()),
        "corpus_fingerprint": fingerprint(corpus),
        "files": {path.name: fingerprint(path) for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """FileNotFoundError where the folder holds no index, ValueError where a file of it is not what was
    written."""
    folder = Path(folder)
    again = "remove the folder and run `stppo retriever index` again"
    try:
        manifest = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        for name in ("kind", "documents", "corpus", "corpus_fingerprint", "untitled"):
            manifest[name]
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{folder}: no index; make one with `stppo retriever index`") from None
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder}/{MANIFEST} is damaged ({error!r}); {again}") from error
    for name, expected in files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file() or fingerprint(path) != expected:
            raise ValueError(f"{path} is missing or damaged; {again}")
    return manifest


def open_corpus(folder: str | Path, manifest: dict[str, Any], corpus: str | Path | None = None) -> CorpusFile:
    """The documents of an index; `corpus` says where the file is now, if it moved.

    FileNotFoundError where it is gone, ValueError where it is not the file that was indexed.
    """
    path = Path(corpus or manifest["corpus"])
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: its corpus {path} is gone; say where it is with corpus=FILE")
    if fingerprint(path) != manifest["corpus_fingerprint"]:
        raise ValueError(f"{path} is not the corpus that {folder} was made from; index it again")
    return CorpusFile(path, np.load(Path(folder) / OFFSETS, mmap_mode="r"), manifest["untitled"])
