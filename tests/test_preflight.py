"""`stppo preflight`: the table, its exit code, and what it says where something is missing, broken or too small."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from stppo import cli
from stppo import config as configs
from stppo.preflight import requirements
from stppo.preflight.fit import preflight, text


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


# ---- model --------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, intermediate_size=64, vocab_size=50)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def test_truncated_weights_are_found(weights):
    run = configs.validate(configs.compose(["preset=laptop", f"policy.pretrained={weights}"]))
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
    return configs.build(section, "world"), section


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
