#!/usr/bin/env bash
# Guessed: snakemake --config reads its values as the YAML of a config file does.
# So is: of words only True and False are no text, so kl=false is the text "false", which counts as true; and within a list or mapping
# everything is text: seeds=[1,2] is ['1', '2'], training={lr: 0.5} holds '0.5'. A number by itself is one, 1e-4 too (which is text
# to Snakemake's config files). snakemake 9.27.1.
# Why it matters: `if config["kl"]` trains with what was switched off. A seed that is text makes another run, or none, than the same
# line in the file. Each value wants a check of its type, or one option that holds a text of overrides.
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
print("config:", dict(config))
rule all:
SNAKEFILE
printf 'kl: false\nseeds: [1, 2]\ntraining: {lr: 0.5}\nrate: 1e-4\n' > config.yaml
echo "snakemake $(snakemake --version)"
read_by() { snakemake -n all "$@" 2>&1 | grep "^config:"; }
in_file=$(read_by --configfile config.yaml)
on_line=$(read_by --config kl=false "seeds=[1,2]" "training={lr: 0.5}" rate=1e-4)
echo "from a file:       $in_file"
echo "from --config:     $on_line"
[ "$in_file" = "config: {'kl': False, 'seeds': [1, 2], 'training': {'lr': 0.5}, 'rate': '1e-4'}" ] &&
  [ "$on_line" = "config: {'kl': 'false', 'seeds': ['1', '2'], 'training': {'lr': '0.5'}, 'rate': 0.0001}" ] ||
  { echo "CHANGED: the two are read in another way"; exit 1; }
