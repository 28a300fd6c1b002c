"""What a run or a warm start depends on, and its fingerprint: the same where the results would be the
same."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stppo.config.files import Config, Presentation
from stppo.config.provenance import code_hash, config_targets
from stppo.files import content_hash, repository_path
from stppo.rollout import ENGINES


def run_section(config: Config) -> Config:
    """What one run depends on: the config without the pipeline's list of runs, the study's groups, the
    preset's name, the loggers, how many trajectories its page shows, and how figures show the algorithm."""
    section = {k: v for k, v in config.items() if k not in ("pipeline", "study", "preset", "loggers")}
    if isinstance(algorithm := section.get("algorithm"), dict):
        section["algorithm"] = {k: v for k, v in algorithm.items() if k not in Presentation.model_fields}
    if isinstance(evaluation := section.get("evaluation"), dict):
        section["evaluation"] = {k: v for k, v in evaluation.items() if k != "trajectories"}
    return section


# Settings that change no result but for rounding: a run goes on from its checkpoint under others.
MEMORY_SETTINGS = {
    "training": ("gradient_checkpointing", "micro_batch_tokens", "kernels"),
    "rollout": (
        "gpu_memory_utilization",
        "max_num_seqs",
        "enforce_eager",
        "sleep_level",
        "sync_tolerance",
    ),
}


_CLIENT = "stppo.retrieval.client.RetrievalClient"


# Of that client: where it asks and how patiently. What is left, `query_characters`, changes what it asks.
_WHEREABOUTS = (
    "url",
    "timeout",
    "attempts",
    "first_pause",
    "longest_pause",
    "queries_per_request",
    "cached_queries",
)


def identity_section(config: Config) -> Config:
    """What a run's results depend on: `run_section` without `MEMORY_SETTINGS` and the place of its retriever,
    and the content of the files that it names."""
    section = run_section(config) | {"world": world_section(config)} | data_section(config)
    return section | {name: _lasting(config, name) for name in MEMORY_SETTINGS}


def world_section(config: Config) -> Config:
    """The world without where a retrieval server answers and how long it is waited for."""
    world, retriever = config["world"], config["world"].get("retriever")
    if not isinstance(retriever, dict) or retriever.get("_target_") != _CLIENT:
        return world
    return world | {"retriever": {k: value for k, value in retriever.items() if k not in _WHEREABOUTS}}


def start_world_section(config: Config) -> Config:
    """What of the world a warm start depends on: what turns are paid it never sees, so runs with and without
    begin alike."""
    return {name: value for name, value in world_section(config).items() if name != "turn_rewards"}


_FOLDERS = ("records", "index", "pretrained")  # keys that may name a folder of data


_NO_DATA = ("_target_", "cache_dir")


def data_section(config: Config) -> Config:
    """{"data": {path: hash}} of the local files that world and policy name, {} where they name none."""
    named = sorted({*_data_files(world_section(config)), *_data_files(config["policy"])})
    return {"data": {path: content_hash(path) for path in named}} if named else {}


def _data_files(node: Any, key: str = "") -> Iterator[str]:
    """Every text in a section that is the path of a file, or at a key for data that of a folder.

    `records` may be a mapping of benchmarks to paths.
    """
    if isinstance(node, dict):
        for name, value in node.items():
            if name not in _NO_DATA:
                yield from _data_files(value, key if key == "records" else name)
    elif isinstance(node, list):
        for value in node:
            yield from _data_files(value, key)
    elif isinstance(node, str) and (os.path.isfile(node) or (key in _FOLDERS and os.path.isdir(node))):
        yield node


def _lasting(config: Config, name: str) -> Config:
    return {key: value for key, value in config[name].items() if key not in MEMORY_SETTINGS[name]}


# Beside these, a warm start has of `training` only what changes no result but for rounding.
PLAIN = {"device": "cpu", "precision": "float32"}


def warm_start_section(config: Config) -> Config:
    """What a warm start depends on; runs that share it share the cached warm start."""
    names = ("policy", "warm_start", "warm_start_seed")
    return {name: config[name] for name in names} | {
        "world": start_world_section(config),
        "rollout": _lasting(config, "rollout"),
        "questions": config["evaluation"]["questions"],
        **data_section(config),
        **_computed_otherwise(config),
    }


def _computed_otherwise(config: Config) -> Config:
    """What of `training` a warm start's numbers depend on, {} for float32 on a CPU."""
    found = {name: config["training"][name] for name in PLAIN}
    return {} if found == PLAIN else {"training": found}


def warm_start_dir(config: Config) -> Path:
    """Where the warm start that a config needs is cached; the name changes exactly when its config or code
    does."""
    section = warm_start_section(config)
    content = fingerprint([section, code_of("stppo.training.warm_start", *targets(section))])
    return (
        repository_path("results")
        / config["preset"]
        / "warm_start"
        / f"seed{config['warm_start_seed']}-{content}"
    )


def targets(config: Config) -> list[str]:
    """Dotted names of what a config builds: its `_target_`s and its engine's class."""
    engine = (config.get("rollout") or {}).get("engine")
    return sorted({*config_targets(config), *([ENGINES[engine]] if engine in ENGINES else [])})


@functools.cache
def code_of(*entries: str) -> str:
    """Hash of the syntax of every module that the entries import (`provenance.code_hash`)."""
    return code_hash(entries)


def fingerprint(section: Any) -> str:
    """Twelve hex digits of the content of a plain dict, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(section, sort_keys=True).encode()).hexdigest()[:12]
