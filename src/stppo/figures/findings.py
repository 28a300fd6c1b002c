"""What figures say above themselves: sentences that are true of the recorded numbers, whatever these are.

A sentence speaks of a difference only where the worlds of both algorithms show it: enough of them (`fewest_worlds`), and an
interval of the difference, paired by world, that leaves out zero. Where a sentence was chosen after several looks at the
runs, the interval's level allows for that (Bonferroni). Else it says that no difference is clear, or that worlds or
iterations are too few to tell, and gives the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stppo.config.algorithms import in_order
from stppo.figures.curves import BASELINE, curves_of, queue_filled
from stppo.record.runs import Metrics
from stppo.stats import by_world, difference, fewest_worlds, joint_level

MIN_ITERATIONS = 20  # shorter runs are trials of the machinery
HEADLINE = (BASELINE, "st_ppo", "turn_ppo", "s_ppo")  # of the first picture, those that were trained
PARTNER = (
    "st_ppo",
    "turn_ppo",
    "so_grpo",
    "turn_grpo",
)  # what the baseline is compared with: the first that was trained
DRAWS = 4000


# ---- which runs ---------------------------------------------------------------------------------
def main_regime(metrics: Metrics) -> str:
    """The regime that has most algorithms; ties: most runs, most iterations, first name."""
    runs = pd.DataFrame(
        [{key: r[key] for key in ("regime", "algorithm", "iterations")} for r in metrics.runs]
    )
    counts = runs.groupby("regime").agg({"algorithm": ["nunique", "size"], "iterations": "max"})
    return str(counts.sort_index().sort_values(list(counts), ascending=False, kind="stable").index[0])


def headline(metrics: Metrics, regime: str) -> list[str]:
    """At most four algorithms for one panel: `HEADLINE`, filled up with others in figures' order where few were trained."""
    present = in_order(metrics.algorithms(regime))
    chosen = [name for name in HEADLINE if name in present]
    if len(chosen) < 2:
        chosen += [name for name in present if name not in chosen]
    return in_order(chosen[:4])


def pair(metrics: Metrics, regime: str, among: Sequence[str] | None = None) -> tuple[str, ...]:
    """The two algorithms that a title compares (the baseline first), or the only one."""
    present = in_order(metrics.algorithms(regime) if among is None else among)
    one = BASELINE if BASELINE in present else present[0]
    others = [name for name in (*PARTNER, *present) if name in present and name != one]
    return (one, *others[:1])


def name_of(metrics: Metrics, algorithm: str) -> str:
    """An algorithm's label without what stands in brackets, unless that tells it from another."""
    shorts = {name: metrics.look(name).label.partition(" (")[0] for name in metrics.algorithms()}
    alone = list(shorts.values()).count(shorts[algorithm]) == 1
    return shorts[algorithm] if alone else metrics.look(algorithm).label


# ---- comparisons --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Comparison:
    """Means of two arms over the worlds that both have, and whether their difference is clear."""

    one: float
    other: float
    n_worlds: int
    level: float
    clear: bool

    @property
    def few(self) -> bool:
        """Whether worlds are too few for any difference to be clear."""
        return self.n_worlds < fewest_worlds(self.level)

    def say(self, clear: str, numbers: str) -> str:
        """`clear` where the difference is; else the numbers, after what keeps them from showing one."""
        if self.few:
            return f"{few_words(self.n_worlds)}: {numbers}"
        return clear if self.clear else f"No clear difference: {numbers}"


def few_words(n_worlds: int) -> str:
    """How few worlds there are, as the beginning of a sentence."""
    return {0: "No world in common", 1: "One world, too few to tell"}.get(
        n_worlds, f"{n_worlds} worlds, too few to tell"
    )


def compare(one: Mapping[int, float], other: Mapping[int, float], looks: int = 1) -> Comparison:
    """Two arms' numbers by world. looks: comparisons among which the one to be told is chosen.

    Without a world in common the means are those of each arm's own worlds.
    """
    level = joint_level(looks)
    worlds = [w for w in one if w in other and math.isfinite(one[w]) and math.isfinite(other[w])]
    first, second = ([of[w] for w in worlds] for of in (one, other))
    if not worlds:
        means = [float(np.mean(list(of.values()))) if of else math.nan for of in (one, other)]
        return Comparison(*means, 0, level, False)
    clear = False
    if len(worlds) >= fewest_worlds(level):
        low, high = difference(one, other, n_draws=DRAWS).interval(level)
        clear = not low <= 0 <= high
    return Comparison(float(np.mean(first)), float(np.mean(second)), len(worlds), level, clear)


def compare_arms(
    metrics: Metrics, regime: str, names: Sequence[str], column: str, looks: int = 1
) -> Comparison:
    """`compare` of a column of `Metrics.summary`."""
    return compare(*(by_world(metrics.arm(regime, name), column) for name in names), looks)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def two(value: float) -> str:
    """A success or another number near one; never minus zero."""
    return f"{value:.2f}".replace("-0.00", "0.00")


def signed(value: float) -> str:
    """A difference of success, as `two` with its sign: +0.48, −0.02."""
    return f"{value:+.2f}".replace("-", "−").replace("−0.00", "0.00").replace("+0.00", "0.00")


def sentence(text: str) -> str:
    """With a capital."""
    return text[:1].upper() + text[1:]


# ---- sentences ----------------------------------------------------------------------------------
def too_short(metrics: Metrics, regimes: Sequence[str]) -> str | None:
    """Why runs conclude nothing, or None."""
    runs = [run for run in metrics.runs if run["regime"] in regimes]
    longest = max(run["iterations"] for run in runs)
    stopped = all(run.get("non_finite") for run in runs)
    if longest >= MIN_ITERATIONS or stopped:
        return None
    arms = metrics.table[metrics.table["regime"].isin(regimes)]["runs"]
    many = f"{arms.max()} run{'s' if arms.max() > 1 else ''} an algorithm"
    return f"Too short to conclude anything: {longest} iterations, {many}"


def learning(metrics: Metrics, regime: str, names: Sequence[str]) -> str:
    """Who learns, keeps what was gained, and ends higher: of the two that `pair` chooses."""
    if short := too_short(metrics, [regime]):
        return short
    chosen = pair(metrics, regime, names)
    labels = [name_of(metrics, name) for name in chosen]
    arms = [metrics.arm(regime, name) for name in chosen]
    learned = [int(arm["learned"].sum()) for arm in arms]
    counts = [
        f"{n} of {len(arm)} run{'s' if len(arm) > 1 else ''}" for n, arm in zip(learned, arms, strict=True)
    ]
    if len(chosen) == 1:
        collapsed = int(arms[0]["collapsed"].sum())
        return sentence(f"{labels[0]} learns in {counts[0]} and collapses in {collapsed}")
    mostly = [2 * n > len(arm) for n, arm in zip(learned, arms, strict=True)]
    final = compare_arms(metrics, regime, chosen, "final", 3)
    area = compare_arms(metrics, regime, chosen, "area", 3)
    ends = f"{labels[0]} ends at {two(final.one)}, {labels[1]} at {two(final.other)}"
    if all(
        n == len(arm) for n, arm in zip(learned, arms, strict=True)
    ):  # else it would be of some runs alone
        kept = compare_arms(metrics, regime, chosen, "gain_kept", 3)
        told = keeps(labels, kept)
        if kept.clear or final.few:
            return sentence(kept.say(told, told))
    elif any(mostly) and not all(mostly):
        share = compare_arms(metrics, regime, chosen, "learned", 3)
        winner = mostly.index(True)
        loser = 1 - winner
        told = f"{labels[winner]} learns in {counts[winner]}, {labels[loser]} in {counts[loser]}"
        if share.clear or share.few:
            return sentence(share.say(told, told))
    elif not any(learned):
        begin = f"Neither learns (from {two(arms[0]['start'].mean())} at the start)"
        told = f"{begin}: {ends}"
        vague = few_words(final.n_worlds).lower() if final.few else "no clear difference"
        return told if final.clear else f"{told}; {vague}"
    if final.clear or final.few or not area.clear:
        return sentence(final.say(_higher_first(labels, final, "ends", "at "), ends))
    along = _higher_first(labels, area, "averages")
    return sentence(
        f"{along} over the run; no clear difference at the end ({two(final.one)}, {two(final.other)})"
    )


def keeps(labels: Sequence[str], kept: Comparison) -> str:
    """Share of the gain that is kept; below zero all of it is lost, and some of the start."""
    words = []
    for value in (kept.one, kept.other):
        words.append("loses more than it gained" if value < 0 else f"keeps {percent(min(value, 1.0))}")
    lost = [word.startswith("loses") for word in words]
    if all(lost):
        return f"both {labels[0]} and {labels[1]} lose more than they gained"
    if lost[1]:
        return f"{labels[0]} {words[0]} of what it gained, {labels[1]} {words[1]}"
    of = "" if lost[0] else " of what it gained"
    end = " of its gain" if lost[0] else ""
    return f"{labels[0]} {words[0]}{of}, {labels[1]} {words[1] if lost[0] else words[1].removeprefix('keeps ')}{end}"


def _higher_first(labels: Sequence[str], found: Comparison, verb: str, at: str = "") -> str:
    """Both numbers, the higher one first: "B ends at 0.87, A at 0.45"."""
    (high, first), (low, second) = sorted(zip((found.one, found.other), labels, strict=True), reverse=True)
    return f"{first} {verb} {at}{two(high)}, {second} {at}{two(low)}"


def every_algorithm(metrics: Metrics, regime: str) -> str:
    """How many algorithms learn, and which of them lose it again."""
    if short := too_short(metrics, [regime]):
        return short
    names = in_order(metrics.methods(regime))
    arms = {name: metrics.arm(regime, name) for name in names}
    if len(names) == 1:
        return learning(metrics, regime, names)
    learners = [name for name, arm in arms.items() if 2 * arm["learned"].sum() > len(arm)]
    crashed = {name: arms[name].loc[arms[name]["learned"], "crash_iteration"].notna() for name in learners}
    falling = [name for name in learners if 2 * crashed[name].sum() > len(crashed[name])]
    if not learners:
        return f"None of {len(names)} algorithms learns in more than half of its runs"
    told = f"{len(learners)} of {len(names)} algorithms learn{'s' if len(learners) == 1 else ''} in most runs"
    if len(learners) == len(names):
        told = f"All {len(names)} algorithms learn in most runs"
    if not falling:
        none = "it does not crash" if len(learners) == 1 else "none of them crashes"
        return f"{told}; {none} in most"
    which = (
        listed([name_of(metrics, name) for name in falling])
        if len(falling) < 4
        else f"{len(falling)} of them"
    )
    return f"{told}; {which} then crash{'es' if len(falling) == 1 else ''} in most"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def stability(metrics: Metrics, regime: str) -> str:
    """How many algorithms end clearly above and below the baseline, or who ends highest."""
    if short := too_short(metrics, [regime]):
        return short
    names = in_order(metrics.methods(regime))
    if len(names) == 1:
        return learning(metrics, regime, names)
    means = {name: metrics.arm(regime, name).groupby("world_seed")["final"].mean().mean() for name in names}
    best, worst = max(names, key=means.__getitem__), min(names, key=means.__getitem__)
    ends = f"final success from {two(means[worst])} ({name_of(metrics, worst)}) to {two(means[best])} ({name_of(metrics, best)})"
    if BASELINE not in names:
        return sentence(ends)
    others = [name for name in names if name != BASELINE]
    found = [compare_arms(metrics, regime, (name, BASELINE), "final", len(others)) for name in others]
    if all(one.few for one in found):
        return f"{few_words(max(one.n_worlds for one in found))}: {ends}"
    above = sum(one.clear and one.one > one.other for one in found)
    below = sum(one.clear and one.one < one.other for one in found)
    base = name_of(metrics, BASELINE)
    if len(others) == 1:
        ends = (
            f"{base} ends at {two(means[BASELINE])}, {name_of(metrics, others[0])} at {two(means[others[0]])}"
        )
        labels = (name_of(metrics, others[0]), base)
        return sentence(found[0].say(_higher_first(labels, found[0], "ends", "at "), ends))
    if not above and not below:
        return f"No clear difference from {base} among {len(others)} algorithms: {ends}"
    count = {0: "none"}
    return (
        f"{sentence(str(count.get(above, above)))} of {len(others)} algorithms end{'s' if above == 1 else ''} clearly above "
        f"{base}, {count.get(below, below)} clearly below"
    )


@dataclass(frozen=True)
class Change:
    """Means over worlds of a quantity in the first and the last third of the runs, and whether they differ clearly."""

    early: float
    late: float
    comparison: Comparison

    def words(self, form: str, unit: str, scale: float = 1.0) -> str:
        """Rises, falls or shows no clear trend, with both means; `unit` follows the second number."""
        early, late = (form.format(scale * value) for value in (self.early, self.late))
        if early == late:
            return f"stays at {late}{unit}"
        if self.comparison.few:
            return f"goes from {early} to {late}{unit}"
        if not self.comparison.clear:
            return f"shows no clear trend ({early}, then {late}{unit})"
        return f"{'rises' if self.late > self.early else 'falls'} from {early} to {late}{unit}"


def change(metrics: Metrics, regime: str, algorithm: str, column: str, looks: int = 2) -> Change | None:
    """First against last third of the iterations since batches are as old as they get; None where nothing was recorded."""
    curves = curves_of(metrics, regime, algorithm, column)
    curves = curves[curves.index >= queue_filled(metrics, regime)]
    if curves.empty or len(curves) < 3:
        return None
    n = len(curves) // 3
    parts = [curves.iloc[:n].mean(), curves.iloc[-n:].mean()]
    early, late = (part.groupby("world").mean().dropna().to_dict() for part in parts)
    found = compare(early, late, looks)
    return Change(found.one, found.other, found) if found.n_worlds else None


def trend_of(
    metrics: Metrics, regime: str, column: str, what: str, form: str, unit: str, scale: float = 1.0
) -> str:
    """How a quantity changes in the course of training, for the two algorithms that `pair` chooses."""
    if short := too_short(metrics, [regime]):
        return short
    told, few = [], None
    for name in pair(metrics, regime):
        found = change(metrics, regime, name, column)
        if found is None:
            continue
        label = name_of(metrics, name)
        told.append(f"{label}'s {f'{what} ' if not told else ''}{found.words(form, unit, scale)}")
        few = found.comparison.n_worlds if found.comparison.few else few
    if not told:
        return sentence(f"No {what} was recorded")
    return sentence(f"{few_words(few)}: {', '.join(told)}" if few is not None else ", ".join(told))


def spikes(metrics: Metrics, regime: str) -> str:
    """The largest gradient norm of a run against its median: of the two algorithms that `pair` chooses."""
    if short := too_short(metrics, [regime]):
        return short
    names = pair(metrics, regime)
    ratios = []
    for name in names:
        column = "gradient_norm_max" if "gradient_norm_max" in metrics.iterations else "gradient_norm"
        top = curves_of(metrics, regime, name, column).max()
        ratio = np.log(top / curves_of(metrics, regime, name, "gradient_norm").median())
        ratios.append(ratio.replace([np.inf, -np.inf], np.nan).groupby("world").mean().dropna().to_dict())
    labels = [name_of(metrics, name) for name in names]
    if len(names) == 1:
        typical = math.exp(np.mean(list(ratios[0].values()))) if ratios[0] else math.nan
        return sentence(f"{labels[0]}'s largest gradient norm is {typical:.1f} times its median")
    found = compare(*ratios)
    if not found.n_worlds:
        return "Gradient norms of runs that share no world"
    times = [f"{math.exp(value):.1f} times" for value in (found.one, found.other)]
    numbers = f"{labels[0]}'s largest gradient norm is {times[0]} its median, {labels[1]}'s {times[1]}"
    return sentence(found.say(numbers, numbers))


def coarser(metrics: Metrics, regime: str, families: Sequence[Mapping[str, str]]) -> str:
    """In how many steps to a coarser ratio success ends higher, and clearly higher or lower. families: granularity -> algorithm."""
    if short := too_short(metrics, [regime]):
        return short
    steps = [
        names
        for family in families
        for names in zip(list(family.values()), list(family.values())[1:], strict=False)
    ]
    found = [compare_arms(metrics, regime, names, "final", len(steps)) for names in steps]
    if len(steps) == 1:
        labels = [name_of(metrics, name) for name in steps[0]]
        told = _higher_first(labels, found[0], "ends", "at ")
        return sentence(found[0].say(told, told))
    if all(one.few for one in found):
        higher = sum(one.other > one.one for one in found)
        few = few_words(max(one.n_worlds for one in found))
        return f"{few}: a coarser ratio ends higher in {higher} of {len(steps)} comparisons"
    better = sum(one.clear and one.other > one.one for one in found)
    worse = sum(one.clear and one.other < one.one for one in found)
    if not better and not worse:
        return f"No clear difference between coarser and finer ratios in {len(steps)} comparisons"
    higher = sum(one.other > one.one for one in found)
    told = f"A coarser ratio ends higher in {higher or 'none'} of {len(steps)} comparisons"
    clearly = [f"clearly {word} in {n}" for word, n in (("higher", better), ("lower", worse)) if n]
    return ", ".join([told, *clearly])
