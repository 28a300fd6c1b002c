#!/usr/bin/env bash
# Guessed: execute_notebook(parameters={"seeds": (0, 1, 2)}) hands the notebook three seeds, as a tuple or, like JSON, as a list.
# So is: a tuple becomes the text "(0, 1, 2)", within lists and mappings too, and nothing is said. Its length is 9, and a loop over it
# goes through brackets, digits and commas. The record of parameters in the same notebook's metadata is a list. papermill 2.7.0.
# Why it matters: settings of dataclasses and of argparse have tuples (seeds, betas, clip ranges). `0 in seeds`, `len(seeds)`, `seeds[:2]`
# all give something, and the mistake shows where it is far from its cause. Hand over lists.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet papermill==2.7.0 ipykernel
fi
cd "$(mktemp -d)"
export PATH="$FINDINGS_VENV/bin:$PATH"
python - <<'PYTHON'
import sys
from importlib.metadata import version

import nbformat
import papermill

book = nbformat.v4.new_notebook()
defaults = nbformat.v4.new_code_cell("seeds = ()\nadam = {}", metadata={"tags": ["parameters"]})
shown = "print(repr(seeds), repr(adam), len(seeds), [seed for seed in seeds][:3], sep='|')"
book.cells = [defaults, nbformat.v4.new_code_cell(shown)]
book.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
nbformat.write(book, "book.ipynb")


def seen(kind):
    """What the notebook prints, and what its metadata say."""
    given = {"seeds": kind((0, 1, 2)), "adam": {"betas": kind((0.9, 0.999))}}
    done = papermill.execute_notebook("book.ipynb", "out.ipynb", parameters=given, progress_bar=False)
    return done.cells[-1].outputs[0].text.strip().split("|"), nbformat.read("out.ipynb", 4).metadata.papermill.parameters.seeds


print("papermill", version("papermill"))
print("seeds, adam, length, loop; in the metadata")
(as_tuple, recorded), (as_list, _) = seen(tuple), seen(list)
print("tuples:", *as_tuple, ";", recorded)
print("lists :", *as_list)
if as_tuple[:3] != ["'(0, 1, 2)'", "{'betas': '(0.9, 0.999)'}", "9"] or recorded != [0, 1, 2] or as_list[2] != "3":
    sys.exit("CHANGED: papermill hands tuples on as tuples")
PYTHON
