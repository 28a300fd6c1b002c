"""The layers of the package, checked on its source: nothing is imported."""

import ast
from pathlib import Path

import pytest

from stppo.provenance import PACKAGE_DIR, imported_modules, module_file

# What each part of the package may import of the others; a part is a sub-package or a module.
FLOOR = {"world", "retrieval", "objectives", "trajectories", "checks", "foreign"}
ALLOWED = {
    "__init__": set(),
    "schema": set(),
    "files": set(),
    "foreign": set(),
    "waiting": set(),
    "ownership": {"files"},
    "config_files": set(),
    "algorithms": {"config_files"},
    "checks": set(),
    "provenance": set(),
    "interact": set(),
    "trajectories": set(),
    "objectives": {"trajectories", "checks"},
    "oracle": {"objectives", "trajectories"},
    "retrieval": {"checks", "foreign"},
    "world": {"retrieval", "checks", "foreign"},
    "agent": {"files", *FLOOR},
    "settings": {"agent", "config_files", *FLOOR},
    "config": {"settings", "config_files", "files", "provenance"},
    "plan": {"config"},
    "training": {
        "agent",
        "schema",
        "files",
        "ownership",
        "config",
        "settings",
        "provenance",
        "waiting",
        *FLOOR,
    },
    "results": {"schema", "files", "foreign", "ownership", "provenance", "algorithms"},
    "study": {"results", "schema", "files", "config", "config_files", "algorithms"},
    "plugins": {
        "agent",
        "objectives",
        "trajectories",
        "world",
        "retrieval",
        "checks",
        "config",
        "config_files",
    },
    "preflight": {"agent", "config", "files", "settings", *FLOOR},
    "preloaded": set(),
    "preloaded_kernel": {"preloaded"},
    "axes": {"algorithms", "config", "objectives", "trajectories", "results"},
    "factors": {"algorithms", "axes", "config", "results", "trajectories"},
    "bias_variance": {"algorithms", "config", "oracle", "results"},
    "cli": {
        "provenance",
        *(
            "axes",
            "agent",
            "config",
            "config_files",
            "provenance",
            "plan",
            "preflight",
            "provenance",
            "settings",
            "schema",
            "files",
            "training",
            "waiting",
        ),
        *("results", "study", "plugins"),
        *FLOOR,
    },
}


def part(module: str) -> str:
    return (module.split(".") + ["__init__"])[1]


def edges(source: str, module: str, is_package: bool, package_dir: Path = PACKAGE_DIR) -> set[str]:
    """Existing modules that a module imports."""
    names = imported_modules(ast.parse(source), module, is_package)
    return {name for name in names if module_file(name, package_dir)}


def forbidden(module: str, imports: set[str]) -> list[str]:
    """Imports across parts that ALLOWED does not list; the bare package is everyone's."""
    own = part(module)
    return sorted(
        name
        for name in imports
        if part(name) not in (own, "__init__", *ALLOWED[own])
        and not any(
            name == rule or name.startswith(f"{rule}.") for rule in map("stppo.{}".format, ALLOWED[own])
        )
    )


MODULES = {
    ".".join(["stppo", *file.relative_to(PACKAGE_DIR).with_suffix("").parts]).removesuffix(".__init__"): file
    for file in sorted(PACKAGE_DIR.rglob("*.py"))
}


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_layer_may(module):
    assert part(module) in ALLOWED, f"{part(module)} is a new part: say here what it may import"
    file = MODULES[module]
    found = edges(file.read_text(encoding="utf-8"), module, file.name == "__init__.py")
    assert forbidden(module, found) == []


def test_allowed_layers_have_no_cycle():
    open_parts = {name: {rule.split(".")[0] for rule in rules} for name, rules in ALLOWED.items()}
    while open_parts:
        bottom = [name for name, rules in open_parts.items() if not rules & set(open_parts)]
        assert bottom, f"cycle among {sorted(open_parts)}"
        for name in bottom:
            del open_parts[name]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stppo.results.figures", "from stppo.training.trainer import Trainer"),
        ("stppo.results.figures", "def f():\n    import stppo.agent.policy"),
        ("stppo.results.figures", "from ..world import protocol"),
        ("stppo.results.figures", "from stppo.study import arms"),
        ("stppo.objectives.ratios", "from stppo import schema"),
        ("stppo.training.trainer", "from stppo.results.live import run_figure"),
        ("stppo.world.protocol", "from stppo.trajectories import Trajectories"),
        ("stppo.retrieval.server", "from stppo.world import protocol"),
    ],
)
def test_the_check_sees_a_violation(module, source):
    assert forbidden(module, edges(source, module, False))


def test_no_circle_of_files():
    open_files = {
        module: {
            name
            for name in edges(file.read_text(encoding="utf-8"), module, file.name == "__init__.py")
            if not module.startswith(f"{name}.") and name != module
        }
        for module, file in MODULES.items()
    }
    while open_files:
        bottom = [name for name, imports in open_files.items() if not imports & set(open_files)]
        assert bottom, f"circle among {sorted(open_files)}"
        for name in bottom:
            del open_files[name]
