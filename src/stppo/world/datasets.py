"""Benchmark records by `datasets`: from the hub, a folder, or a JSONL, JSON, Parquet or Arrow file."""

import json
import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stppo.checks import one_of, whole_number
from stppo.files import parse_json
from stppo.retrieval.documents import read_jsonl
from stppo.world.protocol import Question
from stppo.world.records import BENCHMARKS, SCHEMAS, NoGoldAnswer, Unanswerable, context_of
from stppo.world.single_hop import SINGLE_HOP, Asked

if TYPE_CHECKING:
    from datasets import IterableDataset

log = logging.getLogger(__name__)

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
FILES = (".jsonl", ".json", ".parquet", ".arrow")
_SKIP_OR_ERROR = ("skip", "error")


@dataclass(frozen=True)
class HubSet:
    """A data set of the hub: name, configuration, and the split that has published answers to evaluate on."""

    name: str
    config: str | None
    test: str


# The first of each is the default: FlashRAG's copies, which Search-R1 uses; then the original.
HUB: dict[str, tuple[HubSet, ...]] = {
    "nq": (
        HubSet(FLASHRAG, "nq", "test"),
        HubSet("google-research-datasets/nq_open", "nq_open", "validation"),
    ),
    "triviaqa": (
        HubSet(FLASHRAG, "triviaqa", "test"),
        HubSet("mandarjoshi/trivia_qa", "rc.nocontext", "validation"),
    ),
    "popqa": (HubSet(FLASHRAG, "popqa", "test"), HubSet("akariasai/PopQA", None, "test")),
    "hotpotqa": (
        HubSet(FLASHRAG, "hotpotqa", "dev"),
        HubSet("hotpotqa/hotpot_qa", "distractor", "validation"),
    ),
    "2wikimultihopqa": (
        HubSet(FLASHRAG, "2wikimultihopqa", "dev"),
        HubSet("framolfese/2WikiMultihopQA", None, "validation"),
    ),
    "musique": (HubSet(FLASHRAG, "musique", "dev"), HubSet("dgslibisey/MuSiQue", None, "validation")),
    "bamboogle": (HubSet(FLASHRAG, "bamboogle", "test"), HubSet("chiayewken/bamboogle", None, "test")),
    "medqa": (HubSet("GBaker/MedQA-USMLE-4-options", None, "test"),),
    "nq_hotpotqa": (HubSet("PeterJinGo/nq_hotpotqa_train", None, "test"),),
}
_UNPUBLISHED_TEST = ("hotpotqa", "2wikimultihopqa", "musique")  # their test splits have no answers


@dataclass(frozen=True)
class Reading:
    """How records are read.

    streaming: read records as they are needed instead of downloading and caching a whole hub set or Parquet
    file first.
    limit: take this many records, drawn with `seed` from all of them, so that several sources keep their
    proportion; with streaming from the first ones alone, `shuffle_buffer` at a time, and a line of the log
    says how far that reached. None takes all, in their order.
    unanswerable: what to do with questions marked so; no_answer: with records without gold answer. "skip"
    leaves them out and logs their number."""

    streaming: bool = False
    limit: int | None = None
    seed: int = 0
    shuffle_buffer: int = 10_000
    unanswerable: str = "skip"
    no_answer: str = "error"

    def __post_init__(self) -> None:
        if self.limit is not None:
            whole_number(self, "limit")
        whole_number(self, "shuffle_buffer")
        whole_number(self, "seed", at_least=0)
        one_of(self, "unanswerable", _SKIP_OR_ERROR)
        one_of(self, "no_answer", _SKIP_OR_ERROR)


@dataclass(frozen=True)
class Records:
    """Where a benchmark's records are: a local file or folder, or a set of the hub, and the splits for each
    use.

    Equal splits (None in a file) mean one pool, which whoever both trains and evaluates on it must divide.
    """

    benchmark: str
    path: str
    config: str | None = None
    train: str | None = None
    test: str | None = None

    @property
    def is_pool(self) -> bool:
        return self.train == self.test


def check_place(benchmark: str, place: str | Path | None) -> None:
    """ValueError for an unknown benchmark, FileNotFoundError for a place that is neither local nor a name on
    the hub."""
    if benchmark not in SCHEMAS and benchmark not in SINGLE_HOP:
        raise ValueError(
            f"benchmark must be one of {', '.join((*BENCHMARKS, *SINGLE_HOP))}, got {benchmark!r}"
        )
    if place is None:
        return
    if not isinstance(place, str | Path):
        raise ValueError(
            f"records must be a place or {{{benchmark}: place}}, got {place!r}; of several files make one, "
            "or a folder"
        )
    if Path(place).exists():
        if Path(place).is_file() and Path(place).suffix not in FILES:
            raise ValueError(f"{place}: records are read from {', '.join(FILES)}, or a folder")
        return
    name = str(place)
    if Path(name).suffix in FILES or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise FileNotFoundError(
            f"records: no file {name} (a name on the hub has the form OWNER/NAME or OWNER/NAME:CONFIG)"
        )


def hub_sets(benchmark: str) -> tuple[HubSet, ...]:
    """The sets of the hub that hold a benchmark, its default first. What is derived from a benchmark's
    records takes the original ones, which hold every field."""
    if benchmark in SINGLE_HOP:
        return HUB[SINGLE_HOP[benchmark]][::-1]
    return HUB[benchmark]


def locate(benchmark: str, place: str | Path | None = None) -> Records:
    """Find out what is at `place`: a file, a folder, OWNER/NAME or OWNER/NAME:CONFIG of the hub, None for its
    default.

    A folder is what `save_to_disk` writes, or one that `load_dataset` reads, such as a downloaded hub set.
    Errors as in `check_place`; where the hub cannot be read, FileNotFoundError says how to get the set."""
    check_place(benchmark, place)
    path, config, known = str(place or ""), None, None
    if not place:
        known = hub_sets(benchmark)[0]
        path, config = known.name, known.config
    elif Path(path).is_file():
        return Records(benchmark, path)
    elif not Path(path).is_dir():
        path, _, config = path.partition(":")
        known = next((hub for hub in hub_sets(benchmark) if hub.name == path), None)
        config = config or (known.config if known else None)
    with _explained(benchmark, path):
        config, splits = _splits(benchmark, path, config)
    if known and known.test in splits:
        test = known.test
    else:
        held_out = ["test", "dev", "validation"]
        own = SINGLE_HOP.get(benchmark, benchmark)
        preferred = held_out[::-1] if own in _UNPUBLISHED_TEST else held_out
        test = next((name for name in preferred if name in splits), splits[0])
    return Records(benchmark, path, config, "train" if "train" in splits else test, test)


def _splits(benchmark: str, path: str, config: str | None) -> tuple[str | None, list[str]]:
    """The configuration to read and its splits."""
    from datasets import get_dataset_config_names, get_dataset_split_names

    saved = Path(path, "dataset_dict.json")
    if saved.is_file():
        return None, json.loads(saved.read_text())["splits"]
    if Path(path, "state.json").is_file():
        return None, ["all"]
    if config is None:
        names = get_dataset_config_names(path)
        own = SINGLE_HOP.get(benchmark, benchmark)
        config = own if own in names else names[0]
    return config, get_dataset_split_names(path, config)


def read_records(
    benchmark: str,
    place: str | Path | None = None,
    split: str = "test",
    reading: Reading = Reading(),
) -> list[Question]:
    """The questions of a benchmark, in its own schema or FlashRAG's, for the use "train" or "test".

    place: as in `locate`; a file has no splits and gives all its records. ValueError names file and line of a
    line that is not JSON, file and record (counted from 1) of one that is not the benchmark's or lacks
    question or answer, and a file that is damaged; FileNotFoundError says how to get a missing set."""
    return read_questions(locate(benchmark, place), split, reading)


def read_questions(records: Records, split: str, reading: Reading) -> list[Question]:
    """`read_records` of what `locate` found."""
    asked, left_out = Asked(), Counter()
    add = asked.parts if records.benchmark in SINGLE_HOP else asked.whole
    count = 0
    for number, record in _read(records, split, reading):
        try:
            add(record, records.benchmark, number)
            count += 1
        except Unanswerable as error:
            left_out["marked as unanswerable"] += 1
            if reading.unanswerable == "error":
                raise ValueError(
                    f"{records.path} record {number}: {error}; unanswerable=skip leaves it out"
                ) from error
        except NoGoldAnswer as error:
            left_out["without gold answer"] += 1
            if reading.no_answer == "error":
                raise ValueError(
                    f"{records.path} record {number}: {error}; no_answer=skip leaves it out"
                ) from error
        except ValueError as error:
            raise ValueError(f"{records.path} record {number}: {error}") from error
    for reason, n in left_out.items():
        log.warning("%s: left out %d of %d records, %s", records.path, n, n + count, reason)
    questions = asked.questions
    if records.benchmark in SINGLE_HOP:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(asked.dropped.items())) or "none"
        log.info(
            "%s: %d records gave %d single-hop questions; left out: %s",
            records.path,
            count,
            len(questions),
            reasons,
        )
    if not questions:
        raise ValueError(f"{records.path}: no records" + (f" but {dict(left_out)}" if left_out else ""))
    return questions


def read_passages(records: Records, split: str, reading: Reading) -> dict[tuple[str, str], None]:
    """The (title, text) of all paragraphs that come with the records which `read_questions` reads, each once,
    in order.

    ValueError names the record whose paragraphs cannot be read.
    """
    passages: dict[tuple[str, str], None] = {}
    for number, record in _read(records, split, reading):
        try:
            passages.update(dict.fromkeys(context_of(record)))
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
            raise ValueError(
                f"{records.path} record {number}: its paragraphs cannot be read ({type(error).__name__}: "
                f"{error})"
            ) from error
    return passages


def _read(records: Records, split: str, reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, record) in the order of `Reading`."""
    with _explained(records.benchmark, records.path):
        stream = _open(records, split, reading).map(_numbered, with_indices=True)
        if reading.limit is not None:
            stream = _near(stream, reading) if reading.streaming else _sample(stream, reading)
        furthest = 0
        for row in stream:
            furthest = max(furthest, row["number"])
            yield row["number"], row["record"]
        if reading.limit is not None and reading.streaming:
            log.info(
                "%s: a limit with streaming draws from the first records alone, here %d; streaming=false "
                "draws from all",
                records.path,
                furthest,
            )


def _sample(stream: "IterableDataset", reading: Reading) -> list[dict[str, Any]]:
    """`limit` rows of the whole stream in random order, every set of rows as likely (reservoir sampling,
    Vitter 1985)."""
    rng, kept = random.Random(reading.seed), []
    for n, row in enumerate(stream):
        if n < reading.limit:
            kept.append(row)
        elif (place := rng.randrange(n + 1)) < reading.limit:
            kept[place] = row
    rng.shuffle(kept)
    return kept


def _near(stream: "IterableDataset", reading: Reading) -> "IterableDataset":
    """`limit` rows of the stream's beginning: what lies behind is not read."""
    return stream.shuffle(seed=reading.seed, buffer_size=reading.shuffle_buffer).take(reading.limit)


def _numbered(record: dict[str, Any], index: int) -> dict[str, Any]:
    return {"number": index + 1, "record": record}


def _open(records: Records, split: str, reading: Reading) -> "IterableDataset":
    from datasets import Dataset, IterableDataset, load_dataset, load_from_disk

    path = Path(records.path)
    name = records.train if split == "train" else records.test
    if path.suffix in (".jsonl", ".json") and path.is_file():
        # Not load_dataset("json"): it names no line of a broken file and turns dates such as "1999-01-01"
        # into time stamps.
        return IterableDataset.from_generator(_json_records, gen_kwargs={"path": str(path)})
    if path.suffix == ".parquet" and path.is_file():
        found = load_dataset("parquet", data_files=str(path), split="train", streaming=reading.streaming)
    elif path.suffix == ".arrow" and path.is_file():
        found = Dataset.from_file(str(path))
    elif (path / "state.json").is_file():
        found = load_from_disk(str(path))
    elif (path / "dataset_dict.json").is_file():
        found = load_from_disk(str(path / name))
    else:
        found = load_dataset(records.path, records.config, split=name, streaming=reading.streaming)
    return found.to_iterable_dataset() if isinstance(found, Dataset) else found


@contextmanager
def _explained(benchmark: str, path: str) -> Iterator[None]:
    """Turns what `datasets` raises into one line that says what to do; what JSON files raise is that
    already."""
    from datasets.exceptions import DatasetsError
    from httpx import HTTPError

    try:
        yield
    except (DatasetsError, HTTPError, OSError, RuntimeError, ValueError, LookupError) as error:
        local = Path(path)
        if local.suffix in (".jsonl", ".json"):
            raise
        problem = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
        if local.exists():
            for file in local.rglob("*.jsonl"):
                for _ in read_jsonl(file):  # names the line where one was cut off
                    pass
            raise ValueError(
                f"{path}: cannot be read ({problem}); if it was cut off on its way, get it again"
            ) from error
        raise FileNotFoundError(
            f"{path}: {benchmark} cannot be read from the hub ({problem}). Get it where there is network "
            f"with `hf download {path} --repo-type dataset --local-dir DIR` (a gated set asks for `hf auth "
            f"login` first), then set world.records={{{SINGLE_HOP.get(benchmark, benchmark)}: DIR}}, beside "
            "those that it has"
        ) from error


def _json_records(path: str) -> Iterable[dict[str, Any]]:
    """Objects of JSONL, of one JSON array, or of TriviaQA's release, an object whose field `Data` is an
    array."""
    if path.endswith(".json"):
        try:
            text = Path(path).read_bytes().decode("utf-8-sig")
            whole = parse_json(text)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text") from error
        except json.JSONDecodeError as error:
            if text.lstrip().startswith("["):
                raise ValueError(
                    f"{path} line {error.lineno}: not valid JSON ({error.msg}, column {error.colno})"
                ) from error
        else:
            whole = whole.get("Data", [whole]) if isinstance(whole, dict) else whole
            if not (isinstance(whole, list) and all(isinstance(record, dict) for record in whole)):
                raise ValueError(f"{path}: expected a list of JSON objects")
            yield from whole
            return
    yield from (record for _, record in read_jsonl(path))
