"""The site: `make docs` builds it without a network. Pages are MyST Markdown and the executed notebooks."""

import logging
import sys
from pathlib import Path

import yaml

from stppo.study import pages

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

logging.getLogger("faiss").setLevel(logging.WARNING)  # it tells of every build of itself that it looks for

project = "stppo"
author = "the stppo contributors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton", "mathml", "generated", "links", "breaks"]
# The generated ones are parts of other pages.
exclude_patterns = [
    "_build",
    "_ext",
    "reference/generated/front.md",
    "reference/generated/study.md",
    "reference/generated/leaderboard.md",
    "reference/generated/mechanism.md",
    "reference/generated/search.md",
    "reference/generated/milder-setting.md",
    "reference/generated/unbiased.md",
    "reference/generated/divisor.md",
    "reference/generated/starving.md",
    "reference/generated/thousand-iterations.md",
    "reference/generated/language-model.md",
    "reference/generated/speed.md",
]
html_theme = "furo"
html_show_copyright = False
html_title = "stppo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist", "substitution"]


def _shown(value):
    """A share with two digits, and anything else as it is; parts of a path stay a mapping."""
    if isinstance(value, dict):
        return {name: _shown(part) for name, part in value.items()}
    return pages.shown(value, ".00", None) if isinstance(value, float) else value


# {{ study.off_policy.token_ppo.final }} in a page
_values = Path(__file__).parents[1] / "results/reference/values.yaml"
myst_substitutions = _shown(yaml.safe_load(_values.read_text(encoding="utf-8")))
myst_heading_anchors = 3
nb_execution_mode = "off"  # the pipeline executed them: see `make docs`
nb_merge_streams = True
nb_output_stderr = "remove"
nb_render_markdown_format = "myst"  # tables too
nb_ipywidgets_js = {}  # widgets would load scripts from elsewhere; their pictures are shown

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["verl", "vllm", "trl", "peft", "bitsandbytes", "faiss", "fastapi", "uvicorn"]
nitpicky = False
suppress_warnings = ["mystnb.unknown_mime_type"]
