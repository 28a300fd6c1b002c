"""The TRL plug-in: its loss against TRL's own and against ours, its divisor, its roll-outs, and that it learns."""

import copy
import dataclasses
import math
import random

import pytest
import torch

pytest.importorskip("trl")
from transformers import GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from stppo.objectives import (
    Clip,
    ClippingBiasNorm,
    CtnKL,
    GroupNormalised,
    NoStabilizer,
    Objective,
    Ratio,
    estimated_bias_norms,
)
from stppo.plugins.trl import TurnGRPOConfig, TurnGRPOTrainer, search_dataset, search_reward, search_rollout
from stppo.policy.policy import PolicyConfig, build_policy
from stppo.training.warm_start import demonstration_batch
from stppo.trajectories import Trajectories
from stppo.world import DemonstrationNoise, DialogueEncoder, SyntheticWorld, play
from tests.training_runs import imitate

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EXACT = 1e-12
LENGTHS = [[3, 1, 4], [2], [1, 1], [5, 2], [1, 3, 2], [4, 4]]  # of the turns, per row


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world():
    return small_world()


def small_world():
    return SyntheticWorld(
        n_entities=12,
        n_relations=2,
        facts_per_document=2,
        n_name_parts=6,
        hop_shares=(1.0,),
        n_train=16,
        n_validation=4,
        n_test=4,
        held_out=0.34,
        turn_budget=2,
        max_turn_tokens=8,
        think_probability=0.0,
    )


def policy(world, seed=0, hidden_size=32):
    torch.manual_seed(seed)
    size = dict(
        hidden_size=hidden_size, intermediate_size=64, layers=2, heads=2, kv_heads=2, max_positions=128
    )
    return build_policy(PolicyConfig(name="tiny", **size), world.tokenizer)


def warmed_up(world, seed, steps=80):
    """Has seen noisy demonstrations: plays by the rules, answers too early or wrongly most of the time."""
    model, rng = policy(world, seed), random.Random(seed)
    questions = [rng.choice(world.questions("train")) for _ in range(256)]
    noise = DemonstrationNoise(early_answer=0.3, wrong_entity=0.3, malformed=0.05)
    encoder = DialogueEncoder(world.environment.protocol, world.tokenizer)
    data = demonstration_batch(play(world, questions, rng, noise), encoder)
    imitate(model, data, steps, 3e-3, rows=32)
    return model


def options(tmp_path, **changes):
    small = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=64, max_steps=1)
    cpu = dict(use_cpu=True, bf16=False, gradient_checkpointing=False)
    silent = dict(report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1)
    return dict(output_dir=str(tmp_path), lr_scheduler_type="constant") | small | cpu | silent | changes


def trainer_of(kind, config, world, model=None, **arguments):
    given = dict(
        model=model or policy(world),
        args=config,
        processing_class=world.tokenizer,
        train_dataset=search_dataset(world),
        reward_funcs=search_reward,
        rollout_func=search_rollout(world),
    )
    trainer = kind(**(given | arguments))
    trainer.current_gradient_accumulation_steps = 1  # the training loop sets it
    trainer.model.train()
    return trainer


# A batch of log-probs, in TRL's shapes


def normal(shape, seed, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masks(lengths=LENGTHS, gap=2, extra=3):
    """TRL's (completion_mask, tool_mask) of a turn first, observations between, padding last with tool_mask 1."""
    width = max(sum(row) + gap * (len(row) - 1) for row in lengths) + extra
    completion, tool = torch.zeros(len(lengths), width).long(), torch.ones(len(lengths), width).long()
    for i, row in enumerate(lengths):
        at = 0
        for k, length in enumerate(row):
            at += length
            if k + 1 < len(row):
                tool[i, at : at + gap] = 0
                at += gap
        completion[i, :at] = 1
    return completion, tool


def batch_of(lengths=LENGTHS, spread=0.4, seed=0, **changes):
    """(log-probs, inputs of `_compute_loss`)"""
    completion, tool = masks(lengths)
    shape = completion.shape
    old = -normal(shape, seed).abs()
    inputs = {
        "prompt_ids": torch.zeros(shape[0], 1).long(),
        "prompt_mask": torch.ones(shape[0], 1).long(),
        "completion_ids": torch.zeros(shape).long(),
        "completion_mask": completion,
        "tool_mask": tool,
        "advantages": normal(shape[:1], seed + 1),
        "old_per_token_logps": old,
        "ref_per_token_logps": old + normal(shape, seed + 2, 0.1),
        "importance_sampling_ratio": normal(shape[:1], seed + 3, 0.2).exp()[:, None],
        "num_items_in_batch": (completion * tool).sum(),
    }
    return old + normal(shape, seed + 4, spread), inputs | changes


def loss_and_gradient(trainer, logprobs, inputs, monkeypatch):
    """Of `_compute_loss` at log-probs that stand in for those of the model."""
    logprobs = logprobs.clone().requires_grad_()
    entropies = 1 + normal(logprobs.shape, 9).abs()
    scores = (logprobs, entropies, None)
    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *a, **k: scores)
        loss = trainer._compute_loss(trainer.model, inputs)
        return loss.detach(), torch.autograd.grad(loss, logprobs, retain_graph=True)[0]


def assert_same(ours, theirs, tolerance=EXACT):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)


@pytest.fixture
def turn_trainer(world, tmp_path):
    def make(use_vllm=False, **changes):
        given = dict(bias_norm_c0=1e-3) | changes
        trainer = trainer_of(TurnGRPOTrainer, TurnGRPOConfig(**options(tmp_path, **given)), world)
        trainer.use_vllm = use_vllm
        return trainer

    return make


@pytest.fixture
def trl_trainer(world, tmp_path):
    def make(use_vllm=False, **changes):
        trainer = trainer_of(GRPOTrainer, GRPOConfig(**options(tmp_path, **changes)), world)
        trainer.use_vllm = use_vllm
        return trainer

    return make


TRL_OPTIONS = {
    "grpo": dict(loss_type="grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "dapo": dict(loss_type="dapo", epsilon_high=0.28),
    "reference KL": dict(loss_type="grpo", use_bias_correction_kl=False),
    "entropy mask": dict(loss_type="grpo", top_entropy_quantile=0.5),
    "entropy bonus": dict(loss_type="grpo", entropy_coef=0.1),
    "off-policy mask": dict(loss_type="grpo", off_policy_mask_threshold=0.01),
    "vLLM correction": dict(loss_type="grpo", use_vllm=True),
}


@pytest.mark.parametrize("name", TRL_OPTIONS)
@pytest.mark.parametrize(
    ("level", "lengths"), [("token", [[1, 1, 1], [1], [1, 1], [1] * 5]), ("sequence", [[3], [1], [6], [2]])]
)
def test_one_token_turns_are_trls_token_level_and_single_turns_its_sequence_level(
    turn_trainer, trl_trainer, level, lengths, name, monkeypatch
):
    """Every option of TRL that touches the loss goes through our ratio and comes out as TRL's own."""
    logprobs, inputs = batch_of(lengths)
    if name == "off-policy mask":  # of failures alone
        inputs["advantages"] = -inputs["advantages"].abs()
    results = []
    for make, given in ((turn_trainer, {}), (trl_trainer, {"importance_sampling_level": level})):
        trainer = make(**TRL_OPTIONS[name], **given)
        # A reference model would have to be loaded; its log-probs are given here.
        trainer.beta = 0.1 if name == "reference KL" else 0.0
        results.append((trainer, loss_and_gradient(trainer, logprobs, inputs, monkeypatch)))
    (ours, mine), (theirs, other) = results
    assert other[1].abs().sum() > 0
    assert_same(mine, other)
    metrics, expected = ours._metrics["train"], theirs._metrics["train"]
    assert set(expected) <= set(metrics)
    if level == "token":  # at sequence level TRL counts sequences where it counts tokens otherwise
        for key, values in expected.items():
            assert metrics[key] == pytest.approx(values, nan_ok=True, abs=1e-6), key


# Against our own objective


def as_trajectories(inputs):
    """The same batch for `Objective.surrogate`, behind one prompt token (a first token has no context)."""
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    mask = torch.nn.functional.pad(mask, (1, 0))
    rows, width = mask.shape
    return Trajectories(
        tokens=torch.zeros(rows, width).long(),
        lengths=torch.full((rows,), width),
        agent_mask=mask,
        behaviour_logprobs=torch.nn.functional.pad(inputs["old_per_token_logps"], (1, 0)) * mask,
        rewards=torch.zeros(rows, width).double(),
        group_ids=torch.arange(rows),
        policy_updates=torch.zeros(rows).long(),
    )


def ours_on(objective, logprobs, inputs):
    """(loss, gradient with respect to the (B, T) log-probs, surrogate, its log-probs)"""
    batch = as_trajectories(inputs)
    padded = torch.nn.functional.pad(logprobs, (1, 0)).requires_grad_()
    surrogate = objective(padded, batch, inputs["advantages"][:, None].expand(padded.shape))
    (gradient,) = torch.autograd.grad(surrogate.loss, padded, retain_graph=True)
    return surrogate.loss.detach(), gradient[:, 1:], surrogate, padded


LOSSES = {"grpo": "trajectory_mean", "bnpo": "token_mean", "turn_mean": "turn_mean"}
LEVELS = [("token", "geometric")] + [
    (level, how) for level in ("turn", "sequence") for how in ("geometric", "arithmetic", "product")
]


def objective_of(level, how, loss_type, stabilizer=None, low=0.2, high=0.3):
    return Objective(
        GroupNormalised(group_size=2),
        Ratio(level, how),
        Clip(low, high),
        stabilizer or NoStabilizer(),
        LOSSES[loss_type],
    )


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize(("level", "how"), LEVELS)
@pytest.mark.parametrize("seed", [0, 100])
def test_loss_gradient_clip_fraction_and_bias_norm_are_our_objectives(
    turn_trainer, level, how, loss_type, seed, monkeypatch
):
    logprobs, inputs = batch_of(seed=seed)
    low, high = (0.02, 0.03) if level == "sequence" and how != "product" else (0.2, 0.3)
    trainer = turn_trainer(
        importance_sampling_level=level,
        ratio_aggregation=how,
        loss_type=loss_type,
        epsilon=low,
        epsilon_high=high,
        stabilizer="clipping_bias_norm",
    )
    mine = loss_and_gradient(trainer, logprobs, inputs, monkeypatch)
    loss, gradient, surrogate, padded = ours_on(
        objective_of(level, how, loss_type, low=low, high=high), logprobs, inputs
    )
    assert_same(mine, (loss, gradient))
    clipped = surrogate.diagnostics["clip_fraction"]
    assert 0 < clipped < 1
    metrics = trainer._metrics["train"]
    assert metrics["clip_ratio/region_mean"] == [pytest.approx(clipped, abs=1e-6)]
    assert metrics["clip_ratio/out_of_range_token"] == [
        pytest.approx(surrogate.diagnostics["out_of_range_fraction_token"], abs=1e-6)
    ]
    norm = estimated_bias_norms(surrogate, padded)["clipping_bias_norm_logprob"]
    assert math.sqrt(trainer._bias_square) == pytest.approx(norm, abs=EXACT, rel=1e-10)


def test_ctn_penalty_is_ours(turn_trainer, monkeypatch):
    logprobs, inputs = batch_of()
    trainer = turn_trainer(
        ratio_aggregation="arithmetic",
        loss_type="turn_mean",
        epsilon=0.2,
        epsilon_high=0.3,
        stabilizer="ctn_kl",
        ctn_coefficient=0.7,
    )
    mine = loss_and_gradient(trainer, logprobs, inputs, monkeypatch)
    rule = objective_of("turn", "arithmetic", "turn_mean", CtnKL(0.7))
    loss, gradient, surrogate, _ = ours_on(rule, logprobs, inputs)
    assert_same(mine, (loss, gradient))
    assert surrogate.diagnostics["ctn_penalty"] > 1e-3
    assert trainer._metrics["train"]["stabilizer/ctn_penalty"] == [
        pytest.approx(surrogate.diagnostics["ctn_penalty"])
    ]
    halved = turn_trainer(stabilizer="ctn_kl", ratio_aggregation="arithmetic", loss_type="turn_mean")
    whole = loss_and_gradient(halved, logprobs, inputs, monkeypatch)
    halved.current_gradient_accumulation_steps = 2
    assert_same([part * 2 for part in loss_and_gradient(halved, logprobs, inputs, monkeypatch)], whole)


def test_ratios_that_underflow_leave_no_nan(turn_trainer, monkeypatch):
    """A turn of a few hundred tokens has a product of 0 in any precision."""
    logprobs, inputs = batch_of([[400, 2], [3]], spread=0.1)
    logprobs[0, :400] -= 3.0
    logprobs[1] = inputs["old_per_token_logps"][1]
    for advantage in (1.0, -1.0):
        inputs["advantages"][:] = advantage
        trainer = turn_trainer(ratio_aggregation="product", stabilizer="clipping_bias_norm")
        loss, gradient = loss_and_gradient(trainer, logprobs, inputs, monkeypatch)
        assert loss.isfinite() and gradient.isfinite().all() and math.isfinite(trainer._bias_square)
        assert gradient[0, :400].abs().max() == 0 and gradient[1].abs().max() > 0


# The divisor


def test_the_exact_norm_is_that_of_the_parameter_gradient(world, tmp_path):
    """Against `Objective.surrogate` on log-probs scored by the plain model over two micro-batches. Weights are
    float64, but TRL's output layer works in float32."""
    model = policy(world).double()
    config = TurnGRPOConfig(
        **options(tmp_path, stabilizer="clipping_bias_norm", bias_norm_estimator="exact", loss_type="grpo")
    )
    trainer = trainer_of(TurnGRPOTrainer, config, world, model)
    trainer.current_gradient_accumulation_steps = 2
    expected = None
    for seed in (0, 1):
        _, inputs = batch_of(seed=seed)
        ids = torch.randint(5, inputs["completion_ids"].shape, generator=torch.Generator().manual_seed(seed))
        inputs |= {"completion_ids": ids, "prompt_ids": torch.full((len(ids), 1), 3)}
        tokens = torch.cat([inputs["prompt_ids"], ids], 1)
        logprobs = model(input_ids=tokens).logits.log_softmax(-1)[:, :-1]
        logprobs = logprobs.gather(2, tokens[:, 1:, None]).squeeze(2)
        inputs["old_per_token_logps"] = logprobs.detach() - normal(ids.shape, seed + 4, 0.4)
        batch = as_trajectories(inputs)
        surrogate = objective_of("turn", "geometric", "grpo", low=0.2, high=0.2)(
            torch.nn.functional.pad(logprobs, (1, 0)),
            batch,
            inputs["advantages"][:, None].expand(batch.tokens.shape),
        )
        parts = torch.autograd.grad(surrogate.bias_surrogate / 2, list(model.parameters()))
        expected = parts if expected is None else [a + b for a, b in zip(expected, parts, strict=True)]
        trainer._compute_loss(model, inputs).backward()
    norm = math.sqrt(sum(part.square().sum().item() for part in expected))
    before = [p.grad.clone() for p in model.parameters()]
    trainer._divide_gradient()
    metrics = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    assert norm > 0.1
    assert metrics["stabilizer/clipping_bias_norm_exact"] == pytest.approx(norm, rel=1e-6)
    assert metrics["stabilizer/divisor"] == pytest.approx(norm / 0.1, rel=1e-6)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad * metrics["stabilizer/divisor"], gradient)
    trainer._divide_gradient()
    assert trainer._metrics["train"]["stabilizer/divisor"][-1] == 1.0, "the next update starts from nothing"


@pytest.mark.parametrize("estimator", ["logprob", "exact"])
def test_the_divisor_divides_the_clipped_gradient(world, tmp_path, estimator):
    """Two SGD runs that differ in the stabiliser alone: equal until the clip binds, then in the divisor only."""
    runs = {}
    for stabilizer in ("none", "clipping_bias_norm"):
        given = dict(epsilon=1e-4, num_iterations=2, max_steps=2, max_grad_norm=0.05, learning_rate=1.0)
        config = TurnGRPOConfig(
            **options(
                tmp_path,
                **given,
                stabilizer=stabilizer,
                bias_norm_c0=1e-3,
                bias_norm_estimator=estimator,
                per_device_train_batch_size=32,
            )
        )
        model = warmed_up(world, 0).double()  # or small moves would be rounded off large parameters
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = trainer_of(
            TurnGRPOTrainer,
            config,
            world,
            model,
            optimizers=(optimizer, None),
            reward_funcs=lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids],
        )
        steps = [[p.detach().clone() for p in model.parameters()]]
        keep = TrainerCallback()
        keep.on_step_end = lambda *a, model=model, steps=steps, **k: steps.append(
            [p.detach().clone() for p in model.parameters()]
        )
        trainer.add_callback(keep)
        trainer.train()
        moves = [
            torch.cat([(b - a).flatten() for a, b in zip(*pair, strict=True)])
            for pair in zip(steps, steps[1:], strict=False)
        ]
        runs[stabilizer] = moves, [row for row in trainer.state.log_history if "stabilizer/divisor" in row]
    (plain, _), (divided, rows) = runs["none"], runs["clipping_bias_norm"]
    assert [row["stabilizer/divisor"] for row in rows][0] == 1.0
    divisor = rows[1]["stabilizer/divisor"]
    assert divisor > 1.5
    torch.testing.assert_close(divided[0], plain[0], rtol=0, atol=0)
    assert plain[1].norm() == pytest.approx(0.05, rel=1e-4), "the gradient clip binds"
    torch.testing.assert_close(divided[1] * divisor, plain[1], rtol=1e-6, atol=1e-10)


def test_evaluation_has_no_divisor(turn_trainer, monkeypatch):
    logprobs, inputs = batch_of()
    trainer = turn_trainer(stabilizer="clipping_bias_norm")
    trainer.model.eval()
    with torch.no_grad():
        loss = trainer._compute_loss
        scores = (logprobs, torch.ones_like(logprobs), None)
        monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *a, **k: scores)
        assert loss(trainer.model, inputs).isfinite()
    assert trainer._bias_square == 0.0 and not trainer._metrics["train"]
    assert "clip_ratio/turn_region_mean" in trainer._metrics["eval"]


# Bad input

BIAS = dict(stabilizer="clipping_bias_norm")


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("importance_sampling_level", dict(importance_sampling_level="sentence")),
        ("importance_sampling_level", dict(importance_sampling_level=3)),
        ("ratio_aggregation", dict(ratio_aggregation="median")),
        ("stabilizer", dict(stabilizer="norm")),
        ("stabilizer", dict(stabilizer=None)),
        ("bias_norm_c0", BIAS | dict(bias_norm_c0="0.1")),
        ("bias_norm_c0", BIAS | dict(bias_norm_c0=0)),
        ("bias_norm_c0", BIAS),
        ("bias_norm_estimator", BIAS | dict(bias_norm_c0=0.1, bias_norm_estimator="last_block")),
        (
            "gradient_checkpointing_kwargs",
            BIAS | dict(bias_norm_estimator="exact", gradient_checkpointing_kwargs={"use_reentrant": True}),
        ),
        ("ctn_coefficient", dict(stabilizer="ctn_kl", ctn_coefficient=-1.0)),
        ("epsilon", dict(epsilon=-0.2)),
        ("epsilon_high", dict(epsilon_high="wide")),
        ("loss_type", dict(loss_type="cispo")),
        ("delta", dict(delta=3.0)),
        ("use_bias_correction_kl", dict(beta=0.1, use_bias_correction_kl=True)),
        ("old_logprobs", dict(old_logprobs="vllm")),
        ("vllm_importance_sampling_correction", dict(old_logprobs="rollout", use_vllm=True)),
    ],
)
def test_bad_options_are_named_in_one_line(tmp_path, field, changes):
    with pytest.raises(ValueError) as error:
        TurnGRPOConfig(**options(tmp_path, **changes))
    text = str(error.value)
    assert field in text and text.startswith("TurnGRPOConfig.") and "\n" not in text


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, True),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, True),
        ({"num_iterations": 2}, False),
        ({"steps_per_generation": 2}, False),
    ],
)
def test_one_step_a_batch_is_warned_of_since_ratios_stay_1(world, tmp_path, caplog, changes, warns):
    trainer_of(TurnGRPOTrainer, TurnGRPOConfig(**options(tmp_path, **changes)), world)
    said = [record.levelname for record in caplog.records if "every ratio is 1" in record.getMessage()]
    assert said == ["WARNING"] * warns


@pytest.mark.parametrize(
    ("dtype", "rate", "lost"), [("bfloat16", 1e-6, True), ("bfloat16", 1e-3, False), ("float32", 1e-6, False)]
)
def test_steps_that_half_precision_would_swallow_are_warned_of(world, tmp_path, caplog, dtype, rate, lost):
    model = policy(world).to(getattr(torch, dtype))
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    pairs = list(zip(before, model.parameters(), strict=True))
    stood = sum(int((old == new).sum()) for old, new in pairs) / sum(old.numel() for old in before)
    assert (stood > 0.5) is lost
    trainer_of(TurnGRPOTrainer, TurnGRPOConfig(**options(tmp_path, learning_rate=rate)), world, model)
    assert any("lost in the rounding" in record.getMessage() for record in caplog.records) is lost


@pytest.mark.parametrize(
    ("changes", "step", "warns"),
    [
        ({"num_iterations": 2}, 1, ["inside a batch of completions"]),
        ({"num_iterations": 2}, 2, []),
        ({"per_device_train_batch_size": 64}, 1, ["resumed in epoch 2"]),  # 16 prompts, four answers each
    ],
)
def test_a_training_that_trl_resumes_with_other_prompts_is_warned_of(
    world, tmp_path, caplog, changes, step, warns
):
    saved = options(tmp_path, save_strategy="steps", save_steps=1, max_steps=3, **changes)
    trainer_of(TurnGRPOTrainer, TurnGRPOConfig(**saved), world).train()
    assert "resumed" not in caplog.text
    resumed = trainer_of(TurnGRPOTrainer, TurnGRPOConfig(**saved), world)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    said = [record.getMessage() for record in caplog.records if "resumed" in record.getMessage()]
    assert [text in message for text, message in zip(warns, said, strict=True)] == [True] * len(warns)


def test_a_plain_config_is_refused(world, tmp_path):
    with pytest.raises(ValueError, match="args must be a TurnGRPOConfig, got GRPOConfig"):
        trainer_of(TurnGRPOTrainer, GRPOConfig(**options(tmp_path)), world)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mask: mask[1].zero_(), "completion 1 of the batch has no agent token, hence no turn"),
        (lambda mask: mask[0, 0].fill_(2), "must hold 1 on tokens that the policy sampled and 0"),
    ],
)
def test_masks_that_tell_no_turns_are_refused(turn_trainer, change, message, monkeypatch):
    logprobs, inputs = batch_of()
    change(inputs["tool_mask"])
    with pytest.raises(ValueError, match=message):
        loss_and_gradient(turn_trainer(), logprobs, inputs, monkeypatch)
    _, inputs = batch_of()
    inputs["tool_mask"] = inputs["tool_mask"][:, :-1]
    with pytest.raises(ValueError, match="env_mask: must be as long as completion_ids"):
        loss_and_gradient(turn_trainer(), logprobs, inputs, monkeypatch)


@pytest.mark.parametrize("stabilizer", ["clipping_bias_norm", "ctn_kl"])
def test_completions_that_trl_masks_out_count_as_nothing(turn_trainer, stabilizer, monkeypatch):
    """`mask_truncated_completions` empties whole rows; TRL's mean over rows keeps counting them."""
    logprobs, inputs = batch_of()
    trainer = turn_trainer(stabilizer=stabilizer, ctn_coefficient=0.0)
    inputs["completion_mask"][4:] = 0
    loss, gradient = loss_and_gradient(trainer, logprobs, inputs, monkeypatch)
    kept = {name: value[:4] if value.dim() else value for name, value in inputs.items()}
    expected = loss_and_gradient(trainer, logprobs[:4], kept, monkeypatch)
    assert_same((loss, gradient[:4]), [part * 4 / 6 for part in expected])
    assert gradient[4:].abs().sum() == 0
    inputs["completion_mask"][:] = 0
    loss, gradient = loss_and_gradient(trainer, logprobs, inputs, monkeypatch)
    assert loss == 0 and gradient.abs().sum() == 0


# Roll-outs


@pytest.fixture(scope="module")
def warm(world):
    return warmed_up(world, 0)


def rolled_out(world, warm, tmp_path, n=24, **changes):
    config = TurnGRPOConfig(**options(tmp_path, temperature=0.8, **changes))
    trainer = trainer_of(TurnGRPOTrainer, config, world, warm)
    trainer.model_wrapped = warm
    torch.manual_seed(0)
    prompts = [row["prompt"] for row in search_dataset(world)]
    prompts = (prompts * n)[:n]
    return prompts, trainer, search_rollout(world)(prompts, trainer)


def test_a_rollout_plays_the_environment_with_tokens_as_sampled(world, warm, tmp_path):
    """Each completion replayed turn by turn gives the same observations, end and reward."""
    prompts, _, output = rolled_out(world, warm, tmp_path)
    questions = {world.environment.protocol.prompt(q.text): q for q in world.questions("train")}
    kinds = set()
    for i, prompt in enumerate(prompts):
        assert output["prompt_ids"][i] == world.tokenizer(prompt)["input_ids"]
        ids, mask = output["completion_ids"][i], output["env_mask"][i]
        assert len(ids) == len(mask) == len(output["logprobs"][i]) and mask[0] == mask[-1] == 1
        episode, at = world.environment.start(questions[prompt]), 0
        while at < len(ids):
            end = at + (mask[at:] + [0]).index(0)
            assert end - at <= world.environment.protocol.max_turn_tokens
            text = world.tokenizer.decode(ids[at:end], skip_special_tokens=True)
            assert not any(tag in text[:-1].split()[:-1] for tag in ("</search>", "</answer>"))
            (observation,) = world.environment.step([episode], [text])
            kinds.add(episode.turns[-1].action.kind)
            observed = world.tokenizer(observation)["input_ids"] if observation else []
            assert ids[end : end + len(observed)] == observed and not any(mask[end : end + len(observed)])
            at = end + len(observed)
        assert episode.done and episode.reward == output["episode_reward"][i]
    assert kinds == {"search", "answer", "invalid"}
    assert 0 < sum(output["episode_reward"]) < len(prompts)


def test_a_rollout_carries_what_turns_are_paid(world, warm, tmp_path):
    """The same trajectories with and without; TRL's one reward is the sum, a reward function sees the turns."""
    paying = dataclasses.replace(world, turn_rewards={"found": 0.2, "format": 0.04})
    prompts, trainer, plain = rolled_out(world, warm, tmp_path)
    torch.manual_seed(0)
    found = search_rollout(paying)(prompts, trainer)
    assert found["completion_ids"] == plain["completion_ids"]
    for i, turns in enumerate(found["turn_rewards"]):
        mask = found["env_mask"][i]
        assert len(turns) == sum(now and not before for now, before in zip(mask, [0, *mask], strict=False))
        assert found["episode_reward"][i] == pytest.approx(sum(turns))
        assert sum(plain["turn_rewards"][i]) == plain["episode_reward"][i] == plain["turn_rewards"][i][-1]
    assert search_reward([], **found) == found["episode_reward"]
    assert sum(found["episode_reward"]) > sum(plain["episode_reward"]) + 1
    with pytest.raises(ValueError, match="form=potential sum to nothing: set form=bonus"):
        search_rollout(dataclasses.replace(world, turn_rewards={"found": 0.2, "form": "potential"}))


@pytest.fixture
def with_defaults_of_its_own(warm):
    """As many checkpoints on the hub."""
    before = warm.generation_config
    warm.generation_config = GenerationConfig(repetition_penalty=3.0, top_p=0.5, top_k=2, temperature=0.3)
    yield
    warm.generation_config = before


def test_recorded_log_probs_are_those_that_trl_scores(world, warm, tmp_path, with_defaults_of_its_own):
    prompts, trainer, output = rolled_out(world, warm, tmp_path)
    trainer.temperature = 0.8
    inputs = [{"prompt": prompt} for prompt in prompts]
    trainer.rollout_func = lambda *_: dict(output)
    batch = trainer._generate_and_score_completions(inputs)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    scored = trainer._get_per_token_logps_and_entropies(warm, ids, mask, batch["completion_ids"].shape[1])[0]
    agent = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert (scored - batch["sampling_per_token_logps"])[agent].abs().max() < 1e-4
    assert batch["sampling_per_token_logps"][agent].std() > 0.1


def test_an_episode_without_room_ends_unrewarded(world, warm, tmp_path):
    _, _, output = rolled_out(world, warm, tmp_path, max_completion_length=16)
    lengths = [len(ids) for ids in output["completion_ids"]]
    assert max(lengths) <= 16
    _, _, free = rolled_out(world, warm, tmp_path)
    assert max(len(ids) for ids in free["completion_ids"]) > 16, "the limit would not have been felt"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(top_p=0.9), "top_p=0.9 samples from another distribution"),
        (dict(top_k=20), "top_k=20 samples from another distribution"),
        (dict(generation_kwargs={"min_new_tokens": 3}), "generation_kwargs={.*} is not read"),
        (dict(mask_truncated_completions=True), "mask_truncated_completions=True would mask every episode"),
        (dict(max_completion_length=7), "max_completion_length=7 is less than one turn"),
    ],
)
def test_a_rollout_refuses_what_would_break_the_ratios(world, warm, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        rolled_out(world, warm, tmp_path, **changes)


def test_a_rollout_refuses_a_model_with_a_window(world, warm, tmp_path):
    model = copy.deepcopy(warm)
    model.config.layer_types = ["sliding_attention"] * len(model.config.layer_types or [0])
    with pytest.raises(ValueError, match="attends to a window alone in some layers"):
        rolled_out(world, model, tmp_path, n=4)


# Learning


def scored(model, inputs):
    """(B, T) log-probs of TRL's batch by a plain forward pass a row, without padding."""
    logprobs = torch.zeros_like(inputs["old_per_token_logps"])
    names = "prompt_ids", "prompt_mask", "completion_ids", "completion_mask"
    rows = zip(*(inputs[name] for name in names), strict=True)
    for i, (prompt, of_prompt, completion, of_completion) in enumerate(rows):
        prompt, completion = prompt[of_prompt.bool()], completion[of_completion.bool()]
        ids = torch.cat([prompt, completion])[None]
        scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found = scores.gather(1, completion[:, None]).squeeze(1)
        logprobs = logprobs.index_put((torch.tensor(i), torch.arange(len(found))), found)
    return logprobs


def test_in_the_world_of_2000_entities_trl_makes_the_updates_that_our_objective_makes(tmp_path):
    """TRL's trainer plays and trains; a plain loop without TRL repeats its four updates from the batches it made.

    A policy warmed up for seconds answers hardly anything right here, so that long episodes are rewarded as well.
    """
    world, rate, c0 = SyntheticWorld(), 2e-3, 1e-3
    assert world.n_entities == 2000
    torch.manual_seed(0)
    size = dict(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=2, max_positions=384)
    start = build_policy(PolicyConfig(name="tiny", **size), world.tokenizer)
    rng = random.Random(0)
    questions = [rng.choice(world.questions("train")) for _ in range(96)]
    encoder = DialogueEncoder(world.environment.protocol, world.tokenizer)
    data = demonstration_batch(play(world, questions, rng, DemonstrationNoise()), encoder)
    imitate(start, data, 30, 1e-2, rows=24)

    seen = []

    class Recording(TurnGRPOTrainer):
        def _compute_loss(self, model, inputs):
            seen.append({name: value for name, value in inputs.items() if torch.is_tensor(value)})
            return super()._compute_loss(model, inputs)

    given = dict(max_steps=4, num_iterations=2, learning_rate=rate, max_completion_length=200, beta=0.0)
    config = TurnGRPOConfig(
        **options(tmp_path, **given, stabilizer="clipping_bias_norm", bias_norm_c0=c0, loss_type="grpo")
    )
    rewards = [search_reward, lambda completion_ids, **_: [len(ids) / 100 for ids in completion_ids]]
    trainer = trainer_of(
        Recording,
        config,
        world,
        copy.deepcopy(start),
        reward_funcs=rewards,
        rollout_func=search_rollout(world),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "stabilizer/divisor" in row]
    assert len(seen) == len(rows) == 4 and max(row["completions/mean_turns"] for row in rows) > 1.5

    def moved(objective):
        """Weights and divisors after the same four updates by `objective`."""
        model, divisors = copy.deepcopy(start), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        for inputs in seen:
            logprobs = scored(model, inputs)
            padded = torch.nn.functional.pad(logprobs, (1, 0))
            credit = inputs["advantages"][:, None].expand(padded.shape)
            surrogate = objective(padded, as_trajectories(inputs), credit)
            norm = estimated_bias_norms(surrogate, padded)["clipping_bias_norm_logprob"]
            divisors.append(objective.stabilizer.divisor(norm))
            optimizer.zero_grad()
            (surrogate.loss / divisors[-1]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), divisors

    bounds = config.epsilon, config.epsilon_high or config.epsilon
    norm = ClippingBiasNorm(c0=c0, estimator="logprob")
    ours, divisors = moved(objective_of("turn", "geometric", "grpo", norm, *bounds))
    others = moved(objective_of("token", "geometric", "grpo", None, *bounds))[0]
    theirs, before = (
        torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (trainer.model, start)
    )
    gap, apart, way = ((a - b).abs().max() for a, b in ((theirs, ours), (theirs, others), (theirs, before)))
    print(f"apart by {gap:.2g}; from plain GRPO by {apart:.2g}; weights moved by up to {way:.2g}")
    print("divisors", [round(d, 3) for d in divisors])
    assert [row["stabilizer/divisor"] for row in rows] == pytest.approx(divisors, rel=1e-3)
    assert max(divisors) > 1.05
    assert gap < 1e-4 < apart / 10 and way > 1e-3


# ---- where TRL's settings would undo the method -------------------------------------------------


def changed_rollout(world, change):
    """`search_rollout` whose result goes through `change`."""
    rollout = search_rollout(world)

    def play_and_change(prompts, trainer):
        found = rollout(prompts, trainer)
        change(found)
        return found

    return play_and_change


def make_stale(found):
    found["logprobs"] = [[1.5 * x - 0.1 for x in row] for row in found["logprobs"]]


def test_the_rollouts_log_probs_are_the_old_ones_where_asked_for(world, tmp_path):
    """Stale completions: TRL's update is the same whatever their log-probs are; ours follows them. Equal ones change
    nothing."""
    start = warmed_up(world, 0)

    def after(old_logprobs, change=lambda found: None):
        seen = []

        class Recording(TurnGRPOTrainer):
            def _compute_loss(self, model, inputs):
                seen.append(inputs)
                return super()._compute_loss(model, inputs)

        given = dict(old_logprobs=old_logprobs, optim="sgd", learning_rate=0.1, max_grad_norm=0.0)
        config = TurnGRPOConfig(**options(tmp_path, **given, per_device_train_batch_size=16))
        made = trainer_of(
            Recording, config, world, copy.deepcopy(start), rollout_func=changed_rollout(world, change)
        )
        made.train()
        return torch.cat([p.detach().flatten() for p in made.model.parameters()]), seen[0]

    before = torch.cat([p.detach().flatten() for p in start.parameters()])
    (theirs, _), (theirs_stale, _) = after("trainer"), after("trainer", make_stale)
    (ours, fresh), (ours_stale, stale) = after("rollout"), after("rollout", make_stale)
    moved = (theirs - before).norm()
    assert moved > 1e-3 and torch.equal(theirs, theirs_stale)
    assert (ours - theirs).norm() < 1e-3 * moved < 0.05 * moved < (ours_stale - theirs).norm()
    agent = (fresh["completion_mask"] * fresh["tool_mask"]).bool()
    assert torch.equal(agent, (stale["completion_mask"] * stale["tool_mask"]).bool()), "the same roll-outs"
    expected = 1.5 * fresh["old_per_token_logps"][agent] - 0.1
    torch.testing.assert_close(stale["old_per_token_logps"][agent], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: [found[name].pop() for name in found],
            "rollout_func: 7 completion_ids for 8 prompts",
        ),
        (
            lambda found: found["completion_ids"].__setitem__(1, []),
            r"completion_ids\[1\] is empty; a completion",
        ),
        (lambda found: found["logprobs"][2].__setitem__(0, None), r"logprobs\[\d\]\[0\]=nan: old_logprobs"),
        (lambda found: found["logprobs"][2].__setitem__(0, 0.7), r"logprobs\[\d\]\[0\]=0.\d+: old_logprobs"),
        (lambda found: found.__setitem__("logprobs", None), "the roll-out gave no logprobs; return them"),
    ],
)
def test_a_rollout_that_lacks_what_is_asked_for_is_named(world, tmp_path, change, message):
    config = TurnGRPOConfig(**options(tmp_path, old_logprobs="rollout"))
    made = trainer_of(TurnGRPOTrainer, config, world, rollout_func=changed_rollout(world, change))
    with pytest.raises(ValueError, match=message):
        made.train()


def test_log_probs_of_a_rollout_need_a_rollout(world, tmp_path):
    config = TurnGRPOConfig(**options(tmp_path, old_logprobs="rollout"))
    with pytest.raises(ValueError, match="old_logprobs='rollout' needs log-probs of a roll-out"):
        trainer_of(TurnGRPOTrainer, config, world, rollout_func=None)


def test_a_reference_that_is_not_the_model_is_refused(world, tmp_path):
    """TRL loads it from where the config says that the model came from."""
    from transformers import AutoModelForCausalLM

    config = TurnGRPOConfig(**options(tmp_path, beta=0.1))
    with pytest.raises(ValueError, match="those are not the model's: save the model and load it from that"):
        trainer_of(TurnGRPOTrainer, config, world, policy(world))
    policy(world).save_pretrained(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert trainer_of(TurnGRPOTrainer, config, world, model).ref_model is not None
    with torch.no_grad():
        model.lm_head.weight.add_(0.05)
    with pytest.raises(ValueError, match=r"or set beta=0.0 \(.* differs\)"):
        trainer_of(TurnGRPOTrainer, config, world, model)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("begun", ["pissa", "olora"])
def test_an_adapter_that_takes_weights_along_leaves_no_reference(world, tmp_path, begun, wrapped):
    from peft import LoraConfig, get_peft_model

    def made(beta, init):
        adapter = LoraConfig(r=2, init_lora_weights=init, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(policy(world), adapter) if wrapped else policy(world)
        config = TurnGRPOConfig(**options(tmp_path, beta=beta))
        return trainer_of(TurnGRPOTrainer, config, world, model, peft_config=None if wrapped else adapter)

    with pytest.raises(ValueError, match=f"init_lora_weights='{begun}' moves weights .* or set beta=0.0"):
        made(0.1, begun)
    assert made(0.0, begun) and made(0.1, True)


@pytest.mark.parametrize("disable", [True, False])
def test_old_log_probs_are_scored_without_dropout(world, tmp_path, disable):
    """Before any update every ratio is 1; with dropout on, as TRL's default leaves it, none is."""
    model = warmed_up(world, 0)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
        layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Dropout(0.3))
    given = {} if disable else {"disable_dropout": False}
    config = TurnGRPOConfig(**options(tmp_path, num_iterations=2, **given))
    made = trainer_of(TurnGRPOTrainer, config, world, model)
    made.train()
    (row,) = (row for row in made.state.log_history if "importance_ratio/min" in row)
    spread = row["importance_ratio/max"] - row["importance_ratio/min"]
    assert spread < 1e-4 if disable else spread > 0.1
