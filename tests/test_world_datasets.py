"""Records from JSONL, JSON, Parquet, Arrow, saved folders, and folders laid out like sets of the hub."""

import json
import logging

import datasets
import pytest
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetNotFoundError

from stppo.world.datasets import HUB, Reading, Records, locate, read_records
from stppo.world.records import BENCHMARKS
from tests.sample_data import DATA, real_data


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def nq(*answers, start=0):
    return [{"question": f"q{i}?", "answer": [answer]} for i, answer in enumerate(answers, start)]


def texts(questions):
    return [question.text for question in questions]


# ---- one set of questions from every kind of file ----


@real_data
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_real_records_are_the_same_questions_in_every_format(tmp_path, benchmark, streaming):
    source = DATA / benchmark / "records.jsonl"
    records = [json.loads(line) for line in source.read_text().splitlines()]
    wanted = read_records(benchmark, source)
    table = Dataset.from_list(records, on_mixed_types="use_json")
    table.to_parquet(tmp_path / "records.parquet")
    table.save_to_disk(tmp_path / "saved")
    DatasetDict(train=table.select([0]), validation=table).save_to_disk(tmp_path / "dict")
    (tmp_path / "records.json").write_text(json.dumps(records, indent=1))
    write(tmp_path / "hub" / "dev.jsonl", *records)
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    for place in (
        arrow,
        *(tmp_path / n for n in ("records.parquet", "saved", "dict", "records.json", "hub")),
    ):
        assert read_records(benchmark, place, "test", Reading(streaming=streaming)) == wanted, place
    assert read_records(benchmark, tmp_path / "dict", "train") == wanted[:1]


def flashrag_metadata(benchmark, record):
    """What FlashRAG keeps of a real record besides question and answers."""
    metadata = {}
    if benchmark in ("hotpotqa", "2wikimultihopqa"):
        sentences = "sentences" if benchmark == "hotpotqa" else "content"
        context, facts = record["context"], record["supporting_facts"]
        metadata = {
            "context": {"title": [t for t, _ in context], sentences: [s for _, s in context]},
            "supporting_facts": {"title": [t for t, _ in facts], "sent_id": [i for _, i in facts]},
        }
    elif benchmark == "musique":
        supporting = [p for p in record["paragraphs"] if p["is_supporting"]]
        steps = [{"question": "", "support_paragraph": paragraph} for paragraph in supporting]
        metadata = {"answerable": True, "question_decomposition": steps}
    return metadata


@pytest.fixture
def hub(tmp_path):
    """A folder laid out like FlashRAG's set on the hub, with the real records; it is read as the hub's files are."""
    lines = ["---", "configs:"]
    for benchmark in BENCHMARKS:
        if benchmark == "medqa":
            continue
        split = HUB[benchmark][0].test
        lines += [f"- config_name: {benchmark}", "  data_files:"]
        for name in dict.fromkeys(["train", split]):
            lines += [f"  - split: {name}", f"    path: {benchmark}/{name}.jsonl"]
        questions = read_records(benchmark, DATA / benchmark / "records.jsonl")
        raw = [json.loads(line) for line in (DATA / benchmark / "records.jsonl").read_text().splitlines()]
        records = [
            {
                "id": q.id,
                "question": q.text,
                "golden_answers": list(q.answers),
                "metadata": flashrag_metadata(benchmark, record),
            }
            for q, record in zip(questions, raw, strict=True)
        ]
        if not any(record["metadata"] for record in records):
            for record in records:
                del record["metadata"]
        write(tmp_path / "hub" / benchmark / "train.jsonl", *records[:20])
        write(tmp_path / "hub" / benchmark / f"{split}.jsonl", *records)
    (tmp_path / "hub" / "README.md").write_text("\n".join([*lines, "---", ""]))
    return tmp_path / "hub"


@real_data
def test_flashrag_and_original_schemas_give_the_same_questions(hub):
    for benchmark in BENCHMARKS:
        if benchmark == "medqa":
            continue
        original = read_records(benchmark, DATA / benchmark / "records.jsonl")
        for streaming in (False, True):
            assert read_records(benchmark, hub, "test", Reading(streaming=streaming)) == original, benchmark
        assert read_records(benchmark, hub, "train") == original[:20]
        found = locate(benchmark, hub)
        assert (found.config, found.train, found.test) == (benchmark, "train", HUB[benchmark][0].test)


def test_dates_that_a_json_column_turns_into_time_stamps_are_read_back(tmp_path):
    answers = ["1999-01-01", "2001-12-31T10:30:00"]
    rows = [{"question": f"q{i}?", "golden_answers": [answer]} for i, answer in enumerate(answers)]
    for row in rows:
        write(tmp_path / row["question"][:2] / "test.jsonl", row)
        (q,) = read_records("nq", tmp_path / row["question"][:2])
        assert q.answers == tuple(row["golden_answers"])


# ---- which split is what ----


@pytest.mark.parametrize(
    ("benchmark", "names", "train", "test"),
    [
        ("nq", ["train", "dev", "test"], "train", "test"),
        ("hotpotqa", ["train", "dev", "test"], "train", "dev"),  # no answers are published for its test split
        ("musique", ["train", "validation"], "train", "validation"),
        ("nq", ["train", "validation", "dev"], "train", "dev"),
        ("bamboogle", ["test"], "test", "test"),
        ("nq", ["train"], "train", "train"),
    ],
)
def test_splits_of_a_folder(tmp_path, benchmark, names, train, test):
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    found = locate(benchmark, tmp_path / "dict")
    assert (found.train, found.test, found.is_pool) == (train, test, train == test)
    assert locate("nq", write(tmp_path / "x.jsonl", *nq("a"))) == Records(
        "nq", str(tmp_path / "x.jsonl"), None
    )


def test_names_of_the_hub_bring_their_configuration(monkeypatch):
    asked = []

    def splits(name, config):
        asked.append((name, config))
        return ["train", "validation", "test"]

    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["default"])
    monkeypatch.setattr(datasets, "get_dataset_split_names", splits)
    assert locate("triviaqa").test == "test"
    assert locate("triviaqa", "mandarjoshi/trivia_qa").test == "validation"
    assert locate("triviaqa", "mandarjoshi/trivia_qa:rc").config == "rc"
    assert locate("medqa", "someone/medqa").test == "test"
    assert asked == [
        ("RUC-NLPIR/FlashRAG_datasets", "triviaqa"),
        ("mandarjoshi/trivia_qa", "rc.nocontext"),
        ("mandarjoshi/trivia_qa", "rc"),
        ("someone/medqa", "default"),
    ]


# ---- samples ----


@pytest.mark.parametrize("streaming", [False, True])
def test_a_limit_takes_a_seeded_sample(tmp_path, streaming):
    rows = nq(*map(str, range(50)))
    path = write(tmp_path / "a.jsonl", *rows)
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")

    def read(place, **options):
        return read_records("nq", place, "test", Reading(streaming=streaming, **options))

    sample = read(path, limit=10, seed=1)
    assert len(set(texts(sample))) == 10 and texts(sample) != texts(read(path))[:10]
    assert read(path, limit=10, seed=1) == sample != read(path, limit=10, seed=2)
    assert all(q.id == f"nq-{int(q.text[1:-1]) + 1}" for q in sample)  # numbered as in the file
    assert read(path, limit=99, seed=1) != read(path) and len(read(path, limit=99)) == 50
    near = read(path, limit=10, seed=1, shuffle_buffer=5)
    assert (max(int(q.text[1:-1]) for q in near) < 15) == streaming  # nothing further on is read
    assert texts(read(tmp_path / "a.parquet", limit=10, seed=1)) == texts(sample)


def test_a_limit_draws_from_all_records(tmp_path, caplog):
    """Also where a file is sorted, or one source comes after the other."""
    path = write(tmp_path / "sorted.jsonl", *nq(*["first"] * 11_000, *["last"] * 1_000))

    def last(**options):
        return sum(
            q.answers == ("last",) for q in read_records("nq", path, "test", Reading(limit=400, **options))
        )

    found = [last(seed=seed) for seed in range(3)]
    assert len(set(found)) > 1
    assert all(11 <= n <= 58 for n in found), "of 400 draws at 1/12, four standard deviations about 33"
    with caplog.at_level("INFO"):
        assert last(streaming=True) < 11
    assert "draws from the first records alone" in caplog.text


def test_streaming_reads_no_further_than_it_must(tmp_path):
    path = write(tmp_path / "a.jsonl", *nq(*map(str, range(20))))
    path.write_text(path.read_text() + "no JSON\n")
    near = Reading(streaming=True, limit=5, shuffle_buffer=1)
    assert len(read_records("nq", path, "test", near)) == 5
    with pytest.raises(ValueError, match="line 21: not valid JSON"):
        read_records("nq", path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("limit", 0), ("shuffle_buffer", 0), ("seed", -1), ("unanswerable", "keep"), ("no_answer", "keep")],
)
def test_reading_names_the_wrong_field(field, value):
    with pytest.raises(ValueError, match=field):
        Reading(**{field: value})


# ---- records that cannot be scored ----

UNANSWERABLE = {
    "id": "m0",
    "question": "q?",
    "answer": "x",
    "answer_aliases": [],
    "paragraphs": [],
    "answerable": False,
}


def test_unanswerable_questions_are_left_out_and_counted(tmp_path, caplog):
    path = write(
        tmp_path / "a.jsonl", UNANSWERABLE, UNANSWERABLE | {"id": "m1", "answerable": True}, UNANSWERABLE
    )
    with caplog.at_level(logging.WARNING):
        assert [q.id for q in read_records("musique", path)] == ["m1"]
    assert f"{path}: left out 2 of 3 records, marked as unanswerable" in caplog.text
    with pytest.raises(
        ValueError, match=f"^{path} record 1: question m0: marked .*; unanswerable=skip leaves it out$"
    ):
        read_records("musique", path, "test", Reading(unanswerable="error"))


def test_records_without_gold_answer_are_named_or_left_out_and_counted(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", *nq("a"), {"question": "q", "answer": []})
    with pytest.raises(
        ValueError, match=f"^{path} record 2: question nq-2: no answer; no_answer=skip leaves it out$"
    ):
        read_records("nq", path)
    with caplog.at_level(logging.WARNING):
        assert texts(read_records("nq", path, "test", Reading(no_answer="skip"))) == ["q0?"]
    assert f"{path}: left out 1 of 2 records, without gold answer" in caplog.text
    with pytest.raises(ValueError, match="b.jsonl: no records but .*'without gold answer': 1"):
        read_records(
            "nq",
            write(tmp_path / "b.jsonl", {"question": "q", "answer": []}),
            "test",
            Reading(no_answer="skip"),
        )


# ---- files that are wrong ----


@pytest.mark.parametrize(("benchmark", "record"), [("nq", {"question": "q?"}), ("hotpotqa", nq("a")[0])])
def test_a_record_of_another_kind_is_named_with_its_number(tmp_path, benchmark, record):
    path = write(tmp_path / "records.jsonl", record)
    with pytest.raises(ValueError, match=f"^{path} record 1: not a {benchmark} record: .*question") as error:
        read_records(benchmark, path)
    assert "\n" not in str(error.value)


def test_truncated_files_are_named_with_their_line(tmp_path):
    cut = write(tmp_path / "a.jsonl", *nq("a", "b"))
    cut.write_text(cut.read_text()[:-20])
    with pytest.raises(ValueError, match=f"^{cut} line 2: not valid JSON .*column") as error:
        read_records("nq", cut)
    assert "\n" not in str(error.value)
    folder = tmp_path / "folder"
    folder.mkdir()
    cut.rename(folder / "train.jsonl")
    with pytest.raises(ValueError, match=f"^{folder}/train.jsonl line 2: not valid JSON"):
        read_records("nq", folder)
    whole = tmp_path / "a.json"
    whole.write_text(json.dumps(nq("a", "b"), indent=1)[:-12])
    with pytest.raises(ValueError, match=f"^{whole} line 11: not valid JSON"):
        read_records("nq", whole)
    lines = write(tmp_path / "lines.json", *nq("a", "b"))  # JSONL by another name
    assert len(read_records("nq", lines)) == 2


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_damaged_table_is_named(tmp_path, kind, streaming):
    table, path = Dataset.from_list(nq(*"abcdef")), tmp_path / f"a.{kind}"
    if kind == "parquet":
        table.to_parquet(path)
    else:
        table.save_to_disk(tmp_path / "saved")
        path.write_bytes(next((tmp_path / "saved").glob("*.arrow")).read_bytes())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"^{path}: cannot be read .*cut off.*get it again$") as error:
        read_records("nq", path, "test", Reading(streaming=streaming))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", "", "a.jsonl: no records$"),
        ("a.json", "[]", "a.json: no records$"),
        ("a.json", "[1]", "a.json: expected a list of JSON objects"),
        (
            "a.csv",
            "question,answer",
            "/a.csv: records are read from .jsonl, .json, .parquet, .arrow, or a folder$",
        ),
    ],
)
def test_files_without_records_are_refused(tmp_path, name, content, problem):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=problem):
        read_records("nq", tmp_path / name)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_file_in_another_encoding_is_named_and_a_byte_order_mark_is_passed_over(tmp_path, name):
    lines = [json.dumps(record, ensure_ascii=False) for record in nq("ä", "b")]
    text = f"[{', '.join(lines)}]" if name == "a.json" else "\n".join(lines)
    path = tmp_path / name
    for encoding in ("latin-1", "utf-16"):
        path.write_bytes(text.encode(encoding))
        with pytest.raises(ValueError, match=f"^{path}.*: not UTF-8 text$"):
            read_records("nq", path)
    path.write_bytes(text.encode("utf-8-sig"))
    assert [question.answers for question in read_records("nq", path)] == [("ä",), ("b",)]


@pytest.mark.parametrize("place", [["a.jsonl", "b.jsonl"], 5])
def test_a_place_that_is_no_text_is_named(place):
    with pytest.raises(ValueError, match=r"^records must be a place or \{nq: place\}, got"):
        read_records("nq", place)


def test_an_unknown_benchmark_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match="benchmark must be one of nq, .*2wiki_single_hop, got 'squad'"):
        read_records("squad", tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path}: cannot be read"):
        read_records("nq", tmp_path)


@pytest.mark.parametrize("place", ["nowhere.jsonl", "/no/where", "./no", "no/such/folder", "folder"])
def test_a_place_that_is_neither_file_nor_name_is_refused(place):
    with pytest.raises(FileNotFoundError, match=f"^records: no file {place} .a name on the hub has the form"):
        locate("nq", place)


# ---- the hub out of reach ----


def advice(name, benchmark):
    return f"{name} --repo-type dataset --local-dir DIR` .*gated.*hf auth login.*world.records={{{benchmark}: DIR}}, beside"


@pytest.mark.parametrize(
    ("place", "name"), [(None, "RUC-NLPIR/FlashRAG_datasets"), ("someone/nq", "someone/nq")]
)
def test_without_network_one_line_says_how_to_get_the_set(monkeypatch, place, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=f"^{name}: nq cannot be read.*{advice(name, 'nq')}") as error:
        read_records("nq", place)
    assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match=advice("framolfese/2WikiMultihopQA", "2wikimultihopqa")):
        read_records("2wiki_single_hop")


@pytest.mark.parametrize(
    "raised", [DatasetNotFoundError("Dataset 'a/b' is a gated dataset on the Hub.\nVisit."), OSError("reset")]
)
def test_a_gated_set_and_a_lost_connection_say_so(monkeypatch, raised):
    def fail(*args, **kwargs):
        raise raised

    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["default"])
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["test"])
    monkeypatch.setattr(datasets, "load_dataset", fail)
    problem = str(raised).splitlines()[0]
    with pytest.raises(FileNotFoundError, match=f"^a/b: .*{problem}.*{advice('a/b', 'medqa')}") as error:
        read_records("medqa", "a/b")
    assert "\n" not in str(error.value)
