"""Policy-gradient objectives for multi-turn agents; needs torch and `stppo.trajectories` only."""

from stppo.objectives.advantages import (
    BatchBaseline,
    Credit,
    CreditRule,
    GroupCentred,
    GroupNormalised,
    LeaveOneOut,
    TokenGAE,
    TurnGAE,
    TurnReturnMinusValue,
)
from stppo.objectives.clipping import Clip, ClippedTerms
from stppo.objectives.objective import Objective, Surrogate, estimated_bias_norms, loss_weights
from stppo.objectives.ratios import Ratio, kl_behaviour_to_policy, kl_policy_to_behaviour
from stppo.objectives.stabilizers import ClippingBiasNorm, CtnKL, NoStabilizer, Stabilizer

__all__ = [
    "BatchBaseline",
    "Clip",
    "ClippedTerms",
    "ClippingBiasNorm",
    "Credit",
    "CreditRule",
    "CtnKL",
    "GroupCentred",
    "GroupNormalised",
    "LeaveOneOut",
    "NoStabilizer",
    "Objective",
    "Ratio",
    "Stabilizer",
    "Surrogate",
    "TokenGAE",
    "TurnGAE",
    "TurnReturnMinusValue",
    "estimated_bias_norms",
    "kl_behaviour_to_policy",
    "kl_policy_to_behaviour",
    "loss_weights",
]
