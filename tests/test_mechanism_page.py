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


def test_the_tokens_ratio_as_a_weight_slows_token_ppo(runs):
    other = runs.loc[[*TURN_WEIGHTS, "weight_one_decides_token", "weight_one_decides_turn"], "sampled"]
    token = runs.loc["token_ppo", "sampled"]
    told = f"every run ends at {said(other.min())} or higher, {len(other)} of {len(other)}"
    same_clip = runs.loc[["weight_turn_decides_token", "weight_one_decides_token"]]
    assert (
        told in TEXT and len(same_clip) == 6 and "in six of these runs the token decides, as in PPO" in TEXT
    )
    assert f"token PPO's three end at {said(token.min())} to {said(token.max())}" in TEXT
    assert other.min() > token.max()
    stopped = runs.loc["kl_stop", "sampled"]
    assert f"(the KL stop's, with few updates, at {said(stopped.min())} to {said(stopped.max())})" in TEXT


def test_imitating_successes_alone_ends_highest_in_each_world(runs):
    first = runs["sampled"].groupby(level="seed").idxmax()
    assert {algorithm for algorithm, _ in first} == {"successes_only"}
    assert "To leave failures alone altogether ends highest here, in each of the three worlds" in TEXT


def test_held_weights(runs):
    held = runs.loc["weight_token_held_decides_turn", "sampled"]
    assert f"held at 1.2 two runs of three end well, one at {said(held.min())}" in TEXT
    assert (held > 0.6).sum() == 2
    assert (
        f"dual clip, which holds them for failures, ends at {said(runs.loc['dual_clip', 'sampled'].mean())}"
        in TEXT
    )


def test_successes_alone_do_best(runs):
    mean = runs["sampled"].groupby("algorithm").mean()
    assert f"ends at {said(mean.successes_only)} in place of {said(mean.topr)}" in TEXT
    assert mean.idxmax() == "successes_only"


def test_neither_the_clip_nor_the_credit(runs, early):
    mean = runs["sampled"].groupby("algorithm").mean().map(said)
    assert f"let the turn decide ends at {mean.weight_token_decides_turn} against {mean.token_ppo}" in TEXT
    apart = runs.loc["weight_token_decides_turn", "sampled"] - runs.loc["token_ppo", "sampled"]
    signs = ["−" * (x < 0) + "+" * (x > 0) + said(abs(x)) for x in apart]
    assert f"world by world {signs[0]}, {signs[1]} and {signs[2]}" in TEXT
    push = early.groupby("algorithm")["negative_advantage_gradient_share"].mean().map(said)
    told = f"({push.weight_token_decides_turn} against {push.turn_ppo}; token PPO {push.token_ppo})"
    assert told in TEXT
    own = f"({mean.turn_ppo} with the turn's mean advantage, {mean.weight_turn_decides_turn} with own advantages)"
    assert own in TEXT and f"in each of the three worlds, at {mean.token_ppo_turn_mean};" in TEXT
    assert (runs.loc["token_ppo_turn_mean", "sampled"] < runs.loc["token_ppo", "sampled"]).all()
    two_sided = runs.loc["token_ppo_two_sided", "sampled"].map(said)
    assert set(two_sided) == {".00"} and "on both sides of the range ends at .00 in all three" in TEXT


def test_how_far_ratios_spread(early):
    spread = early[early["algorithm"] == "token_ppo"][["ratio_p99_turn", "ratio_p99_token"]].median()
    told = f"is {spread.iloc[0]:.1f} for turns and {spread.iloc[1]:.1f} for tokens (medians over iterations and worlds), under"
    assert told in TEXT


def test_runs_are_of_one_setting_and_begin_alike_in_a_world():
    records = json.loads((FOLDER / "metrics/runs.json").read_text(encoding="utf-8"))
    assert not any(r["git_dirty"] for r in records) and len({r["hardware"]["cpu"] for r in records}) == 1
    settings = {(r["training"]["epochs"], r["training"]["learning_rate"], r["iterations"]) for r in records}
    assert settings == {(4, 1e-3, 30)}
    starts = pd.DataFrame([(r["seed"], r["warm_start"]["success_sampled"]) for r in records])
    assert (starts.groupby(0)[1].nunique() == 1).all()
