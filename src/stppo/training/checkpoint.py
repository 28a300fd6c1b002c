"""Checkpoints: everything a run needs to go on exactly where it stopped, written as one.

A checkpoint is a folder: `state.json` and one safetensors file for each part that holds tensors. It is
written beside the one before and then renamed, so a kill or a full disk leaves the older whole."""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stppo.files import parse_json
from stppo.record.schema import (
    BY_BENCHMARK_FILE,
    CHECKPOINT_DIR,
    CONFIG_FILE,
    EVALUATIONS_FILE,
    POLICY_DIR,
    RUN_FILE,
    SET_ASIDE,
    TRAJECTORIES_FILE,
    UPDATES_FILE,
)
from stppo.training.loggers import FOLDERS

FORMAT = 3
_STATE_FILE = "state.json"
_REMEDY = (
    "to start this run again use `stppo train --resume set_aside`, which keeps the old files in a sub-folder"
)


def newest(folder: Path) -> Path | None:
    """The complete checkpoint in a run's checkpoint folder; None if there is none."""
    return max(_numbered(folder), key=lambda path: int(path.name), default=None)


def _numbered(folder: Path) -> list[Path]:
    return [path for path in folder.glob("[0-9]*") if path.name.isdigit()]


def _to_disk(path: Path) -> None:
    """Wait until the system has written a file, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_checkpoint(folder: Path, fingerprint: str, state: dict[str, Any]) -> None:
    """Write a state of plain values, containers and tensors (on any device), then drop what was there before.

    It is on the disk before it gets its name, so that a machine that goes down leaves one whole checkpoint
    too. Each top-level entry is a part. Raises OSError, leaving the older checkpoint whole, where it cannot
    be written."""
    folder.mkdir(parents=True, exist_ok=True)
    older = newest(folder)
    number = 1 if older is None else int(older.name) + 1
    part = folder / f".{number}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        content: dict[str, Any] = {"format": FORMAT, "fingerprint": fingerprint, "state": {}}
        for name, value in state.items():
            tensors: dict[str, Tensor] = {}
            content["state"][name] = _without_tensors(value, tensors)
            if tensors:
                save_file(tensors, part / f"{name}.safetensors")
        (part / _STATE_FILE).write_text(json.dumps(content), encoding="utf-8")
        for path in (*part.iterdir(), part):
            _to_disk(path)
        os.rename(part, folder / str(number))
        _to_disk(folder)
    except (OSError, SafetensorError) as error:
        size = sum(file.stat().st_size for file in older.iterdir()) if older else 0
        kept = (
            f"the checkpoint before it is whole ({size / 2**20:.0f} MiB)"
            if older
            else "there is none before it"
        )
        raise OSError(
            f"checkpoint in {folder} cannot be written ({str(error).splitlines()[0]}); {kept}; make room and "
            "run the same command again"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    for earlier in _numbered(folder):  # all: a kill amid their removal leaves some behind
        if int(earlier.name) < number:
            shutil.rmtree(earlier)


def load_checkpoint(
    folder: Path,
    fingerprint: str,
    needed: Collection[str] = (),
    difference: Callable[[], str] = lambda: "another config or code",
) -> dict[str, Any] | None:
    """The saved state, tensors on the CPU; None where nothing was saved.

    needed: parts that it must have. difference: says what the run that wrote it differs by, where its
    fingerprint is another. Raises ValueError, naming the file and the remedy, where it is damaged or
    was written by a run with another config or other code; nothing is deleted."""
    if (path := newest(folder)) is None:
        return None
    try:
        content = parse_json((path / _STATE_FILE).read_bytes())
        written_by, form, parts = content["fingerprint"], content["format"], dict(content["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {path} cannot be read ({type(error).__name__}); {_REMEDY}") from error
    if form != FORMAT:
        raise ValueError(f"checkpoint {path} is of another version's format; {_REMEDY}")
    if written_by != fingerprint:
        raise ValueError(
            f"checkpoint {path} is of another run ({difference()}); {_REMEDY}, or choose another folder with "
            "--out"
        )
    if missing := [name for name in needed if name not in parts]:
        raise ValueError(f"checkpoint {path} lacks {missing[0]}; {_REMEDY}")
    state = {}
    for name, value in parts.items():
        file = path / f"{name}.safetensors"
        try:
            # Copies: a file that is mapped into memory would be aligned, hence summed, differently.
            tensors = {key: t.clone() for key, t in load_file(file).items()} if file.exists() else {}
            state[name] = _with_tensors(value, tensors)
            if tensors:
                raise KeyError(f"surplus {min(tensors)}")
        except (OSError, KeyError, SafetensorError) as error:
            raise ValueError(
                f"checkpoint {file} cannot be read ({type(error).__name__}); {_REMEDY}"
            ) from error
    return state


def _without_tensors(node: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """The node as JSON; tensors move to `tensors` and leave their name."""
    if isinstance(node, Tensor):
        tensors[name] = node.detach().to("cpu", copy=True).contiguous()
        return {"__tensor__": name}
    if isinstance(node, dict) and not all(isinstance(key, str) for key in node):
        items = [[key, _without_tensors(value, tensors, f"{name}/{key}")] for key, value in node.items()]
        return {"__items__": items}
    if isinstance(node, dict):
        return {key: _without_tensors(value, tensors, f"{name}/{key}") for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_without_tensors(value, tensors, f"{name}/{i}") for i, value in enumerate(node)]
    return node


def _with_tensors(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_with_tensors(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if "__tensor__" in node:
        return tensors.pop(node["__tensor__"])
    if "__items__" in node:
        return {key: _with_tensors(value, tensors) for key, value in node["__items__"]}
    return {key: _with_tensors(value, tensors) for key, value in node.items()}


def trained(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes, by name; a tied one once, frozen ones not at all."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@torch.no_grad()
def restore(model: torch.nn.Module, saved: dict[str, Tensor]) -> None:
    """Put parameters back that `trained` gave; ValueError unless they are all there, of the same shapes, and
    no others."""
    weights = trained(model)
    if weights.keys() != saved.keys():
        raise ValueError(f"checkpoint: {min(weights.keys() ^ saved.keys())} is missing or surplus; {_REMEDY}")
    for name, weight in weights.items():
        if weight.shape != saved[name].shape:
            shapes = f"{tuple(saved[name].shape)}, not {tuple(weight.shape)}"
            raise ValueError(f"checkpoint: {name} has the shape {shapes}; {_REMEDY}")
        weight.copy_(saved[name])


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put an optimizer's state back; ValueError where it is not that of these parameters, which torch checks
    in part."""
    try:
        optimizer.load_state_dict(saved)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"checkpoint: the optimizer's state does not fit ({error}); {_REMEDY}") from error
    for weight, state in optimizer.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state and state[name].shape != weight.shape:
                raise ValueError(f"checkpoint: {name} of the optimizer does not fit its parameter; {_REMEDY}")


def set_aside(run_dir: Path) -> Path | None:
    """Move what an earlier run left in a run folder to a new sub-folder, losing nothing; None if it is
    empty."""
    names = (RUN_FILE, UPDATES_FILE, EVALUATIONS_FILE, BY_BENCHMARK_FILE, TRAJECTORIES_FILE, CONFIG_FILE)
    names = (CHECKPOINT_DIR, POLICY_DIR, *names, *FOLDERS)
    found = [run_dir / name for name in names if (run_dir / name).exists()]
    if not found:
        return None
    number = next(n for n in itertools.count(1) if not (run_dir / f"{SET_ASIDE}{n}").exists())
    aside = run_dir / f"{SET_ASIDE}{number}"
    aside.mkdir()
    for path in found:
        os.replace(path, aside / path.name)
    return aside
