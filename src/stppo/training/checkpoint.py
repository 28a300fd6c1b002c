"""Checkpoints: everything a run needs to go on exactly where it stopped, written atomically."""

import itertools
import os
from pathlib import Path
from typing import Any

import torch

from stppo.files import write_atomically
from stppo.schema import CONFIG_FILE, EVALUATIONS_FILE, RUN_FILE, TRAJECTORIES_FILE, UPDATES_FILE

FORMAT = 1
CHECKPOINT_FILE = "checkpoint.pt"


def save_checkpoint(path: Path, fingerprint: str, state: dict[str, Any]) -> None:
    """A kill at any moment leaves the old or the new file whole."""
    content = {"format": FORMAT, "fingerprint": fingerprint, "state": state}
    write_atomically(path, lambda part: torch.save(content, part))


def load_checkpoint(path: Path, fingerprint: str) -> dict[str, Any]:
    """The saved state. Raises ValueError, naming the file and the remedy, where it is damaged or was
    written by a run with another config or other code; nothing is deleted."""
    remedy = "to start this run again use `stppo train --resume set_aside`, which keeps the old files in a sub-folder"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        written_by, state = content["fingerprint"], content["state"]
    except Exception as error:
        raise ValueError(f"checkpoint {path} cannot be read ({type(error).__name__}); {remedy}") from error
    if content.get("format") != FORMAT or written_by != fingerprint:
        raise ValueError(
            f"checkpoint {path} belongs to another config or code version ({written_by}, this run is {fingerprint}); "
            f"{remedy}, or choose another run_dir"
        )
    return state


def set_aside(run_dir: Path) -> Path | None:
    """Move what an earlier run left in a run folder to a new sub-folder, losing nothing; None if it is empty."""
    names = (CHECKPOINT_FILE, RUN_FILE, UPDATES_FILE, EVALUATIONS_FILE, TRAJECTORIES_FILE, CONFIG_FILE)
    found = [run_dir / name for name in names if (run_dir / name).exists()]
    if not found:
        return None
    number = next(n for n in itertools.count(1) if not (run_dir / f"earlier-{n}").exists())
    aside = run_dir / f"earlier-{number}"
    aside.mkdir()
    for path in found:
        os.replace(path, aside / path.name)
    return aside
