"""An exact oracle: a multi-turn token MDP small enough to enumerate, everything in float64."""

from stppo.oracle.ascent import ascend
from stppo.oracle.comparison import BatchGradient, Quality, gradient_quality, limiting_advantages
from stppo.oracle.estimators import (
    UNCLIPPED,
    Decomposition,
    SurrogateGradient,
    decompose,
    expected_surrogate,
    surrogate_gradient,
)
from stppo.oracle.exact import Oracle
from stppo.oracle.mdp import TokenMDP, Tree
from stppo.oracle.policies import NeuralSoftmax, Policy, TabularSoftmax

__all__ = [
    "UNCLIPPED",
    "BatchGradient",
    "Decomposition",
    "NeuralSoftmax",
    "Oracle",
    "Policy",
    "Quality",
    "SurrogateGradient",
    "TabularSoftmax",
    "TokenMDP",
    "Tree",
    "ascend",
    "decompose",
    "expected_surrogate",
    "gradient_quality",
    "limiting_advantages",
    "surrogate_gradient",
]
