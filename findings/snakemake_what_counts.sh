#!/usr/bin/env bash
# Guessed: a rule whose shell command holds {config[lr]} runs again with another --config lr=..., and one with `notebook:` does not
# where Jupyter only saved the notebook with its outputs.
# So is: the other way round. A command is compared as it is typed, with {config[lr]} in it, so the old result stands, "Nothing to be
# done". A notebook is compared as a file, outputs included, so saving it is a change of code. snakemake 9.27.1.
# Why it matters: a sweep over learning rates that names the rate in the command alone plots one run many times; reading a notebook
# retrains what depends on it. What is named in `params` is compared with its value.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet snakemake==9.27.1 papermill==2.7.0 ipykernel nbconvert
fi
cd "$(mktemp -d)"
export PATH="$FINDINGS_VENV/bin:$PATH"
cat > Snakefile <<'SNAKEFILE'
rule typed:
    output: "typed.txt"
    shell: "echo {config[lr]} > {output}"
rule named:
    output: "named.txt"
    params: lr=config["lr"]
    shell: "echo {params.lr} > {output}"
rule book:
    output: "book.txt"
    notebook: "book.py.ipynb"
SNAKEFILE
python - <<'PYTHON'
import nbformat

cell = nbformat.v4.new_code_cell("open(snakemake.output[0], 'w').write('done')")
kernel = {"name": "python3", "language": "python", "display_name": "Python 3"}
metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=metadata), "book.py.ipynb")
PYTHON
echo "snakemake $(snakemake --version)"
snakemake --cores 1 --config lr=0.1 --quiet all -- typed.txt named.txt book.txt > log 2>&1
planned() { snakemake -n --cores 1 --config lr=0.5 -- "$1.txt" 2>&1 | grep -q "Nothing to be done" && echo no || echo yes; }
python - <<'PYTHON'
import nbformat

book = nbformat.read("book.py.ipynb", 4)
book.cells[0].outputs = [nbformat.v4.new_output("stream", text="looked at")]
nbformat.write(book, "book.py.ipynb")
PYTHON
typed=$(planned typed) named=$(planned named) book=$(planned book)
echo "planned anew: rate in the command: $typed; rate in params: $named; notebook saved with an output: $book"
[ "$typed $named $book" = "no yes yes" ] || { echo "CHANGED: another of the three is planned anew"; exit 1; }
