"""What titles need: which algorithms they compare, and whether these differ by more than their worlds do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stppo.config.algorithms import ORDER, algorithms
from stppo.record.tidy import BASELINE, Runs
from stppo.stats import difference, fewest_worlds, joint_level

MIN_ITERATIONS = 20  # shorter runs are trials of the machinery
HEADLINE = (BASELINE, "st_ppo", "turn_ppo", "s_ppo")  # of the first picture, those that were trained
PARTNER = (
    "st_ppo",
    "turn_ppo",
    "so_grpo",
    "turn_grpo",
)  # of the baseline in titles: the first that was trained
DRAWS = 4000
NAMES = {  # what pictures call a column of `Runs.rows`
    "success_train": "success on the batch",
    "valid_format_rate": "valid format",
    "entropy": "entropy",
    "agent_tokens_per_turn": "tokens per turn",
    "kl_behaviour_k3": "KL to behaviour",
    "kl_policy_to_behaviour": "KL from behaviour",
    "ratio_max_token": "largest token ratio",
    "ratio_max_token_max": "largest token ratio",
    "ratio_max_turn_max": "largest turn ratio",
    "ratio_p99_token": "99th percentile of token ratios",
    "ratio_p99_turn": "99th percentile of turn ratios",
    "effective_sample_size": "effective sample size",
    "clip_fraction": "clip fraction",
    "critic_explained_variance": "critic, explained variance",
    "gradient_norm": "gradient norm",
    "gradient_norm_max": "largest gradient norm",
    "clipping_bias_norm": "clipping-bias norm ‖C‖",
    "clipping_bias_norm_max": "largest ‖C‖",
    "update_norm": "size of a step",
    "advantage_raw_std": "spread of advantages",
    "advantage_variance": "advantage variance",
}


def headline(runs: Runs) -> list[str]:
    """The algorithms of the first picture: at most four of `HEADLINE`, filled up with others where fewer than
    two of these were trained, and every one with a file of your own; with many of these, two of the four."""
    own = [row.name for row in algorithms() if row.name not in ORDER and row.name in runs.algorithms]
    chosen = [name for name in HEADLINE if name in runs.algorithms]
    if len(chosen) < 2:
        chosen += [name for name in runs.algorithms if name not in (*chosen, *own)]
    chosen = chosen[: max(2, min(4, 6 - len(own)))]
    return [name for name in runs.algorithms if name in (*chosen, *own)]


def pair(algorithms: Sequence[str]) -> list[str]:
    """The two algorithms that a title compares (the baseline first), or the only one. algorithms: in figures'
    order."""
    one = BASELINE if BASELINE in algorithms else algorithms[0]
    return [one, *[name for name in (*PARTNER, *algorithms) if name in algorithms and name != one][:1]]


def too_short(runs: Runs) -> str:
    """Why runs conclude nothing; empty where they may."""
    longest, each = runs.runs["iterations"].max(), runs.runs.groupby(["regime", "algorithm"]).size().max()
    if longest >= MIN_ITERATIONS or (runs.runs["status"] == "non_finite").all():
        return ""
    return (
        f"Too short to conclude anything: {longest} iterations, {each} run{'s' if each > 1 else ''} an "
        "algorithm"
    )


@dataclass(frozen=True)
class Difference:
    """Means of two arms over the worlds that both have, and whether the interval of their difference leaves
    out zero."""

    one: float
    other: float
    n_worlds: int
    level: float
    clear: bool

    @property
    def few(self) -> bool:
        """Whether worlds are too few for any difference to be clear."""
        return self.n_worlds < fewest_worlds(self.level)

    @property
    def note(self) -> str:
        """In brackets that no difference is clear; empty where one is, and where `hedged` says why none can
        be."""
        return "" if self.clear or self.few else " (no clear difference)"


def compare(one: Mapping[int, float], other: Mapping[int, float], looks: int = 1) -> Difference:
    """Two arms' numbers by world, paired. looks: comparisons among which the one to be told is chosen
    (Bonferroni).

    Without a world in common the means are those of each arm's own worlds.
    """
    arms = [pd.Series(of, dtype="float64").dropna() for of in (one, other)]
    level, worlds = joint_level(looks), arms[0].index.intersection(arms[1].index)
    first, second = (float(arm.loc[worlds].mean() if len(worlds) else arm.mean()) for arm in arms)
    low, high = 0.0, 0.0
    if len(worlds) >= fewest_worlds(level):
        low, high = difference(*(arm.to_dict() for arm in arms), n_draws=DRAWS).interval(level)
    return Difference(first, second, len(worlds), level, not low <= 0 <= high)


def hedged(title: str, found: Sequence[Difference]) -> str:
    """A title with a capital, behind a warning where the worlds of all that it compares are too few."""
    few = bool(found) and all(one.few for one in found)
    return capital(f"{few_words(max(one.n_worlds for one in found))}: {title}" if few else title)


def few_words(n_worlds: int) -> str:
    """How few worlds there are."""
    return (
        "no world in common"
        if n_worlds == 0
        else f"{n_worlds} world{'s' if n_worlds > 1 else ''}, too few to tell"
    )


def signed(value: float) -> str:
    """A difference of success with its sign: +0.48, −0.02, 0.00."""
    return "0.00" if abs(value) < 0.005 else f"{value:+.2f}".replace("-", "−")


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def capital(text: str) -> str:
    """With a capital at its beginning."""
    return text[:1].upper() + text[1:]


def geometric(curves: pd.DataFrame, part: str) -> dict[int, float]:
    """World -> mean logarithm of the first or the last third of its runs' courses. part: early, late."""
    n = max(1, len(curves) // 3)
    chosen = curves.iloc[:n] if part == "early" else curves.iloc[-n:]
    return np.log(chosen.where(chosen > 0)).mean().groupby("world").mean().dropna().to_dict()
