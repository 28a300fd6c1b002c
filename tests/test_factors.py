"""What algorithms make of a token; the formulas themselves are checked in notebook 06."""

import numpy as np
import pytest

from stppo.algorithms import algorithms
from stppo.axes import worked_example
from stppo.factors import factor_table, factors_figure, method_figure, same_factor, steps_figure, steps_table

NAMES = [row.name for row in algorithms()]


@pytest.fixture(scope="module")
def table():
    return factor_table(n_ratios=41)


def test_every_algorithm_has_a_factor_and_belongs_to_one_group(table):
    assert table["algorithm"].unique().tolist() == NAMES
    assert sorted(name for group in same_factor(table) for name in group) == sorted(NAMES)
    assert table.groupby("algorithm").size().eq(82).all() and np.isfinite(table["factor"]).all()


def test_on_fresh_data_the_factor_is_one(table):
    fresh = table[np.isclose(table["ratio"], 1.0)].pivot(index="algorithm", columns="sign", values="factor")
    # Successes alone takes nothing from failures. Reading C's penalty looks at the whole minibatch, of which other tokens are
    # clipped.
    assert fresh.loc["successes_only"].to_dict() == {-1: 0.0, 1: 1.0}
    rest = fresh.drop("successes_only")
    assert np.allclose(rest.drop("so_ppo_ctn_c"), 1.0) and np.allclose(rest, 1.0, atol=0.01)


def test_token_ppo_is_cut_where_a_step_would_lead_further_out(table):
    rows = table[table["algorithm"] == "token_ppo"]
    cut = np.where(rows["sign"] > 0, rows["ratio"] > 1.2, rows["ratio"] < 0.8)
    assert np.allclose(rows["factor"], np.where(cut, 0, rows["ratio"]))


def test_every_algorithm_has_a_step_on_each_token_of_the_example():
    steps = steps_table()
    assert steps["algorithm"].unique().tolist() == NAMES
    assert steps.groupby("algorithm").size().nunique() == 1 and np.isfinite(steps["step"]).all()
    assert steps_figure(steps).title.startswith(
        f"{(steps['step'].abs() < 1e-12).groupby(steps['algorithm']).any().sum()} of"
    )


def test_a_gradient_clip_reads_the_gradients_norm():
    """One of 1.0 does not bind on this trajectory, whose clipping bias would."""
    example = worked_example("grad_clip")
    assert np.linalg.norm(example["gradient"].dropna()) / example["gradient"].notna().sum() < 1.0
    assert example["divisor"].eq(1.0).all() and worked_example("s_ppo")["divisor"].gt(1.0).all()


def test_pictures_are_drawn(table):
    assert len(same_factor(table)) == len(
        [ax for ax in factors_figure(table).figure.axes if ax.get_visible()]
    )
    assert method_figure("sapo", table).data["algorithm"].unique().tolist() == ["sapo"]
