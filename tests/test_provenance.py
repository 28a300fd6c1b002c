import json
import subprocess

import pytest

from stppo.config import provenance
from stppo.config.provenance import code_hash, config_targets, imported_files, notebook_imports
from tests.conftest import edit


@pytest.fixture
def package(tmp_path):
    """A small package: training imports agent relatively, agent imports base lazily; figures stands apart."""
    root = tmp_path / "stppo"
    files = {
        "__init__.py": "",
        "base.py": '"""Base."""\nEPSILON = 0.2  # clip\n',
        "figures.py": "COLOUR = 1\n",
        "agent/__init__.py": "from .policy import act\n",
        "agent/policy.py": "def act():\n    from ..base import EPSILON\n    return EPSILON\n",
        "training/__init__.py": "",
        "training/trainer.py": 'import torch\nfrom stppo import agent\n\n\ndef train():\n    """Train."""\n    return agent.act()\n',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def trainer_hash(package, **keywords):
    return code_hash("stppo.training.trainer", package_dir=package, **keywords)


def test_follows_absolute_relative_and_lazy_imports_with_their_packages(package):
    found = imported_files(["stppo.training.trainer"], package)
    assert list(found) == [
        "stppo",
        "stppo.agent",
        "stppo.agent.policy",
        "stppo.base",
        "stppo.training",
        "stppo.training.trainer",
    ]


def test_entry_may_be_a_file_or_a_name_inside_a_module(package):
    by_name = imported_files(["stppo.agent.policy"], package)
    assert imported_files([package / "agent" / "policy.py"], package) == by_name
    assert imported_files(["stppo.agent.policy.act"], package) == by_name


def test_unknown_entry_is_named(package):
    with pytest.raises(ValueError, match=r"stppo\.nothing"):
        imported_files(["stppo.nothing"], package)


@pytest.mark.parametrize(
    ("file", "old", "new", "counts"),
    [
        ("base.py", "# clip", "# the clip range, see Eq. 3", False),
        ("base.py", '"""Base."""', "\n\n", False),
        ("training/trainer.py", '    """Train."""\n', "", False),
        ("training/trainer.py", '"a"', '"b"', True),  # a string that is no docstring
        ("base.py", "0.2", "0.3", True),
        ("base.html.j2", "<p>", "<b>", True),  # a template beside a module
        ("figures.py", "1", "2", False),  # not imported
    ],
)
def test_what_changes_results_counts(package, file, old, new, counts):
    edit(package / "training/trainer.py", "return agent.act()", 'x = "a"\n    return agent.act()')
    (package / "base.html.j2").write_text("<p>")
    before = trainer_hash(package)
    edit(package / file, old, new)
    assert (trainer_hash(package) != before) == counts


def notebook(path, *cells):
    path.write_text(json.dumps({"cells": [{"cell_type": kind, "source": text} for kind, text in cells]}))
    return path


def test_parameters_of_a_notebook_do_not_count(package, tmp_path):
    def with_parameters(value):
        cell = {"cell_type": "code", "source": f"epochs = {value}", "metadata": {"tags": ["parameters"]}}
        (tmp_path / "n.ipynb").write_text(json.dumps({"cells": [cell]}))
        return trainer_hash(package, notebook=tmp_path / "n.ipynb")

    assert with_parameters(1) == with_parameters(2)


def test_notebook_code_counts_and_its_prose_does_not(package, tmp_path):
    file = tmp_path / "n.ipynb"
    first = trainer_hash(package, notebook=notebook(file, ("markdown", "old"), ("code", "x = 1")))
    prose = trainer_hash(
        package, notebook=notebook(file, ("markdown", "new"), ("code", ["x = 1  ", "# why"]))
    )
    code = trainer_hash(package, notebook=notebook(file, ("markdown", "new"), ("code", "x = 2")))
    magic = trainer_hash(package, notebook=notebook(file, ("code", "%matplotlib inline\nx = 2")))
    assert first == prose
    assert len({first, code, magic}) == 3


def test_targets_are_found_at_any_depth():
    config = {
        "a": {"_target_": "stppo.objectives.Clip"},
        "b": [{"_target_": "torch.optim.Adam"}, {"_target_": "stppo.x.Y"}],
    }
    assert config_targets(config) == ["stppo.objectives.Clip", "stppo.x.Y", "torch.optim.Adam"]


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A reader's folder on Python's path: a module that imports its neighbour, and another that nothing imports."""
    files = {
        "own_ratio.py": "import numpy\nfrom own_helper import f\nfrom own_package.part import g\n\n\nclass Mine:\n    x = 1\n",
        "own_helper.py": "def f():\n    return 1\n",
        "own_apart.py": "X = 1\n",
        "own_package/__init__.py": "",
        "own_package/part.py": "from . import other\n\n\ndef g():\n    return 1\n",
        "own_package/other.py": "Y = 1\n",
    }
    for name, text in files.items():
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    return tmp_path / "own"


@pytest.mark.parametrize(
    ("file", "old", "new", "counts"),
    [
        ("own_ratio.py", "x = 1", "x = 2", True),
        ("own_ratio.py", "x = 1", "x = 1  # why", False),
        ("own_helper.py", "1", "2", True),
        ("own_package/other.py", "1", "2", True),
        ("own_apart.py", "1", "2", False),
    ],
)
def test_code_of_an_own_class_counts_with_what_it_imports_from_its_folder(own_folder, file, old, new, counts):
    before = code_hash(["stppo.record.schema", "own_ratio.Mine"])
    edit(own_folder / file, old, new)
    assert (code_hash(["stppo.record.schema", "own_ratio.Mine"]) != before) == counts


def test_own_class_brings_what_it_imports_of_the_package(own_folder, package):
    edit(own_folder / "own_helper.py", "def f", "from stppo.base import EPSILON\n\n\ndef f")
    before = code_hash("own_ratio.Mine", package_dir=package)
    edit(package / "base.py", "0.2", "0.3")
    assert code_hash("own_ratio.Mine", package_dir=package) != before


def test_class_of_an_installed_library_counts_by_its_version(monkeypatch):
    before = code_hash(["stppo.record.schema", "yaml.Loader"])
    assert before != code_hash("stppo.record.schema")
    provenance._libraries.cache_clear()
    monkeypatch.setattr(provenance.metadata, "version", lambda name: "0.0.0")
    assert code_hash(["stppo.record.schema", "yaml.Loader"]) != before
    provenance._libraries.cache_clear()


def test_outside_git_commit_and_dirty_are_null(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "PACKAGE_DIR", tmp_path)
    assert provenance.git_state() == {"git_commit": None, "git_dirty": None}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A clean repository with the layout of this project, the package in src/stppo."""
    root = tmp_path / "repository"
    for name in (
        "src/stppo/__init__.py",
        "configs/training/a.yaml",
        "notebooks/10-train.ipynb",
        "Snakefile",
        "pyproject.toml",
        "README.md",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("old\n")
    for command in (["init"], ["add", "."], ["commit", "-m", "x"]):
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *command]
        subprocess.run(git, cwd=root, check=True, capture_output=True)
    monkeypatch.setattr(provenance, "PACKAGE_DIR", root / "src" / "stppo")
    return root


@pytest.mark.parametrize(
    ("name", "dirty"),
    [
        ("src/stppo/__init__.py", True),
        ("configs/algorithm/new.yaml", True),
        ("Snakefile", True),
        ("README.md", False),
        ("results/smoke/runs.json", False),
    ],
)
def test_git_state_sees_a_change_of_what_results_depend_on(repository, name, dirty):
    clean = provenance.git_state()
    assert len(clean["git_commit"]) == 40 and clean["git_dirty"] is False
    (repository / name).parent.mkdir(parents=True, exist_ok=True)
    (repository / name).write_text("new\n")
    assert provenance.git_state() == {**clean, "git_dirty": dirty}


def test_imports_of_a_notebook_are_entries_for_its_hash(package, tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["import stppo.figures"]},
        {"cell_type": "code", "source": ["import math\n", "from stppo.training.trainer import train"]},
        {"cell_type": "code", "source": ["def f():\n", "    from stppo import base"]},
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    found = notebook_imports(tmp_path / "n.ipynb")
    assert found == ["stppo", "stppo.base", "stppo.training.trainer", "stppo.training.trainer.train"]
    files = imported_files(found, package)
    assert {"stppo.base", "stppo.agent.policy"} <= set(files) and "stppo.figures" not in files


def test_notebook_cell_that_is_no_python_is_named(tmp_path):
    cells = [{"cell_type": "code", "source": ["import math\n", "%matplotlib inline"]}]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(ValueError, match=r"n\.ipynb cell 0 line 2: .*; use plain Python"):
        notebook_imports(tmp_path / "n.ipynb")
