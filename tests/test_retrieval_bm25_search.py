"""Pruned search against bm25s's own scores of every document, bit for bit."""

import random

import bm25s
import numpy as np
import pytest

from stppo.retrieval import bm25_search
from stppo.retrieval.bm25_search import Postings, best_documents


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


def test_the_long_postings_of_a_common_word_are_not_added_up(monkeypatch):
    """A rare word decides: the common one, which all 30,000 documents hold, is only looked up for its holders."""

    monkeypatch.setattr(bm25_search, "FEW_DOCUMENTS", 0)

    class Counting(np.ndarray):
        read = 0

        def __getitem__(self, key):
            found = super().__getitem__(key)
            if isinstance(key, np.ndarray):
                Counting.read += len(key)
            return found

    texts = [["the", str(i % 10_000)] for i in range(30_000)]
    index = index_of(texts)
    postings = Postings.of(index)
    watched = Postings(
        postings.data.view(Counting), postings.indices, postings.indptr, postings.maxima, postings.n_documents
    )
    terms = [index.vocab_dict["the"], index.vocab_dict["123"]]
    documents, _ = best_documents(watched, terms, 3)
    assert documents.tolist() == [123, 10_123, 20_123]
    assert 0 < Counting.read < 100


def test_a_document_with_two_weaker_words_passes_one_with_the_strongest(monkeypatch):
    monkeypatch.setattr(bm25_search, "FEW_DOCUMENTS", 0)
    texts = [["rare"], ["mid", "other"], ["mid"], ["other"]] + [["filler"]] * 10
    index = index_of(texts)
    terms = [index.vocab_dict[word] for word in ("rare", "mid", "other")]
    documents, scores = best_documents(Postings.of(index), terms, 1)
    assert documents.tolist() == [1] and scores.tobytes() == by_full_scores(index, terms, 1)[1].tobytes()
