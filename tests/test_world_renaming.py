"""Does a policy read, or does it remember? The same policy on new facts behind the same names."""

import pytest

from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.rollout.engines import make_rollout
from stppo.training.metrics import evaluate
from stppo.training.warm_start import load_warm_start, warm_start

# Cleaner demonstrations than a run's: a policy that succeeds more often shows a difference more clearly.
OVERRIDES = [
    "preset=laptop",
    "world.held_out=0.3",
    "world.n_validation=1024",
    "world.n_test=1024",
    "warm_start.target_success=0.25",
    "warm_start.demonstrations=4096",
    "warm_start.final_samples=256",
    "warm_start.noise={early_answer: 0.1, wrong_entity: 0.05, malformed: 0.05}",
]


@pytest.mark.slow
def test_new_facts_behind_the_same_names_hardly_change_success(tmp_path):
    config = compose(OVERRIDES)
    warm_start(load(config), tmp_path, progress=False)
    policy, *_ = load_warm_start(tmp_path)
    rollout = load(config).settings.rollout
    success = {}
    for facts_seed in ("null", 1):
        renamed = compose([*OVERRIDES, f"world.facts_seed={facts_seed}"])
        world = build(renamed["world"], "world")
        sampler = make_rollout(world.environment, world.tokenizer, rollout, policy).for_evaluation()
        asked = world.questions("validation") + world.questions("test")
        row, _ = evaluate(sampler, policy, asked, greedy=True, seed=0)
        success[facts_seed] = row["success"]
    assert success["null"] > 0.3  # there is something to lose
    assert success[1] == pytest.approx(success["null"], abs=0.05)
