#!/usr/bin/env bash
# Guessed: a rule whose two named inputs are swapped, or whose inputs stand in another order, runs again: its command is another.
# So is: "Nothing to be done". What is compared with the last run is which files a rule reads, not under which name or in which order.
# snakemake 9.27.1.
# Why it matters: a table of differences "ours minus baseline" whose inputs were the wrong way round keeps its signs after the mend, and
# all that depends on it too. Snakemake says that all is up to date. --forcerun makes it anew.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet snakemake==9.27.1
fi
cd "$(mktemp -d)"
export PATH="$FINDINGS_VENV/bin:$PATH"
echo .6 > token_ppo.txt
echo .8 > st_ppo.txt
cat > Snakefile <<'SNAKEFILE'
import os
ours, baseline = ("st_ppo.txt", "token_ppo.txt") if os.environ["MENDED"] == "yes" else ("token_ppo.txt", "st_ppo.txt")
rule all:
    input: "by_name.txt", "by_order.txt"
rule by_name:
    input: ours=ours, baseline=baseline
    output: "by_name.txt"
    shell: "echo $(cat {input.ours}) - $(cat {input.baseline}) > {output}"
rule by_order:
    input: ours, baseline
    output: "by_order.txt"
    shell: "echo $(cat {input[0]}) - $(cat {input[1]}) > {output}"
SNAKEFILE
echo "snakemake $(snakemake --version)"
MENDED=no snakemake --cores 1 --quiet all
said=$(MENDED=yes snakemake --cores 1 2>&1 | grep -o "Nothing to be done" || true)
echo "after the inputs were put right: ${said:-jobs ran}; by_name: $(cat by_name.txt), by_order: $(cat by_order.txt)"
if [ -z "$said" ] || [ "$(cat by_name.txt by_order.txt | sort -u)" != ".6 - .8" ]; then
  echo "CHANGED: the names or the order of inputs count"
  exit 1
fi
MENDED=yes snakemake --cores 1 --quiet all --forcerun by_name by_order
echo "with --forcerun: by_name: $(cat by_name.txt)"
[ "$(cat by_name.txt)" = ".8 - .6" ] || { echo "CHANGED: --forcerun does not run it"; exit 1; }
