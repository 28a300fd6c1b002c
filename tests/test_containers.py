"""The container of VS Code and Codespaces, and Binder's: they parse, and name what exists."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from stppo.config.composition import compose
from stppo.config.identity import warm_start_dir

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENGINES = {"vllm", "verl", "trl"}
BINDER = ROOT / ".binder"


def without_comments(text: str) -> str:
    """JSON of JSON with comments; a // inside a string stays."""
    return re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*', lambda found: found[1] or "", text)


@pytest.fixture(scope="module")
def container() -> dict:
    return json.loads(
        without_comments((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    )


def binder_lines() -> list[str]:
    lines = (BINDER / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def cpu_index() -> str:
    """Where CI takes PyTorch from."""
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    return re.search(r"PIP_EXTRA_INDEX_URL: (\S+)", workflow)[1]


def requirements_of(extras: set[str], seen: frozenset[str] = frozenset()) -> set[str]:
    """Names that a set of extras installs beside the core, extras of extras included."""
    found = set()
    for extra in extras - seen:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            if requirement.name == PROJECT["name"]:
                found |= requirements_of(set(requirement.extras), seen | extras)
            else:
                found.add(requirement.name)
    return found


def test_every_image_has_a_python_that_the_project_allows(container):
    runtime = (BINDER / "runtime.txt").read_text(encoding="utf-8").strip()
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for found in (
        re.fullmatch(r"mcr\.microsoft\.com/devcontainers/python:(3\.\d+)-\w+", container["image"]),
        re.fullmatch(r"python-(3\.\d+)", runtime),
        re.search(r"^FROM python:(3\.\d+)-", text, re.M),
    ):
        assert found and SpecifierSet(PROJECT["requires-python"]).contains(found[1])


def test_container_sets_up_as_everyone_does(container):
    target = re.fullmatch(r"make ([\w-]+)", container["postCreateCommand"])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert target and re.search(rf"^{target[1]}:", makefile, re.MULTILINE)
    venv = re.search(r"^VENV := (\S+)", makefile, re.MULTILINE)[1]
    interpreter = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert interpreter == f"${{containerWorkspaceFolder}}/{venv}/bin/python"


def test_containers_take_pytorch_from_where_ci_does(container):
    assert container["containerEnv"]["PIP_EXTRA_INDEX_URL"] == cpu_index()
    assert f"--extra-index-url {cpu_index()}" in binder_lines()


def test_binder_installs_the_notebooks_and_no_engine():
    (editable,) = (line for line in binder_lines() if line.startswith("-e"))
    extras = set(re.fullmatch(r"-e \.\[([\w,-]+)\]", editable)[1].split(","))
    installed = requirements_of(extras)
    assert {"jupyterlab", "ipywidgets"} <= installed and not installed & ENGINES


def test_binder_makes_the_warm_start_of_notebook_10():
    script = BINDER / "postBuild"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    overrides = re.search(r"^stppo warm-start (.+)$", script.read_text(encoding="utf-8"), re.MULTILINE)[1]
    cells = json.loads((ROOT / "notebooks/10-train.ipynb").read_text(encoding="utf-8"))["cells"]
    (cell,) = (c for c in cells if "parameters" in c["metadata"].get("tags", []))
    trained = re.search(r'overrides = "(.+)"', "".join(cell["source"]))[1]
    made, wanted = (warm_start_dir(compose(text.split())) for text in (overrides, trained))
    assert made == wanted


def test_dockerfile_sets_up_as_everyone_does():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"PIP_EXTRA_INDEX_URL={cpu_index()}" in text
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[1].split()
    named = re.findall(r"make (\w+)$", text, re.M) + re.findall(r'"make", "(\w+)"', text)
    assert named and set(named) <= {*targets, "setup"}
