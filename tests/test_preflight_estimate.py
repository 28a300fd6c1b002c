"""The preflight's estimate against models, optimizers and memory as they really are."""

import json
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from stppo.config.composition import compose
from stppo.config.files import ConfigError
from stppo.config.identity import run_section
from stppo.config.loading import build, load
from stppo.config.settings import RunConfig
from stppo.files import repository_path
from stppo.policy.compute import computing, place
from stppo.policy.policy import LoraSettings
from stppo.preflight.memory import (
    GIB,
    Algorithm,
    checkpoint_bytes,
    engine_room,
    host_parts,
    micro_batch_tokens,
    phases_of,
    resting,
    saved_by_layer,
    trained_parameters,
)
from stppo.preflight.shapes import QWEN25, check_trained_part, known_config, shape_of, smaller
from stppo.preflight.speed import estimate_speed
from stppo.training.checkpoint import CHECKPOINT_DIR, newest
from stppo.training.models import make_models
from stppo.training.run import Run
from stppo.training.warm_start import load_warm_start


def settings(*overrides):
    return load(compose(["preset=laptop", *overrides])).settings


def qwen(*overrides):
    """Settings of preset qwen and the estimate's view of its algorithm."""
    config = compose(["preset=qwen", *overrides])
    run = load(config).settings
    objective = build(config["algorithm"]["objective"], "algorithm.objective")
    return run, Algorithm.of(run, objective)


# ---- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", QWEN25)
def test_parameters_of_public_models_are_those_of_the_formula(size):
    hidden, layers, heads, kv_heads, intermediate, vocabulary, tied = QWEN25[size]
    kv = hidden // heads * kv_heads
    attention = hidden * hidden + hidden + 2 * (hidden * kv + kv) + hidden * hidden
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    body = vocabulary * hidden + layers * layer + hidden
    shape = shape_of(known_config(f"Qwen/Qwen2.5-{size}-Instruct"))
    assert shape.body == body
    assert shape.parameters == body + (0 if tied else vocabulary * hidden)
    assert shape.parameters / 1e9 == pytest.approx(
        {"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.62}[size], abs=0.006
    )
    assert shape.kv_values() == 2 * layers * kv
    assert shape.linear == layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate)


def test_next_smaller_model():
    assert smaller("Qwen/Qwen2.5-1.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert smaller("Qwen/Qwen2.5-0.5B") is None and smaller("folder") is None


def test_adapters_train_rank_times_inputs_and_outputs():
    config = known_config("Qwen/Qwen2.5-0.5B")
    run = qwen("policy.lora={rank: 8, target_modules: [q_proj, down_proj]}")[0]
    shape = shape_of(config, run.policy.lora)
    assert trained_parameters(run, shape) == 8 * 24 * (896 + 896 + 4864 + 896)
    everything = shape_of(config, LoraSettings())
    # q, o: 896 + 896; k, v: 896 + 128; gate, up, down: 896 + 4864.
    assert everything.lora_inputs == 24 * (2 * 1792 + 2 * 1024 + 3 * 5760)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.trainable_layers=24", r"^policy\.trainable_layers=24: the policy has 24 layers; give fewer"),
        (
            "policy.lora={target_modules: [q_prj]}",
            r"^policy\.lora\.target_modules=\['q_prj'\]: the model has no",
        ),
        (
            "policy.lora={target_modules: 'encoder.*'}",
            r"^policy\.lora\.target_modules='encoder\.\*': the model",
        ),
        ("policy.trainable_layers=23", None),
        ("policy.lora={target_modules: [lm_head]}", None),
        ("policy.lora={target_modules: '.*q_proj'}", None),
        (r"policy.lora={target_modules: '.*\.layers\.\d+\.self_attn\.q_proj'}", None),
        ("policy.lora={target_modules: [model.layers.23.self_attn.q_proj]}", None),
    ],
)
def test_what_is_to_be_trained_and_is_not_there_is_named(override, message):
    policy = qwen(override)[0].policy
    shape = shape_of(known_config("Qwen/Qwen2.5-0.5B"), policy.lora)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_trained_part(policy, shape, critic=False)


def test_adapters_of_the_output_layer_alone_leave_a_critic_none():
    policy = qwen("policy.lora={target_modules: [lm_head]}")[0].policy
    shape = shape_of(known_config("Qwen/Qwen2.5-0.5B"), policy.lora)
    with pytest.raises(ConfigError, match=r"target_modules=\['lm_head'\]: the critic has no linear"):
        check_trained_part(policy, shape, critic=True)


# ---- against what is really allocated -----------------------------------------------------------


def saved_bytes(layers: int, precision: str, tokens: int) -> int:
    """What autograd keeps of a body's forward pass, parameters aside; each storage once."""
    shape = Qwen2Config(
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=1024,
        vocab_size=64,
    )
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    place(model, torch.device("cpu"), precision)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), computing(model.base_model):
        states = model.base_model(input_ids=torch.zeros(2, tokens // 2, dtype=torch.long), use_cache=False)
    assert states.last_hidden_state.requires_grad
    return sum(storage.nbytes() for place_, storage in kept.items() if place_ not in own)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_of_a_layer_are_what_autograd_saves(precision):
    tokens = 256
    measured = saved_bytes(3, precision, tokens) - saved_bytes(2, precision, tokens)
    run = settings(f"training.precision={precision}")
    shape = shape_of(
        Qwen2Config(
            hidden_size=256,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=1024,
            vocab_size=64,
        )
    )
    copies = 2 * shape.linear if precision == "bfloat16" else 0  # of weights
    assert saved_by_layer(run, shape) * tokens + copies == pytest.approx(measured, rel=0.01)


def test_reference_in_bfloat16_keeps_its_linear_layers_in_it(tiny, barely_trained, tmp_path):
    config = tiny("algorithm=grpo", "training.precision=bfloat16")
    reference = Run(load(config), tmp_path, barely_trained, progress=False).trainer.reference
    size = sum(p.numel() * p.element_size() for p in reference.parameters())
    run = load(config).settings
    estimate = resting(run, shape_of(reference.config), Algorithm(critic=False, watched=1, exact_norm=False))
    assert estimate["reference"] == pytest.approx(size, rel=0.01)  # biases aside


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_estimate_counts_a_reference_where_a_run_has_one(kl, pretrained, tiny, barely_trained):
    of = [f"policy.pretrained={barely_trained}"] if pretrained else []
    run = load(tiny(f"training.kl_coefficient={kl}", *of)).settings
    models = make_models(load_warm_start(barely_trained)[0], barely_trained, run, critic=False)
    algorithm = Algorithm(critic=False, watched=1, exact_norm=False)
    counted = "reference" in resting(run, shape_of(models.policy.config), algorithm)
    assert (models.reference is not None) == counted == (kl > 0 or not pretrained)


def test_resting_memory_and_checkpoint_are_those_of_a_trained_run(tiny, barely_trained, tmp_path):
    config = tiny("algorithm=st_ppo", "training.iterations=1", "training.minibatches=1", "training.epochs=1")
    held = {}

    def measure(trainer):
        def size(tensors):
            return sum(t.numel() * t.element_size() for t in tensors if t is not None)

        def moments(optimizer):
            states = optimizer.state.values()
            return size(t for state in states for name, t in state.items() if name != "step")

        for name, model, optimizer in (
            ("policy", trainer.policy, trainer.optimizer),
            ("critic", trainer.critic, trainer.critic_optimizer),
        ):
            held[name] = size(model.parameters())
            held[f"{name}: gradient"] = size(p.grad for p in model.parameters())
            held[f"{name}: adam"] = moments(optimizer)
        held["reference"] = size(trainer.reference.parameters())
        held["model"] = trainer.policy.config

    Run(load(config), tmp_path, barely_trained, on_iteration=measure, progress=False).train()
    run = load(config).settings
    shape = shape_of(held.pop("model"))
    algorithm = Algorithm(critic=True, watched=1, exact_norm=True)
    assert not held.pop("policy: gradient") and not held.pop("critic: gradient")
    assert resting(run, shape, algorithm) == held
    written = newest(tmp_path / CHECKPOINT_DIR)
    tensors = sum(
        (written / f"{name}.safetensors").stat().st_size
        for name in ("policy", "optimizer", "critic", "critic_optimizer")
    )
    assert checkpoint_bytes(run, shape, algorithm) == pytest.approx(tensors, rel=0.1)


def test_divided_policy_rests_and_is_saved_as_estimated(tiny, barely_trained, tmp_path, monkeypatch):
    made = json.loads((barely_trained / "warm_start.json").read_text())["made_for"]
    monkeypatch.setattr("stppo.training.trainer.made_for", lambda config: made)
    config = tiny(
        "algorithm=token_ppo",
        f"policy.pretrained={barely_trained}",
        "+policy.trainable_layers=1",
        "training.kl_coefficient=0.1",
        "training.iterations=1",
    )
    held = {}

    def measure(trainer):
        parts = {"critic": trainer.critic.parameters(), "policy": trainer.policy.parameters()}
        own = {p.data_ptr() for p in trainer.policy.parameters()}
        parts["reference"] = (p for p in trainer.reference.parameters() if p.data_ptr() not in own)
        for name, weights in parts.items():
            held[name] = sum(4 * p.numel() for p in weights)
        for name, optimizer in (
            ("policy: adam", trainer.optimizer),
            ("critic: adam", trainer.critic_optimizer),
        ):
            moments = (state["exp_avg"].numel() for state in optimizer.state.values())
            held[name] = 8 * sum(moments)
        held["model"] = trainer.policy.config

    Run(load(config), tmp_path, barely_trained, on_iteration=measure, progress=False).train()
    run = load(config).settings
    shape = shape_of(held.pop("model"))
    algorithm = Algorithm(critic=True, watched=1, exact_norm=False)
    found = resting(run, shape, algorithm)
    assert found.pop("states of frozen layers") > 0
    assert found == held
    saved = newest(tmp_path / CHECKPOINT_DIR) / "policy.safetensors"
    assert 4 * trained_parameters(run, shape) == pytest.approx(saved.stat().st_size, rel=0.1)
    without = load(tiny(f"policy.pretrained={barely_trained}", "+policy.trainable_layers=1")).settings
    assert "reference" not in resting(without, shape, algorithm), "nothing scores it"


_UPDATE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from stppo.config.files import ConfigError
from stppo.config.loading import build, load
from stppo.config.composition import compose
from stppo.config.identity import run_section
from stppo.policy.compute import place
from stppo.training.gradients import Passes
from stppo.training.optimizers import make_optimizer
from stppo.training.updates import PolicyUpdates
from stppo.trajectories import Trajectories

overrides, sizes, width = json.loads(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)
config = compose(overrides)
run = load(config).settings
objective = build(config["algorithm"]["objective"], "algorithm.objective")
policy = AutoModelForCausalLM.from_config(Qwen2Config(**sizes), dtype=torch.float32)
place(policy, torch.device("cpu"), run.training.precision, run.training.gradient_checkpointing)
optimizer = make_optimizer("adam", list(policy.parameters()), 1e-4)
passes = Passes(run.training.micro_batch_tokens)
updates = PolicyUpdates(policy, optimizer, objective, run.training, passes, 1.0, None)

def step(rows, width):
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[:, 0] = False
    batch = Trajectories(
        tokens=torch.randint(sizes["vocab_size"], (rows, width)),
        lengths=torch.full((rows,), width),
        agent_mask=mask,
        behaviour_logprobs=torch.where(mask, -torch.rand(rows, width) * 20, torch.zeros(rows, width)),
        rewards=torch.zeros(rows, width),
        group_ids=torch.zeros(rows, dtype=torch.long),
        policy_updates=torch.zeros(rows, dtype=torch.long),
    )
    row = dict(update=1, iteration=3, epoch=0, minibatch=0)  # 1 - 1 + 3: norms are watched every third
    updates.step(row, batch, torch.where(mask, torch.randn(rows, width), torch.zeros(())), torch.zeros(rows, width), None)
    assert row["clipping_bias_norm"] > 0 and row["ppo_gradient_norm"] > 0

def resident(name):  # not ru_maxrss, which a process inherits from the one that started it
    status = dict(line.split(":") for line in open("/proc/self/status") if line.startswith(name))
    return int(status[name].split()[0]) * 1024

before = resident("VmRSS")
step(run.training.trajectories_per_iteration, width)
print(json.dumps(resident("VmHWM") - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_of_an_update_is_near_the_estimate(checkpointing):
    """Growth of a process's peak memory over one update; the factor allows for libraries' own buffers."""
    width = 512
    overrides = [
        "preset=laptop",
        "algorithm=grpo",
        "algorithm.objective.credit.group_size=4",
        f"rollout.max_tokens={width}",
        f"policy.max_positions={width}",
        f"world.max_turn_tokens={width}",  # so that every token may be the agent's, as below
        "training.trajectories_per_iteration=4",
        "training.minibatches=1",
        "training.micro_batch_tokens=1024",
        "training.kl_coefficient=0.01",
        "training.bias_norm_every=3",
        f"training.gradient_checkpointing={checkpointing}",
    ]
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 20_000,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    }
    done = subprocess.run(
        [sys.executable, "-c", _UPDATE, json.dumps([overrides, sizes, width])], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    config = compose(overrides)
    run = load(config).settings
    objective = build(config["algorithm"]["objective"], "algorithm.objective")
    shape = shape_of(Qwen2Config(**sizes))
    update = phases_of(run, shape, Algorithm.of(run, objective), None)[-1]
    there = update.parts["policy"] + update.parts["reference"]  # weights are loaded, and no reference
    assert json.loads(done.stdout) == pytest.approx(update.total - there, rel=0.3)


# ---- against recorded runs ----------------------------------------------------------------------

SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}


def smollm(*overrides):
    """Settings of preset smollm with small records, SmolLM2's sizes, and the estimate's view of its algorithm."""
    config = compose(["preset=smollm", f"world.records={__file__}", *overrides])
    run = RunConfig.model_validate(run_section(config) | {"loggers": []})
    objective = build(config["algorithm"]["objective"], "algorithm.objective")
    return run, shape_of(LlamaConfig(**SMOLLM2)), Algorithm.of(run, objective)


def smollm_phases(*overrides):
    run, shape, algorithm = smollm(*overrides)
    return {phase.name: phase for phase in phases_of(run, shape, algorithm, None)}


# The second machine counted memory otherwise (ru_maxrss), and its bfloat16 kernels are others.
@pytest.mark.parametrize(
    ("folder", "least", "most"),
    [("smollm_comparison/tuning", 0.9, 1.1), ("smollm/metrics", 0.7, 1.1), ("smollm/tuning", 0.7, 1.1)],
)
def test_peaks_of_recorded_runs_are_near_the_estimate(folder, least, most):
    recorded = json.loads(repository_path(f"results/reference/{folder}/runs.json").read_text())
    assert recorded
    for record in recorded:
        made_with = [
            f"algorithm={record['algorithm']}",
            "training.precision=bfloat16",
            "rollout.batch_size=64",
        ]
        run, shape, algorithm = smollm(*made_with)
        largest = max(phase.total for phase in phases_of(run, shape, algorithm, None))
        needed = largest + sum(host_parts(run, shape, algorithm, False).values())
        assert least < needed / (record["peak_memory_mb"] * 2**20) < most, record["algorithm"]


def test_an_evaluation_plays_as_many_lanes_as_it_asks_questions():
    found = smollm_phases("rollout.batch_size=150", "training.trajectories_per_iteration=32")
    cache = {name: phase.parts.get("KV cache") for name, phase in found.items()}
    assert cache["roll-out"] == 4 * 11_520 * 384 * 32
    assert cache["evaluation"] == cache["warm start"] == 4 * 11_520 * 384 * 150
    assert max(found.values(), key=lambda phase: phase.total).name == "evaluation"
    few = smollm_phases("evaluation.questions=40", "warm_start.final_samples=40", "warm_start.max_steps=0")
    assert few["evaluation"].parts["KV cache"] == 4 * 11_520 * 384 * 40
    assert few["warm start"].parts["KV cache"] == 4 * 11_520 * 384 * 96, "warm_start.evaluate_questions"


def test_half_precision_samples_from_rounded_copies_of_the_weights():
    shape = shape_of(LlamaConfig(**SMOLLM2))
    found = smollm_phases("training.precision=bfloat16")
    for phase in ("warm start", "roll-out", "evaluation"):
        assert found[phase].parts["bfloat16 copies of weights"] == 2 * shape.linear
    assert "bfloat16 copies of weights" not in smollm_phases()["evaluation"].parts


def test_a_warm_start_of_all_weights_takes_more_than_training_some():
    every, some = (
        smollm_phases(f"warm_start.trained_weights={which}")["warm start"].parts
        for which in ("all", "policy")
    )
    shape = shape_of(LlamaConfig(**SMOLLM2))
    assert every["adam"] == 8 * shape.parameters and every["gradient"] == 4 * shape.parameters
    assert some["adam"] == 8 * (10 * shape.layer + shape.norm)
    assert "adam" not in smollm_phases("warm_start.max_steps=0")["warm start"].parts


def test_without_a_gpu_a_checkpoint_is_read_before_the_other_phases_not_beside_them():
    run, shape, algorithm = smollm()
    checkpoint = "checkpoint or weights while they are read"
    assert checkpoint in host_parts(run, shape, algorithm, True)
    assert checkpoint not in host_parts(run, shape, algorithm, False)
    found = smollm_phases()["resumption"].parts
    assert found["checkpoint while it is read"] == checkpoint_bytes(run, shape, algorithm)


# ---- what knobs do ------------------------------------------------------------------------------


def largest(run, algorithm, size="1.5B"):
    shape = shape_of(known_config(f"Qwen2.5-{size}"), run.policy.lora)
    return {phase.name: phase.total for phase in phases_of(run, shape, algorithm, 80 * GIB)}


@pytest.mark.parametrize(
    ("override", "phase"),
    [
        ("training.micro_batch_tokens=4596", "update"),
        ("++training.optimizer=adam8bit", "update"),
        ("policy.lora={rank: 16}", "update"),
        ("algorithm=grpo", "update"),
        ("training.kl_coefficient=0", "update"),
        ("rollout.gpu_memory_utilization=0.3", "roll-out"),
    ],
)
def test_every_knob_that_is_advised_lowers_the_phase(override, phase):
    plain = qwen("training.optimizer=adam")
    assert largest(*qwen("training.optimizer=adam", override))[phase] < largest(*plain)[phase] - 0.1 * GIB


def test_without_checkpointing_or_sleep_more_is_needed():
    plain = largest(*qwen())
    assert largest(*qwen("training.gradient_checkpointing=false"))["update"] > plain["update"] + 10 * GIB
    assert largest(*qwen("rollout.sleep_level=0"))["update"] > plain["update"] + 10 * GIB


def test_what_an_engine_sampled_is_scored_within_the_trainers_budget():
    def activations(*overrides):
        run, algorithm = qwen(*overrides)
        phases = phases_of(run, shape_of(known_config("Qwen2.5-0.5B")), algorithm, 80 * GIB)
        return next(phase.parts["activations"] for phase in phases if phase.name == "scoring")

    assert activations("training.micro_batch_tokens=9192") == pytest.approx(2 / 3 * activations())
    many = activations("training.micro_batch_tokens=null", "training.trajectories_per_iteration=8")
    assert many == pytest.approx(16 / 3 * activations()), "sixteen rows, where minibatches have only four"


def test_a_trajectory_longer_than_the_budget_sets_the_micro_batch():
    run, _ = qwen("training.micro_batch_tokens=1000")
    shape = shape_of(known_config("Qwen2.5-0.5B"))
    assert micro_batch_tokens(run, shape) == (4596, True)


def test_engine_holds_untied_weights_in_its_own_type():
    shape = shape_of(known_config("Qwen2.5-0.5B"))
    half, whole = (
        engine_room(qwen(f"rollout.dtype={d}")[0], shape, 80 * GIB) for d in ("bfloat16", "float32")
    )
    assert half.weights == 2 * (shape.parameters + 151_936 * 896) == whole.weights / 2
    assert half.trajectories > 2 * whole.trajectories > 0


def test_a_faster_gpu_and_fewer_epochs_take_less_time():
    shape = shape_of(known_config("Qwen2.5-0.5B"))
    run, algorithm = qwen()
    usual = estimate_speed(run, shape, algorithm)
    assert estimate_speed(run, shape, algorithm, "NVIDIA H100 80GB HBM3").iteration < usual.iteration
    twice = estimate_speed(qwen("training.epochs=2")[0], shape, algorithm)
    assert twice.seconds["update"] == pytest.approx(2 * usual.seconds["update"])
    assert estimate_speed(run, shape, algorithm, "unknown") == usual


def test_what_is_scored_is_counted_and_nothing_else():
    """The reference where the loss reads it, what was sampled where the trainer scores it, and below the trained layers what a
    roll-out by vLLM leaves to the trainer."""
    shape = shape_of(known_config("Qwen2.5-0.5B"))

    def seconds(*overrides):
        run, algorithm = qwen("algorithm=grpo", *overrides)
        return estimate_speed(run, shape, algorithm).seconds

    without = "training.kl_coefficient=0"
    both, sampled = seconds()["scoring"], seconds(without)["scoring"]
    assert both == pytest.approx(2 * sampled)
    assert "scoring" not in seconds(without, "rollout.behaviour_logprobs=engine")
    in_pytorch = seconds(without, "rollout=torch", "policy.trainable_layers=8").get("scoring", 0)
    assert seconds(without, "policy.trainable_layers=8")["scoring"] > in_pytorch
    roomy, whole = (seconds(f"training.micro_batch_tokens={n}")["update"] for n in (10**9, "null"))
    assert roomy == whole < seconds()["update"], "a minibatch that fits is computed once"
