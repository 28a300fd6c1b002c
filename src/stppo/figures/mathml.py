"""Executed notebooks as pages that show their formulas without a network: LaTeX becomes MathML as a page is
made.

nbconvert's own pages load MathJax from another server and show raw LaTeX where there is none. Browsers draw
MathML themselves; what latex2mathml writes is brought to the part of it that they share (MathML Core).
"""

from __future__ import annotations

import html
import re
from typing import Any
from xml.etree.ElementTree import Element, tostring

from jinja2 import pass_context
from latex2mathml.converter import convert_to_element
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

# Children that an element must have; one that a typing error left incomplete has fewer.
_CHILDREN = {
    **dict.fromkeys(("mfrac", "msub", "msup", "munder", "mover", "mroot"), 2),
    **dict.fromkeys(("msubsup", "munderover"), 3),
}
# What is below these stands below them in a display.
_LIMITS = {"min", "max", "lim", "sup", "inf", "argmin", "argmax"}
_UNDER = {"msub": "munder", "msubsup": "munderover"}
_NOT_CORE = {"menclose", "mfenced"}  # browsers show their content alone
_TIGHT = {"/", "|", "‖"}  # of a fraction in a line, of |y| and a norm: browsers space them as relations
_SIGNS, _OPENING, _CLOSING = set("+-−±"), set("([{"), set(")]}|‖!")
_ACCENTS = {"^": "ˆ", "~": "˜", "¯": "¯"}  # in the form that sits on a letter
_CAPITALS = set("ΓΔΘΛΞΠΣΦΨΩ")  # TeX sets them upright
_LONG_ARROWS = {chr(code) for code in range(0x27F0, 0x2800)}
# What latex2mathml does not know, or shows as it is typed.
_ALIGNED = re.compile(r"\\(begin|end)\{aligned\}")
_SIZED = re.compile(r"\\([bB]igg?[lrm]?)\s*\\(?:\||Vert\b)")
_TAG = re.compile(r"\\tag\{([^}]*)\}")

_PUNCTUATED = re.compile(
    r"(<math (?:(?!</math>).)*</math>)([.,;:!?)]+)", re.DOTALL
)  # no line begins with a full stop

_STYLE = """
<style>
math { font-family: "STIX Two Math", "Cambria Math", "Latin Modern Math", "DejaVu Math TeX Gyre", math; }
.formula { display: flex; align-items: center; overflow-x: auto; overflow-y: hidden;
  margin: 0.8em 0; padding: 0.2em 0; }
.formula > math { flex: 1 0 auto; }
.unbroken { white-space: nowrap; }
.formula > .number { flex: none; padding-left: 1.5em; }
@media (prefers-color-scheme: dark) { html { background: #fff; filter: invert(.9) hue-rotate(180deg); } }
</style>
"""

_PAGE = """
{%- extends 'index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block html_head_css -%}STYLE{%- endblock -%}
{% block data_latex scoped %}
<div class="jp-RenderedLatex jp-OutputArea-output {{ extra_class }}" data-mime-type="text/latex">
{{ output.data['text/latex'] | markdown2html }}
</div>
{%- endblock data_latex %}
""".replace("STYLE", _STYLE)


def to_mathml(latex: str, display: bool = False) -> str:
    r"""A formula, without its dollars, as HTML; one in display stands on its own line, with its \tag at the
    right.

    ValueError gives the formula and what in it cannot be converted: an unknown command, or braces that do not
    match.
    """
    tags = _TAG.findall(latex)
    body = _ALIGNED.sub(r"\\\1{split}", _TAG.sub("", latex)).strip()
    body = _SIZED.sub(lambda found: rf"\{found[1]}‖", body)
    try:
        _check_braces(body)
        tree = convert_to_element(body, display="block" if display else "inline")
        for change in (_to_core, _space_neighbours):
            for node in tree.iter():
                change(node)
    except Exception as error:  # latex2mathml has many kinds
        reason = str(error) or type(error).__name__
        raise ValueError(f"formula {' '.join(latex.split())!r} cannot become MathML: {reason}") from error
    del tree.attrib["xmlns"]  # HTML needs none, and what adds anchors to headings would make a prefix of it
    tree.set("alttext", " ".join(latex.split()))
    maths = tostring(tree, encoding="unicode")
    if not display:
        return maths
    number = f'<span class="number">({html.escape(", ".join(tags))})</span>' if tags else ""
    return f'<span class="formula">{maths}{number}</span>'


def _check_braces(latex: str) -> None:
    depth = 0
    for brace in re.findall(r"\\\\|\\[{}]|[{}]", latex):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            break
    if depth:
        raise ValueError("its braces do not match")


def _to_core(node: Element) -> None:
    """Change one element in place to what MathML Core has; ValueError where it is no formula or has no such
    form."""
    node.text = html.unescape(node.text or "")
    if node.tag != "mtext" and (unknown := re.match(r"\\[A-Za-z]+|&", node.text)):
        raise ValueError(f"{unknown[0]} is not known here")
    if node.tag in _NOT_CORE:
        raise ValueError(f"browsers do not draw <{node.tag}>")
    if len(node) != _CHILDREN.get(node.tag, len(node)):
        raise ValueError(f"<{node.tag}> lacks an argument")
    if node.tag in _UNDER and node[0].text in _LIMITS:
        node.tag = _UNDER[node.tag]
        node[0].set("movablelimits", "true")
    if node.tag == "mover" and (accent := html.unescape(node[1].text or "")) in _ACCENTS:
        node.set("accent", "true")
        node[1].text = _ACCENTS[accent]
        node[1].set("stretchy", "false")
    if node.tag in ("msub", "msup", "msubsup") and "minsize" in node[0].attrib:
        node[0], bracket = Element("mrow"), node[0]  # else Chromium draws it small
        node[0].append(bracket)
    if node.tag in ("mi", "mo"):
        _space(node)
    for row, line in zip(node, node.attrib.pop("rowlines", "").split(), strict=False):
        for cell in row if line != "none" else ():
            cell.set("style", "border-bottom: 1px solid")
    if align := node.attrib.pop("columnalign", None):
        node.set("style", f"text-align: {align}; {node.get('style', '')}")


def _space_neighbours(node: Element) -> None:
    """Space between two children that depends on both."""
    for left, right in zip(node, node[1:], strict=False):
        if not left.tag == right.tag == "mo":
            continue
        if right.text in _SIGNS and left.text not in _CLOSING:
            right.set("form", "prefix")  # after a relation, a comma or an opening bracket
        if left.text.isalpha() and right.text in _OPENING:
            left.set("rspace", "0")


def _space(node: Element) -> None:
    """Letters and operators: upright or not, and how much space there is beside them."""
    if len(node.text) > 1 and node.text.isalpha():
        node.tag = "mo"  # log, exp, clip
        node.attrib.update(lspace="0.1667em", rspace="0.1667em")
    elif node.text in _TIGHT:
        node.attrib.update(lspace="0", rspace="0")
    elif node.text in _LONG_ARROWS:
        node.tag = "mo"
    elif node.text in _CAPITALS:
        node.set("mathvariant", "normal")


class _Renderer(IPythonRenderer):
    def block_math(self, body: str) -> str:
        return to_mathml(body, display=True)

    def inline_math(self, body: str) -> str:
        return to_mathml(body)

    def latex_environment(self, name: str, body: str) -> str:
        return to_mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", display=True)


def with_its_parameters(nb: Any) -> Any:
    """The notebook with the values that papermill set where their defaults stand, in place of a second cell;
    changed in place."""
    tagged = {tag: cell for cell in nb.cells for tag in cell.metadata.get("tags", ())}
    defaults, injected = tagged.get("parameters"), tagged.get("injected-parameters")
    if defaults and injected:
        for name, value in re.findall(r"^(\w+) = (.*)", injected.source, re.M):
            line = re.compile(rf"^{name} = .*?(?=  #|$)", re.M)
            defaults.source = line.sub(lambda _, text=f"{name} = {value}": text, defaults.source)
        nb.cells.remove(injected)
    return nb


class OfflineHTMLExporter(HTMLExporter):
    """nbconvert's page with MathML for formulas and no script: `jupyter nbconvert --to` this class's dotted
    name.

    ValueError names the notebook and the first formula that cannot be converted.
    """

    export_from_notebook = None  # no entry of its own in JupyterLab's menu
    raw_template = _PAGE

    def from_notebook_node(
        self, nb: Any, resources: Any = None, **options: Any
    ) -> tuple[str, dict[str, Any]]:
        name = (resources or {}).get("metadata", {}).get("name", "notebook")
        try:
            return super().from_notebook_node(with_its_parameters(nb), resources, **options)
        except ValueError as error:
            raise ValueError(f"{name}.ipynb: {error}") from error

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        """The filter of nbconvert's templates, with another renderer of formulas."""
        renderer = _Renderer(
            escape=False,
            attachments=context.get("cell", {}).get("attachments", {}),
            embed_images=self.embed_images,
            path=context.get("resources", {}).get("metadata", {}).get("path", ""),
            anchor_link_text=self.anchor_link_text,
            exclude_anchor_links=self.exclude_anchor_links,
            **self.lexer_options,
        )
        page = MarkdownWithMath(renderer=renderer).render(source)
        return _PUNCTUATED.sub(r'<span class="unbroken">\1\2</span>', page)
