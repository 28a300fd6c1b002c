"""Recorded trajectories as HTML, token by token, and drawn as figures: ratios, turns, what is clipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import ValidationError

from stppo.figures.style import style
from stppo.files import parse_json
from stppo.record import schema

Record = Mapping[str, Any]

# What a record may hold beyond `schema.TrajectoryRecord`: one entry a token, ignored at environment tokens.
MEASURES: dict[str, str] = {
    "token_ratio": "importance ratio of the token",
    "turn_ratio": "importance ratio of its turn",
    "advantage": "advantage of the token",
    "clipped_token": "1 where the token's term is clipped under token-level ratios",
    "clipped_turn": "1 where it is clipped under turn-level ratios",
}
COLORINGS = ("turn", "token_ratio", "turn_ratio", "advantage")

TURN_COLORS = ("#CFE3F5", "#FBE3C4", "#CDEBDD", "#F3D6E4", "#E6E3B8", "#D9D5F0")
UP, DOWN = "#D55E00", "#0061A8"  # told apart under the common colour-vision deficiencies
TOKEN_COLOR, TURN_COLOR = "#D55E00", "#0061A8"
FULL_MARK, FULL_COLOR = math.log(1.5), math.log(2.0)  # log-ratios at which an underline, a colour, is full
HATCH = "repeating-linear-gradient(135deg,rgba(0,0,0,.34) 0 1px,transparent 1px 5px)"
CSS = f"""
.stppo-trajectory, .stppo-legend {{ border: 1px solid #ddd; border-radius: 6px; padding: .7em .9em;
  margin: .7em 0; font: 14px/1.9 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; color: #222;
  background: #fff; }}
.stppo-trajectory header {{ font: 14px/1.5 system-ui, sans-serif; margin-bottom: .4em; }}
.stppo-trajectory .tokens {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.stppo-trajectory .env {{ color: #8a8a8a; }}
.stppo-trajectory .turn {{ border-radius: 4px; padding: .15em .25em; box-decoration-break: clone;
  -webkit-box-decoration-break: clone; }}
.stppo-trajectory .turn span:hover {{ outline: 1px solid #333; }}
.stppo-trajectory .reward {{ float: right; font-weight: 600; margin-left: 1.2em; }}
.stppo-trajectory .paid {{ font: 600 12px system-ui, sans-serif; border: 1px solid #888; border-radius: 8px;
  padding: 0 .4em; margin: 0 .3em; }}
.stppo-trajectory .measured {{ line-height: 2.3; }}
.stppo-trajectory .bare {{ box-shadow: inset 0 0 0 1px #bbb; padding: .3em .25em; }}
.stppo-trajectory .clipped-token, .stppo-legend .clipped-token {{ text-decoration: line-through 2px #222; }}
.stppo-trajectory .clipped-turn, .stppo-legend .clipped-turn {{ background-image: {HATCH}; }}
.stppo-legend {{ font: 13px/1.7 system-ui, sans-serif; border: 0; padding: 0 .9em; }}
.stppo-legend span.key {{ white-space: nowrap; margin-right: 1.6em; display: inline-block; }}
.stppo-legend b {{ font-weight: 400; padding: 0 .25em; }}
.stppo-legend i {{ display: inline-block; width: 5em; height: .8em; margin: 0 .4em; border: 1px solid #ccc; }}
"""


@dataclass(frozen=True)
class TrajectoryView:
    """HTML that a notebook displays as such."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def show_trajectories(source: str | Path | Sequence[Record], color: str = "turn") -> TrajectoryView:
    """View of the records of a trajectories.json, given as path or as the list in it.

    A record may also hold the per-token fields of `MEASURES`: they join the tooltip and are marked on the
    tokens (underline: ratio; struck through, hatched: clipped), with a legend. color: what the background
    of agent tokens says, one of `COLORINGS`.

    ValueError names the record and the field that is missing or too short.
    """
    if color not in COLORINGS:
        raise ValueError(f"color={color!r}: must be one of {', '.join(COLORINGS)}")
    if isinstance(source, (str, Path)):
        path = Path(source)
        try:
            source = parse_json(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error}); train the run again to make it") from None
    for i, record in enumerate(source):
        _check(record, i, () if color == "turn" else (color,))
    scale = _scale(source, color)
    legend = _legend(source, color, scale)
    blocks = [_trajectory(record, color, scale) for record in source]
    return TrajectoryView("\n".join([f"<style>{CSS}</style>", *legend, *blocks]))


def _check(record: Record, number: int, needed: Sequence[str] = ()) -> None:
    try:
        schema.TrajectoryRecord.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(f"trajectory {number} lacks {field}") from None
        given = str(first["input"])[:100]
        raise ValueError(f"trajectory {number}: {field or 'record'} = {given}: {first['msg']}") from None
    for name in needed:
        if name not in record:
            raise ValueError(f"trajectory {number} lacks {name}")
    tokens = record["tokens"]
    for name in ("agent_mask", "turn_ids", "logprobs", *MEASURES):
        if name in record and len(record[name]) != len(tokens):
            raise ValueError(
                f"trajectory {number}: {name} has {len(record[name])} entries for {len(tokens)} tokens"
            )
    turns = max(record["turn_ids"], default=-1) + 1
    if (paid := record.get("turn_rewards")) is not None and len(paid) != turns:
        raise ValueError(f"trajectory {number}: turn_rewards has {len(paid)} entries for {turns} turns")


def _trajectory(record: Record, color: str, scale: float) -> str:
    tokens = record["tokens"]
    # Word-level tokens carry no spaces of their own, subword tokens do.
    gap = "" if any(token != token.strip() for token in tokens) else " "
    parts, paid = [], _paid(record)
    for turn, group in groupby(range(len(tokens)), key=lambda t: record["turn_ids"][t]):
        positions = list(group)
        if turn < 0:
            text = gap.join(tokens[t] for t in positions)
            parts.append(f'<span class="env">{escape(text)}</span>')
            continue
        inner = gap.join(_token(record, t, color, scale) for t in positions)
        if color == "turn":
            look = f'class="turn" style="background:{TURN_COLORS[turn % len(TURN_COLORS)]}"'
        else:
            look = 'class="turn bare"'
        parts.append(f"<span {look}>{inner}</span>")
        if reward := paid.get(turn, 0.0):
            parts.append(f'<span class="paid" title="paid for turn {turn}">{reward:+.4g}</span>')
    answers = ", ".join(map(str, record["answers"]))
    measured = " measured" if any(name in record for name in MEASURES) else ""
    return (
        '<div class="stppo-trajectory"><header>'
        f'<span class="reward">reward {float(record["reward"]):g}</span>'
        f"<b>{escape(str(record['question']))}</b><br>accepted: {escape(answers)}</header>"
        f'<div class="tokens{measured}">{gap.join(parts)}</div></div>'
    )


def _paid(record: Record) -> dict[int, float]:
    """turn -> what it was paid beside the answer's reward; {} where nothing is recorded."""
    rewards = [*(record.get("turn_rewards") or ())]
    if rewards:
        rewards[-1] = round(rewards[-1] - record["reward"], 5)
    return dict(enumerate(rewards))


def _token(record: Record, t: int, color: str, scale: float) -> str:
    logprob = record["logprobs"][t]
    tip = [
        f"turn {record['turn_ids'][t]}",
        f"log-probability {logprob:.3f}",
        f"probability {math.exp(logprob):.3f}",
    ]
    tip += [f"{name.replace('_', ' ')} {record[name][t]:.3f}" for name in COLORINGS[1:] if name in record]
    clipped = [name for name in ("clipped_token", "clipped_turn") if name in record and record[name][t]]
    tip += [f"clipped at {name.removeprefix('clipped_')} level" for name in clipped]
    css = []
    if color != "turn":
        css.append(f"background-color:{_tint(_position(record[color][t], color, scale))}")
    if "token_ratio" in record:
        css.append(_underline(record["token_ratio"][t]))
    attributes = f' class="{" ".join(clipped).replace("_", "-")}"' if clipped else ""
    attributes += f' style="{";".join(css)}"' if css else ""
    return f'<span title="{", ".join(tip)}"{attributes}>{escape(record["tokens"][t])}</span>'


def _log(ratio: float) -> float:
    """Log of a ratio; that of 0 is the most negative number, so that an underflow is shown and not raised."""
    return math.log(max(ratio, 5e-324))


def _underline(ratio: float) -> str:
    strength = min(1.0, abs(_log(ratio)) / FULL_MARK)
    kind, (red, green, blue) = ("solid", _rgb(UP)) if ratio > 1 else ("dotted", _rgb(DOWN))
    return f"border-bottom:3px {kind} rgba({red},{green},{blue},{strength:.2f})"


def _scale(records: Sequence[Record], color: str) -> float:
    """The value (or log-ratio) at which a colour is full: for advantages the largest in view."""
    if color != "advantage":
        return FULL_COLOR
    sizes = [
        abs(a)
        for record in records
        for a, turn in zip(record[color], record["turn_ids"], strict=True)
        if turn >= 0
    ]
    return max(sizes, default=0.0) or 1.0


def _position(value: float, color: str, scale: float) -> float:
    """Where a value stands on the diverging scale, in [-1, 1]."""
    return max(-1.0, min(1.0, (value if color == "advantage" else _log(value)) / scale))


def _tint(position: float) -> str:
    """White at 0, towards `UP` at 1 and `DOWN` at -1, pale enough for black text."""
    share = 0.6 * abs(position)
    mixed = (round(255 + share * (part - 255)) for part in _rgb(UP if position > 0 else DOWN))
    return "#" + "".join(f"{part:02X}" for part in mixed)


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _legend(records: Sequence[Record], color: str, scale: float) -> list[str]:
    """The marks that occur in these records, explained; nothing where there are none."""
    held = {name for record in records for name in MEASURES if name in record}
    keys = []
    if color != "turn":
        ends = (f"{-scale:.2g}", "0", f"{scale:.2g}") if color == "advantage" else ("≤ 0.5", "1", "≥ 2")
        gradient = f"background:linear-gradient(90deg,{_tint(-1)},{_tint(0)},{_tint(1)})"
        keys.append(f'{color.replace("_", " ")}: {ends[0]} <i style="{gradient}"></i> {ends[2]}')
    if "token_ratio" in held:
        more, less = (f'<b style="{_underline(ratio)}">' for ratio in (1.5, 0.6))
        keys.append(f"{more}more</b> / {less}less</b> probable than when sampled")
    if "clipped_token" in held:
        keys.append('<b class="clipped-token">struck</b>: clipped, token ratio')
    if "clipped_turn" in held:
        keys.append('<b class="clipped-turn">hatched</b>: clipped, turn ratio')
    spans = "".join(f'<span class="key">{key}</span>' for key in keys)
    return [f'<div class="stppo-legend">{spans}</div>'] if keys else []


def ladder(
    record: Record, epsilon_low: float = 0.2, epsilon_high: float = 0.2
) -> tuple[Figure, pd.DataFrame]:
    """One trajectory's log-ratios (nats): a stem per agent token, its turn's means as steps, and the data.

    The record needs `token_ratio`; turns come from its turn_ids. Solid step: geometric mean of the turn's
    token ratios; dashed: arithmetic mean. Shaded: the clip range. Grey bands: environment tokens.
    """
    _check(record, 0, ("token_ratio",))
    data = pd.DataFrame({name: record[name] for name in ("tokens", "turn_ids", "token_ratio")})
    data["token_ratio"] = data["token_ratio"].where(data["turn_ids"] >= 0)
    data["log_ratio"] = np.log(data["token_ratio"])
    turns = data[data["turn_ids"] >= 0].groupby("turn_ids")
    data["log_geometric"] = turns["log_ratio"].transform("mean")
    data["log_arithmetic"] = np.log(turns["token_ratio"].transform("mean"))
    low = -math.inf if epsilon_low >= 1 else math.log1p(-epsilon_low)
    with style():
        fig = Figure(figsize=(10.5, 3.9), layout="constrained")
        ax = fig.add_subplot()
        ax.grid(False)
        ax.axhspan(low, math.log1p(epsilon_high), color="#009E73", alpha=0.13, lw=0, label="clip range")
        for t in data.index[data["turn_ids"] < 0]:
            ax.axvspan(t - 0.5, t + 0.5, color="#E9E9E9", lw=0, label="_")
        ax.axhline(0, color="#888888", lw=0.8)
        agent = data.dropna()
        ax.vlines(agent.index, 0, agent["log_ratio"], color=TOKEN_COLOR, lw=1.4)
        ax.plot(agent.index, agent["log_ratio"], "o", color=TOKEN_COLOR, ms=4, label="token")
        for name, line in (("geometric", "-"), ("arithmetic", (0, (4, 1.5)))):
            for i, (_, part) in enumerate(turns):
                x, y = [part.index[0] - 0.45, part.index[-1] + 0.45], data.loc[part.index[0], f"log_{name}"]
                label = f"turn, {name}" if i == 0 else "_"
                ax.plot(x, [y, y], color=TURN_COLOR, ls=line, lw=2.2, label=label)
        ax.set_xticks(data.index, data["tokens"], rotation=90, fontsize=7)
        for tick, turn in zip(ax.get_xticklabels(), data["turn_ids"], strict=True):
            tick.set_color("#8a8a8a" if turn < 0 else "#222222")
        ax.set(xlim=(-0.5, len(data) - 0.5), ylabel="log-ratio (nats)")
        fig.legend(*ax.get_legend_handles_labels(), loc="outside upper left", ncols=4)
    return fig, data


def boundary_strips(records: Mapping[str, Record]) -> tuple[Figure, pd.DataFrame]:
    """One row of cells per record of the same trajectory: colours are its turns, numbers their `turn_ratio`.

    For comparing agent masks: `records` maps a row's label to the record that the mask gives.
    """
    for i, record in enumerate(records.values()):
        _check(record, i, ("turn_ratio",))
    tokens = next(iter(records.values()))["tokens"]
    rows = []
    with style():
        fig = Figure(figsize=(10.5, 0.9 + 0.36 * len(records)), layout="constrained")
        ax = fig.add_subplot()
        for y, (name, record) in enumerate(records.items()):
            for turn, group in groupby(range(len(tokens)), key=lambda t, r=record: r["turn_ids"][t]):
                positions = list(group)
                start, width = positions[0] - 0.5, len(positions)
                color = "#EFEFEF" if turn < 0 else TURN_COLORS[turn % len(TURN_COLORS)]
                edge = "none" if turn < 0 else "#555555"
                ax.barh(y, width, left=start, height=0.78, color=color, edgecolor=edge, lw=0.8)
                if turn >= 0:
                    ratio = record["turn_ratio"][positions[0]]
                    rows.append((name, turn, positions[0], width, ratio))
                    text = f"{ratio:.2f}" if ratio >= 0.005 else f"{ratio:.0e}"
                    ax.text(start + width / 2, y, text, ha="center", va="center", fontsize=7.5)
        ax.set_yticks(range(len(records)), records)
        ax.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=7)
        ax.set(xlim=(-0.6, len(tokens) - 0.4), ylim=(len(records) - 0.45, -0.55))
        ax.grid(False)
        ax.tick_params(length=0)
        for spine in ax.spines.values():
            spine.set_visible(False)
    return fig, pd.DataFrame(rows, columns=["mask", "turn", "first_token", "n_tokens", "turn_ratio"])
