"""What a library's losses compute, against our YAML files, written into `results/reference/hosts.json`.

`python -m benchmarks.hosts HOST` in an environment that has the library (and this project). `make docs` makes the page "One name,
many algorithms" from the file; `tests/engines` repeats verl's and TRL's.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version

from benchmarks.hosts.cells import DEFAULTS
from benchmarks.hosts.losses import HOSTS
from benchmarks.hosts.measured import FILE, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("host", choices=list(HOSTS))
    host = parser.parse_args().host
    cells = {name: measured(host, name) for name in DEFAULTS[host]}
    versions = {package: version(package).split("+")[0] for package in HOSTS[host][1]}
    found = json.loads(FILE.read_text(encoding="utf-8")) | {host: {"versions": versions, "cells": cells}}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, row in cells.items():
        equal = row["equal"] and row["equal"]["distance"]
        print(
            f"{name:10} {row['cosine']:7.4f} x{row['norm_ratio']:8.4f} cut {row['cut']['distance']:.2g} equal {equal}"
        )


if __name__ == "__main__":
    main()
