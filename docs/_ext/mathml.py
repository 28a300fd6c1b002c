"""Formulas as native MathML, which browsers draw without a script or a network; the notebooks' pages have the same."""

from docutils import nodes

from stppo.figures.mathml import to_mathml


def _inline(self, node):
    self.body.append(to_mathml(node.astext()))
    raise nodes.SkipNode


def _block(self, node):
    self.body.append(to_mathml(node.astext(), display=True))
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
