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


def test_widths_are_compared_in_the_worlds_that_have_all_of_them():
    arms = [
        f"OFF_POLICY{clip}/{method}_ppo{e}"
        for clip in ("", "_CLIP")
        for method in ("token", "turn")
        for e in ("_e0.05", "_e0.1", "", "_e0.4")
    ]
    ends = {arm: {401: 0.1, 402: 0.3} for arm in arms}
    found = divisor.widths(recorded(ends))
    named = {arm.partition("/")[2] for arm in arms}
    assert {regime: {*of} for regime, of in found.items()} == {"OFF_POLICY": named, "OFF_POLICY_CLIP": named}
    assert found["OFF_POLICY_CLIP"]["token_ppo_e0.1"]["final"] == pytest.approx(0.2)
    ends |= {"OFF_POLICY/prefix_ppo_e0.1": {401: 0.5, 402: 0.7}, "OFF_POLICY/sequence_ppo": {401: 0.5}}
    ends["OFF_POLICY/turn_ppo_own_norm_turn"] = {401: 0.5, 402: 0.7}  # no clip range of its own
    found = divisor.widths(recorded(ends))["OFF_POLICY"]
    assert {*found} == named | {"prefix_ppo_e0.1"}, "another ratio, where it has all those worlds"
    assert found["prefix_ppo_e0.1"]["final"] == pytest.approx(0.6)
    ends["OFF_POLICY/turn_ppo_e0.4"] = {401: 0.1, 403: 0.9}
    assert divisor.widths(recorded(ends))["OFF_POLICY"]["turn_ppo"]["final"] == pytest.approx(0.1)
    ends["OFF_POLICY/turn_ppo_e0.4"] = {403: 0.9}
    assert divisor.widths(recorded(ends)) == {}
