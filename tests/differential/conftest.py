"""Collects how far we are from each referee at most, and prints the table when the session ends."""

import pytest
from torch import Tensor

TOLERANCE = 1e-6


class Referees:
    """Largest differences per referee and quantity: |ours - theirs| / max(1, |theirs|), element by element."""

    def __init__(self) -> None:
        self.largest: dict[str, dict[str, float]] = {}
        self.batches: dict[str, int] = {}

    def compare(self, name: str, tolerance: float = TOLERANCE, **pairs: tuple[Tensor, Tensor]) -> None:
        """One batch: quantity=(ours, theirs). Fails beyond the tolerance; NaN and inf never pass."""
        self.batches[name] = self.batches.get(name, 0) + 1
        row = self.largest.setdefault(name, {})
        for quantity, (ours, theirs) in pairs.items():
            difference = ((ours - theirs).abs() / theirs.abs().clamp_min(1)).max().item()
            assert difference <= tolerance, f"{name}: {quantity} differs by {difference:.1e}"
            row[quantity] = max(row.get(quantity, 0.0), difference)

    def table(self) -> list[str]:
        width = max(len(name) for name in self.largest)
        return [f"{'largest difference':<{width}}  batches"] + [
            f"{name:<{width}}  {self.batches[name]:>7}  "
            + "  ".join(f"{quantity} {value:.1e}" for quantity, value in row.items())
            for name, row in sorted(self.largest.items())
        ]


_referees = Referees()


@pytest.fixture(scope="session")
def referees() -> Referees:
    return _referees


def pytest_terminal_summary(terminalreporter) -> None:
    if _referees.largest:
        terminalreporter.section("referees")
        for line in _referees.table():
            terminalreporter.write_line(line)
