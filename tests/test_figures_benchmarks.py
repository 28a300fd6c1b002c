"""Exact match per benchmark: intervals, table, figure."""

import pandas as pd
import pytest
from matplotlib.colors import to_hex
from scipy.stats import norm

from stppo.figures.benchmarks import match_plot, match_table, with_intervals


def results(*rows):
    names = ["agent", "benchmark", "n_questions", "em", "f1"]
    return pd.DataFrame([(*row, 0.123) for row in rows], columns=names)


TWO = results(
    ("ours", "nq", 40, 0.25),
    ("ours", "medqa", 20, 0.0),
    ("script", "nq", 40, 1.0),
    ("script", "medqa", 20, 0.5),
)


def test_intervals_are_the_solutions_of_the_score_test():
    found, z = with_intervals(TWO), norm.ppf(0.975)
    for _, row in found.iterrows():
        n, share = row["n_questions"], row["em"]
        centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5
        assert row["low"] == pytest.approx(centre - half, abs=1e-9)
        assert row["high"] == pytest.approx(centre + half, abs=1e-9)
    assert (found["high"] > found["low"]).all(), "also at 0 and 1"


def test_a_measure_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match="f1 is no share of questions"):
        with_intervals(TWO, "f1")


def test_table_has_an_agent_a_column_and_a_mean_where_all_was_played():
    table = match_table(pd.concat([TWO, results(("new", "nq", 40, 0.5))]))
    assert list(table) == ["benchmark", "questions", "ours", "script", "new"]
    assert table["benchmark"].tolist() == ["nq", "medqa", "mean"]
    assert table["ours"].tolist()[1:] == ["0.000 [0.000, 0.161]", "0.125"]
    assert table["new"].tolist()[1:] == ["", ""], "half of the benchmarks have no mean beside the whole"


def test_figure_shows_every_share_with_its_interval():
    plot = match_plot(TWO, "name", "title")
    (axes,) = plot.figure.axes
    points = {
        line.get_label(): sorted(line.get_xdata())
        for line in axes.lines
        if line.get_label() in ("ours", "script")
    }
    assert points == {"ours": [0.0, 0.25], "script": [0.5, 1.0]}
    assert len({to_hex(line.get_color()) for line in axes.lines if line.get_label() in points}) == 2
    pd.testing.assert_frame_equal(plot.data, with_intervals(TWO)[list(plot.data)])
    assert "20 to 40 questions" in plot.caption
