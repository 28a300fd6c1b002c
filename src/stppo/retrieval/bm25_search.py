"""The best documents of a sparse index without scoring all of them."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import bm25s
import numpy as np

_LEADING = 32  # documents scored by all terms in advance
FEW_DOCUMENTS = 50_000  # up to here adding up all scores is faster than leaving most of them out


@dataclass(frozen=True, eq=False)
class Postings:
    """A bm25s index as arrays: term t scores `data[indptr[t]:indptr[t+1]]` in the documents `indices[...]`,
    ascending.

    data: (postings,) float32, positive; indices: (postings,) int32; indptr: (terms + 1,) int64.
    maxima: (terms,) float32, the largest score of each term.
    """

    data: np.ndarray
    indices: np.ndarray
    indptr: np.ndarray
    maxima: np.ndarray
    n_documents: int
    _own: threading.local = field(default_factory=threading.local)

    def scratch(self) -> np.ndarray:
        """(n_documents,) float32 zeros of this thread, to be left as zeros: new pages for each query cost
        more than the search."""
        if not hasattr(self._own, "zeros"):
            self._own.zeros = np.zeros(self.n_documents, np.float32)
        return self._own.zeros

    @classmethod
    def of(cls, index: bm25s.BM25, maxima: np.ndarray | None = None) -> "Postings":
        """The arrays of a bm25s index, still memory-mapped where they are; every term must occur
        somewhere."""
        names = ("data", "indices", "indptr")
        data, indices, indptr = (np.asarray(index.scores[name]) for name in names)
        if maxima is None:
            maxima = np.maximum.reduceat(data, indptr[:-1])
        return cls(data, indices, indptr, maxima, int(index.scores["num_docs"]))

    def slice(self, term: int) -> slice:
        return slice(int(self.indptr[term]), int(self.indptr[term + 1]))


def best_documents(postings: Postings, terms: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k documents with the largest sum of their terms' scores, best first, ties by number; fewer if fewer
    match.

    terms: of the query, in its order, repeated as there. Returns document numbers and float32 scores, which
    are bit for bit those of `bm25s.BM25.get_scores_from_ids`."""
    if postings.n_documents <= FEW_DOCUMENTS:
        scores = np.zeros(postings.n_documents, np.float32)
        for term in terms:
            where = postings.slice(term)
            scores[postings.indices[where]] += postings.data[where]
        documents = np.flatnonzero((scores > 0) & (scores >= _kth_largest(scores, k)))
        exact = scores[documents]
    else:
        documents = _candidates(postings, terms, k)
        exact = np.zeros(len(documents), np.float32)
        for term in terms:
            found, values = _lookup(postings, term, documents)
            exact[found] += values
    best = np.argsort(-exact, kind="stable")[:k]
    return documents[best], exact[best]


def _candidates(postings: Postings, terms: Sequence[int], k: int) -> np.ndarray:
    """Numbers, ascending, of few documents with the best k among them.

    MaxScore (Turtle and Flood 1995): terms are taken by their largest score. Once k documents have more than
    all terms left could give together, no new document can enter, and the postings of the terms left, which
    are the long ones, are only looked up for the documents already found. What k documents have is known
    early: after each term those that lead are scored by all the others."""
    counts = Counter(terms)
    order = sorted(counts, key=lambda term: -counts[term] * float(postings.maxima[term]))
    bounds = [counts[term] * float(postings.maxima[term]) for term in order]
    left = np.cumsum([0.0, *bounds[::-1]])[::-1]  # left[i]: what the terms from the i-th on could add
    slack = 1e-5 * left[0]  # these sums are in another order than the query's, so they round differently
    threshold, beaten, touched, taken = 0.0, 0.0, [], 0
    scores = postings.scratch()
    try:
        while taken < len(order) and threshold <= left[taken] + slack:
            term, where = order[taken], postings.slice(order[taken])
            documents = postings.indices[where].astype(np.intp)  # else each use casts them
            sums = scores.take(documents) + np.float32(counts[term]) * postings.data[where]
            touched.append((documents, sums))
            scores[documents] = sums
            taken += 1
            high = np.flatnonzero(sums > beaten)
            if len(high) >= k:
                beaten = _kth_largest(sums[high], k)
                lead = np.sort(high[_largest(sums[high], max(k, _LEADING))])
                whole = _with_terms(postings, order[taken:], counts, documents[lead], sums[lead])
                threshold = max(threshold, _kth_largest(whole, k))
        enough = threshold - left[taken] - slack
        # With the last of its terms that were taken a document has its whole sum.
        candidates = np.sort(np.concatenate([held[sums >= enough] for held, sums in touched]))
        candidates = candidates[np.append(True, candidates[1:] != candidates[:-1])[: len(candidates)]]
        sums = scores[candidates]
    finally:
        for documents, _ in touched:
            scores[documents] = 0
    for term, rest in zip(order[taken:], left[taken:], strict=False):
        hopeful = sums + rest + slack >= threshold
        candidates, sums = candidates[hopeful], sums[hopeful]
        sums = _with_terms(postings, [term], counts, candidates, sums)
        threshold = max(threshold, _kth_largest(sums, k))
    return candidates[sums + slack >= threshold]


def _with_terms(
    postings: Postings, terms: Sequence[int], counts: Counter[int], documents: np.ndarray, sums: np.ndarray
) -> np.ndarray:
    """The sums of documents, ascending, with these terms added."""
    sums = sums.copy()
    for term in terms:
        found, values = _lookup(postings, term, documents)
        sums[found] += np.float32(counts[term]) * values
    return sums


def _largest(values: np.ndarray, n: int) -> np.ndarray:
    """Where the n largest are; everywhere where there are fewer."""
    return np.argpartition(values, -n)[-n:] if len(values) > n else np.arange(len(values))


def _kth_largest(values: np.ndarray, k: int) -> float:
    """0 where there are fewer than k."""
    return float(np.partition(values, -k)[-k]) if len(values) >= k else 0.0


def _lookup(postings: Postings, term: int, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of the documents hold the term (positions in `documents`), and its scores there."""
    where = postings.slice(term)
    holders = postings.indices[where]
    wanted = documents.astype(holders.dtype)  # where the types differ all holders are copied
    at = np.searchsorted(holders, wanted)
    found = np.flatnonzero(holders[np.minimum(at, len(holders) - 1)] == documents)
    return found, postings.data[where][at[found]]
