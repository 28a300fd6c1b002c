"""One row an algorithm: its name, label, colour, line and source, read from the YAML files that define it.

Needs no torch. Everything that lists or shows algorithms asks here.
"""

from __future__ import annotations

import colorsys
import functools
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stppo.config.files import ConfigError, Presentation, Prior, lineage, option_files, stamps, value

# The paper's algorithms and what it compares with.
PAPER = (
    *("token_ppo", "turn_ppo", "s_ppo", "st_ppo", "so_ppo_ctn"),
    *("grpo", "so_grpo", "so_grpo_ctn", "gspo"),
)
# Related methods and plain nulls, by kind: readings and cheap forms of the paper's, REINFORCE and
# leave-one-out, clips, weights, masks, smooth forms and penalties, those of 2026, nulls, two baselines of the
# benchmark. A picture of "every algorithm" shows them only where it is about them.
RIVALS = (
    *("so_ppo_ctn_c", "s_ppo_cheap", "st_ppo_cheap"),
    *("reinforce", "reinforce_whitened", "rloo", "loop_token", "loop_turn", "loop_trajectory"),
    *(
        "dr_grpo",
        "dapo",
        "dual_clip",
        "agilerl_turn",
        "sspo",
        "bapo",
        "bapo_ratio",
        "grpo_guard",
        "seeupo",
        "starpo_s",
    ),
    *("topr", "cispo", "tis", "vespo", "vcpo"),
    *("minirl", "icepop", "sequence_mask", "dppo", "m2po"),
    *("sapo", "gmpo", "llds"),
    *("sao", "p3o", "decoupled_ppo", "a3po", "drpo", "geometric_mask", "dro", "prime_rl", "vaco"),
    *("minpro", "ctpo", "gigpo", "sampo"),
    *("grad_clip", "kl_stop", "successes_only", "weight_one"),
    *("token_ppo_fixed", "turn_ppo_fixed"),
)
# The order of tables and legends; files that are not named here come behind, by name.
ORDER = (*PAPER, *RIVALS)
# The line style says the ratio's granularity; OWN where that is not known.
LINES: dict[str, Any] = {
    "token": (0, (4, 1.5)),
    "turn": "-",
    "sentence": (0, (6, 1.5, 1.5, 1.5)),
    "sequence": (0, (1, 1)),
}
OWN = (0, (5, 1, 1, 1))
SPARE_COLORS = ("#44AA99", "#117733", "#6699CC", "#661100", "#888888", "#F06292", "#7E57C2", "#9CCC65")


@dataclass(frozen=True)
class Algorithm:
    """How an algorithm is called and drawn; what it does stands in its YAML file."""

    name: str
    label: str
    color: str  # #RRGGBB
    line: Any  # a line style of matplotlib's
    v1: str = ""  # what the paper's two versions call it
    v2: str = ""
    source: str = ""  # where its definition here comes from
    granularity: str | None = None  # of its importance ratio, where the file says it
    file: Path | None = None  # None for a name that no file defines
    prior: Prior | str | None = None  # of its own knob; "none": it has none; None: the file does not say


def algorithms() -> tuple[Algorithm, ...]:
    """Every algorithm with a file, shipped or your own, in the order of tables and legends.

    A file without a colour gets one of `SPARE_COLORS`. One that only renames another algorithm (its `name` is
    the other's) has no row. Raises ConfigError for a file that cannot be read or whose presentation is
    invalid."""
    return _algorithms(stamps(option_files("algorithm")))


def aliases() -> dict[str, str]:
    """File names that only rename an algorithm -> that algorithm's name."""
    named = {file.stem: _inherited(file.stem, ["name"]) for file in option_files("algorithm")}
    return {stem: name for stem, name in named.items() if name not in (None, stem)}


def look(name: str) -> Algorithm:
    """The row of an algorithm, or for a name without a file one that it derives from the name alone.

    `st_ppo_x` and `st_ppo (x)`, a variant in a metrics folder, are called and drawn after st_ppo in a colour
    of their own; any other name is its own label, its line says that the granularity is not known. The same
    name always gets the same colour."""
    rows = {row.name: row for row in algorithms()}
    if name in rows:
        return rows[name]
    if name in (renamed := aliases()) and renamed[name] in rows:
        return rows[renamed[name]]
    bases = [row for row in rows.values() if re.match(rf"{re.escape(row.name)}(_| \()", name)]
    if not bases:
        return Algorithm(name, name.replace("_", " "), _color_of(name), OWN)
    base = max(bases, key=lambda row: len(row.name))
    rest = name[len(base.name) :]
    rest = rest.strip(" ()") if rest.startswith(" (") else rest.replace("_", " ").strip()
    return Algorithm(name, f"{base.label}, {rest}", _color_of(name), base.line, granularity=base.granularity)


def notes(name: str) -> str:
    """What the comments of an algorithm's YAML say: what it is, and what about it is uncertain. ConfigError
    without one."""
    file = look(name).file
    if file is None:
        raise ConfigError(f"algorithm={name} has no YAML file")
    lines = file.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def in_order(names: Iterable[str]) -> list[str]:
    """Names in the order of `algorithms`, those without a file behind, by name; each once."""
    ranks = {row.name: i for i, row in enumerate(algorithms())}
    return sorted(set(names), key=lambda name: (ranks.get(name, len(ranks)), name))


@functools.lru_cache(maxsize=8)
def _algorithms(files: tuple[tuple[Path, int], ...]) -> tuple[Algorithm, ...]:
    renamed = aliases()
    names = [file.stem for file, _ in files if file.stem not in renamed]
    names.sort(key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    shown = {name: _presentation(name) for name in names}
    free = [color for color in SPARE_COLORS if color not in {one.color for one in shown.values()}]
    rows = []
    for name, one in shown.items():
        left = free or SPARE_COLORS
        color = one.color or left[zlib.crc32(name.encode()) % len(left)]
        free = [other for other in free if other != color]
        granularity = _inherited(name, ["objective", "ratio", "granularity"])
        line = LINES.get(granularity, OWN)
        label = one.label or name.replace("_", " ")
        file = lineage("algorithm", name)[0][0]
        looks = (label, color, line, one.v1, one.v2, one.source)
        rows.append(Algorithm(name, *looks, granularity, file, one.prior))
    return tuple(rows)


def _presentation(name: str) -> Presentation:
    file, content = lineage("algorithm", name)[0]
    try:
        return Presentation(**{key: content[key] for key in Presentation.model_fields if key in content})
    except ValidationError as error:
        item = error.errors()[0]
        if item["type"] == "value_error":  # of a prior; it names the key itself
            raise ConfigError(f"{file}: {item['ctx']['error']}") from None
        raise ConfigError(f"{file}: {item['loc'][0]} = {item['input']!r}: {item['msg']}") from None


def _inherited(name: str, keys: list[str]) -> Any:
    """A value of an algorithm's file, or of the nearest one that it inherits from."""
    values = (value(content, keys) for _, content in lineage("algorithm", name))
    return next((found for found in values if found is not None), None)


def _color_of(name: str) -> str:
    """A colour that the name alone chooses, dark enough for a line on white."""
    hashed = zlib.crc32(name.encode())
    rgb = colorsys.hls_to_rgb(hashed % 360 / 360, 0.35 + hashed // 360 % 3 * 0.08, 0.5)
    return "#" + "".join(f"{round(255 * part):02X}" for part in rgb)
