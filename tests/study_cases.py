"""The study's plan, read from its preset, and made-up metrics for all of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

from stppo.results.resampling import Replicate
from stppo.results.runs import Metrics
from stppo.study.outcomes import Arm
from tests.synthetic_runs import Behaviour, make_metrics

PRESET = Path(__file__).parents[1] / "configs" / "preset" / "study.yaml"


@cache
def planned_replicates() -> dict[Arm, list[Replicate]]:
    """Replicates of every arm of the preset. Their number says the world and the warm start: 1121 is 11, 112."""
    pipeline = yaml.safe_load(PRESET.read_text(encoding="utf-8"))["pipeline"]
    arms: dict[Arm, list[Replicate]] = {}
    for entry, plan in pipeline["regimes"].items():
        for name in plan["algorithms"]:
            of = arms.setdefault(Arm(plan.get("regime", entry), name), [])
            of += [Replicate(seed // 100, seed // 10, seed) for seed in plan["seeds"]]
    return arms


def study_metrics(cure: bool = True, keep: int | None = None) -> Metrics:
    """Made-up metrics of the whole plan: token PPO collapses and, with `cure`, no stabilised arm does.

    keep: of every arm only its first runs.
    """
    ill = Behaviour(risk=5 / 6)
    well = Behaviour(final=0.45) if cure else ill
    arms = planned_replicates()
    stable = ("st_ppo", "s_ppo", "so_grpo", "gspo", "so_ppo_ctn", "s_grpo")
    behaviours = {}
    for arm in arms:
        calm = arm.regime in ("ON_POLICY", "BEST") or arm.regime.startswith("E2") or arm.regime == "STALE0"
        safe = calm or arm.algorithm.startswith(stable)
        behaviours[arm] = Behaviour(final=0.42, value_error=0.3) if calm else well if safe else ill
    return make_metrics(behaviours, {arm: of[:keep] for arm, of in arms.items()}, iterations=40)
