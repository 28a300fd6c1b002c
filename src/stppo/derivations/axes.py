"""The algorithms as points of one space, read from their configs: the axes table, and figure 1 drawn from
it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import pandas as pd
import torch

from stppo.config import algorithms as registry
from stppo.config.composition import algorithm_section
from stppo.config.files import Config
from stppo.config.loading import build
from stppo.figures import schematic
from stppo.figures.style import Plot
from stppo.objectives import (
    Clip,
    ClippingBiasNorm,
    ClipRule,
    CtnKL,
    MinClip,
    NoStabilizer,
    Objective,
    Ratio,
    Stabilizer,
)
from stppo.trajectories import Layout

AXES = (
    "credit",
    "pooling",
    "whiten",
    "ratio",
    "aggregation",
    "clip",
    "surrogate",
    "stabiliser",
    "loss aggregation",
)

PANELS = ("token_ppo", "turn_ppo", "s_ppo", "st_ppo")
# The worked example of figure 1, made up: one trajectory of three turns, a line each, its tokens' ratios
# pi / pi_old and the sign of the turn's advantage. E stands for an environment token.
E = None
TOKEN_RATIOS = (
    *(E, E, E, 1.10, 0.95, 1.60, 1.05),
    *(E, E, E, 0.70, 1.15, 0.60, 0.85, 0.75),
    *(E, E, E, 0.90, 1.30, 1.05),
)
TURN_ADVANTAGES = (1.0, -1.0, 1.0)
# Of every token, for the rules that read them: its probability under pi_old, the entropy where it was drawn,
# and how far from log pi_old to log pi the proximal policy is.
PROBABILITY, ENTROPY, PROXIMAL = 0.25, 1.0, 0.5


def axes_table(algorithms: Iterable[str] | None = None) -> pd.DataFrame:
    """One row per algorithm with a file (or of those given), indexed by config name, in figures' order.

    Columns, all text: `label` (name in figures), `v1`, `v2` (names in the paper's versions, empty where it
    has none), the axes (`AXES`: credit, pooling, whiten, ratio, aggregation, clip, surrogate, stabiliser,
    loss aggregation) as the composed YAML has them, and `source`. A file that only renames another algorithm
    has no row of its own. Raises ConfigError for an unknown algorithm or an invalid config.
    """
    order = [row.name for row in registry.algorithms()]
    given = order if algorithms is None else set(algorithms)
    rows = {}
    for name in sorted(given, key=lambda name: (order.index(name) if name in order else len(order), name)):
        point = _point(_objective(algorithm_section(name)))
        its = registry.look(name)
        rows[name] = {"label": its.label, "v1": its.v1, "v2": its.v2, **point, "source": its.source}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("algorithm")


def objectives_figure() -> Plot:
    """Figure 1 (`objectives`): a worked example under the algorithms of `PANELS`, above the axes of the
    paper's algorithms and your own; the related methods (`algorithms.RIVALS`) stand in `axes_table` alone.

    The example is made up; its ratios, clipped terms, gradients and divisors are computed by
    `stppo.objectives` from the algorithms' configs. The plot's data is the axes table, its further table
    `example` the worked examples one below the other.
    """
    shown = [row.name for row in registry.algorithms() if row.name not in registry.RIVALS]
    return schematic.objectives_figure(
        axes_table(shown), {name: worked_example(name) for name in PANELS}, AXES
    )


def worked_example(algorithm: str) -> pd.DataFrame:
    """The example's trajectory under an algorithm, one row per token, environment tokens with NaN.

    Columns: `turn` (0, 1, 2; -1 for the environment), `token_ratio` and `advantage` as given, `low` and
    `high` (the clip range), `ratio` (the one that the objective uses), `clipped`, `gradient` (of the
    objective to maximise, by the token's log-probability, times |y|), `divisor` (of the gradient, from the
    norm that the stabiliser reads, over log-probabilities of this one trajectory; the same in every row) and
    `step` = gradient / divisor.
    """
    objective = _objective(algorithm_section(algorithm))
    agent = torch.tensor([[ratio is not None for ratio in TOKEN_RATIOS]])
    layout = Layout.of(agent)
    ratios = torch.tensor([ratio for ratio in TOKEN_RATIOS if ratio is not None], dtype=torch.float64)
    advantages = torch.tensor(TURN_ADVANTAGES, dtype=torch.float64)[layout.turns]
    log_ratio = ratios.log().requires_grad_()
    known = {
        "behaviour_logprobs": torch.full_like(ratios, PROBABILITY).log(),
        "entropy": torch.full_like(ratios, ENTROPY),
        "proximal": PROXIMAL * ratios.log(),
    }
    surrogate = objective.evaluate(log_ratio, advantages, layout, **known)
    (bias,) = torch.autograd.grad(surrogate.bias_surrogate, log_ratio, retain_graph=True)
    (gradient,) = torch.autograd.grad(-surrogate.loss, log_ratio)
    tokens = objective.tokens(log_ratio.detach(), advantages, layout, **known)
    measured = {"gradient_norm": gradient.norm(), "effective_sample_size": torch.ones(())}
    norm = measured.get(getattr(objective.stabilizer, "estimator", ""), bias.norm())
    terms, bounds = objective.terms(tokens)
    frame = pd.DataFrame({"position": range(agent.shape[1]), "turn": -1})
    at = layout.positions.numpy()
    frame.loc[at, "turn"] = layout.turns.numpy()
    for column, values in {
        "token_ratio": ratios,
        "advantage": advantages,
        "ratio": tokens.ratio,
        "clipped": terms.clipped.double(),
        "gradient": gradient * len(at),
    }.items():
        frame.loc[at, column] = values.numpy()
    frame["low"], frame["high"] = float(bounds.low.mean()), float(bounds.high.mean())
    frame["divisor"] = objective.stabilizer.divisor(norm.item())
    frame["step"] = frame["gradient"] / frame["divisor"]
    return frame


def _objective(composed: Config) -> Objective:
    return build(composed["objective"], "algorithm.objective")


def _point(objective: Objective) -> dict[str, str]:
    """The objective's value on each of `AXES`, in words."""
    credit, ratio = objective.credit, objective.ratio
    # A mean over one token is the token's; a ratio of another kind says by its name what it does.
    aggregation = getattr(ratio, "aggregation", _words(ratio))
    return {
        "credit": _words(credit, leave_out=("pooling", "whiten", "center", "eps")),
        "pooling": credit.pooling.replace("_", " "),
        "whiten": "yes" if credit.whiten else "centred" if credit.center else "no",
        "ratio": ratio.granularity,
        "aggregation": "–" if type(ratio) is Ratio and ratio.granularity == "token" else aggregation,
        "clip": _clip(objective.clip),
        "surrogate": "min" if objective.surrogate == MinClip() else _words(objective.surrogate),
        "stabiliser": _stabiliser(objective.stabilizer),
        "loss aggregation": objective.loss_aggregation.replace("_", " "),
    }


def _words(rule: Any, leave_out: tuple[str, ...] = ()) -> str:
    """A rule's class name as words, with its options: `TokenGAE` -> token GAE (γ 1, λ 1)."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(rule).__name__).split()
    name = " ".join(word if word.isupper() else word.lower() for word in words)
    known = {"gamma": "γ {}", "lam": "λ {}", "group_size": "groups of {}", "returns": "{} returns"}
    options = [
        known.get(field.name, f"{field.name.replace('_', ' ')} {{}}").format(
            _value(getattr(rule, field.name))
        )
        for field in (dataclasses.fields(rule) if dataclasses.is_dataclass(rule) else ())
        if field.name not in leave_out
    ]
    return f"{name} ({', '.join(options)})" if options else name


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace("_", " ")


def _clip(clip: ClipRule) -> str:
    if type(clip) is not Clip:
        return _words(clip)
    text = f"[{1 - clip.epsilon_low:g}, {1 + clip.epsilon_high:g}]"
    return text if clip.clip_on == "token" else f"{text} on {clip.clip_on} sums"


def _stabiliser(stabilizer: Stabilizer) -> str:
    if isinstance(stabilizer, NoStabilizer):
        return "none"
    if isinstance(stabilizer, ClippingBiasNorm):
        c0 = f"{stabilizer.c0:g}"
        forms = {"max": f"max(1, ‖C‖/{c0})", "one_plus": f"(1 + ‖C‖/{c0})", "floor": f"max(‖C‖, {c0})"}
        forms["bare"] = "‖C‖"
        estimate = "" if stabilizer.estimator == "exact" else f", {stabilizer.estimator} estimate"
        of_step = ", of the step" if stabilizer.divides == "step" else ""
        over = " over its running median" if stabilizer.over_median else ""
        return f"÷ {forms[stabilizer.form]}{over}{estimate}{of_step}"
    if isinstance(stabilizer, CtnKL):
        pair = "π‖π_old" if stabilizer.kl == "policy_to_behaviour" else "π_old‖π"
        product = "E[share · KL" if stabilizer.formula == "inside" else "E[share] · E[KL"
        return f"+ {stabilizer.coefficient:g} · {product}({pair})]"
    return _words(stabilizer)
