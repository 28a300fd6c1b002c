"""Arms and groups: read from a preset's YAML, and the draft study's own."""

import pytest

from stppo.config.composition import compose
from stppo.config.files import ConfigError
from stppo.config.planned import pipeline_of, planned_runs
from stppo.study.arms import groups, groups_of, labels


def preset(groups=None, arms=None):
    """A composed preset, as far as arms and groups read it."""
    plan = {"algorithms": ["token_ppo", "turn_ppo", "s_ppo", "st_ppo"], "seeds": [1]}
    regimes = {"OFF_POLICY": plan, "LATER": {"regime": "OFF_POLICY", "algorithms": ["grpo"], "seeds": [1]}}
    return {"pipeline": {"arms": arms or {}, "regimes": regimes}, "study": {"groups": groups or {}}}


FACTORS = {"ratio": ["token", "turn"], "divisor": ["none", "norm"]}
CORNERS = ["token_ppo", "s_ppo", "turn_ppo", "st_ppo"]
FACTORIAL = {"question": "Which?", "arms": CORNERS, "factors": FACTORS}


def test_main_effect_is_recovered_from_additive_truth():
    """Values a + 3 ratio + 5 divisor + 7 ratio divisor: the effect of the ratio is 3 + 7 / 2."""
    group = groups_of(preset({"f": FACTORIAL}))["f"]
    truth = {"token_ppo": 1.0, "s_ppo": 1 + 5, "turn_ppo": 1 + 3, "st_ppo": 1 + 3 + 5 + 7}
    effect = {f: sum(w * truth[arm] for arm, w in group.main_effect(f).items()) for f in FACTORS}
    assert effect == {"ratio": 3 + 3.5, "divisor": 5 + 3.5}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": CORNERS[:3]}, "study.groups.f.arms: 3 arms for 4 cells of ratio x divisor"),
        ({"regimes": ["FRESH"]}, "study.groups.f: pipeline.regimes plans no token_ppo in FRESH"),
        ({"arms": [*CORNERS[:3], "gspo"]}, "plans no gspo in OFF_POLICY"),
        ({"colour": "red"}, "study.groups.f.colour: unknown key"),
    ],
)
def test_wrong_group_names_its_key(change, said):
    with pytest.raises(ConfigError, match=said):
        groups_of(preset({"f": FACTORIAL | change}))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (["algorithm=grpo"], r"pipeline.arms.a = \["),
        ({"overrides": ["algorithm=grpo"]}, "pipeline.arms.a.label"),
        ({"label": "A", "overrides": "algorithm=grpo"}, "pipeline.arms.a.overrides = 'algorithm=grpo'"),
        ({"label": "A", "overrides": ["training.epochs=2"]}, "algorithm=... must be among them"),
        ({"label": "A", "overrides": ["algorithm=st_pppo"]}, "a.overrides = .* no algorithm.*mean st_ppo"),
        ({"label": "A", "overrides": ["algorithm=grpo"], "color": 1}, "pipeline.arms.a.color: unknown key"),
    ],
)
def test_wrong_arm_names_its_key(entry, said):
    with pytest.raises(ConfigError, match=said):
        pipeline_of(preset(arms={"a": entry}))


# ---- the draft study ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs():
    return planned_runs("study")


def test_groups_of_the_study_are_planned_and_named():
    found, called = groups("study"), labels("study")
    assert {arm for group in found.values() for arm in group.arms} <= set(called)
    assert len(set(called.values())) == len(called), "two arms of one name cannot be told apart"
    assert {factor: len(levels) for factor, levels in found["factorial_ppo"].factors.items()} == {
        "ratio": 2,
        "credit": 2,
        "divisor": 2,
    }


def test_every_corner_is_what_its_levels_say():
    arms = pipeline_of(compose(["preset=study"])).arms
    for name in ("factorial_ppo", "factorial_grpo"):
        for arm, levels in groups("study")[name].levels().items():
            made = arms[arm].overrides if arm in arms else [f"algorithm={arm}"]
            objective = compose(["preset=study", *made])["algorithm"]["objective"]
            assert objective["ratio"]["granularity"] == levels["ratio"], arm
            assert objective["credit"]["pooling"] == levels.get("credit", "token").replace(" ", "_"), arm
            divides = objective["stabilizer"]["_target_"].endswith("ClippingBiasNorm")
            assert divides == (levels["divisor"] == "clipping bias"), arm


def test_every_seed_is_a_world_of_its_own(runs):
    for run in [runs[0], runs[-1]]:
        config = run.config
        assert config["world"]["seed"] == config["warm_start_seed"] == config["seed"] == run.seed


def test_a_placebo_takes_divisors_of_a_planned_run_of_the_algorithm_that_divides(runs):
    sources = {
        override.partition("/runs/")[2]
        for run in runs
        for override in run.overrides
        if override.startswith("training.divisors.from_run")
    }
    assert sources and sources <= {run.name for run in runs}
    assert {source.split("/")[1] for source in sources} == {"s_ppo", "st_ppo", "so_grpo"}
