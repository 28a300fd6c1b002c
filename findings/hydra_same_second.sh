#!/usr/bin/env bash
# Guessed: four runs of a Hydra program that are started together, one for each seed, write into four folders.
# So is: a folder is named by the second in which its run began, and one that exists is used. The four share one; its record
# (.hydra/overrides.yaml) names the seed of whichever came last. hydra-core 1.3.8.
# Why it matters: a shell loop with "&" and a cluster's job array start so. Weights and metrics of several seeds overwrite each other or
# are appended, and a table of seeds holds one seed several times. Name the folder by what differs: hydra.run.dir='out/${seed}'.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet hydra-core==1.3.8
fi
cd "$(mktemp -d)"
cat > train.py <<'PYTHON'
import hydra
from hydra.core.hydra_config import HydraConfig


@hydra.main(config_path=None, version_base="1.3")
def main(config):
    with open(HydraConfig.get().runtime.output_dir + "/metrics.csv", "a") as file:
        file.write(f"seed {config.seed}\n")


main()
PYTHON
"$FINDINGS_VENV/bin/python" -c 'from importlib.metadata import version; print("hydra-core", version("hydra-core"))'
folders=4
for _ in 1 2 3; do # a second may end between two starts
  rm -rf outputs
  for seed in 0 1 2 3; do "$FINDINGS_VENV/bin/python" train.py "+seed=$seed" & done
  wait
  count=$(ls -d outputs/*/* | wc -l)
  [ "$count" -lt "$folders" ] && folders=$count
  for folder in outputs/*/*; do
    echo "$folder: metrics of $(paste -sd, "$folder/metrics.csv"); its record says $(cat "$folder/.hydra/overrides.yaml")"
  done
done
[ "$folders" -lt 4 ] || { echo "CHANGED: runs of one second have folders of their own"; exit 1; }
