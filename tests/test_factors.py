"""What algorithms make of a token; the formulas themselves are checked in notebook 06."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from stppo.config.algorithms import algorithms
from stppo.derivations.factors import (
    factor_table,
    factors_figure,
    method_figure,
    same_factor,
    steps_figure,
    steps_table,
)

NAMES = [row.name for row in algorithms()]


@pytest.fixture(scope="module")
def table():
    return factor_table(ratios=np.geomspace(1 / 4, 4, 41))


def test_every_algorithm_has_a_factor_and_belongs_to_one_group(table):
    assert table["algorithm"].unique().tolist() == NAMES
    assert sorted(name for group in same_factor(table) for name in group) == sorted(NAMES)
    assert table.groupby("algorithm").size().eq(82).all() and np.isfinite(table["factor"]).all()


def test_on_fresh_data_the_factor_is_one(table):
    fresh = table[np.isclose(table["ratio"], 1.0)].pivot(index="algorithm", columns="sign", values="factor")
    # Successes alone takes nothing from failures. Reading C's penalty looks at the whole minibatch, of which
    # other tokens are
    # clipped.
    assert fresh.loc["successes_only"].to_dict() == {-1: 0.0, 1: 1.0}
    # P3O's cap is the batch's sample size, below 1 for both signs alike.
    low, high = fresh.loc["p3o"]
    assert low == high and 0 < low < 1
    rest = fresh.drop(["successes_only", "p3o"])
    assert np.allclose(rest.drop("so_ppo_ctn_c"), 1.0) and np.allclose(rest, 1.0, atol=0.01)


def test_algorithms_whose_bounds_differ_have_panels_of_their_own():
    """MiniRL's upper bound is 1.27, DAPO's 1.28; dual clip's third, 3, is one that token PPO does not
    have."""
    groups = same_factor(factor_table(["token_ppo", "dapo", "minirl", "starpo_s", "dual_clip", "grpo"]))
    assert sorted(map(sorted, groups)) == [
        ["dapo", "starpo_s"],
        ["dual_clip"],
        ["grpo", "token_ppo"],
        ["minirl"],
    ]


def test_token_ppo_is_cut_where_a_step_would_lead_further_out(table):
    rows = table[table["algorithm"] == "token_ppo"]
    cut = np.where(rows["sign"] > 0, rows["ratio"] > 1.2, rows["ratio"] < 0.8)
    assert np.allclose(rows["factor"], np.where(cut, 0, rows["ratio"]))


def test_every_algorithm_has_a_step_on_each_token_of_the_example():
    steps = steps_table()
    assert steps["algorithm"].unique().tolist() == NAMES
    assert steps.groupby("algorithm").size().nunique() == 1 and np.isfinite(steps["step"]).all()
    plot = steps_figure(steps)
    assert plot.title.startswith(
        f"{(steps['step'].abs() < 1e-12).groupby(steps['algorithm']).any().sum()} of"
    )
    # No label is cut off where `Plot.save` draws: laid out once, then at 150 dpi.
    FigureCanvasAgg(plot.figure)
    plot.figure.draw_without_rendering()
    plot.figure.set_layout_engine("none")
    plot.figure.set_dpi(150)
    renderer = plot.figure.canvas.get_renderer()
    assert min(label.get_window_extent(renderer).x0 for label in plot.figure.axes[0].get_yticklabels()) > 0


def test_pictures_are_drawn(table):
    panels = [ax for ax in factors_figure(table).figure.axes if ax.get_visible()]
    assert len(same_factor(table)) == len(panels)
    assert [ax.get_xlabel() for ax in panels[-4:]] == ["ratio"] * 4, "a column without an axis below it"
    assert method_figure("sapo", table, steps_table()).data["algorithm"].unique().tolist() == ["sapo"]
