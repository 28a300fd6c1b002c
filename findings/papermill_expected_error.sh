#!/usr/bin/env bash
# Guessed: a cell with the tag "raises-exception" may fail in papermill as in nbclient, on which it stands: the notebook passes.
# So is: the cells behind it are executed as nbclient does, and then papermill fails the notebook all the same, with the expected error. papermill 2.7.0,
# nbclient 0.11.0.
# Why it matters: a notebook that shows what goes wrong passes in Jupyter, nbconvert and nbmake, runs to its end in a pipeline, and fails there.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet papermill==2.7.0 nbclient==0.11.0 ipykernel==7.4.0
fi
"$FINDINGS_VENV/bin/python" -W ignore - <<'PYTHON'
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import nbformat
import papermill
from nbclient import NotebookClient

new = nbformat.v4
cells = [
    new.new_code_cell("raise ValueError('as expected')", metadata={"tags": ["raises-exception"]}),
    new.new_code_cell("print('and on')"),
]
kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
notebook = new.new_notebook(cells=cells, metadata={"kernelspec": kernel})
print("papermill", version("papermill"), "and nbclient", version("nbclient"))
passed = NotebookClient(nbformat.from_dict(notebook)).execute()
print("nbclient passes, and the last cell says", passed.cells[-1].outputs[0]["text"].strip())
with tempfile.TemporaryDirectory() as folder:
    given, made = Path(folder, "given.ipynb"), Path(folder, "made.ipynb")
    nbformat.write(notebook, given)
    try:
        papermill.execute_notebook(given, made, progress_bar=False)
        raised = "nothing"
    except papermill.PapermillExecutionError as error:
        raised = f"{type(error).__name__} of {error.ename}"
    last = nbformat.read(made, 4).cells[-1].outputs
print("papermill raises", raised, "and the last cell says", last[0]["text"].strip() if last else "nothing")
if raised == "nothing" or not last:
    sys.exit("CHANGED: papermill passes a cell that may fail, or stops at it")
PYTHON
