"""The claims ledger, claims.yaml, read and checked; its head states the decision rule."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stppo.results.resampling import joint_level
from stppo.study.mechanism import SIGNALS
from stppo.study.quantities import OPTIONS, QUANTITIES

LEDGER_FILE = Path(__file__).with_name("claims.yaml")


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Condition(_Entry):
    """A quantity of some arms that must lie above or below a threshold."""

    quantity: str
    arms: dict[str, str] = Field(min_length=1)  # role -> REGIME/algorithm, alternatives divided by |
    above: float | None = None
    below: float | None = None
    column: str | None = None
    signal: str | None = None
    over: str | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Condition:
        if self.quantity not in QUANTITIES:
            raise ValueError(f"unknown quantity {self.quantity}; known: {', '.join(QUANTITIES)}")
        _, roles, options = QUANTITIES[self.quantity]
        if roles and set(self.arms) != set(roles):
            raise ValueError(f"{self.quantity} needs arms in the roles {', '.join(roles)}")
        for name in OPTIONS:
            if (getattr(self, name) is not None) != (name in options):
                raise ValueError(f"{self.quantity} {'needs' if name in options else 'has no'} {name}")
        for name in {self.signal, self.over} - {None, *SIGNALS}:
            raise ValueError(f"unknown signal {name}; known: {', '.join(SIGNALS)}")
        for arm in self.arms.values():
            if any(len(one.split("/")) != 2 for one in arm.split("|")):
                raise ValueError(f"arm {arm} is not REGIME/algorithm")
        if (self.above is None) == (self.below is None):
            raise ValueError(f"{self.quantity} needs a threshold: one of above and below")
        return self

    @property
    def threshold(self) -> str:
        """In words."""
        return f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"

    def holds(self, low: float, high: float) -> bool:
        """Whether an interval lies wholly beyond the threshold."""
        return low > self.above if self.above is not None else high < self.below

    def fails(self, low: float, high: float) -> bool:
        """Whether an interval lies wholly on the other side."""
        return high < self.above if self.above is not None else low > self.below


class Part(_Entry):
    """One verdict of a claim."""

    id: str
    text: str
    kind: Literal["primary", "same_interval", "gated", "secondary"]
    gate: str | None = None
    figure: str
    rule: str
    note: str = ""  # what a reader must know to weigh the rule
    conditions: tuple[Condition, ...] = Field(min_length=1)


class Claim(_Entry):
    """A claim of the paper and the verdicts that answer it."""

    id: str
    text: str
    source: str
    parts: tuple[Part, ...] = Field(min_length=1)


class Ledger(_Entry):
    """All claims."""

    family_error: float = Field(gt=0, lt=1)
    claims: tuple[Claim, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ids_are_known(self) -> Ledger:
        seen: set[str] = set()
        for part in (part for claim in self.claims for part in claim.parts):
            if part.id in seen:
                raise ValueError(f"two parts are named {part.id}")
            if (part.kind == "gated") != (part.gate is not None):
                raise ValueError(f"{part.id}: a gate goes with kind gated, and only with it")
            if part.gate is not None and part.gate not in seen:
                raise ValueError(f"{part.id}: its gate {part.gate} is no earlier part")
            seen.add(part.id)
        return self

    @property
    def n_primary(self) -> int:
        """How many verdicts the joint level is shared among."""
        return sum(part.kind == "primary" for claim in self.claims for part in claim.parts)

    @property
    def level(self) -> float:
        """Joint level of every interval."""
        return joint_level(max(1, self.n_primary), self.family_error)


def load_ledger(path: str | Path = LEDGER_FILE) -> Ledger:
    """Read a ledger; ValueError of one line names the entry that is wrong."""
    try:
        return Ledger.model_validate(OmegaConf.to_container(OmegaConf.load(path), resolve=True))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "ledger"
        raise ValueError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
