"""Policies that come as a folder: weights, tokenizer, what is missing, and training that begins with them as they are."""

import json
import math
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from stppo.config.composition import compose
from stppo.config.files import ConfigError
from stppo.config.loading import build, load
from stppo.policy.policy import (
    check_vocabulary,
    load_policy,
    load_tokenizer,
    save_policy,
    score,
)
from stppo.preflight.estimate import models_of
from stppo.rollout.engines import make_rollout
from stppo.rollout.rollout import RolloutConfig
from stppo.training.evaluation import evaluate_checkpoint
from stppo.training.run import Run
from stppo.training.warm_start import load_warm_start, warm_start
from stppo.world import SyntheticWorld
from tests.training_runs import run, tables


@pytest.fixture
def without_tokenizer(monkeypatch):
    """The synthetic world as the benchmarks are: the language model brings the tokenizer."""
    monkeypatch.setattr(SyntheticWorld, "tokenizer", None)


def test_weights_as_they_are_are_measured_saved_and_trained(
    tmp_path, tiny, barely_trained, without_tokenizer
):
    config = tiny(f"policy.pretrained={barely_trained}", "warm_start.max_steps=0", "training.iterations=1")
    record = warm_start(load(config), tmp_path / "start", progress=False)
    assert record["steps"] == 0 and record["history"] == [] and record["n_sampled"] == 256
    before, _, _ = load_warm_start(tmp_path / "start")
    for name, weight in load_policy(barely_trained).state_dict().items():
        assert torch.equal(weight, before.state_dict()[name])
    trained = run(config, tmp_path / "run", tmp_path / "start")
    assert trained["status"] == "completed" and len(tables(tmp_path / "run")[0]) == 4
    assert trained["warm_start"]["success_sampled"] == record["success_sampled"]


def test_a_world_without_tokenizer_needs_a_model_that_brings_one(tmp_path, tiny, without_tokenizer):
    with pytest.raises(ValueError, match=r"no tokenizer of its own: set policy\.pretrained"):
        warm_start(load(tiny()), tmp_path)


def test_weights_from_nowhere_cannot_be_taken_as_they_are(tiny):
    with pytest.raises(ConfigError, match=r"warm_start\.max_steps=0 .*set policy\.pretrained"):
        load(tiny("warm_start.max_steps=0"))


@pytest.fixture
def short(tmp_path):
    """The folder of a GPT-2 of 96 positions, by its config alone: what looks at its weights fails."""
    GPT2Config(n_positions=96, n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path / "short")
    return tmp_path / "short"


@pytest.mark.parametrize(
    "use",
    [
        lambda config, folder, out: warm_start(load(config), out),
        lambda config, folder, out: Run(load(config), out, out),
        lambda config, folder, out: evaluate_checkpoint(folder, config, out),
    ],
    ids=["warm start", "training", "evaluation"],
)
def test_trajectories_longer_than_the_model_are_refused_before_anything_is_computed(
    use, tmp_path, tiny, short
):
    config = tiny(f"policy.pretrained={short}", "rollout.max_tokens=900")
    with pytest.raises(
        ConfigError, match=r"^rollout\.max_tokens=900 exceeds .* 96 positions: lower it to 96"
    ):
        use(config, short, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert load(tiny(f"policy.pretrained={short}", "rollout.max_tokens=96")).settings


def test_weights_that_came_from_the_hub_are_as_long_as_trajectories(short):
    world = SyntheticWorld(n_train=8, n_validation=8, n_test=8)
    policy = GPT2LMHeadModel(GPT2Config.from_pretrained(short))
    with pytest.raises(ValueError, match=r"rollout\.max_tokens=97 exceeds .* 96 positions"):
        make_rollout(world.environment, world.tokenizer, RolloutConfig(max_tokens=97), policy)


@pytest.mark.parametrize("load", [load_policy, load_tokenizer])
def test_a_model_that_is_not_here_says_how_to_get_it(load, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError) as error:
        load("nobody/no-such-model")
    message = str(error.value)
    assert "\n" not in message and "hf download nobody/no-such-model --local-dir FOLDER" in message
    assert "hf auth login" in message and message.endswith("policy.pretrained=FOLDER")


def planned(pretrained):
    return load(compose(["preset=smoke", f"policy.pretrained={pretrained}"]))


@pytest.mark.parametrize("name", ["/no/such", "smollm3", "a/b/c"])
def test_the_hub_is_no_remedy_for_what_is_no_name_of_it(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for read in (load_policy, load_tokenizer, lambda name: models_of(planned(name))):
        with pytest.raises(FileNotFoundError, match=r"no such folder, and the short names are smollm2$"):
            read(name)


def test_the_tokenizer_of_a_folder_is_the_one_saved_there(barely_trained, tiny):
    world = build(tiny()["world"], "world")
    loaded = load_tokenizer(barely_trained)
    text = f"{world.questions('train')[0].text} <search> a </search>"
    assert (
        loaded(text)["input_ids"] == world.tokenizer(text)["input_ids"]
        and len(loaded(text)["input_ids"]) >= 8
    )
    assert (loaded.eos_token_id, loaded.pad_token_id) == (
        world.tokenizer.eos_token_id,
        world.tokenizer.pad_token_id,
    )
    assert loaded.decode(loaded(text)["input_ids"]) == world.tokenizer.decode(loaded(text)["input_ids"])


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(FileNotFoundError, match=r"tokenizer at .* cannot be loaded \(.*: \(1\)[^,;:]*\); "):
        load_tokenizer(tmp_path)


def test_weights_in_several_files_count_with_all(tmp_path, barely_trained):
    load_policy(barely_trained).save_pretrained(tmp_path, max_shard_size="50KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    (tmp_path / "warm_start.json").write_text((barely_trained / "warm_start.json").read_text())
    policy, _, content = load_warm_start(tmp_path)
    with torch.no_grad():
        policy.get_output_embeddings().weight[0, 0] += 1
    policy.save_pretrained(tmp_path, max_shard_size="50KB")
    assert load_warm_start(tmp_path)[2] != content


def changed(folder, source, weights=None, **shape):
    """A copy of a policy's folder with other weights and another config."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file((weights or dict)(tensors), folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | shape))
    return folder


def layers(n):
    return {"num_hidden_layers": n, "layer_types": ["full_attention"] * n}


HEAD, LAYER = "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("weights", "shape", "said"),
    [
        (lambda t: {k: v for k, v in t.items() if k != HEAD}, {}, f"lacks {HEAD}"),
        (
            lambda t: {k: v for k, v in t.items() if ".layers.1." not in k},
            {},
            r"lacks model\.layers\.1\..*and 1\d more",
        ),
        (lambda t: t | {LAYER: t[LAYER][:1].contiguous()}, {}, "up_proj"),
        (lambda t: t | {LAYER: t[LAYER] * float("nan")}, {}, f"{LAYER} holds numbers that are not finite"),
        (None, {"num_hidden_layers": 1}, "cannot be loaded .*layer_types"),
        (None, layers(1), r"also holds model\.layers\.1\."),
        (None, layers(3), r"lacks model\.layers\.2\."),
        (None, {"model_type": "none"}, "cannot be loaded"),
    ],
)
def test_weights_that_are_not_exactly_the_models_are_refused(weights, shape, said, tmp_path, barely_trained):
    folder = changed(tmp_path / "start", barely_trained, weights, **shape)
    with pytest.raises(FileNotFoundError, match=said):
        load_policy(folder)


def test_a_folder_brings_in_no_code_kernel_or_pickle(tmp_path, barely_trained, monkeypatch):
    """A config that names its own classes and a kernel of the hub is read as the family that it names."""

    def forbidden(*_, **__):
        raise AssertionError("foreign code was asked for")

    monkeypatch.setattr("builtins.input", forbidden)
    monkeypatch.setattr("transformers.integrations.hub_kernels.load_and_register_attn_kernel", forbidden)
    foreign = {
        "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        "_attn_implementation": "owner/repo:f",
    }
    folder = changed(tmp_path / "start", barely_trained, **foreign)
    assert load_policy(folder).config._attn_implementation == "sdpa"
    models_of(planned(folder))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="cannot be loaded"):
        load_policy(folder)


def test_weights_that_cannot_be_written_are_one_line(tmp_path, barely_trained):
    policy, tokenizer = load_policy(barely_trained), load_tokenizer(barely_trained)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FileExistsError, match="a file is in the way"):
            save_policy(policy, folder, tokenizer)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (100, 20_000):  # as a full disk: amid the weights, or the tokenizer
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            with pytest.raises(OSError, match="weights cannot be written to .*make room"):
                save_policy(policy, tmp_path / "full", tokenizer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tiny, barely_trained):
    policy = load_policy(barely_trained)
    tokenizer = load_tokenizer(barely_trained)
    check_vocabulary(policy, tokenizer)
    tokenizer.add_tokens(["new"])
    with pytest.raises(ValueError, match="do not belong together"):
        check_vocabulary(policy, tokenizer)


def test_attention_that_cannot_work_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"policy\.attention=eager: roll-outs in PyTorch need sdpa"):
        load(tiny("policy.attention=eager"))
    with pytest.raises(ConfigError, match=r"training\.precision=bfloat16"):
        load(tiny("policy.attention=flash_attention_2", "rollout=vllm"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_what_needs_a_gpu_says_so(tmp_path, tiny, barely_trained):
    with pytest.raises(ValueError, match=r"training\.device=cuda: .*use auto or cpu"):
        Run(load(tiny("training.device=cuda")), tmp_path, barely_trained)
    with pytest.raises(ValueError, match=r"adam8bit runs on a GPU alone"):
        Run(load(tiny("training.optimizer=adam8bit")), tmp_path, barely_trained)
    auto_run = Run(load(tiny("training.device=auto")), tmp_path, barely_trained)
    auto = auto_run.trainer
    assert auto.policy.device.type == "cpu"


def test_bfloat16_run_on_the_cpu_learns_finite_numbers(tmp_path, tiny, barely_trained):
    record = run(
        tiny("training.precision=bfloat16", "training.gradient_checkpointing=true", "training.iterations=2"),
        tmp_path,
        barely_trained,
    )
    updates = tables(tmp_path)[0]
    assert record["status"] == "completed" and updates["gradient_norm"].notna().all()
    first = updates.iloc[0]
    assert first["kl_reference"] < 1e-4


def test_roll_outs_in_bfloat16_are_scored_anew_so_that_ratios_start_at_one(tmp_path, tiny, barely_trained):
    """A pass over one token rounds otherwise than one over many; in float32 both are one, and nothing is scored."""
    found = {}
    for precision in ("bfloat16", "float32"):
        once = ("training.iterations=1", "training.staleness_iterations=0", "evaluation.every=9")
        run(tiny(f"training.precision={precision}", *once), tmp_path / precision, barely_trained)
        found[precision] = tables(tmp_path / precision)[0].iloc[0]
    half, full = found["bfloat16"], found["float32"]
    assert 1e-4 < half["mismatch_mean"] < 0.05 and half["mismatch_max"] > 5 * (half["ratio_max_token"] - 1)
    assert math.isnan(full["mismatch_mean"]) and full["ratio_max_token"] == pytest.approx(1, abs=1e-4)


def test_reference_in_bfloat16_computes_what_the_policy_does_before_its_first_step(
    tmp_path, tiny, barely_trained
):
    its_run = Run(load(tiny("training.precision=bfloat16")), tmp_path, barely_trained, progress=False)
    trainer = its_run.trainer
    batch = trainer.batches.sample(0, 0).trajectories
    with torch.no_grad():
        found, expected = (score(model, batch).logprobs for model in (trainer.reference, trainer.policy))
    assert torch.equal(found, expected) and found.any()
