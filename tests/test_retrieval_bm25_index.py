"""The BM25 index on disk: the same numbers as in memory, whatever the block sizes; damage and moved files are named."""

import json
import random
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import bm25s
import numpy as np
import pytest

from stppo.retrieval import bm25_search
from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.bm25_index import Vocabulary, build_bm25, open_bm25
from stppo.retrieval.documents import Document, read_corpus
from stppo.retrieval.index_retriever import IndexRetriever


def write_corpus(path, documents):
    lines = [json.dumps({"id": d.id, "contents": d.contents}, ensure_ascii=False) for d in documents]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def documents():
    """400 documents of words of all lengths and alphabets; every tenth has no word at all."""
    rng = random.Random(0)
    letters = "abcdeäöλж語0"
    vocabulary = ["".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(600)]
    weights = [1 / (rank + 1) for rank in range(len(vocabulary))]
    return [
        Document(
            f"d{i}",
            "!" if i % 10 == 3 else f"t{i % 7}",
            " ".join(rng.choices(vocabulary, weights, k=i % 10 * 5)),
        )
        if i % 10
        else Document(f"d{i}", "?", "...")
        for i in range(400)
    ]


@pytest.fixture(scope="module")
def corpus(documents, tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents)


@pytest.fixture(scope="module")
def index(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "bm25"
    build_bm25(corpus, folder)
    return folder


def queries(documents, n=100):
    rng = random.Random(1)
    texts = [
        " ".join(rng.sample(d.text.split() or ["x"], min(4, len(d.text.split()) or 1))) for d in documents
    ]
    return rng.sample(texts, n) + ["", "unknownword", "t3 t3 t4"]


@pytest.mark.parametrize(
    ("words_per_block", "postings_per_range"), [(10**6, 10**6), (300, 10**6), (10**6, 40), (900, 150)]
)
def test_arrays_are_those_of_bm25s_for_any_block_size(
    corpus, documents, tmp_path, words_per_block, postings_per_range
):
    made = build_bm25(
        corpus, tmp_path / "i", words_per_block=words_per_block, postings_per_range=postings_per_range
    )
    expected, found = BM25Retriever(documents)._postings, open_bm25(tmp_path / "i")._postings
    for name in ("data", "indices", "indptr", "maxima"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes(), name
    assert (made["documents"], made["postings"]) == (400, len(expected.data))
    assert [path.name for path in tmp_path.iterdir()] == ["i"]  # nothing of the work is left


def test_more_blocks_than_files_that_may_be_open(corpus, index, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(128, soft), hard))
    try:
        build_bm25(corpus, tmp_path / "i", words_per_block=10)  # four files for each of hundreds of blocks
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for path in index.iterdir():
        if path.suffix == ".npy":
            assert (tmp_path / "i" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("few", [0, 10_000], ids=["pruned", "all"])
def test_search_on_disk_is_search_in_memory(index, documents, few, monkeypatch):
    monkeypatch.setattr(bm25_search, "FEW_DOCUMENTS", few)
    asked = queries(documents)
    assert open_bm25(index).search(asked, 4) == BM25Retriever(documents).search(asked, 4)


def test_threads_search_at_once(index, documents, monkeypatch):
    """Each has its own place to add scores up, which the search before left empty."""
    monkeypatch.setattr(bm25_search, "FEW_DOCUMENTS", 0)
    asked, retriever = queries(documents) * 3, open_bm25(index)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: retriever.search([query], 4)[0], asked))
    assert found == BM25Retriever(documents).search(asked, 4)


def test_arrays_and_vocabulary_are_mapped_not_read(index):
    retriever = open_bm25(index)
    for array in (retriever._postings.data, retriever._postings.indices, retriever._postings.maxima):
        while not isinstance(array, np.memmap):
            array = array.base  # AttributeError on None where the array is in memory
    assert bm25s.BM25.load(index, mmap=True, load_vocab=False).scores["num_docs"] == 400


def test_vocabulary_finds_each_word_and_no_other(tmp_path):
    ids = {word: 2 * i for i, word in enumerate(["b", "a", "ab", "ж", "語", "zz", "é"])}
    Vocabulary.write(tmp_path, ids)
    vocabulary = Vocabulary(tmp_path)
    assert {word: vocabulary.get(word) for word in ids} == ids
    assert [vocabulary.get(word) for word in ("", "0", "aa", "c", "zzz", "語語")] == [None] * 6


def test_passages_are_read_by_their_place_in_the_file(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    lines = ['{"id": 7, "contents": "\\"Ünë\\"\\nfirst"}', "", '{"id": 8, "contents": "Two\\nsecond\\nline"}']
    corpus.write_text("\r\n".join(lines) + "\n\n", encoding="utf-8")
    build_bm25(corpus, tmp_path / "i")
    found = open_bm25(tmp_path / "i").documents
    assert list(found) == [Document("7", "Ünë", "first"), Document("8", "Two", "second\nline")]


def test_a_passage_without_title_is_refused_or_gets_its_first_words(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        '{"id": "0", "contents": "\\"A\\"\\nb"}\n'
        '{"id": "1", "contents": "one two three four five six seven eight nine"}\n'
        '{"id": "2", "contents": "\\"\\"\\nsome text"}\n'
    )
    with pytest.raises(ValueError, match=r"corpus.jsonl line 2: no title .*untitled=first_words"):
        build_bm25(corpus, tmp_path / "i")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
    with pytest.raises(ValueError, match="line 2: no title"):
        read_corpus(corpus)
    build_bm25(corpus, tmp_path / "i", untitled="first_words")
    found = open_bm25(tmp_path / "i").documents
    assert list(found) == read_corpus(corpus, "first_words")
    assert [document.title for document in found] == [
        "A",
        "one two three four five six seven eight",
        "some text",
    ]
    assert found[1].text.endswith("eight nine") and found[2].text == "some text"


def test_no_index_is_made_where_one_is_or_of_nothing(corpus, index, tmp_path):
    with pytest.raises(FileExistsError, match="exists already"):
        build_bm25(corpus, index)
    blank = write_corpus(tmp_path / "blank.jsonl", [Document("0", "!", "...")])
    with pytest.raises(ValueError, match="blank.jsonl: corpus has no words"):
        build_bm25(blank, tmp_path / "i")
    assert not (tmp_path / "i").exists()


def test_a_disk_that_cannot_hold_the_index_is_told_before_the_work(corpus, index, tmp_path, monkeypatch):
    """Asked for is what is on the disk at once: the finished index and as much of work."""
    size = sum(path.stat().st_size for path in index.iterdir())
    usage = shutil.disk_usage(tmp_path)

    def free(n):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=n))

    free(size)
    with pytest.raises(OSError, match=r"needs about .* GiB there while it is made .*; make room or choose"):
        build_bm25(corpus, tmp_path / "i")
    assert not list(tmp_path.iterdir())
    free(3 * size)
    build_bm25(corpus, tmp_path / "i")


FULL = """
import shutil, sys
from stppo.retrieval.bm25_index import build_bm25
shutil.disk_usage = lambda _, usage=shutil.disk_usage("/"): usage._replace(free=2**40)
try:
    build_bm25(sys.argv[1], sys.argv[2])
except OSError as error:
    print(error.strerror)
"""


def test_a_disk_that_fills_up_while_the_index_is_written_is_told(tmp_path):
    """Not by SIGBUS, which writing to a mapped file brings, and which lets nobody clear away."""
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(5000)}" for _ in range(40)) for _ in range(3000)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", [Document(str(i), "t", t) for i, t in enumerate(texts)])
    small = tmp_path / "small"
    small.mkdir()
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=1300k tmpfs {small}"
    if not shutil.which("unshare") or subprocess.run([*mounted, mount], capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    build = f'{mount} && "$0" -c "$1" {corpus} {small}/i && ls -A {small}'
    found = subprocess.run([*mounted, build, sys.executable, FULL], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "No space left on device\n"), found.stderr


def test_what_a_killed_build_left_goes_with_the_next(corpus, tmp_path):
    (tmp_path / ".i.building" / "index").mkdir(parents=True)
    (tmp_path / ".i.building" / "0.terms.npy").write_bytes(b"half")
    (tmp_path / ".i.building.lock").touch()
    build_bm25(corpus, tmp_path / "i")
    assert [path.name for path in tmp_path.iterdir()] == ["i"]


@pytest.fixture
def own_index(documents, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    build_bm25(corpus, tmp_path / "i")
    return corpus, tmp_path / "i"


@pytest.mark.parametrize(
    "name",
    ["data.csc.index.npy", "words.txt", "word_ids.npy", "documents.npy", "maxima.npy", "params.index.json"],
)
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_index_is_named(own_index, name, damage):
    _, folder = own_index
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content[:-4] if damage == "cut" else content)
    with pytest.raises(ValueError, match=rf"{name} is missing or damaged; remove the folder and run"):
        open_bm25(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": {}}', '{"files": 5}', "[" * 100_000])
def test_a_damaged_manifest_is_named(own_index, content):
    _, folder = own_index
    (folder / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        open_bm25(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="no index; make one with `stppo retriever index`"):
        open_bm25(folder)


def test_a_corpus_that_moved_or_changed(own_index, documents, tmp_path):
    corpus, folder = own_index
    moved = corpus.rename(tmp_path / "moved.jsonl")
    with pytest.raises(FileNotFoundError, match=r"corpus .*corpus.jsonl is gone; say where it is"):
        open_bm25(folder)
    retriever = open_bm25(folder, moved)
    assert list(retriever.documents) == documents
    moved.write_bytes(moved.read_bytes().replace(b"d17", b"x17"))
    with pytest.raises(ValueError, match="moved.jsonl is not the corpus that"):
        open_bm25(folder, moved)
    moved.write_bytes(b" " * moved.stat().st_size)  # while it is open
    with pytest.raises(ValueError, match=r"entry 17 changed since it was indexed"):
        retriever.documents[17]


def test_config_opens_its_files_with_the_first_search_alone(own_index, documents):
    corpus, folder = own_index
    asked = queries(documents, 10)
    assert IndexRetriever(folder).search(asked, 3) == BM25Retriever(documents).search(asked, 3)
    (folder / "manifest.json").unlink()
    late = IndexRetriever(folder)
    with pytest.raises(FileNotFoundError, match="no index; make one"):
        late.search(["a"], 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "index is not given: set index=FOLDER"),
        ({"index": "nowhere"}, "index: no file or folder nowhere"),
        ({"index": ".", "corpus": "nowhere"}, "corpus: no file or folder nowhere"),
        ({"index": ".", "batch_size": 0}, "batch_size must be a whole number"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        IndexRetriever(**fields)
