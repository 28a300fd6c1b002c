"""One library's algorithm beside ours: at its defaults, cut into micro-batches, and with the options that make it equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.hosts.batch import compared, fixed_batch, ours
from benchmarks.hosts.cells import DEFAULTS
from benchmarks.hosts.losses import HOSTS
from stppo.plugins import methods

FILE = Path(__file__).parents[2] / "results/reference/hosts.json"


def measured(host: str, name: str) -> dict[str, Any]:
    """One cell: the gradient at the host's defaults against the YAML's; cut into micro-batches of one trajectory against
    uncut; and with the options that make it equal."""
    cell, run, batch = DEFAULTS[host][name], HOSTS[host][0], fixed_batch()
    wanted, gradient = ours(name, batch), run(cell.line, batch)[0]
    equal = cell.equal
    if host in methods.OFFERED and (found := methods.options(host, name)):
        equal = found.line
    row = {"line": cell.line, "note": cell.note, **compared(gradient, wanted)}
    row["cut"] = compared(run(cell.line, batch, 1)[0], gradient)
    row["equal"] = None if equal is None else {"line": equal, **compared(run(equal, batch)[0], wanted)}
    return row
