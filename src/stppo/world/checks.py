"""Range checks of config values; every message names the field."""

from typing import Any


def whole_number(config: Any, *names: str, at_least: int = 1) -> None:
    """ValueError unless each named field is an int of at least `at_least`."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ValueError(f"{name} must be a whole number of at least {at_least}, got {value!r}")


def probability(config: Any, *names: str) -> None:
    """ValueError unless each named field is a number in [0, 1]."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value!r}")


def one_of(config: Any, name: str, allowed: Any) -> None:
    """ValueError unless the named field is one of the allowed values."""
    value = getattr(config, name)
    if value not in tuple(allowed):
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
