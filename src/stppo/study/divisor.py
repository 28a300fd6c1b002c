"""The divisor's fair trial: what is recorded and missing, verdicts as they were read, and their picture.

`python -m stppo.study.divisor` writes the verdicts that are read, and the picture, into the trial's folder.
Protocol: results/reference/divisor.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from stppo.config.plan import seconds
from stppo.config.planned import PlannedRun, planned_runs
from stppo.figures.curves import INK, line_handles, name_rows, page, source_of
from stppo.figures.style import Plot, style
from stppo.files import repository_path
from stppo.record.runs import Metrics, load_metrics
from stppo.stats import by_world
from stppo.study.claims import (
    INCONCLUSIVE,
    LEDGER_FILES,
    NOT_SUPPORTED,
    SUPPORTED,
    evaluate,
    load_ledger,
    table,
)

FOLDER = "results/reference/divisor"
METRICS, CLAIMS, FIGURES = "part2/metrics", "part2/claims.csv", "part2/figures"
# Letter -> when its verdicts were read, once. Runs started later change none (protocol, amendment 6).
READ = {
    "D": "2026-11-29T08:27:00+00:00",
    "G": "2026-11-29T10:37:00+00:00",
    "N": "2026-11-29T10:37:00+00:00",
    "H": "2026-11-29T12:06:00+00:00",
    "S": "2026-11-29T12:55:15+00:00",
    "W": "2026-11-29T14:18:00+00:00",
}
ASKED = {
    "D1": "paper's setting",
    "D2": "paper's, no floor, clip behind",
    "D3": "paper's, where token PPO fails",
    "D4": "paper's, on the step",
    "D5": "old batches, on the step",
    "D6": "old batches, each trajectory",
}
PAIRS = {
    "s": ("one ratio a token: S-PPO and its kin, less token PPO", "#56B4E9"),
    "st": ("one ratio a turn: ST-PPO and its kin, less Turn-PPO", "#0072B2"),
}
CLIPS = {"OFF_POLICY": "no gradient clip", "OFF_POLICY_CLIP": "gradient clip 1"}
EPSILON = 0.2  # where an arm's name says nothing
# Ratios that are compared over clip ranges -> the factor by which their points stand beside each other.
BESIDE = {
    "token_ppo": 0.94,
    "turn_ppo": 0.97,
    "sequence_ppo": 1.0,
    "prefix_ppo": 1.03,
    "prefix_product_ppo": 1.06,
}
PLACES = {"final": -0.17, "greedy_final": 0.17}


def question(run: PlannedRun) -> int:
    """The question of the protocol that a run is for, the first where it is for several."""
    if run.regime in (of := {"OFF_POLICY_CLIP": 5, "GUESS": 6, "NOISY": 6, "CHAINS": 7}):
        return of[run.regime]
    if "_own_" in run.algorithm:
        return 4
    if run.regime.startswith("SGD") or "_step" in run.algorithm:
        return 3
    if run.regime == "OFF_POLICY":
        return 3 if run.algorithm in ("token_ppo", "turn_ppo", "s_ppo", "st_ppo") else 5
    return 2


def left(trial: Metrics) -> dict[str, Any]:
    """How many of the trial's runs are planned and recorded, question by question, and the core hours of the
    others: what the plan says of their regimes, times what the recorded runs took of it."""
    runs = planned_runs("divisor")
    costs: dict[str, float] = {}
    for run in runs:
        if run.regime not in costs:  # one config a regime is composed
            costs[run.regime] = seconds(run.config)
    recorded = {(r["regime"], r["algorithm"], r["seed"]): r["cpu_seconds"] for r in trial.runs}
    pace = sum(recorded.values()) / sum(costs[regime] for regime, *_ in recorded)
    found: dict[str, Any] = {"planned": len(runs), "left": {"hours": 0.0}}
    for run in runs:
        row = found.setdefault(f"question_{question(run)}", {"planned": 0, "recorded": 0, "hours": 0.0})
        row["planned"] += 1
        if (run.regime, run.algorithm, run.seed) in recorded:
            row["recorded"] += 1
        else:
            for part in (row, found["left"]):
                part["hours"] += pace * costs[run.regime] / 3600
    return found


def at(trial: Metrics, letter: str) -> Metrics:
    """The runs that were there when the verdicts of a letter were read."""
    runs = [run for run in trial.runs if run["started"] < READ[letter]]
    return Metrics(runs, trial.iterations, trial.evaluations)


def _without_range(arm: str) -> str:
    """The name of an arm without the clip range that may stand in it."""
    return arm.partition("_e0")[0]


def _over_widths(trial: Metrics) -> dict[tuple[str, str], pd.DataFrame]:
    """(regime, arm) -> rows of `Metrics.summary` by world, of what W1 chooses from, in the worlds that have
    all of it, and of the other ratios' arms that all these worlds have."""
    (entry,) = (one for one in load_ledger(LEDGER_FILES[1]).claims if one.id == "W1")
    arms = list(entry.holds_if[0].weights({}))
    runs = {arm: trial.arm(*arm).set_index("world_seed") for arm in arms}
    worlds = sorted(set.intersection(*(set(of.index) for of in runs.values())))
    for arm in sorted({(run["regime"], run["algorithm"]) for run in trial.runs} - set(arms)):
        if arm[0] in CLIPS and _without_range(arm[1]) in BESIDE:
            of = trial.arm(*arm).set_index("world_seed")
            if set(worlds) <= set(of.index):
                runs[arm] = of
    return {arm: of.loc[worlds] for arm, of in runs.items()} if worlds else {}


def widths(trial: Metrics) -> dict[str, dict[str, dict[str, float]]]:
    """regime -> arm -> mean final success, `final` sampled and `greedy`, where ratios were tried at several
    clip ranges; empty where no world has all of token PPO's and Turn-PPO's."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (regime, arm), of in _over_widths(trial).items():
        ends = {"final": of["final"].mean(), "greedy": of["greedy_final"].mean()}
        found.setdefault(regime, {})[arm] = ends
    return found


def verdicts(trial: Metrics) -> pd.DataFrame:
    """`claims.table` of the entries whose letter is read; those behind a shut gate are left out."""
    found = []
    for letter in READ:
        judged = [one for one in evaluate(at(trial, letter)) if one.entry.id.startswith(letter)]
        of = {one.entry.id: one.verdict for one in judged}
        found += [one for one in judged if of.get(one.entry.gate, SUPPORTED) == SUPPORTED]
    return table(found)


def picture(trial: Metrics, judged: pd.DataFrame) -> Plot:
    """The main entries, a row each: every world's difference, the mean, its 95 % interval and the one that
    decides. judged: as `verdicts` returns it."""
    trial = at(trial, "D")
    entries = {e.id: e for e in load_ledger(LEDGER_FILES[1]).claims if e.id.startswith("D") and not e.gate}
    judged = judged[judged["id"].isin(entries)]
    counts = judged.drop_duplicates("id")["verdict"].value_counts()
    title = "Does the divisor help? Twelve registered comparisons: " + ", ".join(
        f"{verdict} {counts.get(verdict, 0)}" for verdict in (SUPPORTED, NOT_SUPPORTED, INCONCLUSIVE)
    )
    text = (
        "Final success with the divisor, less without it. Points: worlds. Thick: 95 % interval of the mean; "
        "thin: the one that decides, so that all twelve hold at once."
    )
    handles = [
        Line2D([], [], color=INK, marker="o", linewidth=2.4, label="sampled"),
        Line2D([], [], color=INK, marker="o", markerfacecolor="white", linewidth=2.4, label="greedy"),
    ]
    named = [arm for entry in entries.values() for c in entry.holds_if for arm in c.weights({})]
    source = source_of(trial.all.of(*map(list, zip(*named, strict=True))))
    with style():
        fig = page(title, text, source, 0.42 * len(ASKED) * len(PAIRS) + 0.7, handles)
        panels = fig.subplots(len(PAIRS), 1, sharex=True)
        axes = dict(zip(PAIRS, panels, strict=True))
        for row in judged.itertuples():
            asked, _, pair = row.id.partition(".")
            condition = next(c for c in entries[row.id].holds_if if row.measured.startswith(f"{c.column}:"))
            ax, color = axes[pair], PAIRS[pair][1]
            y = [*ASKED].index(asked) + PLACES[condition.column]
            one, other = (by_world(trial.arm(*arm), condition.column) for arm in condition.weights({}))
            apart = [one[world] - other[world] for world in one.keys() & other.keys()]
            ax.plot(apart, [y] * len(apart), "o", color=color, markersize=3, alpha=0.5)
            ax.plot([row.joint_low, row.joint_high], [y, y], color=color, linewidth=0.9)
            ax.plot([row.low, row.high], [y, y], color=color, linewidth=2.6, solid_capstyle="butt")
            face = color if condition.column == "final" else "white"
            ax.plot(row.estimate, y, "o", color=color, markerfacecolor=face, markersize=6, zorder=4)
        for pair, ax in axes.items():
            name_rows(ax, [*ASKED.values()])
            ax.axvline(0, color="#888888", linestyle=":")
            ax.grid(axis="y", visible=False)
            ax.set_title(PAIRS[pair][0], loc="left")
        panels[-1].set_xlabel("difference of final success")
    return Plot("divisor", fig, judged, text, title=title)


def width_picture(trial: Metrics, judged: pd.DataFrame) -> Plot:
    """Final success of each ratio over the clip's width, without a gradient clip and with one: every world,
    and the mean. judged: as `verdicts` returns it."""
    runs = _over_widths(trial)
    row = judged[judged["id"] == "W1"].iloc[0]
    title = f"Each clipped as suits it best, Turn-PPO ends {row['estimate']:.2f} above token PPO"
    text = (
        "Final success, sampled, over the half-width ε of the clip range. Points: worlds. Lines: their mean."
    )
    table = pd.concat(
        of.reset_index().assign(method=_without_range(arm), epsilon=float(arm.partition("_e")[2] or EPSILON))
        for (_, arm), of in runs.items()
    )
    looks = trial.all.looks.loc[[name for name in BESIDE if name in set(table["method"])]]
    shown = [run for run in trial.runs if run["world_seed"] in set(table["world_seed"])]
    source = source_of(
        Metrics(shown, trial.iterations, trial.evaluations).all.of(*map(list, zip(*runs, strict=True)))
    )
    with style():
        fig = page(title, text, source, 2.9, line_handles(looks))
        panels = fig.subplots(1, len(CLIPS), sharey=True)
        for ax, (regime, name) in zip(panels, CLIPS.items(), strict=True):
            for method, of in table[table["regime"] == regime].groupby("method", sort=False):
                mean, look = of.groupby("epsilon")["final"].mean(), looks.loc[method]
                ax.plot(
                    of["epsilon"] * BESIDE[method],
                    of["final"],
                    "o",
                    color=look["color"],
                    markersize=3.5,
                    alpha=0.5,
                )
                ax.plot(mean.index, mean, color=look["color"], linestyle=look["line"], linewidth=2)
            ax.set(xscale="log", xlabel="ε", ylim=(-0.02, 1), title=name)
            ax.set_xticks(ticks := sorted(table["epsilon"].unique()), [f"{tick:g}" for tick in ticks])
            ax.minorticks_off()
        panels[0].set_ylabel("success")
    columns = ["method", "regime", "epsilon", "world_seed", "final"]
    return Plot("width", fig, table[columns], text, title=title)


def main() -> None:
    folder = repository_path(FOLDER)
    trial = load_metrics(folder / METRICS)
    judged = verdicts(trial)
    judged.to_csv(folder / CLAIMS, index=False, float_format="%.5g", lineterminator="\n")
    picture(trial, judged).save(folder / FIGURES)
    width_picture(trial, judged).save(folder / FIGURES)


if __name__ == "__main__":
    main()
