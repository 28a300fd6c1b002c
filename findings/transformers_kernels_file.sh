#!/usr/bin/env bash
# Guessed: `from transformers import LlamaModel` imports transformers and what it depends on. A file kernels.py beside one's own script,
# where one keeps kernels of one's own, is none of that.
# So is: transformers 5.17 asks whether the package `kernels` is there, finds the file, and to learn its version runs it, in the midst of
# its own import. Where that file imports a model of transformers itself, as a file of kernels does, the import ends with an error that
# names both files and neither's fault. transformers 5.10.4 runs it as well. The names peft, torchao, triton and flute are asked for likewise.
# Why it matters: a benchmark that is called kernels.py breaks every other script of its folder. Such names are taken.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 transformers==5.17.0
fi
folder=$(mktemp -d)
cat > "$folder/kernels.py" <<'PYTHON'
print("kernels.py runs")
PYTHON
cat > "$folder/train.py" <<'PYTHON'
import sys

import transformers
from transformers import LlamaModel

print("transformers", transformers.__version__, "gave", LlamaModel.__name__)
print("kernels.py was run:", "kernels" in sys.modules)
sys.exit("CHANGED: only transformers was imported" if "kernels" not in sys.modules else 0)
PYTHON
"$FINDINGS_VENV/bin/python" "$folder/train.py"
rm -r "$folder"
