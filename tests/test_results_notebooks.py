"""The figure notebooks: their form, and that they run on recorded metrics from the repository's root."""

import ast
import json
from pathlib import Path

import papermill
import pytest

from stppo.results.runs import collect
from tests.synthetic_runs import make_run

ROOT = Path(__file__).parents[1]
PARAMETERS = {
    "20-collapse": ["metrics_dir", "output_dir", "fast"],
    "21-clip-ratio": ["metrics_dir", "output_dir", "fast"],
    "22-ablations": ["metrics_dir", "output_dir", "planned", "fast"],
    "23-open-questions": ["metrics_dir", "output_dir", "planned", "fast"],
}
NOTEBOOKS = list(PARAMETERS)


def cells(name, kind="code"):
    content = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_without_outputs_and_with_short_cells(name):
    for cell in cells(name):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        assert len(cell["source"]) < 30
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            assert not isinstance(node, (ast.FunctionDef, ast.ClassDef)), "definitions live in the package"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_one_parameters_cell_with_its_parameters(name):
    tagged = [cell for cell in cells(name) if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1
    names = [node.targets[0].id for node in ast.parse("".join(tagged[0]["source"])).body]
    assert names == PARAMETERS[name]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_prose_is_readable_without_a_network(name):
    assert not any("$" in "".join(cell["source"]) for cell in cells(name, "markdown"))


@pytest.fixture(scope="module")
def metrics_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    names = ("token_ppo", "st_ppo", "grpo", "gspo")
    collect(
        [make_run(root / f"{n}{s}", n, s, iterations=12) for n in names for s in (0, 1)], root / "metrics"
    )
    return root / "metrics"


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        (
            "20-collapse",
            {"objectives", "overview", "collapse", "diagnostics_A", "stability", "so_grpo", "granularity"},
        ),
        ("21-clip-ratio", {"clip_ratio"}),
        ("22-ablations", set()),
        ("23-open-questions", {"survival"}),
    ],
)
def test_notebook_renders_its_figures(name, figures, metrics_dir, tmp_path):
    executed = papermill.execute_notebook(
        ROOT / "notebooks" / f"{name}.ipynb",
        tmp_path / f"{name}.ipynb",
        parameters={"metrics_dir": str(metrics_dir), "output_dir": str(tmp_path / "figures"), "fast": True},
        kernel_name="python3",
        cwd=ROOT,
        progress_bar=False,
    )
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == figures
    said = " ".join(
        str(o.get("data", {}).get("text/html", "")) for c in executed.cells for o in c.get("outputs", [])
    )
    if name > "22":  # the question that no run answers says so
        assert "Not tested: no runs of MAIN/" in said
    shown = [o for c in executed.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(shown) == len(figures)
