"""Builds C++ beside this package with the machine's own compiler, and keeps what was built in a cache
folder."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from stppo.files import cache_folder

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


class CannotCompile(RuntimeError):
    """Why there is no compiled code, and the remedy, in one line."""


@functools.cache
def compiled_library(source: Path) -> ctypes.CDLL:
    """The shared library of a C++ file; built in some seconds where the cache folder does not hold it. Raises
    CannotCompile."""
    compiler = _compiler()
    content = source.read_bytes() + " ".join([*compiler, *FLAGS, _processor()]).encode()
    folder = cache_folder()
    file = folder / f"{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    try:
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:  # several runs may build at once
                part = Path(scratch) / file.name
                _build([*compiler, *FLAGS, "-o", str(part), str(source)])
                os.replace(part, file)
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise CannotCompile(
            f"compiled code cannot be kept in {folder} ({error.strerror or error}); set STPPO_CACHE_DIR to a "
            "folder of your own"
        ) from error


def _build(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"the C++ compiler {command[0]} does not run; install g++, or set CXX") from error
    if done.returncode:
        said = next((line.strip() for line in done.stderr.splitlines() if "error" in line), "no message")
        raise CannotCompile(f"the C++ compiler {command[0]} failed ({said}); set CXX to another one")


def _compiler() -> list[str]:
    own = os.environ.get("CXX")
    if own:
        return shlex.split(own)
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise CannotCompile("there is no C++ compiler; install g++, or set CXX")


def _processor() -> str:
    """What -march=native depends on: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
