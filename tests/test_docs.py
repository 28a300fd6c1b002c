"""The site's examples run as they stand on the page, and its links lead somewhere."""

import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stppo.config import files as config_files
from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.config.planned import planned_runs
from stppo.world.scripted import play_summary
from tests.objectives_cases import mixed_batch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if not {"_build", "generated", "notebooks"} & {*page.relative_to(DOCS).parts}
]
OTHERS = [
    *ROOT.glob("*.md"),
    *sorted(ROOT.glob("results/reference/**/README.md")),
    *sorted(ROOT.glob("notebooks/*.ipynb")),
]
OWN = ("my_ppo", "harmonic", "wider_for_rare", "two_sided", "no_clip", "median", "few_effective")
MADE = ("reference/generated/", "notebooks/")  # by the build


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def extension(name: str):
    """A module of the site's own."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"_ext/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_examples(page: str, folder: Path) -> None:
    """The page's examples where their first lines say, below a folder of configs."""
    code = "\n".join(block for block in blocks(page, "python") if "metrics: Metrics" not in block)
    for text in [*blocks(page, "yaml"), *([code] if code else [])]:
        if place := re.match(r"(?:# @package _global_\n)?# my_configs/([\w/.]+)", text):
            file = folder / place[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """files(page) writes the page's examples into a folder of configs that is in use."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(config_files.VARIABLE, str(tmp_path))
    yield lambda page: write_examples(page, tmp_path)
    for module in ("my_rules", "my_world"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize("name", OWN)
def test_example_of_an_algorithm_gives_advantages_and_a_gradient(folder, name):
    folder("howto/add-an-algorithm.md")
    composed = compose([f"algorithm={name}", "preset=smoke"])
    load(composed)
    objective = build(composed["algorithm"]["objective"], "algorithm.objective")
    batch = mixed_batch()
    advantages = objective.credit(batch, torch.zeros_like(batch.rewards)).advantages
    logprobs = (batch.behaviour_logprobs + 0.3 * torch.randn_like(batch.rewards)).requires_grad_()
    objective(logprobs, batch, advantages, entropy=torch.ones_like(logprobs)).loss.backward()
    assert objective.stabilizer.divisor(0.25) == (4 if name == "few_effective" else 1)
    assert advantages[batch.agent_mask].std() > 0
    assert logprobs.grad[batch.agent_mask].abs().sum() > 0 and not logprobs.grad[~batch.agent_mask].any()


def test_the_notebook_of_related_methods_takes_the_examples_along(folder, tmp_path, monkeypatch):
    """No check of it fails over an algorithm that does not ship."""
    folder("howto/add-an-algorithm.md")
    monkeypatch.chdir(DOCS.parent)
    cells = json.loads(Path("notebooks/06-relatives.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {"display": lambda shown: None}
    for cell in cells:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"]).replace("import Markdown, display", "import Markdown")
            exec(code, names)
            if "parameters" in cell["metadata"].get("tags", ()):
                names |= {"fast": True, "output_dir": str(tmp_path / "figures")}
    assert set(OWN) <= set(names["table"]["algorithm"])


def test_example_of_a_world_can_be_played(folder):
    folder("howto/add-a-world-figure-claim.md")
    found = {}
    for name in ("two_documents", "synthetic_small"):
        world = build(compose([f"world={name}"])["world"], "world")
        found[name] = play_summary(world, world.questions("test")[:50], random.Random(0))
    mine, theirs = found.values()
    page = " ".join((DOCS / "howto/add-a-world-figure-claim.md").read_text(encoding="utf-8").split())
    assert f"answers {50 * mine['em']:.0f} of 50 questions, against {50 * theirs['em']:.0f} of 50" in page
    searches = [f"{one['searches_per_question']:.1f}" for one in (mine, theirs)]
    assert f"needs {searches[0]} searches a question in place of {searches[1]}" in page


def test_example_of_a_preset_plans_its_arms(folder):
    folder("howto/compare-variants.md")
    runs = {(run.algorithm, run.seed): run.config for run in planned_runs("mine", [])}
    assert set(runs) == {(arm, seed) for arm in ("token_ppo", "short_steps") for seed in (0, 1)}
    assert runs["short_steps", 1]["training"]["learning_rate"] == 1.75e-4
    assert runs["short_steps", 1]["world"]["seed"] == 1


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for link in re.findall(r"\]\(([^()\s:#]+)(?:#[^()\s]*)?\)", text):
        target = (page.parent / link).resolve()
        made = target.is_relative_to(DOCS) and str(target.relative_to(DOCS)).startswith(MADE)
        assert made or target.exists(), link


def test_tables_in_committed_pages_are_those_of_the_code(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "_ext")
    import generated

    for page in generated.TABLES:
        text = (DOCS / page).read_text(encoding="utf-8")
        assert generated.with_table(page) == text, (
            f"docs/{page} is older than the code: `make docs`, then commit it"
        )
        assert text.count("\n| `") >= 5


def test_links_of_recorded_pages_lead_from_the_site(monkeypatch):
    """A recorded page is shown elsewhere in the site, so its links are led on: to the page there, or to the file."""
    monkeypatch.syspath_prepend(DOCS / "_ext")
    import generated

    anchored = 0
    for name in generated.RECORDED:
        for link, anchor in re.findall(
            r"\]\((?:path:)?([^()\s:#]+)(#[^()\s]*)?\)", generated.recorded_page(name)
        ):
            target = (DOCS / "explanation" / link).resolve()
            assert target.is_relative_to(DOCS / "reference/generated") or target.exists(), (name, link)
            anchored += bool(anchor) and target.is_relative_to(DOCS)
            assert not (anchor and target.name == "README.md"), (name, link)
    assert anchored


def test_links_of_a_notebook_are_those_of_its_texts(monkeypatch):
    """`forms["bare"](n)` in code is a call; a file of the repository that a text names becomes a download."""
    links = extension("links")
    warned = []
    monkeypatch.setattr(links.log, "warning", lambda text, *values, **_: warned.append(text % values))
    cells = [
        {"cell_type": "code", "source": ['forms["bare"](n)']},
        {"cell_type": "markdown", "source": ["[licence](../LICENSE)\n", "[gone](../gone.md)"]},
    ]
    source = [json.dumps({"cells": cells})]
    page = DOCS / "notebooks/04-stabilised-objectives.ipynb"
    app = SimpleNamespace(env=SimpleNamespace(doc2path=lambda _: page))
    links._rewrite(app, "notebooks/04-stabilised-objectives", source)
    code, text = ("".join(cell["source"]) for cell in json.loads(source[0])["cells"])
    assert code == 'forms["bare"](n)' and text == "[licence](path:../../LICENSE)\ngone"
    assert warned == ["link to ../gone.md, which does not exist"]


@pytest.mark.parametrize("number", ["00", "01", "02", "03", "04", "05", "06", "20"])
def test_kept_notebooks_are_those_of_today_with_pictures_and_without_errors(number):
    executed = extension("executed")
    (file,) = executed.KEPT.glob(f"{number}-*.ipynb")
    assert executed.fits(file), f"{file.name} was executed from other cells: make gallery"
    assert file.stat().st_size < executed.MOST
    outputs = [out for cell in json.loads(file.read_text())["cells"] for out in cell.get("outputs", ())]
    assert any("image/png" in out.get("data", ()) for out in outputs)
    assert not [out for out in outputs if out["output_type"] == "error"]
