"""How far learning rate, epochs and staleness can be pushed: success along one setting, all others equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from stppo.config.algorithms import in_order
from stppo.figures import findings
from stppo.figures.curves import (
    BANDS,
    BASELINE,
    GREY,
    LEVEL,
    TOGETHER,
    Panel,
    band,
    baseline_handle,
    family_chunks,
    line_handles,
    name_lines,
    page,
    plain,
    source_of,
    start_handle,
    top_of,
)
from stppo.figures.findings import main_regime
from stppo.figures.style import STYLE_NOTE, Plot, style
from stppo.record.outcomes import LEARNED
from stppo.record.runs import Metrics
from stppo.stats import fewest_worlds

SETTINGS = {
    "learning_rate": "learning rate",
    "epochs": "epochs per batch",
    "staleness": "staleness (iterations)",
}
FEWEST = 3  # values of a setting; two are no curve


def tolerance(metrics: Metrics) -> Plot | None:
    """Final success and area against learning rate, epochs and staleness, where the runs vary them one at a time."""
    runs = _with_settings(metrics)
    slices = {name: part for name in SETTINGS if (part := _slice(runs, name)) is not None}
    if not slices:
        return None
    every = pd.concat(slices.values())
    regimes, algorithms = sorted(set(every["regime"])), in_order(every["algorithm"])
    measures = {"final": "final success", "area": "mean success\nof the run"}
    question = f"How far can it be pushed? Sampled success against {findings.listed([SETTINGS[name].split(' (')[0] for name in slices])}."
    title = _tolerance_title(metrics, slices)
    chunks = (
        family_chunks(metrics, main_regime(metrics), algorithms)
        if len(algorithms) > TOGETHER
        else [algorithms]
    )
    behind = len(chunks) > 1 and BASELINE in algorithms
    handles = [] if len(chunks) > 1 else line_handles(metrics, algorithms)
    handles += [*([baseline_handle(metrics)] if behind else []), start_handle()]
    rows: list[pd.DataFrame] = []
    with style():
        names = 0.25 if len(chunks) > 1 else 0.0
        places = [(name, measure) for measure in measures for name in slices]
        n_columns = len(slices) if len(slices) > 1 else len(measures)
        n_rows = len(places) // n_columns
        body = len(chunks) * (n_rows * 1.55 + 0.45 + names + 0.6 * (n_rows == 1))
        fig = page(title, question, source_of(metrics, regimes, algorithms), body, handles)
        for chunk, block in zip(chunks, np.atleast_1d(fig.subfigures(len(chunks), 1)), strict=True):
            axes = block.subplots(n_rows, n_columns, squeeze=False, sharex="col")
            for (r, c), ax in np.ndenumerate(axes):
                name, measure = places[r * n_columns + c]
                runs = slices[name]
                if behind and BASELINE not in chunk:
                    _tolerance_line(ax, metrics, runs, BASELINE, name, measure, GREY)
                for algorithm in chunk:
                    rows += _tolerance_line(ax, metrics, runs, algorithm, name, measure)
                level = runs.groupby("world_seed")["start"].mean().mean()
                ax.axhline(level, color="#777777", linewidth=1, linestyle=(0, (1, 2)), zorder=1)
                _setting_axis(ax, name, sorted(set(runs[name])))
                if c == 0 or n_rows == 1:
                    ax.set_ylabel(measures[measure])
                if r == n_rows - 1:
                    ax.set_xlabel(SETTINGS[name])
            if len(chunks) > 1:
                name_lines(axes[0, 0], metrics, chunk, 1, len(chunk))
        top = top_of(rows)
        for ax in fig.axes:
            ax.set_ylim(0, top)
    fixed = "; ".join(
        f"{SETTINGS[name]} varies at "
        + ", ".join(f"{SETTINGS[other]} {plain(part[other].iloc[0])}" for other in SETTINGS if other != name)
        for name, part in slices.items()
    )
    caption = f"{question} {findings.sentence(fixed)}. An algorithm learns at a setting where its mean final success is at least {LEARNED:.2f} above the start. {BANDS} {STYLE_NOTE}"
    return Plot("tolerance", fig, pd.concat(rows, ignore_index=True), caption, title=title)


def _with_settings(metrics: Metrics) -> pd.DataFrame:
    """`Metrics.summary` with the settings of each run, and what else must be equal for runs to be compared."""
    rows = []
    for record, row in zip(metrics.runs, metrics.summary.to_dict("records"), strict=True):
        shared = {"policy": str(record.get("policy")), "world": str(record["world"])}
        rows.append({**row, **metrics.settings(record), **shared})
    runs = pd.DataFrame(rows)
    return runs.assign(horizon=runs["regime"].map(metrics.horizons))


def _slice(runs: pd.DataFrame, name: str) -> pd.DataFrame | None:
    """Runs that differ in one setting alone: of the settings of the others, the one at which it takes most values."""
    fixed = [other for other in SETTINGS if other != name] + ["policy", "world", "horizon"]
    best, most = None, (FEWEST - 1, 0)
    for _, part in runs.dropna(subset=list(SETTINGS)).groupby(fixed):
        size = (part[name].nunique(), len(part))
        if size > most and size[0] >= FEWEST:
            best, most = part, size
    if best is None:
        return None
    varied = best.groupby("algorithm")[name].nunique()
    kept = varied[varied >= FEWEST].index
    return best[best["algorithm"].isin(kept)] if len(kept) else None


def _tolerance_line(
    ax: Axes, metrics: Metrics, runs: pd.DataFrame, algorithm: str, name: str, measure: str, grey: str = ""
) -> list[pd.DataFrame]:
    arm = runs[runs["algorithm"] == algorithm]
    if arm.empty:
        return []
    table = arm.pivot_table(index=name, columns=["world_seed", "seed"], values=measure, aggfunc="mean")
    table.columns.names = ["world", "seed"]
    drawn = band(table, Panel(measure, "", share=True)).rename(columns={"iteration": "setting"})
    its = metrics.look(algorithm)
    if grey:
        ax.plot(drawn["setting"], drawn["value"], color=grey, linewidth=1.6, zorder=1)
        return []
    ax.fill_between(
        drawn["setting"], drawn["low"], drawn["high"], color=its.color, alpha=0.14, linewidth=0, zorder=2
    )
    ax.plot(
        drawn["setting"], drawn["value"], color=its.color, ls=its.line, lw=2, marker="o", ms=4.5, zorder=4
    )
    columns = ["setting", "value", "low", "high", "runs", "worlds"]
    keys = {"varied": name, "measure": measure, "algorithm": algorithm}
    return [drawn[columns].assign(**keys)[[*keys, *columns]]]


def _setting_axis(ax: Axes, name: str, values: Sequence[float]) -> None:
    if name != "staleness" and min(values) > 0:
        ax.set_xscale("log")
    ax.set_xticks(
        values, [plain(value) for value in values], fontsize=7.5, rotation=30 if len(values) > 4 else 0
    )
    ax.set_xticks([], minor=True)


def _tolerance_title(metrics: Metrics, slices: Mapping[str, pd.DataFrame]) -> str:
    """The highest value of the first setting at which the two compared algorithms still learn, by their means."""
    name, runs = next(iter(slices.items()))
    if short := findings.too_short(metrics, sorted(set(runs["regime"]))):
        return short
    top = max(runs[name])
    told, reached = [], []
    chosen = findings.pair(metrics, main_regime(metrics), in_order(runs["algorithm"]))
    for algorithm in chosen:
        arm = runs[runs["algorithm"] == algorithm]
        gains = (
            (arm["final"] - arm["start"])
            .groupby([arm[name], arm["world_seed"]])
            .mean()
            .groupby(level=0)
            .mean()
        )
        learns = gains[gains >= LEARNED]
        reached.append(learns.index.max() if len(learns) else None)
        label = findings.name_of(metrics, algorithm)
        if reached[-1] is None:
            told.append(f"{label} at none of those tried")
        elif reached[-1] == arm[name].max() == top:
            told.append(f"{label} up to the highest tried ({plain(top)})")
        else:
            told.append(f"{label} up to {plain(reached[-1])}")
    what = {"learning_rate": "Learning rate", "epochs": "Epochs per batch", "staleness": "Staleness"}[name]
    n_worlds = runs.groupby("algorithm")["world_seed"].nunique().loc[list(chosen)].min()
    if len(told) == 2 and reached[0] == reached[1] and reached[0] is not None:
        told = [f"{findings.name_of(metrics, chosen[0])} and {told[1]} alike"]
    few = f" ({n_worlds} world{'s' if n_worlds > 1 else ''})" if n_worlds < fewest_worlds(LEVEL) else ""
    return f"{what} at which success still rises by {LEARNED:.1f}: {', '.join(told)}{few}"
