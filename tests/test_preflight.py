"""`stppo preflight`: what it says where something is missing or too small, and how near its estimate is."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from stppo.config.composition import compose
from stppo.config.files import ConfigError
from stppo.config.identity import run_section
from stppo.config.loading import LoadedRun, build, load
from stppo.config.settings import RunConfig
from stppo.files import repository_path
from stppo.preflight import check, requirements
from stppo.preflight.check import LOWER, preflight, shortage
from stppo.preflight.estimate import GIB, estimate, models_of
from stppo.pretrained.tiny_model import make_tiny_model
from stppo.record.schema import CHECKPOINT_DIR
from stppo.training.checkpoint import newest
from stppo.training.run import Run

LARGE = ["preset=laptop", "policy=small", "policy.max_positions=512", "rollout.max_tokens=512"]
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}


def row(rows, what):
    return next(row for row in rows if row.what.startswith(what))


def total(parts):
    return sum(parts.values())


def settings(*overrides):
    return load(compose(list(overrides)))


@pytest.fixture
def qwen(tmp_path):
    """(override, config) of Qwen2.5-1.5B, of which the config alone is here."""
    config = Qwen2Config(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path / "qwen")
    return f"policy.pretrained={tmp_path / 'qwen'}"


@pytest.fixture
def weights(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, intermediate_size=256, vocab_size=50, max_position_embeddings=512)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


# ---- the command --------------------------------------------------------------------------------


def test_a_preset_that_fits_is_ready(stppo):
    code, out, _ = stppo("preflight", "preset=smoke")
    assert code == 0 and out.rstrip().endswith("ready") and "FAIL" not in out


def test_a_gpu_that_is_too_small_fails_and_names_what_would_help(stppo):
    code, out, _ = stppo(
        "preflight", "preset=laptop", "policy=small", "training=workstation", "--gpu-gib", "2"
    )
    failed = out.partition("FAIL  GPU memory, update")[2]
    assert code == 1 and "training.micro_batch_tokens=" in failed and "gradient_checkpointing=true" in failed


def test_models_that_are_not_here_say_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setenv("STPPO_CACHE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="run `stppo fetch smollm2` once"):
        preflight(["preset=laptop", "policy=smollm2"])
    with pytest.raises(FileNotFoundError, match="hf download someone/private-model"):
        models_of(settings("preset=laptop", "policy.pretrained=someone/private-model"))


def test_more_trainable_layers_than_there_are_is_named(weights):
    run = settings("preset=laptop", f"policy.pretrained={weights}", "+policy.trainable_layers=6")
    with pytest.raises(
        ConfigError, match=r"^policy\.trainable_layers=6: the policy has 6 layers; give fewer"
    ):
        models_of(run)


# ---- requirements -------------------------------------------------------------------------------


def test_what_is_not_installed_is_told_with_what_to_do_without_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = settings("preset=qwen", "policy.lora={rank: 16}", "training.device=cuda")
    rows = {row.what: row for row in requirements.software(run.settings, given=False)}
    assert rows["GPU"].ok is False and "training.device=cpu" in rows["GPU"].remedy
    assert rows["optimizer"].ok is False and "adam" in rows["optimizer"].remedy
    assert rows["vLLM"].ok or "rollout=torch" in rows["vLLM"].remedy
    assert rows["peft"].ok or "[lora]" in rows["peft"].remedy
    of_another_machine = {row.what: row.ok for row in requirements.software(run.settings, given=True)}
    assert of_another_machine["GPU"] is None
    plain = {
        row.what: row.ok for row in requirements.software(settings("preset=laptop").settings, given=False)
    }
    assert plain["GPU"] and plain["optimizer"]


def world(tmp_path, **changes):
    records = tmp_path / "nq.jsonl"
    if not records.exists():
        records.write_text(json.dumps({"question": "who?", "answer": ["me"]}) + "\n")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "0", "contents": '"Title"\nText about the odyssey.'}) + "\n")
    section = {"_target_": "stppo.world.BenchmarkWorld", "benchmark": "nq", "records": str(records)}
    section |= {"corpus": str(corpus)} | changes
    return build(section, "world"), section


RESULT = {"result": [[{"document": {"id": "0", "contents": '"Title"\nText'}, "score": 1.0}]]}


@pytest.mark.parametrize(
    ("reply", "ok"),
    [(json.dumps(RESULT).encode(), True), (b"<html>", False), (b'{"result": [[]]}', False), (None, False)],
)
def test_a_server_must_answer_with_passages(tmp_path, reply, ok):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port if reply else 9}/retrieve"
        client = {"_target_": "stppo.retrieval.client.RetrievalClient", "url": url}
        found = row(requirements.data(*world(tmp_path, corpus=None, retriever=client)), "retriever")
        server.shutdown()
    assert found.ok == ok and bool(found.remedy) != ok


def test_first_records_are_read(tmp_path):
    found = list(requirements.data(*world(tmp_path)))
    assert row(found, "records nq").found == "first: 'who?'" and row(found, "corpus").ok
    (tmp_path / "nq.jsonl").write_text('{"question": "who?", "ans')
    broken = row(requirements.data(*world(tmp_path)), "records nq")
    assert broken.ok is False and "nq.jsonl" in broken.remedy


@pytest.mark.parametrize(
    ("words", "settings", "said"),
    [
        (3, [], None),
        (900, [], "exceeds max_start_tokens=2048: raise it, or leave that question out: .*w899"),
        (3, ["rollout.max_tokens=300"], "max_tokens=300 leaves no room for a turn after the longest prompt"),
    ],
)
def test_a_question_that_does_not_fit_is_told_before_anything_starts(tmp_path, words, settings, said):
    long = {"question": " ".join(f"w{i}" for i in range(words)), "answer": ["me"]}
    (tmp_path / "nq.jsonl").write_text(json.dumps(long) + "\n")
    world(tmp_path)
    make_tiny_model(tmp_path / "model", ["who is it"], vocabulary=300)
    overrides = [f"policy.pretrained={tmp_path}/model", "world=benchmark", "world.benchmark=nq"]
    overrides += [f"world.records={tmp_path}/nq.jsonl", f"world.corpus={tmp_path}/corpus.jsonl"]
    loaded = load(compose([*overrides, "rollout.max_tokens=4096", *settings]))
    found = row(list(requirements.prompts(loaded.world, loaded.settings)), "prompts")
    assert found.ok == (said is None)
    assert said is None or re.search(said, found.remedy)


def test_records_of_the_hub_say_how_to_get_them(tmp_path, monkeypatch):
    def refuse(benchmark, _):
        raise FileNotFoundError(f"{benchmark}: `hf download`")

    monkeypatch.setattr(requirements, "locate", refuse)
    found = list(requirements.data(*world(tmp_path, records=None, benchmark=["nq", "hotpotqa"])))
    missing = [row for row in found if row.ok is False]
    assert [row.what for row in missing] == ["records nq", "records hotpotqa"]
    assert all("hf download" in row.remedy for row in missing)


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["host memory", "disk"])
def test_room_that_is_short_is_told(monkeypatch, part):
    run = settings(*LARGE)
    needed = estimate(run.settings, models_of(run), None)
    there = 0.9 * (total(needed.disk) if part == "disk" else max(map(total, needed.phases.values())))
    monkeypatch.setattr(check, "host_memory", lambda *_: there if part == "host memory" else 1e15)
    monkeypatch.setattr(check.shutil, "disk_usage", lambda _: type("Usage", (), {"free": there}))
    report = preflight(LARGE)
    failed = [row for row in report.rows if row.ok is False]
    assert not report.ok and all(row.remedy for row in failed)
    assert part in {row.what[: len(part)] for row in failed}


def test_shortage_is_one_line_with_what_would_help(monkeypatch):
    run = settings(*LARGE)
    needed = max(map(total, estimate(run.settings, models_of(run), None).phases.values()))
    monkeypatch.setattr(check, "host_memory", lambda *_: needed + 1)
    assert shortage(run) is None
    monkeypatch.setattr(check, "host_memory", lambda *_: needed - 1)
    line = shortage(run)
    assert "\n" not in line and line.startswith("memory may run out: ")
    assert "training.micro_batch_tokens=FEWER" in line


ADVISED = {
    "training.micro_batch_tokens=FEWER": "training.micro_batch_tokens=4596",
    "training.gradient_checkpointing=true": "training.gradient_checkpointing=true",
    "rollout.batch_size=FEWER": "rollout.batch_size=2",
    "rollout.gpu_memory_utilization=LESS": "rollout.gpu_memory_utilization=0.3",
    "training.optimizer=adam8bit (on a GPU)": "training.optimizer=adam8bit",
    "training.kl_coefficient=0": "training.kl_coefficient=0",
    "policy.trainable_layers=N (pretrained)": "+policy.trainable_layers=2",
    "'policy.lora={rank: 16}'": "policy.lora={rank: 16}",
    "algorithm=grpo (no critic)": "algorithm=grpo",
}


@pytest.mark.parametrize("advice", LOWER)
def test_every_setting_that_is_advised_lowers_what_it_is_advised_for(advice, qwen):
    base = ["preset=qwen", qwen, "training.optimizer=adam", "training.gradient_checkpointing=false"]
    if advice == "rollout.batch_size=FEWER":
        base.append("rollout=torch")

    def largest(*more):
        run = settings(*base, *more)
        return {k: total(v) for k, v in estimate(run.settings, models_of(run), 80 * GIB).phases.items()}

    before, after = largest(), largest(ADVISED[advice])
    assert any(after[phase] < before[phase] - 0.1 * GIB for phase in before)


def test_weights_optimizers_and_checkpoint_are_those_of_a_trained_run(tiny, barely_trained, tmp_path):
    config = tiny("algorithm=st_ppo", "training.iterations=1", "training.minibatches=1", "training.epochs=1")
    held = {}

    def measure(trainer):
        def size(tensors):
            return sum(t.numel() * t.element_size() for t in tensors)

        def moments(optimizer):
            return size(t for state in optimizer.state.values() for n, t in state.items() if n != "step")

        held["reference"] = size(trainer.reference.parameters())
        held["policy"], held["critic"] = (size(m.parameters()) for m in (trainer.policy, trainer.critic))
        held["policy: adam"] = moments(trainer.optimizer)
        held["critic: adam"] = moments(trainer.critic_optimizer)

    Run(load(config), tmp_path, barely_trained, on_iteration=measure, progress=False).train()
    run = load(config)
    made = estimate(run.settings, models_of(run), None)
    assert held == {name: made.phases["update"][name] for name in held}
    written = newest(tmp_path / CHECKPOINT_DIR)
    tensors = sum(file.stat().st_size for file in written.glob("*.safetensors"))
    assert made.disk["two checkpoints"] / 2 == pytest.approx(tensors, rel=0.15)


@pytest.mark.parametrize("folder", ["smollm_comparison/tuning", "smollm/metrics", "smollm/tuning"])
def test_peaks_of_recorded_runs_are_near_the_estimate(folder, tmp_path):
    LlamaConfig(**SMOLLM2).save_pretrained(tmp_path)
    for record in json.loads(repository_path(f"results/reference/{folder}/runs.json").read_text()):
        overrides = [
            f"algorithm={record['algorithm']}",
            "training.precision=bfloat16",
            "rollout.batch_size=64",
        ]
        overrides += [f"world.records={__file__}", f"policy.pretrained={tmp_path}"]
        config = compose(["preset=smollm", *overrides])
        run = RunConfig.model_validate(run_section(config) | {"loggers": []})
        objective = build(config["algorithm"]["objective"], "algorithm.objective")
        phases = estimate(run, models_of(LoadedRun(config, run, objective, None)), None).phases
        needed = max(map(total, phases.values())) / 2**20
        assert 0.8 < needed / record["peak_memory_mb"] < 1.25, record["algorithm"]
