"""What a preset would train and about how long it takes, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass

from stppo.config.files import Config
from stppo.config.planned import planned_runs

# Seconds on one core of the machine of results/reference/speed (policy tiny, world synthetic, compiled
# kernels), per iteration of 128 trajectories: roll-out and scoring; a pass of the critic; of the actor, and
# the factor of an exact clipping-bias norm; an evaluation of 256 questions; one Monte-Carlo continuation.
ROLL_OUT, CRITIC_PASS, ACTOR_PASS, EXACT_NORM, EVALUATION, CONTINUATION = 0.14, 0.05, 0.058, 1.25, 0.25, 8e-4
TURNS = 3.5  # of a trajectory, where continuations start


@dataclass(frozen=True)
class PlannedGroup:
    """The runs of one arm in one regime; hours are those of one core."""

    regime: str
    algorithm: str
    runs: int
    hours: float


def seconds(config: Config) -> float:
    """Rough seconds of one core that a run takes; another policy or world than tiny and synthetic differs,
    unless its preset says what an iteration costs, evaluations included
    (`pipeline.core_seconds_per_iteration`)."""
    measured = (config.get("pipeline") or {}).get("core_seconds_per_iteration")
    if measured is not None:
        return config["training"]["iterations"] * measured
    training, evaluation = config["training"], config["evaluation"]
    objective = config["algorithm"]["objective"]
    exact = objective["stabilizer"].get("estimator") == "exact"
    iteration = ROLL_OUT + training["epochs"] * ACTOR_PASS * (EXACT_NORM if exact else 1)
    if "group_size" not in objective["credit"]:
        played = 128 * TURNS * training["monte_carlo_continuations"] * CONTINUATION
        passes = training["critic_epochs"] * CRITIC_PASS
        iteration += played if training["values"] == "monte_carlo" else passes
    iteration *= training["trajectories_per_iteration"] / 128
    iteration += EVALUATION / evaluation["every"] * evaluation["questions"] / 256
    if evaluation["value_error_every"]:
        played = evaluation["value_states"] * evaluation["value_continuations"]
        iteration += played * CONTINUATION / evaluation["value_error_every"]
    return training["iterations"] * iteration


def plan(preset: str, overrides: list[str] | None = None) -> list[PlannedGroup]:
    """The runs of a preset's pipeline by regime and arm, in planned order; ConfigError as in `planned_runs`,
    and for overrides that training would refuse."""
    groups: dict[tuple[str, str], list[float]] = {}
    for run in planned_runs(preset, overrides):
        cost = groups.setdefault((run.regime, run.algorithm), [])
        if overrides and not cost:
            from stppo.config.loading import settings_of  # it takes the seconds of torch

            settings_of(run.config)
        # A replicate is another seed of the same work: compose the first alone.
        cost.append(cost[0] if cost else seconds(run.config))
    return [PlannedGroup(*name, len(cost), sum(cost) / 3600) for name, cost in groups.items()]
