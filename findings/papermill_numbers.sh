#!/usr/bin/env bash
# Guessed: a learning rate of 1e-3 in a YAML file of parameters is a number to papermill, as it is to Hydra.
# So is: papermill reads YAML 1.1, where a number with an exponent needs a point: the notebook gets the text '1e-3'. On its command
# line (-p) the same characters are a number, and there 2024_01 is one as well: 202401. papermill 2.7.0, omegaconf 2.3.1.
# Why it matters: the same file serves both in a pipeline. The notebook stops far from the cause, or compares texts; a run named by
# its date loses its name.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet papermill==2.7.0 omegaconf==2.3.1 ipykernel
fi
cd "$(mktemp -d)"
export PATH="$FINDINGS_VENV/bin:$PATH"
echo 'learning_rate: 1e-3' > parameters.yaml
python - <<'PYTHON'
import nbformat

cells = [nbformat.v4.new_code_cell("learning_rate = 0.1\nrun = ''"), nbformat.v4.new_code_cell("print(repr(learning_rate), repr(run))")]
cells[0].metadata["tags"] = ["parameters"]
kernel = {"name": "python3", "language": "python", "display_name": "Python 3"}
nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), "notebook.ipynb")
PYTHON
got() { papermill notebook.ipynb out.ipynb --no-progress-bar "$@" > log 2>&1; python -c "import nbformat; print(nbformat.read('out.ipynb', 4).cells[-1].outputs[0].text.strip())"; }
by_file=$(got -f parameters.yaml) by_option=$(got -p learning_rate 1e-3 -p run 2024_01)
hydra=$(python -c "from omegaconf import OmegaConf; print(repr(OmegaConf.load('parameters.yaml').learning_rate))")
echo "papermill $(pip list 2>/dev/null | awk '$1 == "papermill" {print $2}'), omegaconf $(python -c 'import omegaconf; print(omegaconf.__version__)')"
echo "in the notebook, from the file: $by_file; from the command line: $by_option; to Hydra: $hydra"
[ "$by_file" = "'1e-3' ''" ] && [ "$by_option" = "0.001 202401" ] && [ "$hydra" = 0.001 ] || { echo "CHANGED: they agree"; exit 1; }
