"""What the page on the search says, recomputed from its metrics with pandas alone."""

import re
from pathlib import Path

import pandas as pd
import pytest

FOLDER = Path(__file__).parents[1] / "results/reference/search"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
OUTCOMES = ("learned", "crashed and recovered", "collapsed", "did not learn", "lost its start")


def said(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    """A row a run; its setting's epochs, staleness and rate, and whether it is of 160 iterations; NaN of the yardstick."""
    table = pd.read_csv(FOLDER / "metrics/summary.csv")
    setting = table["regime"].str.extract(r"^E(\d+)_L(\d+)_([\d.e-]+?)(_160)?$")
    table["epochs"], table["staleness"], rate = (setting[i].astype(float) for i in range(3))
    table["steps"] = (table["epochs"] * rate).round(4)
    table["long"] = setting[3].notna()
    table["fell"] = table["learned"] & table["crash_iteration"].notna()
    return table


@pytest.fixture(scope="module")
def short(runs) -> pd.DataFrame:
    return runs[runs["epochs"].notna() & ~runs["long"]]


def test_what_was_asked(runs, short):
    assert f"These {len(runs)} runs of token PPO alone" in TEXT and set(runs["algorithm"]) == {"token_ppo"}
    assert f"- {short['regime'].nunique()} settings in two worlds, 60 iterations" in TEXT
    assert (short.groupby("regime")["seed"].nunique() == 2).all()
    assert set(short["epochs"]) == {4, 8, 16} and set(short["staleness"]) == {0, 2, 8}
    assert set(short["steps"]) == {1.4e-3, 2.8e-3, 4e-3}
    long = runs[runs["long"]].groupby("regime")["seed"].nunique()
    assert len(long) == 4 and set(long) == {3} and (runs["regime"] == "ON_POLICY").sum() == 2
    starts = runs["start"]
    assert f"above its start of {said(starts.min())} to {said(starts.max())};" in TEXT


def test_table_of_step_sizes(short):
    rows = re.findall(r"^\| ([\d.]+e-3) \| (.+) \|$", PAGE, re.M)
    assert [float(steps) for steps, _ in rows] == sorted(set(short["steps"]))
    for steps, cells in rows:
        part = short[short["steps"] == float(steps)]
        ends = [said(part[part["staleness"] == age]["final"].mean()) for age in (0, 2, 8)]
        assert cells.split(" | ") == [
            *ends,
            *(str((part["outcome"] == outcome).sum()) for outcome in OUTCOMES),
        ], steps


def test_the_size_of_steps_decides_and_the_age_of_batches_does_not_show(short):
    steps = short.groupby("steps")["final"].mean()
    ages = short.groupby("staleness")["final"].mean()
    told = "falls from {} to {} and {} as learning rate × epochs grows; with batches 0, 2 and 8 iterations old it is {}, {} and {}."
    assert told.format(*map(said, [*steps, *ages])) in TEXT
    assert steps.is_monotonic_decreasing and ages.max() - ages.min() < 0.1 * (steps.max() - steps.min())
    ends = short.set_index("regime")["outcome"]
    assert set(ends["E8_L0_3.5e-4"]) == {"collapsed"} and set(ends["E8_L2_3.5e-4"]) == {"learned"}
    assert "at 3.5e-4 both runs on them collapsed, and neither on batches two iterations old" in TEXT


def test_few_epochs_collapse_and_many_stay_low(short):
    largest = short[short["steps"] == 4e-3]
    four, more = (largest[(largest["epochs"] == 4) == few] for few in (True, False))
    fell = four["learned"] & (four["outcome"] == "collapsed")
    assert f"four epochs {fell.sum()} of {len(four)} runs learned and collapsed" in TEXT
    lost, never = ((more["outcome"] == outcome).sum() for outcome in ("lost its start", "did not learn"))
    told = f"{lost} of {len(more)} lost their start, one did not learn, and none of the others ended above {said(more['final'].max())}."
    assert told in TEXT and never == 1
    updates = short.groupby("epochs")["updates"].unique().map(lambda found: found.item())
    assert f"({updates[4]:,}, {updates[8]:,} and {updates[16]:,} in 60 iterations)" in TEXT


def test_the_long_runs(runs):
    long = runs[runs["long"]].set_index(["regime", "seed"])
    fell = long.groupby("regime")["fell"].sum().to_dict()
    assert fell == {"E4_L2_1e-3_160": 3, "E4_L0_1e-3_160": 3, "E8_L2_3.5e-4_160": 2, "E8_L2_1.75e-4_160": 1}
    assert "2 of 3 with 8 epochs at 3.5e-4, 1 of 3 at 1.75e-4" in TEXT
    chosen, back = long.loc["E4_L2_1e-3_160"], long.loc["E4_L0_1e-3_160"]
    assert set(chosen["outcome"]) == {"collapsed"} and set(chosen["final"].map(said)) == {".00"}
    assert list(back["outcome"]).count("crashed and recovered") == 1
    assert f"(one comes back to {said(back['final'].max())})" in TEXT


def test_the_yardstick(runs):
    yard = runs[runs["regime"] == "ON_POLICY"].sort_values("seed")
    told = "ended at {} and {}; the second run crashed on its way and recovered"
    assert told.format(*map(said, yard["final"])) in TEXT
    assert list(yard["outcome"]) == ["learned", "crashed and recovered"]


def test_alarms_and_the_picture():
    alarms = pd.read_csv(FOLDER / "figures/early_warning_alarms.csv").set_index("signal").loc["best"]
    told = f"{alarms['announced']} of {alarms['crashes']} crashes, where chance would have {alarms['by_chance']:.1f}"
    assert told in TEXT
    title = (FOLDER / "figures/settings_map.txt").read_text(encoding="utf-8").splitlines()[0]
    assert f"![{title}](figures/settings_map.png)" in PAGE
    assert all((FOLDER / place).exists() for place in re.findall(r"\]\(([^)]+)\)", PAGE))


def test_what_the_rule_chose(runs):
    shares = runs[runs["epochs"].notna()].groupby("regime")["fell"].agg(["sum", "mean"])
    most = shares[(shares["mean"] >= 0.6) & (shares["sum"] == 3)]
    assert set(most.index) == {"E4_L0_1e-3_160", "E4_L2_1e-3_160"}, "two have 3 of 3 such runs"
    yard = runs[runs["regime"] == "ON_POLICY"]
    half = (yard["final"] - yard["start"]).mean() / 2
    rate = runs[runs["regime"].isin(["E8_L2_3.5e-4", "E8_L2_1.75e-4"])]
    assert (rate["final"] >= rate["start"] + half).all(), "over 60 iterations 3.5e-4 is mild"
    for regime in ("E8_L2_5e-4", "E8_L2_3.5e-4_160", "E8_L2_1.75e-4_160"):
        part = runs[runs["regime"] == regime]
        assert (part["final"] < part["start"] + half).any(), regime
    lowest = part.loc[part["final"].idxmin()]
    told = f"one run ended at {said(lowest['final'])}, where half of the yardstick's gain would be {said(lowest['start'] + half)}."
    assert told in TEXT


def test_where_long_runs_begin_as_the_short_ones_did():
    rows = pd.read_parquet(FOLDER / "metrics/evaluations.parquet").query("temperature == 1")
    curves = rows.set_index(["regime", "seed", "iteration"]).sort_index()["success"]
    long = {name.removesuffix("_160") for name in rows["regime"] if name.endswith("_160")}
    other = set()
    for name in long:
        for world in (100, 101):
            first, again = curves.loc[name, world], curves.loc[f"{name}_160", world]
            other |= set() if (again[first.index] == first).all() else {name}
    assert long - other == {"E4_L0_1e-3"} and "At three of the four long settings" in TEXT
