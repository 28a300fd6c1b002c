"""Links from pages to the rest of the repository: a file becomes a download, a folder plain text, a dead link a warning.

Executed notebooks are copies of `notebooks/`, so their links are read as from there, out of their texts and not of their code;
one to a notebook that is a page leads to the page. Links within `docs/` are left to Sphinx, which checks them.
"""

import json
import os
import re
from pathlib import Path

from sphinx.util import logging

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
PAGES, NOTEBOOKS = DOCS / "notebooks", ROOT / "notebooks"
LINK = re.compile(r"(?<!\\)(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s:#]+)(#[^()\s]*)?\)")
log = logging.getLogger(__name__)


def _rewrite(app, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname)).resolve()
    origin = NOTEBOOKS if page.parent == PAGES else page.parent

    def target(found: re.Match) -> str:
        text, link, anchor = found[1], found[2], found[3] or ""
        file = (origin / link).resolve()
        if file.parent == NOTEBOOKS and (PAGES / file.name).exists():
            return f"[{text}]({os.path.relpath(PAGES / file.name, page.parent)}{anchor})"
        if file.is_relative_to(DOCS):
            return (
                f"[{text}]({os.path.relpath(file, page.parent)}{anchor})" if origin == NOTEBOOKS else found[0]
            )
        if file.is_file():
            return f"[{text}](path:{os.path.relpath(file, page.parent)})"
        if not file.is_dir():
            log.warning("link to %s, which does not exist", link, location=docname)
        return text

    if page.suffix != ".ipynb":
        source[0] = LINK.sub(target, source[0])
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = LINK.sub(target, "".join(cell["source"]))
    source[0] = json.dumps(notebook)


def setup(app):
    app.connect("source-read", _rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
