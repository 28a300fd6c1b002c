"""Options in tables break after a dot or an equals sign, not within a word; what is copied stays as it is."""

import re

from docutils import nodes


def _break(app, doctree, docname: str) -> None:
    if app.builder.format != "html":
        return
    for entry in doctree.findall(nodes.entry):
        for literal in list(entry.findall(nodes.literal)):
            parts = re.split(r"(?<=[.=/])(?=\w)", literal.astext())
            literal.clear()
            for i, part in enumerate(parts):
                literal += [nodes.raw("", "<wbr>", format="html")] * bool(i) + [nodes.Text(part)]


def setup(app):
    app.connect("doctree-resolved", _break)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
