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


def table() -> dict[str, tuple[int, str, str]]:
    """Rows of the README's table of results: algorithm -> (worlds, sampled, greedy)."""
    rows = re.findall(r"^\| [^|]+ \(`(\w+)`\) \| (\d) \| (\.\d\d) \| (\.\d\d) \|", README, re.MULTILINE)
    return {name: (int(worlds), sampled, greedy) for name, worlds, sampled, greedy in rows}


def test_table_is_what_the_metrics_say():
    found, shown = finals(), table()
    runs = pd.read_csv(METRICS / "summary.csv")
    assert set(shown) == set(found.index), "every algorithm that was trained, and no other"
    for name, numbers in shown.items():
        expected = found.loc[name, ["sampled", "greedy"]]
        worlds = runs.loc[runs["algorithm"] == name, "world_seed"].nunique()
        assert numbers == (worlds, *(f"{value:.2f}"[1:] for value in expected)), name


def test_number_of_runs_is_said():
    assert f"{len(pd.read_csv(METRICS / 'summary.csv'))} runs" in " ".join(README.split())


def test_sentences_hold():
    """What the README says in words, each number as it stands there."""
    runs = pd.read_csv(METRICS / "summary.csv")
    of = {name: rows.set_index("world_seed") for name, rows in runs.groupby("algorithm")}
    text = " ".join(README.split())

    def said(value: float) -> str:
        return f"{value:.2f}"[1:]

    starts = " and ".join(said(value) for value in of["st_ppo"]["start"].sort_values(ascending=False))
    assert f"From {starts} every algorithm learned" in text and runs["learned"].all()
    early = {name: said(of[name]["after_10"].mean()) for name in ("st_ppo", "turn_ppo", "token_ppo")}
    assert (
        "ST-PPO stands at {st_ppo}, Turn-PPO at {turn_ppo}, token PPO at {token_ppo}".format(**early) in text
    )
    collapsed = runs[runs["collapsed"]]
    assert set(collapsed["algorithm"]) == {"token_ppo", "s_ppo"} and collapsed["world_seed"].nunique() == 1
    ends = collapsed.set_index("algorithm")
    assert {said(peak) for peak in ends["peak"]} == {".60"}
    assert f"collapsed, to {said(ends.final['token_ppo'])} and {said(ends.final['s_ppo'])}" in text
    final = {name: said(rows["final"].mean()) for name, rows in of.items()}
    for sentence in (
        "divisor alone, ended at {s_ppo}, Turn-PPO, with the ratio alone, at {turn_ppo}",
        "GRPO ended at {grpo}, SO-GRPO at {so_grpo}, GSPO at {gspo}",
        "KL early stopping ended at {token_ppo_kl_stop}",
    ):
        assert sentence.format(**final) in text


def test_readme_is_one_screen():
    assert len(README.split()) < 800


@pytest.mark.parametrize("place", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_link_leads_somewhere(place):
    assert (ROOT / place).exists()


def test_the_search_shows_runs_that_climb_and_collapse():
    assert "climb to .8 and then collapse" in README
    rows = pd.read_parquet(METRICS.parents[1] / "search/metrics/evaluations.parquet")
    rows = rows[(rows["temperature"] == 1) & (rows["algorithm"] == "token_ppo")].sort_values("iteration")
    curves = [run["success"].rolling(3).mean().dropna() for _, run in rows.groupby(["regime", "seed"])]
    collapsed = [curve for curve in curves if curve.max() > 0.75 and curve.iloc[-1] < curve.max() / 2]
    assert len(collapsed) >= 2
