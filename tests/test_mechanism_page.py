"""What the page on the mechanism says, recomputed from its metrics with pandas alone."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

FOLDER = Path(__file__).parents[1] / "results/reference/mechanism"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
TURN_WEIGHTS = ["turn_ppo", "weight_turn_decides_token", "weight_turn_decides_turn"]


def said(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    """Final success of each run, from the curves: rows algorithm and seed, columns sampled and greedy."""
    rows = pd.read_parquet(FOLDER / "metrics/evaluations.parquet").sort_values("iteration")
    assert set(rows["regime"]) == {"CRITICAL"}
    ends = rows.groupby(["algorithm", "seed", "temperature"])["success"].apply(
        lambda curve: curve.iloc[-max(1, -(-len(curve) // 10)) :].mean()
    )
    return ends.unstack().rename(columns={1.0: "sampled", 0.0: "greedy"})


@pytest.fixture(scope="module")
def early() -> pd.DataFrame:
    rows = pd.read_parquet(FOLDER / "metrics/iterations.parquet")
    return rows[rows["iteration"] <= 10]


def test_table(runs):
    shown = re.findall(r"`(\w+)`[^|]*\| ([.\d]+), ([.\d]+), ([.\d]+) \| ([.\d]+) \| ([.\d]+) \|", PAGE)
    assert {name for name, *_ in shown} == set(runs.index.get_level_values("algorithm"))
    for name, *cells in shown:
        part = runs.loc[name]
        assert list(part.index) == [100, 101, 102]
        means = part.mean()
        assert cells == [said(x) for x in (*part["sampled"], means["sampled"], means["greedy"])], name
    assert [float(row[4]) for row in shown] == sorted((float(row[4]) for row in shown), reverse=True)


def test_turn_weights_end_high_and_token_weights_do_not(runs):
    turn = runs.loc[TURN_WEIGHTS, "sampled"]
    assert len(turn) == 9 and (turn >= 0.55).all() and "at .55 or higher in 9 of 9 runs" in TEXT
    token = runs.loc[["token_ppo", "weight_token_decides_turn"], "sampled"]
    assert (token >= 0.55).sum() == 1 and len(token) == 6 and "one run of 6 does" in TEXT
    assert (runs.loc["kl_stop", "sampled"] >= 0.55).sum() == 1 and "with the KL stop one of 3" in TEXT


def test_neither_the_clip_nor_the_credit(runs, early):
    mean = runs["sampled"].groupby("algorithm").mean().map(said)
    assert f"count ends at {mean.weight_token_decides_turn} against {mean.token_ppo}" in TEXT
    apart = runs.loc["weight_token_decides_turn", "sampled"] - runs.loc["token_ppo", "sampled"]
    signs = ["−" * (x < 0) + "+" * (x > 0) + said(abs(x)) for x in apart]
    assert f"world by world {signs[0]}, {signs[1]} and {signs[2]}" in TEXT
    push = early.groupby("algorithm")["negative_advantage_gradient_share"].mean().map(said)
    told = f"({push.weight_token_decides_turn} against {push.turn_ppo}; token PPO {push.token_ppo})"
    assert told in TEXT
    own = f"turn weights end at {mean.turn_ppo}, with own advantages at {mean.weight_turn_decides_turn}"
    assert own in TEXT and f"on token ratios that credit ends at {mean.token_ppo_turn_mean}" in TEXT
    assert f"(dual clip, {mean.dual_clip})" in TEXT


def test_how_far_ratios_spread(early):
    spread = early[early["algorithm"] == "token_ppo"][["ratio_p99_turn", "ratio_p99_token"]].median()
    told = f"is {spread.iloc[0]:.1f} for turns and {spread.iloc[1]:.1f} for tokens, under token PPO itself"
    assert told in TEXT


def test_runs_are_of_one_commit_and_setting():
    records = json.loads((FOLDER / "metrics/runs.json").read_text(encoding="utf-8"))
    assert len({(r["git_commit"], r["git_dirty"], r["hardware"]["cpu"]) for r in records}) == 1
    settings = {(r["training"]["epochs"], r["training"]["learning_rate"], r["iterations"]) for r in records}
    assert settings == {(4, 1e-3, 30)}
