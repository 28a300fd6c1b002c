"""The best of an arm's settings, chosen without looking at the world that it is judged in."""

from __future__ import annotations

from collections.abc import Sequence

from stppo.stats import Values


def best_elsewhere(settings: Sequence[Values]) -> dict[int, tuple[float, int]]:
    """For each world the number of the setting with the highest mean over the *other* worlds, and which one
    that is (the first of equals). So trying more settings does not flatter an arm.

    settings: world -> the arm's number, one mapping a setting. ValueError where they share fewer than two
    worlds.
    """
    worlds = sorted(set.intersection(*(set(of) for of in settings))) if settings else []
    if len(worlds) < 2:
        raise ValueError(
            f"the settings have {len(worlds)} worlds in common, two are needed to choose elsewhere"
        )

    def chosen(world: int) -> int:
        return max(range(len(settings)), key=lambda i: sum(settings[i][w] for w in worlds if w != world))

    return {world: (settings[chosen(world)][world], chosen(world)) for world in worlds}
