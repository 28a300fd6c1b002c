"""Validation shared by the objective's dataclasses: errors name the field and what it may be."""

from __future__ import annotations

import math


def one_of(owner: object, field: str, allowed: tuple[str, ...]) -> None:
    value = getattr(owner, field)
    if value not in allowed:
        raise ValueError(f"{type(owner).__name__}.{field}={value!r}: must be one of {', '.join(allowed)}")


def in_range(owner: object, field: str, low: float, high: float = math.inf, low_open: bool = False) -> None:
    """Refuse a value outside [low, high], or (low, high] with `low_open`; NaN never passes."""
    value = getattr(owner, field)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (low < value <= high or (value == low and not low_open)):
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise ValueError(f"{type(owner).__name__}.{field}={value!r}: must be a number in {interval}")
