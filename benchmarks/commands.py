"""Minutes of this project's own commands in a fresh clone: `python benchmarks/commands.py` prints a Markdown table.

The set-up is timed by itself. Nothing else should run meanwhile: the commands use all cores. Rows of other commands that the JSON file
holds stay there.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from run import Table, keep, markdown, provenance

HERE = Path(__file__).parents[1]
COMMANDS = ("make setup", "make test", "make all PRESET=smoke", "make all")


def rows_of(file: Path | None) -> Table:
    """What an earlier call has written."""
    if file is None or not file.is_file():
        return []
    return json.loads(file.read_text(encoding="utf-8"))["tables"]["Commands"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the table, hardware and versions here")
    parser.add_argument("--clone", type=Path, help="a clone that is there already (default: a new one)")
    parser.add_argument("commands", nargs="*", default=COMMANDS, help=f"default: {', '.join(COMMANDS)}")
    arguments = parser.parse_args()
    rows = rows_of(arguments.json)
    commit = provenance()["git_commit"]
    # Without the environment that this runs in.
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean["PATH"] = os.pathsep.join(p for p in clean["PATH"].split(os.pathsep) if "/.venv" not in p)
    with tempfile.TemporaryDirectory() as new:
        folder = arguments.clone or Path(new)
        if arguments.clone is None:
            subprocess.run(["git", "clone", "--quiet", str(HERE), new], check=True)
        for command in arguments.commands:
            began = time.perf_counter()
            done = subprocess.run(command, shell=True, cwd=folder, env=clean)
            minutes = (time.perf_counter() - began) / 60
            row = {"command": command, "minutes": f"{minutes:.1f}", "exit status": str(done.returncode)}
            rows = [*(kept for kept in rows if kept["command"] != command), row | {"commit": commit[:7]}]
            print(markdown("Commands", rows), flush=True)
            keep(arguments.json, {"Commands": rows})


if __name__ == "__main__":
    main()
