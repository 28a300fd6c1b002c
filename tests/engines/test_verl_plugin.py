"""The verl plug-in against our own objectives, verl's registry, its config code and its Ray workers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stppo.objectives import (
    Clip,
    ClippingBiasNorm,
    CtnKL,
    GroupNormalised,
    NoStabilizer,
    Objective,
    Ratio,
    TokenGAE,
    estimated_bias_norms,
)
from stppo.trajectories import Trajectories

pytestmark = pytest.mark.engines

CLUSTER = Path(__file__).parents[2] / "configs" / "cluster"
MODES = {"seq-mean-token-mean": "trajectory_mean", "token-mean": "token_mean"}
STABILIZERS = {"none": NoStabilizer(), "norm": ClippingBiasNorm(c0=0.01, estimator="logprob"), "ctn": CtnKL()}
LOSSES = {  # loss, reading -> ratio, stabiliser
    ("turn_ppo", "A"): (Ratio("turn"), "none"),
    ("s_ppo", "A"): (Ratio("token"), "norm"),
    ("st_ppo", "A"): (Ratio("turn"), "norm"),
    ("so_ppo", "A"): (Ratio("turn"), "norm"),
    ("so_grpo", "A"): (Ratio("turn"), "norm"),
    ("so_ppo", "B"): (Ratio("turn", "arithmetic"), "ctn"),
    ("so_grpo", "B"): (Ratio("turn", "arithmetic"), "ctn"),
}


def normal(shape, seed, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def a_batch(n_rows=8, width=24):
    """Rows of one to three turns, one-token turns among them, observations of at least two tokens."""
    mask = torch.zeros(n_rows, width, dtype=torch.bool)
    for i in range(n_rows):
        mask[i, : 1 + i % 4] = True
        mask[i, 7 : 7 + i % 5] = True
        mask[i, 14 : 14 + (3 * i) % 7] = i % 2 == 0
    old = -normal((n_rows, width), 1).abs()
    return {
        "old_log_prob": old,
        "log_prob": old + normal((n_rows, width), 2, 0.6),
        "advantages": normal((n_rows, width), 3),
        "response_mask": mask,
    }


def actor(mode="token-mean", options=None, loss="st_ppo", **info):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    from stppo.plugins.verl import TurnPolicyLossConfig

    if options is None:
        policy_loss = PolicyLossConfig(loss_mode=loss)
    else:
        policy_loss = TurnPolicyLossConfig(loss_mode=loss, **options)
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        loss_agg_mode=mode,
        policy_loss=policy_loss,
        global_batch_info=info,
    )


def plugged(loss, batch, config, **more):
    """(loss, gradient, metrics) by the function that verl's registry holds."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    import stppo.plugins.verl  # noqa: F401

    log_prob = batch["log_prob"].clone().requires_grad_()
    value, metrics = get_policy_loss_fn(loss)(
        **{**batch, "log_prob": log_prob}, loss_agg_mode=config.loss_agg_mode, config=config, **more
    )
    return value.detach(), torch.autograd.grad(value, log_prob)[0], metrics


def trajectories(batch, rewards=None, groups=None):
    """The same batch in our terms; verl's prompt, kept apart there, becomes one column in front."""
    mask = torch.nn.functional.pad(batch["response_mask"], (1, 0))
    rewards = torch.zeros(mask.shape, dtype=torch.float64) if rewards is None else rewards
    return Trajectories(
        tokens=torch.zeros(mask.shape, dtype=torch.int64),
        lengths=torch.full((len(mask),), mask.shape[1]),
        agent_mask=mask,
        behaviour_logprobs=torch.nn.functional.pad(batch["old_log_prob"], (1, 0)) * mask,
        rewards=rewards,
        group_ids=torch.zeros(len(mask), dtype=torch.int64) if groups is None else groups,
        policy_updates=torch.zeros(len(mask), dtype=torch.int64),
    )


def ours(batch, ratio, stabilizer, aggregation):
    """(loss, gradient, diagnostics, divisor) of `Objective.surrogate`, with the divisor that our trainer applies."""
    objective = Objective(TokenGAE(), ratio, Clip(0.2, 0.28), STABILIZERS[stabilizer], aggregation)
    log_prob = batch["log_prob"].clone().requires_grad_()
    padded = torch.nn.functional.pad(log_prob, (1, 0))
    advantages = torch.nn.functional.pad(batch["advantages"], (1, 0))
    got = objective(padded, trajectories(batch), advantages)
    norm = estimated_bias_norms(got, padded)["clipping_bias_norm_logprob"]
    (gradient,) = torch.autograd.grad(got.loss, log_prob)
    divisor = objective.stabilizer.divisor(norm)
    return got.loss.detach() / divisor, gradient / divisor, got.diagnostics, norm, divisor


def assert_equal(a, b, tolerance=1e-12):
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(a[1], b[1], rtol=0, atol=tolerance)


# ---- the losses are ours ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "reading", "mode"),
    [(*which, mode) for which in LOSSES for mode in MODES if (which[1], mode) != ("B", "token-mean")],
)
def test_loss_and_gradient_are_our_objectives(loss, reading, mode):
    ratio, stabilizer = LOSSES[loss, reading]
    batch = a_batch()
    got = plugged(loss, batch, actor(mode, {"reading": reading, "c0": 0.01}, loss))
    expected = ours(batch, ratio, stabilizer, "turn_mean" if reading == "B" else MODES[mode])
    assert_equal(got, expected)
    metrics, (diagnostics, norm, divisor) = got[2], expected[2:]
    assert 0.05 < metrics["actor/pg_clipfrac"] < 0.9
    assert metrics["actor/pg_clipfrac"] == pytest.approx(diagnostics["clip_fraction"], abs=1e-12)
    assert metrics["actor/ppo_kl"] == pytest.approx(diagnostics["kl_behaviour_k1"], abs=1e-12)
    fully = diagnostics["turn_fully_clipped_fraction"]
    assert metrics["actor/clip_fraction_turn"] == pytest.approx(fully, abs=1e-12)
    assert metrics["actor/clipping_bias_norm_logprob"] == pytest.approx(norm, rel=1e-12)
    assert metrics["actor/stabilizer_divisor"] == pytest.approx(divisor, rel=1e-12)
    assert (divisor > 1.5) == (stabilizer == "norm")
    assert metrics["actor/ctn_penalty"] == pytest.approx(diagnostics["ctn_penalty"], rel=1e-12)
    assert (metrics["actor/ctn_penalty"] > 0.01) == (stabilizer == "ctn")


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"],
)
def test_every_mode_is_verls_vanilla_at_token_level(mode):
    """Without a binding divisor S-PPO is token PPO, which verl has itself, in all of its modes."""
    batch, info = a_batch(), {"dp_size": 2, "batch_num_tokens": 200, "global_batch_size": 32}
    got = plugged("s_ppo", batch, actor(mode, {"c0": 1e9}, "s_ppo", **info))
    vanilla = actor(mode, None, "vanilla", **info)
    object.__setattr__(vanilla, "clip_ratio_c", 1e9)
    assert_equal(got, plugged("vanilla", batch, vanilla))
    assert got[2]["actor/pg_clipfrac"] > 0.05


def test_importance_weights_of_the_rollout_multiply_the_terms_as_in_verl():
    batch = a_batch()
    weights = normal((8, 24), 5).exp() * batch["response_mask"]
    vanilla = actor("token-mean", None, "vanilla")
    object.__setattr__(vanilla, "clip_ratio_c", 1e9)
    got = plugged("s_ppo", batch, actor(options={"c0": 1e9}, loss="s_ppo"), rollout_is_weights=weights)
    assert_equal(got, plugged("vanilla", batch, vanilla, rollout_is_weights=weights))


@pytest.mark.parametrize(("loss", "reading"), LOSSES)
def test_half_precision_log_probs_are_summed_in_single(loss, reading):
    """Long turns: a bfloat16 sum of ones would stop at 256."""
    shape = (2, 3000)
    batch = {
        "old_log_prob": -normal(shape, 1).abs().bfloat16(),
        "advantages": normal(shape, 3).float(),
        "response_mask": torch.ones(shape, dtype=torch.bool),
    }
    batch["log_prob"] = batch["old_log_prob"] + normal(shape, 2, 0.3).bfloat16()
    config = actor("seq-mean-token-mean", {"reading": reading, "c0": 1e-3}, loss)
    got = plugged(loss, batch, config)
    single = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
    expected = plugged(loss, single, config)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(got[1], expected[1].bfloat16(), rtol=0, atol=0)
    assert got[2] == pytest.approx(expected[2], rel=1e-6)


def test_a_default_c0_is_warned_of_once(caplog):
    from stppo.plugins import verl

    verl._warn_of_default_c0.cache_clear()
    batch = a_batch()
    for _ in range(2):
        plugged("st_ppo", batch, actor())
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "policy_loss.c0" in record.message
    caplog.clear()
    plugged("turn_ppo", batch, actor(loss="turn_ppo"))
    plugged("so_ppo", batch, actor(options={"reading": "B"}, loss="so_ppo"))
    plugged("s_ppo", batch, actor(options={"c0": 1e-3}, loss="s_ppo"))
    assert not caplog.records


# ---- masks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "reading"), LOSSES)
def test_a_micro_batch_without_agent_tokens_has_loss_zero_and_the_same_metrics(loss, reading):
    batch, config = a_batch(), actor(options={"reading": reading}, loss=loss)
    keys = plugged(loss, batch, config)[2].keys()
    batch["response_mask"][:] = False
    value, gradient, metrics = plugged(loss, batch, config)
    assert value == 0 and not gradient.any() and metrics.keys() == keys
    assert metrics["actor/stabilizer_divisor"] == 1


def test_single_token_holes_are_refused_where_turns_matter():
    batch = a_batch()
    batch["response_mask"][3, 8] = False  # the second turn of row 3 was 7..9
    with pytest.raises(ValueError, match="rollout_rs=token_.*use a seq_"):
        plugged("st_ppo", batch, actor(options={}))
    plugged("s_ppo", batch, actor(options={}, loss="s_ppo"))  # no turns, no harm


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_mask": torch.full((8, 24), 0.5)}, "response_mask: must be 1 on agent tokens"),
        ({"response_mask": torch.ones(8, 23)}, r"response_mask: expected .* \(8, 24\), got \(8, 23\)"),
        ({"advantages": torch.ones(8)}, r"advantages: expected .*, got \(8,\)"),
        ({"config": None}, "st_ppo: config is missing"),
    ],
)
def test_bad_input_is_named(change, message):
    from stppo.plugins.verl import policy_loss

    with pytest.raises(ValueError, match=message):
        policy_loss("st_ppo", **{**a_batch(), "config": actor(options={}), **change})


# ---- micro-batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_micro_batch_estimates_the_minibatchs_norm(mode, dp_size):
    """Squared norms add, so with equal micro-batches each must find the norm of the whole, on any number of ranks."""
    batch, parts = a_batch(), 4
    whole = {name: torch.cat([tensor] * parts) for name, tensor in batch.items()}
    tokens = int(whole["response_mask"].sum())
    info = {"dp_size": dp_size, "batch_num_tokens": tokens, "global_batch_size": 8 * parts}
    options = {"c0": 0.01}
    expected = plugged("st_ppo", whole, actor(mode, options))
    got = plugged("st_ppo", batch, actor(mode, options, **info))
    for name in ("actor/clipping_bias_norm_logprob", "actor/stabilizer_divisor"):
        assert got[2][name] == pytest.approx(expected[2][name], rel=1e-12)
    assert expected[2]["actor/stabilizer_divisor"] > 1.2
    # The ranks' average of the summed micro-batches is the minibatch's loss and gradient.
    torch.testing.assert_close(got[0] * parts / dp_size, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1] / dp_size, expected[1][:8], rtol=0, atol=1e-12)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"c0": 0}, "c0=0"),
        ({"c0": "0.1"}, "c0='0.1'"),
        ({"c0": float("nan")}, "c0=nan"),
        ({"reading": "C"}, "reading='C'"),
        ({"reading": "B"}, "reading='B'"),
        ({"loss_mode": "stppo"}, "loss_mode='stppo'"),
        (
            {"rollout_correction": {"rollout_rs": "seq_mean_k1, token_k2"}},
            "rollout_rs='seq_mean_k1, token_k2'",
        ),
    ],
)
def test_bad_options_are_named(options, field):
    from stppo.plugins.verl import TurnPolicyLossConfig

    with pytest.raises(ValueError, match=field):
        TurnPolicyLossConfig(**{"loss_mode": "st_ppo", **options})


def test_sequence_level_rejection_and_token_losses_are_allowed():
    from stppo.plugins.verl import TurnPolicyLossConfig

    TurnPolicyLossConfig(rollout_correction={"rollout_rs": "seq_mean_k1"})
    TurnPolicyLossConfig(loss_mode="s_ppo", rollout_correction={"rollout_rs": "token_k1"})
    TurnPolicyLossConfig(loss_mode="vanilla")


# ---- advantages ---------------------------------------------------------------------------------


def estimate(rewards, mask, index, **config):
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    import stppo.plugins.verl  # noqa: F401

    return get_adv_estimator_fn("grpo_turn_return")(
        token_level_rewards=rewards, response_mask=mask, index=index, config=config
    )


def test_turn_returns_are_our_group_normalised():
    batch = a_batch()
    mask = batch["response_mask"]
    rewards = normal((8, 24), 6) * mask
    index = np.array(list("babaabba"), dtype=object)
    got, again = estimate(rewards, mask, index)
    padded = torch.nn.functional.pad(rewards, (1, 0))
    groups = torch.tensor([int(name == "b") for name in index])
    expected = GroupNormalised(group_size=4, returns="turn")(trajectories(batch, padded, groups)).advantages
    torch.testing.assert_close(got, expected[:, 1:], rtol=0, atol=1e-12)
    assert torch.equal(got, again) and got.std() > 0.1


def test_with_a_terminal_reward_turn_returns_are_verls_grpo_whatever_the_groups():
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    mask = a_batch()["response_mask"]
    rewards = torch.zeros(8, 24, dtype=torch.float64)
    rewards[:, 23] = normal((8,), 7)  # after the last agent token, where it ends before
    rewards[7] = rewards[7].roll(6)  # in the first of row 7's observations
    mask[6] = False  # rejected as a whole, but its return still counts
    index = np.array([1, 1, 1, 1, 1, 2, 2, 2], dtype=object)
    got, _ = estimate(rewards, mask, index)
    expected, _ = compute_grpo_outcome_advantage(rewards, mask.double(), index)
    late = torch.tensor([row for row in range(8) if row != 7])
    torch.testing.assert_close(got[late], expected[late], rtol=0, atol=1e-7)
    torch.testing.assert_close(got[7, :4], expected[7, :4], rtol=0, atol=1e-7)
    assert (got[7, 7:9] - expected[7, 7:9]).abs().min() > 1e-3, "the second turn came after the reward"


def test_a_response_alone_in_its_group_gets_nothing():
    mask = a_batch()["response_mask"]
    got, _ = estimate(normal((8, 24), 6) * mask, mask, np.array([0, 0, 0, 0, 1, 1, 1, 2]))
    assert not got[7].any() and got[:7][mask[:7]].abs().min() > 0


@pytest.mark.parametrize(
    ("index", "config", "message"),
    [
        (None, {}, "no uid"),
        (np.arange(8), {}, r"rollout.n >= 2"),
        (np.zeros(8), {"norm_adv_by_std_in_grpo": False}, "norm_adv_by_std_in_grpo=false.*use grpo"),
        (np.zeros(8), {"rollout_correction": {"rollout_rs": "token_k1"}}, "rollout_rs='token_k1'"),
    ],
)
def test_what_the_estimator_refuses(index, config, message):
    mask = a_batch()["response_mask"]
    with pytest.raises(ValueError, match=message):
        estimate(mask.double(), mask, index, **config)


# ---- how verl finds it --------------------------------------------------------------------------

SHOW = """
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as losses, ADV_ESTIMATOR_REGISTRY as estimators
names = {"turn_ppo", "s_ppo", "st_ppo", "so_ppo", "so_grpo", "topr", "minirl", "m2po", "bapo", "bapo_ratio", "vespo"}
names |= {"grpo_guard", "llds", "agilerl_turn", "sequence_mask", "so_ppo_ctn_c"}
print("FOUND", names <= set(losses), {"grpo_turn_return", "batch_mean"} <= set(estimators))
"""


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


OFF = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
REGISTERS = {
    "entry point": ("import verl", {}, True),
    "no entry points": ("import verl", OFF, False),
    "variable": ("import verl", OFF | {"VERL_USE_EXTERNAL_MODULES": "stppo.plugins.verl"}, True),
    "external_lib": (
        "from verl.workers.config import HFModelConfig as C; C(path={!r}, external_lib='stppo.plugins.verl')",
        OFF,
        True,
    ),
    "the plug-in first": ("import stppo.plugins.verl", {}, True),
}


@pytest.mark.parametrize("way", REGISTERS)
def test_losses_are_registered(way, tiny_model):
    code, environment, there = REGISTERS[way]
    assert f"FOUND {there} {there}" in python(code.format(str(tiny_model)) + SHOW, **environment)


def check_command(**environment):
    code = "from stppo import cli; import sys; sys.argv = ['stppo', 'plugins', 'check', 'verl']; cli.main()"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


SITE = "import sys, types\nsys.modules[{!r}] = {}\n"
CHECKS = {  # what Python starts with, variables, the exit code and what the last line names
    # verl's trainer wants `transfer_queue`, which verl without its extra does not bring.
    "a trainer that cannot be imported": (
        SITE.format("verl.trainer.ppo.v1", None),
        {},
        1,
        "verl's default trainer cannot be imported",
    ),
    "one that can": (
        SITE.format("verl.trainer.ppo.v1", "types.ModuleType('v1')"),
        {},
        0,
        "registers turn_ppo",
    ),
    "entry points are off": ("", OFF, 1, "external_lib=stppo.plugins.verl"),
    "an error that verl swallows": (SITE.format("stppo.objectives", None), {}, 1, "ModuleNotFoundError"),
}


@pytest.mark.parametrize("case", CHECKS)
def test_check_names_what_is_missing(tmp_path, case):
    site, variables, code, said = CHECKS[case]
    (tmp_path / "sitecustomize.py").write_text(site, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = check_command(PYTHONPATH=path, **variables)
    last = (done.stderr if code else done.stdout).strip().splitlines()[-1]
    assert done.returncode == code and said in last, done.stdout + done.stderr


# ---- verl's own config code ---------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A model folder of a few kilobytes (config and tokenizer), which verl's config code wants to read."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>").save_pretrained(
        folder
    )
    return folder


def compose_cluster(name, tiny_model, *overrides):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    given = [
        "data.train_files=train.parquet",
        "data.val_files=test.parquet",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={CLUSTER / 'search_tool.yaml'}",
        f"actor_rollout_ref.model.path={tiny_model}",
    ]
    with initialize_config_dir(version_base=None, config_dir=str(CLUSTER)):
        config = compose(name, overrides=[*given, *overrides])
    OmegaConf.resolve(config)  # as verl's task runner does
    return config


SIZES = {
    "qwen2.5_1.5b_1gpu": ("Qwen/Qwen2.5-1.5B-Instruct", 1),
    "qwen2.5_7b_8gpu": ("Qwen/Qwen2.5-7B-Instruct", 8),
    "qwen2.5_7b_8gpu_async": ("Qwen/Qwen2.5-7B-Instruct", 4),
}
VARIANTS = {
    "st_ppo": [],
    "turn_ppo": ["actor_rollout_ref.actor.policy_loss.loss_mode=turn_ppo"],
    "baseline": ["actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"],
    "so_grpo": [
        "actor_rollout_ref.actor.policy_loss.loss_mode=so_grpo",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=5",
    ],
    "so_grpo, reading B": [
        "actor_rollout_ref.actor.policy_loss.loss_mode=so_grpo",
        "actor_rollout_ref.actor.policy_loss.reading=B",
        "algorithm.adv_estimator=grpo_turn_return",
        "actor_rollout_ref.rollout.n=5",
    ],
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", SIZES)
def test_verl_accepts_the_cluster_configs(size, variant, tiny_model, monkeypatch):
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from stppo.plugins.verl import TurnPolicyLossConfig

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = compose_cluster(size, tiny_model, *VARIANTS[variant])
    assert OmegaConf.missing_keys(config) == {"reward.reward_model.rollout.name"}  # verl's own; not used
    assert need_critic(config) == ("grpo" not in variant) and need_reference_policy(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    actor_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    options = actor_config.policy_loss
    assert type(options) is TurnPolicyLossConfig
    assert (options.c0, options.reading) == (1.6e-4, "B" if variant.endswith("B") else "A")
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.multi_turn.enable and rollout.agent.default_agent_loop == "tool_agent"
    assert config.trainer.n_gpus_per_node == SIZES[size][1]
    text = (CLUSTER / f"{size}.yaml").read_text(encoding="utf-8")
    assert SIZES[size][0] in text
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert actor_config.ppo_max_token_len_per_gpu >= longest, "a trajectory must fit into a micro-batch"


def test_verls_asynchronous_trainer_takes_our_config(tiny_model, monkeypatch):
    """Its constructor checks batches, pools and the backend; its bound on staleness is ours."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    from stppo.config.composition import compose

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def trainer(*overrides):
        config = compose_cluster("qwen2.5_7b_8gpu_async", tiny_model, *overrides)
        return get_trainer_cls(config.trainer.v1.trainer_mode)(config)

    made = trainer()
    ours = compose(["training=off_policy"])["training"]["staleness_iterations"]
    assert made.replay_buffer.max_off_policy_threshold == ours + 1  # a batch spans its own policy, too
    assert made.parameter_sync_step == 2 and made.config.trainer.n_gpus_per_node == 4
    with pytest.raises(AssertionError, match="train_batch_size must equal"):
        trainer("data.train_batch_size=128")


def test_token_level_rejection_is_refused_through_the_cluster_config(tiny_model):
    from hydra.errors import InstantiationException
    from verl.utils.config import omega_conf_to_dataclass

    config = compose_cluster(
        "qwen2.5_1.5b_1gpu", tiny_model, "algorithm.rollout_correction.rollout_rs=token_k1"
    )
    with pytest.raises(InstantiationException, match="rollout_rs='token_k1'.*splits turns"):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def test_every_override_of_the_readme_composes(tiny_model):
    """Each launch command, as typed there."""
    import re
    import shlex

    text = (CLUSTER / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^python -m verl\.trainer\.main_ppo (.*)$", text, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command.replace("$CLUSTER", str(CLUSTER)))
        name = next(word.partition("=")[2] for word in words if word.startswith("--config-name"))
        overrides = [word for word in words if not word.startswith("--")]
        compose_cluster(name, tiny_model, *overrides)


# ---- a Ray worker -------------------------------------------------------------------------------
