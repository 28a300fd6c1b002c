"""What each algorithm makes of a token: the factor on A grad log pi by its ratio, and its steps on figure 1's
trajectory."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from stppo.config import algorithms as registry
from stppo.config.composition import algorithm_section
from stppo.config.loading import build
from stppo.derivations.axes import ENTROPY, PROBABILITY, PROXIMAL, worked_example
from stppo.figures.style import Plot, style
from stppo.record.tidy import BASELINE
from stppo.trajectories import Layout

SIGNS = {1: ("A > 0", "#0061A8"), -1: ("A < 0", "#D55E00")}
WIDEST = 1 / PROBABILITY  # ratios from its inverse to this one, at which the token has become certain
# Fine enough to part bounds of 1.27 and 1.28; no point lies on 1/2 or 2, where float rounding would decide.
POINTS = 403
CAPTION = (
    "Trajectories of one token, one for each ratio and sign, in one minibatch: rules that look at a whole "
    f"minibatch see this one. Every token had probability {PROBABILITY:g} when it was sampled, so no ratio "
    f"passes {WIDEST:g}, and is drawn at an entropy of {ENTROPY:g} nat; a proximal policy stands halfway."
)


def factor_table(
    algorithms: Iterable[str] | None = None, ratios: Iterable[float] | None = None
) -> pd.DataFrame:
    """What an algorithm multiplies A grad log pi with, by the token's ratio pi / pi_old.

    One row per algorithm (default: all with a file), sign of the advantage and ratio, in figures' order.
    Columns: algorithm, label, sign (1 or -1), ratio, factor (of |A| = 1, penalty included, before any
    divisor). Computed from the algorithm's config, on trajectories of one token (see CAPTION), where turn and
    sequence ratios are the token's. ratios: those to look at, each with either sign; default `POINTS`, spread
    evenly on a logarithmic axis. Raises ConfigError for an unknown algorithm.
    """
    spread = torch.logspace(-1, 1, POINTS, base=WIDEST, dtype=torch.float64)
    given = spread if ratios is None else torch.tensor(list(ratios), dtype=torch.float64)
    ratios = given.repeat(2)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(len(given))
    layout = Layout.of(torch.ones(len(ratios), 1, dtype=torch.bool))
    frames = []
    names = [row.name for row in registry.algorithms()]
    for name in names if algorithms is None else registry.in_order(algorithms):
        composed = algorithm_section(name)
        objective = build(composed["objective"], "algorithm.objective")
        log_ratio = ratios.log().requires_grad_()
        surrogate = objective.evaluate(
            log_ratio,
            signs,
            layout,
            behaviour_logprobs=torch.full_like(ratios, math.log(PROBABILITY)),
            entropy=torch.full_like(ratios, ENTROPY),
            proximal=PROXIMAL * ratios.log(),
        )
        (gradient,) = torch.autograd.grad(-surrogate.loss, log_ratio)
        frames.append(
            pd.DataFrame(
                {
                    "algorithm": name,
                    "label": registry.look(name).label,
                    "sign": signs.int().numpy(),
                    "ratio": ratios.numpy(),
                    "factor": (gradient * len(ratios) * signs).numpy() + 0.0,  # no -0
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def same_factor(table: pd.DataFrame) -> list[list[str]]:
    """Algorithms by groups that multiply a token with the same factor, up to 1e-9, at every ratio of the
    table: what sets the members of a group apart is their credit, the segment of their ratio, their weights
    or their stabiliser, or a bound that none of the ratios reaches."""
    groups: list[tuple[np.ndarray, list[str]]] = []
    for name, rows in table.groupby("algorithm", sort=False):
        factor = rows["factor"].to_numpy()
        for known, names in groups:
            if np.allclose(known, factor, atol=1e-9):
                names.append(name)
                break
        else:
            groups.append((factor, [name]))
    return [names for _, names in groups]


def factors_figure(table: pd.DataFrame) -> Plot:
    """`factors`: a panel for each shape that the factor takes, with the names of those that have it."""
    groups = same_factor(table)
    columns = 4
    rows = -(-len(groups) // columns)
    with style():
        fig = Figure(figsize=(11.0, 2.55 * rows), layout="constrained")
        grid = fig.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for ax, names in zip(grid.flat, groups, strict=False):
            _factor(ax, table, names[0])
            ax.set_title(_members(names), fontsize=8)
        for ax in list(grid.flat)[len(groups) :]:
            ax.set_visible(False)
        for column in grid.T:  # the lowest panel of a column has its axis, wherever the last row ends
            lowest = [ax for ax in column if ax.get_visible()][-1]
            lowest.tick_params(labelbottom=True)
            lowest.set_xlabel("ratio")
        for ax in grid[:, 0]:
            ax.set_ylabel("factor")
        grid[0, 0].legend(fontsize=8)
        names = table["algorithm"].nunique()
        title = f"{names} algorithms multiply a token's A ∇ log π in {len(groups)} ways"
        fig.suptitle(title, x=0.012, ha="left")
    return Plot("factors", fig, table, f"{CAPTION} Dotted: token PPO.", title=title)


def steps_table() -> pd.DataFrame:
    """`axes.worked_example` of every algorithm at agent tokens, below one another: columns
    algorithm, label, position, turn, token_ratio, advantage, step."""
    frames = []
    for name in (row.name for row in registry.algorithms()):
        example = worked_example(name)
        example = example[example["turn"] >= 0]
        chosen = example[["position", "turn", "token_ratio", "advantage", "step"]]
        frames.append(chosen.assign(algorithm=name, label=registry.look(name).label))
    return pd.concat(frames, ignore_index=True)


def steps_figure(table: pd.DataFrame) -> Plot:
    """`steps`: every algorithm's step on each token of figure 1's trajectory, one row an algorithm."""
    wide = table.pivot(index="algorithm", columns="position", values="step").loc[table["algorithm"].unique()]
    first = table[table["algorithm"] == table["algorithm"].iloc[0]]
    with style():
        fig = Figure(figsize=(9.6, 0.2 * len(wide) + 1.7), layout="constrained")
        # Laid out at 100 dpi, where letters are narrower than in the saved file.
        fig.get_layout_engine().set(w_pad=0.2)
        ax = fig.subplots()
        image = ax.imshow(wide, aspect="auto", cmap="RdBu", norm=TwoSlopeNorm(0.0, -2.0, 2.0))
        labels = table.drop_duplicates("algorithm")["label"]
        ax.set_yticks(range(len(wide)), labels, fontsize=7.5)
        names = [
            f"{ratio:.2f}\n{'+' if a > 0 else '−'}"
            for ratio, a in first[["token_ratio", "advantage"]].to_numpy()
        ]
        ax.set_xticks(range(len(first)), names, fontsize=7.5)
        ax.set_xlabel("token ratio, and the sign of its advantage; turns are parted by lines")
        for edge in np.flatnonzero(np.diff(first["turn"])):
            ax.axvline(edge + 0.5, color="black", linewidth=1.5)
        ax.grid(False)
        fig.colorbar(image, ax=ax, label="step on log π, times |y|", shrink=0.5, extend="both")
        still = wide[(wide.abs() < 1e-12).any(axis=1)]
        title = f"{len(still)} of {len(wide)} algorithms give some token of the trajectory no step at all"
        fig.suptitle(title, x=0.012, ha="left")
    caption = (
        "The made-up trajectory of figure 1 under each algorithm, divided by its divisor where it has one; "
        "computed from the configs. White: no step. Methods that compare trajectories see only this one."
    )
    return Plot("steps", fig, table, caption, title=title)


def method_figure(name: str, factors: pd.DataFrame, steps: pd.DataFrame) -> Plot:
    """One algorithm: its factor by ratio, and its step on each token of figure 1's trajectory beside token
    PPO's. factors, steps: tables that hold it and token PPO."""
    its = registry.look(name)
    with style():
        fig = Figure(
            figsize=(9.0, 2.4)
        )  # a layout by hand: there are many of these, and the solver takes half of their time
        left, right = fig.subplots(1, 2, width_ratios=(1.0, 2.0))
        fig.subplots_adjust(left=0.06, right=0.99, bottom=0.21, top=0.97, wspace=0.18)
        _factor(left, factors, name)
        left.set(xlabel="ratio", ylabel="factor")
        left.legend(fontsize=7.5)
        mine, base = (steps[steps["algorithm"] == who] for who in (name, BASELINE))
        at = np.arange(len(mine)) + mine["turn"].to_numpy()  # a gap between turns
        right.bar(at, base["step"], width=0.8, fill=False, edgecolor="#8A8A8A", label="token PPO")
        right.bar(at, mine["step"], width=0.5, color=its.color, label=its.label)
        right.axhline(0, color="black", linewidth=0.8)
        right.set_xticks(at, [f"{ratio:.2f}" for ratio in mine["token_ratio"]], fontsize=7.5)
        right.set(xlabel="token ratio", ylabel="step on log π × |y|")
        right.legend(fontsize=7.5)
    return Plot(f"method_{name}", fig, mine.reset_index(drop=True), f"{its.label}. Left: {CAPTION}")


def _factor(ax: Axes, table: pd.DataFrame, name: str) -> None:
    for sign, (label, color) in SIGNS.items():
        for who, kind in ((BASELINE, ":"), (name, "-")):
            rows = table[(table["algorithm"] == who) & (table["sign"] == sign)]
            ax.plot(
                rows["ratio"],
                rows["factor"],
                kind,
                linewidth=3.0 if sign > 0 and kind == "-" else 1.4,  # both are seen where they are equal
                color=color if kind == "-" else "#8A8A8A",
                label=label if kind == "-" else None,
            )
    ax.axvline(1.0, color="#CCCCCC", linewidth=0.8, zorder=0)
    ax.set(xscale="log", ylim=(-1.2, WIDEST + 0.2))
    ax.set_xticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
    ax.minorticks_off()


def _members(names: list[str]) -> str:
    labels = [registry.look(name).label for name in names]
    shown = ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")
    return textwrap.fill(shown, 36)
