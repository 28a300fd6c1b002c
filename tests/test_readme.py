"""The README's numbers, recomputed from the committed metrics with pandas alone; its length and its links."""

import math
import re
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
METRICS = ROOT / "results/reference/laptop/metrics"


def finals() -> pd.DataFrame:
    """Mean over runs of the last tenth of each run's evaluations: columns sampled and greedy, by algorithm."""
    rows = pd.read_parquet(METRICS / "evaluations.parquet").sort_values("iteration")
    kind = rows["temperature"].map({1.0: "sampled", 0.0: "greedy"})
    curves = rows.groupby(["algorithm", "seed", kind])["success"]
    ends = curves.apply(lambda curve: curve.iloc[-math.ceil(len(curve) / 10) :].mean())
    return ends.groupby(["algorithm", "temperature"]).mean().unstack()


def table() -> dict[str, list[str]]:
    """Rows of the README's table of results: algorithm -> (sampled, greedy)."""
    rows = re.findall(r"^\| [^|]+ \(`(\w+)`\) \| (\.\d\d) \| (\.\d\d) \|", README, re.MULTILINE)
    return {name: numbers for name, *numbers in rows}


def test_table_is_what_the_metrics_say():
    found, shown = finals(), table()
    runs = pd.read_csv(METRICS / "summary.csv")
    assert set(shown) == set(found.index), "every algorithm that was trained, and no other"
    for name, numbers in shown.items():
        assert numbers == [f"{value:.2f}"[1:] for value in found.loc[name, ["sampled", "greedy"]]], name
    assert "means of three worlds" in README
    assert set(runs.groupby("algorithm")["world_seed"].nunique()) == {3}


def test_number_of_runs_is_said():
    assert f"{len(pd.read_csv(METRICS / 'summary.csv'))} runs" in " ".join(README.split())


def test_sentences_hold():
    """What the README says in words, each number as it stands there."""
    runs = pd.read_csv(METRICS / "summary.csv")
    of = {name: rows.set_index("world_seed") for name, rows in runs.groupby("algorithm")}
    text = " ".join(README.split())

    def said(value: float) -> str:
        return f"{value:.2f}"[1:]

    final = {name: said(rows["final"].mean()) for name, rows in of.items()}
    starts = [said(value) for value in of["st_ppo"]["start"].sort_values(ascending=False)]
    assert f"From {starts[0]}, {starts[1]} and {starts[2]}, ST-PPO ended at {final['st_ppo']}" in text
    outcomes = {name: list(rows["outcome"]) for name, rows in of.items()}
    assert set(outcomes["st_ppo"] + outcomes["turn_ppo"]) == {"learned"}, "none crashed"
    assert sorted(outcomes["token_ppo"]) == ["collapsed", "crashed and recovered", "lost its start"]
    assert (
        outcomes["s_ppo"] == ["collapsed"] * 3
        and f"collapsed in all three worlds, to {final['s_ppo']}" in text
    )
    assert outcomes["kl_stop"] == ["crashed and recovered"] * 3
    assert f"crashed and recovered in all three worlds and ended at {final['kl_stop']}" in text
    mild = pd.read_csv(METRICS.parents[1] / "mild/metrics/summary.csv").groupby("algorithm")["final"].mean()
    numbers = [said(mild[name]) for name in ("kl_stop", "st_ppo", "token_ppo")]
    assert "as well as ST-PPO, {} and {} (token PPO: {})".format(*numbers) in text
    for sentence in (
        "GRPO ended at {grpo}, SO-GRPO at {so_grpo}, GSPO at {gspo}",
        "ST-PPO ended at {st_ppo}, Turn-PPO at {turn_ppo}, token PPO at {token_ppo}.",
        "With a gradient clip it ended at {grad_clip}",
    ):
        assert sentence.format(**final) in text


def test_readme_is_one_screen():
    assert len(README.split()) < 800


@pytest.mark.parametrize("place", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_link_leads_somewhere(place):
    assert (ROOT / place).exists()


def test_the_search_shows_runs_that_climb_and_collapse():
    assert "climbs to .8 and then collapses" in " ".join(README.split())
    rows = pd.read_parquet(METRICS.parents[1] / "search/metrics/evaluations.parquet")
    rows = rows[(rows["temperature"] == 1) & (rows["algorithm"] == "token_ppo")].sort_values("iteration")
    curves = [run["success"].rolling(3).mean().dropna() for _, run in rows.groupby(["regime", "seed"])]
    collapsed = [curve for curve in curves if curve.max() > 0.75 and curve.iloc[-1] < curve.max() / 2]
    assert len(collapsed) >= 2
