import json
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import Document, read_corpus

DOCUMENTS = [
    Document("0", "Oslo", "capital of Norway"),
    Document("1", "Bergen", "a town in Norway"),
    Document("2", "Paris", "capital of France"),
    Document("3", "Oslo", "capital of Norway"),
]


def ids(results):
    return [[document.id for document, _ in ranking] for ranking in results]


def test_best_document_comes_first_and_titles_count():
    assert ids(BM25Retriever(DOCUMENTS).search(["Bergen?", "france CAPITAL"], 1)) == [["1"], ["2"]]


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_ties_are_broken_by_corpus_order(top_k):
    twins = [Document(str(i), "twin", "same text") for i in range(50)]
    assert ids(BM25Retriever(twins).search(["twin"], top_k)) == [[str(i) for i in range(top_k)]]


def test_only_documents_that_share_a_word_are_returned():
    assert ids(BM25Retriever(DOCUMENTS).search(["town", "capital"], 9)) == [["1"], ["0", "2", "3"]]


def test_a_mark_of_its_own_and_a_composed_letter_are_one_word():
    retriever = BM25Retriever([Document("0", "T", "Zu\u0308rich lies there"), Document("1", "T", "Bern")])
    ((found, _),) = retriever.search(["z\u00fcrich"], 1)[0]
    assert found.id == "0"


@pytest.mark.parametrize("query", ["", "  ?!", "zzz unknown"])
def test_unknown_words_find_nothing(query):
    assert BM25Retriever(DOCUMENTS).search([query, "Paris"], 1)[0] == []


def test_empty_corpus_and_wrong_top_k_are_refused():
    with pytest.raises(ValueError, match="corpus is empty"):
        BM25Retriever([])
    with pytest.raises(ValueError, match="corpus has no words"):
        BM25Retriever([Document("0", "", "...")])
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        BM25Retriever(DOCUMENTS).search(["a"], 0)


def test_cached_index_is_read_and_not_rebuilt(tmp_path, monkeypatch):
    first = BM25Retriever(DOCUMENTS, tmp_path).search(["capital of Norway"], 4)
    monkeypatch.setattr(BM25Retriever, "_build", lambda self: pytest.fail("rebuilt"))
    assert BM25Retriever(DOCUMENTS, tmp_path).search(["capital of Norway"], 4) == first
    assert len(list(tmp_path.iterdir())) == 1  # nothing of the writing is left


def test_other_documents_get_another_index(tmp_path):
    BM25Retriever(DOCUMENTS, tmp_path)
    assert ids(BM25Retriever(DOCUMENTS[::-1], tmp_path).search(["Paris"], 1)) == [["2"]]
    assert len(list(tmp_path.iterdir())) == 2


def truncate(path):
    path.write_bytes(path.read_bytes()[:-8])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "file", ["data.csc.index.npy", "vocab.index.json", "params.index.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", [truncate, flip, lambda path: path.unlink()])
def test_a_damaged_cache_is_rebuilt(tmp_path, file, damage):
    expected = BM25Retriever(DOCUMENTS, tmp_path).search(["Norway"], 4)
    (folder,) = tmp_path.iterdir()
    damage(folder / file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert BM25Retriever(DOCUMENTS, tmp_path).search(["Norway"], 4) == expected
        warnings.simplefilter("error")  # the repaired entry is whole again
        assert BM25Retriever(DOCUMENTS, tmp_path).search(["Norway"], 4) == expected
    assert list(tmp_path.iterdir()) == [folder]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match="not cached"):
        retriever = BM25Retriever(DOCUMENTS, blocked)
    assert ids(retriever.search(["Paris"], 1)) == [["2"]]


def build_and_search(folder):
    return ids(BM25Retriever(DOCUMENTS, folder).search(["capital of Norway"], 4))


def test_processes_share_a_cache(tmp_path):
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:
        results = list(pool.map(build_and_search, [tmp_path] * 6))
    assert results == [build_and_search(tmp_path)] * 6
    assert len(list(tmp_path.iterdir())) == 1


def test_corpus_contents_split_into_title_and_text(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    contents = ['"Oslo"\nA city.\nIn Norway.', "Bergen\nA town.", '""Heroes""\nAn album.']
    corpus.write_text("\n\n".join(json.dumps({"id": i, "contents": text}) for i, text in enumerate(contents)))
    assert read_corpus(corpus) == [
        Document("0", "Oslo", "A city.\nIn Norway."),
        Document("1", "Bergen", "A town."),
        Document("2", '"Heroes"', "An album."),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"id": "1", "contents": ', "not valid JSON"),
        (b"\xff{}", "not"),
        (b'["1"]', "expected a JSON object, got list"),
        (b'{"contents": "a"}', 'needs "id"'),
        (b'{"id": "1"}', 'needs "id"'),
        (b'{"id": "1", "contents": ["a"]}', 'needs "id"'),
        (b'{"id": "1", "contents": " "}', 'needs "id"'),
    ],
)
def test_a_malformed_corpus_line_is_named(tmp_path, line, problem):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b'{"id": "0", "contents": "\\"a\\"\\nb"}\n\n' + line + b"\n")
    with pytest.raises(ValueError) as error:
        read_corpus(corpus)
    assert str(error.value).startswith(f"{corpus} line 3: {problem}")
    assert "\n" not in str(error.value)


def test_empty_and_missing_corpus_are_named(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n \n")
    with pytest.raises(ValueError, match=f"{corpus}: corpus is empty"):
        read_corpus(corpus)
    corpus.unlink()
    with pytest.raises(FileNotFoundError, match="corpus.jsonl"):
        read_corpus(corpus)


@pytest.mark.parametrize(
    ("record", "title", "text"),
    [
        (
            {"title": "Tarn", "contents": "A mill town.\nThe mill closed."},
            "Tarn",
            "A mill town.\nThe mill closed.",
        ),
        ({"title": "Tarn", "contents": '"Tarn"\nA mill town.'}, "Tarn", "A mill town."),
        ({"contents": '"Tarn"\r\nThe mill closed.'}, "Tarn", "The mill closed."),
    ],
)
def test_a_title_of_its_own_wins_and_none_keeps_its_quotes(tmp_path, record, title, text):
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps({"id": "3"} | record) + "\n")
    assert read_corpus(file) == [Document("3", title, text)]
