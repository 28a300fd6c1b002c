"""Which arms of a preset answer one question together, read from the preset's own YAML.

A preset's `pipeline.arms` says what an arm is called and what makes it (`stppo.config.planned`);
`study.groups` says which arms belong together:

    study:
      groups:
        NAME:
          question: one sentence that ends in a question mark
          arms: [algorithms or arms]
          regimes: [REGIME, ...]                  # default: OFF_POLICY
          factors: {FACTOR: [level, level], ...}  # of a factorial: arms in the order of the product, last
                                                  # factor fastest
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stppo.config.algorithms import look
from stppo.config.composition import compose
from stppo.config.files import Config, ConfigError
from stppo.config.planned import pipeline_of

MAIN = "OFF_POLICY"  # the regime of an arm that is named without one


@dataclass(frozen=True)
class Group:
    """Arms that answer one question together."""

    name: str
    question: str
    arms: tuple[str, ...]
    regimes: tuple[str, ...] = (MAIN,)
    factors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def levels(self) -> dict[str, dict[str, str]]:
        """Of a factorial: arm -> {factor: its level}, in order; empty of other groups."""
        cells = itertools.product(*self.factors.values()) if self.factors else ()
        return {
            arm: dict(zip(self.factors, cell, strict=True))
            for arm, cell in zip(self.arms, cells, strict=False)
        }

    def main_effect(self, factor: str) -> dict[str, float]:
        """Weights of the arms whose sum is the main effect of a factor of two levels: the mean over all
        settings of the other factors of (second level - first level). ConfigError for a factor that the group
        does not have so."""
        levels = self.factors.get(factor, ())
        if len(levels) != 2:
            known = ", ".join(name for name, of in self.factors.items() if len(of) == 2) or "none"
            raise ConfigError(f"study.groups.{self.name}: no factor {factor} of two levels; it has: {known}")
        each = 2 / len(self.arms)
        return {arm: each if of[factor] == levels[1] else -each for arm, of in self.levels().items()}


def groups_of(config: Config) -> dict[str, Group]:
    """The groups of a composed preset by name; none where it has no section `study`. ConfigError names the
    key that is wrong."""
    planned: dict[str, set[str]] = {}
    pipeline = config.get("pipeline") or {}
    for entry, plan in (pipeline.get("regimes") or {}).items():
        planned.setdefault(plan.get("regime", entry), set()).update(plan["algorithms"])
    found = (config.get("study") or {}).get("groups") or {}
    return {name: _group(name, entry, planned) for name, entry in found.items()}


def groups(preset: str) -> dict[str, Group]:
    """`groups_of` a preset."""
    return groups_of(compose([f"preset={preset}"]))


def labels(preset: str) -> dict[str, str]:
    """What tables call each algorithm and arm that a preset plans; the key is the recorded `algorithm`."""
    config = compose([f"preset={preset}"])
    arms, regimes = (pipeline := pipeline_of(config)).arms, pipeline.regimes
    names = dict.fromkeys(name for regime in regimes.values() for name in regime.algorithms)
    return {name: arms[name].label if name in arms else look(name).label for name in names}


def _group(name: str, entry: Any, planned: Mapping[str, set[str]]) -> Group:
    key = f"study.groups.{name}"
    if not isinstance(entry, dict) or not {"question", "arms"} <= set(entry):
        raise ConfigError(f"{key} = {entry!r}: must have question and arms")
    if unknown := sorted(set(entry) - {"question", "arms", "regimes", "factors"}):
        raise ConfigError(f"{key}.{unknown[0]}: unknown key; allowed: question, arms, regimes, factors")
    factors = {factor: tuple(levels) for factor, levels in (entry.get("factors") or {}).items()}
    arms, regimes = tuple(entry["arms"]), tuple(entry.get("regimes") or (MAIN,))
    if factors and len(arms) != (cells := math.prod(map(len, factors.values()))):
        raise ConfigError(f"{key}.arms: {len(arms)} arms for {cells} cells of {' x '.join(factors)}")
    for regime, arm in itertools.product(regimes, arms):
        if arm not in planned.get(regime, ()):
            raise ConfigError(f"{key}: pipeline.regimes plans no {arm} in {regime}")
    return Group(name, entry["question"], arms, regimes, factors)
