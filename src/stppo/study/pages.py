"""Numbers in Markdown pages, each named by its path in `results/reference/values.yaml`
(`stppo.study.values`).

In a sentence a comment behind the number names it, and a minus in the comment turns its sign:

    Token PPO ended at .17<!-- study.off_policy.token_ppo.final --> and lost .05<!-- -study.x.value -->.

In a table the heading of a column has a comment with the last part of the path (several numbers in a cell:
several parts), and the first cell of a row one with the rest:

    | arm | ended at <!-- final --> | 95 % <!-- low high --> |
    | --- | --- | --- |
    | token PPO <!-- study.off_policy.token_ppo --> | .17 | [.06, .30] |

Comments are not shown. A number keeps the digits that it is written with; behind it ` %` makes a share a
percentage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUMBER = r"[−+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.\d+|\d+)"
MARKED = re.compile(rf"({NUMBER})( %)?<!-- (-?)([\w.]+) -->")
COMMENT = re.compile(r"<!-- ([\w. -]+) -->")
CELL = re.compile(rf"(?<![\w.])({NUMBER})( %)?")


def marked(root: Path) -> list[Path]:
    """Pages that may name numbers."""
    found = [
        root / "README.md",
        *(root / "results/reference").glob("**/README.md"),
        *root.glob("docs/**/*.md"),
    ]
    return sorted(page for page in found if not {"generated", "_build", "notebooks"} & {*page.parts})


def look_up(values: Any, path: str) -> Any:
    """The number or the list of numbers at a path. KeyError names the path."""
    for part in path.split("."):
        try:
            values = values[int(part)] if isinstance(values, list) else values[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise KeyError(f"{path} is not in values.yaml") from None
    return values


def shown(value: float, like: str, percent: str | None) -> str:
    """A number written as another is: its digits behind the point, no zero before it, a sign where it has
    one."""
    digits = len(like.partition(".")[2])
    text = f"{abs(100 * value if percent else value):,.{digits}f}"
    zero = not text.strip("0.,")
    sign = "−" if value < 0 and not zero else "+" if like.startswith("+") and not zero else ""
    return sign + (text.removeprefix("0") if digits else text) + (percent or "")


def fill(page: str, values: dict[str, Any]) -> str:
    """The page with its named numbers as the values have them. KeyError for a name that they lack, ValueError
    for a cell with another number of numbers than names."""

    def in_a_sentence(found: re.Match[str]) -> str:
        like, percent, minus, path = found.groups()
        value = look_up(values, path)
        return f"{shown(-value if minus else value, like, percent)}<!-- {minus}{path} -->"

    return "\n".join(_with_tables(MARKED.sub(in_a_sentence, page).split("\n"), values))


def _with_tables(lines: list[str], values: dict[str, Any]) -> Iterator[str]:
    columns: list[list[str]] = []
    inside = False
    for line in lines:
        cells = line.split("|")
        if not line.startswith("|"):
            inside, columns = False, []
        elif not inside:  # a heading
            inside = True
            columns = [(COMMENT.search(cell) or [None, ""])[1].split() for cell in cells]
        elif any(columns) and (row := COMMENT.search(cells[1])):
            cells = [
                _cell(cell, [f"{row[1]}.{name}" for name in names], values) if names else cell
                for cell, names in zip(cells, columns, strict=True)
            ]
            line = "|".join(cells)
        yield line


def _cell(cell: str, paths: list[str], values: dict[str, Any]) -> str:
    numbers: list[float] = []
    for path in paths:
        value = look_up(values, path)
        numbers += value if isinstance(value, list) else [value]
    if len(CELL.findall(cell)) != len(numbers):
        raise ValueError(f"{cell.strip()!r} has not {len(numbers)} numbers, as {', '.join(paths)} have")
    rest = iter(numbers)
    return CELL.sub(lambda found: shown(next(rest), found[1], found[2]), cell)
