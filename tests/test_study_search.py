import pytest

from stppo.figures import settings_map
from stppo.figures.figures import FIGURES
from stppo.study import search
from tests.synthetic_runs import Dynamics, gather, simulate

LEARNS, COLLAPSES = Dynamics(0.8), Dynamics(0.7, onset=24)
STALLS, RECOVERS = Dynamics(0.22), Dynamics(0.6, onset=16, recovers=True)


def runs(cells, worlds=2):
    """Made-up runs of token PPO in a grid: {(epochs, staleness, learning rate): what its runs do}."""
    made = [simulate("token_ppo", world, "ON_POLICY", dynamics=LEARNS, epochs=2) for world in range(worlds)]
    for (epochs, staleness, rate), dynamics in cells.items():
        each = dynamics if isinstance(dynamics, list) else [dynamics] * worlds
        setting = {"epochs": epochs, "staleness_iterations": staleness, "learning_rate": rate}
        name = f"E{epochs}_L{staleness}_{rate:g}"
        made += [simulate("token_ppo", i, name, dynamics=what, **setting) for i, what in enumerate(each)]
    return gather(made)


def chosen(cells):
    table = search.judged(runs(cells))
    return search.critical(table).regime, search.mild(table).regime


def test_the_critical_setting_is_where_most_runs_learn_and_collapse():
    cells = {(8, 2, 1e-4): LEARNS, (8, 2, 5e-4): [COLLAPSES, LEARNS], (4, 0, 1e-3): [COLLAPSES, RECOVERS]}
    assert chosen(cells) == ("E4_L0_0.001", "E8_L2_0.0001")


def test_ties_go_to_the_smaller_steps_then_to_eight_epochs():
    assert chosen({(8, 2, 5e-4): COLLAPSES, (4, 2, 5e-4): COLLAPSES})[0] == "E4_L2_0.0005"
    assert chosen({(4, 2, 1e-3): COLLAPSES, (8, 2, 5e-4): COLLAPSES})[0] == "E8_L2_0.0005"


def test_without_the_shape_it_is_the_lowest_rate_at_which_half_do_not_learn():
    cells = {(8, 2, 1e-4): LEARNS, (8, 2, 3e-4): [STALLS, LEARNS], (8, 2, 5e-4): STALLS, (4, 0, 1e-3): STALLS}
    assert chosen(cells) == ("E8_L2_0.0003", "E8_L2_0.0001")


def test_the_mild_setting_is_the_lowest_rate_where_no_rate_is_mild():
    assert chosen({(8, 2, 1e-4): STALLS, (8, 2, 3e-4): STALLS}) == ("E8_L2_0.0001", "E8_L2_0.0001")


def test_a_search_without_its_yardstick_is_refused():
    alone = gather([simulate("token_ppo", 0, "E8_L2_5e-4", epochs=8)])
    with pytest.raises(ValueError, match="ON_POLICY"):
        search.judged(alone)


def test_the_map_shows_every_run_and_how_it_ended():
    grid = {
        (epochs, lag, rate / epochs): LEARNS for epochs in (4, 8) for lag in (0, 2) for rate in (2e-3, 4e-3)
    }
    grid[8, 2, 5e-4] = [COLLAPSES, STALLS]
    plot = FIGURES["settings_map"].draw(runs(grid))
    assert "1 of 16 runs" in plot.title and "0 of 8 settings" in plot.title
    drawn = plot.data.groupby("regime")["kind"].agg(set)
    assert len(drawn) == 8 and drawn["E8_L2_0.0005"] == {"collapsed", "did not learn"}
    assert "ON_POLICY" not in drawn  # no other setting has its number of epochs
    table = plot.tables["cells"].set_index("regime")
    assert table.loc["E8_L2_0.0005", ["collapsed", "did not learn", "shows"]].tolist() == [1, 1, 1]


def test_a_few_settings_make_no_map():
    assert settings_map.settings_map(runs({(8, 2, 1e-4): LEARNS, (4, 0, 1e-3): LEARNS})) is None
    one_rate = {(epochs, lag, 5e-4): LEARNS for epochs in (4, 8) for lag in (0, 2, 8)}
    assert settings_map.settings_map(runs(one_rate)) is None, "what else differs is no setting"


def test_one_change_at_a_time_has_a_panel_a_change():
    ways = {"AS_CHOSEN": COLLAPSES, "ONE_HOP": LEARNS, "LONG": RECOVERS}
    made = [simulate("token_ppo", i, name, dynamics=what) for name, what in ways.items() for i in range(2)]
    draw = FIGURES["one_change"].draw
    plot = draw(gather(made))
    assert "most runs of 2 of 3 settings" in plot.title
    drawn = plot.data.groupby("regime")["kind"].agg(set).to_dict()
    ends = {"AS_CHOSEN": {"collapsed"}, "ONE_HOP": {"learned"}, "LONG": {"crashed and recovered"}}
    assert drawn == ends
    assert draw(gather(made[:4])) is None, "two are a comparison, not a map"
    assert draw(gather([*made, simulate("st_ppo", 0, "LONG")])) is None
    assert draw(gather([*made, simulate("token_ppo", 0, "SLOW", learning_rate=1e-5)])) is None, "another grid"
