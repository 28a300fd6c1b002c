"""Do slow questions starve where an asynchronous trainer throws old groups away? Records, numbers, picture.

`python -m stppo.study.starving RUNS OUT` collects the runs of `preset=starving` and adds `by_hops.csv`, the
success of each on questions of each number of hops after training. Protocol: results/reference/starving.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from stppo.config.algorithms import in_order
from stppo.figures.curves import page, source_of
from stppo.figures.style import Plot, style
from stppo.record.runs import Metrics, collect, load_metrics
from stppo.record.schema import BY_BENCHMARK_FILE, RUN_FILE
from stppo.stats import by_world, difference

BY_HOPS = "by_hops.csv"
KEPT, OTHERS = "KEPT", ("ABOVE_4", "ABOVE_2")
WORDS = {KEPT: "all kept", "ABOVE_4": "older than 4 thrown away", "ABOVE_2": "older than 2 thrown away"}
COLORS = {KEPT: "#4D4D4D", "ABOVE_4": "#E69F00", "ABOVE_2": "#D55E00"}
MARKS = {KEPT: "o", "ABOVE_4": "s", "ABOVE_2": "D"}
FIRST, LAST = 11, 51  # iterations from which the mix, and what the trainer shows, are averaged
LONG = (4, 5)
SHARES = {2: 0.4, 3: 0.2, 4: 0.2, 5: 0.2}  # as the world asks


def by_hops(runs: list[Path]) -> pd.DataFrame:
    """Success after training, sampled: columns regime, algorithm, seed, hops, success. ValueError for a run
    that did not tell hops apart."""
    rows = []
    for folder in runs:
        record = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        file = folder / BY_BENCHMARK_FILE
        if not file.is_file():
            raise ValueError(f"{folder} has no {BY_BENCHMARK_FILE}; train it with +world.hops_apart=true")
        last = json.loads(file.read_text(encoding="utf-8"))[-1]
        for name, success in sorted(last["by_benchmark"].items()):
            place = {key: record[key] for key in ("regime", "algorithm", "seed")}
            rows.append(place | {"hops": int(name.split("_")[0]), "success": success})
    return pd.DataFrame(rows).sort_values(["regime", "algorithm", "seed", "hops"], ignore_index=True)


def measured(metrics: Metrics, ends: pd.DataFrame) -> pd.DataFrame:
    """One row a run: regime, algorithm, world_seed, and what the protocol asks for: `hops` trained on, `long`
    (success on long questions), `all` (as the world asks), `shown` (success of the last training batches),
    `age` (iterations) and `thrown` (groups thrown away for each that was trained on), hop2 … hop5."""
    keys = ["regime", "algorithm", "seed"]
    wide = ends.pivot(index=keys, columns="hops", values="success")
    late = metrics.iterations[metrics.iterations["iteration"] >= FIRST].groupby(keys)
    last = metrics.iterations[metrics.iterations["iteration"] >= LAST].groupby(keys)
    groups = {
        (r["regime"], r["algorithm"], r["seed"]): r["training"]["trajectories_per_iteration"]
        / r["objective"]["credit"].get("group_size", 1)
        for r in metrics.runs
    }
    found = pd.DataFrame(
        {
            "hops": late["hops"].mean(),
            "age": late["staleness_iterations"].mean(),
            "thrown": late["discarded_groups"].mean() / pd.Series(groups).rename_axis(keys),
            "shown": last["success_train"].mean(),
            "long": wide[list(LONG)].mean(axis=1),
            "all": sum(wide[hops] * share for hops, share in SHARES.items()),
            **{f"hop{hops}": wide[hops] for hops in SHARES},
        }
    ).reset_index()
    return found.assign(world_seed=found["seed"])


def values(folder: Path) -> dict[str, Any]:
    """Every arm's means, and its differences to the arm that keeps all."""
    metrics = load_metrics(folder / "metrics")
    table = measured(metrics, pd.read_csv(folder / BY_HOPS))
    columns = [name for name in table if name not in ("regime", "algorithm", "seed", "world_seed")]
    found: dict[str, Any] = {"runs": len(metrics.runs)}
    arms = dict(iter(table.groupby(["regime", "algorithm"])))
    for (regime, algorithm), arm in arms.items():
        row = arm[columns].mean().to_dict() | {"worlds": len(arm)}
        if regime != KEPT:
            for column in ("hops", "long", "all", "shown", *(f"hop{hops}" for hops in SHARES)):
                apart = difference(by_world(arm, column), by_world(arms[KEPT, algorithm], column))
                low, high = apart.interval(0.95)
                row[f"less_{column}"] = {"value": apart.value, "low": low, "high": high}
        found.setdefault(regime.lower(), {})[algorithm] = row
    for regime, part in table.groupby("regime"):
        found[regime.lower()]["mean"] = part[columns].mean().to_dict()
    return found


def picture(metrics: Metrics, ends: pd.DataFrame) -> Plot:
    """Left the mix that is trained on, right success by the number of hops; means of all methods, and each
    method's as small marks."""
    table = measured(metrics, ends)
    mix = metrics.iterations.groupby(["regime", "iteration"])["hops"].mean()
    asked = sum(hops * share for hops, share in SHARES.items())
    means = table.groupby("regime")[["hops", *(f"hop{hops}" for hops in SHARES)]].mean()
    each = table.groupby(["regime", "algorithm"])[[f"hop{hops}" for hops in SHARES]].mean()
    title = (
        "Where groups older than two iterations are thrown away, questions trained on have "
        f"{means.loc['ABOVE_2', 'hops']:.1f} hops in place of {means.loc[KEPT, 'hops']:.1f}, and those of "
        f"five hops end at {means.loc['ABOVE_2', 'hop5']:.2f} in place of {means.loc[KEPT, 'hop5']:.2f}"
    )
    question = (
        "Do slow questions starve? Left, the questions that an asynchronous trainer trains on; right, "
        "success on unseen questions after it. Large marks are means of all methods, small ones of one."
    )
    handles = [
        Line2D([], [], color=COLORS[name], marker=MARKS[name], linewidth=2, label=WORDS[name])
        for name in WORDS
    ]
    handles.append(Line2D([], [], color="#888888", linestyle=":", label="as the world asks"))
    parts = []
    with style():
        fig = page(title, question, source_of(metrics.all), 3.4, handles)
        left, right = fig.subplots(1, 2)
        for place, name in enumerate(WORDS):
            left.plot(mix[name], color=COLORS[name], linewidth=1.6)
            x = [hops + 0.2 * (place - 1) for hops in SHARES]
            for _, row in each.loc[name].iterrows():
                right.plot(
                    x, row, linestyle="", marker=MARKS[name], markersize=3, color=COLORS[name], alpha=0.45
                )
            ended = means.loc[name, [f"hop{hops}" for hops in SHARES]]
            right.plot(x, ended, linestyle="", marker=MARKS[name], markersize=8, color=COLORS[name])
            parts.append(mix[name].rename("value").reset_index().assign(regime=name, metric="hops"))
            parts.append(
                pd.DataFrame({"hops": [*SHARES], "value": [*ended], "regime": name, "metric": "success"})
            )
        left.axhline(asked, color="#888888", linestyle=":")
        left.set(xlabel="iteration", ylabel="hops of the questions trained on, mean")
        right.set(xlabel="hops of the question", ylabel="success, sampled", xticks=[*SHARES], ylim=(0, 1))
    names = [metrics.look(name).label for name in in_order(metrics.algorithms())]
    caption = f"{question} Methods: {', '.join(names)}."
    return Plot("starving", fig, pd.concat(parts, ignore_index=True), caption, title=title)


def main(runs: str, out: str) -> None:
    """Collect the runs of a folder and draw them."""
    folders = sorted(file.parent for file in Path(runs).glob(f"*/*/seed*/{RUN_FILE}"))
    metrics, ends = collect(folders, Path(out) / "metrics"), by_hops(folders)
    ends.to_csv(Path(out) / BY_HOPS, index=False, float_format="%.5g", lineterminator="\n")
    picture(metrics, ends).save(Path(out) / "figures")


if __name__ == "__main__":
    main(*sys.argv[1:])
