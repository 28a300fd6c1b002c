"""What is written to have an algorithm from a library: its name alone, and the options that make it our YAML file."""

from __future__ import annotations

from dataclasses import dataclass

from stppo.plugins import methods


@dataclass(frozen=True)
class Cell:
    """A library's way to an algorithm: the line with nothing but its name, the line that is our YAML (None: unknown or none),
    a note."""

    line: str
    equal: str | None = None
    note: str = ""


_ACTOR, _GROUPS = "actor_rollout_ref.actor.", "algorithm.adv_estimator=grpo"


def _verl_loss(mode: str, credit: str = "grpo") -> str:
    return f"{_ACTOR}policy_loss.loss_mode={mode} algorithm.adv_estimator={credit}"


def _verl_corrected(threshold: str) -> str:
    rules = (
        "bypass_mode=true",
        "loss_type=reinforce",
        "rollout_is=token",
        f"rollout_is_threshold={threshold}",
    )
    return " ".join([_verl_loss("bypass_mode"), *(f"algorithm.rollout_correction.{rule}" for rule in rules)])


_OURS = "our loss"
_UNWIRED = "the options under rollout_correction do not reach the loss, which is PPO's clip"
DEFAULTS: dict[str, dict[str, Cell]] = {
    "verl": {
        "token_ppo": Cell("algorithm.adv_estimator=gae"),
        "grpo": Cell(_GROUPS),
        "gspo": Cell(_verl_loss("gspo")),
        "dapo": Cell(f"{_GROUPS} {_ACTOR}clip_ratio_high=0.28"),
        "dr_grpo": Cell(
            f"{_GROUPS} algorithm.norm_adv_by_std_in_grpo=false {_ACTOR}loss_agg_mode=seq-mean-token-sum-norm",
            note="without loss_scale_factor the constant is the longest response of each micro-batch",
        ),
        "rloo": Cell("algorithm.adv_estimator=rloo", note="with PPO's clip; loss_mode=gpg has none"),
        "reinforce": Cell(_verl_loss("gpg", "reinforce_plus_plus"), note="returns are whitened over tokens"),
        "cispo": Cell(_verl_loss("cispo"), note="the weight is held between 0.8 and 1.2"),
        "gmpo": Cell(_verl_loss("geo_mean"), note="no loss_agg_mode: micro-batches add up without a mean"),
        "sapo": Cell(_verl_loss("sapo")),
        "dppo": Cell(_verl_loss("dppo_tv"), note="the cap is the actor's clip_ratio_c, 3"),
        "vespo": Cell(_verl_loss("vespo"), note=_OURS),
        "tis": Cell(_verl_corrected("2.0"), note=_UNWIRED),
        "icepop": Cell(_verl_corrected("0.5_5.0"), note=_UNWIRED),
        "so_grpo": Cell(
            _verl_loss("turn_ppo"),
            methods.verl_line("turn_ppo", "seq-mean-token-mean", clip=(0.2, 0.2), credit="grpo"),
            f"{_OURS}, without its divisor",
        ),
    },
    "trl": {
        "grpo": Cell("GRPOConfig()", note='loss_type="dapo", a mean over tokens'),
        "gspo": Cell('GRPOConfig(importance_sampling_level="sequence")'),
        "dapo": Cell('GRPOConfig(loss_type="dapo")', note="epsilon_high is epsilon"),
        "dr_grpo": Cell(
            'GRPOConfig(loss_type="dr_grpo")', note="advantages are divided by the standard deviation"
        ),
        "rloo": Cell(
            "RLOOConfig(beta=0.0)",
            note="its trainer takes no observations, so here they count as the agent's own; the ratio is of the whole completion",
        ),
        "reinforce": Cell('TurnGRPOConfig(objective="reinforce")', note=_OURS),
        "cispo": Cell('GRPOConfig(loss_type="cispo")', note="the weight is held at 0.2"),
        "gmpo": Cell("GMPOConfig()"),
        "sapo": Cell('GRPOConfig(loss_type="sapo")'),
        "dppo": Cell('TurnGRPOConfig(objective="dppo")', note=_OURS),
        "vespo": Cell('GRPOConfig(loss_type="vespo")'),
        "tis": Cell('TurnGRPOConfig(objective="tis")', note=_OURS),
        "icepop": Cell('TurnGRPOConfig(objective="icepop")', note=_OURS),
        "so_grpo": Cell("TurnGRPOConfig()", note=_OURS),
    },
    "torchrl": {
        "grpo": Cell(
            "MCAdvantage(); GRPOLoss()",
            "MCAdvantage(trajectory_return='sum'); GRPOLoss(aggregation='prompt_mean')",
            "each step's own reward is normalised, so the first turn of every trajectory has the same advantage",
        ),
        "dapo": Cell(
            "MCAdvantage(); DAPO()",
            "MCAdvantage(trajectory_return='sum'); DAPO(clip_epsilon=(0.2, 0.28))",
            "DAPO() is GRPOLoss()",
        ),
        "cispo": Cell(
            "MCAdvantage(); CISPOLoss()",
            note="the ratio is clipped without log pi, so a token outside the bounds has no gradient",
        ),
    },
    "openrlhf": {
        "token_ppo": Cell("--algo.advantage.estimator=gae", "--actor.loss_agg_mode=seq-mean-token-mean"),
        "grpo": Cell(
            "--algo.advantage.estimator=group_norm",
            "--algo.advantage.estimator=group_norm --actor.loss_agg_mode=seq-mean-token-mean",
        ),
        "gspo": Cell(
            "--algo.advantage.estimator=group_norm --actor.policy_loss_type=gspo",
            "--algo.advantage.estimator=group_norm --actor.policy_loss_type=gspo --actor.eps_clip_low_high='0.0003 0.0004'",
        ),
        "dapo": Cell(
            "--algo.advantage.estimator=group_norm --actor.eps_clip_low_high='0.2 0.28'",
            "--algo.advantage.estimator=group_norm --actor.eps_clip_low_high='0.2 0.28'",
        ),
        "dr_grpo": Cell("--algo.advantage.estimator=dr_grpo", "--algo.advantage.estimator=dr_grpo"),
        "rloo": Cell("--algo.advantage.estimator=rloo", note="with PPO's clip"),
        "reinforce": Cell(
            "--algo.advantage.estimator=reinforce", note="with PPO's clip; returns are whitened"
        ),
    },
    "agilerl": {
        "grpo": Cell(
            "GRPO()",
            "GRPO(adv_norm='mean_std', loss_norm='micro_batch', off_policy_token_mask_bounds=None, "
            "off_policy_sequence_mask_threshold=None)",
            "no division by the standard deviation; tokens and failures that are far off-policy are masked",
        ),
        "gspo": Cell(
            "GRPO(loss_type='gspo')",
            "GRPO(loss_type='gspo', adv_norm='mean_std', loss_norm='micro_batch', clip_coef=(0.9997, 1.0004), "
            "off_policy_token_mask_bounds=None, off_policy_sequence_mask_threshold=None)",
            "as grpo",
        ),
        "dr_grpo": Cell(
            "GRPO()",
            "GRPO(off_policy_token_mask_bounds=None, off_policy_sequence_mask_threshold=None)",
            "its GRPO is this one",
        ),
        "cispo": Cell(
            "GRPO(loss_type='cispo')",
            "GRPO(loss_type='cispo', adv_norm='mean_std', clip_coef=(0.0, 5.0), off_policy_token_mask_bounds=None, "
            "off_policy_sequence_mask_threshold=None)",
            "the weight is held at 1.2; as grpo",
        ),
        "so_grpo": Cell(
            "GRPO(importance_sampling_level='turn')",
            "GRPO(importance_sampling_level='turn', adv_norm='mean_std', loss_norm='micro_batch', "
            "off_policy_token_mask_bounds=None, off_policy_sequence_mask_threshold=None)",
            "as grpo",
        ),
    },
    "areal": {
        "token_ppo": Cell(
            "PPOActorConfig()",
            note="-0.1 log pi of each token is a reward where there is no reference engine",
        ),
        "grpo": Cell(
            "PPOActorConfig(reward_norm={'mean_level': 'group', 'std_level': 'group', 'group_size': 8})",
            note="-0.1 log pi of each token is a reward where there is no reference engine; a mean over tokens",
        ),
        "gspo": Cell(
            "PPOActorConfig(reward_norm={'mean_level': 'group', 'std_level': 'group', 'group_size': 8}, "
            "importance_sampling_level='sequence')",
            note="a mean over tokens",
        ),
        "sapo": Cell(
            "PPOActorConfig(reward_norm={'mean_level': 'group', 'std_level': 'group', 'group_size': 8}, use_sapo_loss=True)",
            note="a mean over tokens",
        ),
        "dapo": Cell(
            "PPOActorConfig(reward_norm={'mean_level': 'group', 'std_level': 'group', 'group_size': 8}, eps_clip_higher=0.28)",
            "PPOActorConfig(reward_norm={'mean_level': 'group', 'std_level': 'group', 'group_size': 8, 'eps': 1e-6}, "
            "eps_clip_higher=0.28, kl_ctl=0.0)",
        ),
    },
    "art": {
        "grpo": Cell(
            "TrainConfig()",
            "TrainConfig(ppo=True)",
            "its default is CISPO; advantages are divided by their mean size",
        ),
        "gspo": Cell(
            "TrainConfig(ppo=True, importance_sampling_level='sequence')",
            "TrainConfig(ppo=True, importance_sampling_level='sequence', epsilon=3e-4, epsilon_high=4e-4)",
            "advantages are divided by their mean size",
        ),
        "cispo": Cell("TrainConfig()", note="every trajectory weighs the same"),
        "tis": Cell(
            "TrainConfig(truncated_importance_sampling=2.0)",
            note="beside CISPO's weight, so by the ratio squared, where log-probs are not precalculated",
        ),
    },
    "swift": {
        "grpo": Cell("--rlhf_type grpo"),
        "gspo": Cell(
            "--rlhf_type grpo --importance_sampling_level sequence",
            "--rlhf_type grpo --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4",
        ),
        "dapo": Cell(
            "--rlhf_type grpo --loss_type dapo",
            "--rlhf_type grpo --loss_type dapo --epsilon_high 0.28",
            "epsilon_high is epsilon",
        ),
        "dr_grpo": Cell(
            "--rlhf_type grpo --loss_type dr_grpo",
            "--rlhf_type grpo --loss_type dr_grpo --scale_rewards none",
            "advantages are divided by the standard deviation",
        ),
        "rloo": Cell("--rlhf_type grpo --advantage_estimator rloo", note="with PPO's clip"),
        "reinforce": Cell(
            "--rlhf_type grpo --advantage_estimator reinforce_plus_plus", note="with PPO's clip"
        ),
        "cispo": Cell(
            "--rlhf_type grpo --loss_type cispo",
            "--rlhf_type grpo --loss_type cispo --epsilon_high 5",
            "the weight is held at 0.2",
        ),
        "sapo": Cell("--rlhf_type grpo --loss_type sapo"),
    },
    "trinity": {
        "token_ppo": Cell(
            "AlgorithmConfig(algorithm_type='ppo')",
            "AlgorithmConfig(algorithm_type='ppo', loss_agg_mode='seq-mean-token-mean', "
            "policy_loss_fn_args={'clip_range': 0.2, 'clip_ratio_c': 1e9, 'loss_agg_mode': None})",
            "a second clip at a ratio of 3; a mean over tokens",
        ),
        "grpo": Cell(
            "AlgorithmConfig(algorithm_type='grpo')",
            "AlgorithmConfig(algorithm_type='grpo', loss_agg_mode='seq-mean-token-mean', "
            "policy_loss_fn_args={'clip_range': 0.2, 'clip_ratio_c': 1e9, 'loss_agg_mode': None})",
            "as token_ppo",
        ),
        "gspo": Cell(
            "AlgorithmConfig(algorithm_type='gspo')",
            "AlgorithmConfig(algorithm_type='gspo', loss_agg_mode='seq-mean-token-mean')",
            "the loss's own mean over responses is set aside for a mean over tokens",
        ),
        "dapo": Cell(
            "AlgorithmConfig(algorithm_type='dapo')",
            "AlgorithmConfig(algorithm_type='dapo', policy_loss_fn_args={'clip_range_low': 0.2, 'clip_range_high': 0.28, "
            "'clip_ratio_c': 1e9})",
            "the upper end is 0.2; a second clip at a ratio of 3",
        ),
        "rloo": Cell("AlgorithmConfig(algorithm_type='rloo')", note="with PPO's clip"),
        "reinforce": Cell(
            "AlgorithmConfig(algorithm_type='reinforceplusplus')",
            note="with PPO's clip; returns are whitened",
        ),
        "cispo": Cell(
            "AlgorithmConfig(algorithm_type='cispo')",
            "AlgorithmConfig(algorithm_type='cispo', policy_loss_fn_args={'clip_range_high': 4.0})",
            "the weight is held at 1.28",
        ),
        "sapo": Cell(
            "AlgorithmConfig(algorithm_type='sapo')",
            note="the gate weighs log pi, so the weight is 2 at a ratio of 1 and grows with it",
        ),
        "topr": Cell(
            "AlgorithmConfig(algorithm_type='topr')",
            note="the ratio is each token's own; the reward itself, without a baseline",
        ),
    },
    "tunix": {
        "token_ppo": Cell(
            "PPOConfig()", note="lambda is 0.95; a mean over tokens; without the KL in its reward"
        ),
        "grpo": Cell(
            "GRPOConfig(num_generations=8)",
            "GRPOConfig(num_generations=8, beta=0.0)",
            "the penalty is log pi - log pi_ref, whose gradient is not 0 where both are equal",
        ),
        "gspo": Cell(
            "GRPOConfig(num_generations=8, loss_algo='gspo-token')",
            "GRPOConfig(num_generations=8, loss_algo='gspo-token', beta=0.0, epsilon=0.0003, epsilon_high=0.0004)",
            "PPO's clip range; GRPO's penalty",
        ),
        "dapo": Cell("DAPOConfig(num_generations=8)", "DAPOConfig(num_generations=8)"),
        "dr_grpo": Cell(
            "DrGRPOConfig(num_generations=8)",
            "DrGRPOConfig(num_generations=8, beta=0.0)",
            "GRPO's penalty; divided by the padded length",
        ),
        "rloo": Cell(
            "GRPOConfig(num_generations=8, advantage_estimator='rloo')",
            note="with PPO's clip and GRPO's penalty",
        ),
    },
}
