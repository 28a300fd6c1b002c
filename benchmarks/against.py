"""Iterations of this checkout and of another one, by turns: `python benchmarks/against.py ../older` prints a Markdown table.

Both train the same short runs by their own command line, in this Python environment; seconds are what their metrics say of
each iteration, the first two left out. The other checkout may be as old as its columns `seconds_*` and `stppo train`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import pandas as pd
from run import QUIET, Table, keep, markdown, ratios, spread

HERE = Path(__file__).parents[1]
ALGORITHMS = ("token_ppo", "st_ppo")
WARM_UP, ITERATIONS = 2, 12
ONCE_AN_ITERATION = ["seconds_rollout", "seconds_scoring", "seconds_critic"]


def train(checkout: Path, scratch: Path, algorithm: str) -> dict[str, float]:
    """Median seconds of an iteration's parts in a new run; a checkout keeps its warm start in its own `results`."""
    quiet = [o for o in QUIET if not o.startswith("training.iterations")]
    overrides = ["preset=laptop", "seed=0", "training=off_policy", f"algorithm={algorithm}", *quiet]
    folder = Path(tempfile.mkdtemp(dir=scratch))
    command = [str(Path(sys.executable).parent / "stppo"), "train", *overrides]
    command += [f"training.iterations={ITERATIONS}", "--out", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout}: stppo train failed: {done.stderr.strip()[-500:]}")
    table = pd.read_parquet(folder / "updates.parquet")
    by_iteration = table[table["iteration"] > WARM_UP].groupby("iteration")
    found = by_iteration[ONCE_AN_ITERATION].first()
    found["seconds_update"] = by_iteration["seconds_update"].sum()
    found["whole"] = found.sum(axis=1)
    return found.median().to_dict()


def compare(other: Path, repeats: int) -> Table:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for algorithm in ALGORITHMS:
            times: dict[Path, dict[str, list[float]]] = {path: defaultdict(list) for path in (HERE, other)}
            for _ in range(repeats):
                for checkout, found in times.items():
                    for part, seconds in train(checkout, Path(folder), algorithm).items():
                        found[part].append(seconds)
            rows += [
                {
                    "an iteration": f"{algorithm}, {part.removeprefix('seconds_')}",
                    "here, s": spread(found),
                    "there, s": spread(times[other][part]),
                    "there takes": ratios(times[other][part], found),
                }
                for part, found in times[HERE].items()
            ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="a second checkout of this project")
    parser.add_argument("--json", type=Path, help="also write table, hardware and versions here")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    other = arguments.other.resolve()
    there = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=other, capture_output=True, text=True, check=True
    )
    rows = compare(other, arguments.repeats)
    title = f"Against {there.stdout[:7]}"
    print(markdown(title, rows))
    keep(arguments.json, {title: rows})


if __name__ == "__main__":
    main()
