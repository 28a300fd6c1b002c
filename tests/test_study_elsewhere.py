import pytest

from stppo.study.elsewhere import best_elsewhere


def test_each_world_has_the_setting_that_is_best_in_the_others():
    low, high = {1: 0.9, 2: 0.2, 3: 0.2, 4: 0.2}, {1: 0.0, 2: 0.4, 3: 0.4, 4: 0.4}
    # In world 1 `low` would have been better: it may not look. Without world 2: .9 + .2 + .2 against 0 + .4 + .4.
    assert best_elsewhere([low, high]) == {1: 0.0, 2: 0.2, 3: 0.2, 4: 0.2}


def test_what_is_chosen_by_can_be_another_number():
    shown = [{1: 0.1, 2: 0.2}, {1: 0.3, 2: 0.4}]
    assert best_elsewhere(shown, by=[{1: 1.0, 2: 0.0}, {1: 0.0, 2: 1.0}]) == {1: 0.3, 2: 0.2}


def test_equal_settings_and_single_ones():
    one = {1: 0.5, 2: 0.6, 9: 0.1}
    assert best_elsewhere([one, dict(one)]) == best_elsewhere([one]) == one
    assert set(best_elsewhere([one, {2: 1.0, 9: 1.0}])) == {2, 9}
    with pytest.raises(ValueError, match="1 worlds in common"):
        best_elsewhere([one, {2: 1.0}])
