"""What README and the study's page say, recomputed from the committed metrics with pandas alone; lengths and links."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
STUDY = ROOT / "results/reference/study"
PAGE = (STUDY / "README.md").read_text(encoding="utf-8")
TEXTS = pytest.mark.parametrize(
    "text", [" ".join(README.split()), " ".join(PAGE.split())], ids=["README", "page"]
)


def is_page(text: str) -> bool:
    """Whether it is the study's page, which says more than the README does."""
    return text.startswith("# The study")


def said(value: float) -> str:
    """A number below 1 as the pages have it."""
    return f"{value:.2f}"[1:]


def signed(value: float) -> str:
    return said(abs(value)) if round(value, 2) >= 0 else "−" + said(abs(value))


def runs_of(regime: str) -> dict[str, pd.DataFrame]:
    """Runs of a regime by algorithm, a row a world: the package's summary, and final successes from the curves."""
    summary = pd.read_csv(STUDY / "metrics/summary.csv").query("regime == @regime").set_index("seed")
    rows = pd.read_parquet(STUDY / "metrics/evaluations.parquet").query("regime == @regime")
    rows = rows.assign(kind=rows["temperature"].map({1.0: "sampled", 0.0: "greedy"})).sort_values("iteration")
    curves = rows.groupby(["algorithm", "seed", "kind"])["success"]
    ends = curves.apply(lambda curve: curve.iloc[-math.ceil(len(curve) / 10) :].mean()).unstack()
    return {name: part.join(ends.loc[name]) for name, part in summary.groupby("algorithm")}


@pytest.fixture(scope="module")
def runs() -> dict[str, pd.DataFrame]:
    return runs_of("OFF_POLICY")


@pytest.fixture(scope="module")
def fresh() -> dict[str, pd.DataFrame]:
    return runs_of("ON_POLICY")


def counts(part: pd.DataFrame, *outcomes: str) -> int:
    return int(part["outcome"].isin(outcomes).sum())


def test_table_of_the_study(runs):
    rows = re.findall(
        r"^\| [^|]+ \(`([\w.]+)`\) \| (\d+) \| ([.\d]+) \| \[([.\d]+), ([.\d]+)\] \| (.+) \|$", PAGE, re.M
    )
    methods = {file.stem for file in (ROOT / "configs/algorithm").glob("*.yaml")}
    assert sorted(name for name, *_ in rows) == sorted(runs), "every arm that was trained, once"
    assert {name for name, *_ in rows[: len(set(runs) & methods)]} == set(runs) & methods, "methods first"
    for name, worlds, mean, low, high, rest in rows:
        part = runs[name]
        outcomes = (
            counts(part, "learned"),
            counts(part, "crashed and recovered"),
            counts(part, "collapsed"),
            counts(part, "did not learn", "lost its start"),
        )
        assert (worlds, mean) == (str(len(part)), said(part["sampled"].mean())), name
        ends = np.clip(over_worlds(part["sampled"].to_numpy()), 0, 1)
        assert np.allclose([float(low), float(high)], ends, atol=0.015), name  # another draw of worlds
        assert rest.split(" | ") == [said(part["greedy"].mean()), *map(str, outcomes)], name
        assert sum(outcomes) == len(part)


def test_table_of_other_settings(runs):
    rows = re.findall(r"^\| [^|`]+ \(`([A-Z_]+)`\) \| [^|`]+ \(`(\w+)`\) \| (.+) \|$", PAGE, re.M)
    recorded = pd.read_csv(STUDY / "metrics/summary.csv").query("regime != 'OFF_POLICY'")
    assert sorted(row[:2] for row in rows) == sorted(
        {*zip(recorded["regime"], recorded["algorithm"], strict=True)}
    )
    for regime, name, cells in rows:
        part = runs_of(regime)[name]
        main = runs[name].loc[part.index]
        outcomes = (
            counts(part, "learned"),
            counts(part, "crashed and recovered"),
            counts(part, "collapsed"),
            counts(part, "did not learn", "lost its start"),
        )
        ends = [said(frame["sampled"].mean()) for frame in (part, main)]
        assert cells.split(" | ") == [str(len(part)), *ends, *map(str, outcomes)], (regime, name)
        assert sum(outcomes) == len(part) == len(main)


@pytest.fixture(scope="module")
def once() -> dict[str, pd.DataFrame]:
    return runs_of("FRESH_SAME_TRAJECTORIES")


def crashes(part: pd.DataFrame) -> str:
    return f"{counts(part, 'crashed and recovered', 'collapsed')} of {len(part)}"


@TEXTS
def test_fresh_data_used_once_is_clearly_better_with_two_of_three(runs, once, text):
    names = ("turn_ppo", "st_ppo", "token_ppo")
    found = {name: gain(once[name], runs[name]) for name in names}
    assert {len(once[name]) for name in names} == {6}
    assert {name: low > 0 for name, (_, low) in found.items()} == {
        "turn_ppo": True,
        "st_ppo": False,
        "token_ppo": True,
    }
    turn, st, token = (told for told, _ in found.values())
    if not is_page(text):
        assert (
            f"**Fresh batches used once lift token PPO and Turn-PPO**, by {token} and {turn} over old" in text
        )
        more = runs_of("FRESH_SAME_UPDATES")["token_ppo"]
        assert more["updates"].mean() == runs["token_ppo"]["updates"].mean() and len(more) == 6
        crashed = counts(more, "crashed and recovered", "collapsed")
        assert f"four times (6 worlds); with as many updates token PPO still crashed in {crashed}." in text
        return
    end = [said(once[name]["sampled"].mean()) for name in names]
    assert "Turn-PPO ended at {}, ST-PPO at {} and token PPO at {} (6 worlds each)".format(*end) in text
    share = once["turn_ppo"]["updates"].mean() / runs["turn_ppo"]["updates"].mean()
    assert share == 0.25 and "at a quarter of the updates" in text
    assert f"differences {turn}, {st} and {token} (those of ST-PPO and token PPO are" in text


def gain(part: pd.DataFrame, other: pd.DataFrame) -> tuple[str, float]:
    """By how much an arm ends higher than the same worlds of another, as the pages have it, and the interval's lower end."""
    values = (part["final"] - other["final"]).dropna().to_numpy()
    low, high = over_worlds(values)
    return f"{signed(values.mean())} [{signed(low)}, {signed(high)}]", low


def test_crashes_on_fresh_data(runs, fresh, once):
    page = " ".join(PAGE.split())
    main = [
        said(runs[name].loc[once[name].index]["sampled"].mean())
        for name in ("turn_ppo", "st_ppo", "token_ppo")
    ]
    assert "against {}, {} and {} on old data used four times".format(*main) in page
    more = runs_of("FRESH_SAME_UPDATES")
    end = [said(more[name]["sampled"].mean()) for name in ("turn_ppo", "st_ppo", "token_ppo")]
    assert "so as many updates, do no better that shows: {}, {} and {}.".format(*end) in page
    for name in ("turn_ppo", "st_ppo", "token_ppo"):
        updates = {part[name]["updates"].mean() for part in (more, runs)}
        assert len(updates) == 1 and {len(part[name]) for part in (more, once)} == {6}
        ends = (more[name]["final"] - once[name]["final"]).to_numpy()
        assert over_worlds(ends)[0] < 0, (name, "no better that shows")
    told = (
        f"Token PPO crashed in {crashes(once['token_ppo'])} worlds on the fewer, in {crashes(more['token_ppo'])} on the more, "
        f"and in {crashes(fresh['token_ppo'])} when batches are used twice"
    )
    assert told in page
    topr = [said(part["sampled"].mean()) for part in (fresh["topr"], runs["topr"].loc[fresh["topr"].index])]
    assert (
        "TOPR is another matter: {} on fresh batches used twice, {} in these worlds on old".format(*topr)
        in page
    )
    search = pd.read_csv(STUDY.parent / "search/metrics/summary.csv").query("regime == 'E4_L0_1e-3_160'")
    assert f"on fresh batches in {crashes(search)} runs of" in page


def test_the_divisor_on_fresh_batches(fresh, once):
    page = " ".join(PAGE.split())

    ends = [said(fresh[name]["sampled"].mean()) for name in ("st_ppo", "token_ppo")]
    told, _, high = told_apart(fresh, "st_ppo", "token_ppo")
    assert high < 0 and len(fresh["token_ppo"]) == 16
    assert "ended below token PPO**: {} against {} (16 worlds, difference {})".format(*ends, told) in page
    fell = f"it crashed in {crashes(fresh['st_ppo'])} worlds, token PPO in {crashes(fresh['token_ppo'])}."
    assert f"{fell} Turn-PPO crashed in {crashes(fresh['turn_ppo'])} there" in page
    (twice, *ends), (used_once, *others) = (told_apart(of, "st_ppo", "turn_ppo") for of in (fresh, once))
    assert ends[0] < 0 < ends[1] and others[0] < 0 < others[1], "not told apart"
    assert f"not told apart from Turn-PPO: {twice}, and on batches used once {used_once}." in page


def test_longer_and_another_model(runs):
    page = " ".join(PAGE.split())
    long, llama = runs_of("LONG"), runs_of("LLAMA")
    end = {name: said(part["sampled"].mean()) for name, part in long.items()}
    told = f"token PPO ended at {end['token_ppo']}, Turn-PPO at {end['turn_ppo']} and ST-PPO at {end['st_ppo']}, both"
    assert told in page and counts(long["turn_ppo"], "learned") == counts(long["st_ppo"], "learned") == 6
    end = {name: said(part["sampled"].mean()) for name, part in llama.items()}
    told = f"ST-PPO ended at {end['st_ppo']}, token PPO at {end['token_ppo']} ({len(llama['st_ppo'])} worlds)"
    assert told in page
    _, mean, low, high = apart(runs, "token_ppo_critic8", "token_ppo")
    end = said(runs["token_ppo_critic8"]["sampled"].mean())
    assert f"ended at {end} with it, {signed(mean)} from token PPO [{signed(low)}, {signed(high)}]" in page


def test_better_values_help_in_nothing_that_shows(runs):
    true = runs["token_ppo_true_values"]
    _, mean, low, high = apart(runs, "token_ppo_true_values", "token_ppo")
    lost = counts(true, "collapsed", "did not learn", "lost its start")
    assert f"A gain of up to {said(high)} with true values is not excluded." in " ".join(PAGE.split())
    told = (
        f"it ended at {said(true['sampled'].mean())}, {signed(mean)} from token PPO [{signed(low)}, {signed(high)}], and collapsed or "
        f"lost its start in {lost} of {len(true)} worlds"
    )
    assert told in " ".join(PAGE.split()) and low < 0 < high and not counts(true, "did not learn")


@TEXTS
def test_one_ratio_for_the_trajectory(runs, text):
    n, mean, low, high = apart(runs, "sequence_ppo", "turn_ppo")
    assert low > 0 and n == len(runs["sequence_ppo"]) == 12
    end = said(runs["sequence_ppo"]["sampled"].mean())
    if is_page(text):
        both = said(runs["turn_ppo"].loc[runs["sequence_ppo"].index]["sampled"].mean())
        assert f"Sequence PPO ended at {end}, Turn-PPO at {both} in the same twelve worlds" in text
        assert f"(difference {said(mean)} [{said(low)}, {said(high)}])" in text
    else:
        both = said(runs["turn_ppo"].loc[runs["sequence_ppo"].index]["sampled"].mean())
        told = f"One ratio for the whole trajectory does better than one a turn**: {end} against {both} (12 worlds)"
        assert told in text


@TEXTS
def test_longer_chains(text):
    chains = runs_of("CHAINS")
    assert {len(part) for part in chains.values()} == {6}
    end = {name: said(part["sampled"].mean()) for name, part in chains.items()}
    assert counts(chains["sequence_ppo"], "learned") == 6

    ratio, low, _ = told_apart(chains, "sequence_ppo", "turn_ppo")
    assert low > 0
    divisor, low, _ = told_apart(chains, "st_ppo", "turn_ppo")
    placebo, below, above = told_apart(chains, "st_ppo", "turn_ppo_shuffled")
    assert low > 0 and below < 0 < above
    if not is_page(text):
        told = f"On longer chains alone, of nine settings, it is {divisor.replace(' [', ' above [')}."
        assert told in text
        return
    wider = f"the gap is wider: {end['sequence_ppo']} and without a crash in 6 of 6 worlds against {end['turn_ppo']} ({ratio})"
    assert (
        f"{wider}; TOPR ends at {end['topr']} there, ST-PPO at {end['st_ppo']}, token PPO at {end['token_ppo']}."
        in text
    )
    greedy = {name: said(part["greedy"].mean()) for name, part in chains.items()}
    rows = pd.read_parquet(STUDY / "metrics/evaluations.parquet").query(
        "regime == 'CHAINS' and iteration == 0"
    )
    start = rows[rows["temperature"] == 0]["success"].mean()
    gain = {name for name, part in chains.items() if part["greedy"].mean() > start}
    told = f"begins at {said(start)} there, and only TOPR ({greedy['topr']}) and sequence PPO ({greedy['sequence_ppo']}) gain any; ST-PPO ends at {greedy['st_ppo']}, Turn-PPO at {greedy['turn_ppo']}."
    assert gain == {"topr", "sequence_ppo"} and told in text
    steps, below, above = told_apart(chains, "turn_ppo_shuffled", "turn_ppo")
    assert below < 0 < above
    assert f"is open**: {end['st_ppo']} to {end['turn_ppo']} (difference {divisor})." in text
    told = f"ended at {end['turn_ppo_shuffled']}, not told apart from ST-PPO ({placebo}) nor from Turn-PPO without ({steps})"
    assert told in text


def test_longer_chains_are_the_one_setting_where_st_ppo_is_clearly_above_turn_ppo():
    ahead = {}
    for regime in pd.read_csv(STUDY / "metrics/summary.csv")["regime"].unique():
        if {"st_ppo", "turn_ppo"} <= set(parts := runs_of(regime)):
            ahead[regime] = apart(parts, "st_ppo", "turn_ppo")[2] > 0
    assert [regime for regime, clear in ahead.items() if clear] == ["CHAINS"] and len(ahead) == 9
    told = "Of nine settings, in two of which both end at .00, it is the only one at which this interval misses 0"
    assert told in " ".join(PAGE.split())
    ends = [[runs_of(regime)[arm]["sampled"].mean() for arm in ("st_ppo", "turn_ppo")] for regime in ahead]
    assert sum(max(pair) < 0.005 for pair in ends) == 2


def test_where_an_episode_is_a_single_turn():
    one = runs_of("ONE_TURN")
    end = {name: said(part["sampled"].mean()) for name, part in one.items()}
    start = said(np.mean([part["start"].mean() for part in one.values()]))
    told = (
        f"from {start}, the KL stop ended at {end['kl_stop']}, Turn-PPO at {end['turn_ppo']}, ST-PPO at {end['st_ppo']} "
        f"and token PPO at {end['token_ppo']} (6 worlds each)"
    )
    page = " ".join(PAGE.split())
    assert told in page and {len(part) for part in one.values()} == {6}
    kept = [name for name, part in one.items() for _ in range(counts(part, "learned"))]
    assert kept == ["turn_ppo"] and "one run kept what it had learned, of Turn-PPO" in page


def test_a_policy_of_a_million_parameters():
    million = runs_of("MILLION")
    assert {len(part) for part in million.values()} == {4}
    end = {name: said(part["sampled"].mean()) for name, part in million.items()}
    assert {counts(million[name], "lost its start") for name in ("token_ppo", "turn_ppo", "st_ppo")} == {4}
    assert {end[name] for name in ("token_ppo", "turn_ppo", "st_ppo")} == {".00"}
    start = said(np.mean([part["start"].mean() for part in million.values()]))
    told = (
        f"ended at .00 in 4 of 4 worlds, the KL stop at {end['kl_stop']}, from {start}. In two of six worlds"
    )
    assert told in " ".join(PAGE.split())


def told_apart(runs, one: str, other: str) -> tuple[str, float, float]:
    """A difference in final sampled success as the page has it, and its interval."""
    _, mean, low, high = apart(runs, one, other)
    return f"{signed(mean)} [{signed(low)}, {signed(high)}]", low, high


@TEXTS
def test_plain_remedies(runs, text):
    clip, half = runs["grad_clip"], runs["token_ppo_lr0.5"]
    assert len(clip) == len(half) == 12
    ends = said(half["sampled"].mean()), said(clip["sampled"].mean())
    st, low, high = told_apart(runs, "st_ppo", "token_ppo_lr0.5")
    assert low < 0 < high
    if not is_page(text):
        told = "half the learning rate takes token PPO to {}, Turn-PPO to {}."
        assert told.format(ends[0], said(runs["turn_ppo_lr0.5"]["sampled"].mean())) in text
        assert apart(runs, "token_ppo_lr0.5", "token_ppo")[2] > 0
        return
    turn, low, high = told_apart(runs, "turn_ppo", "token_ppo_lr0.5")
    assert low < 0 < high
    told = (
        f"half the learning rate ended at {ends[0]}, learning without a crash in {counts(half, 'learned')};"
    )
    assert f"{told} ST-PPO is not told apart from it ({st}), nor Turn-PPO ({turn})" in text
    told = (
        f"A gradient clip of 1.0 ended at {ends[1]}, learning without a crash in {counts(clip, 'learned')};"
    )
    away, low, _ = told_apart(runs, "grad_clip", "token_ppo")
    above, least, _ = told_apart(runs, "st_ppo", "grad_clip")
    assert low > 0 and least > 0
    assert f"{told} from token PPO it is {away} away, ST-PPO from it {above}." in text
    lower = [said(runs[f"turn_ppo_lr{rate}"]["sampled"].mean()) for rate in ("0.75", "0.5")]
    assert "a lower rate as well: {} at three quarters, {} at half;".format(*lower) in text
    leads = [told_apart(runs, f"turn_ppo_lr{rate}", f"token_ppo_lr{rate}")[0] for rate in ("0.75", "0.5")]
    assert "that is {} and {} above token PPO at the same rate".format(*leads) in text


def test_placebos_and_corners(runs):
    page = " ".join(PAGE.split())
    end = {name: said(part["sampled"].mean()) for name, part in runs.items()}
    placebo = runs["turn_ppo_shuffled"].index
    assert list(placebo) == list(runs["turn_ppo_replayed"].index)
    same, worlds = said(runs["st_ppo"].loc[placebo]["sampled"].mean()), {6: "six", 12: "twelve"}[len(placebo)]
    twelve = {name: said(runs[name].loc[range(31, 43)]["sampled"].mean()) for name in ("so_grpo", "grpo")}
    assert {len(runs[name]) for name in ("turn_grpo", "s_grpo")} == {12}
    told = f"Turn-PPO ended at {end['turn_ppo_shuffled']}, with those of another run at {end['turn_ppo_replayed']}, ST-PPO at {same} in these {worlds} worlds"
    assert told in page
    lower = signed(apart(runs, "so_grpo", "turn_grpo")[1])
    joint = ends_of_claim("C8.a.specific", "SO-GRPO − turn GRPO")
    told = f"{twelve['so_grpo']} to {end['turn_grpo']} (12 worlds, difference {lower}, joint interval {joint[0]} to {joint[1]})"
    assert told in page
    assert (
        f"takes GRPO from {twelve['grpo']} to {end['turn_grpo']}, the divisor alone leaves it at {end['s_grpo']}"
        in page
    )
    for one, other in (
        ("token_ppo_turn_mean", "token_ppo"),
        ("turn_ppo_turn_mean", "turn_ppo"),
        ("st_ppo_turn_mean", "st_ppo"),
        ("s_ppo_turn_mean", "s_ppo"),
    ):
        low, high = apart(runs, one, other)[2:]
        assert low < 0 < high, (one, "pooling the credit changes nothing that shows")
    for one in ("turn_ppo_shuffled", "turn_ppo_replayed"):
        low, high = apart(runs, "st_ppo", one)[2:]
        assert low < 0 < high, one


def test_where_training_begins(runs):
    """By the many trajectories of the warm start's own evaluation, from which gains are counted."""
    begins = pd.DataFrame({name: part[["start", "greedy_start"]].mean() for name, part in runs.items()}).T
    two, others = begins.loc[["token_ppo", "st_ppo"]], begins.drop(["token_ppo", "st_ppo"])
    (sampled,), (greedy,) = (set(two[column].map(said)) for column in begins)
    (other,) = set(others["start"].map(said))
    low, high = (said(end) for end in (others["greedy_start"].min(), others["greedy_start"].max()))
    told = f"begin at {sampled} sampled and {greedy} greedy, the others at {other} and {low} to {high} ("
    assert told in " ".join(PAGE.split())


@TEXTS
def test_the_two_nulls(runs, fresh, text):
    one, successes = runs["weight_one"], runs["successes_only"]
    if is_page(text):
        free = f"ended at {{}}, without a crash in {counts(one, 'learned')} of {len(one)}"
        between, low, high = told_apart(runs, "turn_ppo", "weight_one")
        told = free.format(said(one["sampled"].mean()))
        assert f"{told} worlds, not told apart from Turn-PPO ({between} between them)" in text
        assert low < 0 < high
    part = (
        pd.read_csv(BENCH / "metrics/summary.csv")
        .query("regime == 'BENCHMARK'")
        .groupby("algorithm")["final"]
        .mean()
    )
    gains = [said(part[name] - part["token_ppo"]) for name in ("weight_one", "turn_ppo")]
    if is_page(text):
        assert "gains {} over token PPO, the turn ratio {}".format(*gains) in text
    if is_page(text):
        kept = f"without a crash in {counts(successes, 'learned')} of {len(successes)}"
        assert f"ended at {said(successes['sampled'].mean())}, {kept}" in text
    assert successes["sampled"].mean() == max(part["sampled"].mean() for part in runs.values())
    if is_page(text):
        assert f"at {said(fresh['successes_only']['sampled'].mean())} on fresh data used twice" in text
        assert f"; {told_apart(runs, 'successes_only', 'topr')[0].replace(' [', ' above TOPR [')}." in text
    assert apart(runs, "weight_one", "token_ppo")[2] > 0
    assert apart(runs, "successes_only", "topr")[2] > 0


def test_where_success_is_rare():
    rare = runs_of("RARE")
    end = {name: said(part["sampled"].mean()) for name, part in rare.items()}
    start = said(np.mean([part["start"].mean() for part in rare.values()]))
    told = (
        f"in {start} of its tries ({len(rare['topr'])} worlds) hardly a run learned: successes only ended at {end['successes_only']}, TOPR at {end['topr']}, "
        f"Turn-PPO at {end['turn_ppo']}, ST-PPO at {end['st_ppo']} and token PPO at {end['token_ppo']}"
    )
    assert told in " ".join(PAGE.split())
    told = f"needs successes**: from a start of {start} it ended at {end['successes_only']}, the PPOs at .00"
    assert told in " ".join(README.split())
    assert {end[name] for name in ("token_ppo", "turn_ppo", "st_ppo")} == {".00"}
    assert {len(part) for part in rare.values()} == {len(rare["topr"])}
    assert sum(counts(part, "learned") for part in rare.values()) == 1


def test_number_of_runs_is_said():
    n = len(pd.read_csv(STUDY / "metrics/summary.csv"))
    assert f"{n} runs; here 64" in " ".join(
        README.split()
    ) and f"{n} of its 708 runs are recorded" in " ".join(PAGE.split())


@TEXTS
def test_who_learns_and_who_collapses(runs, text):
    token, st = runs["token_ppo"], runs["st_ppo"]
    assert len(token) == len(st) == 16
    never = counts(token, "did not learn", "lost its start")
    recovered = counts(token, "crashed and recovered")
    if is_page(text):
        ends = f"**ST-PPO ended at {said(st['sampled'].mean())} and token PPO at {said(token['sampled'].mean())}**"
        assert f"{ends}, from {said(st['start'].mean())} (16 worlds each)" in text
        assert f"ST-PPO learned without a crash in {counts(st, 'learned')} worlds" in text
        lost = f"{counts(token, 'collapsed')} collapsed, {recovered} crashed and recovered, {never} never learned"
        assert lost in text
    fresh = pd.read_csv(BENCH / "metrics/summary.csv").query("regime == 'CONFIRMATION'")
    best = fresh.groupby("algorithm")["final"].mean()
    told = "at the best of forty settings, token PPO reaches {} and ST-PPO {} in"
    assert told.format(*(said(best[name]) for name in ("token_ppo", "st_ppo"))) in text
    wide = fresh.pivot(index="seed", columns="algorithm", values="final")
    low, high = over_worlds((wide["st_ppo"] - wide["token_ppo"]).to_numpy())
    assert low < 0 < high and len(wide) == 6, "token PPO keeps up"


@TEXTS
def test_it_is_the_turn_ratio(runs, text):
    turn, s = runs["turn_ppo"], runs["s_ppo"]
    told = f"Turn-PPO, with that alone, ended at {said(turn['sampled'].mean())}"
    ended = f"ended at {said(s['sampled'].mean())} and collapsed in {counts(s, 'collapsed')} of {len(s)}"
    if is_page(text):
        assert (
            f"{told} and learned without a crash in {counts(turn, 'learned')} of {len(turn)} worlds" in text
        )
        assert f"{ended}: no sign" in text
    else:
        both = said(runs["st_ppo"]["sampled"].mean())
        assert (
            f"{told}, ST-PPO, with both, at {both} ({len(turn)} worlds;" in text
            and f"ended at {said(s['sampled'].mean())}; ST-PPO is" in text
        )
    assert apart(runs, "s_ppo", "token_ppo")[2] < 0 < apart(runs, "turn_ppo", "token_ppo")[2]
    assert s["sampled"].mean() < runs["token_ppo"]["sampled"].mean() + 0.05 < turn["sampled"].mean()
    verdicts = pd.read_csv(STUDY / "claims/claims.csv").groupby("id")["verdict"].first()
    assert verdicts["C2.s_ppo"] == "inconclusive"


def test_joint_verdicts():
    verdicts = pd.read_csv(STUDY / "claims/claims.csv").groupby("id")["verdict"].first()
    page = " ".join(PAGE.split())
    supported = set(verdicts.index[verdicts == "supported"])
    named = {
        "C5",
        "C5.ratio",
        "Q7.ratio",
        "C4.st_ppo",
        "Q2",
        "C2.st_ppo",
        "C8.a",
        "C1.crashes",
        "C6.spikes",
        "Q4",
        "Q6",
    }
    assert supported == named
    assert f"{len(supported)} of {len(verdicts)} claims are supported" in page
    assert set(verdicts.index[verdicts == "not supported"]) == {"C3.st_ppo", "Q8"}
    assert f"**{len(supported)} of {len(verdicts)} registered claims are supported.**" in README
    rows = (STUDY / "claims/claims.md").read_text(encoding="utf-8")
    assert " worlds of " not in rows, "no verdict waits for worlds"


def ends_of_claim(name: str, measured: str = "") -> list[str]:
    """The joint interval of the condition of a claim whose measure ends so, as the pages have it."""
    rows = pd.read_csv(STUDY / "claims/claims.csv").query("id == @name")
    row = rows[rows["measured"].str.endswith(measured)].squeeze()
    return [signed(row["joint_low"]), signed(row["joint_high"])]


@TEXTS
def test_that_token_ppo_collapses_by_being_off_policy_is_inconclusive(runs, fresh, text):
    rows = pd.read_csv(STUDY / "claims/claims.csv").set_index("id")
    lost = rows.loc["C1"].iloc[1]
    assert (
        set(rows.loc["C1", "verdict"]) == {"inconclusive"}
        and rows.loc["C1.crashes", "verdict"] == "supported"
    )
    off, near = (of["token_ppo"] for of in (runs, fresh))
    told = [f"{counts(part, 'collapsed')} of {len(part)}" for part in (off, near)]
    if not is_page(text):
        assert "is *inconclusive*, though {} runs did against {}.".format(*told) in text
        return
    assert "It collapsed in {} worlds, and in {} on fresh batches used twice".format(*told) in text
    same = runs_of("FRESH_SAME_UPDATES")["token_ppo"]
    crashed = [crashes(part).split()[0] for part in (same, off.loc[same.index])]
    told = "With as many on fresh batches it crashed in {} of 6 worlds, off-policy in {} of the same 6."
    assert told.format(*crashed) in text and len(same) == 6
    assert off["updates"].mean() == 2 * near["updates"].mean() == same["updates"].mean()
    low, high = ends_of_claim("C1", "(ON_POLICY)")
    assert (
        lost["threshold"] == "> 0.05" and "claim C1 also asks for .05 more of its success to be lost" in text
    )
    assert f"the difference is {signed(lost['estimate'])}, its joint interval {low} to {high}." in text


def test_the_answer_comes_first_and_on_the_sites_first_page_too(runs):
    begin, end = "# stppo", "A reproducible companion"
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert f'```{{include}} ../README.md\n:start-after: "{begin}"\n:end-before: "{end}"\n```' in index
    assert README.startswith(begin) and README.count(end) == 1
    answer = " ".join(README.removeprefix(begin).split(end)[0].split())
    final = {name: said(part["sampled"].mean()) for name, part in runs.items()}
    token, turn = runs["token_ppo"], runs["turn_ppo"]
    lost = f"{counts(token, 'collapsed')} of {len(token)} runs learned and then lost it for good"
    assert (
        f"ended at {final['token_ppo']} of unseen questions answered, from {said(token['start'].mean())}; {lost}"
        in answer
    )
    assert counts(turn, "learned") == len(turn) == 16
    told = f"they ended at {final['turn_ppo']}, and none of 16 runs lost half of its gain; with no such weight at all at {final['weight_one']}."
    assert f"{told} Imitating only successes did best: {final['successes_only']}." in answer
    assert max(final.values()) == final["successes_only"]
    assert min(apart(runs, name, "token_ppo")[2] for name in ("turn_ppo", "weight_one")) > 0, (
        "it is the weight"
    )
    page = " ".join(PAGE.split())
    told = f"keeps training going ({final['turn_ppo']} against {final['token_ppo']}), and so does no such weight at all ({final['weight_one']})."
    assert told in page and f"imitating successes only does best ({final['successes_only']})" in page


def apart(runs, one: str, other: str, column: str = "final") -> tuple[int, float, float, float]:
    """Worlds of both, mean difference in a column (final sampled success), and its 95 % interval over worlds."""
    both = runs[one].join(runs[other][column], rsuffix="_other", how="inner")
    values = (both[column] - both[f"{column}_other"]).to_numpy()
    return len(values), float(values.mean()), *over_worlds(values)


def over_worlds(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Of a mean over worlds: a bootstrap, stretched by sqrt(n / (n - 1)) and Student's over the normal quantile."""
    n, mean = len(values), float(values.mean())
    drawn = np.random.default_rng(0).choice(values, (20000, n)).mean(axis=1)
    q = (1 + level) / 2
    low, high = np.quantile(drawn, [1 - q, q])
    factor = math.sqrt(n / (n - 1)) * stats.t.ppf(q, n - 1) / stats.norm.ppf(q)
    return mean - factor * (mean - low), mean + factor * (high - mean)


@TEXTS
def test_what_the_divisor_adds_to_turn_ratios(runs, text):
    n, mean, low, high = apart(runs, "st_ppo", "turn_ppo")
    assert low < 0 < high and abs(mean) < 0.01, "else the sentence is another one"
    if not is_page(text):
        assert f"ST-PPO is {signed(mean)} above Turn-PPO [{signed(low)}, {signed(high)}]" in text
        rows = pd.read_parquet(
            STUDY / "metrics/iterations.parquet", columns=["regime", "algorithm", "stabilizer_divisor"]
        )
        rows = rows.query("regime == 'OFF_POLICY' and algorithm == 'st_ppo'")
        assert rows["stabilizer_divisor"].min() > 1 and "ST-PPO's divisor exceeded 1 throughout" in text
    else:
        told = f"ended alike in {n} worlds (difference {signed(mean)}, 95 % interval {signed(low)} to {signed(high)})"
        assert f"ST-PPO and Turn-PPO {told}" in text
        early = [apart(runs, "st_ppo", "turn_ppo", f"after_{n}") for n in (10, 20, 40)]
        told = "after 10, 20 and 40 iterations {}, {} and {} ahead, the first alone clear of 0"
        assert told.format(*(said(mean) for _, mean, *_ in early)) in text
        assert [low > 0 for *_, low, _ in early] == [True, False, False]


def test_topr_does_better_than_the_papers(runs):
    topr, text = runs["topr"], " ".join(PAGE.split())
    assert (
        f"{said(topr['sampled'].mean())}, without a crash in {counts(topr, 'learned')} of {len(topr)} worlds"
        in text
    )
    n, mean, low, high = apart(runs, "topr", "st_ppo")
    assert n == len(topr) and low > 0
    greedy = apart(runs, "topr", "st_ppo", "greedy_final")[1]
    assert f"{said(mean)} above ST-PPO [{said(low)}, {said(high)}], greedy {said(greedy)}" in text
    assert f"it ended at {said(topr['sampled'].mean())} in twelve other worlds" in LEADERS and n == 12


def test_without_a_critic_and_kl_stop(runs):
    text = " ".join(PAGE.split())
    end = {name: said(part["sampled"].mean()) for name, part in runs.items()}
    one_ratio = "GSPO, with a ratio a trajectory and a much narrower clip, at"
    assert f"GRPO ended at {end['grpo']}, SO-GRPO at {end['so_grpo']}, {one_ratio} {end['gspo']}" in text
    stop = runs["kl_stop"]
    share = round(100 * stop["updates"].mean() / runs["token_ppo"]["updates"].mean())
    assert f"(KL stop) ended at {end['kl_stop']}, with {share} % of the updates" in text
    crashed = counts(stop, "crashed and recovered", "collapsed")
    assert f"crashed in {crashed} of {len(stop)} worlds" in text
    if is_page(text):
        mild = pd.read_csv(STUDY.parent / "mild/metrics/summary.csv").groupby("algorithm")["final"].mean()
        numbers = [said(mild[name]) for name in ("kl_stop", "st_ppo", "token_ppo")]
        assert "it ends near ST-PPO, {} and {} (token PPO: {})".format(*numbers) in text


def test_who_clips_more(runs):
    text = " ".join(PAGE.split())
    st, token = (said(runs[name]["clip_fraction_mean"].mean()) for name in ("st_ppo", "token_ppo"))
    assert f"ST-PPO clips more tokens than token PPO ({st} against {token})" in text and st > token
    fewer = -apart(runs, "st_ppo", "turn_ppo", "clip_fraction_mean")[1]
    low, high = ends_of_claim("C3.st_ppo.like_with_like")
    assert f"is inconclusive ({said(fewer)} fewer, joint interval {low} to {high})" in text


def test_largest_gradients(runs):
    largest = {name: runs[name]["gradient_norm_max"].median() for name in ("token_ppo", "st_ppo")}
    told = f"is {largest['token_ppo']:.0f} (median over worlds), ST-PPO's {largest['st_ppo']:.1f}"
    assert told in " ".join(PAGE.split())
    rows = pd.read_parquet(STUDY / "metrics/iterations.parquet").query(
        "algorithm == 'token_ppo' and regime == 'OFF_POLICY'"
    )
    crash = runs["token_ppo"]["crash_iteration"].dropna()
    at = rows.loc[rows.groupby("seed")["gradient_norm_max"].idxmax()].set_index("seed")["iteration"]
    late = (at.loc[crash.index] >= crash).sum()
    assert f"in {late} of its {len(crash)} crashed runs it comes at the crash or after it" in " ".join(
        PAGE.split()
    )


def test_the_critics_error_off_policy_is_that_of_three_dying_runs(runs):
    columns = ["regime", "algorithm", "seed", "critic_value_rmse", "true_value_std"]
    rows = pd.read_parquet(STUDY / "metrics/iterations.parquet", columns=columns).query(
        "algorithm == 'token_ppo' and regime in ('OFF_POLICY', 'ON_POLICY')"
    )
    rows = rows.assign(error=rows["critic_value_rmse"] / rows["true_value_std"])
    errors = rows.pivot_table(index="seed", columns="regime", values="error")
    more = errors["OFF_POLICY"] - errors["ON_POLICY"]
    three = more.nlargest(3).index
    assert more[three].min() > 0.5 > 0.2 > more.drop(three).max()
    ends = runs["token_ppo"]["sampled"]
    assert said(ends[three].max()) == ".03"
    widest = rows[(rows["regime"] == "OFF_POLICY") & rows["seed"].isin(three)].groupby("seed")["error"]
    worst = rows.loc[widest.idxmax()]
    assert (worst["error"] > 4).all() and (worst["true_value_std"] < 0.02).all()
    for table in (rows[rows["regime"] == "OFF_POLICY"].drop(worst.index), rows):
        errors = table[table["regime"] == "OFF_POLICY"].groupby("seed")["error"].mean()
        assert (errors.max() < 1.2) == (table is not rows), "one iteration each makes it"
    told = f"is {said(more.mean())} larger there on average, {said(more.median())} in the median world. Three runs"
    page = " ".join(PAGE.split())
    assert told in page and f"without the three it is {said(more.drop(three).mean())}." in page
    row = pd.read_csv(STUDY / "claims/claims.csv").set_index("id").loc["C7"]
    assert row["verdict"] == "inconclusive"
    assert (row["estimate"], row["median"]) == pytest.approx((more.mean(), more.median()), abs=1e-4)


def alarms_of(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "figures/early_warning_alarms.csv").set_index("signal")


def test_what_announces_a_crash():
    table = alarms_of(STUDY)
    best, each = table.loc["best"], table.drop("best")
    assert best["chosen"] == "largest gradient norm" and best["lead"] == 1
    told = (
        f"before {best['announced']} of the {best['crashes']} crashes of all arms, at the median one iteration ahead; in the same "
        f"iterations of runs that did not crash then, which is chance, it rings for {best['by_chance']:.1f}. Of the eleven other"
    )
    bias = each.loc["clipping_bias_norm_max"]
    clear = f"clear of chance with all judged at once ({bias['announced']} against {bias['by_chance']:.1f})"
    assert told in " ".join(PAGE.split()) and clear in " ".join(PAGE.split()) and len(each) == 12
    assert set(each.index[each["low"] > 0]) == {"gradient_norm_max", "clipping_bias_norm_max"}
    title = (STUDY / "figures/early_warning.txt").read_text(encoding="utf-8").splitlines()[0]
    assert "2 of 12 signals beat chance" in title


def test_the_milder_setting_did_not_hold_for_token_ppo():
    mild = pd.read_csv(STUDY.parent / "mild/metrics/summary.csv").query("algorithm == 'token_ppo'")["final"]
    told = "its three runs at {}, {} and {}.".format(*map(said, sorted(mild, reverse=True)))
    assert told in " ".join((STUDY.parent / "mild/README.md").read_text(encoding="utf-8").split())


def test_the_milder_settings_table():
    page = (STUDY.parent / "mild/README.md").read_text(encoding="utf-8")
    runs = pd.read_csv(STUDY.parent / "mild/metrics/summary.csv")
    rows = pd.read_parquet(STUDY.parent / "mild/metrics/evaluations.parquet").query("temperature == 1")
    entropy = rows.pivot_table(index="iteration", columns="algorithm", values="entropy_of_sampled")
    means = runs.groupby("algorithm")[["final", "greedy_final"]].mean()
    means["entropy"] = entropy.loc[10]
    start = [said(runs["start"].mean()), said(runs["greedy_start"].mean()), said(entropy.loc[0].mean())]
    shown = re.findall(r"^\| ([^|]+) \| (\.\d\d) \| (\.\d\d) \| (\.\d\d) \|$", page, re.M)
    assert shown[0] == ("before training", *start) and len(shown) == 1 + len(means) == 12
    ordered = means.sort_values("final", ascending=False)
    assert [tuple(cells) for _, *cells in shown[1:]] == [tuple(map(said, row)) for row in ordered.to_numpy()]
    rose = set(means.index[means["entropy"] > entropy.loc[0].mean()])
    assert rose == {"token_ppo", "grad_clip", "grpo"}
    first = "ST-PPO, Turn-PPO and a plain KL stop end at {}, {} and {} of unseen questions answered. Token PPO ends at {}, its three runs at"
    named = means["final"][["st_ppo", "turn_ppo", "kl_stop", "token_ppo"]]
    assert first.format(*map(said, named)) in " ".join(page.split())
    wide = runs.pivot(index="seed", columns="algorithm", values="final")
    told = f"a milder one](../mild/README.md) it ended at {said(means['final']['s_ppo'])} and token PPO at {said(means['final']['token_ppo'])}, a gap"
    gaps = sorted(wide["s_ppo"] - wide["token_ppo"])
    assert told in " ".join(PAGE.split()) and gaps[1] < 0.1 < 0.5 < gaps[2], "that one world of three makes"
    assert (wide["kl_stop"] > wide["st_ppo"]).sum() == 1 and "above it in one world of three" in page


def test_what_goes_along_with_the_end_at_the_milder_setting():
    page = " ".join((STUDY.parent / "mild/README.md").read_text(encoding="utf-8").split())
    mild, study = (
        pd.read_csv(folder / "figures/beginnings_correlations.csv").set_index("signal")
        for folder in (STUDY.parent / "mild", STUDY)
    )
    assert (
        f"(rank correlation {signed(mild.loc['entropy', 'correlation'])} over the methods of a world;" in page
    )
    bias, its = mild.loc["clipping_bias_norm"], study.loc["clipping_bias_norm"]
    told = [signed(bias[name]) for name in ("correlation", "low", "high")]
    assert "does not go along with the end here ({}; {} to {} in the three worlds)".format(*told) in page
    assert f"with more methods and sixteen worlds, it does: {signed(its['correlation'])}." in page
    assert its["worlds"] == 16 and bias["worlds"] == 3 and its["runs"] / 16 > bias["runs"] / 3


def test_picture_is_named_by_what_it_found():
    title = (STUDY / "figures/learning.txt").read_text(encoding="utf-8").splitlines()[0]
    assert f"![{title}](results/reference/study/figures/learning.png)" in README


def test_readme_is_one_screen():
    assert len(README.split()) < 700


def links(text: str) -> list[str]:
    return sorted(set(re.findall(r"\]\(([^)#:]+)\)", text)))


@pytest.mark.parametrize("place", links(README))
def test_every_link_of_the_readme_leads_somewhere(place):
    assert (ROOT / place).exists()


@pytest.mark.parametrize("place", links(PAGE))
def test_every_link_of_the_page_leads_somewhere(place):
    assert (STUDY / place).exists()


# ---- the language model's page ---------------------------------------------------------------------
SMOLLM = ROOT / "results/reference/smollm"


def test_table_of_the_language_model():
    page = (SMOLLM / "README.md").read_text(encoding="utf-8")
    rows = pd.read_parquet(SMOLLM / "metrics/evaluations.parquet")
    shown = re.findall(r"^\| [^|]+ \(`(\w+)`\) \| (\w+) \|" + r" ([.\d]+) \|" * 4, page, re.M)
    assert {(name, decoding) for name, decoding, *_ in shown} == {
        (name, decoding) for name in set(rows["algorithm"]) for decoding in ("greedy", "sampled")
    }
    for name, decoding, *cells in shown:
        curve = rows[(rows["algorithm"] == name) & (rows["temperature"] == float(decoding == "sampled"))]
        curve = curve.set_index("iteration")
        assert set(curve["n_questions"]) == {300}
        assert cells == [
            *(said(curve.loc[i, "success"]) for i in (0, 10, 20)),
            said(curve.loc[20, "valid_format_rate"]),
        ]


def test_who_ends_higher_with_a_language_model():
    page = " ".join((SMOLLM / "README.md").read_text(encoding="utf-8").split())
    rows = pd.read_parquet(SMOLLM / "metrics/evaluations.parquet").set_index(
        ["algorithm", "temperature", "iteration"]
    )
    st, token = rows.loc[("st_ppo", 0, 20), "success"], rows.loc[("token_ppo", 0, 20), "success"]
    start = rows.loc[("token_ppo", 0, 0), "success"]
    assert f"ended below token PPO here**: {said(st)} against {said(token)} greedy" in page and st < token
    error = np.sqrt(start * (1 - start) / 300 + token * (1 - token) / 300)
    assert f"fall from {said(start)} is within two standard errors" in page and 0 < start - token < 2 * error
    assert rows.loc[("token_ppo", 1, 20), "success"] > rows.loc[("token_ppo", 1, 0), "success"]
    assert "at less than half of its start" in page and st < start / 2


def test_the_run_that_named_the_rate():
    page = " ".join((SMOLLM / "README.md").read_text(encoding="utf-8").split())
    rows = pd.read_parquet(SMOLLM / "tuning/evaluations.parquet")
    greedy = rows[rows["temperature"] == 0].sort_values("iteration")["success"]
    assert f"whose greedy success went {', '.join(map(said, greedy))} over" in page


def test_table_of_the_searched_rates():
    page = (SMOLLM / "README.md").read_text(encoding="utf-8")
    rows = pd.read_parquet(ROOT / "results/reference/smollm_comparison/tuning/evaluations.parquet")
    assert set(rows["n_questions"]) == {300} and set(rows["seed"]) == {100}
    shown = re.findall(r"^\| (\de-\d) \| (\w+) \|" + r" ([.\d]+) \|" * 4, page, re.M)
    assert len(shown) == 4
    ends = pd.read_csv(ROOT / "results/reference/smollm_comparison/tuning/summary.csv").set_index("regime")
    rises = [
        said(ends.loc[f"TUNING_{rate}", "peak"] - ends.loc[f"TUNING_{rate}", "start"])
        for rate in ("5e-5", "1e-4")
    ]
    assert not ends["learned"].any()
    assert "neither run counts as *learned*: it is {} and {}.".format(*rises) in " ".join(page.split())
    for rate, decoding, *cells in shown:
        regime, temperature = f"TUNING_{rate}", float(decoding == "sampled")
        curve = rows[(rows["regime"] == regime) & (rows["temperature"] == temperature)].set_index("iteration")
        assert cells == [
            *(said(curve.loc[i, "success"]) for i in (0, 10, 20)),
            said(curve.loc[20, "valid_format_rate"]),
        ]
        if rate == "5e-5":
            gained = said(curve.loc[20, "success"] - curve.loc[0, "success"])
            word = "greedy success rises" if decoding == "greedy" else "sampled success"
            assert f"{word} by {gained}" in " ".join(page.split())


def test_table_of_the_comparison():
    page = (SMOLLM / "README.md").read_text(encoding="utf-8")
    metrics = ROOT / "results/reference/smollm_comparison/metrics"
    runs = pd.read_csv(metrics / "summary.csv")
    rows = pd.read_parquet(metrics / "evaluations.parquet").set_index(
        ["algorithm", "seed", "temperature", "iteration"]
    )
    preset = yaml.safe_load((ROOT / "configs/preset/smollm_comparison.yaml").read_text(encoding="utf-8"))
    arms, seeds = preset["pipeline"]["regimes"]["COMPARISON"].values()
    assert len(runs) == len(arms) * len(seeds) and f"All {len(runs)} runs are recorded" in page
    shown = re.findall(r"^\| [^|]+ \(`(\w+)`\) " + r"\| ([^|]+) " * 4 + r"\|$", _comparison(page), re.M)
    assert [name for name, *_ in shown] == arms

    def of_seeds(name, temperature, iteration, column):
        return ", ".join(said(rows.loc[(name, seed, temperature, iteration), column]) for seed in seeds)

    for name, *cells in shown:
        told = [(0, 20, "success"), (0, 40, "success"), (1, 40, "success"), (0, 40, "valid_format_rate")]
        assert cells == [of_seeds(name, *key) for key in told], name
    starts = [of_seeds("token_ppo", temperature, 0, "success") for temperature in (0, 1)]
    assert "At the start it is {} greedy and {} sampled.".format(*starts) in page
    for _, start in rows.xs(0, level="iteration").groupby(["seed", "temperature"]):
        assert start["success"].nunique() == 1, "all algorithms of a seed begin alike"


def _comparison(page):
    """The page's section of the comparison."""
    return re.search(r"^## The comparison.*?(?=^## )", page, re.M | re.S)[0]


def _listed(values):
    *first, last = map(said, values)
    return f"{', '.join(first)} and {last}"


def test_what_the_comparison_shows():
    page = " ".join((SMOLLM / "README.md").read_text(encoding="utf-8").split())
    folder = ROOT / "results/reference/smollm_comparison"
    rows = pd.read_parquet(folder / "metrics/evaluations.parquet")
    ends = rows.pivot(index=["algorithm", "seed"], columns=["temperature", "iteration"], values="success")
    greedy, sampled = ends[0.0], ends[1.0]
    pair = greedy.index.get_level_values("algorithm").isin(["token_ppo", "turn_ppo"])
    assert pair.sum() == 6 and (greedy[40] < greedy[0])[pair].all(), "greedy success falls in all six runs"
    gained = sampled[40] - sampled[0]
    assert f"sampled success ends at most {said(gained[pair].max())} above its start" in page
    stopped = greedy.loc["kl_stop"]
    over = {name: stopped[40] - greedy.loc[name, 40] for name in ("token_ppo", "turn_ppo")}
    told = "Greedy, it ends {} above token PPO, and {} above Turn-PPO, which is not decided"
    assert told.format(*map(_listed, over.values())) in page
    assert (over["token_ppo"] > 0.15).sum() == 3 and (over["turn_ppo"] > 0.15).sum() < 3
    told = "by the protocol this alone is decided**: in every seed it ends .15 or more above token PPO, S-PPO, ST-PPO and GRPO,"
    last = greedy[40].unstack("seed")
    clear = {
        (a, b) for a in last.index for b in last.index if (last.loc[a] - last.loc[b]).min() > 0.15 - 1e-6
    }
    assert clear == {("kl_stop", b) for b in ("token_ppo", "s_ppo", "st_ppo", "grpo")} and told in page
    pairs = [("turn_ppo", "token_ppo"), ("st_ppo", "s_ppo"), ("so_grpo", "grpo")]
    ahead = pd.concat([last.loc[a] - last.loc[b] for a, b in pairs])
    higher = ahead[ahead > 0.005]
    told = "ends higher in {} of {} pairs, by {} to {}, and level in one."
    assert told.format(len(higher), len(ahead), said(higher.min()), said(higher.max())) in page
    assert (ahead.abs() < 0.005).sum() == 1
    assert f"Sampled success rises by {_listed(gained['kl_stop'])};" in page
    moved = stopped[40] - stopped[0]
    a, b, c = (said(abs(x)) for x in moved)
    assert f"ends {a} below its start, {b} above and {c} below" in page and (moved > 0).tolist() == [
        False,
        True,
        False,
    ]
    assert moved.abs().max() < 2 * math.sqrt(2 * 0.37 * 0.63 / 300), "each within two standard errors"
    runs = pd.read_json(folder / "metrics/runs.json")
    updates = [*map(str, runs[runs["algorithm"] == "kl_stop"]["updates"])]
    whole = runs[runs["algorithm"] == "token_ppo"]["updates"].unique()
    assert f"makes {', '.join(updates[:-1])} and {updates[-1]} of {whole.item()}" in page
    token, turn = greedy.loc["token_ppo"], greedy.loc["turn_ppo"]
    lost = 100 * (1 - turn[40] / turn[0])
    fell = 100 * (1 - greedy.loc["st_ppo"][40] / greedy.loc["st_ppo"][0])
    told = "Turn-PPO lost {:.0f} to {:.0f} % of its greedy success and the paper's ST-PPO {:.0f} to {:.0f} %, and both kept"
    assert told.format(lost.min(), lost.max(), fell.min(), fell.max()) in page
    last = greedy.loc[(["token_ppo", "turn_ppo", "st_ppo"], 2), 40]
    assert last.max() - last.min() < 0.015, "the other seed, where all three end alike"
    assert (token[40] == 0).sum() == 2 and "token PPO lost every right greedy answer in two of three" in page
    above = turn[40] - token[40]
    assert "ends {}, {} and {} above token PPO, greedy".format(*map(said, above)) in page
    assert (above > 0.15).sum() == 2 and above.min() >= 0, "not decided, and no seed shows the reverse"
    valid = rows.query("seed == 2 and temperature == 0 and iteration == 40").set_index("algorithm")
    told = "({} of turns valid, greedy, against {})"
    assert told.format(*(said(valid["valid_format_rate"][n]) for n in ("token_ppo", "turn_ppo"))) in page
    title = (folder / "figures/each_seed.txt").read_text(encoding="utf-8").splitlines()[0]
    assert f"![{title}](../smollm_comparison/figures/each_seed.png)" in page
    ends = "{}, Turn-PPO to {}, token PPO with KL stop to {}, ST-PPO to {}"
    st = _listed(greedy.loc["st_ppo"][40])
    ends = (ends.format(*map(_listed, (token[40], turn[40], stopped[40])), st), said(greedy[0].mean()))
    assert "greedy, from {1} token PPO took SmolLM2 to {0}".format(*ends) in " ".join(README.split())


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        ("token_ppo", r"In seed 1 none of its trajectories holds one from iteration (\d+) on"),
        ("s_ppo", r"from iteration (\d+) on none of its trajectories holds a valid turn"),
    ],
)
def test_when_a_run_of_the_comparison_broke_for_good(algorithm, told):
    page = " ".join((SMOLLM / "README.md").read_text(encoding="utf-8").split())
    rows = pd.read_parquet(ROOT / "results/reference/smollm_comparison/metrics/iterations.parquet")
    run = rows[(rows["algorithm"] == algorithm) & (rows["seed"] == 1)].set_index("iteration")
    lost = run["valid_format_rate"] == 0
    first = int(re.search(told, page)[1])
    assert lost[first:].all() and not lost[: first - 1].any()


def test_what_the_divisor_did_in_the_comparison():
    page = " ".join((SMOLLM / "README.md").read_text(encoding="utf-8").split())
    metrics = ROOT / "results/reference/smollm_comparison/metrics"
    iterations, runs = pd.read_parquet(metrics / "iterations.parquet"), pd.read_csv(metrics / "summary.csv")
    divisor = iterations.groupby("algorithm")["stabilizer_divisor"]
    medians = [f"{divisor.median()[name]:.0f}" for name in ("s_ppo", "st_ppo")]
    assert (divisor.min()[["s_ppo", "st_ppo"]] > 1).all(), "above 1 in every iteration"
    assert "{} and {} in the median".format(*medians) in page
    ends = runs.set_index(["algorithm", "seed"])["greedy_final"]
    for told, divided, plain in (
        ("ends at {}, greedy, token PPO at {};", "s_ppo", "token_ppo"),
        ("with it, ends at {}, Turn-PPO at {}.", "st_ppo", "turn_ppo"),
    ):
        beside = ends[plain][ends[divided].index]
        assert told.format(_listed(ends[divided]), _listed(beside)) in page
        assert (ends[divided] - beside).mean() < 0 and (ends[divided] - beside).min() < 0.15, (
            "no help is seen"
        )


def test_when_grpo_of_the_comparison_has_no_gradient_left():
    page = " ".join((SMOLLM / "README.md").read_text(encoding="utf-8").split())
    metrics = ROOT / "results/reference/smollm_comparison/metrics"
    rows = pd.read_parquet(metrics / "iterations.parquet").query("algorithm == 'grpo'")
    told = re.search(r"All its own trajectories fail from iteration (\d+) and (\d+) on", page).groups()
    for seed, first in zip((1, 3), map(int, told), strict=True):
        run = rows[rows["seed"] == seed].set_index("iteration")
        assert (run["success_train"][first:] == 0).all() and run["success_train"][first - 1] > 0
        assert (run["gradient_norm_max"][first:] == 0).all()
    ends = pd.read_parquet(metrics / "evaluations.parquet").query("iteration == 40 and temperature == 0")
    ends = ends.set_index(["algorithm", "seed"])
    valid, success = ends["valid_format_rate"]["grpo"], ends["success"]
    assert (success["grpo"][[1, 3]] == 0).all() and (ends["n_questions"] == 300).all()
    assert f"with {said(valid[1])} and {said(valid[3])} of its turns valid, greedy" in page
    there = said(success["grpo", 2])
    assert there == said(success["token_ppo", 2])
    assert f"In seed 2 it ends at {there}, as token PPO does there" in page
    runs = pd.read_csv(metrics / "summary.csv").set_index("algorithm").loc["so_grpo"]
    ahead = runs["greedy_final"].to_numpy() - success["grpo"].to_numpy()
    assert (
        f"ends at {_listed(runs['greedy_final'])}, below its start and above GRPO, by {_listed(ahead)}."
        in page
    )
    assert (runs["greedy_final"] < runs["greedy_start"]).all()


def test_what_the_language_model_writes():
    page = " ".join((SMOLLM / "README.md").read_text(encoding="utf-8").split())
    file = ROOT / "results/reference/smollm_comparison/notebook_26/turn_ppo_seed1.json"
    numbers = json.loads(file.read_text(encoding="utf-8"))
    for when in ("before", "after"):
        assert f"**{when.capitalize()}, {numbers[f'right {when}, of 10']} of 10 right**" in page
    rows = pd.DataFrame(numbers["one hop"] + numbers["more hops"])
    rows = rows.pivot(index="benchmark", columns="agent", values=["em", "n_questions"])
    for begin, kind in [
        ("an answer that training never had it answers", "a new answer"),
        ("those with a known one", "an answer of a training question"),
        ("2WikiMultihopQA", "2wikimultihopqa, 2 hops"),
        ("MuSiQue", "musique, 2 hops"),
    ]:
        after, before, asked = re.search(begin + r" ([.\d]+) \(([.\d]+)(?: before)?; (\d+)\b", page).groups()
        row = rows.loc[kind]
        assert (after, before) == (said(row["em", "after"]), said(row["em", "before"]))
        assert int(asked) == row["n_questions", "after"] == row["n_questions", "before"]
    out = [f"{100 * numbers[f'{what} out of range']:.0f} %" for what in ("tokens", "turns")]
    assert "for {} of the tokens of eight sampled trajectories, a turn's for {} of".format(*out) in page


def test_what_more_runs_of_the_language_model_write():
    page = (SMOLLM / "README.md").read_text(encoding="utf-8")
    folder = ROOT / "results/reference/smollm_comparison/notebook_26"
    divided = 0
    for file in folder.glob("*.json"):
        numbers = json.loads(file.read_text(encoding="utf-8"))
        rows = pd.DataFrame(numbers["one hop"]).set_index(["benchmark", "agent"])
        kinds = ("a new answer", "an answer of a training question")
        ems = [
            ", ".join(said(rows.loc[(kind, when), "em"]) for when in ("before", "after")) for kind in kinds
        ]
        right = ", ".join(str(numbers[f"right {when}, of 10"]) for when in ("before", "after"))
        out = ", ".join(f"{100 * numbers[f'{what} out of range']:.0f}" for what in ("tokens", "turns"))
        algorithm, seed = file.stem.rsplit("_seed", 1)
        label = {
            "turn_ppo": "Turn-PPO",
            "token_ppo": "token PPO",
            "kl_stop": "token PPO, KL stop",
            "st_ppo": "ST-PPO",
            "grpo": "GRPO",
            "so_grpo": "SO-GRPO",
            "s_ppo": "S-PPO",
        }[algorithm]
        assert f"| {label}, seed {seed} | {right} | {ems[0]} | {ems[1]} | {out} % |" in page
        if "one hop, by length" in numbers and rows.xs("after", level="agent")["em"].any():
            of_length = pd.DataFrame(numbers["one hop, by length"])
            of_length["right"] = of_length["em"] * of_length["n_questions"]
            of_length["short"] = of_length["benchmark"].str.endswith("one word")
            of_length = of_length.groupby(["short", "agent"])[["right", "n_questions"]].sum()
            of_length = of_length["right"] / of_length["n_questions"]
            fall = of_length.xs("before", level="agent") - of_length.xs("after", level="agent")
            assert fall[True] > fall[False], "one-word answers fall further"
            divided += 1
            if (algorithm, seed) == ("kl_stop", "2"):
                ends = [
                    said(of_length[(short, when)]) for short in (True, False) for when in ("before", "after")
                ]
                told = "they alone ({} to {} of 36; longer ones {} to {} of 96)"
                assert told.format(*ends) in " ".join(page.split()) and fall[False] < 0
            before = [row for row in numbers["one hop, by length"] if row["agent"] == "before"]
            short = {
                row["benchmark"].split(",")[0]: row["n_questions"]
                for row in before
                if "one" in row["benchmark"]
            }
            told = f"({short[kinds[1]]} of the 14, and {short[kinds[0]]} of the 118 others)"
            assert told in " ".join(page.split())
        if (algorithm, seed) == ("token_ppo", "2"):
            rightly = rows["em"] * rows["n_questions"]
            before, after = (rightly.xs(when, level="agent").sum() / 132 for when in ("before", "after"))
            told = f"but {said(after)} of these 132 ({said(before)} before), and of the 118 with an answer new to it"
            told = f"{told} {rightly[('a new answer', 'after')]:.0f}; ST-PPO's of the same seed has"
            assert told in " ".join(page.split())
        if (algorithm, seed) == ("st_ppo", "2"):
            metrics = ROOT / "results/reference/smollm_comparison/metrics/summary.csv"
            ends = pd.read_csv(metrics).set_index(["algorithm", "seed"])["greedy_final"]
            right = (rows["em"] * rows["n_questions"]).xs("after", level="agent").sum() / 132
            told = f"ST-PPO's of the same seed has {said(ends['st_ppo', 2])} and {said(right)}."
            assert told in " ".join(page.split())
    assert f"in all {divided} runs divided by it answers of one word fall further" in " ".join(page.split())


def test_memory_of_the_language_models_runs_is_told_with_its_aim():
    page = (ROOT / "docs/howto/pretrained-models.md").read_text(encoding="utf-8")

    def peaks(*folders):
        records = [
            r for f in folders for r in json.loads((ROOT / "results/reference" / f / "runs.json").read_text())
        ]
        return sorted(record["peak_memory_mb"] / 1024 for record in records)

    first, second = peaks("smollm_comparison/tuning")
    assert f"| {first:.1f} and {second:.1f} | not met |" in page
    least, *_, most = peaks("smollm/metrics", "smollm/tuning")
    assert f"| {least:.1f} to {most:.1f} | not met |" in page
    assert min(first, least) > 4e9 / 2**30, "no recorded run meets the aim"
    for seconds, verdict in re.findall(r"\| (\d+|slower) \| ((?:not )?met)[^|]*\|$", page, re.M):
        assert verdict == ("met" if seconds.isdigit() and int(seconds) <= 90 else "not met")


# ---- the benchmark's page -------------------------------------------------------------------------
SEARCH = ROOT / "results/reference/search"


def test_what_the_critical_setting_depends_on():
    page = (SEARCH / "README.md").read_text(encoding="utf-8")
    runs = pd.read_csv(SEARCH / "dependence/metrics/summary.csv")
    rows = re.findall(r"^\| [^|]+ \(`([A-Z_0-9]+)`\) \| (.+) \|$", page, re.M)
    assert sorted(name for name, _ in rows) == sorted(runs["regime"].unique())
    for name, cells in rows:
        part = runs[runs["regime"] == name]
        shows = int((part["learned"] & part["crash_iteration"].notna()).sum())
        means = [said(part[column].mean()) for column in ("start", "peak", "final")]
        lost = counts(part, "lost its start")
        assert cells.split(" | ") == [*means, f"{shows} of {len(part)}", str(lost)], name
    highest = runs.groupby("regime")["final"].mean().max()
    assert f"ends at {said(highest)} or less whichever of these is changed" in page
    before = pd.read_csv(SEARCH / "metrics/summary.csv").query("regime == 'E4_L2_1e-3_160'")["peak"].mean()
    now = runs[runs["regime"] == "AS_CHOSEN"]["peak"].mean()
    assert f"reached {said(before)} in the search, on another processor, and {said(now)} here" in " ".join(
        page.split()
    )
    rows = pd.read_parquet(SEARCH / "dependence/metrics/evaluations.parquet").set_index(
        ["seed", "temperature", "iteration"]
    )
    long, short = (rows[rows["regime"] == name]["success"] for name in ("LONG", "AS_CHOSEN"))
    assert (long[short.index] == short).all(), "number for number"


BENCH = ROOT / "results/reference/benchmark"
LEADERS = " ".join((BENCH / "README.md").read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def benchmark() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Final success, a row a point (or fresh world) and a column a method: at the points, and confirmed."""
    table = pd.read_csv(BENCH / "metrics/summary.csv")
    points, fresh = (table[table["regime"] == name] for name in ("BENCHMARK", "CONFIRMATION"))
    wide = [part.pivot(index="seed", columns="algorithm", values="final") for part in (points, fresh)]
    assert not wide[0].isna().any(axis=None) and not wide[1].isna().any(axis=None)
    assert list(wide[0].index) == list(range(40)) and set(wide[0]) == set(wide[1])
    return wide[0], wide[1]


def interval(values: np.ndarray, worlds: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """`over_worlds` of values of which each world has as many."""
    means = pd.Series(values).groupby(worlds)
    assert means.size().nunique() == 1
    return over_worlds(means.mean().to_numpy(), level)


def test_one_try_five_tries_and_the_strongest_settings(benchmark):
    finals, fresh = benchmark
    one = finals.mean().map(said)
    five = finals.apply(lambda r: (np.sort(r) * np.diff((np.arange(41) / 40) ** 5)).sum()).map(said)
    points = pd.read_csv(BENCH / "points.csv").set_index("point")
    order = (points["learning_rate"] * points["epochs"]).sort_values().index
    strong = finals.loc[order[20:]].mean().map(said)
    assert f"{finals.shape[1]} methods at the same forty" in LEADERS
    readme = " ".join(README.split())
    assert f"at a random one {one.token_ppo} and {one.st_ppo} ([{finals.shape[1]} methods]" in readme
    first = f"imitating successes only ends at {one.successes_only}, TOPR, which lets unlikely failures count little, at {one.topr}, ST-PPO and Turn-PPO at {one.st_ppo} and token PPO at {one.token_ppo}."
    assert first in LEADERS and one.st_ppo == one.turn_ppo
    assert (
        f"ends at {five.token_ppo} with token PPO, and at {five.st_ppo} with ST-PPO and Turn-PPO.**"
        in LEADERS
    )
    assert five.st_ppo == five.turn_ppo
    assert f"{finals.size + fresh.size:,} runs with the confirmation" in LEADERS
    assert (
        f"reaches {five.token_ppo} with token PPO, {five.st_ppo} with ST-PPO, {five.turn_ppo} with Turn-PPO "
        f"and {five.kl_stop} with the plain KL stop" in LEADERS
    )
    assert (
        f"ends at {one.token_ppo} with token PPO, {one.grpo} with GRPO, {one.st_ppo} with ST-PPO, {one.turn_ppo} with "
        f"Turn-PPO, {one.gspo} with GSPO and {one.kl_stop} with the KL stop" in LEADERS
    )
    assert strong.st_ppo == strong.turn_ppo
    assert (
        f"token PPO is down to {strong.token_ppo}, ST-PPO and Turn-PPO at {strong.st_ppo}, the KL stop at {strong.kl_stop}"
        in LEADERS
    )
    assert f"{one.topr} with one try, {five.topr} with five, {strong.topr} at the 20 strongest" in LEADERS
    told = (
        f"Successes alone ({five.successes_only}) and TOPR ({five.topr}) stand out; VESPO's {five.vespo} is "
    )
    assert told in LEADERS
    told = f"{one.successes_only} with one try, {five.successes_only} with five, {strong.successes_only} at the 20 strongest"
    assert told in LEADERS
    greedy = pd.read_csv(BENCH / "metrics/summary.csv").query("regime == 'BENCHMARK'")
    greedy = greedy.groupby("algorithm")["greedy_final"].mean().map(said)
    assert (
        f"(greedy with one try: {greedy.topr}, ST-PPO {greedy.st_ppo}, token PPO {greedy.token_ppo})"
        in LEADERS
    )
    best = fresh.mean().map(said)
    assert (
        f"Each at its best setting, in fresh worlds, it ends at {best.topr}, token PPO at {best.token_ppo}"
        in LEADERS
    )
    assert list(finals.mean().nlargest(3).index) == ["successes_only", "topr", "st_ppo"]
    worst = finals.mean().nsmallest(5).index
    assert set(worst) == {"reinforce", "rloo", "cispo", "sapo", "tis"}
    told = f"REINFORCE {one.reinforce}, RLOO {one.rloo}, CISPO {one.cispo}, SAPO {one.sapo} and truncated IS {one.tis}"
    assert told in LEADERS


def test_vespo_with_five_tries(benchmark):
    finals = benchmark[0]
    weights = np.diff((np.arange(41) / 40) ** 5)

    def above(other: str, rows: np.ndarray) -> float:
        best = [weights @ np.sort(finals[name].to_numpy()[rows]) for name in ("vespo", other)]
        return best[0] - best[1]

    points = pd.read_csv(BENCH / "metrics/summary.csv").query(
        "regime == 'BENCHMARK' and algorithm == 'vespo'"
    )
    world = points.set_index("seed")["world_seed"].loc[finals.index].to_numpy()
    of_world = [np.flatnonzero(world == w) for w in np.unique(world)]
    assert [len(rows) for rows in of_world] == [2] * 20
    generator = np.random.default_rng(0)
    drawn = [np.concatenate([of_world[w] for w in generator.integers(20, size=20)]) for _ in range(4000)]
    factor = math.sqrt(20 / 19) * stats.t.ppf(0.975, 19) / stats.norm.ppf(0.975)
    for other in ("token_ppo", "st_ppo", "turn_ppo", "kl_stop"):
        mean = above(other, np.arange(40))
        low, high = (
            mean + factor * (end - mean)
            for end in np.quantile([above(other, rows) for rows in drawn], [0.025, 0.975])
        )
        if other == "token_ppo":
            assert low > 0 and f"is {said(mean)} above token PPO [{said(low)}, {said(high)}]" in LEADERS
        else:
            assert low < 0 < high, other


def test_topr_never_ends_below_its_start_and_the_kl_stop_saves_updates():
    table = pd.read_csv(BENCH / "metrics/summary.csv").query("regime == 'BENCHMARK'")
    topr = table[table["algorithm"] == "topr"]
    assert (topr["final"] >= topr["start"]).all()
    successes = table[table["algorithm"] == "successes_only"]
    assert (successes["final"] >= successes["start"]).all()
    updates = table.groupby("algorithm")["updates"].mean()
    assert f"makes {updates.kl_stop / updates.token_ppo:.0%} of the updates".replace("%", " %") in LEADERS


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ("turn_ppo", "token_ppo", "turn ratio adds {} to token PPO [{}, {}]"),
        ("gspo", "grpo", "the trajectory ratio {} to GRPO [{}, {}]"),
        ("sequence_mask", "grpo", "have become unlikely adds {} to GRPO [{}, {}]"),
        ("topr", "reinforce", "TOPR ends {} above REINFORCE"),
        ("kl_stop", "token_ppo", "the plain KL stop {} to token PPO [{}, {}]"),
        ("s_ppo", "token_ppo", "{} to token PPO [{}, {}], .00 to Turn-PPO"),
        ("st_ppo", "turn_ppo", "{} to Turn-PPO [{}, {}]"),
        ("successes_only", "topr", "{} above TOPR at the same settings [{}, {}]"),
        ("topr", "st_ppo", "{} above the next, ST-PPO [{}, {}]"),
        ("weight_one", "token_ppo", "gains {} [{}, {}]"),
        ("turn_ppo", "weight_one", "Turn-PPO is {} above it [{}, {}]"),
    ],
)
def test_what_an_ingredient_adds(benchmark, one, other, text):
    apart = benchmark[0][one] - benchmark[0][other]
    worlds = pd.read_csv(BENCH / "points.csv").set_index("point").loc[apart.index, "world"].to_numpy()
    pattern = re.escape(text).replace(r"\{\}", r"(−?\.\d\d)")
    told = re.search(pattern, LEADERS)
    assert told, text
    mean, *ends = (float(number.replace("−", "-")) for number in told.groups())
    assert signed(apart.mean()) == told[1]
    if ends:  # another draw of worlds moves an end by a hundredth
        assert np.allclose(ends, interval(apart.to_numpy(), worlds), atol=0.015)
        claims = one not in ("s_ppo", "st_ppo")  # these two add nothing that shows
        assert (ends[0] > 0) == claims, "a sentence that claims an effect has an interval above 0"


def test_ingredients_that_are_clear_with_all_judged_at_once(benchmark):
    shown = pd.read_csv(BENCH / "figures/benchmark_ingredients.csv")
    worlds = pd.read_csv(BENCH / "points.csv").set_index("point")["world"].to_numpy()
    clear = set()
    for row in shown.itertuples():
        apart = (benchmark[0][row._2] - benchmark[0][row.without]).to_numpy()
        low, high = interval(apart, worlds, 1 - 0.05 / len(shown))
        assert np.allclose([low, high], [row.joint_low, row.joint_high], atol=0.02), row.ingredient
        if row.joint_low > 0 or row.joint_high < 0:
            clear.add((row._2, row.without))
            assert low > 0.005, "not by the draw of worlds"
    five = {("turn_ppo", "token_ppo"), ("gspo", "grpo"), ("sequence_mask", "grpo"), ("kl_stop", "token_ppo"), ("topr", "reinforce")}  # fmt: skip
    assert clear == five | {("so_grpo", "grpo")}
    told = f"With the picture's {len(shown)} pairs judged at once {len(clear)} are clear of 0, these five and SO-GRPO over GRPO."
    assert told in LEADERS
    title = (BENCH / "figures/benchmark_ingredients.txt").read_text(encoding="utf-8").splitlines()[0]
    assert title.startswith(f"{len(clear)} of {len(shown)} ingredients")


def test_ingredients_that_add_nothing_that_shows(benchmark):
    worlds = pd.read_csv(BENCH / "points.csv").set_index("point")["world"]
    for one, other in (("dual_clip", "token_ppo"), ("grad_clip", "token_ppo"), ("dapo", "grpo")):
        apart = benchmark[0][one] - benchmark[0][other]
        low, high = interval(apart.to_numpy(), worlds.loc[apart.index].to_numpy())
        assert low < 0 < high, (one, other)


def test_the_tolerant_push_little_at_failures(benchmark):
    columns = ["regime", "algorithm", "iteration", "entropy", "negative_advantage_gradient_share"]
    rows = pd.read_parquet(BENCH / "metrics/iterations.parquet", columns=columns)
    rows = rows[(rows["regime"] == "BENCHMARK") & (rows["iteration"] <= 10)]
    push = rows.groupby("algorithm")["negative_advantage_gradient_share"].mean()
    finals = benchmark[0].mean()
    n = math.ceil(len(finals) / 4)
    least, highest = set(push.nsmallest(n).index), set(finals.nlargest(n).index)
    told = f"Of the {n} whose gradient comes least from failures in the first ten iterations, {len(least & highest)} are among the {n}"
    assert f"{told} that end highest (by chance {n * n / len(finals):.1f}):" in LEADERS
    assert (
        highest - least == {"kl_stop", "weight_one"}
        and {"successes_only", "topr", "sequence_mask", "turn_ppo", "gspo"} <= least
    )
    by = rows.pivot_table(index="algorithm", columns="iteration", values="entropy")
    change = by[10] - by[1]
    assert f"falls from the start, by {said(-change[list(least & highest)].max())} nats and more" in LEADERS
    assert change["token_ppo"] > 0
    assert (
        f"over all {len(finals)} methods the rank correlation is {signed(finals.corr(push, method='spearman'))}"
        in LEADERS
    )


def test_what_strains_a_method(benchmark):
    points = pd.read_csv(BENCH / "points.csv").set_index("point")
    points["reuse"] = points["learning_rate"] * points["epochs"]
    columns = ["learning_rate", "epochs", "staleness", "minibatches", "reuse"]
    token, turn, topr = (
        {column: benchmark[0][name].corr(points[column], method="spearman") for column in [*columns, "knob"]}
        for name in ("token_ppo", "turn_ppo", "topr")
    )
    t = stats.t.ppf(0.975, len(points) - 2)
    level = t / math.sqrt(len(points) - 2 + t**2)
    assert f"a rank correlation below −{f'{level:.3f}'[1:]}, the 5 % level over forty points" in LEADERS
    clear = {
        column: sum(
            benchmark[0][name].corr(points[column], method="spearman") < -level for name in benchmark[0]
        )
        for column in columns[:4]
    }
    told = "with the learning rate in {} of 34 methods, with the epochs in {}, with the number of minibatches in {} and with the age of the batch in {}."
    order = ("learning_rate", "epochs", "minibatches", "staleness")
    assert told.format(*(clear[column] for column in order)) in LEADERS
    assert [column for column in columns if token[column] < -level] == ["learning_rate", "epochs", "reuse"]
    told = "is {} for the rate, {} for the epochs and {} for their product; for the age ({}) and the minibatches ({}) it is not clear."
    order = ("learning_rate", "epochs", "reuse", "staleness", "minibatches")
    assert told.format(*(signed(token[column]) for column in order)) in LEADERS
    assert [column for column in columns[:4] if turn[column] < -level] == ["learning_rate"]
    told = "is clear for the rate alone ({}; epochs {}, age {})"
    assert told.format(*(signed(turn[column]) for column in columns[:3])) in LEADERS
    assert all(abs(topr[column]) < level for column in columns), "TOPR's for none"
    assert f"its knob; rank correlation {signed(topr['knob'])}" in LEADERS
    starts = pd.read_csv(BENCH / "metrics/summary.csv")["start"]
    assert f"succeeds in {said(starts.min())} to {said(starts.max())} of its tries" in LEADERS


def test_confirmed_settings(benchmark):
    finals, fresh = benchmark
    means = fresh.mean()
    near = (means >= means.max() - 0.05).sum()
    told = f"each at its best setting, it ends at {said(means.successes_only)}, the first of all"
    assert told in LEADERS and means.idxmax() == "successes_only"
    low, high = over_worlds((fresh["successes_only"] - fresh["topr"]).to_numpy())
    assert low < 0 < high and "the first of all, though not told apart from TOPR" in LEADERS
    assert (
        f"chosen at {said(finals.max().mean())} (mean over methods), they end at {said(means.mean())}"
        in LEADERS
    )
    assert f"{near} of {len(means)} methods end within .05 of the first" in LEADERS
    assert means["token_ppo"] >= means.max() - 0.05


def test_which_commit_and_processor_made_the_runs():
    records = json.loads((BENCH / "metrics/runs.json").read_text(encoding="utf-8"))
    assert not any(r["git_dirty"] for r in records)
    where = {"later": set(), "others": set()}
    for r in records:
        name = "later" if r["algorithm"] in ("vcpo", "successes_only", "weight_one") else "others"
        where[name].add((r["git_commit"][:7], r["hardware"]["cpu"], r["hardware"]["cores"]))
    assert where["others"] == {("85c0be2", "Intel(R) Xeon(R) Processor", 2)}
    assert {cpu for _, cpu, _ in where["later"]} == {"AMD EPYC"}
    starts = pd.DataFrame(
        [
            (r["world_seed"], r["warm_start"]["success_sampled"], r["warm_start"]["success_greedy"])
            for r in records
        ]
    )
    assert (starts.groupby(0).nunique() == 1).all(axis=None), "of the same success in every world"


def test_which_methods_are_not_run_yet(benchmark):
    from stppo.config.files import options

    rest = set(options("algorithm")) - set(benchmark[0]) - {"so_ppo"}  # another name of st_ppo
    named = {"llds", "grpo_guard", "agilerl_turn", "so_ppo_ctn_c", "so_grpo_ctn"}
    variants = {
        "bapo_ratio",
        "loop_token",
        "loop_trajectory",
        "reinforce_whitened",
        "s_ppo_cheap",
        "st_ppo_cheap",
    }
    under_way = {"token_ppo_fixed", "turn_ppo_fixed"}  # of results/reference/divisor
    assert rest - under_way == named | variants


def test_vcpo(benchmark):
    one = benchmark[0]["vcpo"].mean()
    five = (np.sort(benchmark[0]["vcpo"]) * np.diff((np.arange(41) / 40) ** 5)).sum()
    assert f"{said(one)} with one try, {said(five)} with five." in LEADERS


def test_table_of_roll_outs_side_by_side():
    page = (ROOT / "docs/howto/pretrained-models.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "results/reference/speed/rollouts.json").read_text(encoding="utf-8"))["rows"]
    assert {row["precision"] for row in rows} == {"bfloat16"}
    shown = re.findall(
        r"^\| (torch|vllm) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (?:(\d+) %)? ?\| ?(?:([.\d]+) )?\|$",
        page,
        re.M,
    )
    keys = ("tokens_per_second", "agent_tokens_per_second", "cpu_seconds")
    assert [cells[:5] for cells in shown] == [
        (row["engine"], str(row["trajectories"]), *(f"{row[key]:.0f}" for key in keys)) for row in rows
    ]
    for (*_, cached, mismatch), row in zip(shown, rows, strict=True):
        if row["engine"] == "vllm":
            assert (cached, mismatch) == (
                f"{100 * row['prefix_cache_hit_rate']:.0f}",
                f"{row['mismatch_mean']:.3f}".lstrip("0"),
            )
    torch_, vllm = rows[:2], rows[2:]
    faster = [
        ours["tokens_per_second"] / theirs["tokens_per_second"]
        for ours, theirs in zip(torch_, vllm, strict=True)
    ]
    assert "PyTorch samples {:.1f} and {:.1f} times as many".format(*faster) in " ".join(page.split())


# ---- the index of recorded runs ---------------------------------------------------------------------
def test_index_of_recorded_runs_names_every_folder_with_its_runs():
    reference = ROOT / "results/reference"
    page = (reference / "README.md").read_text(encoding="utf-8")
    rows = {
        name: int(n.replace(",", "")) for name, n in re.findall(r"^\| \[?(\w+).*\| ([\d,]+) \|$", page, re.M)
    }
    counted = {}
    for folder in filter(Path.is_dir, reference.iterdir()):
        metrics = folder / "metrics" if (folder / "metrics").is_dir() else folder / "tuning"
        if (metrics / "runs.json").is_file():
            counted[folder.name] = len(json.loads((metrics / "runs.json").read_text(encoding="utf-8")))
    assert rows == counted
    assert all((reference / place).exists() for place in links(page))
