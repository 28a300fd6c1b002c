"""The table of what a preset would train and cost."""

from stppo.config.composition import compose
from stppo.config.plan import plan, seconds
from stppo.config.planned import planned_runs


def cost(*overrides):
    return seconds(compose(list(overrides)))


def test_every_planned_run_is_counted_once():
    groups = plan("laptop")
    runs = planned_runs("laptop")
    assert sum(group.runs for group in groups) == len(runs)
    assert {(g.regime, g.algorithm) for g in groups} == {(r.regime, r.algorithm) for r in runs}


def test_cost_grows_with_what_a_run_does():
    base = cost("algorithm=token_ppo")
    assert cost("algorithm=token_ppo", "training.epochs=2") < base
    assert cost("algorithm=s_ppo") > base > cost("algorithm=grpo")
    assert cost("algorithm=token_ppo", "training.critic_epochs=8") > base
    assert cost("algorithm=token_ppo", "training.values=monte_carlo") > 2 * base
    assert cost("algorithm=token_ppo", "evaluation.value_error_every=8") > base
    assert cost("algorithm=grpo", "training.values=monte_carlo") == cost("algorithm=grpo"), (
        "no critic, no values"
    )


def test_a_preset_that_says_what_an_iteration_costs_is_planned_by_that():
    (token, _) = plan("smollm")
    config = compose(["preset=smollm"])
    per_iteration = config["pipeline"]["core_seconds_per_iteration"]
    assert token.hours == per_iteration * config["training"]["iterations"] / 3600
    assert 0.2 < token.hours < 1
