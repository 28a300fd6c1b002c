"""Where training collapses: epochs per batch x learning rate, age of the batches, how the updates are split."""

from __future__ import annotations

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from stppo.results.captions import describe_setting
from stppo.results.drawing import WIDTH
from stppo.results.style import Plot, look, style
from stppo.study.arms import CELLS, EPOCHS, FACTORS, MAIN, PPO_VARIANTS, SPLITS, STALENESS
from stppo.study.outcomes import Arm, Study

COLORS = colormaps["cividis"].reversed()  # dark where all collapse; even for all kinds of colour vision
RISK, FINAL = "collapse_share", "final_success"


def phase_table(study: Study) -> pd.DataFrame:
    """One row per cell with runs: part (phase, staleness, split), algorithm, x, y, runs, collapsed, collapse_share,
    final_success (means over runs). A split's x is epochs x minibatches, y is empty."""
    cells = [("phase", n, str(e), f"{f:g}", Arm(r, n)) for n in PPO_VARIANTS for (e, f), r in CELLS.items()]
    cells += [("staleness", n, str(lag), "", Arm(r, n)) for n in PPO_VARIANTS for lag, r in STALENESS.items()]
    cells += [
        ("split", n, words, "", Arm(MAIN, n + ending))
        for n in PPO_VARIANTS
        for words, ending in SPLITS.items()
    ]
    rows = []
    for part, algorithm, x, y, arm in cells:
        runs = study.runs(arm)
        if runs:
            verdicts = [study.collapsed(run) for run in runs.values()]
            finals = pd.Series([study.final_success(run) for run in runs.values()])
            rows.append([part, algorithm, x, y, str(arm), len(runs), verdicts.count(1.0), finals.mean()])
    columns = ["part", "algorithm", "x", "y", "arm", "runs", "collapsed", FINAL]
    table = pd.DataFrame(rows, columns=columns)
    table.insert(7, RISK, table["collapsed"] / table["runs"])
    # A part that has nothing beside the main regime itself shows nothing.
    alone = table.groupby(["part", "algorithm"])["arm"].transform("size") == 1
    return table[~alone].reset_index(drop=True)


def phase_diagram_figure(study: Study) -> Plot | None:
    """Share of collapsed runs and final success per cell, a column per PPO variant."""
    data = phase_table(study)
    algorithms = [name for name in PPO_VARIANTS if name in set(data["algorithm"])]
    if not algorithms:
        return None
    bands = [  # part, quantity, x values, y values, label of x, label of y
        ("phase", RISK, [str(e) for e in EPOCHS], [f"{f:g}" for f in FACTORS], "epochs per batch", "share collapsed\nlearning rate ×"),
        ("phase", FINAL, [str(e) for e in EPOCHS], [f"{f:g}" for f in FACTORS], "epochs per batch", "final success\nlearning rate ×"),
        ("staleness", RISK, [str(lag) for lag in STALENESS], [""], "age of the batch (iterations)", "share\ncollapsed"),
        ("split", RISK, list(SPLITS), [""], "epochs × minibatches", "share\ncollapsed"),
    ]  # fmt: skip
    bands = [band for band in bands if band[0] in set(data["part"])]
    setting = describe_setting(study.metrics, {arm.split("/")[0] for arm in data["arm"]})
    heights = [len(band[3]) + 0.55 for band in bands]
    width = WIDTH if len(algorithms) > 1 else 5.0
    with style():
        fig = Figure(figsize=(width, 0.62 * sum(heights) + 1.5), layout="constrained")
        axes = fig.subplots(len(bands), len(algorithms), squeeze=False, height_ratios=heights)
        for i, (part, quantity, xs, ys, xlabel, ylabel) in enumerate(bands):
            top = 1.0 if quantity == RISK else max(0.1, data[FINAL].max())
            for j, name in enumerate(algorithms):
                cells = data[(data["part"] == part) & (data["algorithm"] == name)]
                _cells(axes[i, j], cells, quantity, xs, ys, top)
                axes[i, j].set_xlabel(xlabel if len(cells) else "")
                if i == 0:
                    axes[i, j].set_title(look(name).label, fontweight="bold", color=look(name).color)
            axes[i, 0].set_ylabel(ylabel)
            if quantity == FINAL or i == 0:
                bar = fig.colorbar(
                    ScalarMappable(Normalize(0, top), _colors(quantity)), ax=list(axes[i]), pad=0.01
                )
                bar.outline.set_visible(False)
        fig.suptitle("Where training collapses", x=0.012, ha="left")
        fig.supxlabel(f"{setting} · own measurement", fontsize=8, color="#777777")
    what = (
        "Learning rate × is relative to the main one. In each cell: collapsed of all runs, or their mean final success; "
        f"8 epochs at × 1 is the main regime {MAIN}, with more runs than its neighbours. Below: batches that are 0, 2 or 4 "
        "iterations old at 8 epochs and × 1, and 32 updates an iteration split three ways. White: not run. "
        f"Cells of two or three runs are coarse. Our own measurement: {setting}."
    )
    return Plot("phase_diagram", fig, data, what)


def _colors(quantity: str):
    return COLORS if quantity == RISK else COLORS.reversed()


def _cells(ax: Axes, cells: pd.DataFrame, quantity: str, xs: list[str], ys: list[str], top: float) -> None:
    ax.grid(visible=False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    if cells.empty:
        ax.set(xticks=[], yticks=[])
        return
    for cell in cells.itertuples():
        x, y = xs.index(cell.x), ys.index(cell.y)
        value = getattr(cell, quantity)
        color = _colors(quantity)(value / top)
        ax.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=color, linewidth=0))
        dark = sum(w * c for w, c in zip((0.299, 0.587, 0.114), color[:3], strict=True)) < 0.5
        words = f"{cell.collapsed}/{cell.runs}" if quantity == RISK else f"{value:.2f}"
        ax.text(x, y, words, ha="center", va="center", fontsize=9, color="white" if dark else "#222222")
    ax.set_xticks(range(len(xs)), xs)
    ax.set_yticks(range(len(ys)), ys)
    ax.set(xlim=(-0.52, len(xs) - 0.48), ylim=(-0.52, len(ys) - 0.48))
    ax.tick_params(length=0)
