"""Related methods that the verl plug-in offers by name, against the objectives of their YAML files."""

import pytest
import torch

from stppo.plugins import methods
from stppo.trajectories import Layout
from tests.engines.methods_cases import evaluated, random_case, yaml_objective

pytestmark = pytest.mark.engines

NAMES = methods.OFFERED["verl"]
MODES = {
    "trajectory_mean": "seq-mean-token-mean",
    "token_mean": "token-mean",
    "turn_mean": "seq-mean-token-mean",
}
# A value of each method's knobs that is not its default, and acts on the batches here.
KNOBS = {
    "topr": {"clip": {"most": 2.0}},
    "m2po": {"surrogate": {"tau": 0.3}},
    "bapo": {"clip": {"target": 0.7}},
    "bapo_ratio": {"clip": {"target": 0.8}},
    "vespo": {"surrogate": {"lambda_positive": 1.0}},
    "grpo_guard": {"ratio": {"floor": 0.5}},
    "llds": {"stabilizer": {"coefficient": 1.5}},
    "sequence_mask": {"surrogate": {"delta": 0.02}},
    "so_ppo_ctn_c": {"surrogate": {"threshold": 0.9}},
    "drpo": {"surrogate": {"delta": 0.3}},
    "geometric_mask": {"surrogate": {"width": 0.3}},
    "prime_rl": {"stabilizer": {"coefficient": 0.5}},
    "vaco": {"surrogate": {"delta": 0.6}},
    "ctpo": {"clip": {"low": 0.3, "high": 0.5}},
}


def actor(name, options=None, mode=None, **info):
    """verl's actor config as docs/howto/verl.md has it for the method."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    from stppo.plugins.verl import TurnPolicyLossConfig

    rule = yaml_objective(name)
    if options is None:
        policy_loss = PolicyLossConfig(loss_mode=name)
    else:
        policy_loss = TurnPolicyLossConfig(loss_mode=name, **options)
    published = methods.clips_as_host(name)
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=rule.clip.epsilon_low if published else 0.01,  # TOPR and BAPO must not look at it
        clip_ratio_high=rule.clip.epsilon_high if published else 0.01,
        loss_agg_mode=mode or MODES[rule.loss_aggregation],
        policy_loss=policy_loss,
        global_batch_info=info,
    )


def plugged(name, config, mask, old, new, advantages):
    """(loss, gradient, metrics) of the function in verl's registry."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    import stppo.plugins.verl  # noqa: F401

    logprobs = new.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=old,
        log_prob=logprobs,
        advantages=advantages,
        response_mask=mask.long(),
        loss_agg_mode=config.loss_agg_mode,
        config=config,
    )
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics


def assert_same(got, expected, tolerance=1e-10):
    for a, b in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_count_what_the_method_restricts(name):
    mask, old, new, advantages = random_case(1)
    metrics = plugged(name, actor(name), mask, old, new, advantages)[2]
    log_ratio = (new - old)[mask]
    found = yaml_objective(name).evaluate(
        log_ratio, advantages[mask], Layout.of(mask), behaviour_logprobs=old[mask]
    )
    for ours, theirs in {
        "actor/pg_clipfrac": "clip_fraction",
        "actor/ppo_kl": "kl_behaviour_k1",
        "actor/ctn_penalty": "ctn_penalty",
    }.items():
        assert metrics[ours] == pytest.approx(found.diagnostics[theirs], abs=1e-12)
    assert (metrics["actor/ctn_penalty"] > 0) == (name in ("llds", "p3o", "prime_rl"))


@pytest.mark.parametrize("name", KNOBS)
def test_knobs_are_the_yamls_constants(name):
    case = random_case(3)
    got = plugged(name, actor(name, {"knobs": KNOBS[name]}), *case)
    assert_same(got, evaluated(yaml_objective(name, **KNOBS[name]), *case))
    assert not torch.allclose(got[1], plugged(name, actor(name), *case)[1])


def test_every_method_with_knobs_is_tried():
    assert set(KNOBS) == {name for name in NAMES if methods.knobs_of(name)}


@pytest.mark.parametrize(
    "name", [name for name in NAMES if methods.clips_as_host(name) and name != "agilerl_turn"]
)
def test_the_clip_range_and_the_mean_are_verls(name):
    """As a launch command sets them, whatever the method."""
    case, config = random_case(4), actor(name, {}, mode="token-mean")
    for option, value in {"clip_ratio_low": 0.1, "clip_ratio_high": 0.5}.items():
        object.__setattr__(config, option, value)
    changed = {"clip": {"epsilon_low": 0.1, "epsilon_high": 0.5}, "loss_aggregation": "token_mean"}
    assert_same(plugged(name, config, *case), evaluated(yaml_objective(name, **changed), *case))


@pytest.mark.parametrize("name", [*NAMES, "turn_ppo", "s_ppo", "st_ppo"])
def test_padding_and_rows_without_agent_tokens_do_not_matter(name):
    mask, old, new, advantages = random_case(6)
    expected = plugged(name, actor(name), mask, old, new, advantages)

    def longer(value, fill):
        wide = torch.nn.functional.pad(value, (0, 3), value=fill)
        return torch.cat([wide, torch.full_like(wide[:1], fill)])

    nan = float("nan")
    new, old, advantages = (value.where(mask, nan) for value in (new, old, advantages))
    got = plugged(name, actor(name), longer(mask, False), *(longer(v, nan) for v in (old, new, advantages)))
    assert_same((got[0], got[1][:-1, :-3]), expected)
    assert not got[1][-1].any() and not got[1][:, -3:].any()


@pytest.mark.parametrize("name", NAMES)
def test_holes_are_refused_where_turns_matter(name):
    from stppo.plugins.verl import TurnPolicyLossConfig

    mask, old, new, advantages = random_case(7)
    mask[0, :5] = True
    mask[0, 2] = False
    rejecting = {"rollout_correction": {"rollout_rs": "token_k1"}}
    if name in ("grpo_guard", "llds", "agilerl_turn", "so_ppo_ctn_c"):
        with pytest.raises(ValueError, match="rollout_rs=token_.*use a seq_"):
            plugged(name, actor(name), mask, old, new, advantages)
        with pytest.raises(ValueError, match="rollout_rs='token_k1'"):
            TurnPolicyLossConfig(loss_mode=name, **rejecting)
    else:
        plugged(name, actor(name), mask, old, new, advantages)
        TurnPolicyLossConfig(loss_mode=name, **rejecting)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_mode": "vcpo"}, "TurnPolicyLossConfig.loss_mode='vcpo': not offered, since it divides the learn"),
        ({"loss_mode": "tis"}, "loss_mode='tis': not offered, since it is actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode"),
        ({"knobs": {"clip": {"mots": 2}}}, "TurnPolicyLossConfig.knobs.clip.mots: .* allowed: clip.most"),
        ({"knobs": {"surrogate": {"tau": 2}}}, "knobs.surrogate.tau: no knob of topr; allowed: clip.most"),
        ({"knobs": {"clip": 2}}, "TurnPolicyLossConfig.knobs.clip=2: must be a mapping"),
        ({"knobs": 2}, "TurnPolicyLossConfig.knobs=2: must be a mapping"),
        ({"knobs": {"clip": {"most": -1}}}, r"TurnPolicyLossConfig.knobs.clip: .*most=-1: must be a number in"),
        (
            {"loss_mode": "minirl", "knobs": {"clip": {"epsilon_low": 0.3}}},
            "knobs.clip.epsilon_low: no knob of minirl; allowed: minirl has none",
        ),
        ({"loss_mode": "st_ppo", "knobs": {"stabilizer": {"c0": 1.0}}}, "knobs=.*: st_ppo has c0 in their place"),
        ({"reading": "B"}, "reading='B': topr has reading A alone"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options, message):
    from stppo.plugins.verl import TurnPolicyLossConfig

    with pytest.raises(ValueError, match=message):
        TurnPolicyLossConfig(**{"loss_mode": "topr", **options})


def test_knobs_reach_the_loss_through_verls_own_config():
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    option = "actor_rollout_ref.actor.policy_loss"
    overrides = [
        f"{option}.loss_mode=topr",
        f"{option}._target_=stppo.plugins.verl.TurnPolicyLossConfig",
        f"+{option}.knobs.clip.most=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=6",
    ]
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        config = compose("ppo_trainer", overrides=overrides)
    found = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    case = random_case(8)
    got = plugged("topr", found, *case)
    assert_same(got, evaluated(yaml_objective("topr", clip={"most": 2}), *case))


def test_topr_advantages_are_our_batch_baselines():
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    import stppo.plugins.verl  # noqa: F401

    mask, _, rewards, _ = random_case(9)
    mask[3] = False  # rejected as a whole, but its return still counts
    got, again = get_adv_estimator_fn("batch_mean")(
        token_level_rewards=rewards, response_mask=mask, index=None, config=None
    )
    expected = rewards.sum(1, keepdim=True) - rewards.sum(1).mean()
    torch.testing.assert_close(got, expected * mask, rtol=0, atol=1e-12)
    assert torch.equal(got, again)
