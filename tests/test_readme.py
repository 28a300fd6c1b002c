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
    """What the README says of the table in words."""
    sampled = finals()["sampled"]
    assert sampled[["turn_ppo", "st_ppo"]].min() > sampled[["token_ppo", "s_ppo"]].max()
    assert sampled[["so_grpo", "gspo"]].min() > sampled["grpo"]


def test_readme_is_one_screen():
    assert len(README.split()) < 800


@pytest.mark.parametrize("place", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_link_leads_somewhere(place):
    assert (ROOT / place).exists()
