"""Policy-gradient objectives for multi-turn agents; needs torch and `stppo.trajectories` only.

An `Objective` is credit x ratio x clip x surrogate x stabiliser x loss aggregation. Each part is a rule: a
class with one method to write, in any module, named by `_target_` in an algorithm's YAML.

| part | base | method | shipped |
| --- | --- | --- | --- |
| credit: advantages from rewards | CreditRule | estimate | TokenGAE, TurnGAE, GroupNormalised, ... |
| ratio: one a token, turn, sentence or sequence | RatioRule | ratio | Ratio |
| clip: the range in which a ratio is trusted | ClipRule | bounds | Clip |
| surrogate: each token's term, and what the clip does to it | SurrogateRule | terms | MinClip, Gate |
| the same, of the form sg(f) A log pi | Weight | factor | ClippedWeight, Mask |
| stabiliser: divides the gradient | Divisor | divisor | ClippingBiasNorm |
| stabiliser: adds to the loss | Penalty | penalty | CtnKL |
| stabiliser: weighs each sample | SampleWeight | weights | OwnClippingBias |
| the same, as a mean over tokens | TokenPenalty | costs | |

The rules of related methods are in `stppo.objectives.rivals` and `stppo.objectives.rivals_2026`.
Clip, surrogate and penalty see `Tokens`: everything known of all agent tokens of the minibatch.
"""

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
from stppo.objectives.gradient import backward
from stppo.objectives.objective import Objective, Surrogate, estimated_bias_norms, loss_weights
from stppo.objectives.ratios import Ratio, RatioRule, kl_behaviour_to_policy, kl_policy_to_behaviour
from stppo.objectives.stabilizers import (
    ClippingBiasNorm,
    CtnKL,
    Divisor,
    NoStabilizer,
    OwnClippingBias,
    Penalty,
    SampleWeight,
    Stabilizer,
    TokenPenalty,
)
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
    "OwnClippingBias",
    "Penalty",
    "Ratio",
    "RatioRule",
    "SampleWeight",
    "Stabilizer",
    "Surrogate",
    "SurrogateRule",
    "Terms",
    "TokenGAE",
    "TokenPenalty",
    "Tokens",
    "TurnGAE",
    "TurnReturnMinusValue",
    "Weight",
    "backward",
    "estimated_bias_norms",
    "kl_behaviour_to_policy",
    "kl_policy_to_behaviour",
    "loss_weights",
]
