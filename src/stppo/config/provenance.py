"""What a result depends on: code, configuration, machine. Standard library only, quick to import."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import platform
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "stppo"
PACKAGE_DIR = Path(__file__).resolve().parents[1]
# From the top of the repository.
RESULT_PATHS = ("src", "configs", "notebooks", "Snakefile", "pyproject.toml")
PACKAGES = ("torch", "transformers", "numpy", "pandas", "pyarrow", "hydra-core", "bm25s", "datasets")


def _module_name(file: Path, package_dir: Path) -> str:
    parts = file.resolve().relative_to(package_dir.resolve()).with_suffix("").parts
    return ".".join([PACKAGE, *parts]).removesuffix(".__init__")


@functools.cache
def _imports(source: str, module: str, is_package: bool) -> set[str]:
    return _imported(ast.parse(source, module), module, is_package)


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Dotted names inside the package that a syntax tree imports, also inside functions.

    `from a import b` yields both `a` and `a.b`: whether b is a module is for the caller to find out.
    """
    return {name for name in _imported(tree, module, is_package) if name.split(".")[0] == PACKAGE}


def _imported(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def _with_parents(name: str, package_dir: Path, folders: Iterable[Path] = ()) -> dict[str, Path]:
    """The modules that importing a dotted name runs, with their files: every parent package, then the module
    itself.

    folders: where modules outside the package are looked for.
    """
    parts = name.split(".")
    ours = parts[0] == PACKAGE
    found: dict[str, Path] = {}
    for folder in [package_dir] if ours else folders:
        for end in range(1, len(parts) + 1):
            base = folder.joinpath(*parts[ours:end])
            for file in (base / "__init__.py", base.with_suffix(".py")):
                if file.is_file():
                    found.setdefault(".".join(parts[:end]), file)
    return found


def imported_files(entries: Iterable[str | Path], package_dir: Path = PACKAGE_DIR) -> dict[str, Path]:
    """Every module of the package that the entries import, directly or not, as name -> file, sorted.

    An entry is a dotted name (`stppo.training.trainer`; a name inside a module such as a `_target_`
    counts as its module) or the path of a Python file. ValueError names an entry that is neither.

    An entry outside the package (`my_module.MyRatio`) brings its file, what that imports from its own folder,
    and what it imports from the package; of an installed library nothing is read."""
    pending: dict[str, Path] = {}
    folders: list[Path] = []
    found: dict[str, Path] = {}
    for entry in entries:
        if isinstance(entry, Path) or str(entry).endswith(".py"):
            if not Path(entry).is_file():
                raise ValueError(f"no such source file: {entry}")
            entry = _module_name(Path(entry), package_dir)
        if str(entry).split(".")[0] != PACKAGE:
            if folder := _own_folder(str(entry)):
                folders.append(folder)
                pending |= _with_parents(str(entry), package_dir, [folder])
            continue
        modules = _with_parents(str(entry), package_dir)
        if not modules or (len(modules) == 1 and str(entry) != PACKAGE):
            raise ValueError(f"no module of {PACKAGE} is named {entry}")
        pending |= modules
    while pending:
        module, file = pending.popitem()
        if module in found:
            continue
        found[module] = file
        for name in _imports(file.read_text(encoding="utf-8"), module, file.name == "__init__.py"):
            pending |= _with_parents(name, package_dir, folders)
    return dict(sorted(found.items()))


def _spec(target: str) -> ModuleSpec | None:
    """Where Python would find a dotted name's outermost module, without importing it."""
    try:
        return find_spec(target.split(".")[0])
    except (ImportError, ValueError):
        return None


def _own_folder(target: str) -> Path | None:
    """The folder that holds the source of a class outside the package; None where a library or Python brings
    it."""
    spec = _spec(target)
    if spec is None:
        return None
    places = [spec.origin] if spec.has_location else []
    places += spec.submodule_search_locations or []
    place = next((Path(p).resolve() for p in places if p), None)
    if place is None or _installed(place):
        return None
    return place.parents[1] if place.name == "__init__.py" else place.parent


def _installed(place: Path) -> bool:
    paths = sysconfig.get_paths()
    libraries = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return {"site-packages", "dist-packages"} & set(place.parts) != set() or any(
        library in place.parents for library in libraries
    )


@functools.cache
def _libraries(entries: tuple[str, ...]) -> list[str]:
    """`name==version` of the installed distributions that entries outside the package and own folders come
    from."""
    outside = {entry.split(".")[0] for entry in entries if entry.split(".")[0] != PACKAGE}
    outside = {name for name in outside if _own_folder(name) is None}
    if not outside:
        return []
    brought = metadata.packages_distributions()
    return sorted({f"{d}=={metadata.version(d)}" for name in outside for d in brought.get(name, ())})


@functools.cache
def _syntax(source: str, name: str) -> str:
    """Dump of the syntax tree without docstrings; comments, layout and line numbers are not in it."""
    tree = ast.parse(source, name)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:]
    return ast.dump(tree)


def _notebook_code(notebook: Path) -> list[str]:
    """Syntax of each code cell; a cell with IPython magics, which is no Python, counts as its text.

    The cell tagged `parameters` does not count: whoever executes the notebook sets them.
    """
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = []
    for i, cell in enumerate(cells):
        if cell["cell_type"] != "code" or "parameters" in cell.get("metadata", {}).get("tags", []):
            continue
        source = "".join(cell["source"])
        try:
            code.append(_syntax(source, f"{notebook} cell {i}"))
        except SyntaxError:
            code.append(source)
    return code


def notebook_imports(notebook: str | Path) -> list[str]:
    """Dotted names of the package that a notebook's code cells import, sorted: entries for `code_hash`.

    ValueError names a cell that is not plain Python: what it imports cannot be known.
    """
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    found: set[str] = set()
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            try:
                tree = ast.parse("".join(cell["source"]))
            except SyntaxError as error:
                raise ValueError(
                    f"{notebook} cell {i} line {error.lineno}: {error.msg}; use plain Python"
                ) from error
            found |= imported_modules(tree, "", False)
    return sorted(found)


def code_hash(
    entries: Iterable[str | Path] | str | Path,
    notebook: str | Path | None = None,
    package_dir: Path = PACKAGE_DIR,
) -> str:
    """Hash (16 hex digits) of the syntax of all modules that the entries import, and of a notebook's code.

    Comments, docstrings and layout do not count, so editing them re-trains nothing; a template beside a
    module (`report.html.j2` of `report.py`) and its C++ (`compiled.cpp`) count as their text. The hash
    depends on the minor version of Python, whose syntax trees differ. See `imported_files` for what an entry
    is; one that an installed library brings counts as that library's name and version."""
    entries = [entries] if isinstance(entries, (str, Path)) else list(entries)
    digest = hashlib.sha256()
    for library in _libraries(tuple(str(entry) for entry in entries if not str(entry).endswith(".py"))):
        digest.update(f"{library}\0".encode())
    for module, file in imported_files(entries, package_dir).items():
        digest.update(f"{module}\0{_syntax(file.read_text(encoding='utf-8'), str(file))}\0".encode())
        for beside in (*sorted(file.parent.glob(f"{file.stem}.*.j2")), file.with_suffix(".cpp")):
            if beside.is_file():
                digest.update(beside.read_bytes())
    for cell in _notebook_code(Path(notebook)) if notebook else []:
        digest.update(f"{cell}\0".encode())
    return digest.hexdigest()[:16]


def config_targets(config: Any) -> list[str]:
    """Every `_target_` in a composed config, sorted: code that no import statement names."""
    if isinstance(config, Mapping):
        own = [str(config["_target_"])] if "_target_" in config else []
        return sorted({*own, *(name for value in config.values() for name in config_targets(value))})
    if isinstance(config, (list, tuple)):
        return sorted({name for value in config for name in config_targets(value)})
    return []


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=PACKAGE_DIR, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def git_state() -> dict[str, Any]:
    """`git_commit` and `git_dirty` of the source tree; both None where it is not in a git repository.

    Dirty means: uncommitted changes, untracked files included, in anything that a result depends on
    (`RESULT_PATHS`), and in nothing else.
    An installed copy inside someone else's repository is not that repository's work: only a tree
    that tracks this package counts.
    """
    tracked = _git("ls-files", "--error-unmatch", "__init__.py")
    commit = _git("rev-parse", "HEAD") if tracked else None
    paths = [f":(top){path}" for path in RESULT_PATHS]
    status = _git("status", "--porcelain", "--", *paths) if commit else None
    return {"git_commit": commit, "git_dirty": None if status is None else bool(status)}


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


def _gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def versions() -> dict[str, str]:
    """Version of Python and of each main package that is installed."""
    found = {"python": platform.python_version()}
    for package in (PACKAGE, *PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def torches(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Releases of torch that made runs, also their resumed parts, sorted. records: of runs, or what
    `environment` gives."""
    parts = [part for record in records for part in (record, *(record.get("resumed_on") or ()))]
    said = [part["versions"] for part in parts if isinstance(part.get("versions"), Mapping)]
    return sorted({str(versions["torch"]).partition("+")[0] for versions in said if "torch" in versions})


def other_torch(record: Mapping[str, Any]) -> str | None:
    """What to say of a record that names another release of torch than the one here; None of any other."""
    here, made_with = torches([{"versions": versions()}]), torches([record])
    if not here or set(made_with) <= set(here):
        return None
    return (
        f"made with torch {' and '.join(made_with)}, here is {here[0]}: numbers may differ by rounding, "
        "which training amplifies"
    )


def usable_cores() -> int:
    """Cores that this process may use; a scheduler or `taskset` can leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> dict[str, Any]:
    """Processor, usable cores, memory in GiB, GPU name or None, platform."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": _memory_gib(),
        "gpu": _gpu(),
        "platform": platform.platform(),
    }


def environment() -> dict[str, Any]:
    """`versions`, `hardware`, `git_commit`, `git_dirty`: the fields of that name in a run record."""
    return {"versions": versions(), "hardware": hardware(), **git_state()}
