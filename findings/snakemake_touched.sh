#!/usr/bin/env bash
# Guessed: an input with a newer time stamp and the same content plans its rule anew, or does not, whatever its size.
# So is: up to 1 MB Snakemake compares the content and leaves the rule alone; above, the time stamp decides, and all that depends on the
# file is planned anew (--max-checksum-file-size moves the limit). snakemake 9.27.1.
# Why it matters: a restored cache or a fresh checkout retrains what reads large tables and nothing that reads small ones. What a pipeline
# is seen to leave alone with a test's small files, it runs again with real ones.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet snakemake==9.27.1
fi
cd "$(mktemp -d)"
export PATH="$FINDINGS_VENV/bin:$PATH"
head -c 500000 /dev/zero > small.parquet
head -c 2000000 /dev/zero > large.parquet
cat > Snakefile <<'SNAKEFILE'
rule figure:
    input: "{size}.parquet"
    output: "{size}.png"
    shell: "cp {input} {output}"
SNAKEFILE
echo "snakemake $(snakemake --version)"
snakemake --cores 1 --quiet all -- small.png large.png
sleep 1.1
touch small.parquet large.parquet
planned() { snakemake -n --cores 1 -- "$1.png" 2>&1 | grep -q "Nothing to be done" && echo no || echo yes; }
small=$(planned small) large=$(planned large)
echo "planned anew after touch: half a megabyte $small, two megabytes $large"
[ "$small $large" = "no yes" ] || { echo "CHANGED: size does not matter"; exit 1; }
