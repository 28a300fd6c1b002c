"""`make chaos`: attacks of every kind, from one seed, in a bounded time; a table at the end, exit code 1 where one was not survived.

python -m tests.chaos.run --seconds 1200 --seed 0
"""

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pandas as pd

from stppo.config.provenance import environment
from tests.chaos.attacks import ATTACKS, Stage

# Share of the time, and most attacks, of each kind.
SHARES = {"kills": (0.35, 60), "two": (0.1, 10), "full": (0.15, 15), "1,000": (0.1, 1000), "damaged": (0.1, 200), "bad": (0.1, 150),
          "hostile retrieval server": (0.05, 100), "hostile retrieval clients": (0.05, 20)}  # fmt: skip


def attack(stage: Stage, name: str, seed: int, seconds: float, most: int) -> dict:
    """Attacks of one kind until the time or their number is over; the first one takes place in any case."""
    began, failures, n = time.monotonic(), [], 0
    while n < most and (n == 0 or time.monotonic() - began < seconds):
        try:
            ATTACKS[name](stage, random.Random(f"{name} {seed} {n}"))
        except Exception:
            failures.append(n)
            print(f"\n{name}, attack {n} of seed {seed}:\n{traceback.format_exc()[-3000:]}", file=sys.stderr)
        n += 1
    return {
        "attack": name,
        "tried": n,
        "survived": n - len(failures),
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--seconds", type=float, default=1200, help="for all kinds together; 0: one attack of each"
    )
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--only", default="", help="kinds whose name contains this")
    arguments.add_argument(
        "--json", type=Path, help="also write the table, commit, hardware and versions here"
    )
    asked = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="stppo-chaos-") as folder:
        stage, rows = Stage(Path(folder)), []
        for name in ATTACKS:
            if asked.only in name:
                share, most = next(limits for start, limits in SHARES.items() if name.startswith(start))
                rows.append(attack(stage, name, asked.seed, share * asked.seconds, most))
                print(rows[-1], file=sys.stderr, flush=True)
    table = pd.DataFrame(rows)
    print(table.to_string(index=False))
    if asked.json:
        content = {"seed": asked.seed, "attacks": rows, **environment()}
        asked.json.write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(int((table["survived"] < table["tried"]).any()))


if __name__ == "__main__":
    main()
