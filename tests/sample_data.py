"""Real benchmark records and a corpus, where the tests that read them find them."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("STPPO_DATA") or Path(__file__).parents[2] / "shared" / "data")
real_data = pytest.mark.skipif(
    not (DATA / "corpus.jsonl").is_file(),
    reason=f"no corpus.jsonl in {DATA}; set STPPO_DATA to a folder that holds corpus.jsonl and "
    "BENCHMARK/records.jsonl (hotpotqa, nq, ...)",
)
