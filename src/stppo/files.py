"""Where relative paths start and how files are written: what training and analysis share about folders."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def repository_path(path: str | Path) -> Path:
    """A relative path taken from the repository's root, wherever in it the process runs.

    The root is the nearest folder above the working directory that holds a Snakefile or
    pyproject.toml; outside a repository the path stays as it is.
    """
    path = Path(path)
    if path.is_absolute() or path.exists():
        return path
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "Snakefile").is_file() or (folder / "pyproject.toml").is_file():
            return folder / path
    return path


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, then move it to `path`: a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Indented JSON, atomically."""
    write_atomically(
        path, lambda part: part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    )
