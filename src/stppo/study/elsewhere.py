"""The best of an arm's settings, chosen without looking at the world that it is judged in."""

from __future__ import annotations

from collections.abc import Sequence

from stppo.stats import Values


def best_elsewhere(settings: Sequence[Values], by: Sequence[Values] | None = None) -> dict[int, float]:
    """For each world the number of the setting with the highest mean of `by` over the *other* worlds (the
    first of equals). So trying more settings does not flatter an arm.

    settings: world -> the arm's number, one mapping a setting; by: likewise what is chosen by (default: the
    same). ValueError where all together share fewer than two worlds."""
    by = settings if by is None else by
    worlds = sorted(set.intersection(*(set(of) for of in (*settings, *by)))) if settings else []
    if len(worlds) < 2:
        raise ValueError(
            f"the settings have {len(worlds)} worlds in common, two are needed to choose elsewhere"
        )

    def chosen(world: int) -> int:
        return max(range(len(settings)), key=lambda i: sum(by[i][w] for w in worlds if w != world))

    return {world: settings[chosen(world)][world] for world in worlds}
