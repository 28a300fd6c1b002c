"""Committed reference results, comparisons of figures with them, and what every figure must show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from stppo.figures.style import Plot

REFERENCE = Path(__file__).parents[1] / "results" / "reference"


def references() -> list[Path]:
    """Reference folders whose figures are committed."""
    return sorted(path.parent for path in REFERENCE.glob("*/figures") if (path.parent / "metrics").is_dir())


def assert_as_committed(plot: Plot, folder: Path) -> None:
    """The plotted data and further tables of a figure equal those committed in `folder`, within rounding."""
    for suffix, table in {"": plot.data, **{f"_{k}": t for k, t in plot.tables.items()}}.items():
        name = f"{plot.name}{suffix}.csv"
        was = pd.read_csv(folder / name)
        now = table.reset_index(drop=True)
        assert list(now) == list(was) and len(now) == len(was), name
        for column in was:
            if pd.api.types.is_numeric_dtype(was[column]) and was[column].dtype != bool:
                new = pd.to_numeric(now[column]).to_numpy(float, na_value=np.nan)
                np.testing.assert_allclose(
                    new, was[column], rtol=1e-3, atol=1e-5, err_msg=f"{name}: {column}"
                )
            else:
                # An empty cell comes back as NaN.
                texts = [series.fillna("").astype(str).tolist() for series in (now[column], was[column])]
                assert texts[0] == texts[1], (name, column)


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
