"""The layers of the package, checked on its source: nothing is imported."""

import ast

import pytest

from stppo.config.provenance import PACKAGE_DIR, imported_modules

# What each room of the package may import of the others, from the ground up; a room is a folder or a module at the root.
ALLOWED = {
    "__init__": set(),
    "checks": set(),
    "files": set(),
    "waiting": set(),
    "stats": set(),
    "trajectories": set(),
    "objectives": {"trajectories", "checks"},
    "oracle": {"objectives", "trajectories"},
    "retrieval": {"checks", "files"},
    "world": {"retrieval", "checks", "files"},
    "policy": {"checks", "files", "trajectories"},
    "rollout": {"policy", "trajectories", "world"},
    "pretrained": {"policy", "files"},
    "config": {"rollout", "policy", "objectives", "world", "checks", "files", "waiting"},
    "record": {"config", "files", "stats"},
    "training": {
        *("record", "config", "rollout", "policy", "objectives", "world"),
        *("trajectories", "preloaded", "checks", "files", "waiting"),
    },
    "preflight": {"training.optimizers", "config", "policy", "world", "retrieval", "checks", "files"},
    "figures": {"record", "config", "files", "stats"},
    "study": {"figures", "record", "config", "files", "stats"},
    "derivations": {"figures", "record", "config", "oracle", "objectives", "trajectories", "files"},
    "plugins": {
        *(
            "config",
            "rollout",
            "policy",
            "objectives",
            "world",
            "retrieval",
            "trajectories",
            "checks",
            "files",
        )
    },
    "preloaded": set(),
    "preloaded_kernel": {"preloaded"},
    "cli": {
        *("study", "figures", "training", "preflight", "plugins", "pretrained", "record", "config"),
        *("policy", "world", "retrieval", "checks", "files", "waiting"),
    },
}


MODULES = {
    ".".join(["stppo", *file.relative_to(PACKAGE_DIR).with_suffix("").parts]).removesuffix(".__init__"): file
    for file in sorted(PACKAGE_DIR.rglob("*.py"))
}


def part(module: str) -> str:
    return (module.split(".") + ["__init__"])[1]


def edges(source: str, module: str, is_package: bool) -> set[str]:
    """Existing modules that a module imports."""
    return imported_modules(ast.parse(source), module, is_package) & set(MODULES)


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
        ("stppo.figures.figures", "from stppo.training.trainer import Trainer"),
        ("stppo.figures.figures", "def f():\n    import stppo.policy.policy"),
        ("stppo.figures.figures", "from ..world import protocol"),
        ("stppo.figures.figures", "from stppo.study import arms"),
        ("stppo.objectives.ratios", "from stppo.record import schema"),
        ("stppo.training.trainer", "from stppo.figures.live import run_figure"),
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
