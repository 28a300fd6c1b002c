"""The curves that follow a run: drawn at each evaluation, in one place."""

import pandas as pd
import pytest
from matplotlib.figure import Figure

from stppo.figures import live
from stppo.figures.live import LiveCurves, run_figure

COLUMNS = (
    "success_train",
    "clip_fraction",
    "out_of_range_fraction",
    "gradient_norm",
    "clipping_bias_norm",
    "entropy",
)


def rows(iterations: int, every: int = 2):
    """What a run has recorded: two updates an iteration, sampled evaluations at `every`, greedy ones at twice
    that."""
    updates = [
        {"iteration": i, **{name: 0.1 * (n + 1) * (i + u) for n, name in enumerate(COLUMNS)}}
        for i in range(1, iterations + 1)
        for u in (0, 1)
    ]
    evaluations = [
        {"iteration": i, "temperature": t, "success": 0.01 * i + 0.1 * t}
        for i in range(0, iterations + 1, every)
        for t in ((0.0, 1.0) if i % (2 * every) == 0 else (1.0,))
    ]
    return updates, evaluations


@pytest.fixture
def drawn(monkeypatch):
    """What was put in the picture's place."""
    shown = []
    monkeypatch.setattr(live.DisplayHandle, "display", lambda self, what: None)
    monkeypatch.setattr(live.DisplayHandle, "update", lambda self, what: shown.append(what))
    monkeypatch.setattr(live.time, "monotonic", lambda: 0.0)  # drawing takes no time
    return shown


def lines(figure: Figure, panel: str) -> dict[str, dict[float, float]]:
    (ax,) = (ax for ax in figure.axes if ax.get_title(loc="left") == panel)
    return {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in ax.lines}


def test_picture_is_drawn_at_each_evaluation_and_not_between(drawn):
    curves = LiveCurves("a run", 8)
    curves.begin()
    updates, evaluations = rows(8)
    for iteration in range(1, 9):
        seen = [row for row in updates if row["iteration"] <= iteration]
        curves.update(seen, [row for row in evaluations if row["iteration"] <= iteration])
    assert len(drawn) == 5, "after iteration 1, and at 2, 4, 6 and 8"


def test_panels_show_the_recorded_numbers():
    updates, evaluations = map(pd.DataFrame, rows(4))
    figure = run_figure(updates, evaluations, "a run", 8).figure
    success = lines(figure, "success")
    assert success["sampled"] == pytest.approx({0: 0.1, 2: 0.12, 4: 0.14})
    assert success["greedy"] == pytest.approx({0: 0.0, 4: 0.04})
    means = updates.groupby("iteration").mean()
    for panel, label, column in (
        ("clip fraction", "clipped", "clip_fraction"),
        ("gradient norm", "gradient", "gradient_norm"),
        ("entropy", "nats a token", "entropy"),
    ):
        assert lines(figure, panel)[label] == pytest.approx(dict(means[column])), panel
