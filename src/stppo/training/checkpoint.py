"""Checkpoints: everything a run needs to go on exactly where it stopped, written atomically."""

import os
from pathlib import Path
from typing import Any

import torch

from stppo.files import write_atomically

FORMAT = 1
CHECKPOINT_FILE = "checkpoint.pt"


def save_checkpoint(path: Path, fingerprint: str, state: dict[str, Any]) -> None:
    """A kill at any moment leaves the old or the new file whole."""
    content = {"format": FORMAT, "fingerprint": fingerprint, "state": state}
    write_atomically(path, lambda part: torch.save(content, part))


def load_checkpoint(path: Path, fingerprint: str) -> dict[str, Any]:
    """The saved state. Raises ValueError, naming the file and the remedy, where it is damaged or was
    written by a run with another config or other code; nothing is deleted."""
    remedy = "move it away to start this run again; metrics recorded so far stay where they are"
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


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that this run cannot use, losing nothing; returns the new name."""
    aside = path.with_name(f"{path.stem}.stale-{int(path.stat().st_mtime)}{path.suffix}")
    os.replace(path, aside)
    return aside
