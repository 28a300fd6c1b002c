#!/usr/bin/env bash
# Guessed: a rule whose `params` are a set of names has nothing to do once it has run.
# So is: params are compared by their text, and the order in which Python writes a set changes with every start. So the rule, and
# all that depends on it, is planned anew at nearly every call, "Params have changed". Sorted, the same names are left alone.
# snakemake 9.27.1.
# Why it matters: a set of algorithms or seeds in `params` retrains everything. (Long numpy arrays are compared by their text as
# well, which leaves out their middle.)
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet snakemake==9.27.1
fi
cd "$(mktemp -d)"
export PATH="$FINDINGS_VENV/bin:$PATH"
cat > Snakefile <<'SNAKEFILE'
NAMES = {"token_ppo", "turn_ppo", "s_ppo", "st_ppo", "grpo", "so_grpo"}
rule as_set:
    output: "set.txt"
    params: names=NAMES
    shell: "echo {params.names} > {output}"
rule as_list:
    output: "list.txt"
    params: names=sorted(NAMES)
    shell: "echo {params.names} > {output}"
SNAKEFILE
echo "snakemake $(snakemake --version)"
snakemake --cores 1 --quiet all -- set.txt list.txt
planned() { for _ in 1 2 3 4 5; do snakemake -n --cores 1 -- "$1" 2>&1; done | grep -c "Nothing to be done" || true; }
unset PYTHONHASHSEED
of_set=$((5 - $(planned set.txt))) of_list=$((5 - $(planned list.txt)))
echo "planned again in 5 calls: $of_set times as a set, $of_list times as a sorted list"
[ "$of_set" -ge 3 ] && [ "$of_list" = 0 ] || { echo "CHANGED: a set in params is compared as a set"; exit 1; }
