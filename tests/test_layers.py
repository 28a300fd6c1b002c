"""The layers of the package, checked on its source: nothing is imported."""

import ast
from pathlib import Path

import pytest

from stppo.analysis.provenance import PACKAGE_DIR, imported_modules, module_file

# What each part of the package may import of the others; a part is a sub-package or a module.
FLOOR = {"world", "objectives", "trajectories"}
ALLOWED = {
    "__init__": set(),
    "schema": set(),
    "files": set(),
    "interact": set(),
    "trajectories": set(),
    "objectives": {"trajectories"},
    "world": set(),
    "agent": FLOOR,
    "settings": {"agent", *FLOOR},
    "config": {"settings", "files", "analysis.provenance"},
    "training": {"agent", "schema", "files", "config", "settings", "analysis.provenance", *FLOOR},
    "analysis": {"schema", "files"},
    "oracle": {"objectives", "trajectories"},
    "plugins": {"objectives", "trajectories", "world"},
    "plan": {"config"},
    "preflight": {"agent", "config", "files", "settings", *FLOOR},
    "axes": {"config", "objectives", "trajectories", "analysis"},
    "cli_retriever": {"world"},
    "cli": {
        *(
            "cli_retriever",
            "axes",
            "agent",
            "config",
            "plan",
            "preflight",
            "settings",
            "schema",
            "files",
            "training",
            "analysis",
            "plugins",
        ),
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
        and not (name == "stppo.analysis" and "analysis.provenance" in ALLOWED[own])
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
        ("stppo.analysis.figures", "from stppo.training.trainer import Trainer"),
        ("stppo.analysis.figures", "def f():\n    import stppo.agent.policy"),
        ("stppo.analysis.figures", "from ..world import protocol"),
        ("stppo.objectives.ratios", "from stppo import schema"),
        ("stppo.training.trainer", "from stppo.analysis.figures import run_figure"),
        ("stppo.world.protocol", "from stppo.trajectories import Trajectories"),
    ],
)
def test_the_check_sees_a_violation(module, source):
    assert forbidden(module, edges(source, module, False))


def test_training_may_import_provenance():
    source = "from stppo.analysis import provenance\nfrom stppo.analysis.provenance import code_hash"
    assert forbidden("stppo.training.trainer", edges(source, "stppo.training.trainer", False)) == []
