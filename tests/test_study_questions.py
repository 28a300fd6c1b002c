"""The picture of a study's questions: which panels it has, what it draws, and what its title says of runs of
known truth."""

import numpy as np
import pytest

from stppo.study.arms import Group
from stppo.study.questions import effects, questions_figure
from tests.test_study_claims import make, spread

FACTORIAL = Group(
    "factorial",
    "Ratio or divisor?",
    ("token_ppo", "s_ppo", "turn_ppo", "st_ppo"),
    factors={"ratio": ("token", "turn"), "divisor": ("none", "clipping bias")},
)
ENDS = {"token_ppo": 0.2, "s_ppo": 0.3, "turn_ppo": 0.6, "st_ppo": 0.8}


def runs(**ends):
    return make({arm: spread(end, seed=i, sd=0.02) for i, (arm, end) in enumerate(ends.items())})


def test_main_effects_are_means_over_the_other_factor():
    found = effects(runs(**ENDS), {"factorial": FACTORIAL}).set_index("factor")
    assert found["value"].tolist() == pytest.approx(
        [(0.6 + 0.8 - 0.2 - 0.3) / 2, (0.3 + 0.8 - 0.2 - 0.6) / 2]
    )
    assert ((found["low"] < found["value"]) & (found["value"] < found["high"])).all()
    assert (found["worlds"] == 12).all()


def test_title_states_the_effects_and_the_data_are_those_drawn():
    plot = questions_figure(runs(**ENDS), {"factorial": FACTORIAL})
    assert (
        plot.title
        == "What changes final success: ratio, turn for token: +0.45; divisor, clipping bias for none: +0.15"
    )
    assert plot.data["algorithm"].tolist() == ["st_ppo", "turn_ppo", "s_ppo", "token_ppo"], (
        "the highest first"
    )
    assert plot.data["mean"].tolist() == pytest.approx(sorted(ENDS.values(), reverse=True))
    marks = {line.get_ydata()[0] for line in plot.figure.axes[0].lines if line.get_marker() == "o"}
    assert marks == {0, 1, 2, 3}


def test_a_factor_of_three_levels_is_told_by_the_mean_of_each():
    arms = ("token_ppo", "s_ppo", "turn_ppo", "st_ppo", "grpo", "gspo")
    factors = {"weight": ("token", "turn", "none"), "deciding ratio": ("token", "turn")}
    groups = {"parts": Group("parts", "What weighs?", arms, factors=factors)}
    ends = ENDS | {"grpo": 0.5, "gspo": 0.3}
    plot = questions_figure(runs(**ends), groups)
    said = "weight (turn 0.70, none 0.40, token 0.25)"
    assert plot.title.split(". ")[1] == f"Means by {said}"
    assert (
        plot.figure.axes[0]
        .get_title(loc="left")
        .replace("\n", " ")
        .startswith(f"What weighs? Effects: {said};")
    )
    few = make({arm: {31: end, 32: end} for arm, end in ends.items()})
    assert questions_figure(few, groups).title == f"2 worlds, too few to tell: {said} and deciding ratio"


def test_an_incomplete_factorial_has_no_effect_and_the_title_says_from_where_to_where_arms_end():
    ends = {name: end for name, end in ENDS.items() if name != "s_ppo"}
    assert effects(runs(**ends), {"factorial": FACTORIAL}).empty
    plot = questions_figure(runs(**ends), {"factorial": FACTORIAL})
    assert plot.title == "3 arms end from 0.80 (“ST-PPO (SO-PPO)”) down to 0.20 (“token PPO”)"


def test_a_question_whose_recorded_arms_are_shown_already_gets_no_panel():
    first = Group("algorithms", "Who learns?", ("token_ppo", "turn_ppo", "st_ppo"))
    waiting = Group("controls", "Does a control do it?", ("st_ppo", "token_ppo", "kl_stop"))
    groups = {"algorithms": first, "controls": waiting}
    assert len(questions_figure(runs(**ENDS), groups).figure.axes) == 1
    both = questions_figure(runs(**ENDS, kl_stop=0.5), groups)
    assert [ax.get_title(loc="left") for ax in both.figure.axes] == ["Who learns?", "Does a control do it?"]


def test_few_worlds_get_no_interval_and_one_arm_no_picture():
    few = make({"token_ppo": {31: 0.2, 32: 0.3}, "st_ppo": {31: 0.7, 32: 0.8}})
    group = {"algorithms": Group("algorithms", "Who learns?", ("token_ppo", "st_ppo"))}
    assert np.isnan(questions_figure(few, group).data["low"]).all()
    assert questions_figure(make({"token_ppo": {31: 0.2}}), group) is None
