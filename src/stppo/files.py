"""Files: where relative paths start, how they are written whole, and how text that others wrote is made
safe."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

PART = ".part-"  # begins the name of a file that is not whole yet; one that stays is of a killed process


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
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{PART}{path.name}.", suffix=path.suffix)
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:  # whoever wrote may not say where, and the temporary name tells nobody anything
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        Path(name).unlink(missing_ok=True)


_REMEDIES = {
    errno.EROFS: "choose another place (--out), or work in a folder that can be written",
    errno.ENOSPC: "make room and run the same command again",
    errno.EEXIST: "a file is in the way; move it, or choose another place",
    errno.ENOTDIR: "a file is in the way; move it, or choose another place",
}


def told(error: Exception) -> str:
    """The message of an error; one of the system says where, what, and what to do."""
    if not isinstance(error, OSError) or error.errno is None or error.strerror is None:
        return str(error)
    place = "" if error.filename is None else f"{error.filename}: "
    remedy = f"; {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else ""
    return f"{place}{error.strerror}{remedy}"


def write_folder(
    folder: Path, write: Callable[[Path], None], is_whole: Callable[[Path], bool] = Path.is_dir
) -> None:
    """Let `write` fill a folder beside `folder`, then move it there. One that is whole stays, such as another
    process's that was quicker; a damaged one makes room."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=PART))
    try:
        write(part)
        part.chmod(0o755)
        for file in (path for path in part.rglob("*") if path.is_file()):
            file.chmod(0o644)
        if folder.exists() and not is_whole(folder):
            shutil.rmtree(folder)
        try:
            part.rename(folder)
        except OSError:
            if not is_whole(folder):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_json(path: Path, content: Any) -> None:
    """Indented JSON, atomically."""
    write_atomically(
        path, lambda part: part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    )


_SETTLED_SECONDS = 2  # a file changed this recently may change again without another time of change


def content_hash(path: str | Path) -> str:
    """Hash (16 hex digits) of a file's bytes, or of the names and bytes of a folder's files but hidden ones.

    That of a file is kept in the user's cache, by place, size and times of change, so that a large corpus is
    read once."""
    path = Path(path).resolve()
    if path.is_dir():
        inside = (file for file in path.rglob("*") if file.is_file())
        names = {file.relative_to(path).as_posix(): file for file in inside}
        shown = sorted(name for name in names if not any(part.startswith(".") for part in name.split("/")))
        content = "".join(f"{name}\0{content_hash(names[name])}\0" for name in shown)
        return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    state = path.stat()
    known = [state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    kept = cache_folder() / "content" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    try:
        of, found = json.loads(kept.read_text(encoding="utf-8"))
        if of == known and isinstance(found, str):
            return found
    except (OSError, ValueError, TypeError):
        pass
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    if time.time() - max(state.st_mtime, state.st_ctime) > _SETTLED_SECONDS:
        with contextlib.suppress(OSError):  # no room or no right there: it is computed again
            write_json(kept, [known, found])
    return found


def cache_folder() -> Path:
    """STPPO_CACHE_DIR, or `stppo` in the user's folder for caches."""
    own = os.environ.get("STPPO_CACHE_DIR")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stppo"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, for people."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# ---- text of others: corpora, records, replies of servers, run folders --------------------------
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """The text with lone surrogates, which no encoding, tokenizer or file can hold, as U+FFFD."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def parse_json(text: str | bytes) -> Any:
    """What a JSON text holds, its strings clean.

    json.JSONDecodeError for whatever is no JSON, too deep or a number too long; UnicodeDecodeError for bytes
    that are not UTF-8."""
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        value = json.loads(text)
        escaped = "\\ud" in text or "\\uD" in text or _LONE_SURROGATE.search(text)
        return _clean(value) if escaped else value
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except ValueError as error:  # Python reads no more than some thousand digits
        raise json.JSONDecodeError(str(error), "", 0) from None


_MOST_YAML = 1 << 20  # bytes; a run's config has three thousand
_DEEPEST_YAML = 100  # collections in collections; ours have about ten


def read_yaml(path: Path) -> Any:
    """What a file of somebody's run folder holds. ValueError where it is no YAML, longer than a megabyte,
    nested deeper than any config, which takes the parser minutes, or has aliases, with which a short file can
    stand for an endless one."""
    with path.open("rb") as file:
        text = file.read(_MOST_YAML + 1)
    if len(text) > _MOST_YAML:
        raise ValueError(f"longer than {_MOST_YAML} bytes")
    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it has aliases")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST_YAML:
                raise ValueError(f"nested more than {_DEEPEST_YAML} deep")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML ({' '.join(str(error).split())[:200]})") from error


def printable(text: str, most: int | None = None) -> str:
    """The text on one line without characters that steer a terminal; of one longer than `most` its ends."""
    line = " ".join(text.split())
    shown = "".join(c if c.isprintable() else "\ufffd" for c in line)
    return shown if most is None or len(shown) <= most else f"{shown[: most // 2]} ... {shown[-most // 2 :]}"


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {clean(name): _clean(item) for name, item in value.items()}
    return value
