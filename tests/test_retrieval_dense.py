"""Dense retrieval with a tiny random BERT, made here and loaded as any model, against NumPy on every pair."""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, BertTokenizerFast

from stppo.retrieval.documents import Document

pytest.importorskip("faiss", reason="the extra `retrieval` is not installed")
from stppo.retrieval.dense import Encoder, build_dense, open_dense

WORDS = [f"w{i}" for i in range(60)]
DOCUMENTS = [
    Document(f"d{i}", WORDS[i % 7], " ".join(WORDS[(i * j) % 60] for j in range(1, 2 + i % 23)))
    for i in range(150)
]
QUERIES = ["w1 w2", "w3", "", " ".join(WORDS), "w59 w1 w7 w7"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", '"', *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": d.id, "contents": d.contents}) + "\n" for d in DOCUMENTS))
    return path


@cache
def loaded(model):
    return BertTokenizerFast.from_pretrained(model), BertModel.from_pretrained(model).double().eval()


def alone(model, text, max_tokens=64, pooling="mean"):
    """The vector of one text, without padding, batching or the code under test."""
    tokenizer, network = loaded(model)
    ids = torch.tensor([tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]])
    with torch.no_grad():
        states = network(ids).last_hidden_state[0]
        pooled = (states[0] if pooling == "cls" else states.mean(0)).numpy()
    return pooled / np.sqrt((pooled**2).sum())


def brute_force(model, queries, k):
    passages = np.stack([alone(model, f'passage: "{d.title}"\n{d.text}') for d in DOCUMENTS])
    scores = np.stack([alone(model, f"query: {query}") for query in queries]) @ passages.T
    best = np.argsort(-scores, axis=1)[:, :k]
    return best, np.take_along_axis(scores, best, 1)


def encoder(model, **fields):
    return Encoder(model, **{"max_tokens": 64, "device": "cpu", "batch_size": 4, **fields})


def test_vectors_are_normalised_means_with_the_right_prefix(model):
    texts = ["w1", "w2 w3 w4 w5 w6", "w7 w8"]
    found = encoder(model).queries(texts)
    expected = np.stack([alone(model, f"query: {text}") for text in texts])
    assert found == pytest.approx(expected, abs=1e-5)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-6)
    (passage,) = encoder(model, passage_prefix="").passages([DOCUMENTS[5]])
    assert passage == pytest.approx(alone(model, f'"{DOCUMENTS[5].title}"\n{DOCUMENTS[5].text}'), abs=1e-5)


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_the_best_documents_are_those_of_brute_force(model, corpus, tmp_path, kind):
    made = build_dense(corpus, tmp_path / "i", encoder(model), kind)
    assert (made["documents"], made["vector_size"], made["encoder"]["query_prefix"]) == (150, 32, "query: ")
    results = open_dense(tmp_path / "i", device="cpu").search(QUERIES, 5)
    best, scores = brute_force(model, QUERIES, 5)
    assert [[d.id for d, _ in ranking] for ranking in results] == [[f"d{i}" for i in row] for row in best]
    assert np.array([[score for _, score in ranking] for ranking in results]) == pytest.approx(
        scores, abs=1e-5
    )
    assert results[0][0][0] == DOCUMENTS[best[0][0]]
    assert [path.name for path in tmp_path.iterdir()] == ["i"]


def test_an_interrupted_build_goes_on_where_it_was(model, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("stppo.retrieval.dense._SORTED_TOGETHER", 5)  # blocks of 20 passages
    encoded = []
    original = Encoder.passages

    def counted(self, documents):
        if len(encoded) == 3:
            raise KeyboardInterrupt
        encoded.append([document.id for document in documents])
        return original(self, documents)

    monkeypatch.setattr(Encoder, "passages", counted)
    with pytest.raises(KeyboardInterrupt):
        build_dense(corpus, tmp_path / "i", encoder(model))
    assert not (tmp_path / "i").exists()
    partial = tmp_path / "i.partial" / "vectors.f32"
    partial.write_bytes(partial.read_bytes()[:-100])  # the last row was cut off by the crash
    encoded.clear()
    monkeypatch.setattr(
        Encoder,
        "passages",
        lambda self, documents: encoded.append(documents[0].id) or original(self, documents),
    )
    build_dense(corpus, tmp_path / "i", encoder(model))
    assert encoded[0] == "d59" and len(encoded) == 6
    best, _ = brute_force(model, QUERIES, 5)
    results = open_dense(tmp_path / "i", device="cpu").search(QUERIES, 5)
    assert [[d.id for d, _ in ranking] for ranking in results] == [[f"d{i}" for i in row] for row in best]


def test_what_cannot_be_is_named(model, corpus, tmp_path):
    with pytest.raises(ValueError, match=r"model .*nowhere cannot be loaded on cpu .*hf auth login"):
        encoder(str(tmp_path / "nowhere")).queries(["a"])
    with pytest.raises(ValueError, match="kind must be one of flat, hnsw"):
        build_dense(corpus, tmp_path / "i", encoder(model), "ivf")
    with pytest.raises(ValueError, match="batch_size must be a whole number"):
        encoder(model, batch_size=0)
    (tmp_path / "i").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        build_dense(corpus, tmp_path / "i", encoder(model))


def test_an_encoder_that_lacks_weights_is_refused(model, tmp_path):
    """Else random layers would rank the documents."""
    folder = Path(shutil.copytree(model, tmp_path / "other"))
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.startswith("pooler.")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert Encoder(str(folder), device="cpu").queries(["w1"]).shape == (1, 32), "the pooler is not read"
    kept = {name: weight for name, weight in kept.items() if "layer.1.output.dense" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks encoder\.layer\.1\.output\.dense\.bias"):
        Encoder(str(folder), device="cpu").queries(["w1"])


def stating(model, folder, pooling, prompts, modules=("Transformer", "Pooling", "Normalize")):
    """A copy of a model with the files that sentence-transformers writes."""
    folder = Path(shutil.copytree(model, folder))
    paths = [{"path": f"{i}_{name}" if i else "", "type": f"a.b.{name}"} for i, name in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(paths))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return str(folder)


@pytest.mark.parametrize(
    "pooling",
    [  # as versions since 5.4 and before write it
        {"embedding_dimension": 32, "pooling_mode": "cls", "include_prompt": True},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": False},
    ],
)
def test_an_encoders_own_statements_are_followed(model, tmp_path, pooling):
    prompts = {"query": "w9 : ", "document": ""}
    folder = stating(model, tmp_path / "own", pooling, prompts)
    texts = ["w1", "w2 w3 w4 w5 w6"]
    expected = np.stack([alone(model, f"w9 : {text}", pooling="cls") for text in texts])
    assert encoder(folder).queries(texts) == pytest.approx(expected, abs=1e-5)
    (passage,) = encoder(folder).passages([DOCUMENTS[5]])
    text = f'"{DOCUMENTS[5].title}"\n{DOCUMENTS[5].text}'
    assert passage == pytest.approx(alone(model, text, pooling="cls"), abs=1e-5)
    (passage,) = encoder(folder, passage_prefix="w3 ").passages([DOCUMENTS[5]])
    assert passage == pytest.approx(alone(model, f"w3 {text}", pooling="cls"), abs=1e-5)


@pytest.mark.parametrize(
    ("pooling", "modules", "named"),
    [
        ({"pooling_mode": "lasttoken"}, ("Transformer", "Pooling"), "pools by lasttoken"),
        ({}, ("Transformer", "Pooling"), "pools by nothing"),
        ({"pooling_mode_max_tokens": True}, ("Transformer", "Pooling"), "pools by pooling_mode_max_tokens"),
        (
            {"pooling_mode": "mean", "include_prompt": False},
            ("Transformer", "Pooling"),
            "include_prompt=False",
        ),
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"), "module Dense is not supported"),
    ],
)
def test_statements_that_cannot_be_followed_are_refused_by_name(model, tmp_path, pooling, modules, named):
    folder = stating(model, tmp_path / "own", pooling, {}, modules)
    with pytest.raises(ValueError, match=named):
        encoder(folder).queries(["w1"])


def test_two_builds_of_one_index_do_not_mix(model, corpus, tmp_path, monkeypatch):
    original = Encoder.passages

    def meanwhile(self, documents):
        monkeypatch.setattr(Encoder, "passages", original)
        with pytest.raises(FileExistsError, match="another process makes it; wait for it"):
            build_dense(corpus, tmp_path / "i", encoder(model))
        return original(self, documents)

    monkeypatch.setattr(Encoder, "passages", meanwhile)
    build_dense(corpus, tmp_path / "i", encoder(model))
    results = open_dense(tmp_path / "i", device="cpu").search(QUERIES, 5)
    best, _ = brute_force(model, QUERIES, 5)
    assert [[d.id for d, _ in ranking] for ranking in results] == [[f"d{i}" for i in row] for row in best]


def test_an_index_is_bound_to_its_encoders_weights(model, corpus, tmp_path):
    folder = Path(shutil.copytree(model, tmp_path / "own"))
    build_dense(corpus, tmp_path / "i", encoder(str(folder)))
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="own is not what it was made with; index it again"):
        open_dense(tmp_path / "i", device="cpu")
