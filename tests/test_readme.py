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
    early = {name: said(of[name]["after_10"].mean()) for name in ("st_ppo", "turn_ppo", "token_ppo")}
    assert (
        "ST-PPO stands at {st_ppo}, Turn-PPO at {turn_ppo}, token PPO at {token_ppo}".format(**early) in text
    )
    (collapsed,) = of["token_ppo"][of["token_ppo"]["collapsed"]].to_dict("records")
    learned, end = said(collapsed["peak"]), said(collapsed["final"])
    assert f"In one of three worlds token PPO learned to {learned} and then collapsed to {end}" in text
    assert not of["turn_ppo"]["collapsed"].any() and not of["st_ppo"]["collapsed"].any()
    evaluations = pd.read_parquet(METRICS / "evaluations.parquet")
    of_st_ppo = evaluations[(evaluations["algorithm"] == "st_ppo") & (evaluations["temperature"] == 1)]
    assert f"fell to {said(of_st_ppo['success'].min())} for a single evaluation" in text
    assert (of_st_ppo["success"] < 0.15).sum() == 1
    for sentence in (
        "divisor alone, ended at {s_ppo}, Turn-PPO, with the ratio alone, at {turn_ppo}",
        "GRPO ended at {grpo}, SO-GRPO at {so_grpo}, GSPO at {gspo}",
        "ST-PPO ended at {st_ppo}, Turn-PPO at {turn_ppo}, token PPO at {token_ppo}.",
        "KL early stopping ended at {kl_stop}. With a gradient clip it ended at {grad_clip}",
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
