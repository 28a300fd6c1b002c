#!/usr/bin/env bash
# Guessed: read_parquet of a folder, one file for each run, has every column that some file has; and its filter ("kl_stop", "!=", .05)
# keeps what the same comparison keeps in pandas.
# So is: the columns are those of the first file by name. What only later runs recorded is gone, without a word. The filter drops
# runs without a number, which pandas keeps; ("kl_stop", "not in", [.05]) keeps them. pandas 2.3.3, pyarrow 26.0.1.
# Why it matters: methods record what they have. Whether a table has ‖C‖ or the critic's loss is decided by whose name comes first,
# and the arm without a KL stop, the baseline, is the one that is missing.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet pandas==2.3.3 pyarrow==26.0.1
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from pathlib import Path

import pandas as pd
import pyarrow

Path("runs").mkdir()
pd.DataFrame({"arm": ["grpo"], "success": [0.4]}).to_parquet("runs/grpo.parquet")
pd.DataFrame({"arm": ["ppo"], "success": [0.5], "critic_loss": [0.1]}).to_parquet("runs/ppo.parquet")
columns = pd.read_parquet("runs").columns.tolist()
print("pandas", pd.__version__, "pyarrow", pyarrow.__version__)
print("ppo.parquet has a critic_loss; the folder has", columns)

runs = pd.DataFrame({"arm": ["stop at .05", "stop at .1", "no stop"], "kl_stop": [0.05, 0.1, None]})
runs.to_parquet("runs.parquet")
kept = {
    "pandas, !=": runs[runs["kl_stop"] != 0.05],
    "filter, !=": pd.read_parquet("runs.parquet", filters=[("kl_stop", "!=", 0.05)]),
    "filter, not in": pd.read_parquet("runs.parquet", filters=[("kl_stop", "not in", [0.05])]),
}
for name, rows in kept.items():
    print(f"{name:14}", rows["arm"].tolist())
if "critic_loss" in columns or len(kept["filter, !="]) == len(kept["pandas, !="]):
    sys.exit("CHANGED: a folder has all columns, or a filter compares as pandas does")
PYTHON
