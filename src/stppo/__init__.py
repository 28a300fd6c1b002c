"""Companion to arXiv 2511.20718: turn-level importance ratios and the clipping-bias divisor for off-policy
agents.

Begin with `load`, which gives a loss for a loop of your own, or with the command `stppo`. The mathematics is
in `stppo.objectives`, the batch that it reads in `stppo.trajectories`, the training loop in
`stppo.training.trainer`."""

from importlib import import_module
from pathlib import Path
from typing import Any


def load(algorithm: str | Path) -> Any:
    """The `stppo.objectives.Objective` of an algorithm by name (`stppo.load("st_ppo")`) or of your own file
    FOLDER/algorithm/NAME.yaml.

    Its `loss` takes log-probs, advantages and the agent mask; `stppo.objectives.backward` adds what a
    stabiliser does to the gradient. Of a method that is more than that, a warning says what is left to you.
    stppo.config.files.ConfigError for an unknown name and for a file that is no algorithm."""
    return import_module("stppo.config.composition").objective_of(algorithm)


def __getattr__(name: str) -> str:
    if name == "__version__":
        return import_module("importlib.metadata").version("stppo")
    raise AttributeError(f"module 'stppo' has no attribute {name!r}")
