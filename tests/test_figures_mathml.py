"""Formulas of notebooks as MathML: each is converted or named, and pages ask no other machine for
anything."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

from stppo.figures.mathml import OfflineHTMLExporter, to_mathml, with_its_parameters

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def tree(latex: str, display: bool = False) -> ElementTree.Element:
    """The formula's <math>; of one in display the element around it is dropped."""
    whole = ElementTree.fromstring(to_mathml(latex, display))
    return whole if whole.tag == "math" else whole.find("math")


def tags(latex: str, display: bool = False) -> list[str]:
    return [node.tag for node in tree(latex, display).iter()]


def text(latex: str) -> str:
    return "".join(tree(latex).itertext())


def page(*sources: str, outputs=()) -> str:
    cells = [nbformat.v4.new_markdown_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(
        cells=[*cells, nbformat.v4.new_code_cell("1", outputs=list(outputs), execution_count=1)]
    )
    return OfflineHTMLExporter().from_notebook_node(notebook, {"metadata": {"name": "05-example"}})[0]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_formula_of_a_notebook_is_converted(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    prose = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    bare = re.sub(r"```.*?```|`[^`\n]+`", "", prose, flags=re.DOTALL)
    shown = page(prose)
    in_display = len(re.findall(r"\$\$.+?\$\$", bare, re.DOTALL))
    in_lines = len(re.findall(r"\$[^$]+\$", re.sub(r"\$\$.+?\$\$", "", bare, flags=re.DOTALL)))
    assert len(re.findall(r'<math [^>]*display="block"', shown)) == in_display
    assert shown.count("<math ") == in_display + in_lines
    assert "$" not in re.sub(r'<style.*?</style>|alttext="[^"]*"', "", shown, flags=re.DOTALL)


def test_injected_values_stand_where_their_defaults_did():
    new = nbformat.v4.new_code_cell
    cells = [
        new('fast = False  # quick\nseed = 0\nout = "a"', metadata={"tags": ["parameters"]}),
        new('# Parameters\nfast = True\nout = "b c"\n', metadata={"tags": ["injected-parameters"]}),
    ]
    made, alone = (nbformat.v4.new_notebook(cells=part) for part in (cells[:], cells[1:]))
    shown = with_its_parameters(made).cells
    assert [cell.source for cell in shown] == ['fast = True  # quick\nseed = 0\nout = "b c"']
    assert len(with_its_parameters(alone).cells) == 1, "without defaults they are all that there is"


def test_page_asks_no_other_machine_for_anything():
    shown = page("$x$", "$$y$$")
    assert "<script" not in shown and "mathjax" not in shown.lower()
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//[^"'>]+|@import[^;]+""", shown)


@pytest.mark.parametrize(
    ("latex", "said"),
    [
        (r"\nosuchcommand x", r"\\nosuchcommand is not known"),
        (r"\frac{1", "braces do not match"),
        (r"x}", "braces do not match"),
        (r"\frac{1}", "cannot become MathML"),
        (r"x^", "cannot become MathML"),
        (r"\boxed{x}", "menclose"),
        (r"\begin{nomatrix} a & b \end{nomatrix}", "cannot become MathML"),
    ],
)
def test_a_formula_that_cannot_be_converted_is_named_with_its_notebook(latex, said):
    with pytest.raises(ValueError, match=said) as error:
        page("fine: $x$", f"not so: ${latex}$")
    assert str(error.value).startswith("05-example.ipynb: formula ") and "\n" not in str(error.value)
    assert repr(latex) in str(error.value)


def test_what_is_ours_in_the_conversion():
    tagged = r"x = 1 \tag{2.3}"
    assert to_mathml(tagged, display=True).endswith('</math><span class="number">(2.3)</span></span>')
    assert "2.3" not in text(tagged)
    assert text("a<b") == "a<b" and "<mo>&lt;</mo>" in to_mathml("a<b")
    assert "munder" in tags(r"\min_{i} x_i", display=True)
    assert tree(r"\max_i x").find(".//mo").get("movablelimits") == "true"
    for command in (r"\|", r"\Vert "):
        assert text(rf"\Big{command}x\Big{command}") == "‖x‖"


def test_tables_are_aligned_and_lined_as_in_latex():
    table = tree(r"\begin{aligned} a &= b \\ c &= d \end{aligned}", display=True).find(".//mtable")
    assert [len(row) for row in table] == [2, 2]
    assert "text-align: right" in table[0][0].get("style") and "left" in table[0][1].get("style")
    table = tree(r"\begin{array}{l} a \\ \hline b \\ c \end{array}", display=True).find(".//mtable")
    assert ["border-bottom" in row[0].get("style") for row in table] == [True, False, False]


@pytest.mark.parametrize(
    ("latex", "unary"),
    [("x = -1", True), ("(-1, 2)", True), ("(1, -2)", True), ("x - 1", False), ("(x) - 1", False)],
)
def test_a_sign_after_a_relation_or_bracket_is_unary(latex, unary):
    (sign,) = (node for node in tree(latex).iter() if node.text == "\u2212")
    assert (sign.get("form") == "prefix") == unary
