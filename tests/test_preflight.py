"""`stppo preflight`: the table, its exit code, and what it says where something is missing, broken or too small."""

import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

from stppo import cli
from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.preflight import fit, requirements
from stppo.preflight.fit import Machine, preflight, shortage, text
from stppo.preflight.memory import GIB


@pytest.fixture
def stppo(monkeypatch, capsys, tmp_path):
    """Run `stppo preflight` in an empty folder; returns (exit code, stdout)."""
    monkeypatch.setenv("STPPO_DEBUG", "")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["stppo", "preflight", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, capsys.readouterr().out

    return run


def row(rows, what):
    return next(row for row in rows if row.what.startswith(what))


def test_a_preset_that_fits_is_ready(stppo, tmp_path):
    code, out = stppo("preset=smoke", "--json", "found.json")
    assert code == 0 and out.rstrip().endswith("ready") and "FAIL" not in out
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["ok"] and written["estimate"]["shape"]["layers"] == 2


def test_a_gpu_that_is_too_small_fails_and_names_what_would_help(stppo):
    code, out = stppo("preset=laptop", "policy=small", "training=workstation", "--gpu-gib", "2")
    assert code == 1 and "GPU memory, update" in out and "FAIL" in out
    helping = out.split("What would help", 1)[1]
    assert "training.micro_batch_tokens=" in helping and "training.gradient_checkpointing=true" in helping
    assert "GiB" in helping and "Seconds of an iteration on one A100" in helping


def test_qwen_is_estimated_without_network_and_every_missing_thing_has_its_remedy(monkeypatch):
    monkeypatch.setattr(
        requirements,
        "_on_the_hub",
        lambda name, kind, *_: (None, requirements.Row(kind, "", "", False, "get it")),
    )
    monkeypatch.setattr(requirements, "_vllm_row", lambda: requirements.Row("vLLM", "", "", True))
    report = preflight(["preset=qwen", "world.retriever.url=http://127.0.0.1:9/retrieve"], gpu_gib=80)
    assert not report.ok and report.estimate.shape.parameters == 1_543_714_304
    assert all(row.remedy for row in report.rows if row.ok is False)
    assert "stppo retriever serve" in row(report.rows, "retriever").remedy
    assert "1,543.7 M parameters" in text(report)


def test_unknown_model_says_how_to_get_it(tmp_path):
    config = ["preset=laptop", "policy.pretrained=someone/private-model"]
    with pytest.raises(FileNotFoundError, match="hf download someone/private-model"):
        preflight(config, gpu_gib=80)


def test_trajectories_longer_than_the_model_are_no_ready_run(stppo, tmp_path):
    GPT2Config(n_positions=96).save_pretrained(tmp_path)
    code, out = stppo("preset=laptop", f"policy.pretrained={tmp_path}", "rollout.max_tokens=900")
    assert code == 1 and not out
    with pytest.raises(ValueError, match=r"rollout\.max_tokens=40000 exceeds .* 32768 positions"):
        preflight(["preset=qwen", "rollout.max_tokens=40000"], gpu_gib=80)  # a public model that is not here


# ---- model --------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, intermediate_size=64, vocab_size=50)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def test_truncated_weights_are_found(weights):
    run = load(compose(["preset=laptop", f"policy.pretrained={weights}"])).settings
    assert row(requirements.model(run), "weights").ok
    file = weights / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    found = row(requirements.model(run), "weights")
    assert found.ok is False and "model.safetensors" in found.found and "again" in found.remedy


def test_gated_model_says_where_its_licence_is(monkeypatch):
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError

    def refuse(*_, **__):
        request = httpx.Request("GET", "https://hf.co")
        raise GatedRepoError("gated", response=httpx.Response(403, request=request))

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    place, found = requirements._on_the_hub("someone/model", "model", "", "")
    assert place is None and found.ok is False and "https://hf.co/someone/model" in found.remedy


# ---- data and retriever -------------------------------------------------------------------------


def world(tmp_path, **changes):
    records = tmp_path / "nq.jsonl"
    if not records.exists():
        records.write_text(json.dumps({"question": "who?", "answer": ["me"]}) + "\n")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "0", "contents": '"Title"\nText about the odyssey.'}) + "\n")
    section = {"_target_": "stppo.world.BenchmarkWorld", "benchmark": "nq", "records": str(records)}
    section |= {"corpus": str(corpus)} | changes
    return build(section, "world"), section


def served(tmp_path, reply: bytes):
    """Rows of a world whose retrieval server answers everything with `reply`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply)

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok", "documents": 7}')

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        client = {
            "_target_": "stppo.retrieval.client.RetrievalClient",
            "url": f"http://127.0.0.1:{server.server_port}/retrieve",
        }
        return list(requirements.data(*world(tmp_path, corpus=None, retriever=client)))
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_that_answers_is_told_with_its_documents(tmp_path):
    result = [[{"document": {"id": "0", "contents": '"Title"\nText'}, "score": 1.0}]]
    found = row(served(tmp_path, json.dumps({"result": result}).encode()), "retriever")
    assert found.ok and found.found.startswith("1 passages in") and found.found.endswith("7 documents")


@pytest.mark.parametrize("reply", [b"<html>", b'{"result": []}', b'{"result": [[]]}'])
def test_a_server_that_answers_nonsense_fails(tmp_path, reply):
    assert row(served(tmp_path, reply), "retriever").ok is False


def test_first_records_are_read(tmp_path):
    found = list(requirements.data(*world(tmp_path)))
    assert row(found, "records nq").found == "first: 'who?'" and row(found, "corpus").ok
    (tmp_path / "nq.jsonl").write_text('{"question": "who?", "ans')
    broken = row(requirements.data(*world(tmp_path)), "records nq")
    assert broken.ok is False and "nq.jsonl" in broken.remedy


# ---- room ---------------------------------------------------------------------------------------


def test_output_folder_need_not_exist_but_must_be_writable(tmp_path, monkeypatch):
    assert requirements.writable(tmp_path / "a" / "b").ok

    def refuse(**_):
        raise PermissionError("read-only")

    monkeypatch.setattr(requirements.tempfile, "TemporaryFile", refuse)
    found = requirements.writable(tmp_path / "a")
    assert found.ok is False and str(tmp_path) in found.remedy


# ---- causes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [None, "13.0"])
def test_a_gpu_that_is_missing_names_the_setting_that_wants_it(monkeypatch, build):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    wants = load(compose(["preset=laptop", "training.optimizer=adam8bit"])).settings
    found = requirements._gpu_row(wants, False)
    assert found.ok is False and found.needed == "one, for training.optimizer=adam8bit"
    assert found.remedy.startswith("without a GPU set training.optimizer=adam;")
    assert "CPU build" in found.remedy if build is None else "nvidia-smi" in found.remedy
    both = load(compose(["preset=laptop", "training.optimizer=adam8bit", "training.device=cuda"])).settings
    assert "set training.device=cpu training.optimizer=adam;" in requirements._gpu_row(both, False).remedy
    assert requirements._gpu_row(load(compose(["preset=laptop"])).settings, False).ok


def on_a_machine_of(monkeypatch, host_gib, *overrides):
    machine = Machine("none", None, host_gib * GIB, host_gib * GIB, 1e15)
    monkeypatch.setattr(Machine, "found", classmethod(lambda *_: machine))
    return preflight(["preset=laptop", *overrides])


def gib(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"GiB": 1.0, "MiB": 2**-10}[unit]


def test_host_memory_is_short_where_the_numbers_say_so(monkeypatch):
    large = ["policy=small", "policy.max_positions=512", "rollout.max_tokens=512"]
    needed = gib(row(on_a_machine_of(monkeypatch, 1000, *large).rows, "host memory").needed)
    enough, short = (on_a_machine_of(monkeypatch, needed + more, *large) for more in (0.2, -0.5))
    assert row(enough.rows, "host memory").ok and enough.ok and not enough.knobs
    found = row(short.rows, "host memory")
    assert found.ok is False and gib(found.found) < gib(found.needed)
    assert "see the knobs below" in found.remedy and "the largest part is" in found.remedy
    assert short.knobs and all("adam8bit" not in knob.override for knob in short.knobs), "there is no GPU"
    for knob in short.knobs:
        if knob.fits and "=" in knob.override and " " not in knob.override:
            assert row(
                on_a_machine_of(monkeypatch, needed - 0.5, *large, knob.override).rows, "host memory"
            ).ok
            break
    else:
        raise AssertionError("no knob that fits was tried")


@pytest.mark.parametrize(
    ("host_gib", "found"), [(23.5, r"^16\.\d GiB$"), (4, r"^none of 4.0 GiB: process 5.0 GiB \+ que")]
)
def test_room_that_is_found_is_never_negative(monkeypatch, host_gib, found):
    for part in ("software", "model", "data"):
        monkeypatch.setattr(requirements, part, lambda *_: [])
    report = on_a_machine_of(monkeypatch, host_gib, "preset=qwen", "rollout=torch")
    rows = [row for row in report.rows if row.what.startswith("host (no GPU) memory")]
    assert len(rows) == len(report.estimate.phases) > 4
    assert all(re.search(found, row.found) for row in rows), rows[0].found


def test_a_gpu_that_is_not_to_be_used_is_not_planned_for(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    assert Machine.found(tmp_path).gpu == 2 * GIB
    assert Machine.found(tmp_path, device="cpu").gpu is None


def test_shortage_is_one_line_with_what_would_help(monkeypatch):
    large = ["policy=small", "policy.max_positions=512", "rollout.max_tokens=512"]
    run = load(compose(["preset=laptop", *large])).settings
    monkeypatch.setattr(fit, "_free_host", lambda: 1000 * GIB)
    monkeypatch.setattr(fit.os, "sysconf", lambda _: 2**20)  # pages of 1 MiB, a million of them
    assert shortage(run) is None
    monkeypatch.setattr(fit, "_free_host", lambda: 3 * GIB)
    line = shortage(run)
    assert line.startswith("memory may run out: ") and "\n" not in line and "3.0 GiB are free" in line
    needed = gib(re.search(r"takes up to (\S+ GiB)", line)[1])
    assert needed > 3
    monkeypatch.setattr(fit, "_free_host", lambda: (needed - 0.5) * GIB)
    fits = re.findall(r"([\w.]+=[\w.]+) \(to (\S+ GiB), fits\)", shortage(run))
    assert fits and all(gib(size) < needed - 0.4 for _, size in fits)
    assert shortage(load(compose(["preset=laptop", *large, fits[0][0]])).settings) is None


def test_frozen_layers_are_a_knob_of_pretrained_policies(monkeypatch, weights):
    config = Qwen2Config(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=256,
        vocab_size=50,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(weights)
    report = on_a_machine_of(monkeypatch, 1.02, f"policy.pretrained={weights}", "rollout.max_tokens=512")
    (knob,) = (knob for knob in report.knobs if "trainable_layers" in knob.override)
    before = {phase.name: phase.total for phase in report.estimate.phases}
    assert knob.override == "policy.trainable_layers=2"
    assert all(knob.phases[name] < 0.7 * before[name] for name in ("critic", "update"))


def test_a_model_that_was_not_fetched_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("STPPO_CACHE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="run `stppo fetch smollm2` once"):
        preflight(["preset=laptop", "policy=smollm2"])
