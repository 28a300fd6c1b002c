"""Policy-gradient objectives for multi-turn agents; needs torch and `stppo.trajectories` only."""

from stppo.objectives.advantages import (
    BatchBaseline,
    Credit,
    CreditRule,
    Estimate,
    GroupCentred,
    GroupNormalised,
    LeaveOneOut,
    TokenGAE,
    TurnGAE,
    TurnReturnMinusValue,
)
from stppo.objectives.clipping import Bounds, Clip, ClipRule
from stppo.objectives.objective import Objective, Surrogate, estimated_bias_norms, loss_weights
from stppo.objectives.ratios import Ratio, RatioRule, kl_behaviour_to_policy, kl_policy_to_behaviour
from stppo.objectives.stabilizers import ClippingBiasNorm, CtnKL, Divisor, NoStabilizer, Penalty, Stabilizer
from stppo.objectives.surrogates import ClippedWeight, Gate, Mask, MinClip, SurrogateRule, Terms, Weight
from stppo.objectives.tokens import Tokens

__all__ = [
    "BatchBaseline",
    "Bounds",
    "Clip",
    "ClipRule",
    "ClippedWeight",
    "ClippingBiasNorm",
    "Credit",
    "CreditRule",
    "CtnKL",
    "Divisor",
    "Estimate",
    "Gate",
    "GroupCentred",
    "GroupNormalised",
    "LeaveOneOut",
    "Mask",
    "MinClip",
    "NoStabilizer",
    "Objective",
    "Penalty",
    "Ratio",
    "RatioRule",
    "Stabilizer",
    "Surrogate",
    "SurrogateRule",
    "Terms",
    "TokenGAE",
    "Tokens",
    "TurnGAE",
    "TurnReturnMinusValue",
    "Weight",
    "estimated_bias_norms",
    "kl_behaviour_to_policy",
    "kl_policy_to_behaviour",
    "loss_weights",
]
