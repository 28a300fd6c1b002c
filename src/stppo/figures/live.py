"""The curves of one run while it trains: one picture, drawn anew in its place at each evaluation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from IPython.display import DisplayHandle, Markdown
from matplotlib.figure import Figure

from stppo.figures.style import Plot, style

Rows = Sequence[Mapping[str, Any]]

BLUE, ORANGE, GREY = "#0061A8", "#D55E00", "#8A8A8A"
# Title of a panel and what it draws: column of `updates.parquet`, its name there, its colour.
PANELS = {
    "clip fraction": [("clip_fraction", "clipped", BLUE), ("out_of_range_fraction", "out of range", GREY)],
    "gradient norm": [
        ("gradient_norm", "gradient", BLUE),
        ("clipping_bias_norm", "clipping bias ‖C‖", ORANGE),
    ],
    "entropy": [("entropy", "nats a token", BLUE)],
}


class LiveCurves:
    """A picture in a notebook that follows a run.

    iterations: that the run is to have, so that the axes stay where they are. The picture is drawn again only
    where there is an evaluation more than before, and where drawing has not taken a twentieth of the time so
    far; a notebook that is executed and saved keeps the last one.
    """

    def __init__(self, title: str, iterations: int) -> None:
        self.title, self.iterations = title, iterations
        self.evaluations, self.rest_until = -1, 0.0
        self.handle = DisplayHandle()

    def begin(self) -> None:
        """Show where the picture will be."""
        self.handle.display(Markdown("*waiting for the first evaluation*"))

    def update(self, updates: Rows, evaluations: Rows, last: bool = False) -> None:
        """Take the rows recorded so far, of both tables. last: show them in any case."""
        began = time.monotonic()
        if not updates or len(evaluations) == self.evaluations or (began < self.rest_until and not last):
            return
        self.evaluations = len(evaluations)
        self.handle.update(
            run_figure(pd.DataFrame(updates), pd.DataFrame(evaluations), self.title, self.iterations)
        )
        now = time.monotonic()
        self.rest_until = now + 19 * (now - began)


def run_figure(updates: pd.DataFrame, evaluations: pd.DataFrame, title: str, iterations: int) -> Plot:
    """One run as it stands, from its two tables: success, clip fraction, gradient norm, entropy.

    Means over each iteration's updates; success on the fixed held-out questions as it was evaluated.
    """
    at = updates.groupby("iteration").mean(numeric_only=True)
    with style():
        fig = Figure(figsize=(10.0, 5.2), layout="constrained")
        success, *others = fig.subplots(2, 2, sharex=True).flat
        success.plot(at.index, at["success_train"], color="#C4C4C4", label="training questions")
        for temperature, name, color in ((1.0, "sampled", BLUE), (0.0, "greedy", ORANGE)):
            rows = evaluations[evaluations["temperature"] == temperature]
            success.plot(rows["iteration"], rows["success"], "o-", markersize=3, color=color, label=name)
        success.set(title="success", ylim=(0, 1), xlim=(0, iterations))
        for ax, (name, lines) in zip(others, PANELS.items(), strict=True):
            for column, label, color in lines:
                values = at[column].where(at[column] > 0) if name == "gradient norm" else at[column]
                ax.plot(at.index, values, color=color, label=label)
            ax.set_title(name)
        others[1].set_yscale("log")  # a norm of exactly 0, nothing clipped yet, has no place on it
        for ax in (success, *others):
            ax.legend(fontsize=8)
        for ax in others[1:]:
            ax.set_xlabel("iteration")
        done = int(at.index.max())
        fig.suptitle(f"{title}: iteration {done} of {iterations}", x=0.012, ha="left")
    return Plot("run", fig, at.reset_index(), f"{title}. Means over each iteration's updates.")
