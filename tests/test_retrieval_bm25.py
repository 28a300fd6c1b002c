import json
import random
import warnings

import bm25s
import numpy as np
import pytest

from stppo.retrieval import bm25_search
from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.bm25_search import Postings, best_documents
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


# ---- pruned search ---------------------------------------------------------------------------------


def index_of(texts):
    vocabulary = {}
    ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in text] for text in texts]
    index = bm25s.BM25(method="lucene")
    index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
    return index


def by_full_scores(index, terms, k):
    scores = index.get_scores_from_ids(terms)
    order = [i for i in np.argsort(-scores, kind="stable") if scores[i] > 0][:k]
    return order, scores[order]


@pytest.fixture(scope="module")
def zipfian():
    """3,000 short documents with a long tail of words, many of them twice in the corpus."""
    rng = np.random.default_rng(0)
    texts = [rng.zipf(1.2, rng.integers(1, 30)).clip(max=2000).tolist() for _ in range(2000)]
    texts += texts[:1000]
    return index_of(texts)


@pytest.mark.parametrize("k", [1, 3, 10, 5000])
@pytest.mark.parametrize("few", [0, 10_000], ids=["pruned", "all"])
def test_the_best_are_those_of_the_full_scores(zipfian, k, few, monkeypatch):
    monkeypatch.setattr(bm25_search, "FEW_DOCUMENTS", few)
    rng = random.Random(k)
    vocabulary = sorted(zipfian.vocab_dict.values())
    common = vocabulary[:15]  # ids grow with first occurrence, so the first ones are frequent
    for _ in range(150):
        terms = rng.choices(vocabulary, k=rng.randint(1, 8)) + rng.choices(common, k=rng.randint(0, 6))
        rng.shuffle(terms)
        documents, scores = best_documents(Postings.of(zipfian), terms, k)
        expected, values = by_full_scores(zipfian, terms, k)
        assert documents.tolist() == [int(i) for i in expected]
        assert scores.tobytes() == values.tobytes()


def test_a_document_with_two_weaker_words_passes_one_with_the_strongest(monkeypatch):
    monkeypatch.setattr(bm25_search, "FEW_DOCUMENTS", 0)
    texts = [["rare"], ["mid", "other"], ["mid"], ["other"]] + [["filler"]] * 10
    index = index_of(texts)
    terms = [index.vocab_dict[word] for word in ("rare", "mid", "other")]
    documents, scores = best_documents(Postings.of(index), terms, 1)
    assert documents.tolist() == [1] and scores.tobytes() == by_full_scores(index, terms, 1)[1].tobytes()
