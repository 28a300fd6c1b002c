"""The made-up corpus has the statistics of the real sample it is fitted to, and hides what a question asks for."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stppo.retrieval.bm25 import words
from stppo.retrieval.documents import read_corpus
from tests.sample_data import DATA, real_data

ROOT = Path(__file__).parents[1]
pytestmark = real_data


@pytest.fixture(scope="module")
def corpus():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("corpus")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def sample(corpus):
    return corpus.Sample(DATA)


def test_a_corpus_of_the_samples_size_is_like_it(corpus, sample):
    for row in corpus.fit(sample)["rows"]:
        assert row["made"] == pytest.approx(row["real"], rel=0.3, abs=1.5), row["what"]


def test_ranks_are_drawn_by_their_law_and_the_vocabulary_grows_by_heaps(corpus):
    law = corpus.RankLaw(shift=2.0, head=1.0, bend=3000.0, tail=1.7)
    ranks = law.draw(np.random.default_rng(0), 2_000_000)
    shares = np.bincount(ranks[ranks <= 20], minlength=21)[1:] / len(ranks)
    assert shares == pytest.approx(law.table[:20], rel=0.02)
    beyond = law.table[-1] * corpus.TABLE / (law.tail - 1)
    assert np.mean(ranks > corpus.TABLE) == pytest.approx(beyond, rel=0.02)
    assert len(np.unique(ranks)) == pytest.approx(law.vocabulary(len(ranks))[0], rel=0.02)
    small, large = law.vocabulary([1e9, 1e10])
    assert np.log10(large / small) == pytest.approx(1 / law.tail, abs=0.01)


def test_what_is_written(corpus, sample, tmp_path):
    made = corpus.write_corpus(sample, tmp_path / "a.jsonl", 20_500)
    documents = read_corpus(tmp_path / "a.jsonl")
    assert len(documents) == 20_500 and made["hidden"] == len(sample.documents) + 725
    found = {document.id: document for document in documents}
    assert len(found) == 20_500
    assert {f"real-{d.id}" for d in sample.documents} <= found.keys()
    for question in sample.questions:
        if question.source in corpus.SINGLE:
            planted = found[corpus.planted_id(question)]
            assert question.answers[0] in planted.text
            assert set(corpus.rarest(sample, question, 4)) <= set(words(planted.text))
    real = [i for i, document in enumerate(documents) if document.id.startswith("real")]
    assert np.diff(real).max() < 20 and max(real) > 20_400  # spread over the whole
    corpus.write_corpus(sample, tmp_path / "b.jsonl", 20_500)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


@pytest.mark.slow
def test_the_phases_of_a_size_are_measured_apart(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/retrieval.py", "--data", DATA, "--passages", "2000"]
    command += ["--scratch", tmp_path / "scratch", "--out", tmp_path / "out", "--phases"]
    for phases in (["killed", "build"], ["search", "serve", "bm25s_search", "bm25s_build"]):
        subprocess.run([*command, *phases], check=True, capture_output=True)
    found = json.loads((tmp_path / "out/retrieval.json").read_text())["sizes"]["2000"]
    assert found["build"]["documents"] == 2000 and found["build"]["disk_gib_peak"] > 0
    assert found["killed"].keys() >= {"seconds_until", "left_gib", "removed_after_seconds"}
    assert found["bm25s_search"]["same_scores"] == found["search"]["questions"] == 1325
    assert found["bm25s_build"]["postings"] == found["build"]["postings"]
    assert list(found["serve"]["clients"]) == ["1", "4", "16"]
    assert "| 2000 " in (tmp_path / "out/retrieval.md").read_text()
