"""What every figure must show."""

from __future__ import annotations

import numpy as np

from stppo.figures.style import Plot


def assert_shows_all(plot: Plot) -> None:
    """Every mark and every point of a curve lies within its axes. (An interval may end outside, beyond what is possible.)"""
    for ax in plot.figure.axes:
        limits = [sorted(ax.get_xlim()), sorted(ax.get_ylim())]
        for line in ax.lines if ax.get_visible() else []:
            is_interval = len(line.get_xdata()) == 2 and line.get_marker() in ("", "None", None)
            if line.get_transform() is not ax.transData or is_interval:
                continue
            points = np.column_stack([np.ma.filled(np.ma.asarray(v, float), np.nan) for v in line.get_data()])
            points = points[np.isfinite(points).all(axis=1)]
            for (low, high), values in zip(limits, points.T, strict=True):
                slack = 1e-9 * max(abs(low), abs(high))
                outside = values[(values < low - slack) | (values > high + slack)]
                assert not len(outside), (plot.name, ax.get_title(loc="left"), line.get_label(), outside[:3])
