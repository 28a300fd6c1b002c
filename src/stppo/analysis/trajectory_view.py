"""Recorded trajectories as HTML: turns coloured, environment text grey, log-probabilities on hover."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from stppo import schema

TURN_COLORS = ("#CFE3F5", "#FBE3C4", "#CDEBDD", "#F3D6E4", "#E6E3B8", "#D9D5F0")
CSS = """
.stppo-trajectory { border: 1px solid #ddd; border-radius: 6px; padding: .7em .9em; margin: .7em 0;
  font: 14px/1.9 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; color: #222; background: #fff; }
.stppo-trajectory header { font: 14px/1.5 system-ui, sans-serif; margin-bottom: .4em; }
.stppo-trajectory .tokens { white-space: pre-wrap; overflow-wrap: anywhere; }
.stppo-trajectory .env { color: #8a8a8a; }
.stppo-trajectory .turn { border-radius: 4px; padding: .15em .25em; }
.stppo-trajectory .turn span:hover { outline: 1px solid #333; }
.stppo-trajectory .reward { float: right; font-weight: 600; }
"""


@dataclass(frozen=True)
class TrajectoryView:
    """HTML that a notebook displays as such."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def show_trajectories(source: str | Path | Sequence[Mapping[str, Any]]) -> TrajectoryView:
    """View of the records of a trajectories.json, given as path or as the list in it.

    ValueError names the record and the field that is missing or too short.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        try:
            source = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error}); train the run again to make it") from None
    blocks = [_trajectory(record, i) for i, record in enumerate(source)]
    return TrajectoryView(f"<style>{CSS}</style>\n" + "\n".join(blocks))


def _trajectory(record: Mapping[str, Any], number: int) -> str:
    for name in schema.TRAJECTORY_FIELDS:
        if name not in record:
            raise ValueError(f"trajectory {number} lacks {name}")
    tokens = record["tokens"]
    for name in ("agent_mask", "turn_ids", "logprobs"):
        if len(record[name]) != len(tokens):
            raise ValueError(
                f"trajectory {number}: {name} has {len(record[name])} entries for {len(tokens)} tokens"
            )
    # Word-level tokens carry no spaces of their own, subword tokens do.
    gap = "" if any(token != token.strip() for token in tokens) else " "
    parts = []
    for turn, group in groupby(range(len(tokens)), key=lambda t: record["turn_ids"][t]):
        positions = list(group)
        if turn < 0:
            text = gap.join(tokens[t] for t in positions)
            parts.append(f'<span class="env">{escape(text)}</span>')
            continue
        inner = gap.join(_token(tokens[t], record["logprobs"][t], turn) for t in positions)
        color = TURN_COLORS[turn % len(TURN_COLORS)]
        parts.append(f'<span class="turn" style="background:{color}">{inner}</span>')
    answers = ", ".join(map(str, record["answers"]))
    return (
        '<div class="stppo-trajectory"><header>'
        f'<span class="reward">reward {float(record["reward"]):g}</span>'
        f"<b>{escape(str(record['question']))}</b><br>accepted: {escape(answers)}</header>"
        f'<div class="tokens">{gap.join(parts)}</div></div>'
    )


def _token(text: str, logprob: float, turn: int) -> str:
    tip = f"turn {turn}, log-probability {logprob:.3f}, probability {math.exp(logprob):.3f}"
    return f'<span title="{tip}">{escape(text)}</span>'
