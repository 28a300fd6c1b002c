"""Widgets that degrade to pictures: in the process, and through papermill and nbconvert."""

import base64
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
from matplotlib.figure import Figure

from stppo.derivations import interact


class Drawn:
    """Stands for a Plot; remembers what it was asked for."""

    calls: list[dict] = []

    def __init__(self, **values):
        Drawn.calls.append(values)
        self.text = f"picture of {values}"

    def _repr_html_(self):
        return self.text


@pytest.fixture(autouse=True)
def forget():
    Drawn.calls.clear()


@pytest.fixture
def shown(monkeypatch):
    """The mime bundles that were displayed."""
    bundles = []
    monkeypatch.setattr(interact, "display", lambda data, raw: bundles.append(data))
    return bundles


def test_one_bundle_holds_controls_and_picture_drawn_once_at_the_start_values(shown):
    interact.explore(Drawn, staleness=(0.0, 2.0, 0.1), kind=["token", "turn"], start={"staleness": 0.5})
    (bundle,) = shown
    assert interact.WIDGET_VIEW in bundle and bundle[interact.WIDGET_VIEW]["model_id"]
    assert Drawn.calls == [{"staleness": 0.5, "kind": "token"}]
    assert "picture of" in bundle["text/html"]
    assert "Drawn at staleness = 0.5, kind = token." in bundle["text/html"]


def test_a_moved_slider_draws_its_value(shown):
    box, _ = interact.controls(Drawn, {"staleness": (0.0, 2.0, 0.1), "n": (1, 9)}, {"staleness": 0.5})
    assert Drawn.calls == [{"staleness": 0.5, "n": 5}]
    assert "picture of" in box.children[-1].outputs[0]["data"]["text/html"]
    box.children[0].value = 1.5
    assert Drawn.calls[1:] == [{"staleness": 1.5, "n": 5}]
    assert "'staleness': 1.5" in shown[-1]["text/html"]
    box.children[1].value = 7
    assert Drawn.calls[-1] == {"staleness": 1.5, "n": 7}


def test_note_names_the_entry_of_a_menu_not_its_value(shown):
    interact.explore(Drawn, row={"the first": 0, "the <last>": 7}, start={"row": 7})
    assert Drawn.calls == [{"row": 7}]
    assert "Drawn at row = the &lt;last&gt;." in shown[0]["text/html"]


def test_figures_become_pictures(shown):
    interact.explore(lambda n: Figure(figsize=(1, 1)), n=(1, 3))
    source = re.search(r'src="data:image/png;base64,([^"]+)"', shown[0]["text/html"])
    assert base64.b64decode(source[1]).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "start", "message"),
    [
        ({"n": (1, 9)}, {"m": 3}, "start names m, but the options are n"),
        ({"n": (1, 9)}, {"n": 30}, r"start n=30 is not offered by \(1, 9\)"),
        ({"kind": ["token", "turn"]}, {"kind": "word"}, "start 'word'"),
        ({"n": (9, 1)}, {}, r"explore: n=\(9, 1\)"),
        ({"n": object}, {}, "explore: n=.*use .low, high, step"),
    ],
)
def test_bad_options_are_named_in_one_line(options, start, message):
    with pytest.raises(ValueError, match=message) as error:
        interact.explore(Drawn, start=start, **options)
    assert "\n" not in str(error.value)


# ---- through papermill and nbconvert ----------------------------------------------------------------

CELL = """
from matplotlib.figure import Figure
from stppo.derivations.interact import explore

def draw(level, kind):
    fig = Figure(figsize=(2, 1))
    fig.subplots().plot([0, level])
    return fig

explore(draw, level=(0.0, 2.0, 0.5), kind=["token", "turn"], start={"level": 1.5})
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("explore")
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell("fast = False", metadata={"tags": ["parameters"]}),
            nbformat.v4.new_code_cell(CELL.strip(), metadata={"tags": ["a_tag"]}),
        ]
    )
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "plain.ipynb")
    papermill.execute_notebook(
        folder / "plain.ipynb", folder / "done.ipynb", parameters={"fast": True}, progress_bar=False
    )
    return folder / "done.ipynb"


def convert(notebook: Path, *options: str) -> str:
    command = [sys.executable, "-m", "nbconvert", *options, "--log-level", "WARN", notebook.name]
    done = subprocess.run(command, cwd=notebook.parent, capture_output=True, text=True)
    assert done.returncode == 0 and "represented" not in done.stderr, done.stderr
    return notebook.with_suffix(".html").read_text(encoding="utf-8")


def test_html_shows_the_picture_and_loads_no_widget_script(executed):
    page = convert(executed, *interact.NBCONVERT_OPTIONS)
    assert page.count('src="data:image/png;base64,') == 1
    assert "Drawn at level = 1.5, kind = token." in page
    for trace in ("jupyter-widgets", "widget-view", "widget-state", "html-manager", "Could not load widget"):
        assert trace not in page, trace
    assert "celltag_a_tag" in page  # cells keep their metadata
