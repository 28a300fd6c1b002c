#!/usr/bin/env bash
# Guessed: a run of Snakemake holds its lock to its end, so a second run of the same targets is refused. So it is: any other
# run in that folder, of other targets, removes the locks of all when it ends, even with nothing to do; then two run the same
# job at once. Package: snakemake 9.27.1. Matters: where the second is stopped, it deletes the results of the first.
set -euo pipefail
work=$(mktemp -d)
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$work/venv
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet snakemake==9.27.1
fi
export PATH="$FINDINGS_VENV/bin:$PATH"
long=
trap 'kill $long 2>/dev/null || true; wait; rm -rf "$work"' EXIT
cd "$work"
cat > Snakefile <<'SNAKEFILE'
rule long:
    output: "long.txt"
    shell: "sleep 45; date > {output}"
rule other:
    output: "other.txt"
    shell: "date > {output}"
SNAKEFILE
echo "snakemake $(snakemake --version)"
make() { snakemake "$1" --cores 1 --quiet progress rules host 2>&1; }
make other.txt > log
make long.txt > long.log &
long=$!
for _ in $(seq 60); do [ -e .snakemake/locks/0.output.lock ] && break || sleep 0.5; done
if make long.txt > log; then echo "CHANGED: a second run of long.txt is not refused"; exit 1; fi
grep "cannot be locked" log
make other.txt
kill -0 "$long"
echo "other.txt, which had nothing to do, has ended; long.txt is still made; locks: $(ls .snakemake/locks 2>/dev/null | wc -l)"
[ ! -e .snakemake/locks ] || { echo "CHANGED: the first run's locks are still there"; exit 1; }
