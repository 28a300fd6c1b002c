"""Finding documents: BM25 and dense indexes, in memory, on disk and over HTTP."""
