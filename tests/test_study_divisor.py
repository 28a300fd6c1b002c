"""The divisor's trial: verdicts stay as they were read, whatever is recorded later."""

import pandas as pd
import pytest

from stppo.study import divisor
from tests.test_study_claims import make, spread

READ, BEFORE, AFTER = "2026-06-01", "2026-05-31T23:00:00+00:00", "2026-06-01T00:00:00+00:00"
ARMS = {
    "PAPER/token_ppo": spread(0.5),
    "PAPER/s_ppo": spread(0.7, seed=1),
    "PAPER/token_ppo_shuffled": spread(0.5, seed=2),
    "PAPER/turn_ppo": spread(0.5, seed=3),
    "PAPER/st_ppo": spread(0.5, seed=4),
    "PAPER/turn_ppo_shuffled": spread(0.3, seed=5),
}


@pytest.fixture
def read(monkeypatch):
    monkeypatch.setattr(divisor, "READ", {"D": READ})


def recorded(arms, started=BEFORE):
    found = make(arms, preset="divisor")
    for run in found.runs:
        run["started"] = started
    return found


def test_only_letters_that_were_read_are_judged(read, monkeypatch):
    found = divisor.verdicts(recorded(ARMS)).drop_duplicates("id").set_index("id")["verdict"]
    assert {name[0] for name in found.index} == {"D"}
    assert found["D1.s"] == "supported" and found["D1.st"] == "inconclusive"
    monkeypatch.setattr(divisor, "READ", {})
    assert divisor.verdicts(recorded(ARMS)).empty


def test_an_entry_behind_a_gate_is_told_where_the_gate_is_supported(read):
    ids = set(divisor.verdicts(recorded(ARMS))["id"])
    assert "D1.s.own" in ids and "D1.st.own" not in ids


def test_runs_made_after_the_reading_change_no_verdict(read):
    trial = recorded(ARMS)
    later = recorded({name: {99: 0.0 if name.endswith("/s_ppo") else 1.0} for name in ARMS}, AFTER)
    trial_later = type(trial)(
        [*trial.runs, *later.runs],
        pd.concat([trial.iterations, later.iterations]),
        pd.concat([trial.evaluations, later.evaluations]),
    )
    pd.testing.assert_frame_equal(divisor.verdicts(trial_later), divisor.verdicts(trial))
