"""configs/algorithm: nine points of the product credit x ratio x clip x stabiliser x loss aggregation."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from stppo.objectives import Objective
from stppo.trajectories import Trajectories
from tests.objectives_cases import mixed_batch

CONFIGS = Path(__file__).parents[1] / "configs"
GEOMETRIC_TURN = ("turn", "geometric")
# name: credit, ratio, stabiliser, loss aggregation, epsilon low and high
TABLE = {
    "token_ppo": ("TokenGAE", ("token", "geometric"), "NoStabilizer", "trajectory_mean", 0.2, 0.2),
    "turn_ppo": ("TokenGAE", GEOMETRIC_TURN, "NoStabilizer", "trajectory_mean", 0.2, 0.2),
    "s_ppo": ("TokenGAE", ("token", "geometric"), "ClippingBiasNorm", "trajectory_mean", 0.2, 0.2),
    "st_ppo": ("TokenGAE", GEOMETRIC_TURN, "ClippingBiasNorm", "trajectory_mean", 0.2, 0.2),
    "so_ppo_ctn": ("TurnReturnMinusValue", ("turn", "arithmetic"), "CtnKL", "turn_mean", 0.2, 0.2),
    "grpo": ("GroupNormalised", ("token", "geometric"), "NoStabilizer", "trajectory_mean", 0.2, 0.2),
    "so_grpo": ("GroupNormalised", GEOMETRIC_TURN, "ClippingBiasNorm", "trajectory_mean", 0.2, 0.2),
    "so_grpo_ctn": ("GroupNormalised", ("turn", "arithmetic"), "CtnKL", "turn_mean", 0.2, 0.2),
    "gspo": ("GroupNormalised", ("sequence", "geometric"), "NoStabilizer", "trajectory_mean", 3e-4, 4e-4),
}


def load(name, overrides=()):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(f"algorithm/{name}", overrides=list(overrides)).algorithm


@pytest.mark.parametrize("name", TABLE)
def test_each_algorithm_is_its_row_of_the_table(name):
    config = load(name)
    assert config.name == name
    objective = instantiate(config.objective)
    assert isinstance(objective, Objective)
    got = (
        type(objective.credit).__name__,
        (objective.ratio.granularity, objective.ratio.aggregation),
        type(objective.stabilizer).__name__,
        objective.loss_aggregation,
        objective.clip.epsilon_low,
        objective.clip.epsilon_high,
    )
    assert got == TABLE[name]
    assert objective.credit.needs_critic is ("ppo" in name)
    assert objective.credit.group_size == (1 if "ppo" in name else 8)
    assert objective.credit.whiten is ("ppo" in name)
    if "grpo" in name:
        assert objective.credit.returns == ("turn" if name == "so_grpo_ctn" else "trajectory")


def test_there_are_no_others_but_the_alias_and_options_do_not_drift():
    files = {path.stem for path in (CONFIGS / "algorithm").glob("*.yaml")}
    assert set(TABLE) | {"so_ppo"} <= files
    # Where two algorithms use the same class for an axis, they use it with the same options: only the axes
    # differ. Clip's epsilon (gspo), the ratio and the group returns are axes themselves.
    seen = {}
    for name in TABLE:
        objective = OmegaConf.to_container(load(name).objective)
        assert set(objective) == {
            "_target_",
            "credit",
            "ratio",
            "clip",
            "surrogate",
            "stabilizer",
            "loss_aggregation",
        }
        for part in ("credit", "stabilizer"):
            options = {k: v for k, v in objective[part].items() if k != "returns"}
            assert seen.setdefault(options["_target_"], options) == options, name


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.objective.clip.epsilon_low=0", "Clip.epsilon_low=0"),
        ("algorithm.objective.clip.epsilon_high=-0.1", "Clip.epsilon_high=-0.1"),
        ("algorithm.objective.ratio.granularity=word", "must be one of token, turn, sentence, sequence"),
        ("algorithm.objective.credit.pooling=turn", "must be one of token, turn_mean, turn_sum"),
    ],
)
def test_bad_overrides_are_refused_by_name(override, message):
    with pytest.raises(Exception, match=message):
        instantiate(load("st_ppo", [override]).objective)


def test_float32_training_dtype_is_kept():
    batch = mixed_batch()
    floats = {k: v.float() if v.is_floating_point() else v for k, v in batch.state_dict().items()}
    batch = Trajectories(**floats)
    objective = instantiate(load("st_ppo").objective)
    credit = objective.credit(batch, torch.zeros(batch.tokens.shape))
    logprobs = (batch.behaviour_logprobs + 0.3).requires_grad_()
    got = objective(logprobs, batch, credit.advantages)
    assert credit.advantages.dtype == got.loss.dtype == got.bias_surrogate.dtype == torch.float32
