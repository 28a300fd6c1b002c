"""Related methods by name: the rules of `configs/algorithm/NAME.yaml` for a host, and why a host is not
offered one.

What a host has an option for stays the host's: advantages, how terms are averaged, and the range of PPO's
clip. The rest of the YAML is the method. Its constants are knobs, nested and named as in the YAML: {"clip":
{"most": 2.0}}."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from stppo.config.files import lineage

if TYPE_CHECKING:
    from stppo.objectives import Objective

PAPER = ("turn_ppo", "s_ppo", "st_ppo", "so_ppo", "so_grpo")  # the paper's own losses, in verl
OFFERED = {
    "verl": (
        *("topr", "minirl", "m2po", "bapo", "bapo_ratio", "vespo"),
        *("grpo_guard", "llds", "agilerl_turn", "sequence_mask", "so_ppo_ctn_c"),
        *("p3o", "drpo", "geometric_mask", "prime_rl", "vaco", "minpro", "ctpo"),
    ),
    "trl": (
        *("topr", "minirl", "m2po", "bapo", "bapo_ratio", "grpo_guard"),
        *("llds", "tis", "icepop", "dppo", "reinforce"),
        *("p3o", "drpo", "geometric_mask", "dro", "prime_rl", "vaco", "minpro", "ctpo"),
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
    **dict.fromkeys(
        ("decoupled_ppo", "a3po"),
        "it reads log-probabilities of three policies, of which a host's loss gets two",
    ),
    "kl_stop": "it ends the updates on a batch, which a loss cannot",
}
_NULL = "it is a null of the studies: minirl's mask without minirl's weight"
_LAST_BLOCK = "it needs the last block's gradient; {} has the cheap divisor that a loss can have"
_CREDIT = "its credit differs: {}"
_CRITIC = _CREDIT.format("TRL has no critic")
_STATES = _CREDIT.format("none here compares turns that began in equal states")


class Options(NamedTuple):
    """What makes a host compute an algorithm: `line`, whole and to be copied (launch options of verl, a
    config of TRL), and `but`, what to know besides: in what it differs from the YAML even so."""

    line: str
    but: str = ""


_ACTOR = "actor_rollout_ref.actor."
VERL_CONFIG = f"{_ACTOR}policy_loss._target_=stppo.plugins.verl.TurnPolicyLossConfig"


def verl_line(mode: str, mean: str, *more: str, clip: tuple[float, float] | None = None, credit: str) -> str:
    """Launch options: `mode` and `mean` of the loss, more options of the actor (from + on added to verl's
    config) or of `algorithm`, the clip's range, and the advantage estimator."""
    options = [f"policy_loss.loss_mode={mode}", f"loss_agg_mode={mean}"]
    if clip is not None:
        options += [f"clip_ratio_low={clip[0]:g}", f"clip_ratio_high={clip[1]:g}"]
    line = [_ACTOR + option for option in options]
    for option in more:
        ours, rest = "+" * option.startswith("+"), option.removeprefix("+")
        line.append(option if rest.startswith(("algorithm.", "actor_")) else f"{ours}{_ACTOR}{rest}")
    return " ".join([*line, f"algorithm.adv_estimator={credit}"])


_MEAN, _TOKENS, _PPO, _SINGLE = "seq-mean-token-mean", "token-mean", (0.2, 0.2), "clip_ratio_c=1e9"
_vanilla_ppo = verl_line("vanilla", _MEAN, _SINGLE, clip=_PPO, credit="gae")


def _corrected(threshold: str, mean: str = _MEAN, credit: str = "grpo") -> Options:
    """verl's own importance weights. Its default trainer does not hand `algorithm.rollout_correction` to the
    loss, so the line does."""
    rules = {"bypass_mode": "true", "loss_type": "reinforce", "rollout_is": "token"}
    rules |= {"rollout_is_threshold": threshold}
    given = [f"algorithm.rollout_correction.{key}={value}" for key, value in rules.items()]
    wired = f"'+{_ACTOR}policy_loss.rollout_correction=${{algorithm.rollout_correction}}'"
    sampled = "actor_rollout_ref.rollout.calculate_log_probs=true"
    return Options(f"{verl_line('bypass_mode', mean, sampled, *given, credit=credit)} {wired}")


GROUPS_MEAN = _CREDIT.format("the group's mean, not the batch's, is the baseline")
_SO_GRPO = 'TurnGRPOConfig(stabilizer="clipping_bias_norm", bias_norm_estimator="exact")'
_SO_GRPO_CTN = 'TurnGRPOConfig(ratio_aggregation="arithmetic", stabilizer="ctn_kl", loss_type="turn_mean")'
_READING_B = (VERL_CONFIG, "+policy_loss.reading=B")
_ELSEWHERE: dict[str, dict[str, str | Options]] = {
    "verl": {
        "token_ppo": Options(_vanilla_ppo),
        "token_ppo_fixed": Options(_vanilla_ppo),
        "turn_ppo_fixed": Options(verl_line("turn_ppo", _MEAN, clip=_PPO, credit="gae")),
        "dual_clip": Options(verl_line("vanilla", _MEAN, "clip_ratio_c=3.0", clip=_PPO, credit="gae")),
        "grad_clip": Options(f"{_vanilla_ppo} {_ACTOR}grad_clip=1.0"),
        "grpo": Options(verl_line("vanilla", _MEAN, _SINGLE, clip=_PPO, credit="grpo")),
        "dr_grpo": Options(
            verl_line("vanilla", _TOKENS, _SINGLE, clip=_PPO, credit="grpo")
            + " algorithm.norm_adv_by_std_in_grpo=false"
        ),
        "dapo": Options(verl_line("vanilla", _TOKENS, _SINGLE, clip=(0.2, 0.28), credit="grpo")),
        "gspo": Options(verl_line("gspo", _MEAN, clip=(3e-4, 4e-4), credit="grpo")),
        "cispo": Options(verl_line("cispo", _TOKENS, clip=(1, 4), credit="grpo")),
        "sapo": Options(verl_line("sapo", _MEAN, credit="grpo")),
        "gmpo": Options(
            verl_line("geo_mean", _MEAN, clip=(0.4, 0.4), credit="grpo"),
            "with one micro-batch a minibatch: n of them make the gradient n times as large",
        ),
        "dppo": Options(verl_line("dppo_tv", _TOKENS, "clip_ratio_c=20", clip=_PPO, credit="grpo")),
        "tis": _corrected("2.0"),
        "icepop": _corrected("0.5_5.0"),
        "sao": Options(f"{_corrected('0.2_4.0', _TOKENS, 'gae').line} critic.ppo_epochs=2"),
        "dro": Options(
            verl_line("dro", _TOKENS, "policy_loss.dro_beta=0.05", credit="grpo")
            + " algorithm.norm_adv_by_std_in_grpo=false"
        ),
        "gigpo": Options(verl_line("vanilla", _TOKENS, _SINGLE, clip=_PPO, credit="grpo"), _STATES),
        "sampo": Options(verl_line("gspo", _MEAN, clip=(3e-4, 4e-4), credit="grpo"), _STATES),
        "reinforce": Options(verl_line("gpg", _MEAN, credit="batch_mean")),
        "reinforce_whitened": Options(verl_line("gpg", _MEAN, credit="reinforce_plus_plus")),
        "rloo": Options(verl_line("gpg", _MEAN, credit="rloo")),
        "successes_only": Options(
            verl_line("topr", _TOKENS, VERL_CONFIG, "+policy_loss.knobs.clip.most=0", credit="batch_mean")
        ),
        "weight_one": _NULL,
        "so_ppo_ctn": Options(
            verl_line("so_ppo", _MEAN, *_READING_B, clip=_PPO, credit="gae"),
            _CREDIT.format("verl's estimators get no values for turns"),
        ),
        "so_grpo_ctn": Options(
            verl_line("so_grpo", _MEAN, *_READING_B, clip=_PPO, credit="grpo_turn_return")
        ),
        "s_ppo_cheap": _LAST_BLOCK.format("loss_mode=s_ppo"),
        "st_ppo_cheap": _LAST_BLOCK.format("loss_mode=st_ppo"),
    },
    "trl": {
        "token_ppo": Options('GRPOConfig(loss_type="grpo")', _CRITIC),
        "turn_ppo": Options("TurnGRPOConfig()", _CRITIC),
        "token_ppo_fixed": Options('GRPOConfig(loss_type="grpo")', _CRITIC),
        "turn_ppo_fixed": Options("TurnGRPOConfig()", _CRITIC),
        "s_ppo": Options(
            'TurnGRPOConfig(importance_sampling_level="token", stabilizer="clipping_bias_norm", '
            'bias_norm_estimator="exact")',
            _CRITIC,
        ),
        "s_ppo_cheap": _LAST_BLOCK.format("bias_norm_estimator='logprob'"),
        "st_ppo_cheap": _LAST_BLOCK.format("bias_norm_estimator='logprob'"),
        **dict.fromkeys(("st_ppo", "so_ppo"), Options(_SO_GRPO, _CRITIC)),
        "so_ppo_ctn": Options(_SO_GRPO_CTN, _CRITIC),
        "so_ppo_ctn_c": "it normalises advantages by what is clipped, and TRL's are normalised already",
        "dual_clip": Options('GRPOConfig(loss_type="grpo", delta=3.0)', _CRITIC),
        "grad_clip": Options('GRPOConfig(loss_type="grpo", max_grad_norm=1.0)', _CRITIC),
        "agilerl_turn": Options(
            'TurnGRPOConfig(ratio_aggregation="product", loss_type="turn_mean")', _CRITIC
        ),
        "grpo": Options('GRPOConfig(loss_type="grpo")'),
        "gspo": Options(
            'GRPOConfig(importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, '
            "epsilon_high=4e-4)"
        ),
        "sao": Options(
            'TurnGRPOConfig(objective="icepop", knobs={"clip": {"epsilon_low": 0.8, "epsilon_high": 3.0}}, '
            'loss_type="dapo")',
            _CRITIC,
        ),
        "gigpo": Options('GRPOConfig(loss_type="dapo")', _STATES),
        "sampo": Options(
            'GRPOConfig(importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, '
            "epsilon_high=4e-4)",
            _STATES,
        ),
        "so_grpo": Options(_SO_GRPO),
        "so_grpo_ctn": Options(_SO_GRPO_CTN),
        "dr_grpo": Options('GRPOConfig(loss_type="dapo", scale_rewards="none")'),
        "dapo": Options('GRPOConfig(loss_type="dapo", epsilon_high=0.28)'),
        "cispo": Options('GRPOConfig(loss_type="cispo", epsilon_high=5.0)'),
        "sapo": Options('GRPOConfig(loss_type="sapo")'),
        "vespo": Options('GRPOConfig(loss_type="vespo")'),
        "sequence_mask": Options('GRPOConfig(loss_type="grpo", off_policy_mask_threshold=0.5)'),
        "successes_only": Options(
            'TurnGRPOConfig(objective="topr", knobs={"clip": {"most": 0.0}}, loss_type="dapo", '
            'scale_rewards="none")',
            GROUPS_MEAN,
        ),
        "weight_one": _NULL,
        "gmpo": Options("GMPOConfig()", "from trl.experimental.gmpo, with its GMPOTrainer"),
        "rloo": Options(
            'TurnGRPOConfig(objective="reinforce", loss_type="grpo", scale_rewards="none")',
            "a constant factor differs: (n - 1) / n in groups of n",
        ),
        "reinforce_whitened": Options(
            'TurnGRPOConfig(objective="reinforce", loss_type="grpo", scale_rewards="batch")', GROUPS_MEAN
        ),
    },
}


def options(host: str, name: str) -> Options | None:
    """The options of `host` with which it computes the algorithm `name` as its YAML has it, by a loss of its
    own or by one of ours that the plug-in offers; None where a host's loss cannot."""
    if name in OFFERED[host]:
        return _offered(host, name)
    found = _ELSEWHERE[host].get(name)
    return found if isinstance(found, Options) else None


def _offered(host: str, name: str) -> Options:
    from stppo.objectives import TokenPenalty

    rule = objective(name)
    credit, mean = type(rule.credit).__name__, rule.loss_aggregation
    clip = (rule.clip.epsilon_low, rule.clip.epsilon_high) if clips_as_host(name) else None
    clip = None if clip is None or clip[1] == math.inf else clip
    parts = rule.ratio, rule.clip, rule.surrogate
    but = "it looks at the micro-batch" * any(getattr(part, "sees_batch", False) for part in parts)
    if host == "verl":
        estimator = {"GroupNormalised": "grpo", "BatchBaseline": "batch_mean", "TokenGAE": "gae"}
        line = verl_line(
            name,
            _TOKENS if mean == "token_mean" else _MEAN,
            *["algorithm.norm_adv_by_std_in_grpo=false"] * (credit == "GroupCentred"),
            clip=clip,
            credit=estimator.get(credit, "grpo"),
        )
        plain = credit == "TokenGAE" and not rule.credit.whiten
        whitened = "advantages are whitened even where little is clipped" * plain
        return Options(line, "; ".join(filter(None, (but, whitened))))
    given = {"objective": name, "loss_type": "dapo" if mean == "token_mean" else "grpo"}
    if clip is not None:
        given |= {"epsilon": clip[0], "epsilon_high": clip[1]}
    if credit != "GroupNormalised":
        given["scale_rewards"] = "none"
    line = ", ".join(f"{key}={json.dumps(value)}" for key, value in given.items())
    groups = GROUPS_MEAN * (credit == "BatchBaseline")
    penalty = "its penalty is a mean over the micro-batch" * isinstance(rule.stabilizer, TokenPenalty)
    return Options(f"TurnGRPOConfig({line})", "; ".join(filter(None, (but, groups, penalty))))


def more_than_a_loss(name: str) -> str | None:
    """What of a method no host's loss can do; None where the loss is the whole method."""
    return _MORE_THAN_A_LOSS.get(name)


def why_not(host: str, name: str) -> str | None:
    """Why `host` is not offered the algorithm `name`; None where it is, and for names that are none of
    ours."""
    found = _MORE_THAN_A_LOSS.get(name) or _ELSEWHERE[host].get(name)
    if isinstance(found, Options):
        return f"it is {found.line}" + f" ({found.but})" * bool(found.but)
    return found


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
