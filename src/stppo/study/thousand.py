"""A thousand iterations: do the methods that are stable for a hundred stay so? Records, numbers, picture.

`python -m stppo.study.thousand RUNS OUT` adds runs of `preset=thousand` to what OUT records and draws it all.
Protocol: results/reference/thousand.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import spearmanr

from stppo.config.algorithms import in_order
from stppo.figures.curves import LEVEL, Panel, bands, draw_lines, line_handles, page, source_of
from stppo.figures.style import Plot, style
from stppo.record.outcomes import LEARNED, trailing_mean
from stppo.record.runs import Metrics, collect, load_metrics
from stppo.record.schema import CHECKPOINT_DIR, RUN_FILE, RUNS_FILE
from stppo.stats import by_world, difference, fewest_worlds

WORDS = {"CRITICAL": "at the rate at which token PPO fails", "HALF": "at half that rate"}
SHORT = "{}_SHORT"  # the setting's run that stops after a hundred iterations
SIZES, STARTS = "sizes.csv", "warm_start"
MB = 1e6
EARLY = 100  # iterations after which the study's comparisons end
FIRST, LAST = (101, 200), (901, 1000)  # iterations whose seconds are compared
TICKS = (10, 30, 100, 300, 1000)
SECONDS = ("seconds_rollout", "seconds_scoring", "seconds_critic", "seconds_update")


def sizes(folders: list[Path]) -> pd.DataFrame:
    """What finished runs take on disk, in MB: columns regime, algorithm, seed, tables, checkpoint."""
    rows = []
    for folder in folders:
        record = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        files = [file for file in (folder / CHECKPOINT_DIR).rglob("*") if file.is_file()]
        rows.append(
            {
                **{name: record[name] for name in ("regime", "algorithm", "seed")},
                "tables": sum(file.stat().st_size for file in folder.glob("*.parquet")) / MB,
                "checkpoint": sum(file.stat().st_size for file in files) / MB,
            }
        )
    return pd.DataFrame(rows)


def whole(metrics: Metrics) -> Metrics:
    """The runs of the worlds in which every arm is recorded: means over worlds set arms side by side that
    began alike. Runs that tell of memory alone stay."""
    long = pd.DataFrame([run for run in metrics.runs if run["regime"] in WORDS])
    arms = long.groupby("world_seed").size()
    worlds = set(arms.index[arms == len(long[["regime", "algorithm"]].drop_duplicates())])
    kept = [run for run in metrics.runs if run["regime"] not in WORDS or run["world_seed"] in worlds]
    return Metrics(kept, metrics.iterations, metrics.evaluations)


def measured(metrics: Metrics) -> pd.DataFrame:
    """One row a long run: regime, algorithm, world_seed, `early` (success at iteration 100, the mean of three
    evaluations), `final`, `standing` (learned and not crashed by iteration 100), `crash` (iteration of the
    first crash, NaN without), `recovered` (whether a crash was made good by the end), `slower` (seconds of a
    late iteration over those of an early one)."""
    rows = []
    for record in (run for run in metrics.runs if run["regime"] in WORDS):
        outcome, curve = metrics.outcome(record), metrics.success(record)
        smoothed = pd.Series(trailing_mean(curve["success"]), index=curve["iteration"]).loc[:EARLY]
        crash = math.nan if outcome.crash_iteration is None else outcome.crash_iteration
        stopped = outcome.non_finite and crash <= EARLY
        iterations = metrics.select(metrics.iterations, record).set_index("iteration")
        seconds = iterations[list(SECONDS)].sum(axis=1)
        rows.append(
            {
                **{name: record[name] for name in ("regime", "algorithm", "world_seed")},
                "early": 0.0 if stopped else smoothed.iloc[-1],
                "final": outcome.final,
                "standing": bool(smoothed.max() >= outcome.start + LEARNED) and not crash <= EARLY,
                "crash": crash,
                "recovered": outcome.crashed and not outcome.collapsed,
                "slower": seconds.loc[slice(*LAST)].median() / seconds.loc[slice(*FIRST)].median(),
            }
        )
    return pd.DataFrame(rows)


def values(folder: Path) -> dict[str, Any]:
    """What `counted` says of the whole worlds recorded in a folder."""
    return counted(whole(load_metrics(folder / "metrics")), pd.read_csv(folder / SIZES))


def counted(metrics: Metrics, files: pd.DataFrame) -> dict[str, Any]:
    """Every arm's numbers, the rank correlation of the arms' means at both times, and the largest memory
    (MiB, with that of the short run) and files (MB) of a setting's runs. files: as `sizes` returns them."""
    table = measured(metrics)
    found: dict[str, Any] = {"runs": len(table), "slower": table["slower"].median()}
    for regime, part in table.groupby("regime"):
        means = part.groupby("algorithm")[["early", "final"]].mean()
        here = found[regime.lower()] = {"rank": spearmanr(means["early"], means["final"]).statistic}
        for name, place in (("memory", regime), ("memory_short", SHORT.format(regime))):
            peaks = [run["peak_memory_mb"] for run in metrics.runs if run["regime"] == place]
            here[name] = max(peaks, default=math.nan)
        here |= files.loc[files["regime"] == regime, ["tables", "checkpoint"]].max().to_dict()
        for algorithm, runs in part.groupby("algorithm"):
            standing = runs[runs["standing"]]
            apart = difference(by_world(runs, "final"), by_world(runs, "early"))
            low, high = apart.interval(0.95)
            here[algorithm] = {
                "worlds": len(runs),
                "early": runs["early"].mean(),
                "final": runs["final"].mean(),
                "apart": {"value": apart.value, "low": low, "high": high},
                "standing": len(standing),
                "fell": int(standing["crash"].notna().sum()),
                "recovered": int((standing["crash"].notna() & standing["recovered"]).sum()),
                "crashes": sorted(runs["crash"].dropna()),
            }
    return found


def picture(metrics: Metrics) -> Plot:
    """Success on a logarithmic axis, a panel for each rate: means with bands over worlds; a cross where a run
    first crashed, at the level of its method."""
    table, panel = measured(metrics), Panel("success", share=True)
    fell = table[table["standing"] & table["crash"].notna()]
    title = (
        f"Of {int(table['standing'].sum())} runs that stood after {EARLY} iterations, {len(fell)} fell "
        "within a thousand"
    )
    worlds = table["world_seed"].nunique()
    around = "a 95 % band over worlds" if worlds >= fewest_worlds(LEVEL) else "the range of the worlds"
    lines_are = f"means with {around}" if worlds > 1 else "the runs of the one world recorded"
    question = (
        "Do methods that are stable for a hundred iterations stay so? Success on unseen questions, sampled. "
        f"Lines: {lines_are}. Crosses: where a run had lost half of its gain."
    )
    parts = []
    looks = metrics.all.looks
    with style():
        fig = page(title, question, source_of(metrics.all.of(list(WORDS))), 3.6, line_handles(looks))
        axes = fig.subplots(1, len(WORDS), sharey=True)
        for ax, (regime, words) in zip(axes, WORDS.items(), strict=True):
            runs = metrics.all.of([regime])
            lines = bands(runs, runs.algorithms, panel)
            lines = lines[lines["iteration"] > 0]
            draw_lines(ax, lines, looks)
            for row in table[(table["regime"] == regime) & table["crash"].notna()].itertuples():
                height = 0.02 + 0.03 * runs.algorithms.index(row.algorithm)
                ax.plot(row.crash, height, "x", color=looks.loc[row.algorithm, "color"], markersize=6)
            ax.axvline(EARLY, color="#888888", linestyle=":")
            ax.set(xscale="log", title=words, xlabel="iteration", ylim=(0, 1))
            ax.set_xticks(TICKS, map(str, TICKS))
            ax.minorticks_off()
            parts.append(lines)
        axes[0].set_ylabel("success, sampled")
    names = [metrics.look(name).label for name in in_order(metrics.algorithms())]
    caption = f"{question} Methods: {', '.join(names)}."
    return Plot("thousand", fig, pd.concat(parts, ignore_index=True), caption, title=title)


def record(runs: Path, out: Path) -> Metrics:
    """Add the runs of a folder to what `out` records, with the size of their files and, packed, the warm
    starts that they began from. ValueError for a run that is recorded already."""
    folders = sorted(file.parent for file in runs.glob(f"*/*/seed*/{RUN_FILE}"))
    before = [out / "metrics"] if (out / "metrics" / RUNS_FILE).is_file() else []
    metrics = collect([*before, *folders], out / "metrics")
    files = pd.concat([pd.read_csv(out / SIZES), sizes(folders)]) if before else sizes(folders)
    files = files.sort_values(["regime", "algorithm", "seed"])
    files.to_csv(out / SIZES, index=False, float_format="%.3f", lineterminator="\n")
    for start in sorted((runs.parent / STARTS).glob("seed*-*")):
        if not (packed := out / STARTS / f"{start.name}.zip").exists():
            shutil.make_archive(str(packed.with_suffix("")), "zip", start)
    return metrics


def main(runs: str, out: str) -> None:
    """Record the runs of a folder and draw all that is recorded."""
    picture(whole(record(Path(runs), Path(out)))).save(Path(out) / "figures")


if __name__ == "__main__":
    main(*sys.argv[1:])
