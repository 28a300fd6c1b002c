"""Range checks of config values; every message names the field."""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import MappingProxyType
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
        choices = ", ".join(map(str, allowed))
        raise ValueError(f"{type(config).__name__}.{name}={value!r}: must be one of {choices}")


def in_range(owner: object, field: str, low: float, high: float = math.inf, low_open: bool = False) -> None:
    """Refuse a value outside [low, high], or (low, high] with `low_open`; NaN never passes."""
    value = getattr(owner, field)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (low < value <= high or (value == low and not low_open)):
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise ValueError(f"{type(owner).__name__}.{field}={value!r}: must be a number in {interval}")


def meant(given: str, allowed: Iterable[str], whole: Mapping[str, str] = MappingProxyType({})) -> str:
    """What may have been meant by a name that is not among the allowed, for the end of a message; "" where
    none is near.

    whole: what is said for a name, where that is more than the name."""
    found = difflib.get_close_matches(given, list(allowed), 1, cutoff=0.7 if whole else 0.6)
    return f"; did you mean {whole.get(found[0], found[0])}?" if found else ""


def install(extra: str) -> str:
    """The command that brings an extra of this package, which no index has: from the checkout, or from the
    wheel."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    try:
        # Where pip had it from.
        origin = json.loads(distribution("stppo").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    kind = origin.get("vcs_info", {}).get("vcs")
    url = origin.get("url", "file:///FOLDER/WHEEL")
    return f"pip install 'stppo[{extra}] @ {f'{kind}+{url}' if kind else url}'"
