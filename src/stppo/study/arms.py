"""Which arms of the study answer one question together, and what its regimes vary.

Names are those of `configs/preset/study.yaml` (a test holds the two against each other); other presets simply have
none of them.
"""

from __future__ import annotations

from typing import NamedTuple

MAIN, ON_POLICY, LONG, BEST = "MAIN", "ON_POLICY", "LONG", "BEST"
PPO_VARIANTS = ("token_ppo", "turn_ppo", "s_ppo", "st_ppo")
NINE = (*PPO_VARIANTS, "so_ppo_ctn", "grpo", "so_grpo", "so_grpo_ctn", "gspo")

# {token, turn} ratio x {token, turn-mean} credit: (ratio, credit) -> arm.
FACTORIAL = {
    ("token", "token"): "token_ppo",
    ("turn", "token"): "turn_ppo",
    ("token", "turn-mean"): "token_ppo_turn_mean",
    ("turn", "turn-mean"): "turn_ppo_turn_mean",
}
# The phase diagram: (epochs, factor of the main learning rate) -> regime.
EPOCHS, FACTORS = (2, 4, 8), (0.5, 1.0, 1.5)
CELLS = {(e, f): f"E{e}_LR{f:g}" for e in EPOCHS for f in FACTORS} | {(8, 1.0): MAIN}
STALENESS = {0: "STALE0", 2: MAIN, 4: "STALE4"}
SPLITS = {"4 × 8": "_e4m8", "8 × 4": "", "16 × 2": "_e16m2"}  # epochs x minibatches -> ending of the arm
SETTINGS = {"SINGLE_TURN": "questions of one turn", "LONG_HORIZON": "longer chains", "LLAMA": "Llama policy"}
# Regimes that a figure of their own covers: no curves iteration by iteration.
COVERED = {*CELLS.values(), *STALENESS.values(), *SETTINGS, BEST} - {MAIN}
# Regime -> what is different in it, in words.
MEANING = (
    {f"E{e}_LR{f:g}": f"{e} epochs, main learning rate × {f:g}" for e, f in CELLS}
    | {regime: f"batches {age} iterations old" for age, regime in STALENESS.items()}
    | SETTINGS
    | {
        MAIN: "the main regime",
        ON_POLICY: "nearly on-policy: fresh batches, few updates",
        LONG: "longer and milder",
        BEST: "each algorithm at its best learning rate",
    }
)


class Group(NamedTuple):
    """Arms that differ from a default in one respect."""

    name: str
    title: str
    question: str
    default: str  # REGIME/algorithm
    arms: dict[str, str]  # REGIME/algorithm -> what is different


def _main(base: str, arms: dict[str, str]) -> dict[str, str]:
    return {f"{MAIN}/{base}_{ending}": words for ending, words in arms.items()}


_PLACEBO = {
    "placebo_shuffled": "placebo (its divisors shuffled)",
    "placebo_replayed": "placebo (another run's divisors)",
}
_MATCHED = {"kl_matched": "learning rate matched by KL", "step_matched": "learning rate matched by step"}
_KL_STOP = {f"{MAIN}/token_ppo_kl_stop": "token PPO with KL early stopping"}

CONTROLS = (
    Group(
        "s_ppo",
        "S-PPO against its controls",
        "Does something that only makes steps smaller, or fewer, do what S-PPO does?",
        f"{MAIN}/s_ppo",
        {f"{MAIN}/token_ppo": "untreated: token PPO"} | _main("token_ppo", _MATCHED | _PLACEBO) | _KL_STOP,
    ),
    Group(
        "st_ppo",
        "ST-PPO against its controls",
        "Does something that only makes steps smaller, or fewer, do what ST-PPO does?",
        f"{MAIN}/st_ppo",
        {f"{MAIN}/token_ppo": "token PPO", f"{MAIN}/turn_ppo": "untreated: Turn-PPO"}
        | _main("turn_ppo", _MATCHED | _PLACEBO)
        | _KL_STOP,
    ),
    Group(
        "so_grpo",
        "SO-GRPO against its controls",
        "Does something that only makes steps smaller do what SO-GRPO does?",
        f"{MAIN}/so_grpo",
        {f"{MAIN}/grpo": "GRPO", f"{MAIN}/turn_grpo": "untreated: turn GRPO"}
        | _main("turn_grpo", _MATCHED | _PLACEBO),
    ),
)

DRIVERS = tuple(
    Group(
        f"critic_{base}",
        f"The critic of {label}",
        "Are inaccurate values the cause? A better trained critic, and values that are Monte-Carlo truth.",
        f"{MAIN}/{base}",
        _main(base, {"critic8": "critic trained 8 epochs", "true_values": "true values, no critic"}),
    )
    for base, label in (("token_ppo", "token PPO"), ("st_ppo", "ST-PPO"))
)

_ADVANTAGES = {"centred": "centred only", "raw": "neither centred nor scaled"}
_ONE_PLUS = {f"one_plus_c{c}": f"1 + ‖C‖/{c}" for c in ("0.02", "0.1", "0.5", "2")}


def _ablation(name: str, base: str, title: str, question: str, arms: dict[str, str]) -> Group:
    return Group(f"{base}_{name}", title, question, f"{MAIN}/{base}", _main(base, arms))


ABLATIONS = (
    _ablation(
        "divisor",
        "st_ppo",
        "ST-PPO: the divisor",
        "Which reading of the normalisation, and how strong? The default divides by max(1, ‖C‖/0.1).",
        {f"max_c{c}": f"max(1, ‖C‖/{c})" for c in ("0.02", "0.5", "2")} | _ONE_PLUS,
    ),
    _ablation(
        "clip_order",
        "st_ppo",
        "ST-PPO: gradient clipping before or after the divisor",
        "Clipping that comes after the divisor and binds cancels it. Does the order matter? The default does not clip.",
        {
            "clip_then_divide": "clip at 0.5, then divide",
            "divide_then_clip": "divide, then clip at 0.5",
        },
    ),
    _ablation(
        "estimator",
        "st_ppo",
        "ST-PPO: exact or estimated norm",
        "Is the norm of the clipping bias needed exactly, or does its cheap estimate do?",
        {"logprob_norm": "log-prob estimate of ‖C‖"},
    ),
    _ablation(
        "aggregation",
        "st_ppo",
        "ST-PPO: the ratio of a turn",
        "How are a turn's token ratios made into one? The default is the geometric mean.",
        {"arithmetic": "arithmetic mean", "product": "product"},
    ),
    _ablation(
        "clip_on",
        "st_ppo",
        "ST-PPO: what is clipped",
        "Does it matter whether each token's term is clipped by its own advantage or a turn's term as one?",
        {"clip_on_turn": "clip the turn's term"},
    ),
    _ablation(
        "advantages",
        "st_ppo",
        "ST-PPO: scale of the advantages",
        "The default whitens them in each batch. What if they are only centred, or left as they are?",
        _ADVANTAGES,
    ),
    _ablation(
        "lambda",
        "st_ppo",
        "ST-PPO: λ of the advantage estimate",
        "The default is 1. Does leaning on the critic (0.95) help or harm?",
        {"lambda0.95": "λ = 0.95"},
    ),
    _ablation(
        "penalty",
        "so_ppo_ctn",
        "SO-PPO (reading B): weight and formula of the penalty",
        "The sources give no weight and two formulas. The default is weight 1, the product inside the mean.",
        {
            "inside_0.1": "inside the mean, weight 0.1",
            "inside_10": "inside the mean, weight 10",
            **{f"outside_{w}": f"product of means, weight {w}" for w in ("0.1", "1", "10")},
        },
    ),
    _ablation(
        "aggregation",
        "so_ppo_ctn",
        "SO-PPO (reading B): the ratio of a turn",
        "The default is the arithmetic mean of the turn's token ratios.",
        {"geometric": "geometric mean", "product": "product"},
    ),
    _ablation(
        "clip_on",
        "so_ppo_ctn",
        "SO-PPO (reading B): what is clipped",
        "Each token's term by its own advantage, or the turn's term as one?",
        {"clip_on_turn": "clip the turn's term"},
    ),
    _ablation(
        "advantages",
        "so_ppo_ctn",
        "SO-PPO (reading B): scale of the advantages",
        "The default whitens them in each batch.",
        _ADVANTAGES,
    ),
    Group(
        "sgd",
        "Without Adam: what a divisor does under SGD",
        "Adam does not see a constant factor of the gradient; SGD does. The learning rate is that at which "
        "Turn-PPO's first updates are as long as Adam's; the constant divisor is the mean of ST-PPO's.",
        f"{MAIN}/turn_ppo_sgd",
        {
            f"{MAIN}/turn_ppo_sgd_constant": "Turn-PPO, constant divisor",
            f"{MAIN}/st_ppo_sgd": "ST-PPO",
            f"{MAIN}/so_ppo_ctn_sgd": "SO-PPO, CTN",
        },
    ),
    Group(
        "optimiser",
        "ST-PPO: Adam or SGD",
        "The default is Adam. Does ST-PPO under SGD, with updates as long as Adam's at the start, fare alike?",
        f"{MAIN}/st_ppo",
        {f"{MAIN}/st_ppo_sgd": "SGD"},
    ),
    Group(
        "epsilon_turn",
        "Turn-PPO: ε matched to token PPO",
        "Is what the turn ratio does only a matter of how much is clipped? On tuning seeds, this ε brought as many ratios out of range as token PPO's over iterations 1 to 5; how many it brings here, the table of matching says.",
        f"{MAIN}/turn_ppo",
        {f"{MAIN}/turn_ppo_epsilon_matched": "matched ε"},
    ),
    Group(
        "epsilon_sequence",
        "GSPO: ε matched to token PPO",
        "GSPO's published ε comes from long responses and clips nearly everything here. This one is matched as Turn-PPO's is.",
        f"{MAIN}/gspo",
        {f"{MAIN}/gspo_epsilon_matched": "matched ε"},
    ),
)
_VARIANTS = (
    {
        arm.split("/")[1]: words
        for group in (*CONTROLS, *DRIVERS, *ABLATIONS)
        for arm, words in group.arms.items()
    }
    | {
        f"{base}{ending}": f"{words} (epochs × minibatches)"
        for base in ("token_ppo", "st_ppo")
        for words, ending in SPLITS.items()
        if ending
    }
    | {
        "token_ppo_kl_stop": "KL early stopping",
        "turn_ppo_sgd": "SGD",
        "turn_ppo_sgd_constant": "SGD, constant divisor",
        "so_ppo_ctn_sgd": "SGD",
    }
)
_BASES = sorted([*NINE, "turn_grpo"], key=len, reverse=True)


def variant(algorithm: str) -> tuple[str, str] | None:
    """(algorithm that it varies, what is different) of an arm that answers one question of the study only.

    None for the algorithms themselves and for names that the study does not have, such as a reader's own.
    """
    if algorithm in _BASES or algorithm not in _VARIANTS:
        return None
    return next(base for base in _BASES if algorithm.startswith(f"{base}_")), _VARIANTS[algorithm]
