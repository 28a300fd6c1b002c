"""Related methods by name: the rules of `configs/algorithm/NAME.yaml` for a host, and why a host is not
offered one.

What a host has an option for stays the host's: advantages, how terms are averaged, and the range of PPO's
clip. The rest of the YAML is the method. Its constants are knobs, nested and named as in the YAML: {"clip":
{"most": 2.0}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from stppo.config.files import lineage

if TYPE_CHECKING:
    from stppo.objectives import Objective

PAPER = ("turn_ppo", "s_ppo", "st_ppo", "so_ppo", "so_grpo")  # the paper's own losses, in verl
OFFERED = {
    "verl": (
        *("topr", "minirl", "m2po", "bapo", "bapo_ratio", "vespo"),
        *("grpo_guard", "llds", "agilerl_turn", "sequence_mask", "so_ppo_ctn_c"),
    ),
    "trl": (
        *("topr", "minirl", "m2po", "bapo", "bapo_ratio", "grpo_guard"),
        *("llds", "icepop", "dppo", "reinforce"),
    ),
}

# What no host's loss can do; `why_not` completes these sentences.
_DROPS = "it leaves trajectories out of the batch, which happens before any loss"
_MORE_THAN_A_LOSS = {
    "sspo": "its clip reads sentences and the entropy of every token, and a host's loss gets neither",
    "vcpo": "it divides the learning rate, which a loss cannot",
    "seeupo": "it makes one update for each turn of a minibatch, which is the trainer's business",
    "starpo_s": "it leaves questions out of the batch, which happens before any loss",
    **dict.fromkeys(("loop_token", "loop_turn", "loop_trajectory"), _DROPS),
    "kl_stop": "it ends the updates on a batch, which a loss cannot",
}
_NULL = "it is a null of the studies: minirl's mask without minirl's weight"
_BYPASS = (
    "verl has it: loss_mode=bypass_mode with rollout_correction.loss_type=reinforce, "
    "rollout_is=token, rollout_is_threshold="
)
_CRITIC = "its credit needs a critic, which TRL does not have; on TRL's advantages its loss is "
_OUR_LEVEL = "it is importance_sampling_level="
_ELSEWHERE = {
    "verl": {
        "token_ppo": "verl has it: loss_mode=vanilla",
        "token_ppo_fixed": "verl has it: loss_mode=vanilla",
        "turn_ppo_fixed": "it is loss_mode=turn_ppo",
        "dual_clip": "verl has it: loss_mode=vanilla, clip_ratio_c",
        "grad_clip": "verl has it: loss_mode=vanilla, grad_clip",
        "grpo": "verl has it: loss_mode=vanilla, algorithm.adv_estimator=grpo",
        "dr_grpo": (
            "verl has it: as grpo, algorithm.norm_adv_by_std_in_grpo=false, "
            "loss_agg_mode=seq-mean-token-sum-norm"
        ),
        "dapo": "verl has it: as grpo, clip_ratio_high=0.28",
        "gspo": "verl has it: loss_mode=gspo",
        "cispo": "verl has it: loss_mode=cispo",
        "sapo": "verl has it: loss_mode=sapo",
        "gmpo": "verl has it: loss_mode=geo_mean",
        "dppo": "verl has it: loss_mode=dppo_tv",
        "tis": f"{_BYPASS}2.0",
        "icepop": f"{_BYPASS}0.5_5.0",
        "reinforce": "verl has it: loss_mode=gpg",
        "reinforce_whitened": "verl has it: loss_mode=gpg, algorithm.adv_estimator=reinforce_plus_plus",
        "rloo": "verl has it: loss_mode=gpg, algorithm.adv_estimator=rloo",
        "successes_only": "it is loss_mode=topr with policy_loss.knobs={clip: {most: 0}}",
        "weight_one": _NULL,
        "so_ppo_ctn": "it is loss_mode=so_ppo, reading=B",
        "so_grpo_ctn": "it is loss_mode=so_grpo, reading=B",
        "s_ppo_cheap": (
            "it needs the last block's gradient; loss_mode=s_ppo has the cheap divisor that a loss can have"
        ),
        "st_ppo_cheap": (
            "it needs the last block's gradient; loss_mode=st_ppo has the cheap divisor that a loss can have"
        ),
    },
    "trl": {
        "token_ppo": f"{_CRITIC}grpo's",
        "turn_ppo": f"{_CRITIC}that of importance_sampling_level='turn'",
        "token_ppo_fixed": f"{_CRITIC}grpo's",
        "turn_ppo_fixed": f"{_CRITIC}that of importance_sampling_level='turn'",
        "s_ppo": f"{_CRITIC}that of stabilizer='clipping_bias_norm', importance_sampling_level='token'",
        "s_ppo_cheap": f"{_CRITIC}s_ppo's, with bias_norm_estimator='logprob'",
        "st_ppo": f"{_CRITIC}so_grpo's",
        "st_ppo_cheap": f"{_CRITIC}so_grpo's, with bias_norm_estimator='logprob'",
        "so_ppo": f"{_CRITIC}so_grpo's",
        "so_ppo_ctn": f"{_CRITIC}so_grpo_ctn's",
        "so_ppo_ctn_c": f"{_CRITIC}that of importance_sampling_level='turn', normalised already",
        "dual_clip": f"{_CRITIC}that of delta=3.0, importance_sampling_level='token'",
        "grad_clip": f"{_CRITIC}grpo's, with max_grad_norm",
        "agilerl_turn": f"{_CRITIC}that of ratio_aggregation='product', loss_type='turn_mean'",
        "grpo": f"{_OUR_LEVEL}'token'",
        "gspo": f"{_OUR_LEVEL}'sequence'",
        "so_grpo": f"{_OUR_LEVEL}'turn' with stabilizer='clipping_bias_norm'",
        "so_grpo_ctn": (
            f"{_OUR_LEVEL}'turn' with ratio_aggregation='arithmetic', stabilizer='ctn_kl', "
            "loss_type='turn_mean'"
        ),
        "dr_grpo": f"{_OUR_LEVEL}'token' with loss_type='dr_grpo', scale_rewards='none'",
        "dapo": f"{_OUR_LEVEL}'token' with loss_type='dapo', epsilon_high=0.28",
        "cispo": f"{_OUR_LEVEL}'token' with loss_type='cispo', epsilon_high=5.0",
        "tis": (
            f"{_OUR_LEVEL}'token' with loss_type='cispo', epsilon_high=2.0, but for the mean "
            "over each trajectory"
        ),
        "sapo": f"{_OUR_LEVEL}'token' with loss_type='sapo'",
        "vespo": f"{_OUR_LEVEL}'token' with loss_type='vespo'",
        "sequence_mask": f"{_OUR_LEVEL}'token' with off_policy_mask_threshold=0.5",
        "successes_only": "it is objective='topr' with knobs={'clip': {'most': 0}}",
        "weight_one": _NULL,
        "gmpo": "TRL has a trainer for it: trl.experimental.gmpo",
        "rloo": "it is objective='reinforce' with scale_rewards='none', but for a constant factor",
        "reinforce_whitened": (
            "it is objective='reinforce' with scale_rewards='batch', but for the group's mean"
        ),
    },
}


def why_not(host: str, name: str) -> str | None:
    """Why `host` is not offered the algorithm `name`; None where it is, and for names that are none of
    ours."""
    return _MORE_THAN_A_LOSS.get(name) or _ELSEWHERE[host].get(name)


def knobs_of(name: str) -> dict[str, dict[str, float]]:
    """The constants of a method and their values, {section: {key: value}} as in its YAML: the numbers of all
    its rules but the credit's and a clip range that is the host's."""
    section = _section(name)
    rules = {part: rule for part, rule in section.items() if isinstance(rule, dict) and part != "credit"}
    if clips_as_host(name):
        del rules["clip"]
    numbers = {
        part: {key: float(value) for key, value in rule.items() if _is_number(value)}
        for part, rule in rules.items()
    }
    return {part: found for part, found in numbers.items() if found}


def clips_as_host(name: str) -> bool:
    """Whether the method's clip is PPO's fixed range, which hosts have options for. TOPR and BAPO have bounds
    of their own, and those of IcePop are a mask's, five times as wide."""
    section = _section(name)
    surrogate = section["surrogate"]["_target_"].rpartition(".")[2]
    return section["clip"]["_target_"] == "stppo.objectives.Clip" and surrogate not in (
        "RangeMask",
        "ClippedWeight",
    )


def objective(
    name: str,
    knobs: Mapping[str, Any] | None = None,
    clip_range: tuple[float, float] | None = None,
    option: str = "knobs",
) -> Objective:
    """The algorithm's objective as its YAML has it, but for `knobs` and, where its clip is PPO's, the host's
    range (epsilon_low, epsilon_high). The credit comes along and is for whoever has rewards: hosts make their
    own advantages.

    ValueError names `option`, a key that is no knob of the method with those that are, and a value out of
    range."""
    knobs = {} if knobs is None else knobs
    allowed = knobs_of(name)
    said = ", ".join(f"{part}.{key}" for part, keys in allowed.items() for key in keys) or f"{name} has none"
    given: dict[str, dict[str, Any]] = {}
    for part, keys in knobs.items() if isinstance(knobs, Mapping) else [(None, knobs)]:
        if not isinstance(keys, Mapping):
            place = option if part is None else f"{option}.{part}"
            raise ValueError(
                f"{place}={keys!r}: must be a mapping, {{section: {{key: value}}}}; allowed: {said}"
            )
        for key, value in keys.items():
            if key not in allowed.get(part, {}):
                raise ValueError(f"{option}.{part}.{key}: no knob of {name}; allowed: {said}")
            given.setdefault(part, {})[key] = value
    if clip_range is not None and clips_as_host(name):
        given["clip"] = dict(zip(("epsilon_low", "epsilon_high"), clip_range, strict=True))
    return _built(name, json.dumps(given), option)


@lru_cache
def _built(name: str, given: str, option: str) -> Objective:
    from stppo.config.loading import build  # brings Hydra: not for those who look names up

    section = _section(name)
    for part, keys in json.loads(given).items():
        section = section | {part: section[part] | keys}
    return build(section, option)


@lru_cache
def _section(name: str) -> dict[str, Any]:
    """`objective` of the YAML, or of the one that it inherits from."""
    return next(content["objective"] for _, content in lineage("algorithm", name) if "objective" in content)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
